"""Offload the planned memory of idle executors (``WEFTPLAN_SPILL``) when an allocation would fail.

This is a rung of storage's ladder, after the rung that offloads arrays. The rung offloads whole blocks of pools. A
block is idle if no run is being pushed on its pool, no operation on a var of the pool is pending, and no view of its
bytes exists (``Idleness.leave``). The bytes come back before the next run is pushed, or when an output is read.

If no block is idle, a starved thread waits for runs that other threads push, for operations that are pending on a
block, and up to ``LOOKING_S`` seconds for views to go away. Meanwhile new runs on that device wait, so that a thread
that runs without a pause does not starve the others. The wait fails if the threads that it depends on wait for memory
themselves (``waits.py``).
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
"""Seconds that a starved thread waits for views of a block to go away."""
_POLL_S = 0.0005
"""Seconds between two polls of a wait."""
_all_devices_lock = free_in_children(ReentrantLock())
"""Held while a pool allocates or brings back its blocks on all devices. Without it, two pools that need the same two
devices could each get one device and wait for the other."""
_MAX_ATTEMPTS = 100
"""Maximum number of attempts to prepare one run."""


class _ThreadState(threading.local):
    """The runs of a thread, and the pools that its last climb of the ladder found in use."""

    def __init__(self) -> None:
        self.runs = 0
        """Number of runs that the thread is pushing."""
        self.in_runs: list[Idleness] = []
        """Pools on which another thread pushes a run, or whose blocks it moves."""
        self.pending: list[Idleness] = []
        """Pools with pending operations."""
        self.viewed: list[Idleness] = []
        """Pools whose blocks have views."""


_thread = _ThreadState()


class _Probe:
    """An object with one attribute, for measuring reference counts."""

    __slots__ = ("__weakref__", "value")

    def __init__(self) -> None:
        self.value = object()


def _references(target: object) -> int:
    """Return the number of references to ``target``, including the caller's variable and the argument of this call."""
    # Only a reference count shows that no view of a block is left:
    # - NumPy, CuPy, DLPack or an extension can make a view without a call of this package.
    # - A view of a view has the same base. So a weak reference to an exported array dies before its views, and a weak
    #   reference to the base stays alive with the views of the package itself.
    # - The buffer protocol refuses a resize while views exist, but only for bytearrays.
    # A copy for each export would need no count, but `asnumpy` of outputs and DLPack would no longer share memory.
    # The count may be too high, as in a debugger: then the block stays. If it may be too low, `_EXACT` is False.
    return getrefcount(target)


def _measured() -> tuple[int, int]:
    """Return the values of ``_BLOCK`` and ``_ATTRIBUTE`` in this interpreter."""
    block = _Probe()
    table = {0: block}
    return _references(table[0]), _references(block.value)


_BLOCK, _ATTRIBUTE = _measured()
"""The results of :func:`_references` for a block that a dictionary and a variable refer to, and for an object that one
attribute refers to. Measured, because interpreters count the references of a call differently."""
_EXACT: bool = getattr(sys, "_is_gil_enabled", lambda: True)()
"""Whether reference counts are exact. If not (Python without GIL), no block is offloaded."""


def hold_all_devices() -> AbstractContextManager[object]:
    """Return a context manager that holds ``_all_devices_lock``, unless the thread is in a run or an operation."""
    # The thread that holds the lock may wait for such a run or operation to end, which must not wait for the lock.
    return nullcontext() if _thread.runs or engine.get().in_operation else _all_devices_lock


class Idleness:
    """The offloaded blocks of one pool, and the threads that need its blocks in memory.

    As a context manager it brings all blocks back, and keeps them in memory while a run is prepared and pushed.
    """

    def __init__(self, pool: Any) -> None:
        self._pool = weakref.ref(pool)
        self._lock = Lock()
        """Makes the test of ``_offloaded`` and the entry in ``_users`` one step; held while a block moves."""
        self._users: list[int] = []
        """Threads that push a run, or bring all blocks back for a run; written under ``_lock``."""
        self._offloaded: dict[Context, tuple[offload.Offloaded, int]] = {}
        """Contents and bytes of each offloaded block; written under ``_lock``."""
        _pools.add(pool)

    @property
    def away(self) -> dict[Context, int]:
        """Bytes of offloaded blocks by device."""
        # `list` is atomic: another thread may bring a block back during the comprehension.
        return {ctx: nbytes for ctx, (_, nbytes) in list(self._offloaded.items())}

    def __enter__(self) -> None:
        """Bring all blocks back; none is offloaded until the end of the ``with`` block."""
        me = threading.get_ident()
        if spilling.active() and not _thread.runs and not engine.get().in_operation:
            self._yield_memory()
        with self._lock:
            present = not self._offloaded
            if present:
                self._users.append(me)  # under the lock, so that no block is offloaded after the test
        if not present:
            with hold_all_devices():
                self._bring_all_back(me)
        _thread.runs += 1

    def __exit__(self, *exc: object) -> None:
        _thread.runs -= 1
        self._remove_user(threading.get_ident())

    def prepared(
        self, prepare: Callable[[], object], arrays: Iterable[NDArray] = ()
    ) -> AbstractContextManager[object, bool | None]:
        """Return a context manager that enters this object and then calls ``prepare``.

        If either fails to allocate while other threads wait for memory of this pool, release the memory, let them go
        first, and try again.

        Args:
            prepare: prepares the calls of a run; may be called several times.
            arrays: the arrays outside the pool that the run reads and writes.
        """
        return self._prepared_with_retry(prepare, arrays) if spilling.active() else _Prepared(self, prepare)

    @contextmanager
    def _prepared_with_retry(self, prepare: Callable[[], object], arrays: Iterable[NDArray]) -> Iterator[None]:
        """Implement :meth:`prepared` for the case that blocks may be offloaded."""
        me = threading.get_ident()
        for attempts_left in reversed(range(_MAX_ATTEMPTS)):
            may_retry = attempts_left and not _thread.runs and not engine.get().in_operation and spilling.active()
            if may_retry:
                self._let_pending_end(arrays)
                waits.preparing.add(me)
            begun = False
            try:
                with self:
                    prepare()
                    # From here on the run has begun. It no longer yields its memory, and its errors are the caller's.
                    waits.preparing.discard(me)
                    begun = True
                    yield
                return
            except OutOfMemoryError as error:
                if begun or not may_retry or not (isinstance(error, waits.PostponedError) or self._lacked()):
                    raise
            finally:
                waits.preparing.discard(me)
            self._yield_memory()

    def _let_pending_end(self, arrays: Iterable[NDArray]) -> None:
        """Wait until no operation on ``arrays`` is pending, at most ``PATIENCE_S`` seconds.

        Do nothing unless copies to offload targets are scheduled ahead (``spill_ahead.py``).
        """
        # Without this wait:
        # 1. an operation on an array of `arrays` waits for an operation that lacks memory;
        # 2. this thread prepares its run, which keeps the blocks of the pool in memory;
        # 3. the run waits for the first operation, so the blocks whose memory the other operation lacks stay in use.
        pool = self._pool()
        if pool is None or not spill_ahead.active():
            return
        variables, end = [array.var for array in arrays], time.monotonic() + PATIENCE_S
        while not pool.idle(variables) and time.monotonic() < end:
            time.sleep(_POLL_S)

    def _lacked(self) -> bool:
        """Return whether another thread is starved on a device of this pool's blocks, offloaded blocks included."""
        pool = self._pool()
        return pool is not None and relief.other_thread_starves([*pool._blocks, *self._offloaded])

    def _remove_user(self, me: int) -> None:
        """Remove thread ``me`` from the users once."""
        with self._lock:
            self._users.remove(me)

    def _yield_memory(self) -> None:
        """Between two runs, wait while other threads are starved, so that they can offload the blocks of this pool.

        Wait at most ``PATIENCE_S`` seconds.
        """
        end = time.monotonic() + PATIENCE_S
        while self._lacked() and time.monotonic() < end:
            time.sleep(_POLL_S)

    def _bring_all_back(self, me: int) -> None:
        """Add thread ``me`` to the users and bring all blocks back; if that fails, remove the thread again."""
        with self._lock:
            self._users.append(me)
        try:
            for ctx in self.away:
                self.bring_back(ctx)
        except BaseException:
            self._remove_user(me)
            raise

    def bring_back(self, ctx: Context) -> bool:
        """Bring the block on ``ctx`` back if it is offloaded; return whether the pool now has a block there.

        Raises:
            OutOfMemoryError: no memory for the block, which stays offloaded.
        """
        with self._lock:  # waits for a thread that is moving the block
            nbytes = self.away.get(ctx)
            if nbytes is None:
                pool = self._pool()
                return pool is not None and ctx in pool._blocks
        # Without the lock: the allocation may wait for operations that need it.
        block = PoolMemory(ctx, nbytes)
        with self._lock:
            offloaded, _ = self._offloaded.get(ctx, (None, 0))
            pool = self._pool()
            if offloaded is None or pool is None:  # another thread has brought it back meanwhile
                block.chunk.close()
                return pool is not None
            offloaded.read(block.raw, ctx)
            pool._install(ctx, block)
            del self._offloaded[ctx]
        offloaded.free()
        return True

    def pushed_on(self, ctx: Context) -> bool:
        """Return whether the pool is in use: a thread moves a block, or another thread that can go on pushes a run.

        False if all blocks of the pool are on other devices than ``ctx``.
        """
        pool = self._pool()
        if pool is None or (
            ctx not in pool._blocks and ctx not in self._offloaded and (pool._blocks or self._offloaded)
        ):
            return False
        return self.moving or self._has_rivals()

    def _has_rivals(self) -> bool:
        """Return whether another thread that can go on (see :func:`waits.can_go_on`) pushes a run on the pool."""
        return any(waits.can_go_on(user) for user in self.users)

    @property
    def users(self) -> list[int]:
        """A copy of the list of threads that push a run, or bring all blocks back for a run."""
        return list(self._users)

    @property
    def moving(self) -> bool:
        """Whether a thread holds the lock, as it does while a block is offloaded or brought back."""
        return self._lock.locked()

    def pending_on(self, ctx: Context) -> bool:
        """Return whether an operation is pending on the pool's memory of ``ctx``."""
        pool = self._pool()
        return pool is not None and ctx in pool._blocks and not pool.idle(self._vars(pool, ctx))

    def _vars(self, pool: Any, ctx: Context) -> list[Any]:
        """Return the var of the pool and the vars of its chunks on ``ctx``."""
        chunks = (chunk for member in pool._placements() for chunk in member.chunks.values())
        return [pool.var, *(chunk.var for chunk in chunks if chunk.context == ctx)]

    def leave(self, ctx: Context, targets: tuple[Any, ...]) -> int:
        """Offload the block on ``ctx``; return its bytes, 0 if there is no block or it is in use.

        Args:
            ctx: the device.
            targets: offload targets, in the order of preference.

        Raises:
            OutOfMemoryError: no offload target has room. The block stays.
        """
        # Until the lock is released, threads that begin a run or read a chunk without bytes wait for it.
        if not self._lock.acquire(blocking=False):
            _thread.in_runs.append(self)
            return 0
        try:
            pool = self._pool()
            block = None if pool is None else pool._blocks.get(ctx)
            if self._users:
                if self._has_rivals():
                    _thread.in_runs.append(self)
                return 0
            if pool is None or block is None or not block.nbytes or not block.counted:
                return 0
            if not pool.idle(self._vars(pool, ctx)):
                _thread.pending.append(self)
                return 0
            members = pool._placements()
            chunks = [chunk for member in members for chunk in member.chunks.values() if chunk.context == ctx]
            # An operation that starts from now on finds no bytes in its chunk and waits for the lock. An operation that
            # got the bytes earlier is still pending, or still has a view. The tests below see both, and the bytes are
            # put back.
            raws = [chunk.withhold() for chunk in chunks]
            offloaded = None
            try:
                unreferenced = _references(block) == len(chunks) + _BLOCK and all(
                    _references(chunk._release) == _ATTRIBUTE for chunk in chunks
                )
                if not pool.idle([pool.var, *(chunk.var for chunk in chunks)]):
                    _thread.pending.append(self)
                elif unreferenced:
                    for chunk in chunks:
                        chunk.forget_views()
                    # A thread that reads an array after waiting for it is not an operation. It is seen by its view.
                    if all(_references(raw) == _BLOCK for raw in raws):
                        offloaded = offload.offload(block.raw, ctx, targets, "planned")
            finally:
                if offloaded is None:
                    for chunk, raw in zip(chunks, raws, strict=True):
                        chunk._raw = raw
            if offloaded is None:
                _thread.viewed.append(self)
                return 0
            raws.clear()
            self._offloaded[ctx] = offloaded, block.nbytes
            pool._vacate(ctx)
            nbytes = block.nbytes
            block.chunk.close()
            return int(nbytes)
        finally:
            self._lock.release()

    def close(self) -> None:
        """Free the offloaded contents; called when the pool has been deleted."""
        for offloaded, _ in self._offloaded.values():
            offloaded.free()


class _Prepared:
    """The context manager that :meth:`Idleness.prepared` returns if no block may be offloaded."""

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


def _offload_idle(context: Context, nbytes: int) -> bool:
    """Offload idle blocks on ``context`` until this has freed ``nbytes``; return whether it has freed any bytes.

    A rung of storage's ladder (:mod:`weftplan.storage.relief`).
    """
    if not spilling.active() or not _pools or not _EXACT:
        return False
    offloading_device = device.get(context)
    if offloading_device.asynchronous:
        with no_stream():
            offloading_device.synchronize()
    freed = 0
    _thread.in_runs, _thread.pending, _thread.viewed = [], [], []
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
    """Wait for the blocks that this thread's last climb of the ladder found in use, until one of them may be idle.

    Args:
        context: the device whose memory this thread lacks.
        in_operation: whether this thread is inside an operation, which must not wait for other operations.

    Returns:
        False if waiting is of no use: there is no such block, or no operation has completed for ``PATIENCE_S`` seconds.

    Raises:
        PostponedError: this thread prepares a run, and another thread waits for the run's memory.
    """
    # Several threads, each in a run, may wait for each other's runs. `waits.looking` makes their checks exclusive. The
    # first thread to find that no thread in its way can go on removes its entry and returns; its next climb finds
    # nothing to wait for, and its allocation fails. The others see a thread that can go on, and continue to wait.
    runs, pending, viewed = _thread.in_runs, [] if in_operation else _thread.pending, _thread.viewed
    _thread.in_runs, _thread.pending, _thread.viewed = [], [], []
    if not runs and not pending:
        with waits.looking:
            waits.postpone_if_wanted(threading.get_ident())
        return _await_views(context, viewed)
    me = threading.get_ident()
    completed, end = -1, 0.0
    try:
        while True:
            with waits.looking:
                waits.postpone_if_wanted(me)
                if not pending and not any(run.moving for run in runs):
                    waits.waiting[me] = [user for run in runs for user in run.users]
                if not (
                    all(run.pushed_on(context) for run in runs) and all(run.pending_on(context) for run in pending)
                ):
                    waits.waiting.pop(me, None)
                    return True
            now = engine.get().statistics().completed
            if now != completed:
                completed, end = now, time.monotonic() + PATIENCE_S
            elif time.monotonic() > end:
                return False
            time.sleep(_POLL_S)
    finally:
        waits.waiting.pop(me, None)


def _await_views(context: Context, blocks: list[Idleness]) -> bool:
    """Offload one of ``blocks`` as soon as it has no views; return whether the caller should retry.

    Wait at most ``LOOKING_S`` seconds, because an exported array may be a view for ever.
    """
    end = time.monotonic() + LOOKING_S
    while blocks and time.monotonic() < end:
        try:
            if any(block.leave(context, spilling.listed()) for block in blocks) or _thread.in_runs or _thread.pending:
                return True
        except OutOfMemoryError as error:
            relief.explain(f"Nothing could be sent elsewhere (WEFTPLAN_SPILL): {error}")
            return False
        time.sleep(_POLL_S)
    return False


relief.add(29, _offload_idle, retries=True)
relief.add_wait(_await_users)
