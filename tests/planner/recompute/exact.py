"""An exact model of recomputation for the solver CP-SAT, which shares no code with the planner's search.

Forward nodes run once in their order, and backward nodes once in theirs. A forward node may be repeated once, right
before the first node that reads its second result; nodes that are repeated at the same moment run in forward order. A
result is alive from its node to its last reader. Every result has its own memory, so nothing is computed in place. The
solver minimizes the total time of repeated nodes for a given maximum of bytes that are alive at the same time.
"""

from __future__ import annotations

from typing import Any

from weftplan.planner.recompute import Tape


def least_ticks(tape: Tape, ticks: dict[int, int], budget: int, *, seconds: float = 60.0) -> int | None:
    """Return the smallest sum of ``ticks`` of repeated nodes with at most ``budget`` live bytes; None if nothing fits.

    Args:
        ticks: cost of each node, an integer.
        seconds: time limit of the solver.

    Raises:
        RuntimeError: the solver has proved neither an optimum nor that nothing fits.
    """
    from ortools.sat.python import cp_model

    model: Any = cp_model.CpModel()
    program, place = tape.program, tape.step_of
    forward, backward = tape.forward, tape.backward
    count = len(forward)
    width = count + 1
    start_of_backward = count
    horizon = count + len(backward) * width + 1
    # Forward step k happens at time k; backward step b at start + b * width + count, its twins (rank r) at … + r.
    backward_at = {nid: start_of_backward + b * width + count for b, nid in enumerate(backward)}
    repeated = {nid: model.new_bool_var(f"again{nid}") for nid in tape.repeatable}
    block = {nid: model.new_int_var(0, len(backward) - 1, f"block{nid}") for nid in tape.repeatable}
    when = {nid: start_of_backward + block[nid] * width + place[nid] for nid in tape.repeatable}

    readers_forward: dict[int, list[int]] = {}
    readers_backward: dict[int, list[int]] = {}
    for nid in forward:
        for e in program.reads[nid]:
            readers_forward.setdefault(e, []).append(nid)
    for b, nid in enumerate(backward):
        for e in program.reads[nid]:
            readers_backward.setdefault(e, []).append(b)

    for nid in tape.repeatable:
        # A repeated node runs in the block of its first reader: no later than any reader, and in the block of a reader.
        due: list[Any] = []
        used: list[Any] = []
        for e in tape.outputs[nid]:
            for b in readers_backward.get(e, []):
                model.add(block[nid] <= b).only_enforce_if(repeated[nid])
                here = model.new_bool_var("")
                model.add(block[nid] == b).only_enforce_if(here)
                due.append(here)
                used.append(True)
            for reader in readers_forward.get(e, []):
                if reader in repeated:
                    both = model.new_bool_var("")
                    model.add_bool_and([repeated[nid], repeated[reader]]).only_enforce_if(both)
                    model.add_bool_or([~repeated[nid], ~repeated[reader], both])
                    model.add(block[nid] <= block[reader]).only_enforce_if(both)
                    here = model.new_bool_var("")
                    model.add(block[nid] == block[reader]).only_enforce_if(here)
                    model.add_implication(here, both)
                    due.append(here)
        if due:
            model.add_bool_or(due).only_enforce_if(repeated[nid])
        else:
            model.add(repeated[nid] == 0)

    intervals: list[Any] = []
    demands: list[int] = []

    def alive(start: Any, ends: list[Any], nbytes: int, present: Any = None) -> None:
        """Add the lifetime of ``nbytes`` bytes, from ``start`` to the latest of ``ends``.

        An end is a time or a pair of condition and time. The lifetime counts only if ``present`` is true; None means
        always.
        """
        end = model.new_int_var(0, horizon, "")
        size = model.new_int_var(0, horizon, "")
        for item in ends:
            if isinstance(item, tuple):
                model.add(end >= item[1] + 1).only_enforce_if(item[0])
            else:
                model.add(end >= item + 1)
        if present is None:
            intervals.append(model.new_interval_var(start, size, end, ""))
        else:
            intervals.append(model.new_optional_interval_var(start, size, end, present, ""))
        demands.append(nbytes)

    outputs = set(program.graph.outputs)
    for nid in forward:
        for e in tape.outputs[nid]:
            if tape.outside[e] or not (e in readers_forward or e in readers_backward or e in outputs):
                continue
            first = [place[nid]] + [place[reader] for reader in readers_forward.get(e, [])]
            late = [start_of_backward + b * width + count for b in readers_backward.get(e, [])]
            twins = [reader for reader in readers_forward.get(e, []) if reader in repeated]
            if nid in repeated:
                kept = [(~repeated[nid], time) for time in late]
                for reader in twins:
                    only = model.new_bool_var("")
                    model.add_bool_and([~repeated[nid], repeated[reader]]).only_enforce_if(only)
                    model.add_bool_or([repeated[nid], ~repeated[reader], only])
                    kept.append((only, when[reader]))
                alive(place[nid], [*first, *kept], program.nbytes[e])
                second = [*late, *[(repeated[reader], when[reader]) for reader in twins]]
                if second:
                    alive(when[nid], second, program.nbytes[e], repeated[nid])
            else:
                ends = [*first, *late, *[(repeated[reader], when[reader]) for reader in twins]]
                alive(place[nid], [*ends, *([horizon - 1] if e in outputs else [])], program.nbytes[e])
    for nid in backward:
        for e in tape.outputs[nid]:
            if not tape.outside[e] and e in readers_backward:
                ends = [backward_at[nid], *[start_of_backward + b * width + count for b in readers_backward[e]]]
                alive(backward_at[nid], ends, program.nbytes[e])
    model.add_cumulative(intervals, demands, budget)
    model.minimize(sum(ticks[nid] * repeated[nid] for nid in tape.repeatable))
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 1
    status = solver.solve(model)
    if status == cp_model.INFEASIBLE:
        return None
    if status != cp_model.OPTIMAL:
        raise RuntimeError(f"not solved: {solver.status_name(status)}")
    return round(solver.objective_value)
