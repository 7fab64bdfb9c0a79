"""Stages of an exchange, and the engine operation that runs some of them one after the other.

A stage reads and writes arrays of one device, or of all devices that links join. The sum of a bucket, its optimizer
step and the copies to the caller are three stages, and usually one operation. Small operations on arrays in host memory
run inline: waking a worker takes longer than they do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy as copy_of
from functools import partial
from itertools import repeat
from operator import is_
from typing import Any
from weakref import ref

from weftplan import device
from weftplan.device.context import HOST_MEMORY, Context
from weftplan.engine import FnProperty, debug_enabled
from weftplan.engine import get as get_engine
from weftplan.engine.var import Var
from weftplan.errors import KVStoreError
from weftplan.ndarray import NDArray
from weftplan.ndarray.pushing import push_kernel
from weftplan.support.array_types import RawArray
from weftplan.support.slots import MAKE_ROOM

HOST = HOST_MEMORY
"""Device types whose memory every CPU thread can read and write."""

INLINE = 1 << 18
"""Bytes, read and written, of an operation that runs inline: some microseconds of work."""

SMALL = 1 << 18
"""Bytes written by an operation that needs no worker with priority: it is over before such a worker is awake."""

Work = Callable[[Sequence[RawArray]], object]


class Stage:
    """A step of an exchange.

    Args:
        name: of the operation that begins with it.
        run: called with the raw arrays of ``reads`` and ``writes``. On a device with streams it enqueues its work on
            the current stream, or on streams that the current one waits for.
        reads, writes: arrays.
        context: the device where it runs.
        repeatable: running it twice gives the same result.
        urgent: other devices wait for it; a worker with priority runs it, unless it is small.
    """

    __slots__ = ("context", "name", "nbytes", "operands", "read_vars", "repeatable", "run", "urgent", "write_vars")

    def __init__(
        self,
        name: str,
        run: Work,
        reads: Sequence[NDArray],
        writes: Sequence[NDArray],
        context: Context,
        *,
        repeatable: bool = True,
        urgent: bool = True,
    ) -> None:
        self.urgent = urgent
        self.name, self.run, self.context, self.repeatable = name, run, context, repeatable
        self.operands: list[Any] = [*reads, *writes]
        self.read_vars = dict.fromkeys([array.chunk.var for array in reads])
        self.write_vars = dict.fromkeys([array.chunk.var for array in writes])
        self.nbytes = sum([array.chunk.nbytes for array in writes])

    def without(self, places: Mapping[int, int]) -> Stage:
        """Return the stage with numbers as operands for the arrays with these ids."""
        stage = copy_of(self)
        stage.operands = [places.get(id(array), array) for array in self.operands]
        return stage


class Joint:
    """Stages as one operation."""

    __slots__ = (
        "_context",
        "_host",
        "_name",
        "_nbytes",
        "_reads",
        "_repeatable",
        "_small",
        "_steps",
        "_urgent",
        "_writes",
    )

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._nbytes, self._repeatable = 0, True
        reads: dict[Var, None] = {}
        writes: dict[Var, None] = {}
        for stage in stages:
            self._nbytes += stage.nbytes
            reads |= stage.read_vars
            self._repeatable = self._repeatable and stage.repeatable and reads.keys().isdisjoint(stage.write_vars)
            writes |= stage.write_vars
        if not reads.keys().isdisjoint(writes):
            reads = {var: None for var in reads if var not in writes}
        self._steps = [(stage.run, len(stage.operands)) for stage in stages]
        self._reads, self._writes = tuple(reads), tuple(writes)
        first = stages[0]
        self._name, self._context, self._urgent = first.name, first.context, first.urgent
        self._host = first.context.device_type in HOST
        self._small = False
        """Whether the arrays were small when they had bytes."""

    def start(self, operands: list[NDArray], priority: int = 0, inline: int = 0) -> None:
        """Push the operation, or run it inline.

        Args:
            operands: the arrays of all stages.
            priority: of the operation.
            inline: bytes up to which the thread that finds the operation ready runs it, in no queue.
        """
        if not priority and self.run_inline(operands):
            return
        written = self._nbytes
        if not self._host:
            prop = FnProperty.GPU_PRIORITIZED
        elif written <= inline:
            prop = FnProperty.ASYNC
        else:
            prop = FnProperty.CPU_PRIORITIZED if self._urgent and (priority or written > SMALL) else FnProperty.NORMAL
        push_kernel(
            partial(_run, self._steps), [*operands], self._reads, self._writes, self._context, prop=prop,
            priority=priority, name=self._name, enqueues=True,
        )  # fmt: skip

    def run_inline(self, operands: Sequence[NDArray]) -> bool:
        """Run the operation if it is small and no operation uses its arrays; False: nothing is done."""
        if not self._small and not (self._repeatable and self._host and _are_small(operands)):
            return False
        self._small = True
        if MAKE_ROOM.value is not None:
            return False
        return get_engine().write_inline(partial(_run_ready, self._steps, operands), self._reads, self._writes)


def _are_small(operands: Sequence[NDArray]) -> bool:
    """Return whether arrays of the host have a few microseconds of work on them."""
    size = 0
    for array in operands:
        raw = array.ready
        if raw is None:
            return False
        size += raw.nbytes
        if size > INLINE:
            return False
    return True


class Repeated:
    """The stages of a call, for calls with the same arrays. It keeps none of them alive.

    Args:
        before, after: stages before and after the optimizer's steps.
        arrays: of the caller.
        version: of the store.
        inline: see :meth:`Joint.start`.
    """

    __slots__ = ("_after", "_before", "_inline", "_joint", "_operands", "_refs", "version")

    def __init__(
        self, before: Sequence[Stage], after: Sequence[Stage], arrays: Sequence[NDArray], version: int, inline: int
    ) -> None:
        places = {id(array): place for place, array in enumerate(arrays)}
        self._before, self._after = ([stage.without(places) for stage in some] for some in (before, after))
        self._joint = Joint([*before, *after])
        self._operands = [one for stage in (*self._before, *self._after) for one in stage.operands]
        self._refs = [ref(array) for array in arrays]
        self._inline, self.version = inline, version

    def accepts(self, arrays: Sequence[NDArray]) -> bool:
        """Return whether these are the arrays of the call."""
        return len(arrays) == len(self._refs) and all(map(is_, [one() for one in self._refs], arrays))

    def run(self, arrays: Sequence[NDArray], steps: Callable[[], Sequence[Stage]] | None) -> bool:
        """Run the stages with the arrays of a call; False: nothing is done, each array needs an operation of its own.

        Args:
            steps: makes the optimizer's stages; None without an optimizer.
        """
        if steps is None:
            operands = [arrays[one] if one.__class__ is int else one for one in self._operands]
            if self._joint.run_inline(operands):
                return True
        if MAKE_ROOM.value is not None or debug_enabled() or get_engine().has_failed:
            return False
        if steps is None:
            self._joint.start(operands, 0, self._inline)
        else:
            stages = [*self._before, *steps(), *self._after]
            operands = [arrays[one] if one.__class__ is int else one for stage in stages for one in stage.operands]
            Joint(stages).start(operands, 0, self._inline)
        return True


def on_device(context: Context, kernel: Work) -> Work:
    """Return the work of a stage that calls ``kernel`` on the device ``context``: as one launch, if it has streams."""
    if context.device_type in HOST:
        return kernel
    place = device.get(context)

    def launch(raws: Sequence[RawArray]) -> None:
        place.launch(partial(kernel, raws))

    return launch if place.asynchronous else kernel


def has_failed(arrays: Iterable[NDArray]) -> bool:
    """Return whether an array holds a failure, so that it must share an operation with no other key."""
    return get_engine().has_failed and any(array.var.failure is not None for array in arrays)


def launch(stages: Sequence[Stage], priority: int = 0, *, inline: int = 0) -> None:
    """Push the stages as one operation, or run them inline. While arrays may be offloaded, each is its own operation.

    Args:
        stages: run in this order; at least one.
        priority: of the operation.
        inline: bytes up to which the thread that finds the operation ready runs it, in no queue.
    """
    if len(stages) > 1 and MAKE_ROOM.value is not None:
        for stage in stages:
            launch([stage], priority, inline=inline)
        return
    Joint(stages).start([array for stage in stages for array in stage.operands], priority, inline)


def copy(source: NDArray, target: NDArray, priority: int) -> None:
    """Push ``target[...] = source`` as an operation of its own; a copy onto itself is nothing."""
    if source.var is target.var:
        return
    if source.context.device_type not in HOST or target.context.device_type not in HOST:
        source.copyto(target, priority=priority)
        return

    def fill(source: RawArray, target: RawArray) -> None:
        target[...] = source

    variables = (source.var,), (target.var,)
    push_kernel(fill, [source, target], *variables, target.context, priority=priority, name="KVStoreCopy")


def copy_to_all(source: NDArray, targets: Sequence[NDArray], priority: int) -> None:
    """Copy to every target in an operation of its own: a target that has failed shares its fate with none."""
    for target in targets:
        copy(source, target, priority)


def _run_ready(steps: Sequence[tuple[Work, int]], operands: Sequence[NDArray]) -> None:
    # Only now can no thread move or free the bytes. Without bytes this is an error, and the operation is pushed.
    raws = [array.ready for array in operands]
    if any(map(is_, raws, repeat(None))):
        raise KVStoreError("an array has no bytes now")
    _run(steps, *raws)


def _run(steps: Sequence[tuple[Work, int]], *raws: RawArray) -> None:
    if len(steps) == 1:
        steps[0][0](raws)
        return
    end = 0
    for run, count in steps:
        begin, end = end, end + count
        run(raws[begin:end])
