"""The arrays that ``simple_bind`` makes: shapes and dtypes inferred from a few, places, and what is shared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from weftplan.device.context import Context
from weftplan.errors import BindError, ShapeError, did_you_mean, listed
from weftplan.executor.arguments import as_dtype
from weftplan.executor.block import grow, growable
from weftplan.ndarray import NDArray, zeros
from weftplan.ndarray.chunk import MovableChunk
from weftplan.symbol import Symbol
from weftplan.symbol.provenance import warn

Groups = Mapping[str, Context] | None


def infer_types(symbol: Symbol, type_dict: Mapping[str, Any]) -> tuple[list[Any], list[Any], list[Any]]:
    """Dtypes of arguments, outputs and auxiliary states; what stays open is float32."""
    known = {name: as_dtype(name, dtype) for name, dtype in type_dict.items() if dtype is not None}
    args, outs, aux = symbol.infer_type_partial(**known)
    if any(t is None for t in args):
        known.update({n: np.dtype(np.float32) for n, t in zip(symbol.list_arguments(), args, strict=True) if t is None})
        args, outs, aux = symbol.infer_type_partial(**known)
    fallback = np.dtype(np.float32)
    return [t or fallback for t in args], [t or fallback for t in outs], [t or fallback for t in aux]


def complete_shapes(
    symbol: Symbol, known: Mapping[str, tuple[int, ...]]
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Shapes of all arguments and auxiliary states; raises ShapeError naming those that stay open."""
    args, _, aux = symbol.infer_shape_partial(**known)
    names = (*symbol.list_arguments(), *symbol.list_auxiliary_states())
    open_ones = [n for n, shape in zip(names, (*args, *aux), strict=True) if not shape or min(shape) <= 0]
    if open_ones:
        raise ShapeError(f"shapes of {listed(open_ones)} cannot be inferred; give them too")
    return [tuple(s or ()) for s in args], [tuple(s or ()) for s in aux]


def variable_contexts(symbol: Symbol, ctx: Context, group2ctx: Groups) -> dict[str, Context]:
    """Contexts of the variables whose ``ctx_group`` says one; raises BindError for a group that has none."""
    if not group2ctx:
        return {}
    places = {}
    for name, attrs in symbol.attr_dict().items():
        group = attrs.get("__ctx_group__") or attrs.get("ctx_group")
        if group is not None:
            if group not in group2ctx:
                raise BindError(f"{name!r} is in ctx_group {group!r}, which group2ctx {dict(group2ctx)} does not name")
            places[name] = group2ctx[group]
    return places


def shared_array(table: Mapping[str, Any], name: str, shape: tuple[int, ...], dtype: Any) -> NDArray:
    """The array ``name`` of the executor that shares it; raises BindError or ShapeError where it does not fit."""
    array = table.get(name)
    if array is None:
        hint = did_you_mean(name, table)
        raise BindError(f"simple_bind: shared_exec has no array {name!r}; {hint}it has {listed(table)}")
    if tuple(array.shape) != tuple(shape) or array.dtype != dtype:
        raise ShapeError(f"simple_bind: {name!r} is shared as {array.shape} {array.dtype} but needs {shape} {dtype}")
    return array  # type: ignore[no-any-return]


def buffered_array(
    pool: dict[str, NDArray] | None, name: str, shape: tuple[int, ...], dtype: Any, ctx: Context
) -> NDArray:
    """An array cut from ``pool[name]``, which is made where it is missing and grows where it is too small.

    Arrays that were cut from it before stay valid, and keep their values. So the bytes that the pool holds do not
    depend on the order of the requests. An array that the caller put there cannot grow, and no array changes its dtype
    or context: it is replaced, with a warning.
    """
    if pool is None:
        return zeros(shape, ctx=ctx, dtype=dtype)
    have = pool.get(name)
    size = int(np.prod(shape, dtype=np.int64))
    if have is not None and have.dtype == dtype and have.context == ctx:
        if have.size >= size:
            return view_as(have, shape)
        chunk = have.chunk
        if isinstance(chunk, MovableChunk) and chunk.nbytes == have.nbytes:
            grow(chunk, size * have.dtype.itemsize)
            pool[name] = NDArray(chunk, shape, dtype)
            return pool[name]
        warn(f"shared_buffer: {name!r} has {have.size} elements, {size} are needed: it is replaced")
    elif have is not None:
        warn(
            f"shared_buffer: {name!r} is {have.dtype} on {have.context}, {np.dtype(dtype)} on {ctx} is needed: it is "
            f"replaced"
        )
    pool[name] = growable(ctx, shape, dtype)
    return pool[name]


def view_as(array: NDArray, shape: tuple[int, ...]) -> NDArray:
    """The first bytes of ``array`` under another shape, sharing memory and var."""
    return NDArray(array.chunk, shape, array.dtype, array.offset)
