"""The arrays that ``simple_bind`` and ``reshape`` make, share and keep."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol, TypeAlias

import numpy as np

from weftplan import device
from weftplan.device.context import Context
from weftplan.errors import BindError, ShapeError, did_you_mean, listed
from weftplan.executor.pool_memory import grow, growable
from weftplan.ndarray import NDArray, zeros
from weftplan.ndarray.memory.chunk import Chunk, MovableChunk
from weftplan.ndarray.pushing import push
from weftplan.support.array_types import DType, DTypeLike
from weftplan.support.slots import ARRAY_CHUNK
from weftplan.symbol import Symbol
from weftplan.symbol.node import warn

ArrayFacts: TypeAlias = tuple[tuple[int, ...], DType, Context]
"""Shape, dtype and context of an array."""


class HasGradients(Protocol):
    """An executor whose gradients another executor shares."""

    @property
    def grad_dict(self) -> dict[str, NDArray | None]:
        """Its gradients by argument name."""


Groups = Mapping[str, Context] | None
_AT_ONCE = 1 << 16
"""Most bytes that the calling thread fills: to push an operation takes as long as to fill that number."""
_TOGETHER = 1 << 22
"""From this number of bytes on, an array is filled by an operation of its own, so that several workers take part."""


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


def arrays_like(
    wanted: Mapping[str, ArrayFacts],
    names: Sequence[str],
    aux_names: Sequence[str],
    reqs: Mapping[str, str],
    *,
    shared: Mapping[str, Mapping[str, NDArray]],
    shared_exec: HasGradients | None,
    shared_buffer: dict[str, NDArray] | None,
) -> tuple[list[NDArray], list[NDArray | None], list[NDArray]]:
    """Return (arguments, gradients, auxiliary states), filled with zeros unless they are shared.

    Args:
        wanted: shape, dtype and context of each variable.
        names, aux_names: the arguments and the states, in order.
        reqs: the grad_req of each argument.
        shared: for each array that is another executor's, its table.
        shared_exec: that executor, or None.
        shared_buffer: arrays to cut the other arguments from, or None.
    """
    args: list[NDArray] = []
    grads: list[NDArray | None] = []
    # Filled when all are made: until then no worker is awake, which would compete with this thread.
    unfilled: list[NDArray] = []
    apart = shared_exec is not None or shared_buffer is not None
    beside: dict[str, NDArray] = {}
    small: dict[str, NDArray] = {}
    if not apart:
        beside = gradients_beside({name: wanted[name] for name in names if reqs[name] != "null"})
        small = _small_beside({name: wanted[name] for name in (*names, *aux_names)})
    unfilled += beside.values()

    def zero(shape: tuple[int, ...], place: Context, dtype: DType) -> NDArray:
        unfilled.append(_new(shape, place, dtype))
        return unfilled[-1]

    def buffered(name: str, shape: tuple[int, ...], place: Context, dtype: DType) -> NDArray:
        if shared_buffer is None:
            return zero(shape, place, dtype)
        return buffered_array(shared_buffer, name, shape, dtype, place)

    for name in names:
        shape, dtype, place = wanted[name]
        grad = beside.get(name)
        if name in shared:
            args.append(shared_array(shared[name], name, shape, dtype))
            if reqs[name] != "null":
                grad = None if shared_exec is None else shared_exec.grad_dict.get(name)
                grad = zero(shape, place, dtype) if grad is None else grad
        else:
            args.append(small[name] if name in small else buffered(name, shape, place, dtype))
            if reqs[name] != "null" and grad is None:
                grad = buffered(f"grad of {name}", shape, place, dtype)
        grads.append(grad)
    aux = []
    for name in aux_names:
        if name in small:
            aux.append(small[name])
            continue
        shape, dtype, place = wanted[name]
        aux.append(shared_array(shared[name], name, shape, dtype) if name in shared else zero(shape, place, dtype))
    _fill(unfilled)
    return args, grads, aux


def shared_array(table: Mapping[str, NDArray | None], name: str, shape: tuple[int, ...], dtype: DType) -> NDArray:
    """Return the array ``name`` of the executor that shares it; raise BindError or ShapeError if it does not fit."""
    array = table.get(name)
    if array is None:
        hint = did_you_mean(name, table)
        raise BindError(f"simple_bind: shared_exec has no array {name!r}; {hint}it has {listed(table)}")
    if tuple(array.shape) != tuple(shape) or array.dtype != dtype:
        raise ShapeError(f"simple_bind: {name!r} is shared as {array.shape} {array.dtype} but needs {shape} {dtype}")
    return array


def buffered_array(pool: dict[str, NDArray], name: str, shape: tuple[int, ...], dtype: DType, ctx: Context) -> NDArray:
    """Return an array cut from ``pool[name]``, which is made if it is missing and grows if it is too small.

    Arrays that were cut from it before stay valid, and keep their values. So the bytes that the pool holds do not
    depend on the order of the requests. An array that the caller put there cannot grow, and no array changes its dtype
    or context: it is replaced, with a warning.
    """
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
    """Return the first bytes of ``array`` under another shape, sharing memory and var."""
    return NDArray(array.chunk, shape, array.dtype, array.offset)


def fitted(name: str, array: NDArray, shape: tuple[int, ...], allow_up_sizing: bool) -> NDArray:
    """Return ``array`` under another shape, or a larger array; raise ShapeError if that is needed and not allowed."""
    if tuple(array.shape) == shape:
        return array
    if int(np.prod(shape, dtype=np.int64)) <= array.size:
        return view_as(array, shape)
    if not allow_up_sizing:
        raise ShapeError(
            f"reshape: {name!r} grows from {array.shape} to {shape}; pass allow_up_sizing=True for a new array"
        )
    return new_zeros(shape, array.context, array.dtype)


def new_zeros(shape: tuple[int, ...], ctx: Context, dtype: DTypeLike) -> NDArray:
    """Zeros whose memory is taken now, not when the operation that fills them runs: a bind that lacks room raises.

    Shape and dtype are those of a plan, or of an array: they are not checked again.
    """
    array = _new(shape, ctx, dtype)
    _fill([array])
    return array


def _new(shape: tuple[int, ...], ctx: Context, dtype: DTypeLike) -> NDArray:
    """As :func:`new_zeros`, not filled yet."""
    kind = np.dtype(dtype)
    return NDArray.over(ARRAY_CHUNK.get()(ctx, math.prod(shape) * kind.itemsize), shape, kind)


def _fill(arrays: Sequence[NDArray]) -> None:
    """Fill new arrays with zeros: small arrays inline, the others in operations, several arrays in each."""
    large: list[NDArray] = []
    for array in arrays:
        if _is_at_once(array.chunk, array.chunk.nbytes):
            array.chunk.raw.fill(0)  # no other thread knows the array yet, and its memory does not move
        else:
            large.append(array)
    groups: dict[Context, list[Chunk]] = {}
    for array in large:
        if type(array.chunk) is not Chunk or device.get(array.context).asynchronous:
            zeros(array.shape, out=array)
            continue
        group = groups.setdefault(array.context, [])
        group.append(array.chunk)
        if sum(chunk.nbytes for chunk in group) >= _TOGETHER:
            _push_fill(groups.pop(array.context))
    for group in groups.values():
        _push_fill(group)


def _push_fill(group: list[Chunk]) -> None:
    parts = [chunk.raw for chunk in group]

    def fill() -> None:
        for raw in parts:
            raw.fill(0)

    push(fill, (), tuple(chunk.var for chunk in group), group[0].context, name="full")


def gradients_beside(wanted: dict[str, ArrayFacts]) -> dict[str, NDArray]:
    """Return memory, not filled yet, for gradients of (shape, dtype, context): contiguous for each context and dtype,
    the last gradient first.

    Backward ends with the gradients of the last arguments first, and a store exchanges them in this order, several as
    one: they are then one range of memory already. Each has a var of its own. Those that cannot be parts of a whole, on
    a device or where memory may move, are left out, and so is one that has no neighbour.
    """
    return _beside(dict(reversed(wanted.items())))[1]


def _small_beside(wanted: dict[str, ArrayFacts]) -> dict[str, NDArray]:
    """Return contiguous zeros for small arrays of (shape, dtype, context): a network has hundreds of gammas, biases and
    means, and few of them fill a page. :func:`gradients_beside` says which arrays are left out."""
    few = {name: fact for name, fact in wanted.items() if math.prod(fact[0]) * fact[1].itemsize <= _AT_ONCE}
    wholes, arrays = _beside(few)
    for whole in wholes:
        whole.raw.fill(0)  # no other thread knows the arrays yet
    return arrays


def _beside(wanted: dict[str, ArrayFacts]) -> tuple[list[Chunk], dict[str, NDArray]]:
    """Return (chunks, one for each context and dtype; arrays that are parts of them, in the order of ``wanted``)."""
    groups: dict[tuple[Context, DType], list[str]] = {}
    last, group = None, []
    for name, (_, dtype, place) in wanted.items():
        if place.device_type == "cpu":
            if last is None or last[0] is not place or last[1] is not dtype:  # most are alike
                last = place, dtype
                group = groups.setdefault((place, np.dtype(dtype)), [])
            group.append(name)
    wholes: list[Chunk] = []
    arrays: dict[str, NDArray] = {}
    for (place, dtype), names in groups.items():
        sizes = [math.prod(wanted[name][0]) * dtype.itemsize for name in names]
        if len(names) < 2 or not sum(sizes) or not _plain(place):
            continue
        whole = Chunk(place, sum(sizes))
        wholes.append(whole)
        for name, part in zip(names, whole.cut(sizes), strict=True):
            arrays[name] = NDArray.over(part, wanted[name][0], dtype)
    return wholes, arrays


def _plain(place: Context) -> bool:
    """Return whether memory of arrays never moves; an array is made for the answer only if the class leaves it open."""
    return ARRAY_CHUNK.value is Chunk or type(ARRAY_CHUNK.get()(place, 1)) is Chunk


def writes_of_zeros(array: NDArray) -> int:
    """Return how many writes its var has counted when :func:`new_zeros` has made it: none if it was filled inline."""
    return 0 if _is_at_once(array.chunk, array.nbytes) else 1


def _is_at_once(chunk: Chunk, nbytes: int) -> bool:
    """Return whether the calling thread fills a new array of ``nbytes`` bytes."""
    if nbytes > _AT_ONCE or type(chunk) is not Chunk:
        return False
    return chunk.context.device_type == "cpu" or not device.get(chunk.context).asynchronous
