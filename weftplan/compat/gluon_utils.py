"""``mx.gluon.utils``: the functions of arrays alone, which training loops over symbols use, too."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from weftplan import ndarray as nd
from weftplan.device.context import Context
from weftplan.errors import ParameterError
from weftplan.ndarray import NDArray
from weftplan.symbol.node import warn

__all__ = ["clip_global_norm", "split_and_load", "split_data"]


def clip_global_norm(arrays: Sequence[NDArray], max_norm: float, check_isfinite: bool = True) -> float | NDArray:
    """Scale arrays in place so that the norm of all their elements is at most ``max_norm``.

    Args:
        check_isfinite: wait for the norm, warn if it is not finite, and return it as a number.

    Returns:
        The norm before: a float, or without ``check_isfinite`` an array with one element; the call does not wait then.

    >>> gradients = [nd.array([3.0]), nd.array([4.0])]
    >>> clip_global_norm(gradients, 1.0), [round(float(one.asscalar()), 3) for one in gradients]
    (5.0, [0.6, 0.8])
    """
    if not arrays:
        raise ParameterError("clip_global_norm: there are no arrays")
    context = arrays[0].context
    squares = [(array.astype("float32") ** 2).sum().reshape((1,)).as_in_context(context) for array in arrays]
    total = nd.sqrt(nd.add_n(*squares))
    if check_isfinite:
        norm = float(total.asscalar())
        if not math.isfinite(norm):
            warn("clip_global_norm: the norm is not finite, so the arrays are not clipped to a finite one")
    scale = nd.minimum(max_norm / (total + 1e-8), 1.0)
    for array in arrays:
        array *= scale.as_in_context(array.context).astype(array.dtype)
    return norm if check_isfinite else total


def split_data(data: NDArray, num_slice: int, batch_axis: int = 0, even_split: bool = True) -> list[NDArray]:
    """Split an array into slices along the axis of the batch; the first slices are longer if need be.

    Raises:
        ParameterError: fewer samples than slices, or with ``even_split`` slices of unequal length.
    """
    size = data.shape[batch_axis]
    if size < num_slice:
        raise ParameterError(f"split_data: {size} samples along axis {batch_axis} cannot make {num_slice} slices")
    if even_split and size % num_slice:
        raise ParameterError(
            f"split_data: {size} samples along axis {batch_axis} do not make {num_slice} equal slices: use a batch "
            f"size that is a multiple, or even_split=False"
        )
    step, more = divmod(size, num_slice)
    edges = [k * step + min(k, more) for k in range(num_slice + 1)]
    return [nd.slice_axis(data, axis=batch_axis, begin=low, end=high) for low, high in pairwise(edges)]


def split_and_load(
    data: NDArray, ctx_list: Sequence[Context], batch_axis: int = 0, even_split: bool = True
) -> list[NDArray]:
    """Split an array as :func:`split_data` does, a slice for each context."""
    if not isinstance(data, NDArray):
        data = nd.array(data, ctx=ctx_list[0])
    slices = [data] if len(ctx_list) == 1 else split_data(data, len(ctx_list), batch_axis, even_split)
    return [part.as_in_context(context) for part, context in zip(slices, ctx_list, strict=True)]
