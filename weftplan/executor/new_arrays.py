"""Allocate, share and reshape the arrays of ``simple_bind`` and ``reshape``."""

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
    """An object with gradient arrays to share: an executor."""

    @property
    def grad_dict(self) -> dict[str, NDArray | None]:
        """Gradients by argument name; None for an unwanted gradient."""


Groups = Mapping[str, Context] | None
"""Contexts by ``ctx_group`` attribute."""
_INLINE_BYTES = 1 << 16
"""Maximum bytes of an array that the calling thread fills itself: to push an operation would take as long."""
_BATCH_BYTES = 1 << 22
"""One operation fills several arrays until their bytes reach this number, so that several workers share the work."""


def variable_contexts(symbol: Symbol, ctx: Context, group2ctx: Groups) -> dict[str, Context]:
    """Return the contexts of the variables with a ``ctx_group``; raise BindError if ``group2ctx`` lacks a group."""
    if not group2ctx:
        return {}
    contexts = {}
    for name, attrs in symbol.attr_dict().items():
        group = attrs.get("__ctx_group__") or attrs.get("ctx_group")
        if group is not None:
            if group not in group2ctx:
                raise BindError(f"{name!r} is in ctx_group {group!r}, which group2ctx {dict(group2ctx)} does not name")
            contexts[name] = group2ctx[group]
    return contexts


def arrays_like(
    facts: Mapping[str, ArrayFacts],
    names: Sequence[str],
    aux_names: Sequence[str],
    reqs: Mapping[str, str],
    *,
    shared: Mapping[str, Mapping[str, NDArray]],
    shared_exec: HasGradients | None,
    shared_buffer: dict[str, NDArray] | None,
) -> tuple[list[NDArray], list[NDArray | None], list[NDArray]]:
    """Return the arrays of arguments, gradients and auxiliary states; new arrays are filled with zeros.

    Args:
        facts: shape, dtype and context of each variable.
        names, aux_names: the arguments and the states, in order.
        reqs: the grad_req of each argument.
        shared: for each variable whose array is shared, the arrays of ``shared_exec`` by name.
        shared_exec: the executor whose arrays are shared, or None.
        shared_buffer: arrays from which the other arguments and gradients are cut, or None.
    """
    args: list[NDArray] = []
    grads: list[NDArray | None] = []
    # Filled after all have been made: a fill wakes workers, which would compete with this thread for the interpreter.
    unfilled: list[NDArray] = []
    shares = shared_exec is not None or shared_buffer is not None
    contiguous: dict[str, NDArray] = {}
    small: dict[str, NDArray] = {}
    if not shares:
        contiguous = contiguous_gradients({name: facts[name] for name in names if reqs[name] != "null"})
        small = _contiguous_small({name: facts[name] for name in (*names, *aux_names)})
    unfilled += contiguous.values()

    def zero(shape: tuple[int, ...], context: Context, dtype: DType) -> NDArray:
        unfilled.append(_new(shape, context, dtype))
        return unfilled[-1]

    def buffered(name: str, shape: tuple[int, ...], context: Context, dtype: DType) -> NDArray:
        if shared_buffer is None:
            return zero(shape, context, dtype)
        return buffered_array(shared_buffer, name, shape, dtype, context)

    for name in names:
        shape, dtype, context = facts[name]
        grad = contiguous.get(name)
        if name in shared:
            args.append(shared_array(shared[name], name, shape, dtype))
            if reqs[name] != "null":
                grad = None if shared_exec is None else shared_exec.grad_dict.get(name)
                grad = zero(shape, context, dtype) if grad is None else grad
        else:
            args.append(small[name] if name in small else buffered(name, shape, context, dtype))
            if reqs[name] != "null" and grad is None:
                grad = buffered(f"grad of {name}", shape, context, dtype)
        grads.append(grad)
    aux = []
    for name in aux_names:
        if name in small:
            aux.append(small[name])
            continue
        shape, dtype, context = facts[name]
        aux.append(shared_array(shared[name], name, shape, dtype) if name in shared else zero(shape, context, dtype))
    _fill(unfilled)
    return args, grads, aux


def shared_array(table: Mapping[str, NDArray | None], name: str, shape: tuple[int, ...], dtype: DType) -> NDArray:
    """Return the array ``name`` of ``table``, the arrays of another executor.

    Raises:
        BindError: the table lacks the name.
        ShapeError: the shape or dtype of the array differs.
    """
    array = table.get(name)
    if array is None:
        hint = did_you_mean(name, table)
        raise BindError(f"simple_bind: shared_exec has no array {name!r}; {hint}it has {listed(table)}")
    if tuple(array.shape) != tuple(shape) or array.np_dtype != dtype:
        raise ShapeError(f"simple_bind: {name!r} is shared as {array.shape} {array.np_dtype} but needs {shape} {dtype}")
    return array


def buffered_array(pool: dict[str, NDArray], name: str, shape: tuple[int, ...], dtype: DType, ctx: Context) -> NDArray:
    """Return an array cut from ``pool[name]``. Add this entry if it is missing, and enlarge it if it is too small.

    Earlier arrays on a chunk that grows stay valid and keep their values. So the total bytes of the pool do not depend
    on the order of the requests. An array that the caller put into the pool cannot grow. If it is too small, or if
    dtype or context differ, ``pool[name]`` is replaced by a new array, with a warning.
    """
    have = pool.get(name)
    size = int(np.prod(shape, dtype=np.int64))
    if have is not None and have.np_dtype == dtype and have.context == ctx:
        if have.size >= size:
            return view_as(have, shape)
        chunk = have.chunk
        if isinstance(chunk, MovableChunk) and chunk.nbytes == have.nbytes:
            grow(chunk, size * have.np_dtype.itemsize)
            pool[name] = NDArray(chunk, shape, dtype)
            return pool[name]
        warn(f"shared_buffer: {name!r} has {have.size} elements, {size} are needed: it is replaced")
    elif have is not None:
        warn(
            f"shared_buffer: {name!r} is {have.np_dtype} on {have.context}, {np.dtype(dtype)} on {ctx} is needed: "
            f"it is replaced"
        )
    pool[name] = growable(ctx, shape, dtype)
    return pool[name]


def view_as(array: NDArray, shape: tuple[int, ...]) -> NDArray:
    """Return an array of another shape over the first bytes of ``array``; both share memory and var."""
    return NDArray(array.chunk, shape, array.np_dtype, array.offset)


def fitted(name: str, array: NDArray, shape: tuple[int, ...], allow_up_sizing: bool) -> NDArray:
    """Return ``array`` if it has ``shape``, a view of its first elements if these suffice, otherwise new zeros.

    Raises:
        ShapeError: the array has too few elements, and ``allow_up_sizing`` is False.
    """
    if tuple(array.shape) == shape:
        return array
    if int(np.prod(shape, dtype=np.int64)) <= array.size:
        return view_as(array, shape)
    if not allow_up_sizing:
        raise ShapeError(
            f"reshape: {name!r} grows from {array.shape} to {shape}; pass allow_up_sizing=True for a new array"
        )
    return new_zeros(shape, array.context, array.np_dtype)


def new_zeros(shape: tuple[int, ...], ctx: Context, dtype: DTypeLike) -> NDArray:
    """Return zeros. Their memory is allocated by this call, so that a bind raises an error if memory is lacking.

    The fill may be pushed. Shape and dtype are not checked, as they come from a plan or an array.
    """
    array = _new(shape, ctx, dtype)
    _fill([array])
    return array


def _new(shape: tuple[int, ...], ctx: Context, dtype: DTypeLike) -> NDArray:
    """Return an array with allocated but uninitialized memory."""
    kind = np.dtype(dtype)
    return NDArray.over(ARRAY_CHUNK.get()(ctx, math.prod(shape) * kind.itemsize), shape, kind)


def _fill(arrays: Sequence[NDArray]) -> None:
    """Fill new arrays with zeros: small arrays inline, larger arrays by pushed operations of about ``_BATCH_BYTES``."""
    large: list[NDArray] = []
    for array in arrays:
        if _is_filled_inline(array.chunk, array.chunk.nbytes):
            array.chunk.raw.fill(0)  # without the engine: no other thread has the array yet, and its memory stays
        else:
            large.append(array)
    groups: dict[Context, list[Chunk]] = {}
    for array in large:
        if type(array.chunk) is not Chunk or device.get(array.context).asynchronous:
            zeros(array.shape, out=array)
            continue
        group = groups.setdefault(array.context, [])
        group.append(array.chunk)
        if sum(chunk.nbytes for chunk in group) >= _BATCH_BYTES:
            _push_fill(groups.pop(array.context))
    for group in groups.values():
        _push_fill(group)


def _push_fill(group: list[Chunk]) -> None:
    """Push one operation that fills all chunks of ``group``, which are on one context, with zeros."""
    parts = [chunk.raw for chunk in group]

    def fill() -> None:
        for raw in parts:
            raw.fill(0)

    push(fill, (), tuple(chunk.var for chunk in group), group[0].context, name="full")


def contiguous_gradients(facts: dict[str, ArrayFacts]) -> dict[str, NDArray]:
    """Return uninitialized arrays for gradients, contiguous for each context and dtype, the last gradient first.

    Backward completes the gradients of the last arguments first. A store exchanges gradients in this order and in
    batches, and a batch of contiguous gradients needs no copy. Each array has its own var. The result omits arrays that
    are not on a CPU, arrays whose memory may move, and an array if no other has its context and dtype.
    """
    return _contiguous(dict(reversed(facts.items())))[1]


def _contiguous_small(facts: dict[str, ArrayFacts]) -> dict[str, NDArray]:
    """Return contiguous arrays of zeros for the arrays of at most ``_INLINE_BYTES``.

    A network has hundreds of gammas, biases and means, most of them smaller than a page; one allocation per context and
    dtype serves all of them. The result omits arrays by the same rules as :func:`contiguous_gradients`.
    """
    few = {name: fact for name, fact in facts.items() if math.prod(fact[0]) * fact[1].itemsize <= _INLINE_BYTES}
    wholes, arrays = _contiguous(few)
    for chunk_of_all in wholes:
        chunk_of_all.raw.fill(0)  # without the engine: no other thread has the arrays yet
    return arrays


def _contiguous(facts: dict[str, ArrayFacts]) -> tuple[list[Chunk], dict[str, NDArray]]:
    """Return one chunk for each context and dtype, and the arrays that these chunks are cut into, by name.

    The arrays of a chunk have the order of ``facts``. The result omits arrays by the same rules as
    :func:`contiguous_gradients`.
    """
    groups: dict[tuple[Context, DType], list[str]] = {}
    last_kind, group = None, []
    for name, (_, dtype, context) in facts.items():
        if context.device_type == "cpu":
            if last_kind is None or last_kind[0] is not context or last_kind[1] is not dtype:  # most are alike
                last_kind = context, dtype
                group = groups.setdefault((context, np.dtype(dtype)), [])
            group.append(name)
    wholes: list[Chunk] = []
    arrays: dict[str, NDArray] = {}
    for (context, dtype), names in groups.items():
        sizes = [math.prod(facts[name][0]) * dtype.itemsize for name in names]
        if len(names) < 2 or not sum(sizes) or not _has_plain_chunks(context):
            continue
        chunk_of_all = Chunk(context, sum(sizes))
        wholes.append(chunk_of_all)
        for name, part in zip(names, chunk_of_all.cut(sizes), strict=True):
            arrays[name] = NDArray.over(part, facts[name][0], dtype)
    return wholes, arrays


def _has_plain_chunks(context: Context) -> bool:
    """Return whether arrays on ``context`` have plain chunks, whose memory never moves."""
    # The chunk factory may choose a class by context, so a chunk of one byte is made to see it.
    return ARRAY_CHUNK.value is Chunk or type(ARRAY_CHUNK.get()(context, 1)) is Chunk


def writes_of_zeros(array: NDArray) -> int:
    """Return the version of the var of an array that :func:`new_zeros` has made: 0 if it was filled inline, else 1."""
    return 0 if _is_filled_inline(array.chunk, array.nbytes) else 1


def _is_filled_inline(chunk: Chunk, nbytes: int) -> bool:
    """Return whether the calling thread itself fills a new array of ``nbytes`` bytes on ``chunk``."""
    if nbytes > _INLINE_BYTES or type(chunk) is not Chunk:
        return False
    return chunk.context.device_type == "cpu" or not device.get(chunk.context).asynchronous
