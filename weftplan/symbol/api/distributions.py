"""``mx.sym.random``: one function per distribution, with numbers or symbols as parameters.

With symbols as parameters, each of their elements gives a block of ``shape``.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from weftplan.errors import DTypeError
from weftplan.support.array_types import DTypeLike, ShapeLike
from weftplan.symbol.api.functions import function
from weftplan.symbol.symbol import Symbol

Numbers = float | Symbol


def _draw(
    name: str, params: dict[str, object], shape: ShapeLike | None, dtype: DTypeLike | None, kwargs: dict[str, object]
) -> Symbol:
    """Apply ``_sample_<name>`` to symbols or ``_random_<name>`` to numbers."""
    symbols = [isinstance(value, Symbol) for value in params.values()]
    if any(symbols) and not all(symbols):
        raise DTypeError(f"random.{name}: {', '.join(params)} must all be symbols, or all numbers")
    options = {key: value for key, value in kwargs.items() if value is not None}
    if dtype is not None and dtype != "None":
        options["dtype"] = dtype
    if shape is not None and shape != ():
        options["shape"] = shape
    if all(symbols):
        return function(f"_sample_{name}")(*params.values(), **options)
    return function(f"_random_{name}")(**params, **options)


def uniform(
    low: Numbers = 0,
    high: Numbers = 1,
    shape: ShapeLike | None = None,
    dtype: DTypeLike | None = None,
    **kwargs: object,
) -> Symbol:
    """Uniform on [low, high)."""
    return _draw("uniform", {"low": low, "high": high}, shape, dtype, kwargs)


def normal(
    loc: Numbers = 0,
    scale: Numbers = 1,
    shape: ShapeLike | None = None,
    dtype: DTypeLike | None = None,
    **kwargs: object,
) -> Symbol:
    """Normal with mean ``loc`` and standard deviation ``scale``."""
    return _draw("normal", {"loc": loc, "scale": scale}, shape, dtype, kwargs)


def randn(
    *shape: int, loc: Numbers = 0, scale: Numbers = 1, dtype: DTypeLike | None = None, **kwargs: object
) -> Symbol:
    """:func:`normal` with the shape as arguments; ``data=symbol``: with the shape of a symbol."""
    if isinstance(kwargs.get("data"), Symbol):
        options = {key: value for key, value in kwargs.items() if value is not None}
        drawn = function("_random_normal_like")(loc=loc, scale=scale, **options)
        return drawn if dtype is None else function("Cast")(drawn, dtype=dtype)
    return normal(loc, scale, shape, dtype, **kwargs)


def gamma(
    alpha: Numbers = 1,
    beta: Numbers = 1,
    shape: ShapeLike | None = None,
    dtype: DTypeLike | None = None,
    **kwargs: object,
) -> Symbol:
    """Gamma with shape ``alpha`` and scale ``beta``."""
    return _draw("gamma", {"alpha": alpha, "beta": beta}, shape, dtype, kwargs)


def exponential(
    scale: Numbers = 1, shape: ShapeLike | None = None, dtype: DTypeLike | None = None, **kwargs: object
) -> Symbol:
    """Exponential with mean ``scale``; the operator takes the rate, as ``lam``."""
    rate = kwargs.pop("lam", None)
    return _draw("exponential", {"lam": 1.0 / scale if rate is None else rate}, shape, dtype, kwargs)


def poisson(
    lam: Numbers = 1, shape: ShapeLike | None = None, dtype: DTypeLike | None = None, **kwargs: object
) -> Symbol:
    """Poisson with mean ``lam``, as floats."""
    return _draw("poisson", {"lam": lam}, shape, dtype, kwargs)


def negative_binomial(
    k: Numbers = 1, p: Numbers = 1, shape: ShapeLike | None = None, dtype: DTypeLike | None = None, **kwargs: object
) -> Symbol:
    """Failures before ``k`` successes of probability ``p``, as floats."""
    return _draw("negative_binomial", {"k": k, "p": p}, shape, dtype, kwargs)


def generalized_negative_binomial(
    mu: Numbers = 1,
    alpha: Numbers = 1,
    shape: ShapeLike | None = None,
    dtype: DTypeLike | None = None,
    **kwargs: object,
) -> Symbol:
    """Negative binomial with mean ``mu`` and variance mu + alpha mu², as floats."""
    return _draw("generalized_negative_binomial", {"mu": mu, "alpha": alpha}, shape, dtype, kwargs)


def multinomial(
    data: Symbol, shape: ShapeLike | None = None, get_prob: bool = True, dtype: DTypeLike = "int32", **kwargs: object
) -> Symbol:
    """Indices drawn with the probabilities in the last axis of ``data``; with ``get_prob`` also their logarithms."""
    options = {} if shape in (None, ()) else {"shape": shape}
    return function("_sample_multinomial")(data, get_prob=get_prob, dtype=dtype, **options, **kwargs)


def shuffle(data: Symbol, **kwargs: object) -> Symbol:
    """``data`` with its rows in random order."""
    return function("_shuffle")(data, **kwargs)


def rand_zipfian(true_classes: Symbol, num_sampled: int, range_max: int) -> tuple[Symbol, Symbol, Symbol]:
    """Classes drawn with replacement, class ``k`` of ``range_max`` with probability log((k + 2) / (k + 1)) /
    log(range_max + 1): ``mx.sym.contrib.rand_zipfian``.

    Returns:
        (``num_sampled`` classes in int64; how often each of ``true_classes`` is expected among them, and how often each
        of those drawn is, both in float64).
    """
    log_range = math.log(range_max + 1)
    drawn = uniform(0, log_range, shape=(num_sampled,), dtype="float64")
    classes = (function("exp")(drawn) - 1).astype("int64") % range_max

    def expected(classes: Symbol) -> Symbol:
        wide = classes.astype("float64")
        counts: Symbol = function("log")((wide + 2.0) / (wide + 1.0)) / log_range * num_sampled
        return counts

    return classes, expected(true_classes), expected(classes)


FUNCTIONS: dict[str, Callable[..., Symbol]] = {
    one.__name__: one
    for one in (
        uniform, normal, randn, gamma, exponential, poisson, negative_binomial, generalized_negative_binomial,
        multinomial, shuffle,
    )
}  # fmt: skip
"""Functions with their own arguments; ``randint`` and ``*_like`` are the operators themselves."""
