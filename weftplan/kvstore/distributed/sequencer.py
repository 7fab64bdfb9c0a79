"""One thread that makes all exchanges of a store, in the order of the program.

Engine operations become ready in an order that depends on threads and priorities, and differs between processes. If
each process exchanged what is ready first, two could wait for each other for ever. So an exchange gets its place in a
queue when the *program* asks for it, which happens in the same order on every rank, and the thread takes them one by
one: it waits until the next one's arrays are ready here, then meets the other processes.

A :class:`Ticket` has one *part* for each array. ``Part.arrive`` is called from the engine (any thread) when the array
is ready; the thread answers by calling ``on_complete`` of the operation. Nothing else is shared.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from weftplan.errors import KVStoreError, WorkerLostError
from weftplan.kvstore.distributed.group import Group
from weftplan.kvstore.reduce import Array

OnComplete = Callable[..., None]
Exchange = Callable[[Group, Array, str, "str | None"], None]
"""Called as (group, contiguous array, description, failure or None) by the thread."""


class Part:
    """One array of a ticket: the engine's operation that waits for it."""

    __slots__ = ("_complete", "_ready", "array", "failure")

    def __init__(self) -> None:
        self._ready = threading.Event()
        self._complete: OnComplete | None = None
        self.array: Array | None = None
        self.failure: BaseException | None = None

    def arrive(self, array: Array | None, failure: BaseException | None, on_complete: OnComplete) -> None:
        """The array may be exchanged now, or ``failure`` says why there is none; called once, by the engine."""
        self.array, self.failure, self._complete = array, failure, on_complete
        self._ready.set()

    def wait(self, timeout: float) -> bool:
        """True when it has arrived."""
        return self._ready.wait(timeout)

    def complete(self, error: BaseException | None) -> None:
        """Tell the engine; an array that had failed before keeps its own error."""
        complete, self._complete = self._complete, None
        self.array = None
        if complete is not None:
            complete(self.failure or error)


class Ticket:
    """One exchange: what is exchanged, and how."""

    def __init__(self, description: str, parts: Sequence[Part], exchange: Exchange) -> None:
        self.description = description
        self.parts = tuple(parts)
        self.exchange = exchange

    def run(self, group: Group) -> None:
        """Exchange the arrays of all parts as one; every part has arrived."""
        failed = next((part.failure for part in self.parts if part.failure is not None), None)
        failure = None if failed is None else f"{type(failed).__name__}: {failed}"
        arrays = [part.array for part in self.parts if part.array is not None]
        if failure is None and len(arrays) == 1:
            self.exchange(group, arrays[0], self.description, None)
            return
        beside = side_by_side(arrays)
        if beside is not None:
            self.exchange(group, beside, self.description, failure)
            return
        joined = np.concatenate([array.reshape(-1) for array in arrays]) if arrays else np.empty(0, np.uint8)
        self.exchange(group, joined, self.description, failure)
        start = 0
        for array in arrays:
            array.reshape(-1)[...] = joined[start : start + array.size]
            start += array.size

    def complete(self, error: BaseException | None) -> None:
        """Tell every part's operation."""
        for part in self.parts:
            part.complete(error)


def side_by_side(arrays: Sequence[Array]) -> Array | None:
    """One array over all of these, contiguous ones, where each begins in memory where the one before ends; else None.

    The result does not keep their memory.
    """
    arrays = [array for array in arrays if array.size]
    if not arrays:
        return None
    place, size = _address(arrays[0]), 0
    for array in arrays:
        if _address(array) != place or array.dtype != arrays[0].dtype:
            return None
        place += array.nbytes
        size += array.size
    return np.lib.stride_tricks.as_strided(arrays[0].reshape(-1), (size,), (arrays[0].itemsize,))


def _address(array: Array) -> int:
    found: int = array.__array_interface__["data"][0]
    return found


class Sequencer:
    """The thread, and the queue in front of it."""

    def __init__(self, group: Group, name: str) -> None:
        self._group = group
        self._queue: queue.SimpleQueue[Ticket | Callable[[], bool]] = queue.SimpleQueue()
        self._broken: KVStoreError | None = None
        self._closing = threading.Event()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"weftplan-{name}", daemon=True)
        self._thread.start()

    @property
    def closed(self) -> bool:
        """True once the thread has ended or is about to."""
        return self._closing.is_set() or not self._thread.is_alive()

    def check(self) -> None:
        """Raise KVStoreError where nothing can be exchanged any more; to be called before any part is pushed."""
        if self.closed:
            raise KVStoreError("this store was closed: it exchanges nothing any more")

    def put(self, ticket: Ticket) -> None:
        """Put an exchange behind all others: where ranks must agree, in the order of the program."""
        self._queue.put(ticket)

    def call(self, work: Callable[[Group], Any], *, repairs: bool = False, timeout: float | None = None) -> Any:
        """Let the thread do ``work`` behind all exchanges, wait for it, and return or raise what it does.

        Args:
            work: what to do.
            repairs: do it after a lost process, too; if it succeeds, exchanges go on.
            timeout: seconds after which waiting ends; None where ``work`` bounds itself.

        Raises:
            WorkerLostError: the time is over; the thread still waits for the others.
        """
        self.check()
        done = threading.Event()
        result: list[Any] = [None, None]

        def run() -> bool:
            try:
                if self._broken is not None and not repairs:
                    raise self._broken
                result[0] = work(self._group)
                self._broken = None
            except BaseException as error:
                result[1] = error
                self._note(error)
            finally:
                done.set()
            return True

        self._queue.put(run)
        begun = time.monotonic()
        while not done.wait(1.0):
            if timeout is not None and time.monotonic() - begun > timeout:
                raise WorkerLostError(f"other processes have not come for {timeout:.0f} s to go on after a death")
            if not self._thread.is_alive() and not done.is_set():
                raise KVStoreError("the thread of this store has ended")
        if result[1] is not None:
            raise result[1]
        return result[0]

    def close(self, timeout: float) -> None:
        """Tell the others that this process takes part no more, and end the thread; what is queued comes first."""
        if self.closed:
            return

        def leave() -> bool:
            with contextlib.suppress(Exception):
                if self._broken is not None:
                    self._group.shrink()  # the survivors count on every one of them
                self._group.leave()
            return False

        self._queue.put(leave)
        self._closing.set()
        self._thread.join(timeout)
        if self._thread.is_alive():  # an array that will never be ready: let the others know
            self._ended.set()
            self._thread.join(1.0)

    def _run(self) -> None:
        while True:
            item = self._queue.get()
            if not isinstance(item, Ticket):
                if not item():
                    return
                continue
            error: BaseException | None = None
            try:
                # A process that has lost another runs nothing, so it need not wait for what will not be exchanged.
                self._wait_until_ready(item)
                if self._broken is not None:
                    raise self._broken
                item.run(self._group)
            except BaseException as raised:
                error = raised
                self._note(raised)
            item.complete(error)

    def _wait_until_ready(self, ticket: Ticket) -> None:
        for part in ticket.parts:
            while not part.wait(1.0):
                if self._ended.is_set():
                    part.arrive(None, KVStoreError("its process ended before it was computed"), lambda error=None: None)

    def _note(self, error: BaseException) -> None:
        """Remember what makes further exchanges impossible: a loss, or a wait that was given up half way."""
        if isinstance(error, WorkerLostError):
            self._broken = error
