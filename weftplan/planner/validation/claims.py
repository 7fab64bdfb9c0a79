"""The claims of a plan, computed again from the graph: order, sizes, kinds, devices, lifetimes, totals.

The static half of :mod:`weftplan.planner.validation`.
"""

from __future__ import annotations

from itertools import accumulate
from math import prod

import numpy as np

from weftplan.errors import PlanError
from weftplan.planner.drafts import PlannedSteps
from weftplan.planner.inplace import Kind
from weftplan.planner.memory_plan import MemoryPlan
from weftplan.support.tensor_types import Req


class Claims:
    """A planned graph, and the checks that need no replay.

    Raises:
        PlanError: each check raises it if the plan contradicts the graph.
    """

    def __init__(self, planned: PlannedSteps) -> None:
        self.planned = planned
        self.graph = planned.graph
        self.plan: MemoryPlan = planned.memory
        self.gradients = set(planned.gradients.values())
        self.external = {int(self.graph.row[n]) for n in self.graph.variables()} | self.gradients
        for nid, work in enumerate(self.graph.works):
            for pair in work.over:
                if self.graph.inputs[nid][pair.input] in self.external:
                    self.external.add(self.graph.row[nid] + pair.output)
        self.storage_of = self.plan.entry_storage.tolist()

    def check_arrays(self) -> None:
        """The lengths of the plan's arrays."""
        plan, graph = self.plan, self.graph
        counts = {"entry": graph.num_entries, "workspace": graph.num_nodes, "storage": plan.num_storages}
        counts |= {"slab": plan.num_slabs, "after": plan.num_storages + 1}
        for name, value in vars(plan).items():
            if isinstance(value, np.ndarray) and name != "after_storages":
                expected = counts[name.partition("_")[0]]
                if len(value) != expected:
                    raise PlanError(f"plan field {name} has {len(value)} items, expected {expected}")

    def check_order(self) -> None:
        """Every node runs once, after all that it needs."""
        graph, order, boundary = self.graph, self.planned.order, self.planned.num_forward_nodes
        position = {nid: step for step, nid in enumerate(order)}
        operators = [n for n in range(graph.num_nodes) if not graph.is_variable[n]]
        if len(position) != len(order) or sorted(order) != operators:
            raise PlanError(f"the order has {len(order)} steps; expected each of {len(operators)} operator nodes once")
        for step, nid in enumerate(order):
            needs = [graph.entry_node[e] for e in graph.inputs[nid]] + graph.controls[nid]
            for needed in needs:
                before = position.get(needed, -1)
                if before >= step:
                    raise PlanError(
                        f"step {step}: {graph.names[nid]!r} runs before {graph.names[needed]!r} "
                        f"(step {before}), which it needs"
                    )
        for eid in self.planned.outputs:
            if position.get(graph.entry_node[eid], -1) >= boundary:
                raise PlanError(f"output {graph.entry_name(eid)!r} is made after the forward part of {boundary} steps")

    def reads(self, nid: int) -> list[int]:
        """Entries whose values a node reads, once per input."""
        ignored = self.graph.works[nid].ignored
        return [e for i, e in enumerate(self.graph.inputs[nid]) if i not in ignored]

    def check_entries(self) -> None:
        """Sizes, kinds, devices and lifetimes of entries, and the devices of scratch."""
        plan, graph, planned = self.plan, self.graph, self.planned
        heads = set(planned.outputs) | self.gradients
        sizes = planned.nbytes or [
            prod(shape) * dtype.itemsize for shape, dtype in zip(planned.shapes, planned.dtypes, strict=True)
        ]
        end = len(planned.order)
        position = {nid: step for step, nid in enumerate(planned.order)}
        last_read = {e: step for step, nid in enumerate(planned.order) for e in self.reads(nid)}
        for eid, nid in planned.held.items():
            last_read[eid] = max(last_read.get(eid, -1), position[nid])
        for eid in range(graph.num_entries):
            name, storage = graph.entry_name(eid), self.storage_of[eid]
            if int(plan.entry_nbytes[eid]) != sizes[eid]:
                raise PlanError(
                    f"entry {name!r} is planned with {int(plan.entry_nbytes[eid])} bytes, but shape "
                    f"{planned.shapes[eid]} of {planned.dtypes[eid]} has {sizes[eid]}"
                )
            kind, request = Kind(int(plan.entry_kind[eid])), planned.requests[eid]
            if (eid in self.external) != (kind is Kind.EXTERNAL):
                raise PlanError(f"entry {name!r} has kind {kind.name}, but only variables and gradients are external")
            wanted = eid in last_read or eid in heads
            if kind is Kind.EXTERNAL:
                if storage >= 0:
                    raise PlanError(f"entry {name!r} is the caller's, but the plan puts it into storage {storage}")
            elif storage < 0:
                if wanted:
                    raise PlanError(f"entry {name!r} is read, but has no memory")
                if request != Req.NULL:
                    raise PlanError(f"entry {name!r} has no memory, but its request is {request.name}")
            if kind is Kind.UNUSED and wanted:
                raise PlanError(f"entry {name!r} is marked unused, but it is read")
            if storage >= 0:
                if plan.storage_context(storage) != planned.entry_device(eid):
                    raise PlanError(
                        f"entry {name!r} is made on {planned.entry_device(eid)}, but its storage {storage} is on "
                        f"{plan.storage_context(storage)}"
                    )
                first = position[graph.entry_node[eid]]
                last = end if eid in heads else last_read.get(eid, first) + 1
                if (int(plan.entry_first[eid]), int(plan.entry_last[eid])) != (first, last):
                    raise PlanError(
                        f"entry {name!r} lives from step {first} to {last}, but the plan says "
                        f"{int(plan.entry_first[eid])} to {int(plan.entry_last[eid])}"
                    )
        for nid in position:
            storage = int(plan.workspace_storage[nid])
            if plan.workspace_nbytes[nid] and plan.storage_context(storage) != planned.devices[nid]:
                name = graph.names[nid]
                raise PlanError(f"node {name!r} is on {planned.devices[nid]}, its workspace storage {storage} is not")

    def check_totals(self) -> None:
        """The lower bound, below which the peak is not (:mod:`.stated`)."""
        claimed, bound = self.plan.lower_bound, self._live_peak()
        if claimed != bound:
            raise PlanError(f"the plan claims a lower bound of {claimed} bytes, but {bound} are alive at once")

    def _live_peak(self) -> int:
        """Most bytes alive at once, summed over devices, from scratch: runs of overlapping lifetimes per storage."""
        plan, steps = self.plan, len(self.planned.order)
        in_storage: dict[int, list[tuple[int, int, int]]] = {}
        for eid, storage in enumerate(self.storage_of):
            if storage >= 0 and plan.entry_kind[eid] != Kind.UNUSED:
                life = (int(plan.entry_first[eid]), int(plan.entry_last[eid]), int(plan.entry_nbytes[eid]))
                in_storage.setdefault(storage, []).append(life)
        change = [[0] * (steps + 1) for _ in plan.contexts]
        for storage, lives in in_storage.items():
            lives.sort()
            row = change[int(plan.slab_device[plan.storage_slab[storage]])]
            first, last, nbytes = lives[0]
            for start, end, size in [*lives[1:], (steps + 1, steps + 1, 0)]:
                if start < last:
                    last, nbytes = max(last, end), max(nbytes, size)
                else:
                    row[first] += nbytes
                    row[last] -= nbytes
                    first, last, nbytes = start, end, size
        for step, nid in enumerate(self.planned.order):
            scratch = int(plan.workspace_nbytes[nid])
            if scratch:
                row = change[plan.contexts.index(self.planned.devices[nid])]
                row[step] += scratch
                row[step + 1] -= scratch
        return sum(max(accumulate(row)) for row in change)
