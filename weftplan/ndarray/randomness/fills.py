"""Fill functions: one per random distribution.

``draw(generator, target, xp, *parameters)`` writes every element of ``target``. Parameters are numbers, or float64
arrays that broadcast to the shape of ``target``; ``generator`` is NumPy's or CuPy's. A parameter outside the
distribution's domain (a negative mean, for example) raises ValueError there.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from weftplan.support.array_types import ArrayModule, Generator, RawArray

Draw = Callable[..., None]


def _working(target: RawArray) -> type[np.float32] | type[np.float64]:
    """Return the dtype to draw for ``target``: generators draw float64 and float32, and float16 is converted."""
    return np.float64 if target.dtype == np.float64 else np.float32


def uniform(
    generator: Generator, target: RawArray, xp: ArrayModule, low: RawArray | float, high: RawArray | float
) -> None:
    """Fill ``target`` from the uniform distribution on [low, high)."""
    target[...] = generator.random(target.shape, dtype=_working(target))
    target *= high - low
    target += low


def normal(
    generator: Generator, target: RawArray, xp: ArrayModule, loc: RawArray | float, scale: RawArray | float
) -> None:
    """Fill ``target`` from the normal distribution with mean ``loc`` and standard deviation ``scale``."""
    target[...] = generator.standard_normal(target.shape, dtype=_working(target))
    target *= scale
    target += loc


def exponential(generator: Generator, target: RawArray, xp: ArrayModule, scale: RawArray | float) -> None:
    """Fill ``target`` from the exponential distribution with mean ``scale``."""
    target[...] = generator.standard_exponential(target.shape)
    target *= scale


def gamma(
    generator: Generator, target: RawArray, xp: ArrayModule, alpha: RawArray | float, beta: RawArray | float
) -> None:
    """Fill ``target`` from the gamma distribution with shape ``alpha`` and scale ``beta``."""
    target[...] = generator.standard_gamma(alpha, target.shape)
    target *= beta


def poisson(generator: Generator, target: RawArray, xp: ArrayModule, lam: RawArray | float) -> None:
    """Fill ``target`` from the Poisson distribution with mean ``lam``."""
    target[...] = generator.poisson(lam, target.shape)


def negative_binomial(
    generator: Generator, target: RawArray, xp: ArrayModule, k: RawArray | float, p: RawArray | float
) -> None:
    """Fill ``target`` with numbers of failures before ``k`` successes of probability ``p``.

    Such a number is Poisson distributed, with a mean that is gamma distributed.
    """
    target[...] = generator.poisson(generator.standard_gamma(k, target.shape) * ((1 - p) / p))


def generalized_negative_binomial(
    generator: Generator, target: RawArray, xp: ArrayModule, mu: RawArray | float, alpha: RawArray | float
) -> None:
    """Fill ``target`` from the negative binomial distribution with mean ``mu`` and variance mu + alpha mu².

    It is a Poisson distribution whose mean is gamma distributed; if alpha is 0, the mean is ``mu``.
    """
    spread = xp.maximum(alpha, 1e-300)  # 1 / alpha must be finite; the result is unused at elements with alpha 0
    means = generator.standard_gamma(1 / spread, target.shape) * (mu * alpha)
    target[...] = generator.poisson(xp.where(xp.asarray(alpha) == 0, mu, means))
