"""Stages of an exchange, and the engine operation that runs several stages in sequence.

A stage reads and writes arrays of one device, or of several devices with links between them. The sum of a bucket, its
optimizer step and the copies to the caller are three stages, and usually one operation. Small operations on arrays in
host memory run inline, because waking a worker takes longer than the operation.
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
"""Maximum bytes, read plus written, of an operation that runs inline: a few microseconds of work."""

SMALL = 1 << 18
"""Maximum bytes written by an operation for a normal worker: it finishes before a priority worker would be awake."""

Work = Callable[[Sequence[RawArray]], object]
"""The work of a stage, called with the raw arrays that it reads, then those that it writes."""


class Stage:
    """A step of an exchange.

    Args:
        name: name of an operation whose first stage this is.
        run: called with the raw arrays of ``reads`` and ``writes``. On a device with streams it enqueues its work on
            the current stream, or on streams that the current stream then waits for.
        reads: arrays that the stage reads.
        writes: arrays that the stage writes.
        context: the device that runs the stage.
        repeatable: whether running the stage twice gives the same result as running it once.
        urgent: whether other devices wait for it; then a priority worker runs it, unless it is small.
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

    def without(self, positions: Mapping[int, int]) -> Stage:
        """Return a copy of the stage; ``positions`` maps the ``id`` of an operand to the number that replaces it."""
        stage = copy_of(self)
        stage.operands = [positions.get(id(array), array) for array in self.operands]
        return stage


class FusedStages:
    """Several stages that run as one engine operation."""

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
            # A stage that overwrites what an earlier stage, or itself, has read makes a second run differ.
            self._repeatable = self._repeatable and stage.repeatable and reads.keys().isdisjoint(stage.write_vars)
            writes |= stage.write_vars
        if not reads.keys().isdisjoint(writes):
            reads = {var: None for var in reads if var not in writes}
        self._steps = [(stage.run, len(stage.operands)) for stage in stages]
        self._reads, self._writes = tuple(reads), tuple(writes)
        head = stages[0]
        self._name, self._context, self._urgent = head.name, head.context, head.urgent
        self._host = head.context.device_type in HOST
        self._small = False
        """True once the operands were measured as small; their sizes do not change."""

    def start(self, operands: list[NDArray], priority: int = 0, inline: int = 0) -> None:
        """Push the operation, or run it inline if it is small, its arrays are idle and it has no priority.

        Args:
            operands: the arrays of all stages.
            priority: engine priority of the operation.
            inline: an operation that writes at most this many bytes skips the worker queue: it runs on the thread that
                makes it ready.
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
        """Run the operation now and return True if it is small and its arrays are idle; else return False."""
        # Only repeatable stages: if one of them fails halfway, the caller pushes the whole operation.
        if not self._small and not (self._repeatable and self._host and _are_small(operands)):
            return False
        self._small = True
        if MAKE_ROOM.value is not None:
            return False
        return get_engine().write_inline(partial(_run_ready, self._steps, operands), self._reads, self._writes)


def _are_small(operands: Sequence[NDArray]) -> bool:
    """Return whether all arrays have their bytes in memory, at most :data:`INLINE` in total."""
    size = 0
    for array in operands:
        raw = array.ready
        if raw is None:
            return False
        size += raw.nbytes
        if size > INLINE:
            return False
    return True


class RepeatedExchange:
    """The cached stages of a call, for later calls with the same arrays, to which it has only weak references.

    Args:
        first_stages: stages before the optimizer's steps.
        last_stages: stages after the optimizer's steps.
        arrays: the caller's arrays.
        version: the store's version; the stages are valid for this version only.
        inline: as for :meth:`FusedStages.start`.
    """

    __slots__ = ("_first_stages", "_inline", "_joint", "_last_stages", "_operands", "_refs", "version")

    def __init__(
        self,
        first_stages: Sequence[Stage],
        last_stages: Sequence[Stage],
        arrays: Sequence[NDArray],
        version: int,
        inline: int,
    ) -> None:
        positions = {id(array): position for position, array in enumerate(arrays)}
        self._first_stages, self._last_stages = (
            [stage.without(positions) for stage in stages] for stages in (first_stages, last_stages)
        )
        self._joint = FusedStages([*first_stages, *last_stages])
        self._operands = [operand for stage in (*self._first_stages, *self._last_stages) for operand in stage.operands]
        self._refs = [ref(array) for array in arrays]
        self._inline, self.version = inline, version

    def accepts(self, arrays: Sequence[NDArray]) -> bool:
        """Return whether these are the same array objects as those of the cached call."""
        return len(arrays) == len(self._refs) and all(map(is_, [reference() for reference in self._refs], arrays))

    def run(self, arrays: Sequence[NDArray], steps: Callable[[], Sequence[Stage]] | None) -> bool:
        """Run or push the stages with the arrays of a call.

        Args:
            arrays: arrays that :meth:`accepts` has accepted.
            steps: function that returns the optimizer's stages; None without an optimizer.

        Returns:
            True; or False if nothing was done, because each key may need a separate operation.
        """
        if steps is None:
            operands = [arrays[operand] if operand.__class__ is int else operand for operand in self._operands]
            if self._joint.run_inline(operands):
                return True
        if MAKE_ROOM.value is not None or debug_enabled() or get_engine().has_failed:
            return False
        if steps is None:
            self._joint.start(operands, 0, self._inline)
        else:
            stages = [*self._first_stages, *steps(), *self._last_stages]
            operands = [
                arrays[operand] if operand.__class__ is int else operand
                for stage in stages
                for operand in stage.operands
            ]
            FusedStages(stages).start(operands, 0, self._inline)
        return True


def on_device(context: Context, kernel: Work) -> Work:
    """Return the work of a stage that runs ``kernel``: as one launch if the device has streams, else inline."""
    if context.device_type in HOST:
        return kernel
    target_device = device.get(context)

    def launch(raws: Sequence[RawArray]) -> None:
        target_device.launch(partial(kernel, raws))

    return launch if target_device.asynchronous else kernel


def has_failed(arrays: Iterable[NDArray]) -> bool:
    """Return whether the operation that wrote one of the arrays has failed.

    Such an array must not share an operation with other keys, because all results of an operation fail together.
    """
    return get_engine().has_failed and any(array.var.failure is not None for array in arrays)


def launch(stages: Sequence[Stage], priority: int = 0, *, inline: int = 0) -> None:
    """Push the stages as one operation, or run them inline; while arrays may be offloaded, push each stage separately.

    Args:
        stages: stages in order of execution; at least one.
        priority: engine priority of the operation.
        inline: as for :meth:`FusedStages.start`.
    """
    if len(stages) > 1 and MAKE_ROOM.value is not None:
        for stage in stages:
            launch([stage], priority, inline=inline)
        return
    FusedStages(stages).start([array for stage in stages for array in stage.operands], priority, inline)


def copy(source: NDArray, target: NDArray, priority: int) -> None:
    """Push a copy of ``source`` to ``target`` as one operation; do nothing if they are the same memory."""
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
    """Push one copy per target, so that a failed target does not fail the other copies."""
    for target in targets:
        copy(source, target, priority)


def _run_ready(steps: Sequence[tuple[Work, int]], operands: Sequence[NDArray]) -> None:
    # The bytes may have been freed since _are_small. From here on no thread moves or frees them, because the engine
    # holds the vars of this inline operation. After this error the caller pushes the operation instead.
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
