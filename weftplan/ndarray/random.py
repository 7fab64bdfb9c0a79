"""Random numbers that depend on the seed and the order of the calls alone: ``mx.random`` and ``mx.nd.random``.

Every draw takes a key ``(seed, counter)`` of its context on the calling thread, and the operation that draws makes a
counter-based generator (Philox) from it. So results are the same on every engine and any number of workers. They differ
from MXNet's, whose generators are not specified.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from weftplan import device
from weftplan.device.context import Context, current_context
from weftplan.errors import DeviceError, DTypeError, ParameterError, ShapeError
from weftplan.locks import Lock, whole_in_children
from weftplan.ndarray.array import NDArray, check_dtype
from weftplan.ndarray.chunk import Chunk, push
from weftplan.ops.schema import OpContext

_lock = whole_in_children(Lock())
_seed = 0
_streams: dict[Context, list[int]] = {}
"""Context -> [seed, next counter]; guarded by the lock."""


def seed(seed_state: int, ctx: Context | str = "all") -> None:
    """Restart the random numbers of one context, or of all of them; two contexts never draw the same ones.

    Raises:
        ParameterError: the seed is not an integer.
        DeviceError: ``ctx`` is neither a Context nor "all".
    """
    global _seed
    if isinstance(seed_state, bool) or not isinstance(seed_state, int | np.integer):
        raise ParameterError(f"the seed must be an integer, got {seed_state!r}")
    with _lock:
        if isinstance(ctx, Context):
            _streams[ctx] = [_mixed(int(seed_state), ctx), 0]
        elif ctx == "all":
            _seed = int(seed_state)
            _streams.clear()
        else:
            raise DeviceError(f"seed: ctx must be a Context or 'all', got {ctx!r}")


def next_key(ctx: Context) -> tuple[int, int]:
    """(seed, counter) of the next draw on ``ctx``; the counter stays below 2**32 draws per seed."""
    with _lock:
        stream = _streams.get(ctx)
        if stream is None:
            stream = _streams[ctx] = [_mixed(_seed, ctx), 0]
        counter = stream[1]
        stream[1] = counter + 1
        return stream[0], counter


def _mixed(number: int, ctx: Context) -> int:
    """A seed of 63 bits for ``ctx``: the splitmix64 finaliser spreads neighbouring seeds and devices."""
    value = number * 127 + ctx.device_id + (ctx.device_typeid << 48)
    value = (value + 0x9E3779B97F4A7C15) & (2**64 - 1)
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return (value ^ (value >> 31)) >> 1


Draw = Callable[[Any, Any, Any], None]
"""Fills an array: (generator, output, array module)."""


def _fill(
    draw: Draw, shape: Any, dtype: Any, ctx: Context | None, out: NDArray | None, default: Any, name: str
) -> NDArray:
    """Push ``draw`` into ``out`` or a new array."""
    if out is None:
        wanted = check_dtype(default if dtype in (None, "None") else dtype)
        dims = _dims(shape)
        context = current_context() if ctx is None else ctx
        out = NDArray(Chunk(context, math.prod(dims) * wanted.itemsize, name=name), dims, wanted)
    elif shape is not None and shape != _UNSET and _dims(shape) != out.shape:
        raise ShapeError(f"{name}: out has shape {out.shape}, but shape={shape} was given")
    place = device.get(out.context)
    key = next_key(out.context)
    push(partial(_draw, draw, key, place.xp, out.raw()), (), (out.var,), out.context, name=name)
    return out


def _draw(draw: Draw, key: tuple[int, int], xp: Any, target: Any) -> None:
    draw(OpContext(xp, random_key=key).generator(), target, xp)


_UNSET: Any = ()


def _dims(shape: Any) -> tuple[int, ...]:
    dims = (shape,) if isinstance(shape, int | np.integer) else tuple(shape or (1,))
    if any(dim < 0 for dim in dims):
        raise ShapeError(f"a shape has no negative dimensions, got {shape!r}")
    return tuple(int(dim) for dim in dims)


def _check_float(dtype: Any, out: NDArray | None, name: str) -> None:
    wanted = out.dtype if out is not None else check_dtype(None if dtype in (None, "None") else dtype)
    if wanted.kind != "f":
        raise DTypeError(f"{name}: the dtype must be a float, got {wanted}; use randint for integers")


def _sampled(
    name: str, low: Any, high: Any, shape: Any, dtype: Any, out: NDArray | None, standard: Draw, combine: Any
) -> NDArray:
    """Parameters given as arrays: one block of ``shape`` per element."""
    from weftplan.ndarray import arithmetic

    like = low if isinstance(low, NDArray) else high
    block = () if shape == _UNSET or shape is None else _dims(shape)
    kind = like.dtype if dtype in (None, "None") else dtype
    values = _fill(standard, (*like.shape, *block), kind, like.ctx, out, None, name)

    def column(value: Any) -> Any:
        if not isinstance(value, NDArray):
            return value
        return value.astype(values.dtype, copy=False).reshape((*value.shape, *[1] * len(block)))

    scale, shift = combine(column(low), column(high))
    arithmetic.inplace(arithmetic.MUL, values, scale)
    return arithmetic.inplace(arithmetic.ADD, values, shift)


def _span(low: Any, high: Any) -> tuple[Any, Any]:
    return high - low, low


def _scale(loc: Any, scale: Any) -> tuple[Any, Any]:
    return scale, loc


def _standard_uniform(generator: Any, target: Any, xp: Any) -> None:
    kind = np.float64 if target.dtype == np.float64 else np.float32
    target[...] = generator.random(target.shape, dtype=kind)


def _standard_normal(generator: Any, target: Any, xp: Any) -> None:
    kind = np.float64 if target.dtype == np.float64 else np.float32
    target[...] = generator.standard_normal(target.shape, dtype=kind)


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

    ``low`` and ``high`` may be arrays of one shape; each element then gives a block of ``shape``.

    Raises:
        DTypeError: not a float dtype.
        ShapeError: ``out`` and ``shape`` disagree.
    """
    _check_float(dtype, out, "uniform")
    if isinstance(low, NDArray) or isinstance(high, NDArray):
        return _sampled("uniform", low, high, shape, dtype, out, _standard_uniform, _span)
    low, high = float(low), float(high)

    def draw(generator: Any, target: Any, xp: Any) -> None:
        _standard_uniform(generator, target, xp)
        target *= high - low
        target += low

    return _fill(draw, shape, dtype, ctx, out, np.float32, "uniform")


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
        ParameterError: a negative scale.
        DTypeError, ShapeError: as :func:`uniform`.
    """
    _check_float(dtype, out, "normal")
    if isinstance(loc, NDArray) or isinstance(scale, NDArray):
        return _sampled("normal", loc, scale, shape, dtype, out, _standard_normal, _scale)
    loc, scale = float(loc), float(scale)
    if scale < 0:
        raise ParameterError(f"normal: scale must be at least 0, got {scale}")

    def draw(generator: Any, target: Any, xp: Any) -> None:
        _standard_normal(generator, target, xp)
        target *= scale
        target += loc

    return _fill(draw, shape, dtype, ctx, out, np.float32, "normal")


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
        ParameterError: ``low`` is not below ``high``.
        DTypeError: not an integer dtype.
    """
    if not low < high:
        raise ParameterError(f"randint: low must be below high, got [{low}, {high})")
    wanted = out.dtype if out is not None else check_dtype("int32" if dtype in (None, "None") else dtype)
    if wanted.kind not in "iu":
        raise DTypeError(f"randint: the dtype must be an integer, got {wanted}")

    def draw(generator: Any, target: Any, xp: Any) -> None:
        target[...] = generator.integers(low, high, target.shape, dtype=np.int64)

    return _fill(draw, shape, wanted, ctx, out, None, "randint")


def exponential(
    scale: float = 1,
    shape: Any = _UNSET,
    dtype: Any = None,
    ctx: Context | None = None,
    out: NDArray | None = None,
    **kwargs: Any,
) -> NDArray:
    """Exponential with mean ``scale`` > 0."""
    _check_float(dtype, out, "exponential")
    if not scale > 0:
        raise ParameterError(f"exponential: scale must be above 0, got {scale}")

    def draw(generator: Any, target: Any, xp: Any) -> None:
        target[...] = generator.exponential(scale, target.shape)

    return _fill(draw, shape, dtype, ctx, out, np.float32, "exponential")


def gamma(
    alpha: float = 1,
    beta: float = 1,
    shape: Any = _UNSET,
    dtype: Any = None,
    ctx: Context | None = None,
    out: NDArray | None = None,
    **kwargs: Any,
) -> NDArray:
    """Gamma with shape ``alpha`` > 0 and scale ``beta`` > 0."""
    _check_float(dtype, out, "gamma")
    if not (alpha > 0 and beta > 0):
        raise ParameterError(f"gamma: alpha and beta must be above 0, got {alpha} and {beta}")

    def draw(generator: Any, target: Any, xp: Any) -> None:
        target[...] = generator.standard_gamma(alpha, target.shape)
        target *= beta

    return _fill(draw, shape, dtype, ctx, out, np.float32, "gamma")


def poisson(
    lam: float = 1,
    shape: Any = _UNSET,
    dtype: Any = None,
    ctx: Context | None = None,
    out: NDArray | None = None,
    **kwargs: Any,
) -> NDArray:
    """Poisson with mean ``lam`` >= 0, as floats."""
    _check_float(dtype, out, "poisson")
    if not lam >= 0:
        raise ParameterError(f"poisson: lam must be at least 0, got {lam}")

    def draw(generator: Any, target: Any, xp: Any) -> None:
        target[...] = generator.poisson(lam, target.shape)

    return _fill(draw, shape, dtype, ctx, out, np.float32, "poisson")


def shuffle(data: NDArray, out: NDArray | None = None, **kwargs: Any) -> NDArray:
    """``data`` with its rows (axis 0) in random order, in a new array or ``out`` (which may be ``data``)."""
    if out is None:
        out = NDArray(Chunk(data.context, data.nbytes, name="shuffle"), data.shape, data.dtype)
    elif out.shape != data.shape or out.dtype != data.dtype or out.context != data.context:
        raise ShapeError(
            f"shuffle: out ({out.shape} {out.dtype} {out.context}) is not like data "
            f"({data.shape} {data.dtype} {data.context})"
        )
    key = next_key(data.context)
    # The order is drawn on the host, so that it is the same on every device.
    order = OpContext(np, random_key=key).generator().permutation(data.shape[0])
    xp = device.get(data.context).xp
    source, target = data.raw(), out.raw()

    def permute() -> None:
        target[...] = source[xp.asarray(order)]

    push(permute, (data.var,), (out.var,), data.context, name="shuffle")
    return out


def multinomial(
    data: NDArray, shape: Any = _UNSET, get_prob: bool = False, dtype: Any = "int32", **kwargs: Any
) -> NDArray:
    """Indices drawn with the probabilities in the last axis of ``data``: ``shape`` of them per distribution.

    Raises:
        ParameterError: ``get_prob`` is set, which is not supported.
    """
    if get_prob:
        raise ParameterError("multinomial: get_prob is not supported; take the log of the picked probabilities instead")
    block = () if shape == _UNSET or shape is None else _dims(shape)
    dims = (*data.shape[:-1], *block) or (1,)
    wanted = check_dtype(dtype)
    out = NDArray(Chunk(data.context, math.prod(dims) * wanted.itemsize, name="multinomial"), dims, wanted)
    key, xp = next_key(data.context), device.get(data.context).xp
    source, target, count = data.raw(), out.raw(), math.prod(block)

    def draw() -> None:
        probability = source.reshape(-1, source.shape[-1]).astype(np.float64)
        bound = xp.cumsum(probability, axis=1)
        points = OpContext(xp, random_key=key).generator().random((probability.shape[0], count)) * bound[:, -1:]
        index = (points[:, :, None] >= bound[:, None, :]).sum(axis=2)
        target[...] = xp.minimum(index, source.shape[-1] - 1).reshape(target.shape)

    push(draw, (data.var,), (out.var,), data.context, name="multinomial")
    return out
