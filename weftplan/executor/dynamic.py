"""The executor strategy ``dynamic``: each result takes memory when it is written, and gives it back when it is dead.

The graph is planned without sharing, except in place. Each storage is a chunk of its own, which takes memory inside the
operation that first writes it. A chunk whose last segment is ordered after all other users goes back inside that
segment, after the last step that uses it. Every other chunk goes back by an operation of its own, which writes the
chunk's var and therefore runs when the last reader is over, on streams too. The :class:`Collector` decides when that
happens, and to what chunks, by the rules of Paddle's garbage collector:

* ``FLAGS_eager_delete_tensor_gb`` below 0: nothing is collected within a run; 0: immediately; above: when that number
  of gigabytes is dead.
* ``FLAGS_memory_fraction_of_eager_deletion``: only the largest, until their bytes are that share of all; the chunk
  that crosses the line is collected whole.
* ``FLAGS_fast_eager_deletion_mode``: on devices with streams memory goes back when the kernels that use it have been
  enqueued, for operations that are enqueued later; else when they are over.
* ``FLAGS_eager_delete_scope``: all other chunks go back at the end of the run; else they stay for the next run.

Outputs, arguments, gradients and auxiliary states are held for as long as the executor lives.
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
from weftplan.executor.prepared_calls import Step
from weftplan.executor.segments import Segment, ancestors, parents
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


class Collector:
    """Decides for one executor; the settings are those of the moment when it is made."""

    def __init__(self) -> None:
        self.threshold = float(config.get("FLAGS_eager_delete_tensor_gb")) * 2**30
        self.fraction = float(config.get("FLAGS_memory_fraction_of_eager_deletion"))
        self.fast = bool(config.get("FLAGS_fast_eager_deletion_mode"))
        self.scope = bool(config.get("FLAGS_eager_delete_scope"))
        self._ends: dict[bool, dict[int, list[DynamicChunk]]] = {}
        self._kept: dict[bool, list[DynamicChunk]] = {}
        self._queue: list[DynamicChunk] = []
        self._queued = 0

    def settle(
        self,
        forward: Sequence[Segment],
        backward: Sequence[Segment],
        chunks_of: Callable[[Step], list[DynamicChunk]],
        *,
        inside: bool,
    ) -> Local:
        """Find out where each chunk dies.

        Args:
            forward, backward: segments in the order of their pushes.
            chunks_of: the chunks that a step uses.
            inside: chunks may go back inside a segment, if that segment is ordered after all other users.

        Returns:
            By is_train and node, the chunks that go back when the step of that node is over.
        """
        local: Local = {}
        for is_train in (True, False):
            segments = (*forward, *backward) if is_train else forward
            users: dict[int, int] = defaultdict(int)
            last: dict[int, tuple[int, Step]] = {}
            known: dict[int, DynamicChunk] = {}
            for number, segment in enumerate(segments):
                for step in segment.steps:
                    for chunk in chunks_of(step):
                        known[id(chunk)] = chunk
                        users[id(chunk)] |= 1 << number
                        last[id(chunk)] = number, step
            behind = _behind(segments)
            chosen = {id(chunk) for chunk in self._chosen(list(known.values()))}
            here: dict[int, list[DynamicChunk]] = defaultdict(list)
            ends: dict[int, list[DynamicChunk]] = defaultdict(list)
            for key, (number, step) in last.items():
                if key not in chosen:
                    continue
                alone = not users[key] & ~(behind[number] | 1 << number)
                # A step on a stream cannot give memory of a host back: hosts do not wait for its event.
                here_too = inside and (step.context == known[key].context or not step.context.has_streams)
                if here_too and self.threshold == 0 and alone and step.bind is not None:
                    here[step.nid].append(known[key])
                else:
                    ends[number].append(known[key])
            local[is_train], self._ends[is_train] = dict(here), dict(ends)
            self._kept[is_train] = [chunk for key, chunk in known.items() if key not in chosen]
        return local

    def _chosen(self, chunks: list[DynamicChunk]) -> list[DynamicChunk]:
        """The chunks that are collected at all, largest first."""
        if self.threshold < 0:
            return []
        most = self.fraction * sum(chunk.nbytes for chunk in chunks)
        largest, nbytes = [], 0
        for chunk in sorted(chunks, key=lambda chunk: -chunk.nbytes):
            if nbytes >= most:
                break
            largest.append(chunk)
            nbytes += chunk.nbytes
        return largest

    def passed(self, is_train: bool, number: int) -> list[DynamicChunk]:
        """Return the chunks that go back after segment ``number``, which has just been pushed."""
        dead = self._ends[is_train].get(number, ())
        self._queue += dead
        self._queued += sum(chunk.nbytes for chunk in dead)
        return self._emptied() if self._queued >= self.threshold else []

    def ended(self, is_train: bool) -> list[DynamicChunk]:
        """Return the chunks that go back at the end of a run."""
        return [*self._emptied(), *(self._kept[is_train] if self.scope else ())]

    def _emptied(self) -> list[DynamicChunk]:
        dead, self._queue, self._queued = self._queue, [], 0
        return dead


class _Idle:
    """A segment that is not pushed: it waits for no segment, and no segment waits for it."""

    reads = writes = ()


def _behind(segments: Sequence[Segment]) -> list[int]:
    """Return for each segment a mask of the segments that the engine always runs before it, by common vars."""
    return ancestors(parents([segment if segment.pushed else _Idle() for segment in segments]))


_MOST_REMEMBERED = 4 << 20
"""Bytes of results, in all, whose calls an executor keeps."""


class DynamicMemory(PlannedMemory):
    """Storages of a plan that hold memory only while they are needed; those of outputs always do."""

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
        """By is_train and node: the chunks that go back when the step of that node is over."""
        self.used: dict[int, list[Chunk]] = {}
        """By node: every chunk that its call looks at."""
        self.random: frozenset[int] = frozenset()
        """Nodes whose calls differ from run to run."""
        self._calls: dict[tuple[int, ...], _Cached] = {}
        """By node, mode and addresses: calls that were made before, with the bytes that they look at, which are
        therefore still those; pools hand out the same again. A random node has one for each run."""
        self._remembered = 0

    @property
    def chunks(self) -> Mapping[int, Chunk]:
        """By storage its chunk."""
        return self._chunks

    def bound(self, nid: int, make: Callable[[], Bind]) -> Bind:
        """Return a function that makes a call which looks for memory only when it runs."""
        return lambda run: partial(self._call, nid, make, run)

    def _call(self, nid: int, make: Callable[[], Bind], run: RunState) -> None:
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
        """Make the call, or take the cached call, with the bytes of ``chunks`` there, and call it."""
        key = (nid, run.is_train, *[chunk.address for chunk in chunks])
        known = self._calls.get(key)
        if known is None:
            known = self._made(key, raws, make(), run)
        call = known[0] or known[1](run)
        del raws, known
        call()

    def _made(self, key: tuple[int, ...], raws: list[RawArray], bind: Bind, run: RunState) -> _Cached:
        """Return a call, which is kept if its results are small: its views keep their memory in the process, also when
        a pool gives it back."""
        entry = None if key[0] in self.random else bind(run), bind, list(raws)
        nbytes = sum(chunk.nbytes for chunk in self.used.get(key[0], ()) if isinstance(chunk, DynamicChunk))
        if self._remembered + nbytes <= _MOST_REMEMBERED and not spilling.active():
            self._remembered += nbytes
            self._calls[key] = entry
        return entry

    def after(self, storage: int) -> list[Var]:
        """Return no vars: no storage lies over an earlier storage."""
        return []


class DynamicExecutor(Executor):
    """An executor without a slab. ``allocated_bytes`` counts what it holds between runs: its outputs."""

    _memory: DynamicMemory

    def _make_memory(self, planned: PlannedGraph, pool: SlabPool | None) -> PlannedMemory:
        self._collector = Collector()
        return DynamicMemory(planned)

    def _prepare(self) -> None:
        asynchronous = any(
            device.get(ctx).asynchronous for ctx in {chunk.context for chunk in self._memory.chunks.values()}
        )
        # Work that is enqueued on streams goes on when the call of a step is over: unless memory may be handed on in
        # the order of streams, nothing goes back inside.
        inside = self._collector.fast or not asynchronous
        if not inside or spilling.active():  # what a segment uses cannot be sent elsewhere while it runs
            self._bulk = False
        super()._prepare()
        steps = (*self._forward_steps, *self._backward_steps)
        self._memory.used = {step.nid: _looked_at(self._memory, step) for step in steps}
        self._memory.random = frozenset(step.nid for step in steps if step.node.op is not None and step.node.op.random)

        def chunks_of(step: Step) -> list[DynamicChunk]:
            return [chunk for chunk in _looked_at(self._memory, step) if isinstance(chunk, DynamicChunk)]

        self._memory.local = self._collector.settle(
            self._forward_segments, self._backward_segments, chunks_of, inside=inside
        )

    def _push(self, segments: Sequence[Segment], steps: Sequence[Step]) -> None:
        if self._monitor is not None:
            # What a monitor shows is read when it likes: nothing goes back.
            self._memory.local = {True: {}, False: {}}
            super()._push(segments, steps)
            return
        run, first = self._run, 0 if segments is self._forward_segments else len(self._forward_segments)
        for number, segment in enumerate(segments, first):
            segment.push(run)
            give_back(self._collector.passed(run.is_train, number), fast=self._collector.fast)
        if not run.is_train or first or not self._backward_segments:
            give_back(self._collector.ended(run.is_train), fast=self._collector.fast)

    def _check_repeatable(self) -> None:
        raise MXNetError(
            "backward: backward has run since the last forward(is_train=True), and results of forward have been given "
            "back (WEFTPLAN_EXECUTOR_STRATEGY=dynamic); run forward(is_train=True) again"
        )


def _looked_at(memory: DynamicMemory, step: Step) -> list[Chunk]:
    """Return the chunks that a step uses; inputs whose shape alone it reads have none."""
    workspace = memory.workspace(step.nid)
    chunks = [array.chunk for array in (*step.inputs, *step.outputs) if array is not None]
    return chunks if workspace is None else [*chunks, workspace[0]]


def give_back(chunks: Iterable[DynamicChunk], *, fast: bool) -> None:
    """Push operations that give memory back after everything pushed before that uses it, failed or not; ``fast``: after
    its enqueuing."""
    groups: dict[Context | None, list[DynamicChunk]] = {}
    for chunk in chunks:
        groups.setdefault(chunk.context if fast and chunk.context.has_streams else None, []).append(chunk)
    for ctx, dead in groups.items():
        vars_, work = [chunk.var for chunk in dead], partial(_drop, dead, in_order=ctx is not None)
        if ctx is None:
            push(work, (), vars_, cpu(0), prop=FnProperty.DELETE_VAR, name="collect")
        else:  # not launched: it hands memory on while the device works, and the device does nothing for that
            engine.get().push(work, (), vars_, ctx, prop=FnProperty.NO_SKIP, name="collect")


def _drop(chunks: Sequence[DynamicChunk], *, in_order: bool) -> None:
    for chunk in chunks:
        if in_order:
            chunk.drop_in_order()
        else:
            chunk.drop()
