"""Rewrite of offloading: a copy node sends a forward result to an offload target, another fetches it back.

    forward      x = op(...)  ...  x_spill = copy of x, in its offload target
    backward     x_fetch = copy of x_spill, on the device  ...  readers of x read x_fetch

The result occupies device memory up to the copy out, and its fetched copy from the copy back on. An input of which only
the shape matters still names the original node. The input graph is not changed.
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
"""Memory effects of a copy to a target."""
COPY_BACK = Work(label="_CrossDeviceCopy", only_overwrites=True)
"""Memory effects of a copy back to the device."""


@dataclass(frozen=True, slots=True)
class Spill:
    """One offloaded result.

    Attributes:
        entry: its number in the graph.
        out: the copy out runs before this step, at most the number of forward steps.
        back: the copy back runs before this step.
        target: device of the offloaded copy.
    """

    entry: int
    out: int
    back: int
    target: Context


def spilled(program: Program, spills: Sequence[Spill]) -> Program:
    """Return the program that offloads ``spills``; the copies out belong to its forward part."""
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
