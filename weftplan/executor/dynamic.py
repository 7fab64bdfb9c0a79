"""The executor strategy ``dynamic``: each result allocates memory when it is written, and frees it after its last use.

The graph is planned without memory sharing, except in place. Each storage is a chunk, which allocates inside the
operation that first writes it. If the engine orders the chunk's last segment after all other segments that use it, this
segment frees it after the last step that uses it. Otherwise a separate operation frees it. This operation writes the
chunk's var, so it runs after the last reader. The :class:`Collector` decides which chunks are freed and when, by
the rules of Paddle's garbage collector:

* ``FLAGS_eager_delete_tensor_gb``: below 0, no chunk is freed within a run; 0: each is freed immediately; above 0:
  chunks are freed when that number of gigabytes is dead.
* ``FLAGS_memory_fraction_of_eager_deletion``: only the largest chunks are freed, as few as make up this fraction of all
  bytes.
* ``FLAGS_fast_eager_deletion_mode``: on devices with streams, memory is freed for operations that are enqueued later as
  soon as the kernels that use it have been enqueued. Without this flag it is freed after these kernels have run.
* ``FLAGS_eager_delete_scope``: all other chunks are freed at the end of the run. Without this flag they stay for the
  next run.

Outputs, arguments, gradients and auxiliary states stay allocated for as long as the executor exists.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TypeAlias

from weftplan import config, device, engine
from weftplan.device.context import Context, cpu
from weftplan.engine import FnProperty
from weftplan.engine.var import Var
from weftplan.errors import MXNetError
from weftplan.executor.executor import Executor
from weftplan.executor.memory import Bind, Call, PlannedMemory, RunState
from weftplan.executor.pool import Placement, SlabPool
from weftplan.executor.prepared_calls import PreparedStep
from weftplan.executor.prepared_run import PreparedRun
from weftplan.executor.segments import StepSegment, ancestors, parents
from weftplan.ndarray.memory import joint_allocation
from weftplan.ndarray.memory.chunk import Chunk
from weftplan.ndarray.pushing import push
from weftplan.ndarray.spill import spilling
from weftplan.ndarray.spill.dynamic import DynamicChunk
from weftplan.planner import PlannedGraph
from weftplan.support.array_types import RawArray
from weftplan.support.slots import MAKE_ROOM

_Cached: TypeAlias = tuple[Call | None, Bind, list[RawArray]]
Local = dict[bool, dict[int, list[DynamicChunk]]]
"""By ``is_train`` and node id: the chunks that the segment frees after the node's step."""


class Collector:
    """The rules for freeing the chunks of one executor; the settings are read at construction."""

    def __init__(self) -> None:
        self.threshold = float(config.get("FLAGS_eager_delete_tensor_gb")) * 2**30
        self.fraction = float(config.get("FLAGS_memory_fraction_of_eager_deletion"))
        self.fast = bool(config.get("FLAGS_fast_eager_deletion_mode"))
        self.scope = bool(config.get("FLAGS_eager_delete_scope"))
        self._ends: dict[bool, dict[int, list[DynamicChunk]]] = {}
        self._cached_chunks: dict[bool, list[DynamicChunk]] = {}
        self._queue: list[DynamicChunk] = []
        self._queued = 0

    def settle(
        self,
        forward: Sequence[StepSegment],
        backward: Sequence[StepSegment],
        chunks_of: Callable[[PreparedStep], list[DynamicChunk]],
        *,
        inside: bool,
    ) -> Local:
        """Find the last user of each chunk, and store which chunks are freed after each segment.

        Args:
            forward, backward: segments in the order of their pushes.
            chunks_of: returns the chunks that a step uses.
            inside: whether a segment may free chunks itself, if it is ordered after all other users.

        Returns:
            The chunks that segments free themselves.
        """
        local: Local = {}
        for is_train in (True, False):
            segments = (*forward, *backward) if is_train else forward
            users: dict[int, int] = defaultdict(int)
            last_use: dict[int, tuple[int, PreparedStep]] = {}
            chunk_by_id: dict[int, DynamicChunk] = {}
            for number, segment in enumerate(segments):
                for step in segment.steps:
                    for chunk in chunks_of(step):
                        chunk_by_id[id(chunk)] = chunk
                        users[id(chunk)] |= 1 << number
                        last_use[id(chunk)] = number, step
            predecessors = _predecessors(segments)
            chosen = {id(chunk) for chunk in self._chosen(list(chunk_by_id.values()))}
            freed_inside: dict[int, list[DynamicChunk]] = defaultdict(list)
            ends: dict[int, list[DynamicChunk]] = defaultdict(list)
            for key, (number, step) in last_use.items():
                if key not in chosen:
                    continue
                unused_later = not users[key] & ~(predecessors[number] | 1 << number)
                # A step on a stream cannot free host memory: host threads that allocate it do not wait for its event.
                can_free = inside and (step.context == chunk_by_id[key].context or not step.context.has_streams)
                if can_free and self.threshold == 0 and unused_later and step.bind is not None:
                    freed_inside[step.nid].append(chunk_by_id[key])
                else:
                    ends[number].append(chunk_by_id[key])
            local[is_train], self._ends[is_train] = dict(freed_inside), dict(ends)
            self._cached_chunks[is_train] = [chunk for key, chunk in chunk_by_id.items() if key not in chosen]
        return local

    def _chosen(self, chunks: list[DynamicChunk]) -> list[DynamicChunk]:
        """Return the chunks that are freed within a run, largest first."""
        if self.threshold < 0:
            return []
        byte_limit = self.fraction * sum(chunk.nbytes for chunk in chunks)
        largest, nbytes = [], 0
        for chunk in sorted(chunks, key=lambda chunk: -chunk.nbytes):
            if nbytes >= byte_limit:
                break
            largest.append(chunk)
            nbytes += chunk.nbytes
        return largest

    def passed(self, is_train: bool, number: int) -> list[DynamicChunk]:
        """Return the chunks to free now that segment ``number`` has been pushed."""
        dead = self._ends[is_train].get(number, ())
        self._queue += dead
        self._queued += sum(chunk.nbytes for chunk in dead)
        return self._emptied() if self._queued >= self.threshold else []

    def ended(self, is_train: bool) -> list[DynamicChunk]:
        """Return the chunks to free at the end of a run."""
        return [*self._emptied(), *(self._cached_chunks[is_train] if self.scope else ())]

    def _emptied(self) -> list[DynamicChunk]:
        dead, self._queue, self._queued = self._queue, [], 0
        return dead


class _NoVars:
    """Stand-in for a segment without work, which is not pushed and so orders nothing."""

    reads = writes = ()


def _predecessors(segments: Sequence[StepSegment]) -> list[int]:
    """Return for each segment a bit mask of the segments that the engine always runs before it."""
    return ancestors(parents([segment if segment.pushed else _NoVars() for segment in segments]))


_MAX_CACHED = 4 << 20
"""An executor caches calls as long as their results have at most this number of bytes in total."""


class DynamicMemory(PlannedMemory):
    """The storages of a plan. Those of outputs stay allocated; other storages are allocated while they are needed."""

    def __init__(self, planned: PlannedGraph) -> None:
        plan = planned.memory
        self.graphs = "memory is taken as the graph runs"
        self.pool = SlabPool()
        self.placement = Placement((), (), {})
        self.pool.join(self.placement)
        self._planned = planned
        held = {int(plan.entry_storage[eid]) for eid in planned.outputs}
        names = ["workspace"] * plan.num_storages
        for eid in range(len(plan.entry_storage) - 1, -1, -1):
            if plan.entry_storage[eid] >= 0:
                names[int(plan.entry_storage[eid])] = planned.graph.nodes[planned.graph.entry_node[eid]].name
        self._chunks: dict[int, Chunk | DynamicChunk] = {}
        self.allocated_bytes = 0
        for number, (slab, nbytes) in enumerate(
            zip(plan.storage_slab.tolist(), plan.storage_nbytes.tolist(), strict=True)
        ):
            ctx = plan.contexts[int(plan.slab_device[slab])]
            if number in held:
                self._chunks[number] = Chunk(ctx, nbytes, name=f"output {names[number]}")
                self.allocated_bytes += nbytes
            else:
                self._chunks[number] = DynamicChunk(ctx, nbytes, names[number])
        self.local: dict[bool, dict[int, list[DynamicChunk]]] = {True: {}, False: {}}
        """The chunks that segments free themselves."""
        self.used: dict[int, list[Chunk]] = {}
        """The chunks that a node's call uses, by node id."""
        self.random: frozenset[int] = frozenset()
        """Ids of random nodes, whose calls differ from run to run."""
        self._calls: dict[tuple[int, ...], _Cached] = {}
        """Cached calls by node id, ``is_train`` and addresses: the call (None for a random node), the function that
        makes it, and the arrays of bytes that it uses, so that the addresses stay valid."""
        self._cached_bytes = 0

    @property
    def chunks(self) -> Mapping[int, Chunk]:
        """The chunks by storage."""
        return self._chunks

    def bound(self, nid: int, make: Callable[[], Bind]) -> Bind:
        """Return a function that makes the call of a run; the call allocates memory when it runs."""
        return lambda run: partial(self._call, nid, make, run)

    def _call(self, nid: int, make: Callable[[], Bind], run: RunState) -> None:
        """Allocate the chunks of node ``nid``, call its kernel, and free the chunks that no later step uses."""
        chunks = self.used.get(nid, ())
        if MAKE_ROOM.value is None:
            self._use(nid, make, run, chunks, [chunk.raw for chunk in chunks])
        else:
            joint_allocation.run(lambda: [chunk.raw for chunk in chunks], partial(self._use, nid, make, run, chunks))
        for chunk in self.local[run.is_train].get(nid, ()):
            chunk.drop_in_order()

    def _use(
        self, nid: int, make: Callable[[], Bind], run: RunState, chunks: Sequence[Chunk], raws: list[RawArray]
    ) -> None:
        """Run the call of node ``nid``, cached or new, on ``raws``, the allocated bytes of ``chunks``."""
        key = (nid, run.is_train, *[chunk.address for chunk in chunks])
        entry = self._calls.get(key)
        if entry is None:
            entry = self._cached_outputs(key, raws, make(), run)
        call = entry[0] or entry[1](run)
        del raws, entry
        call()

    def _cached_outputs(self, key: tuple[int, ...], raws: list[RawArray], bind: Bind, run: RunState) -> _Cached:
        """Return a new call as an entry of the call cache; store it there if its results are small.

        A cached call has views of its results, so their memory is never returned to the system.
        """
        entry = None if key[0] in self.random else bind(run), bind, list(raws)
        nbytes = sum(chunk.nbytes for chunk in self.used.get(key[0], ()) if isinstance(chunk, DynamicChunk))
        if self._cached_bytes + nbytes <= _MAX_CACHED and not spilling.active():
            self._cached_bytes += nbytes
            self._calls[key] = entry
        return entry

    def after(self, storage: int) -> list[Var]:
        """Return no vars, because storages never share addresses."""
        return []


class DynamicExecutor(Executor):
    """An executor of the strategy ``dynamic``. ``allocated_bytes`` counts only its outputs, which stay allocated."""

    _memory: DynamicMemory

    def _make_memory(self, planned: PlannedGraph, pool: SlabPool | None) -> PlannedMemory:
        self._collector = Collector()
        return DynamicMemory(planned)

    def _prepare(self) -> PreparedRun:
        asynchronous = any(
            device.get(ctx).asynchronous for ctx in {chunk.context for chunk in self._memory.chunks.values()}
        )
        # Enqueued kernels may still run after the call of a step has returned. So a segment may free memory itself only
        # if the memory is freed in stream order.
        inside = self._collector.fast or not asynchronous
        if not inside or spilling.active():  # memory that a segment uses cannot be offloaded while it runs
            self._limits = (False, *self._limits[1:])
        calls = super()._prepare()
        steps = (*calls.forward_steps, *calls.backward_steps)
        self._memory.used = {step.nid: _chunks_of(self._memory, step) for step in steps}
        self._memory.random = frozenset(step.nid for step in steps if step.node.op is not None and step.node.op.random)

        def chunks_of(step: PreparedStep) -> list[DynamicChunk]:
            return [chunk for chunk in _chunks_of(self._memory, step) if isinstance(chunk, DynamicChunk)]

        self._memory.local = self._collector.settle(
            calls.forward_segments, calls.backward_segments, chunks_of, inside=inside
        )
        return calls

    def _push(self, segments: Sequence[StepSegment], steps: Sequence[PreparedStep]) -> None:
        if self._monitor is not None:
            # The monitor's callback may read any array at any later time, so no chunk is freed.
            self._memory.local = {True: {}, False: {}}
            super()._push(segments, steps)
            return
        calls, run = self._prepare_once(), self._run
        first_number = 0 if segments is calls.forward_segments else len(calls.forward_segments)
        for number, segment in enumerate(segments, first_number):
            segment.push(run)
            give_back(self._collector.passed(run.is_train, number), fast=self._collector.fast)
        if not run.is_train or first_number or not calls.backward_segments:
            give_back(self._collector.ended(run.is_train), fast=self._collector.fast)

    def _check_repeatable(self, calls: PreparedRun) -> None:
        """Raise MXNetError, because the last backward may have freed results of forward."""
        raise MXNetError(
            "backward: backward has run since the last forward(is_train=True), and results of forward have been given "
            "back (WEFTPLAN_EXECUTOR_STRATEGY=dynamic); run forward(is_train=True) again"
        )


def _chunks_of(memory: DynamicMemory, step: PreparedStep) -> list[Chunk]:
    """Return the chunks of a step's inputs, outputs and workspace. Inputs that the operator ignores have none."""
    workspace = memory.workspace(step.nid)
    chunks = [array.chunk for array in (*step.inputs, *step.outputs) if array is not None]
    return chunks if workspace is None else [*chunks, workspace[0]]


def give_back(chunks: Iterable[DynamicChunk], *, fast: bool) -> None:
    """Push operations that free ``chunks`` after all earlier operations on them, failed operations included.

    Args:
        chunks: chunks that no later operation of the run uses.
        fast: on devices with streams, whether to free them when these operations are enqueued, before they have run.
    """
    groups: dict[Context | None, list[DynamicChunk]] = {}
    for chunk in chunks:
        groups.setdefault(chunk.context if fast and chunk.context.has_streams else None, []).append(chunk)
    for ctx, dead in groups.items():
        vars_, work = [chunk.var for chunk in dead], partial(_drop, dead, in_order=ctx is not None)
        if ctx is None:
            push(work, (), vars_, cpu(0), prop=FnProperty.DELETE_VAR, name="collect")
        else:  # on the queue of the device, after the kernels have been enqueued; it launches no kernel itself
            engine.get().push(work, (), vars_, ctx, prop=FnProperty.NO_SKIP, name="collect")


def _drop(chunks: Sequence[DynamicChunk], *, in_order: bool) -> None:
    """Free chunks: immediately, or with ``in_order`` in the order of their streams, for operations enqueued later."""
    for chunk in chunks:
        if in_order:
            chunk.drop_in_order()
        else:
            chunk.drop()
