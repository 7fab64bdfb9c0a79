"""When bytes are alive, and which order of execution a program allows.

An entry is alive from the step that writes it up to, not including, the step after its last reader; an output of the
graph stays alive to the end. Nothing is kept; any thread may call this.
"""

from __future__ import annotations

import numpy as np

from weftplan.planner.graph import IntArray
from weftplan.planner.program import Program


def dependencies(program: Program) -> list[list[int]]:
    """Per node the operator nodes that it must follow in any order of execution; empty for variables.

    These are the makers of its inputs, its control dependencies, and of the nodes that touch the same auxiliary state
    the one before it in the given order: nodes that touch a state keep their order, since one of them writes it.
    """
    graph = program.graph
    makers: list[int] = graph.entry_node.tolist()
    variable = graph.is_variable.tolist()
    states = {graph.row[n] for n in graph.mutable_variables()}
    before: list[list[int]] = [[] for _ in range(graph.num_nodes)]
    touched: dict[int, int] = {}
    for nid in program.order:
        needs = dict.fromkeys([*(makers[e] for e in graph.inputs[nid]), *graph.controls[nid]])
        if states:
            for e in graph.inputs[nid]:
                if e in states:
                    if touched.get(e, nid) != nid:
                        needs[touched[e]] = None
                    touched[e] = nid
        before[nid] = [n for n in needs if not variable[n]]
    return before


def lifetimes(program: Program) -> tuple[list[int], list[int]]:
    """(first, last) step per entry, half-open; variables and gradient arrays too, though they need no planned memory.

    A variable starts at 0. An entry that nobody reads lives for the one step that makes it.
    """
    graph, row = program.graph, program.graph.row
    end = len(program.order)
    first = [0] * graph.num_entries
    last = [0] * graph.num_entries
    for step, nid in enumerate(program.order):
        for e in program.reads[nid]:
            last[e] = step + 1
        for e in range(row[nid], row[nid + 1]):
            first[e] = step
            last[e] = step + 1
    for e in graph.outputs.tolist():
        last[e] = end
    return first, last


def live_bytes(
    first: IntArray, last: IntArray, *, nbytes: IntArray, device: IntArray, num_devices: int, num_steps: int
) -> IntArray:
    """Bytes alive at each step, one row per device, of buffers with these half-open lifetimes."""
    change = np.zeros((num_devices, num_steps + 1), dtype=np.int64)
    np.add.at(change, (device, first), nbytes)
    np.subtract.at(change, (device, last), nbytes)
    return np.cumsum(change, axis=1)[:, :num_steps]
