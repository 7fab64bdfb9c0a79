"""Engines with worker threads: the base, and ``ThreadedEngine`` with one pool for everything."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from weftplan.device.context import Context
from weftplan.engine.core import WAITER, Engine
from weftplan.engine.operation import FnProperty, OprBlock
from weftplan.engine.workers import WorkerQueue

_COPIES = (FnProperty.COPY_FROM_GPU, FnProperty.COPY_TO_GPU)


class ThreadedBase(Engine):
    """Queues and threads; a subclass says which queue an operation goes to."""

    def __init__(self) -> None:
        super().__init__()
        self._by_route: dict[tuple[Any, ...], WorkerQueue] = {}
        self._default: WorkerQueue | None = None

    def _route(self, op: OprBlock) -> WorkerQueue:
        """Lock held: the queue of an operation."""
        raise NotImplementedError

    def _queues(self) -> Sequence[WorkerQueue]:
        return list(dict.fromkeys(self._by_route.values()))

    def _enter_worker(self, queue: WorkerQueue) -> Any:
        """Called once by each new worker thread; what it returns runs operations in place of :meth:`_execute`."""
        return None

    def _enqueue(self, op: OprBlock) -> Any:
        if op.queue is WAITER:
            # A waiting thread is the worker: its operation is over as soon as it is granted.
            op.fn()
            for ready in self._finish(op, None):
                wake = self._enqueue(ready)
                if wake is not None:
                    wake.release()
            return None
        if op.ctx is None and op.prop == FnProperty.NORMAL and self._default is not None:
            return self._default.put(op)
        return self._route(op).put(op)

    def stop(self) -> None:
        if threading.current_thread().name.startswith("weftplan "):
            return
        self._wait_idle()
        with self._lock:
            queues = list(self._queues())
            wakes = []
            for queue in queues:
                queue.stopping = True
                wakes += queue.idle
                queue.idle = []
            self._by_route.clear()
            self._default = None
        for wake in wakes:
            wake.release()
        for queue in queues:
            for thread in queue.started:
                thread.join()

    def start(self) -> None:
        """Queues and threads are made again at the first operation that needs them."""


class ThreadedEngine(ThreadedBase):
    """One queue with ``workers`` threads, one with a single thread for copies; priorities are ignored."""

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
            queue = self._by_route[copy,] = WorkerQueue(self, None, name, threads)
            if not copy:
                self._default = queue
        return queue


def context_of(op: OprBlock) -> Context:
    """Where an operation runs."""
    return op.ctx if op.ctx is not None else _CPU0


_CPU0 = Context("cpu", 0)
