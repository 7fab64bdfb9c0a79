"""Outputs that no node reads get no memory: the planner's core leaves them out, and this reports it."""

from __future__ import annotations

from collections.abc import Sequence

from weftplan.device.amounts import amount, counted
from weftplan.planner.inplace import Kind
from weftplan.planner.labels import Pass
from weftplan.planner.memory_plan import MemoryPlan
from weftplan.planner.options import PlanOptions


def report(memory: MemoryPlan, *, nbytes: Sequence[int], options: PlanOptions) -> tuple[Pass, ...]:
    """Return what a plan whose entries have these sizes leaves out; nothing if the caller does not want that."""
    if not options.drop_dead_outputs or options.compat == "mxnet":
        return ()
    dead = ((memory.entry_kind == int(Kind.UNUSED)) & (memory.entry_storage < 0)).nonzero()[0].tolist()
    size = sum(nbytes[e] for e in dead)
    changed = f"left out {counted(len(dead), 'output')} that nobody reads: {amount(size)}" if len(dead) else ""
    return (Pass("dead outputs dropped", changed, "WEFTPLAN_DROP_DEAD_OUTPUTS"),)
