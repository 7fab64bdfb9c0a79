"""Prepare a call for each planned node.

Before the first run, a call is bound to everything that does not change between runs: the kernel, arrays at their
planned addresses, and the workspace. A :class:`PreparedStep` is one node with its call. The engine never runs a step on
two threads at a time, because the step writes the vars of its outputs. So runs reuse its call without a lock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from weftplan import device, engine
from weftplan.device.context import Context
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
from weftplan.planner.symbolic.node_seconds import seconds_of
from weftplan.symbol.node import Node


@dataclass(slots=True)
class PreparedStep:
    """One node with its prepared call.

    Attributes:
        node: the graph node.
        nid: its id in the indexed graph.
        context: its device.
        bind: returns the call for a run; None if the node has no work, for example an in-place identity. If the node is
            not random, all runs with the same ``is_train`` may share one call.
        reads, writes: engine vars, without duplicates.
        inputs: array of each input; None if the operator ignores it.
        outputs: array of each output; None if it is not needed.
        copies: the engine property of a cross-device copy, which needs a separate engine operation; otherwise None.
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
    """A builder of the steps of one executor.

    Args:
        planned: graph and plan.
        memory: the memory of the planned storages.
        external: arrays by entry id that the plan does not place: arguments, auxiliary states, gradients and head
            gradients.
    """

    def __init__(self, planned: PlannedGraph, memory: PlannedMemory, external: dict[int, NDArray]) -> None:
        self._planned = planned
        self._memory = memory
        self._external = external
        self._entries: dict[int, NDArray] = dict(external)
        self._written: set[int] = set()
        self._ranks = random_ranks(planned)
        self._state: dict[object, object] = {}

    def entry(self, eid: int) -> NDArray:
        """Return the array of an entry: an external array, or an array in planned memory."""
        array = self._entries.get(eid)
        if array is None:
            array = self._entries[eid] = self._memory.entry(eid)
        return array

    def build(self, nid: int) -> PreparedStep:
        """Return the step of node ``nid``. Call this in execution order, as it tracks the first writers of storages."""
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
        without_work = nid in planned.skipped or (workspace is None and _is_noop(op, node, in_ids, out_ids, planned))
        if not without_work:
            # The first writer of a storage also writes the vars of the storages whose addresses it reuses, and so waits
            # for their users. Later writers wait for the first writer. So a node that does not run must not count as
            # the first writer.
            for eid, request in zip(out_ids, requests, strict=True):
                if request != Req.NULL and eid not in self._external:
                    writes += self._reused(int(planned.memory.entry_storage[eid]))
            if workspace is not None:
                writes += self._reused(int(planned.memory.workspace_storage[nid]))
        read_list, write_list = engine.dedupe([*reads, self._memory.pool.var], writes)
        context = planned.devices[nid]
        step = PreparedStep(node, nid, context, None, read_list, write_list, inputs, outputs)
        if without_work:
            return step
        if op.name == "_CrossDeviceCopy":
            if outputs[0] is None:
                return step  # the reader of the copy needs only its shape
            assert inputs[0] is not None
            step.copies, step.context = route(inputs[0].context, outputs[0].context)
            bind = step.bind = self._memory.bound(nid, partial(_copy_call, inputs[0], outputs[0]))
            if node.attrs.get(SPILL_MARK) == "out":  # an offload of a result that only the backward part reads
                step.bind = lambda run: bind(run) if run.is_train else nothing
            return step
        step.bind = self._memory.bound(nid, partial(self._kernel_call, step, requests, workspace))
        return step

    def _kernel_call(self, step: PreparedStep, requests: Sequence[Req], workspace: tuple[Chunk, int] | None) -> Bind:
        """Return a function that returns the call of a step's kernel for a run.

        An output with the request ADD is computed in the workspace and then added to its array.
        """
        planned, nid, node, op = self._planned, step.nid, step.node, step.node.op
        assert op is not None
        chosen, compute_device = planned.kernels.get(nid), device.get(step.context)
        raw_out: list[Any] = [None if array is None else array.raw() for array in step.outputs]
        scratch: Any = None if workspace is None else NDArray(workspace[0], (workspace[1],), np.dtype(np.uint8)).raw()
        added: list[tuple[Any, Any]] = []
        if Req.ADD in requests:
            # The terms to add lie at the end of the workspace; the planner has reserved aligned(nbytes) for each.
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
            compute_device.xp,
            [None if array is None else array.raw() for array in step.inputs],
            raw_out,
            workspace=scratch,
            added=added,
            guarded=engine.debug_enabled(),
            recompute=node.mirror_of is not None,
            output_shapes=tuple(planned.shapes[planned.graph.row[nid] : planned.graph.row[nid + 1]]),
            executor_state=self._state,
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

    def seconds(self, step: PreparedStep) -> float:
        """Return the seconds that a step takes by the planner's model; 0 without work and for cross-device copies."""
        if step.bind is None or step.copies is not None:
            return 0.0
        return device.get(step.context).cost.kernel(seconds_of(self._planned, step.nid))

    def _launch(self, nid: int) -> Callable[[Callable[[], object]], None] | None:
        """Return the device's function that launches a node's call; None if the device runs calls directly.

        A simulated device also gets the modelled duration of the call.
        """
        compute_device = device.get(self._planned.devices[nid])
        if not compute_device.asynchronous:
            return None
        return partial(compute_device.launch, modelled=seconds_of(self._planned, nid))

    def _reused(self, storage: int) -> list[Var]:
        """Return the vars that the first writer of ``storage`` must write; empty for later writers."""
        if storage < 0 or storage in self._written:
            return []
        self._written.add(storage)
        return self._memory.after(storage)


def _is_noop(op: Op, node: Node, in_ids: Sequence[int], out_ids: Sequence[int], planned: PlannedGraph) -> bool:
    """Return whether a node is an identity whose output shares its input's memory and dtype, so that nothing runs."""
    if len(out_ids) != 1 or planned.requests[out_ids[0]] != Req.INPLACE:
        return False
    overwritten = int(planned.memory.entry_inplace[out_ids[0]])
    return any(p.identity and p.output == 0 and p.input == overwritten for p in op.inplace_pairs(node.params)) and (
        planned.dtypes[in_ids[overwritten]] == planned.dtypes[out_ids[0]]
    )


def _copy_call(source: NDArray, target: NDArray) -> Bind:
    """Return a function that returns the call that copies ``source`` to ``target`` between contexts."""
    call = partial(device.get(device_end(source.context, target.context)).copy, target.raw(), source.raw())
    return lambda run: call


def crossings(planned: PlannedGraph) -> tuple[frozenset[int], frozenset[int]]:
    """Return the nodes whose results are copied to another device, and the first readers of these copies."""
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
    """Return for every random node its position among the random nodes of the forward graph.

    A recomputed node has the position of its original, so it draws the same values. Positions, not names, select the
    values, because default names depend on other networks in the process. Passes never merge random nodes.
    """
    draws = [node for node in planned.graph.nodes if node.op is not None and node.op.random]
    ranks = {node: rank for rank, node in enumerate(draw for draw in draws if draw.mirror_of is None)}
    for node in draws:
        origin = node
        while origin.mirror_of is not None:
            origin = origin.mirror_of
        ranks[node] = ranks[origin]
    return ranks
