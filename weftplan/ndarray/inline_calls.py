"""Small work on new arrays of a host: where it repeats, it runs on the calling thread, in arrays that are used again.

Of an operation on a few hundred numbers the numbers are the least. So whoever knows that work repeats (a call by name
in ``repeated.py``, an operator between arrays in ``arithmetic.py``) keeps a :class:`SmallWork`, and :func:`at_once`
makes the result out of what a dead array of its kind has left (``release.Shelf``), where the engine sees that no order
is changed by that (``engine/edges/at_once.py``). An engine that somebody watches refuses; where arrays may wait
elsewhere nothing is made here.

What writes arrays that are there already is done inside the engine's region (:func:`write_at_once`), where nobody can
begin to use them: only elementwise work and copies, which take no longer than a few requests do there.

Any thread may call anything here, also with one :class:`SmallWork`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import setitem
from typing import Any

import numpy as np

from weftplan import engine
from weftplan.device.context import Context
from weftplan.engine.var import Var
from weftplan.ndarray.base import Array
from weftplan.ndarray.errstate import QUIET
from weftplan.ndarray.memory.chunk import Chunk
from weftplan.ndarray.memory.release import CLOSED, Shelf, due, shelf_for, sweep
from weftplan.ndarray.pushing import Value
from weftplan.storage import recording, registry
from weftplan.support.slots import ARRAY_CHUNK, MAKE_ROOM

MOST_BYTES = 32 * 1024
"""Operands and result together, up to which work is small."""
MOST_COPIED = 1 << 20
"""Source and target together, up to which a whole copy is made at once: to push it and to wake a worker takes the
caller as long as to copy 512 KiB, and the worker would then wait for the interpreter until the caller lets go of it. A
training step of an MLP whose batch has 400 KB takes 0.977 of what it takes with the other bound, on two cores."""
new = object.__new__
_UINT8 = np.dtype(np.uint8)


class SmallWork:
    """A kernel, and what its result is.

    Args:
        kernel: a function of the raw operands, the raw result, and the workspace unless that is 0; calls no user code.
        name: of the operation, in reports.
        shape, dtype, nbytes: of the result, which has elements.
        workspace: bytes.
    """

    __slots__ = ("dtype", "kernel", "name", "nbytes", "scratch", "shape", "shelf", "workspace")

    def __init__(
        self,
        kernel: Callable[..., object],
        name: str,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        nbytes: int,
        workspace: int = 0,
    ) -> None:
        self.kernel = kernel
        self.name = name
        self.shape = shape
        self.dtype = dtype
        self.nbytes = nbytes
        self.workspace = workspace
        self.shelf = self.scratch = CLOSED


def at_once(
    work: SmallWork, operands: Sequence[Any], kind: type[Array], context: Context, reads: Sequence[Var]
) -> Array | None:
    """The result of ``work`` as a new array; None: it is to be pushed.

    Args:
        operands: each with a method ``raw`` and an attribute ``ready``: what ``raw`` gives, or None.
        kind: the class of the result.
        context: a host, where all arrays are.
        reads: the vars of ``operands``.
    """
    if ARRAY_CHUNK.value is not Chunk:
        return None
    if due:
        sweep()
    current = engine.get()
    result: Array | None = current.at_once(reads, _compute, work, operands, kind, context, current)
    return result


def write_at_once(
    kernel: Callable[..., object],
    operands: Sequence[Any],
    written: Sequence[Any],
    states: Sequence[int] = (),
    workspace: int = 0,
) -> bool:
    """Write arrays that are there now; False: nothing is done, and it is to be pushed.

    Args:
        kernel: elementwise, a function of the raw operands, the raw result, and the workspace unless that is 0.
        operands: arrays and values.
        written: the array that gets the result, then the operands that the kernel changes.
        states: where these are among the operands.
        workspace: bytes.
    """
    return _within(Computed(kernel, operands, written, states, workspace), operands, written)


def copy_at_once(source: Any, target: Any, key: Any = ...) -> bool:
    """``target[key] = source``, as NumPy casts; False: nothing is done, and it is to be pushed.

    Args:
        source: a value, or an array with another chunk than ``target``.
    """
    # Nothing but the whole: what is picked or spread by a key takes longer than its bytes tell.
    most = MOST_COPIED if key is ... and getattr(source, "shape", None) == target.shape else MOST_BYTES
    return _within(partial(_copy, source, target, key), (source,), (target,), most)


def _copy(source: Any, target: Any, key: Any) -> None:
    QUIET.copy().run(setitem, target.ready, key, source.ready)


def _within(
    work: Callable[[], object], operands: Sequence[Any], written: Sequence[Any], most: int = MOST_BYTES
) -> bool:
    """Have ``work``, which may be called again after an interrupt, done inside if all is in a host's memory and takes
    no more than ``most`` bytes."""
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
        ready = operand.ready
        if operand.__class__ is Value:
            continue
        if ready is None or operand.chunk.context.device_type != "cpu":
            return False
        nbytes += ready.nbytes
        var = operand.chunk.var
        if var not in writes and var not in reads:
            reads.append(var)
    return nbytes <= most and engine.get().write_at_once(work, reads, writes)


class Computed:
    """Work that may be called twice: it computes once, elsewhere, and copies what it has found to where it belongs."""

    __slots__ = ("found", "kernel", "operands", "states", "workspace", "written")

    def __init__(
        self,
        kernel: Callable[..., object],
        operands: Sequence[Any],
        written: Sequence[Any],
        states: Sequence[int],
        workspace: int,
    ) -> None:
        self.kernel = kernel
        self.operands = operands
        self.written = written
        self.states = states
        self.workspace = workspace
        self.found: list[Any] | None = None

    def __call__(self) -> None:
        found = self.found
        if found is None:
            raws = [operand.ready for operand in self.operands]
            target = self.written[0].ready
            found = [np.empty(target.shape, target.dtype)]
            for i in self.states:
                raws[i] = raws[i].copy()
                found.append(raws[i])
            scratch = (np.empty(self.workspace, np.uint8),) if self.workspace else ()
            QUIET.copy().run(self.kernel, *raws, found[0], *scratch)
            self.found = found
        for array, values in zip(self.written, found, strict=True):
            array.ready[...] = values


def _compute(work: SmallWork, operands: Sequence[Any], kind: type[Array], context: Context, current: Any) -> Array:
    raws = []
    for operand in operands:
        raw = operand.ready
        raws.append(operand.raw() if raw is None else raw)
    shelf, name = work.shelf, work.name
    if shelf.engine is not current or shelf.changes != registry.changes or shelf.context is not context:
        shelf = work.shelf = shelf_for(context, work.shape, work.dtype)
    if shelf.entries and recording.recorder is None:
        var, release, raw, view = shelf.entries.pop()  # raises where another thread was quicker: then it is pushed
    else:
        var, release, raw, view = _entry(shelf, work.shape, work.dtype, work.nbytes, name)
    if var.name is not name:
        var.name = release.args[0].name = name
    var.version = 1
    chunk = new(Chunk)  # what its constructor does, where the memory is there already
    chunk.context = context
    chunk.nbytes = work.nbytes
    chunk.name = name
    chunk._shelf = shelf
    chunk._release = release
    chunk._raw = raw
    chunk._view = view
    chunk.engine = current
    chunk.var = var
    out = new(kind)
    out.chunk = chunk
    out.shape = work.shape
    out.dtype = work.dtype
    out.offset = 0
    out.ready = view
    if work.workspace:
        _with_scratch(work, raws, view, context)
    else:
        QUIET.copy().run(work.kernel, *raws, view)
    return out


def _entry(shelf: Shelf, shape: tuple[int, ...], dtype: np.dtype[Any], nbytes: int, name: str) -> Any:
    """What lies on a shelf, or the same made anew."""
    if shelf.entries:
        entry = shelf.entries.pop()
        if (recorder := recording.recorder) is not None:
            recorder.handed_over(entry[1].args[0], name)
        return entry
    resource: Any = shelf.resource
    allocation = resource.allocate(nbytes, name=name)
    raw = allocation.raw
    return Var(shelf.engine, name), partial(resource.free, allocation), raw, np.ndarray(shape, dtype, raw)


def _with_scratch(work: SmallWork, raws: list[Any], view: Any, context: Context) -> None:
    """Run the kernel with a workspace that is lent by a shelf."""
    shelf = work.scratch
    own = work.shelf
    if shelf.engine is not own.engine or shelf.changes != own.changes or shelf.context is not context:
        shelf = work.scratch = shelf_for(context, (work.workspace,), _UINT8)
    entry = _entry(shelf, (work.workspace,), _UINT8, work.workspace, "scratch of a small call")
    try:
        QUIET.copy().run(work.kernel, *raws, view, entry[3])
    finally:
        if len(shelf.entries) < shelf.room:
            shelf.entries.append(entry)
        else:
            entry[1]()
