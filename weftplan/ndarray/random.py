"""Random numbers that depend on the seed and the order of the calls alone: ``mx.random`` and ``mx.nd.random``.

Every draw takes a key ``(seed, counter)`` of its context on the calling thread, and the operation that draws makes a
counter-based generator (Philox) from it. So results are the same on every engine and any number of workers. They differ
from MXNet's, whose generators are not specified.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from weftplan import device
from weftplan.device.context import Context
from weftplan.errors import DTypeError, ParameterError, ShapeError
from weftplan.ndarray import distributions
from weftplan.ndarray.array import NDArray, fresh
from weftplan.ndarray.base import check_context, check_dtype
from weftplan.ndarray.pushing import push_kernel
from weftplan.ndarray.seeds import next_key, seed
from weftplan.ops.schema import OpContext

__all__ = [
    "exponential",
    "gamma",
    "generalized_negative_binomial",
    "multinomial",
    "negative_binomial",
    "next_key",
    "normal",
    "poisson",
    "randint",
    "randn",
    "seed",
    "shuffle",
    "uniform",
]

_UNSET: Any = ()


def _dims(shape: Any) -> tuple[int, ...]:
    dims = (shape,) if isinstance(shape, int | np.integer) else tuple(shape or (1,))
    if any(dim < 0 for dim in dims):
        raise ShapeError(f"a shape has no negative dimensions, got {shape!r}")
    return tuple(int(dim) for dim in dims)


def _block(shape: Any) -> tuple[int, ...]:
    """The shape that one element of an array parameter gives."""
    return () if shape is None or shape == _UNSET else _dims(shape)


def _target(shape: Any, wanted: np.dtype[Any], ctx: Context | None, out: NDArray | None, name: str) -> NDArray:
    """``out``, whose shape must be ``shape`` where that is given, or a new array."""
    if out is None:
        dims = _dims(shape)
        context = check_context(ctx)
        return fresh(context, dims, wanted, name)
    if shape is not None and shape != _UNSET and _dims(shape) != out.shape:
        raise ShapeError(f"{name}: out has shape {out.shape}, but shape={shape} was given")
    return out


def _fill(draw: Callable[..., None], sources: Sequence[NDArray], out: NDArray, name: str) -> NDArray:
    """Push ``draw(generator, target, array module, *sources)``, which reads arrays and fills ``out``."""
    drawing = partial(_draw, draw, next_key(out.context), device.get(out.context).xp)
    reads = [source.var for source in sources]
    push_kernel(drawing, [out, *sources], reads, (out.var,), out.context, name=name)
    return out


def _draw(draw: Callable[..., None], key: tuple[int, int], xp: Any, target: Any, *sources: Any) -> None:
    draw(OpContext(xp, random_key=key).generator(), target, xp, *sources)


def _only_name(kwargs: Mapping[str, Any]) -> None:
    """MXNet's functions take ``name``, which means nothing here; anything else is a mistake."""
    for key in kwargs:
        if key != "name":
            raise ParameterError(f"unknown argument {key!r} of a random draw")


_LEAST = {"any": "", "positive": "above 0", "not negative": "at least 0", "probability": "above 0 and at most 1"}


def _number(name: str, key: str, value: Any) -> float:
    if not isinstance(value, numbers.Real):
        raise ParameterError(f"{name}: {key} must be a number or an NDArray, got {type(value).__name__}")
    return float(value)


def _check(name: str, bounds: Mapping[str, str], values: Sequence[Any]) -> None:
    """Raise ParameterError unless each number is within its bounds, a key of ``_LEAST``, and low is not above high."""
    given = dict(zip(bounds, values, strict=True))
    for key, value in given.items():
        if not isinstance(value, float):
            continue  # an array, whose values the distribution judges
        fits = {"any": True, "positive": value > 0, "not negative": value >= 0, "probability": 0 < value <= 1}
        if not fits[bounds[key]]:
            raise ParameterError(f"{name}: {key} must be {_LEAST[bounds[key]]}, got {value}")
    low, high = given.get("low"), given.get("high")
    if isinstance(low, float) and isinstance(high, float) and not low <= high:
        raise ParameterError(f"{name}: low must not be above high, got [{low}, {high})")


def _wanted(dtype: Any) -> Any:
    """A dtype as given, None where it is left open: ``np.dtype("float64")`` equals None, so identity decides."""
    return None if dtype is None or (isinstance(dtype, str) and dtype == "None") else dtype


def _sample(
    draw: distributions.Draw,
    parameters: Mapping[str, tuple[Any, str]],
    shape: Any,
    dtype: Any,
    ctx: Context | None,
    out: NDArray | None,
) -> NDArray:
    """Push a draw of floats; ``parameters`` are name -> (number or array, bounds of a number).

    Arrays must have one shape and context; each element then gives a block of ``shape``. A value out of bounds, of a
    number as of an array, is reported when the operation has run: at the next wait, as in MXNet.
    """
    name = draw.__name__
    wanted = out.dtype if out is not None else check_dtype(_wanted(dtype))
    if wanted.kind != "f":
        raise DTypeError(f"{name}: the dtype must be a float, got {wanted}; use randint for integers")
    arrays = [value for value, _ in parameters.values() if isinstance(value, NDArray)]
    bounds = {key: bound for key, (_, bound) in parameters.items()}
    values = [
        value if isinstance(value, NDArray) else _number(name, key, value) for key, (value, _) in parameters.items()
    ]
    known = [None if isinstance(value, NDArray) else value for value in values]
    if not arrays:
        return _fill(partial(_run, draw, bounds, known, 0), (), _target(shape, wanted, ctx, out, name), name)
    first = arrays[0]
    for array in arrays:
        if array.shape != first.shape or array.context != first.context:
            raise ShapeError(
                f"{name}: arrays of parameters must have one shape and context, got {first.shape} on {first.context} "
                f"and {array.shape} on {array.context}"
            )
    block = _block(shape)
    target = _target((*first.shape, *block), wanted, first.context, out, name)
    return _fill(partial(_run, draw, bounds, known, len(block)), arrays, target, name)


def _run(
    draw: distributions.Draw,
    bounds: Mapping[str, str],
    known: Sequence[float | None],
    inner: int,
    generator: Any,
    target: Any,
    xp: Any,
    *arrays: Any,
) -> None:
    """Draw with parameters that are numbers, or None for the next of ``arrays``, whose elements each give a block of
    ``inner`` dimensions."""
    following = iter(arrays)
    values: list[Any] = [
        (raw := next(following)).reshape(*raw.shape, *(1,) * inner) if value is None else value for value in known
    ]
    _check(draw.__name__, bounds, values)
    if not all(isinstance(value, float) for value in values):
        values = [xp.asarray(value, np.float64) for value in values]
    draw(generator, target, xp, *values)


def uniform(
    low: Any = 0,
    high: Any = 1,
    shape: Any = _UNSET,
    dtype: Any = None,
    ctx: Context | None = None,
    out: NDArray | None = None,
    **kwargs: Any,
) -> NDArray:
    """Uniform on [low, high): float32 of shape ``(1,)`` unless told otherwise.

    ``low`` and ``high`` may be arrays of one shape; each element then gives a block of ``shape``. So may the parameters
    of the other distributions of floats.

    Raises:
        DTypeError: not a float dtype.
        ShapeError: ``out`` and ``shape`` disagree, or two arrays of parameters.
    """
    _only_name(kwargs)
    parameters = {"low": (low, "any"), "high": (high, "any")}
    return _sample(distributions.uniform, parameters, shape, dtype, ctx, out)


def normal(
    loc: Any = 0,
    scale: Any = 1,
    shape: Any = _UNSET,
    dtype: Any = None,
    ctx: Context | None = None,
    out: NDArray | None = None,
    **kwargs: Any,
) -> NDArray:
    """Normal with mean ``loc`` and standard deviation ``scale``; arguments as for :func:`uniform`.

    Raises:
        ParameterError: a negative scale, at the next wait.
        DTypeError, ShapeError: as :func:`uniform`.
    """
    _only_name(kwargs)
    parameters = {"loc": (loc, "any"), "scale": (scale, "not negative")}
    return _sample(distributions.normal, parameters, shape, dtype, ctx, out)


def randn(
    *shape: int, loc: Any = 0, scale: Any = 1, dtype: Any = None, ctx: Context | None = None, **kwargs: Any
) -> NDArray:
    """:func:`normal` with the shape as arguments."""
    return normal(loc, scale, shape or _UNSET, dtype, ctx, **kwargs)


def randint(
    low: int,
    high: int,
    shape: Any = _UNSET,
    dtype: Any = None,
    ctx: Context | None = None,
    out: NDArray | None = None,
    **kwargs: Any,
) -> NDArray:
    """Integers from [low, high), int32 unless told otherwise.

    Raises:
        ParameterError: ``low`` is not below ``high``, or they are no integers.
        DTypeError: not an integer dtype.
    """
    _only_name(kwargs)
    for bound in (low, high):
        if isinstance(bound, bool) or not isinstance(bound, int | np.integer):
            raise ParameterError(f"randint: low and high must be integers, got {bound!r}")
    if not low < high:
        raise ParameterError(f"randint: low must be below high, got [{low}, {high})")
    wanted = out.dtype if out is not None else check_dtype(_wanted(dtype) or "int32")
    if wanted.kind not in "iu":
        raise DTypeError(f"randint: the dtype must be an integer, got {wanted}")

    def draw(generator: Any, target: Any, xp: Any) -> None:
        target[...] = generator.integers(low, high, target.shape, dtype=np.int64)

    return _fill(draw, (), _target(shape, wanted, ctx, out, "randint"), "randint")


def exponential(
    scale: Any = 1,
    shape: Any = _UNSET,
    dtype: Any = None,
    ctx: Context | None = None,
    out: NDArray | None = None,
    **kwargs: Any,
) -> NDArray:
    """Exponential with mean ``scale`` > 0."""
    _only_name(kwargs)
    parameters = {"scale": (scale, "positive")}
    return _sample(distributions.exponential, parameters, shape, dtype, ctx, out)


def gamma(
    alpha: Any = 1,
    beta: Any = 1,
    shape: Any = _UNSET,
    dtype: Any = None,
    ctx: Context | None = None,
    out: NDArray | None = None,
    **kwargs: Any,
) -> NDArray:
    """Gamma with shape ``alpha`` > 0 and scale ``beta`` > 0."""
    _only_name(kwargs)
    parameters = {"alpha": (alpha, "positive"), "beta": (beta, "positive")}
    return _sample(distributions.gamma, parameters, shape, dtype, ctx, out)


def poisson(
    lam: Any = 1,
    shape: Any = _UNSET,
    dtype: Any = None,
    ctx: Context | None = None,
    out: NDArray | None = None,
    **kwargs: Any,
) -> NDArray:
    """Poisson with mean ``lam`` >= 0, as floats."""
    _only_name(kwargs)
    parameters = {"lam": (lam, "not negative")}
    return _sample(distributions.poisson, parameters, shape, dtype, ctx, out)


def negative_binomial(
    k: Any = 1,
    p: Any = 1,
    shape: Any = _UNSET,
    dtype: Any = None,
    ctx: Context | None = None,
    out: NDArray | None = None,
    **kwargs: Any,
) -> NDArray:
    """Failures before ``k`` > 0 successes of probability ``p`` in (0, 1], as floats."""
    _only_name(kwargs)
    parameters = {"k": (k, "positive"), "p": (p, "probability")}
    return _sample(distributions.negative_binomial, parameters, shape, dtype, ctx, out)


def generalized_negative_binomial(
    mu: Any = 1,
    alpha: Any = 1,
    shape: Any = _UNSET,
    dtype: Any = None,
    ctx: Context | None = None,
    out: NDArray | None = None,
    **kwargs: Any,
) -> NDArray:
    """Negative binomial with mean ``mu`` >= 0 and variance mu + alpha mu², ``alpha`` >= 0, as floats."""
    _only_name(kwargs)
    parameters = {"mu": (mu, "not negative"), "alpha": (alpha, "not negative")}
    return _sample(distributions.generalized_negative_binomial, parameters, shape, dtype, ctx, out)


def shuffle(data: NDArray, out: NDArray | None = None, **kwargs: Any) -> NDArray:
    """``data`` with its rows (axis 0) in random order, in a new array or ``out`` (which may be ``data``)."""
    _only_name(kwargs)
    if not data.shape:
        raise ShapeError("shuffle: expected at least one dimension, whose rows are put in another order, got shape ()")
    if out is None:
        out = fresh(data.context, data.shape, data.dtype, "shuffle")
    elif out.shape != data.shape or out.dtype != data.dtype or out.context != data.context:
        raise ShapeError(
            f"shuffle: out ({out.shape} {out.dtype} {out.context}) is not like data "
            f"({data.shape} {data.dtype} {data.context})"
        )
    key = next_key(data.context)
    # The order is drawn on the host, so that it is the same on every device.
    order = OpContext(np, random_key=key).generator().permutation(data.shape[0])
    xp = device.get(data.context).xp

    def permute(source: Any, target: Any) -> None:
        target[...] = source[xp.asarray(order)]

    push_kernel(permute, [data, out], (data.var,), (out.var,), data.context, name="shuffle")
    return out


def multinomial(
    data: NDArray,
    shape: Any = _UNSET,
    get_prob: bool = False,
    out: NDArray | Sequence[NDArray] | None = None,
    dtype: Any = "int32",
    **kwargs: Any,
) -> NDArray | list[NDArray]:
    """Indices drawn with the probabilities in the last axis of ``data``: ``shape`` of them per distribution.

    With ``get_prob`` a list: the indices, and the logarithm of the probability of each, in the dtype of ``data``.

    Raises:
        ShapeError: ``data`` has no dimension, or no element in the last one; ``out`` has another shape.
        ParameterError: ``out`` is not one array, with ``get_prob`` not two.
    """
    _only_name(kwargs)
    if not data.shape or not data.shape[-1]:
        raise ShapeError(f"multinomial: expected probabilities in the last axis, got shape {data.shape}")
    block = _block(shape)
    dims = (*data.shape[:-1], *block) or (1,)
    given = [None] * (1 + get_prob) if out is None else [out] if isinstance(out, NDArray) else list(out)
    if len(given) != 1 + get_prob:
        raise ParameterError(f"multinomial: out must be {'two arrays' if get_prob else 'one array'}, got {len(given)}")
    drawn = _target(dims, check_dtype(dtype), data.context, given[0], "multinomial")
    logs = _target(dims, data.dtype, data.context, given[1], "multinomial") if get_prob else None
    key, xp = next_key(data.context), device.get(data.context).xp
    count = math.prod(block)

    def draw(source: Any, target: Any, chosen: Any = None) -> None:
        probability = source.reshape(-1, source.shape[-1]).astype(np.float64)
        bound = xp.cumsum(probability, axis=1)
        points = OpContext(xp, random_key=key).generator().random((probability.shape[0], count)) * bound[:, -1:]
        index = xp.empty(points.shape, np.int64)
        if count < len(points):  # along the shorter side, so that no temporary is larger than data or result
            for column in range(count):
                index[:, column] = (points[:, column : column + 1] >= bound).sum(axis=1)
        else:
            for row in range(len(points)):
                index[row] = xp.searchsorted(bound[row], points[row], side="right")
        xp.minimum(index, source.shape[-1] - 1, out=index)
        target[...] = index.reshape(target.shape)
        if chosen is not None:
            with np.errstate(divide="ignore"):
                chosen[...] = xp.log(xp.take_along_axis(probability, index, axis=1)).reshape(chosen.shape)

    results = [drawn] if logs is None else [drawn, logs]
    push_kernel(draw, [data, *results], (data.var,), [one.var for one in results], data.context, name="multinomial")
    return drawn if logs is None else [drawn, logs]
