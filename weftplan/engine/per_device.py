"""``ThreadedEnginePerDevice``, the default: separate pools for every device and kind of operation.

    CPU(i), CPU_PRIORITIZED   one priority queue for the process
    CPU(i), TASK              first in, first out, one per index
    CPU(i), anything else     first in, first out, one per index; a delete goes to the front
    file(i), copies           a priority queue per direction
    GPU(i), copies            a priority queue per GPU
    GPU(i), GPU_ or CPU_PRIORITIZED   a priority queue per GPU
    GPU(i), anything else     first in, first out, per GPU; a delete goes to the front

``sim(i)`` is routed like a GPU; pinned memory belongs to the CPU of its index.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from weftplan import config
from weftplan.device.context import HOST_MEMORY, Context
from weftplan.engine.operation import FnProperty, OprBlock
from weftplan.engine.registry import register
from weftplan.engine.threaded import ThreadedBase, context_of
from weftplan.engine.types import ThreadCounts
from weftplan.engine.workers import WorkerQueue

_COPIES = (FnProperty.COPY_FROM_GPU, FnProperty.COPY_TO_GPU)


@register
class ThreadedEnginePerDevice(ThreadedBase):
    """Engine with worker, task, copy and priority threads for each device."""

    kind = "ThreadedEnginePerDevice"
    short_inline = True

    def __init__(
        self, *, cpu_workers: int, task_workers: int, priority_workers: int, gpu_workers: int, copy_workers: int
    ) -> None:
        super().__init__()
        self._task_workers = task_workers
        self._cpu_workers = cpu_workers
        self._priority_workers = priority_workers
        self._gpu_workers = gpu_workers
        self._copy_workers = copy_workers
        self.enlist()

    @classmethod
    def build(cls, threads: ThreadCounts, **options: object) -> ThreadedEnginePerDevice:
        """Create an engine with these thread counts.

        :meta private:
        """
        arguments: dict[str, Any] = {**asdict(threads), **options}
        del arguments["single_worker"]
        engine = cls(**arguments)
        engine._single_worker = threads.single_worker
        return engine

    def _forget_threads(self) -> None:
        super()._forget_threads()
        self._cpu_workers = self._task_workers = config.process("MXNET_MP_WORKER_NTHREADS")

    def queue_key(self, op: OprBlock) -> tuple[object, ...]:
        ctx = context_of(op)
        return ctx.device_type, ctx.device_id, op.prop + 0  # a plain integer hashes faster

    def make_queue(self, *key: object) -> WorkerQueue:
        route: Any = key  # of queue_key
        kind, index, prop = route
        if kind == "file" and prop in _COPIES:
            direction = "copy in" if prop == FnProperty.COPY_TO_GPU else "copy out"
            return self._queue(Context(kind, index), direction, 1, by_priority=True)
        if kind in HOST_MEMORY or kind == "file":
            if prop == FnProperty.CPU_PRIORITIZED:
                return self._queue(None, "priority", self._priority_workers, by_priority=True)
            if prop == FnProperty.TASK:
                return self._queue(Context("cpu", index), "task", self._task_workers)
            return self._queue(Context("cpu", index), "worker", self._cpu_workers)
        context = Context(kind, index)
        if prop in _COPIES:
            return self._queue(context, "copy", self._copy_workers, by_priority=True)
        if prop in (FnProperty.GPU_PRIORITIZED, FnProperty.CPU_PRIORITIZED):
            return self._queue(context, "priority", self._gpu_workers, by_priority=True)
        return self._queue(context, "worker", self._gpu_workers)

    def _queue(self, ctx: Context | None, name: str, threads: int, *, by_priority: bool = False) -> WorkerQueue:
        key = ("queue", ctx, name)
        if key not in self._by_route:
            self._by_route[key] = self.new_queue(ctx, name, threads, by_priority=by_priority)
        return self._by_route[key]
