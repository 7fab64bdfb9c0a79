"""Pushing of random draws: output array, distribution parameters, and key.

This module keeps no state. It takes a key on the calling thread, so the order of the calls determines the numbers of
each draw; the draw itself runs on a worker. A parameter of a wrong type is reported at the call, and a value out of
bounds at the next wait.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from weftplan import device
from weftplan.device.context import Context
from weftplan.errors import DTypeError, ParameterError, ShapeError
from weftplan.ndarray.array import NDArray, fresh
from weftplan.ndarray.base import check_context, check_dtype
from weftplan.ndarray.pushing import push_kernel
from weftplan.ndarray.randomness import fills
from weftplan.ndarray.randomness.seeds import next_key
from weftplan.ops.core.floats import is_float
from weftplan.ops.core.params import from_text
from weftplan.ops.core.schema import OpContext
from weftplan.support.array_types import ArrayModule, Dims, DType, DTypeLike, Generator, RawArray, Scalar

UNSET: Any = ()


def _dims(shape: Dims | None) -> tuple[int, ...]:
    shape = from_text(shape)
    dims = (shape,) if isinstance(shape, int | np.integer) else tuple(shape or (1,))
    if any(dim < 0 for dim in dims):
        raise ShapeError(f"a shape has no negative dimensions, got {shape!r}")
    return tuple(int(dim) for dim in dims)


def block_shape(shape: Dims | None) -> tuple[int, ...]:
    """Return the shape of the block for each element of an array parameter."""
    return () if shape is None or shape == UNSET else _dims(shape)


def target_of(shape: Dims | None, dtype: DType, ctx: Context | None, out: NDArray | None, name: str) -> NDArray:
    """Return ``out``, whose shape must equal ``shape`` if given, or a new array."""
    if out is None:
        dims = _dims(shape)
        context = check_context(ctx)
        return fresh(context, dims, dtype, name)
    if shape is not None and shape != UNSET and _dims(shape) != out.shape:
        raise ShapeError(f"{name}: out has shape {out.shape}, but shape={shape} was given")
    return out


def push_draw(draw: Callable[..., None], sources: Sequence[NDArray], out: NDArray, name: str) -> NDArray:
    """Push ``draw(generator, target, array module, *sources)``, which reads arrays and fills ``out``."""
    drawing = partial(_draw, draw, next_key(out.context), device.get(out.context).xp)
    reads = [source.var for source in sources]
    push_kernel(drawing, [out, *sources], reads, (out.var,), out.context, name=name)
    return out


def _draw(
    draw: Callable[..., None], key: tuple[int, int], xp: ArrayModule, target: RawArray, *sources: RawArray
) -> None:
    draw(OpContext(xp, random_key=key).generator(), target, xp, *sources)


_LEAST = {"any": "", "positive": "above 0", "not negative": "at least 0", "probability": "above 0 and at most 1"}


def _number(name: str, key: str, value: object) -> float:
    if not isinstance(value, numbers.Real):
        raise ParameterError(f"{name}: {key} must be a number or an NDArray, got {type(value).__name__}")
    return float(value)


def _check(name: str, bounds: Mapping[str, str], values: Sequence[RawArray | float]) -> None:
    """Raise ParameterError unless each number is within its bounds, a key of ``_LEAST``, and low is not above high."""
    named_values = dict(zip(bounds, values, strict=True))
    for key, value in named_values.items():
        if not isinstance(value, float):
            continue  # an array, whose values the distribution checks
        fits = {"any": True, "positive": value > 0, "not negative": value >= 0, "probability": 0 < value <= 1}
        if not fits[bounds[key]]:
            raise ParameterError(f"{name}: {key} must be {_LEAST[bounds[key]]}, got {value}")
    low, high = named_values.get("low"), named_values.get("high")
    if isinstance(low, float) and isinstance(high, float) and not low <= high:
        raise ParameterError(f"{name}: low must not be above high, got [{low}, {high})")


def wanted_dtype(dtype: DTypeLike | None) -> DTypeLike | None:
    """Return the dtype, or None if unspecified. Compare with ``is None``, since ``np.dtype("float64") == None``."""
    return None if dtype is None or (isinstance(dtype, str) and dtype == "None") else dtype


def sample(
    draw: fills.Draw,
    parameters: Mapping[str, tuple[NDArray | Scalar, str]],
    shape: Dims | None,
    dtype: DTypeLike | None,
    ctx: Context | None,
    out: NDArray | None,
) -> NDArray:
    """Push a draw of floats; ``parameters`` are name -> (number or array, bounds of a number).

    Arrays must have equal shapes and contexts; each element then gives a block of ``shape``. A value out of bounds,
    whether a number or in an array, is reported when the operation has run: at the next wait, as in MXNet.
    """
    name = draw.__name__
    wanted = out.np_dtype if out is not None else check_dtype(wanted_dtype(dtype))
    if not is_float(wanted):
        raise DTypeError(f"{name}: the dtype must be a float, got {wanted}; use randint for integers")
    arrays = [value for value, _ in parameters.values() if isinstance(value, NDArray)]
    bounds = {key: bound for key, (_, bound) in parameters.items()}
    values = [
        value if isinstance(value, NDArray) else _number(name, key, value) for key, (value, _) in parameters.items()
    ]
    numbers = [None if isinstance(value, NDArray) else value for value in values]
    if not arrays:
        return push_draw(partial(_run, draw, bounds, numbers, 0), (), target_of(shape, wanted, ctx, out, name), name)
    head = arrays[0]
    for array in arrays:
        if array.shape != head.shape or array.context != head.context:
            raise ShapeError(
                f"{name}: arrays of parameters must have one shape and context, got {head.shape} on {head.context} "
                f"and {array.shape} on {array.context}"
            )
    block = block_shape(shape)
    target = target_of((*head.shape, *block), wanted, head.context, out, name)
    return push_draw(partial(_run, draw, bounds, numbers, len(block)), arrays, target, name)


def _run(
    draw: fills.Draw,
    bounds: Mapping[str, str],
    numbers: Sequence[float | None],
    inner: int,
    generator: Generator,
    target: RawArray,
    xp: ArrayModule,
    *arrays: RawArray,
) -> None:
    """Draw with parameters that are numbers, or None for the next array in ``arrays``.

    Each element of an array gives a block of ``inner`` dimensions.
    """
    following = iter(arrays)
    values: list[Any] = [
        (raw := next(following)).reshape(*raw.shape, *(1,) * inner) if value is None else value for value in numbers
    ]
    _check(draw.__name__, bounds, values)
    if not all(isinstance(value, float) for value in values):
        values = [xp.asarray(value, np.float64) for value in values]
    draw(generator, target, xp, *values)
