"""The rewrite of spilling: a forward result goes to an offload target, and the backward part reads its copy.

    forward      x = op(...)  ...  x_spill = copy of x, in its offload target
    backward     x_fetch = copy of x_spill, on the device  ...  readers of x read x_fetch

The positions of the copies in the order decide how long the memory of the result is taken: up to the copy out, and
from the copy back. Slots whose shape alone matters go on naming the first node. The given graph stays as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weftplan.device.context import Context
from weftplan.planner.graph import Work
from weftplan.planner.program import Program
from weftplan.planner.rewiring import Rewrite

OUT, BACK = "_spill", "_fetch"
COPY_OUT = Work(label="_CrossDeviceCopy", only_overwrites=True)
"""The work of a copy to a target."""
COPY_BACK = Work(label="_CrossDeviceCopy", only_overwrites=True)
"""The work of a copy back to the device."""


@dataclass(frozen=True, slots=True)
class Spill:
    """One result that waits elsewhere.

    Attributes:
        entry: its id.
        out: the copy out stands before this step, at most the number of forward steps.
        back: the copy back stands before this step.
        target: device of the offloaded copy.
    """

    entry: int
    out: int
    back: int
    target: Context


def spilled(program: Program, spills: Sequence[Spill]) -> Program:
    """Return the graph that sends ``spills`` to their offload targets; copies to them are part of its forward part."""
    graph = program.graph
    changed = Rewrite(program)
    outs: dict[int, list[int]] = {}
    backs: dict[int, list[int]] = {}
    fetched: dict[int, int] = {}
    for spill in sorted(spills, key=lambda spill: spill.entry):
        e = spill.entry
        name, device = graph.entry_name(e), program.contexts[program.device[graph.entry_node[e]]]
        out, waiting = changed.copy(e, name + OUT, work=COPY_OUT, context=spill.target, like=e)
        back, fetched[e] = changed.copy(waiting, name + BACK, work=COPY_BACK, context=device, like=e)
        outs.setdefault(spill.out, []).append(out)
        backs.setdefault(spill.back, []).append(back)
    for nid in program.backward:
        ignored = graph.works[nid].ignored
        changed.inputs[nid] = [e if slot in ignored else fetched.get(e, e) for slot, e in enumerate(graph.inputs[nid])]
    steps: list[int] = []
    for step, nid in enumerate(program.order):
        if step <= program.num_forward:
            steps.extend(outs.get(step, ()))
        steps.extend(backs.get(step, ()))
        steps.append(nid)
    return changed.done(steps, more_forward=len(spills))
