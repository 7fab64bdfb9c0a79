"""Inline execution of small operations on host arrays, with reuse of dead arrays' memory.

For a few hundred elements, dispatch costs more than arithmetic. So a repeated operation (a call by name in
``calls/call_cache.py``, an operator between arrays in ``arithmetic.py``) keeps a :class:`SmallWork`. :func:`run_inline`
runs it on the calling thread, in memory from the free list of dead arrays of the same kind (``release.ArrayFreeList``),
if the engine sees that this changes no order (``engine/edges/inline.py``). An engine under observation refuses, and
nothing is run inline while arrays may be offloaded.

Operations that write existing arrays run inside the engine's region (:func:`write_inline`), in which no other
operation can begin to use the arrays. Only elementwise operations and copies qualify, since they take no longer than a
few calls of the engine in that region.

Any thread may call this module, also concurrently with the same :class:`SmallWork`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import setitem
from typing import Any

import numpy as np

from weftplan import engine
from weftplan.device.context import Context
from weftplan.engine.core import Engine
from weftplan.engine.var import Var
from weftplan.ndarray.base import Array, NDArrayBase
from weftplan.ndarray.errstate import QUIET
from weftplan.ndarray.memory.chunk import Chunk
from weftplan.ndarray.memory.release import CLOSED, ArrayFreeList, dead, free_list_for, sweep
from weftplan.ndarray.pushing import KernelValue
from weftplan.storage import recording, registry
from weftplan.support.array_types import DType, RawArray
from weftplan.support.slots import ARRAY_CHUNK, MAKE_ROOM

MAX_BYTES = 32 * 1024
"""Maximum bytes of the operands and the result of a small operation, together."""
MAX_COPIED = 1 << 20
"""Maximum bytes of source and target together for a whole copy to run inline. Pushing and waking a worker takes the
caller as long as copying 512 KiB, and the worker would then wait until the caller releases the interpreter lock. A
training step of an MLP with a batch of 400 KB takes 0.977 of the time that it takes with :data:`MAX_BYTES` as the
bound, on two cores."""
new = object.__new__
_UINT8 = np.dtype(np.uint8)


class SmallWork:
    """A small operation: a kernel and the shape, dtype and size of its result.

    Args:
        kernel: a function of the raw operands, the raw result, and the workspace unless that is 0; calls no user code.
        name: name of the operation in reports.
        shape, dtype, nbytes: shape, dtype and bytes of the result, which is not empty.
        workspace: bytes of the workspace; 0 for none.
    """

    __slots__ = ("free_list", "kernel", "name", "nbytes", "np_dtype", "scratch", "shape", "workspace")

    def __init__(
        self,
        kernel: Callable[..., object],
        name: str,
        shape: tuple[int, ...],
        dtype: DType,
        nbytes: int,
        workspace: int = 0,
    ) -> None:
        self.kernel = kernel
        self.name = name
        self.shape = shape
        self.np_dtype = dtype
        self.nbytes = nbytes
        self.workspace = workspace
        self.free_list = self.scratch = CLOSED


def run_inline(
    work: SmallWork,
    operands: Sequence[NDArrayBase | KernelValue],
    kind: type[Array],
    context: Context,
    reads: Sequence[Var],
) -> Array | None:
    """Return the result of ``work`` as a new array; None if it must be pushed.

    Args:
        operands: each with a method ``raw`` and an attribute ``ready``: the result of ``raw``, or None.
        kind: the class of the result.
        context: the host context of all arrays.
        reads: the vars of ``operands``.
    """
    if ARRAY_CHUNK.value is not Chunk:
        return None
    if dead.pending:
        sweep()
    current = engine.get()
    result: Array | None = current.run_inline(reads, _compute, work, operands, kind, context, current)
    return result


def write_inline(
    kernel: Callable[..., object],
    operands: Sequence[NDArrayBase | KernelValue],
    written: Sequence[NDArrayBase],
    states: Sequence[int] = (),
    workspace: int = 0,
) -> bool:
    """Write existing arrays inline; return False, with nothing done, if the operation must be pushed.

    Args:
        kernel: elementwise, a function of the raw operands, the raw result, and the workspace unless that is 0.
        operands: arrays and values.
        written: the array that gets the result, then the operands that the kernel changes.
        states: the positions of the changed operands among ``operands``.
        workspace: bytes.
    """
    return _within(Computed(kernel, operands, written, states, workspace), operands, written)


def copy_inline(source: NDArrayBase | KernelValue, target: NDArrayBase, key: object = ...) -> bool:
    """Run ``target[key] = source`` inline, with NumPy's casts; return False, with nothing done, if it must be pushed.

    Args:
        source: a value, or an array with another chunk than ``target``.
    """
    # Only whole arrays get the larger bound: a gather or scatter by a key takes longer than its bytes suggest.
    limit = MAX_COPIED if key is ... and getattr(source, "shape", None) == target.shape else MAX_BYTES
    return _within(partial(_copy, source, target, key), (source,), (target,), limit)


def _copy(source: NDArrayBase | KernelValue, target: NDArrayBase, key: object) -> None:
    QUIET.copy().run(setitem, target.ready, key, source.ready)


def _within(
    work: Callable[[], object],
    operands: Sequence[NDArrayBase | KernelValue],
    written: Sequence[NDArrayBase],
    max_bytes: int = MAX_BYTES,
) -> bool:
    """Run ``work`` in the engine's region if all arrays are in host memory and take at most ``max_bytes`` bytes.

    ``work`` may be called a second time after an interrupt.
    """
    if MAKE_ROOM.value is not None:
        return False
    writes: list[Any] = []
    reads: list[Any] = []
    nbytes = 0
    for array in written:
        chunk = array.chunk
        if array.ready is None or chunk.var in writes or chunk.context.device_type != "cpu":
            return False
        nbytes += array.ready.nbytes
        writes.append(chunk.var)
    for operand in operands:
        if type(operand) is KernelValue:
            continue
        ready = operand.ready
        if ready is None or operand.chunk.context.device_type != "cpu":
            return False
        nbytes += ready.nbytes
        var = operand.chunk.var
        if var not in writes and var not in reads:
            reads.append(var)
    return nbytes <= max_bytes and engine.get().write_inline(work, reads, writes)


class Computed:
    """An operation that may be called twice: it computes once, into temporaries, and copies these to the targets."""

    __slots__ = ("kernel", "operands", "results", "states", "workspace", "written")

    def __init__(
        self,
        kernel: Callable[..., object],
        operands: Sequence[NDArrayBase | KernelValue],
        written: Sequence[NDArrayBase],
        states: Sequence[int],
        workspace: int,
    ) -> None:
        self.kernel = kernel
        self.operands = operands
        self.written = written
        self.states = states
        self.workspace = workspace
        self.results: list[Any] | None = None

    def __call__(self) -> None:
        results = self.results
        if results is None:
            raws = [operand.ready for operand in self.operands]
            target = self.written[0].ready
            results = [np.empty(target.shape, target.dtype)]
            for i in self.states:
                raws[i] = raws[i].copy()
                results.append(raws[i])
            scratch = (np.empty(self.workspace, np.uint8),) if self.workspace else ()
            QUIET.copy().run(self.kernel, *raws, results[0], *scratch)
            self.results = results
        for array, values in zip(self.written, results, strict=True):
            array.ready[...] = values


def _compute(
    work: SmallWork, operands: Sequence[NDArrayBase | KernelValue], kind: type[Array], context: Context, current: Engine
) -> Array:
    raws = []
    for operand in operands:
        raw = operand.ready
        raws.append(operand.raw() if raw is None else raw)
    free_list, name = work.free_list, work.name
    if free_list.engine is not current or free_list.changes != registry.changes or free_list.context is not context:
        free_list = work.free_list = free_list_for(context, work.shape, work.np_dtype)
    if free_list.entries and recording.recorder is None:
        var, release, raw, view = free_list.entries.pop()  # raises if another thread was faster: then it is pushed
    else:
        var, release, raw, view = _entry(free_list, work.shape, work.np_dtype, work.nbytes, name)
    if var.name is not name:
        var.name = release.args[0].name = name
    var.version = 1
    chunk = new(Chunk)  # as its constructor does, with existing memory
    chunk.context = context
    chunk.nbytes = work.nbytes
    chunk.name = name
    chunk._free_list = free_list
    chunk._release = release
    chunk._raw = raw
    chunk._view = view
    chunk.engine = current
    chunk.var = var
    out = new(kind)
    out.chunk = chunk
    out.dims = work.shape
    out.np_dtype = work.np_dtype
    out.offset = 0
    out.ready = view
    if work.workspace:
        _with_scratch(work, raws, view, context)
    else:
        QUIET.copy().run(work.kernel, *raws, view)
    return out


def _entry(free_list: ArrayFreeList, shape: tuple[int, ...], dtype: DType, nbytes: int, name: str) -> Any:
    """Take an entry from the free list, or make a new entry."""
    if free_list.entries:
        entry = free_list.entries.pop()
        if (recorder := recording.recorder) is not None:
            recorder.handed_over(entry[1].args[0], name)
        return entry
    resource: Any = free_list.resource
    allocation = resource.allocate(nbytes, name=name)
    raw = allocation.raw
    return Var(free_list.engine, name), partial(resource.free, allocation), raw, np.ndarray(shape, dtype, raw)


def _with_scratch(work: SmallWork, raws: list[object], view: RawArray, context: Context) -> None:
    """Run the kernel with a workspace from a free list."""
    free_list = work.scratch
    own = work.free_list
    if free_list.engine is not own.engine or free_list.changes != own.changes or free_list.context is not context:
        free_list = work.scratch = free_list_for(context, (work.workspace,), _UINT8)
    entry = _entry(free_list, (work.workspace,), _UINT8, work.workspace, "scratch of a small call")
    try:
        QUIET.copy().run(work.kernel, *raws, view, entry[3])
    finally:
        if len(free_list.entries) < free_list.capacity:
            free_list.entries.append(entry)
        else:
            entry[1]()
