"""Peak and time with repeated nodes, computed step by step like a plan, with the planner's in-place rules.

It is the reference for :mod:`weftplan.planner.recompute.tape`, with which it shares only the sum over devices.
"""

from __future__ import annotations

import numpy as np

from weftplan.planner.program import IntArray
from weftplan.planner.recompute import Price, Tape
from weftplan.planner.recompute.tape import Lifetimes, pressure


def walk(tape: Tape, chosen: frozenset[int]) -> tuple[Price, IntArray, Lifetimes]:
    """Return (peak and seconds if ``chosen`` are repeated, the pressure of each step, the lifetimes of all entries)."""
    program, makers, place, count = tape.program, tape.makers, tape.step_of, tape.num_entries
    reads_of, outside = program.reads, tape.outside
    inputs, row = program.graph.inputs, program.graph.row
    # 1. Put repeated nodes before their first readers, and collect the reads of every step.
    steps: list[tuple[int, int, list[int]]] = [(nid, 0, reads_of[nid]) for nid in tape.forward]
    refs = [0] * 2 * count
    for e in (*(e for nid in tape.forward for e in reads_of[nid]), *program.graph.outputs):
        refs[e] += 1
    done: set[int] = set()
    twins: list[int] = []
    for nid in tape.backward:
        reads = reads_of[nid]
        sources = [makers[e] for e in reads if makers[e] in place]
        if sources and not chosen.isdisjoint(sources):
            todo = {m for m in sources if m in chosen and m not in done}
            if todo:
                stack = list(todo)
                while stack:
                    for e in reads_of[stack.pop()]:
                        m = makers[e]
                        if m in chosen and m not in done and m not in todo:
                            todo.add(m)
                            stack.append(m)
                done |= todo
                for m in sorted(todo, key=place.__getitem__) if len(todo) > 1 else todo:
                    own = [e + count if makers[e] in chosen else e for e in reads_of[m]]
                    for e in own:
                        refs[e] += 1
                    steps.append((m, count, own))
                    twins.append(m)
            reads = [e + count if makers[e] in chosen else e for e in reads]
        for e in reads:
            refs[e] += 1
        steps.append((nid, 0, reads))
    # 2. Assign memory step by step, as the planner does.
    nbytes, workspace, device, outputs = program.nbytes, tape.workspace, program.device, tape.outputs
    block = [-1] * (2 * count)
    alive: list[list[int]] = []
    live: list[int] = []
    size: list[int] = []
    home: list[int] = []
    in_place = any(tape.pairs)  # False also if in-place computation is switched off
    now = [0] * len(program.contexts)
    peak = [0] * len(program.contexts)
    for nid, shift, reads in steps:
        # An output that is added directly into a sum has no memory to share.
        pairs = [pair for pair in program.pairs[nid] if not outside[row[nid] + pair.output]]
        if pairs and in_place:
            used: list[int] = []
            for pair in pairs:
                slot, source, out = pair.input, inputs[nid][pair.input], row[nid] + pair.output
                if (shift or nid not in place) and makers[source] in chosen:
                    source += count
                b = block[source]
                out += shift
                if b < 0 or block[out] >= 0 or not refs[out] or slot in used:
                    continue
                if live[b] == 1 or pair.identity:
                    block[out] = b
                    live[b] += refs[out]
                    used.append(slot)
        here = device[nid]
        for e in outputs[nid]:
            out = e + shift
            if refs[out] and block[out] < 0 and not outside[e]:
                block[out] = len(live)
                live.append(refs[out])
                size.append(nbytes[e])
                home.append(here)
                now[here] += nbytes[e]
        high = now[here] + workspace.get(nid, 0)
        if high > peak[here]:
            peak[here] = high
        alive.append(now.copy())
        alive[-1][here] = high
        for e in reads:
            b = block[e]
            if b >= 0:
                live[b] -= 1
                if not live[b]:
                    now[home[b]] -= size[b]
    price = Price(sum(peak), sum(tape.seconds[m] for m in twins), tuple(twins))
    profile = pressure(np.array(alive, dtype=np.int64).reshape(-1, len(now)).T)
    return price, profile, _trace(tape, steps, block)


def _trace(tape: Tape, steps: list[tuple[int, int, list[int]]], block: list[int]) -> Lifetimes:
    """Return the lifetimes of all entries."""
    result, last = [-1] * len(block), [-1] * len(block)
    needed = [len(steps)] * len(block)
    for step, (nid, shift, reads) in enumerate(steps):
        for e in reads:
            if block[e] >= 0:
                last[e] = step
            if step >= len(tape.forward) and needed[e] > step:
                needed[e] = step
        for e in tape.outputs[nid]:
            if block[e + shift] >= 0:
                result[e + shift] = last[e + shift] = step
    for e in tape.program.graph.outputs:
        if block[e] >= 0:
            last[e] = len(steps)
    return Lifetimes(*(np.array(column, dtype=np.int64) for column in (result, last, block, needed)))
