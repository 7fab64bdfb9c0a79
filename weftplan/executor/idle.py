"""Idle executors make room: the block of a pool is offloaded (``WEFTPLAN_SPILL``) until a thread needs its bytes.

This is a rung of storage's ladder, which is tried after arrays have left. A block may leave when no run is being pushed
on its pool, no operation on any var of the pool is pending, and no array is exported from it (``Idleness.leave``).

The bytes come back before the next run is pushed, or in the first operation that reads an output. Memory for them is
taken without the lock: that may wait for operations that need it.

A starved thread waits for runs that other threads push, for operations that are pending on a block, and a moment for
threads that look at a block. Meanwhile a run that has not begun waits, so that no thread that runs without a pause
starves the others. A wait ends when no thread in the way can go on, because all of them wait for memory, as the
wait-for graph (``waits.py``) tells.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from sys import getrefcount
from typing import Any

from weftplan import device, engine
from weftplan.device.context import Context
from weftplan.device.stream import no_stream
from weftplan.errors import OutOfMemoryError
from weftplan.executor import waits
from weftplan.executor.pool_memory import PoolMemory
from weftplan.locks import Lock, ReentrantLock, free_in_children, members
from weftplan.ndarray import NDArray
from weftplan.ndarray.memory.release import PATIENCE_S
from weftplan.ndarray.spill import spill_ahead, spilling
from weftplan.storage import offload, relief

_pools: weakref.WeakSet[Any] = weakref.WeakSet()


LOOKING_S = 1.0
"""Seconds for which a thread may look at memory that another thread lacks."""
_GLANCE_S = 0.0005
_turn = free_in_children(ReentrantLock())
"""Held while all bytes of a pool are taken, or come back for a run: of two pools that need two devices each, none then
waits for the other with half of its memory. A thread that is in a run or an operation already does not wait for it."""
_MOST_TIMES = 100
"""How often a run begins again."""


class _Here(threading.local):
    """The state of this thread."""

    def __init__(self) -> None:
        self.runs = 0
        """Runs that it is pushing."""
        self.in_runs: list[Idleness] = []
        """Blocks that could not leave when it last climbed the ladder, because another thread pushes a run on them, or
        moves them."""
        self.pending: list[Idleness] = []
        """Blocks that could not leave then because an operation needs them."""
        self.looked_at: list[Idleness] = []
        """Blocks that could not leave then because some object has a view of them."""


_here = _Here()


class _Held:
    """Something with one attribute, to count references as they are counted below."""

    __slots__ = ("__weakref__", "kept")

    def __init__(self) -> None:
        self.kept = object()


def _references(thing: object) -> int:
    """Return the number of references, those of the caller's variable and of this call included.

    A block may leave only if no object refers to its bytes, and only this count shows that. Any code can make a view:
    NumPy, CuPy, DLPack or an extension, without a call of this package. NumPy gives a view of a view the same base, so
    a weak reference to the exported array ends too early, and one to the base tells only that all views are gone, not
    that none is left besides ours. The buffer protocol refuses a resize while views exist, but only for bytearrays. A
    copy for each export would need no count; it would cost ``asnumpy`` of outputs and DLPack their shared memory.
    The count may only be too high, as in a debugger: then the block stays. Where it may be too low, see ``_EXACT``.
    """
    return getrefcount(thing)


def _measured() -> tuple[int, int]:
    block = _Held()
    table = {0: block}
    return _references(table[0]), _references(block.kept)


_BLOCK, _ATTRIBUTE = _measured()
"""The counts of a block that a table and a variable hold, and of an object that one attribute holds. Measured, because
interpreters differ in the references of a call."""
_EXACT: bool = getattr(sys, "_is_gil_enabled", lambda: True)()
"""Where references are not counted exactly nothing leaves."""


def in_turn() -> AbstractContextManager[object]:
    """Return a ``with`` block; inside it no other pool takes the memory of all its devices."""
    return nullcontext() if _here.runs or engine.get().in_operation else _turn


class Idleness:
    """The offloaded blocks of one pool, and whether more may be offloaded."""

    def __init__(self, pool: Any) -> None:
        self._pool = weakref.ref(pool)
        self._lock = Lock()
        self._users: list[int] = []
        """Threads that push a run, or bring all bytes back for one. Guarded by ``_lock``, as is the next."""
        self._kept: dict[Context, tuple[offload.Offloaded, int]] = {}
        _pools.add(pool)

    @property
    def away(self) -> dict[Context, int]:
        """Bytes in offload targets, per device."""
        return {ctx: nbytes for ctx, (_, nbytes) in self._kept.items()}

    def __enter__(self) -> None:
        """A run is about to be pushed: all bytes are there until the end of the ``with`` block."""
        me = threading.get_ident()
        if spilling.active() and not _here.runs and not engine.get().in_operation:
            self._let_others_go_first()
        with self._lock:
            there = not self._kept
            if there:
                self._users.append(me)
        if not there:
            with in_turn():
                self._bring_all_back(me)
        _here.runs += 1

    def __exit__(self, *exc: object) -> None:
        _here.runs -= 1
        self._leave_users(threading.get_ident())

    def prepared(
        self, prepare: Callable[[], object], arrays: Iterable[NDArray] = ()
    ) -> AbstractContextManager[object, bool | None]:
        """Return the ``with`` block of this object, after a call of ``prepare``. If one of them finds no memory
        because other threads wait for this pool's, those get it first, and both begin again.

        Args:
            arrays: the arrays outside the pool that the run reads and writes.
        """
        return self._prepared_in_turn(prepare, arrays) if spilling.active() else _Prepared(self, prepare)

    @contextmanager
    def _prepared_in_turn(self, prepare: Callable[[], object], arrays: Iterable[NDArray]) -> Iterator[None]:
        """As :meth:`prepared`, if other threads may wait for this pool's memory."""
        me = threading.get_ident()
        for left in reversed(range(_MOST_TIMES)):
            may_retry = left and not _here.runs and not engine.get().in_operation and spilling.active()
            if may_retry:
                self._let_pending_end(arrays)
                waits.preparing.add(me)
            begun = False
            try:
                with self:
                    prepare()
                    waits.preparing.discard(me)
                    begun = True
                    yield
                return
            except OutOfMemoryError as error:
                if begun or not may_retry or not (isinstance(error, waits.PostponedError) or self._lacked()):
                    raise
            finally:
                waits.preparing.discard(me)
            self._let_others_go_first()

    def _let_pending_end(self, arrays: Iterable[NDArray]) -> None:
        """If room is made ahead, wait while anything is pending on ``arrays``: it may be ordered after operations that
        lack the memory which the run has from its preparation on."""
        pool = self._pool()
        if pool is None or not spill_ahead.active():
            return
        variables, end = [array.var for array in arrays], time.monotonic() + PATIENCE_S
        while not pool.idle(variables) and time.monotonic() < end:
            time.sleep(_GLANCE_S)

    def _lacked(self) -> bool:
        """Return whether other threads lack memory of a device and this pool has some of it."""
        pool = self._pool()
        return pool is not None and relief.other_thread_starves([*pool._blocks, *self._kept])

    def _leave_users(self, me: int) -> None:
        with self._lock:
            self._users.remove(me)

    def _let_others_go_first(self) -> None:
        """Wait while other threads lack memory that this pool has: between two runs it may leave."""
        end = time.monotonic() + PATIENCE_S
        while self._lacked() and time.monotonic() < end:
            time.sleep(_GLANCE_S)

    def _bring_all_back(self, me: int) -> None:
        with self._lock:
            self._users.append(me)
        try:
            for ctx in self.away:
                self.bring_back(ctx)
        except BaseException:
            self._leave_users(me)
            raise

    def bring_back(self, ctx: Context) -> bool:
        """Bring the block on ``ctx`` back; return False if the pool has none, neither here nor offloaded.

        Raises:
            OutOfMemoryError: there is no room. The bytes still are away.
        """
        with self._lock:  # after a copy that is on its way
            nbytes = self.away.get(ctx)
            if nbytes is None:
                pool = self._pool()
                return pool is not None and ctx in pool._blocks
        block = PoolMemory(ctx, nbytes)
        with self._lock:
            kept, _ = self._kept.get(ctx, (None, 0))
            pool = self._pool()
            if kept is None or pool is None:  # another thread was quicker
                block.chunk.close()
                return pool is not None
            kept.read(block.raw, ctx)
            pool._install(ctx, block)
            del self._kept[ctx]
        kept.free()
        return True

    def pushed_on(self, ctx: Context) -> bool:
        """True while another thread, which is not waiting for memory itself, pushes a run that needs memory of ``ctx``,
        or moves it."""
        pool = self._pool()
        if pool is None or (ctx not in pool._blocks and ctx not in self._kept and (pool._blocks or self._kept)):
            return False
        return self.moving or self._others()

    def _others(self) -> bool:
        """True while another thread that can go on pushes a run."""
        return any(waits.can_go_on(user) for user in self.users)

    @property
    def users(self) -> list[int]:
        """Threads that push a run, or bring all bytes back for one."""
        return list(self._users)

    @property
    def moving(self) -> bool:
        """True while bytes leave or come back."""
        return self._lock.locked()

    def pending_on(self, ctx: Context) -> bool:
        """True while an operation is pending on memory of ``ctx``."""
        pool = self._pool()
        return pool is not None and ctx in pool._blocks and not pool.idle(self._vars(pool, ctx))

    def _vars(self, pool: Any, ctx: Context) -> list[Any]:
        chunks = (chunk for member in pool._placements() for chunk in member.chunks.values())
        return [pool.var, *(chunk.var for chunk in chunks if chunk.context == ctx)]

    def leave(self, ctx: Context, where: tuple[Any, ...]) -> int:
        """Offload the block on ``ctx``; return its bytes, 0 if it is in use.

        Raises:
            OutOfMemoryError: no offload target has room. The bytes have not moved.
        """
        # A thread that begins a run, or finds no bytes under an array of the pool, waits for this lock.
        if not self._lock.acquire(blocking=False):
            _here.in_runs.append(self)
            return 0
        try:
            pool = self._pool()
            block = None if pool is None else pool._blocks.get(ctx)
            if self._users:
                if self._others():
                    _here.in_runs.append(self)
                return 0
            if pool is None or block is None or not block.nbytes or not block.counted:
                return 0
            if not pool.idle(self._vars(pool, ctx)):
                _here.pending.append(self)
                return 0
            members = pool._placements()
            chunks = [chunk for member in members for chunk in member.chunks.values() if chunk.context == ctx]
            # An operation that is granted from now on finds no bytes, and waits for the lock, too. A user that had them
            # before is still pending, or still has a view: then they are put back.
            raws = [chunk.withhold() for chunk in chunks]
            kept = None
            try:
                alone = _references(block) == len(chunks) + _BLOCK and all(
                    _references(chunk._release) == _ATTRIBUTE for chunk in chunks
                )
                if not pool.idle([pool.var, *(chunk.var for chunk in chunks)]):
                    _here.pending.append(self)
                elif alone:
                    for chunk in chunks:
                        chunk.forget_views()
                    # A reader after a wait is no operation: its view refers to the bytes.
                    if all(_references(raw) == _BLOCK for raw in raws):
                        kept = offload.offload(block.raw, ctx, where, "planned")
            finally:
                if kept is None:
                    for chunk, raw in zip(chunks, raws, strict=True):
                        chunk._raw = raw
            if kept is None:
                _here.looked_at.append(self)
                return 0
            raws.clear()
            self._kept[ctx] = kept, block.nbytes
            pool._vacate(ctx)
            nbytes = block.nbytes
            block.chunk.close()
            return int(nbytes)
        finally:
            self._lock.release()

    def close(self) -> None:
        """The pool is gone: nothing waits any more."""
        for kept, _ in self._kept.values():
            kept.free()


class _Prepared:
    """A ``with`` block of a prepared run, if no other thread waits for its memory."""

    __slots__ = ("_idleness", "_prepare")

    def __init__(self, idleness: Idleness, prepare: Callable[[], object]) -> None:
        self._idleness = idleness
        self._prepare = prepare

    def __enter__(self) -> None:
        self._idleness.__enter__()
        try:
            self._prepare()
        except BaseException:
            self._idleness.__exit__()
            raise

    def __exit__(self, *exc: object) -> None:
        self._idleness.__exit__()


def _send_away(context: Context, nbytes: int) -> bool:
    """Return a rung: blocks of executors that are not running."""
    if not spilling.active() or not _pools or not _EXACT:
        return False
    place = device.get(context)
    if place.asynchronous:
        with no_stream():
            place.synchronize()
    freed = 0
    _here.in_runs, _here.pending, _here.looked_at = [], [], []
    for pool in members(_pools):
        try:
            freed += pool.idleness.leave(context, spilling.listed())
        except OutOfMemoryError as error:
            relief.explain(f"Nothing could be sent elsewhere (WEFTPLAN_SPILL): {error}")
            break
        if freed >= nbytes:
            break
    return freed > 0


def _await_users(context: Context, in_operation: bool) -> bool:
    """A wait: until one of the blocks that were in use as this thread climbed the ladder is not any more.

    Threads may wait for the memory of each other's runs. Then one of them, chosen by a lock, finds that no thread in
    its way can go on, and gives up; the others wait for that.
    """
    runs, pending, looked_at = _here.in_runs, [] if in_operation else _here.pending, _here.looked_at
    _here.in_runs, _here.pending, _here.looked_at = [], [], []
    if not runs and not pending:
        with waits.looking:
            waits.let_go_if_wanted(threading.get_ident())
        return _await_views(context, looked_at)
    me = threading.get_ident()
    completed, end = -1, 0.0
    try:
        while True:
            with waits.looking:
                waits.let_go_if_wanted(me)
                if not pending and not any(one.moving for one in runs):
                    waits.waiting[me] = [user for one in runs for user in one.users]
                if not (
                    all(one.pushed_on(context) for one in runs) and all(one.pending_on(context) for one in pending)
                ):
                    waits.waiting.pop(me, None)
                    return True
            now = engine.get().statistics().completed
            if now != completed:
                completed, end = now, time.monotonic() + PATIENCE_S
            elif time.monotonic() > end:
                return False
            time.sleep(_GLANCE_S)
    finally:
        waits.waiting.pop(me, None)


def _await_views(context: Context, blocks: list[Idleness]) -> bool:
    """Wait until no thread looks at one of the blocks, and offload it. A reader of an array has a view for a moment; an
    exported array may live for ever."""
    end = time.monotonic() + LOOKING_S
    while blocks and time.monotonic() < end:
        try:
            if any(one.leave(context, spilling.listed()) for one in blocks) or _here.in_runs or _here.pending:
                return True
        except OutOfMemoryError as error:
            relief.explain(f"Nothing could be sent elsewhere (WEFTPLAN_SPILL): {error}")
            return False
        time.sleep(_GLANCE_S)
    return False


relief.add(29, _send_away, again=True)
relief.add_wait(_await_users)
