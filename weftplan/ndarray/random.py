"""Random arrays that depend only on the seed and the order of calls: ``mx.random``, ``mx.nd.random``.

Every draw takes a key ``(seed, counter)`` of its context on the calling thread, and the drawing operation makes a
counter-based generator (Philox) from it. So results are the same on every engine and any number of workers. They differ
from MXNet's, whose generators are not specified. For compatibility with MXNet every function takes ``name`` and ignores
it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from weftplan import device
from weftplan.device.context import Context
from weftplan.errors import DTypeError, ParameterError, ShapeError
from weftplan.ndarray.array import NDArray, fresh
from weftplan.ndarray.base import check_dtype
from weftplan.ndarray.operators import ArrayNamespace
from weftplan.ndarray.pushing import push_kernel
from weftplan.ndarray.randomness.distributions import DISTRIBUTIONS, function_of
from weftplan.ndarray.randomness.draws import UNSET, block_shape, push_draw, target_of, wanted_dtype
from weftplan.ndarray.randomness.seeds import get_state, next_key, seed, set_state
from weftplan.ops.core.params import from_text
from weftplan.ops.core.schema import OpContext
from weftplan.support.array_types import ArrayModule, Dims, DTypeLike, Generator, RawArray, Scalar
from weftplan.support.keyword_errors import known_keywords

if TYPE_CHECKING:
    from weftplan.ndarray.registered import Distributions

__all__ = [
    "exponential",
    "gamma",
    "generalized_negative_binomial",
    "get_state",
    "multinomial",
    "negative_binomial",
    "next_key",
    "normal",
    "poisson",
    "randint",
    "randn",
    "seed",
    "set_state",
    "shuffle",
    "uniform",
]

_operators = ArrayNamespace("random", "_random_", "_sample_")


def _attribute(name: str) -> Any:
    """Return the operator for names without a function in this module, such as ``normal_like`` and ``pdf_normal``."""
    return getattr(_operators, name)


if TYPE_CHECKING:
    exponential = Distributions.exponential
    gamma = Distributions.gamma
    generalized_negative_binomial = Distributions.generalized_negative_binomial
    negative_binomial = Distributions.negative_binomial
    normal = Distributions.normal
    poisson = Distributions.poisson
    uniform = Distributions.uniform
else:
    __getattr__ = _attribute  # for a type checker a name that is not there is an error
    globals().update((row.draw.__name__, function_of(row, __name__)) for row in DISTRIBUTIONS)


@known_keywords()
def randn(
    *shape: int,
    loc: NDArray | Scalar = 0,
    scale: NDArray | Scalar = 1,
    dtype: DTypeLike | None = None,
    ctx: Context | None = None,
    out: NDArray | None = None,
    name: str | None = None,
) -> NDArray:
    """Draw as :func:`normal` does, with the dimensions as positional arguments.

    Args:
        *shape: dimensions of the result.
        loc: mean.
        scale: standard deviation.
        dtype: float16, float32 or float64; None: that of ``out``, else float32.
        ctx: the device of the result; None: the current context.
        out: array that takes the result, instead of a new one.
        name: accepted, no effect.
    """
    return normal(loc, scale, shape or UNSET, dtype, ctx, out)


@known_keywords()
def randint(
    low: int,
    high: int,
    shape: Dims | None = UNSET,
    dtype: DTypeLike | None = None,
    ctx: Context | None = None,
    out: NDArray | None = None,
    *,
    name: str | None = None,
) -> NDArray:
    """Draw integers uniformly from [low, high), int32 by default.

    Args:
        low: lower bound, which belongs to the range.
        high: upper bound, which does not.
        shape: dimensions of the result.
        dtype: an integer dtype; None: that of ``out``, else int32.
        ctx: the device of the result; None: the current context.
        out: array that takes the result, instead of a new one.
        name: accepted, no effect.

    Raises:
        ParameterError: ``low`` is not below ``high``, or they are no integers.
        DTypeError: not an integer dtype.
    """
    for bound in (low, high):
        if isinstance(bound, bool) or not isinstance(bound, int | np.integer):
            raise ParameterError(f"randint: low and high must be integers, got {bound!r}")
    if not low < high:
        raise ParameterError(f"randint: low must be below high, got [{low}, {high})")
    target_dtype = out.np_dtype if out is not None else check_dtype(wanted_dtype(dtype) or "int32")
    if target_dtype.kind not in "iu":
        raise DTypeError(f"randint: the dtype must be an integer, got {target_dtype}")

    def draw(generator: Generator, target: RawArray, xp: ArrayModule) -> None:
        target[...] = generator.integers(low, high, target.shape, dtype=np.int64)

    return push_draw(draw, (), target_of(shape, target_dtype, ctx, out, "randint"), "randint")


@known_keywords()
def shuffle(data: NDArray, out: NDArray | None = None, *, name: str | None = None) -> NDArray:
    """Return ``data`` with its rows (axis 0) in random order, in a new array or ``out`` (which may be ``data``).

    Args:
        data: array whose rows are shuffled.
        out: array that takes the result.
        name: accepted, no effect.
    """
    if not data.shape:
        raise ShapeError("shuffle: expected at least one dimension, whose rows are put in another order, got shape ()")
    if out is None:
        out = fresh(data.context, data.shape, data.np_dtype, "shuffle")
    elif out.shape != data.shape or out.np_dtype != data.np_dtype or out.context != data.context:
        raise ShapeError(
            f"shuffle: out ({out.shape} {out.np_dtype} {out.context}) is not like data "
            f"({data.shape} {data.np_dtype} {data.context})"
        )
    key = next_key(data.context)
    # The order is drawn on the host, so that it is the same on every device.
    order = OpContext(np, random_key=key).generator().permutation(data.shape[0])
    xp = device.get(data.context).xp

    def permute(source: RawArray, target: RawArray) -> None:
        target[...] = source[xp.asarray(order)]

    push_kernel(permute, [data, out], (data.var,), (out.var,), data.context, name="shuffle")
    return out


@known_keywords()
def multinomial(
    data: NDArray,
    shape: Dims | None = UNSET,
    get_prob: bool = False,
    out: NDArray | Sequence[NDArray] | None = None,
    dtype: DTypeLike | None = "int32",
    *,
    name: str | None = None,
) -> NDArray | list[NDArray]:
    """Return the indices drawn with the probabilities in the last axis of ``data``: ``shape`` of them per distribution.

    With ``get_prob`` a list: the indices, and the logarithm of the probability of each, in the dtype of ``data``.

    Args:
        data: probabilities: (classes,) or (..., classes).
        shape: dimensions of the draws of one distribution.
        get_prob: return the logarithms of the probabilities too.
        out: array or arrays that take the result.
        dtype: dtype of the indices.
        name: accepted, no effect.

    Raises:
        ShapeError: ``data`` has no dimension, or its last dimension is empty; ``out`` has another shape.
        ParameterError: ``out`` is not one array, with ``get_prob`` not two.
    """
    if not data.shape or not data.shape[-1]:
        raise ShapeError(f"multinomial: expected probabilities in the last axis, got shape {data.shape}")
    block = block_shape(shape)
    dims = (*data.shape[:-1], *block) or (1,)
    get_prob = bool(from_text(get_prob))
    outputs = [None] * (1 + get_prob) if out is None else [out] if isinstance(out, NDArray) else list(out)
    if len(outputs) != 1 + get_prob:
        raise ParameterError(
            f"multinomial: out must be {'two arrays' if get_prob else 'one array'}, got {len(outputs)}"
        )
    drawn = target_of(dims, check_dtype(dtype), data.context, outputs[0], "multinomial")
    logs = target_of(dims, data.np_dtype, data.context, outputs[1], "multinomial") if get_prob else None
    key, xp = next_key(data.context), device.get(data.context).xp
    count = math.prod(block)

    def draw(source: RawArray, target: RawArray, chosen: RawArray | None = None) -> None:
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
    push_kernel(
        draw, [data, *results], (data.var,), [result.var for result in results], data.context, name="multinomial"
    )
    return drawn if logs is None else [drawn, logs]
