"""From planned nodes to prepared calls.

Everything that does not change from run to run is settled at bind: arrays at their planned addresses, the kernel, its
context and workspace. A run then only calls. A :class:`Step` is one node; it is executed by one thread at a time,
because it writes vars of its own outputs, so its call and context may be kept and used again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from weftplan import device, engine
from weftplan.device.context import Context
from weftplan.device.simulated_device import SimDevice
from weftplan.engine import FnProperty
from weftplan.engine.var import Var
from weftplan.executor.memory import Bind, Call, PlannedMemory, RunState
from weftplan.ndarray import NDArray
from weftplan.ndarray.copying import device_end, route
from weftplan.ndarray.memory.chunk import Chunk, nothing
from weftplan.ops.core import tiling
from weftplan.ops.core.node_call import NodeCall
from weftplan.ops.core.schema import Op, Req, aligned
from weftplan.planner import PlannedGraph
from weftplan.planner.symbolic.network import MARK as SPILL_MARK
from weftplan.planner.symbolic.node_seconds import ACCELERATOR, seconds_of
from weftplan.symbol.node import Node


@dataclass(slots=True)
class Step:
    """One node, ready to run.

    Attributes:
        node: the graph node.
        nid: its id in the indexed graph.
        context: its device.
        bind: makes the call that does the work of a run; None when there is nothing to do (an identity in place). Runs
            that differ in nothing but random keys may use one call again, as long as the node is not random.
        reads, writes: engine vars, duplicates removed.
        copies: a cross-device copy, which gets an engine operation of its own.
    """

    node: Node
    nid: int
    context: Context
    bind: Bind | None
    reads: list[Any]
    writes: list[Any]
    inputs: list[NDArray | None]
    outputs: list[NDArray | None]
    copies: FnProperty | None = None


class StepBuilder:
    """Makes the steps of one executor.

    Args:
        planned: graph and plan.
        memory: the chunks of the planned storages.
        external: arrays of entries that the plan does not place (arguments, auxiliary states, gradients, head
        gradients).
    """

    def __init__(self, planned: PlannedGraph, memory: PlannedMemory, external: dict[int, NDArray]) -> None:
        self._planned = planned
        self._memory = memory
        self._external = external
        self._entries: dict[int, NDArray] = dict(external)
        self._written: set[int] = set()
        self._ranks = random_ranks(planned)

    def entry(self, eid: int) -> NDArray:
        """Return the array of an entry, planned or given."""
        array = self._entries.get(eid)
        if array is None:
            array = self._entries[eid] = self._memory.entry(eid)
        return array

    def build(self, nid: int) -> Step:
        """The step of node ``nid``; call in execution order (first writers of a storage are noticed that way)."""
        planned = self._planned
        graph = planned.graph
        node = graph.nodes[nid]
        op = node.op
        assert op is not None
        ignored = set(op.ignored(node.params))
        in_ids = graph.inputs[nid]
        out_ids = range(graph.row[nid], graph.row[nid + 1])
        inputs = [None if i in ignored else self.entry(e) for i, e in enumerate(in_ids)]
        requests = [planned.requests[e] for e in out_ids]
        outputs = [None if r == Req.NULL else self.entry(e) for e, r in zip(out_ids, requests, strict=True)]
        workspace = self._memory.workspace(nid)
        reads = [array.var for array in inputs if array is not None]
        writes = [array.var for array in outputs if array is not None]
        writes += [inputs[i].var for i in op.mutated(node.params) if inputs[i] is not None]  # type: ignore[union-attr]
        if workspace is not None:
            writes.append(workspace[0].var)
        idle = nid in planned.skipped or (workspace is None and _is_noop(op, node, in_ids, out_ids, planned))
        if not idle:
            # Invariant: the first writer of a storage runs. It alone makes later writers wait for earlier users.
            for eid, request in zip(out_ids, requests, strict=True):
                if request != Req.NULL and eid not in self._external:
                    writes += self._reused(int(planned.memory.entry_storage[eid]))
            if workspace is not None:
                writes += self._reused(int(planned.memory.workspace_storage[nid]))
        read_list, write_list = engine.dedupe([*reads, self._memory.pool.var], writes)
        context = planned.devices[nid]
        step = Step(node, nid, context, None, read_list, write_list, inputs, outputs)
        if idle:
            return step
        if op.name == "_CrossDeviceCopy":
            if outputs[0] is None:
                return step  # its reader wants the shape alone
            assert inputs[0] is not None
            step.copies, step.context = route(inputs[0].context, outputs[0].context)
            bind = step.bind = self._memory.bound(nid, partial(_copy_call, inputs[0], outputs[0]))
            if node.attrs.get(SPILL_MARK) == "out":  # results are sent to the host for the backward part alone
                step.bind = lambda run: bind(run) if run.is_train else nothing
            return step
        step.bind = self._memory.bound(nid, partial(self._kernel_call, step, requests, workspace))
        return step

    def _kernel_call(self, step: Step, requests: Sequence[Req], workspace: tuple[Chunk, int] | None) -> Bind:
        """Return a function that binds the kernel of a step to a run.

        Accumulated outputs are computed in workspace, then added.
        """
        planned, nid, node, op = self._planned, step.nid, step.node, step.node.op
        assert op is not None
        chosen, place = planned.kernels.get(nid), device.get(step.context)
        raw_out: list[Any] = [None if array is None else array.raw() for array in step.outputs]
        scratch: Any = None if workspace is None else NDArray(workspace[0], (workspace[1],), np.dtype(np.uint8)).raw()
        added: list[tuple[Any, Any]] = []
        if Req.ADD in requests:
            # The tail of the workspace holds the sums' terms: the planner counted aligned(nbytes) for each.
            end = scratch.size
            for k, request in enumerate(requests):
                if request == Req.ADD:
                    target = raw_out[k]
                    end -= aligned(target.nbytes)
                    term = scratch[end : end + target.nbytes].view(target.dtype).reshape(target.shape)
                    raw_out[k] = term
                    added.append((target, term))
            scratch = scratch[:end] if end else None
        call = NodeCall(
            op,
            op.forward if chosen is None else chosen.implementation.kernel,
            node.params,
            place.xp,
            [None if array is None else array.raw() for array in step.inputs],
            raw_out,
            workspace=scratch,
            added=added,
            guarded=engine.debug_enabled(),
            recompute=node.mirror_of is not None,
            output_shapes=tuple(planned.shapes[planned.graph.row[nid] : planned.graph.row[nid + 1]]),
        )
        sizes, key, launch = tiling.of(step.context.device_type), self._ranks.get(node, 0), self._launch(nid)
        with tiling.using(sizes):
            prepared = call.prepared()

        def bind(run: RunState) -> Call:
            if prepared is not None:
                return prepared
            return call.bound(is_train=run.is_train, random_key=(run.seed, (run.counter << 32) + key))

        if launch is None:
            return bind
        return lambda run: partial(launch, tiling.bound(sizes, bind(run)))

    def seconds(self, step: Step) -> float:
        """How long a step takes, by the planner's model."""
        if step.bind is None or step.copies is not None:
            return 0.0
        modelled, place = seconds_of(self._planned, step.nid), device.get(step.context)
        return place.cost.kernel(modelled) if isinstance(place, SimDevice) else modelled + ACCELERATOR.call

    def _launch(self, nid: int) -> Callable[[Callable[[], object]], None] | None:
        """Return the function that runs a node's call on its device, told how long it is; None: call it."""
        place = device.get(self._planned.devices[nid])
        if not place.asynchronous:
            return None
        if isinstance(place, SimDevice):
            return partial(place.launch, modelled=seconds_of(self._planned, nid))
        return place.launch

    def _reused(self, storage: int) -> list[Var]:
        """Return the vars that the first writer of a storage waits for; none after that."""
        if storage < 0 or storage in self._written:
            return []
        self._written.add(storage)
        return self._memory.after(storage)


def _is_noop(op: Op, node: Node, in_ids: Sequence[int], out_ids: Sequence[int], planned: PlannedGraph) -> bool:
    """True for an identity whose output is its input's memory: the bytes are there already."""
    if len(out_ids) != 1 or planned.requests[out_ids[0]] != Req.INPLACE:
        return False
    taken = int(planned.memory.entry_inplace[out_ids[0]])
    return any(p.identity and p.output == 0 and p.input == taken for p in op.inplace_pairs(node.params)) and (
        planned.dtypes[in_ids[taken]] == planned.dtypes[out_ids[0]]
    )


def _copy_call(source: NDArray, target: NDArray) -> Bind:
    """Return a function that makes a copy between contexts."""
    call = partial(device.get(device_end(source.context, target.context)).copy, target.raw(), source.raw())
    return lambda run: call


def crossings(planned: PlannedGraph) -> tuple[frozenset[int], frozenset[int]]:
    """Return (nodes whose results are copied to another device, first readers of such copies)."""
    graph = planned.graph
    makers: set[int] = set()
    readers: set[int] = set()
    copied: set[int] = set()
    for nid in planned.order:
        op = graph.nodes[nid].op
        if op is not None and op.name == "_CrossDeviceCopy":
            makers.add(graph.entry_node[graph.inputs[nid][0]])
            copied.add(graph.row[nid])
        elif copied:
            met = copied.intersection(graph.inputs[nid])
            if met:
                readers.add(nid)
                copied -= met
    return frozenset(makers), frozenset(readers)


def random_ranks(planned: PlannedGraph) -> dict[Node, int]:
    """Return a number for every random node: its place among the random nodes of the forward graph.

    A recomputed node has the number of the node it repeats, so it draws the same values. Names do not count (they
    depend on other networks of the process), nor do nodes that a pass merges (random nodes never are).
    """
    draws = [node for node in planned.graph.nodes if node.op is not None and node.op.random]
    ranks = {node: rank for rank, node in enumerate(one for one in draws if one.mirror_of is None)}
    for node in draws:
        origin = node
        while origin.mirror_of is not None:
            origin = origin.mirror_of
        ranks[node] = ranks[origin]
    return ranks
