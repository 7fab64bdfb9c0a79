"""Statistical tests of ``mx.test_utils``: whether a generator draws from a given distribution.

A generator is a function of ``n`` that returns ``n`` samples. Any thread may call these functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from weftplan.errors import ParameterError
from weftplan.ndarray import NDArray
from weftplan.support.array_types import RawArray

Generator = Callable[[int], Any]
Bucket = float | tuple[float, float]


def _drawn(generator: Generator, nsamples: int) -> RawArray:
    samples = generator(nsamples)
    return samples.asnumpy() if isinstance(samples, NDArray) else np.asarray(samples)


def gen_buckets_probs_with_ppf(
    ppf: Callable[[float], float], nbuckets: int
) -> tuple[list[tuple[float, float]], list[float]]:
    """Return (ranges, probabilities): ``nbuckets`` ranges of equal probability, by the quantile function.

    >>> gen_buckets_probs_with_ppf(lambda p: 8 * p, 4)
    ([(0.0, 2.0), (2.0, 4.0), (4.0, 6.0), (6.0, 8.0)], [0.25, 0.25, 0.25, 0.25])
    """
    if nbuckets < 1:
        raise ParameterError(f"gen_buckets_probs_with_ppf: at least one bucket is needed, got {nbuckets}")
    edges = [float(ppf(k / nbuckets)) for k in range(nbuckets + 1)]
    return list(pairwise(edges)), [1.0 / nbuckets] * nbuckets


def mean_check(generator: Generator, mu: float, sigma: float, nsamples: int = 1000000) -> bool:
    """Return whether the mean of ``nsamples`` samples lies within three standard errors of ``mu``."""
    mean = float(_drawn(generator, nsamples).mean(dtype=np.float64))
    return bool(abs(mean - mu) < 3 * sigma / math.sqrt(nsamples))


def var_check(generator: Generator, sigma: float, nsamples: int = 1000000) -> bool:
    """Return whether the variance of ``nsamples`` samples lies within three standard errors of a normal variable's."""
    variance = float(_drawn(generator, nsamples).var(ddof=1, dtype=np.float64))
    return bool(abs(variance - sigma**2) < 3 * sigma**2 * math.sqrt(2 / (nsamples - 1)))


def chi_square_check(
    generator: Generator, buckets: Sequence[Bucket], probs: Sequence[float], nsamples: int = 1000000
) -> tuple[float, RawArray, RawArray]:
    """Return (p value, samples in each bucket, expected samples in each bucket) of Pearson's test.

    Args:
        buckets: ranges (from, to) in ascending order, or the values of a discrete distribution.
        probs: the probability of each bucket.

    Raises:
        ParameterError: unequal numbers of buckets and probabilities; unsorted or overlapping ranges; zero probability.
    """
    if len(buckets) != len(probs) or len(buckets) < 2:
        raise ParameterError(
            f"chi_square_check: {len(buckets)} buckets and {len(probs)} probabilities; give two or more"
        )
    expected = nsamples * np.asarray(probs, np.float64)
    if not (expected > 0).all():
        raise ParameterError(f"chi_square_check: every probability must be above 0, got {list(probs)}")
    samples = _drawn(generator, nsamples).reshape(-1)
    if isinstance(buckets[0], (list, tuple)):
        edges = np.array(buckets, np.float64).reshape(-1)
        if (np.diff(edges) < 0).any():
            raise ParameterError(f"chi_square_check: ranges must ascend and not overlap, got {list(buckets)}")
        bins = np.searchsorted(edges, samples, side="right")
        observed = np.bincount(bins[bins % 2 == 1] // 2, minlength=len(buckets))[: len(buckets)]
    else:
        observed = np.array([(samples == value).sum() for value in buckets])
    statistic = float(((observed - expected) ** 2 / expected).sum())
    return _upper_gamma((len(buckets) - 1) / 2, statistic / 2), observed, expected


def verify_generator(
    generator: Generator,
    buckets: Sequence[Bucket],
    probs: Sequence[float],
    nsamples: int = 1000000,
    nrepeat: int = 5,
    success_rate: float = 0.2,
    alpha: float = 0.05,
) -> list[float]:
    """Return the p values of ``nrepeat`` tests of :func:`chi_square_check`.

    Raises:
        AssertionError: fewer than ``success_rate`` of them are above ``alpha``.
    """
    results = [chi_square_check(generator, buckets, probs, nsamples) for _ in range(nrepeat)]
    values = [p for p, _, _ in results]
    if sum(p > alpha for p in values) < nrepeat * success_rate:
        worst = min(results, key=lambda result: result[0])
        raise AssertionError(
            f"verify_generator: p values {values}, of which at least {success_rate:.0%} should be above {alpha}; in "
            f"the worst test {worst[1].tolist()} samples were found in the buckets and {worst[2].tolist()} expected"
        )
    return values


def _upper_gamma(a: float, x: float) -> float:
    """Return the regularized upper incomplete gamma function: a series below a + 1, a continued fraction above.

    >>> round(_upper_gamma(0.5, 3.841458820694124 / 2), 6), round(_upper_gamma(5.0, 2.0), 6)
    (0.05, 0.947347)
    """
    if x <= 0:
        return 1.0
    factor = math.exp(a * math.log(x) - x - math.lgamma(a))
    if x < a + 1:
        term = total = 1 / a
        k = a
        while abs(term) > abs(total) * 1e-16:
            k += 1
            term *= x / k
            total += term
        return max(0.0, 1 - factor * total)
    least = 1e-300
    b = x + 1 - a
    c, d = 1 / least, 1 / b
    result = d
    for k in range(1, 10_000):
        step = -k * (k - a)
        b += 2
        d = 1 / ((step * d + b) or least)
        c = (b + step / c) or least
        result *= d * c
        if abs(d * c - 1) < 1e-16:
            break
    return factor * result
