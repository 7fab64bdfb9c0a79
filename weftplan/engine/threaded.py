"""Engines with worker threads: the base, and ``ThreadedEngine`` with one pool for everything."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from weftplan.device.context import Context
from weftplan.engine.core import Engine
from weftplan.engine.life import WAITER, running
from weftplan.engine.operation import FnProperty, OprBlock
from weftplan.engine.workers import WorkerQueue

_COPIES = (FnProperty.COPY_FROM_GPU, FnProperty.COPY_TO_GPU)
_NORMAL = FnProperty.NORMAL


class ThreadedBase(Engine):
    """Queues and threads; a subclass says which queue an operation goes to."""

    def __init__(self) -> None:
        super().__init__()
        self._by_route: dict[tuple[Any, ...], WorkerQueue] = {}
        self._default: WorkerQueue | None = None
        self._all_queues: list[WorkerQueue] = []
        """Every queue with threads, in the order in which they were made; outlives the engine in its finalizer."""
        self._end_with_engine()

    def _after_fork(self) -> None:
        super()._after_fork()
        # stop() took the queues away, but a push that was on its way may have made new ones and been run since: their
        # workers exist in the parent only, and waking one here would wake nobody.
        self._all_queues.clear()
        self._by_route.clear()
        self._default = None
        self._streams.clear()

    def _end_with_engine(self) -> None:
        """When nobody holds this engine any more, its threads end."""
        weakref.finalize(self, _end, self._all_queues).atexit = False

    def _route(self, op: OprBlock) -> WorkerQueue:
        """Lock held: the queue of an operation."""
        raise NotImplementedError

    def _new_queue(self, context: Context | None, name: str, threads: int, *, by_priority: bool = False) -> WorkerQueue:
        queue = WorkerQueue(context, name, threads, by_priority=by_priority)
        self._all_queues.append(queue)
        return queue

    def _queues(self) -> Sequence[WorkerQueue]:
        return self._all_queues

    def _queue_of(self, op: OprBlock) -> WorkerQueue:
        """Lock held: :meth:`_route`, with the common case first."""
        if op.ctx is None and op.prop is _NORMAL and self._default is not None:
            return self._default
        return self._route(op)

    def _enqueue(self, op: OprBlock) -> None:
        if op.queue is WAITER:
            self._finish_waiter(op)
        elif op.ctx is None and op.prop is _NORMAL and self._default is not None:
            self._default.put(op, self)
        else:
            self._route(op).put(op, self)

    def _ensure_enqueued(self, op: OprBlock) -> None:
        queue = self._queue_of(op)
        if op not in queue.items:
            queue.add(op)
        queue.wake(self)

    def stop(self) -> None:
        if running.engine is self:
            return
        self._wait_idle()
        for stream in list(self._streams):
            stream.drain(self)
        with self._lock:
            # What another thread pushes from here on makes new queues. What it pushed before is run: a worker goes only
            # when its queue is empty.
            queues = self._all_queues[:]
            self._all_queues.clear()
            self._by_route.clear()
            self._default = None
            for queue in queues:
                queue.end()
        for queue in queues:
            for thread in list(queue.started):
                thread.join()


def _end(queues: list[WorkerQueue]) -> None:
    """Nobody holds the engine: nothing runs, nothing is pending, all workers are parked or about to be."""
    for queue in queues:
        queue.end()


class ThreadedEngine(ThreadedBase):
    """One queue with ``workers`` threads, one with a single thread for copies; priorities are ignored.

    Operations of every context share the threads, so work on an asynchronous device has no stream of its own and is
    finished within the operation.
    """

    kind = "ThreadedEngine"

    def __init__(self, *, workers: int = 16, copy_workers: int = 1) -> None:
        super().__init__()
        self._workers = workers
        self._copy_workers = copy_workers

    def _route(self, op: OprBlock) -> WorkerQueue:
        copy = op.prop in _COPIES
        queue = self._by_route.get((copy,))
        if queue is None:
            name, threads = ("copy", self._copy_workers) if copy else ("worker", self._workers)
            queue = self._by_route[copy,] = self._new_queue(None, name, threads)
            if not copy:
                self._default = queue
        return queue


def context_of(op: OprBlock) -> Context:
    """Where an operation runs."""
    return op.ctx if op.ctx is not None else _CPU0


_CPU0 = Context("cpu", 0)
