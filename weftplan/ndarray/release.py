"""What becomes of memory that no array needs any more: the way of a dead chunk's bytes back to storage.

A chunk's memory may go back only when every operation that was pushed on its var has run. So the engine frees it
(``delete_variable(var, free)``), or :func:`drain` does so at once where nobody else has the var, since no operation
can be pending then. A chunk is collected at moments that nobody chooses, possibly inside a lock of the engine or of
storage; its finalizer therefore only appends to :data:`dead`, which a later push or new chunk empties.

This file owns the three deques, and the rungs that storage climbs when memory runs out. All of it may be used from any
thread. Finalizers may only append.
"""

from __future__ import annotations

import gc
import sys
from collections import deque
from collections.abc import Callable
from functools import partial
from sys import getrefcount
from typing import Any

from weftplan import config, engine
from weftplan.device.context import Context, cpu
from weftplan.errors import EngineError
from weftplan.ndarray import stream_order
from weftplan.storage import Resource, relief

dead: deque[tuple[Any, Any, Context, Callable[[], object]]] = deque()
"""(engine, var, context, what to do when the var is idle) of collected chunks."""
due: deque[int] = deque()
"""Bytes of dead chunks; empty while ``dead`` is a few small chunks, which are not counted. Arithmetic on small arrays,
one push after the other, looks at this only: most chunks will be given back without an operation then, because those
on their vars are over."""
SMALL, FEW = 4096, 1024
"""Bytes, chunks: together the most that waits, 4 MiB."""
coming: deque[None] = deque()
"""One element for each memory that the engine will give back when the operations on it are over."""
PATIENCE_S = 10.0
"""Seconds that a request for memory waits for pending operations, in all."""


def _next(dead: deque[tuple[Any, Any, Context, Callable[[], object]]]) -> tuple[Any, Any, Context, Any, int]:
    """The first entry of ``dead``, taken out, and how many references its var has, those of this call included."""
    owner, var, context, release = dead.popleft()
    return owner, var, context, release, getrefcount(var)


_ALONE = _next(deque([(None, object(), cpu(), int)]))[4] if getattr(sys, "_is_gil_enabled", lambda: True)() else 0
"""The count where there is no other reference; 0, which no count is, without a GIL: there it may not be exact."""


def _inherited(dead: deque[Any], free: Any, nbytes: int, alone: int) -> Any:
    """See :func:`inherited`; -1 for ``alone`` gives the count of references instead."""
    try:
        last = dead.pop()
    except IndexError:  # another thread was quicker
        return None
    _, var, _, release = last
    count = getrefcount(var)
    if alone < 0:
        return count
    if (
        count == alone
        and release.__class__ is partial
        and release.func == free
        and release.args[0].nbytes == nbytes
        and var.failure is None
        and var.events is None
    ):
        return release
    dead.append(last)
    return None


_ALONE_INHERITED = _inherited(deque([(None, object(), cpu(), int)]), None, 0, -1) if _ALONE else 0


def inherited(resource: Resource, nbytes: int) -> partial[None] | None:
    """What gives the memory of the chunk that died last back to ``resource``, if it has ``nbytes`` bytes and nothing is
    pending on it: the memory is the caller's then, with the duty to give it back. None: there is none such."""
    found: partial[None] | None = _inherited(dead, resource.free, nbytes, _ALONE_INHERITED) if dead else None
    return found


_threshold: float | None = None
"""Bytes of ``FLAGS_eager_delete_tensor_gb``; None: not read yet."""


def drain(*, everything: bool = False) -> None:
    """Give the memory of every collected chunk back, after the operations pending on its var; cheap without any.

    Nothing is given back while fewer bytes are dead than ``FLAGS_eager_delete_tensor_gb`` says, or where that is below
    0, unless ``everything`` is asked for: memory is short then.

    Each pending operation holds its vars. So when nobody but this function has the var (CPython with a GIL counts
    that exactly) there is none, and the memory goes back at once; else the engine deletes the var in its turn.
    """
    if stream_order.waiting:
        stream_order.settle()
    if _threshold != 0.0 and not everything and _early():
        return
    due.clear()
    while dead:
        try:
            owner, var, context, release, count = _next(dead)
        except IndexError:  # another thread took the last one
            return
        if count == _ALONE and var.failure is None and var.events is None:
            release()
            continue
        coming.append(None)
        try:
            owner.delete_variable(var, partial(_arrive, release), context)
        except EngineError:
            # The engine has stopped for good: nothing can be pending.
            _arrive(release)


def _early() -> bool:
    """True while what is dead is to stay."""
    global _threshold
    if _threshold is None:
        _threshold = float(config.process("FLAGS_eager_delete_tensor_gb")) * 2**30
    return _threshold < 0 or sum(list(due)) < _threshold


def _arrive(release: Callable[[], object]) -> None:
    """Give memory back whose var the engine has deleted."""
    try:
        release()
    finally:
        coming.pop()


def _give_dead_back(context: Context, nbytes: int) -> bool:
    """A rung of the ladder: what is dead."""
    if not dead:
        return False
    drain(everything=True)
    return True


def _collect_cycles(context: Context, nbytes: int) -> bool:
    """A rung: arrays that only cycles hold."""
    gc.collect()
    return _give_dead_back(context, nbytes)


def _await_frees(context: Context, nbytes: int) -> bool:
    """A rung: frees that wait for pending operations. Where none does, or in an operation, there is no wait."""
    awaited = len(coming)
    try:
        return awaited > 0 and (engine.get().settle(PATIENCE_S) or len(coming) < awaited)
    except EngineError:  # the engine has stopped, or this thread is in the middle of its work
        return False


relief.add(10, _give_dead_back)
relief.add(30, _collect_cycles)
relief.add(40, _await_frees)
