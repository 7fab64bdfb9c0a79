"""Search for forward results to offload: a curve of choices from none to all that reduce the peak.

A result can be offloaded if the backward part reads it, no other entry of its buffer is read there, and its device has
an offload target. It goes to the first target with room. The search starts without offloads and lowers a goal step by
step. While the peak exceeds the goal, the search takes the step with most live bytes on the fullest device, and
offloads a result that is idle there. Results whose copy delays no step come first, ordered by the byte-seconds freed
per second of copying; then results by the least delay per byte. Copy times are recomputed for every candidate, because
each copy delays others. Every goal gives a point of the curve: its peak (the lower bound of the real plan) and the
seconds for which copies delay the computation.

:class:`StepTimes` models the links. A device copies in both directions while it computes; each direction runs one copy
at a time, whatever its target. A copy out starts as soon as its result exists, in the order of results. Copies back
mirror this in time: each ends just before the first reader, in the order of readers. The computation waits if it needs
memory before a copy out has ended, or if memory for a copy back becomes free only after the copy should have started.

The curve does not depend on a budget, so a larger budget never gives a slower plan. The graph alone bounds the work.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from weftplan.device.context import Context
from weftplan.device.offload_targets import Link
from weftplan.planner.buffers import Buffers, alignment_of
from weftplan.planner.options import PlanOptions
from weftplan.planner.program import IntArray, Program
from weftplan.planner.recompute import Price
from weftplan.planner.rewiring import Spill
from weftplan.planner.stop_request import asked

PCIE = Link(bandwidth=1.2e10)
"""Assumed link to the host: 16 lanes of PCIe 3, or half of the data-sheet figure of PCIe 4."""
FILE = Link(bandwidth=1.0e9, latency=1.0e-4)
"""Assumed link to a solid-state disk behind the page cache."""
PEER = Link(bandwidth=2.0e10)
"""Assumed link to another device on the same switch."""


@dataclass(frozen=True, slots=True)
class SpillTarget:
    """Memory of an offload target."""

    context: Context
    """Context of the memory."""
    link: Link
    """Link between the device and the target, in both directions."""
    target: int
    """Index of the target in the options."""
    limit: int | None
    """Free bytes of the target; None without a limit."""


def spill_targets(context: Context, options: PlanOptions) -> list[SpillTarget]:
    """Return the places for results of ``context``, in order of preference."""
    links = {target: Link(*how) for device, target, *how in options.links if device == str(context)}
    assumed = {"host": PCIE, "file": FILE, "peer": PEER}
    listed: list[SpillTarget] = []
    files = 0
    for number, target in enumerate(options.targets):
        reserved = options.spill_taken[number] if number < len(options.spill_taken) else 0
        limit = None if target.nbytes is None else max(target.nbytes - reserved, 0)
        for context_of_target in target.contexts(context, files=files, peers=options.peer_contexts):
            link = assumed[target.kind]
            # A measured link to host memory says nothing about a disk.
            listed.append(
                SpillTarget(
                    context_of_target,
                    link if target.kind == "file" else links.get(str(context_of_target), link),
                    number,
                    limit,
                )
            )
        files += target.kind == "file"
    return listed if context.device_type in ("cpu", "gpu", "sim") else []


@dataclass(frozen=True, slots=True)
class Idle:
    """A forward result that is idle until the backward part reads it."""

    entry: int
    group: int
    """Index of its buffer."""
    nbytes: int
    produced: int
    """Step that computes it."""
    used: int
    """Last forward step that needs its memory, at least :attr:`made`."""
    needed: int
    """First backward step that reads it."""
    by: int
    """Step before which its copy out must end, at most the first backward step."""
    since: int
    """Step before which its copy back must not start, at least the first backward step."""
    target: SpillTarget | None = None
    """Chosen target; None before the choice."""

    @property
    def seconds(self) -> float:
        """Seconds of one copy."""
        assert self.target is not None
        return self.target.link.seconds(self.nbytes)


class StepTimes:
    """Start time of every step and end time of the last, in seconds, also with time reversed."""

    def __init__(self, seconds: Iterable[float]) -> None:
        self.starts = [0.0, *accumulate(seconds)]
        self.end = len(self.starts) - 1
        self._mirrored = [self.starts[-1] - moment for moment in reversed(self.starts)]

    def leaving(self, idle: Sequence[Idle]) -> tuple[list[int], float]:
        """Return the step before which each copy out has ended, and the seconds for which the computation waits."""
        jobs = [(result.produced + 1, result.by, result.seconds) for result in idle]
        return _timetable(jobs, self.starts)

    def returning(self, idle: Sequence[Idle]) -> tuple[list[int], float]:
        """Return the step before which each copy back starts, and the seconds for which the computation waits."""
        jobs = [(self.end - result.needed, self.end - result.since, result.seconds) for result in idle]
        steps, waited = _timetable(jobs, self._mirrored)
        return [self.end - step for step in steps], waited


def _timetable(jobs: Sequence[tuple[int, int, float]], times: Sequence[float]) -> tuple[list[int], float]:
    """Return the step before which each copy has ended, and the seconds of waiting; copies run first come first served.

    A job is (ready, deadline, seconds). It may start with step ``ready``; the computation waits for it before step
    ``deadline``.
    A wait delays all later steps, which gives later copies more time.
    """
    steps, ends = [0] * len(jobs), [0.0] * len(jobs)
    free = delay = 0.0
    events = [(ready, 1, deadline, seconds, k) for k, (ready, deadline, seconds) in enumerate(jobs)]
    events += [
        (deadline, 0, deadline, seconds, k) for k, (ready, deadline, seconds) in enumerate(jobs) if deadline > ready
    ]
    events.sort()
    for step, starts, deadline, seconds, k in events:
        moment = times[step] + delay
        if starts:
            free = ends[k] = max(free, moment) + seconds
            # `delay` may still grow before `due`, which makes this step an upper bound.
            steps[k] = min(max(bisect_left(times, free - delay), step), deadline)
        if ends[k] > moment and step == deadline:
            delay += ends[k] - moment
    return steps, delay


SMALLEST = 4096
"""Minimum size of an offloaded result, in bytes."""
RUNG = 0.97
"""Ratio of a goal to the previous peak."""
TRIALS = 4
"""Maximum number of new, and of already offloaded, results that are tried for one step."""
SENDS = 4
"""Maximum number of changes to the choice, per candidate."""


@dataclass(frozen=True, slots=True)
class SpillChoice(Price):
    """Results to offload, and nodes to recompute; the peak excludes offloaded bytes."""

    spills: tuple[Spill, ...]
    copied: int
    """Bytes offloaded; the tie-break between equally fast choices."""


class Search:
    """Search state for one training graph; offload targets come from the options of ``buffers``."""

    def __init__(self, buffers: Buffers, seconds: Sequence[float]) -> None:
        program, options = buffers.program, buffers.options
        targets = [spill_targets(context, options) for context in program.contexts]
        self._free_bytes = {target.target: target.limit for row in targets for target in row}
        """Free bytes of each offload target; None without a limit."""
        self._alignment = options.alignment
        self._num_forward = program.num_forward
        self._times = StepTimes(seconds[nid] for nid in program.order)
        self._live = buffers.live()
        self._devices = [i for i, row in enumerate(targets) if row]
        self._targets = [targets[i] for i in self._devices]
        self._counted = [i for i, context in enumerate(program.contexts) if context.device_type != "cpu_pinned"]
        """Devices whose bytes a budget counts, with or without offload targets."""
        self._held = buffers.nbytes.tolist()
        self._idle = [self._candidates(program, buffers, device) for device in self._devices]

    def _candidates(self, program: Program, buffers: Buffers, device: int) -> list[Idle]:
        """Return the results that can be offloaded from ``device``, in the order of their steps."""
        turn, order = self._num_forward, program.order
        row = program.graph.row
        group = buffers.entry_group
        maker_step: dict[int, int] = {}
        used: dict[int, int] = {}
        reading_step: dict[int, int] = {}
        read_later: dict[int, set[int]] = {}
        for step, nid in enumerate(order):
            for e in program.reads[nid]:
                if group[e] < 0:
                    continue
                if step < turn:
                    used[group[e]] = step
                elif e in maker_step:
                    reading_step.setdefault(e, step)
                    read_later.setdefault(group[e], set()).add(e)
            if step < turn:
                for e in range(row[nid], row[nid + 1]):
                    if group[e] >= 0 and program.device[nid] == device:
                        maker_step[e] = step
                        used[group[e]] = step
        shared = (row[nid] + pair.output for nid, work in enumerate(program.graph.works) for pair in work.over)
        held = {group[e] for e in (*program.graph.outputs, *program.held, *shared)}
        candidates = []
        for e, step in maker_step.items():
            g = group[e]
            if read_later.get(g) == {e} and g not in held and program.nbytes[e] >= SMALLEST:
                candidates.append(Idle(e, g, program.nbytes[e], step, used[g], reading_step[e], turn, turn))
        return candidates

    def choices(self) -> list[SpillChoice]:
        """Return the curve, from no offload on; peaks fall strictly."""
        chosen: list[list[Idle]] = [[] for _ in self._devices]
        choice, live = self._measured(chosen)
        result = [choice]
        sends_left = SENDS * sum(map(len, self._idle))
        while sends_left > 0 and not asked():
            goal = int(result[-1].peak * RUNG)
            sent = 0
            while sent < sends_left and self._peak(live) > goal and self._send(chosen, live, goal):
                sent += 1
            if not sent:
                break
            sends_left -= sent
            choice, live = self._measured(chosen)
            if choice.peak < result[-1].peak:
                result.append(choice)
        return result

    def _peak(self, live: IntArray) -> int:
        return int(live[self._counted].max(axis=1, initial=0).sum())

    def _measured(self, chosen: Sequence[Sequence[Idle]]) -> tuple[SpillChoice, IntArray]:
        """Return the choice, and the bytes alive on each device."""
        live = self._live.copy()
        spills: list[Spill] = []
        copied, stall = 0, 0.0
        for device, idle in zip(self._devices, chosen, strict=True):
            outs, late = self._times.leaving(idle)
            backs, early = self._times.returning(idle)
            stall += late + early
            for result, out, fetched in zip(idle, outs, backs, strict=True):
                start = max(result.used + 1, out)
                if start < fetched:  # else other copies delay this copy until the result is read again
                    assert result.target is not None
                    live[device, start:fetched] -= self._held[result.group]
                    spills.append(Spill(result.entry, out, fetched, result.target.context))
                    copied += result.nbytes
        return SpillChoice(self._peak(live), stall, (), tuple(spills), copied), live

    def _send(self, chosen: list[list[Idle]], live: IntArray, goal: int) -> bool:
        """Offload one more result at the step of the peak and update ``live``; return False if none helps."""
        for k in sorted(range(len(self._devices)), key=lambda k: -int(live[self._devices[k]].max(initial=0))):
            row = live[self._devices[k]]
            moment = int(row.argmax())
            excess = goal - (self._peak(live) - int(row[moment]))
            position_of = {result.entry: position for position, result in enumerate(chosen[k])}
            idle = [
                result
                for result in self._idle[k]
                if result.used < moment < result.needed and result.entry not in position_of
            ]
            idle.sort(key=lambda result: (-self._worth(result), result.entry))
            near = [housed for result in idle[:TRIALS] if (housed := self._housed(k, result)) is not None]
            for result in near:
                if self._leaves([*chosen[k], result], len(chosen[k]), moment):
                    self._settle(result)
                    chosen[k].append(result)
                    live[:] = self._measured(chosen)[1]
                    return True
            # A result whose copy is already planned but late may also be waited for.
            schedule = self._times.leaving if moment < self._num_forward else self._times.returning
            steps, waited = schedule(chosen[k])
            slow = [
                result
                for result, step in zip(chosen[k], steps, strict=True)
                if result.used < moment < result.needed and (step > moment) == (moment < self._num_forward)
            ]
            best: tuple[float, int, int, list[Idle]] | None = None
            for result in [*near, *slow[:TRIALS]]:
                forced = self._forced(result, moment, row, excess)
                if forced == result:
                    continue
                position = position_of.get(result.entry, len(chosen[k]))
                trial = [*chosen[k][:position], forced, *chosen[k][position + 1 :]]
                price = ((schedule(trial)[1] - waited) / result.nbytes, result.entry)
                if best is None or price < best[:2]:
                    best = (*price, position, trial)
            if best is not None and self._leaves(best[3], best[2], moment):
                if best[2] == len(chosen[k]):
                    self._settle(best[3][-1])
                chosen[k] = best[3]
                live[:] = self._measured(chosen)[1]
                return True
        return False

    def _housed(self, k: int, result: Idle) -> Idle | None:
        """Return the result ``result`` with the first place that has room for it; None if no place has room."""
        for target in self._targets[k]:
            free_bytes = self._free_bytes[target.target]
            if free_bytes is None or self._bytes_in(target, result) <= free_bytes:
                return replace(result, target=target)
        return None

    def _settle(self, result: Idle) -> None:
        """Subtract the bytes of the offloaded result ``result`` from the free bytes of its target."""
        assert result.target is not None
        free_bytes = self._free_bytes[result.target.target]
        if free_bytes is not None:
            self._free_bytes[result.target.target] = free_bytes - self._bytes_in(result.target, result)

    def _bytes_in(self, target: SpillTarget, result: Idle) -> int:
        """Return the bytes of ``result`` in an offload target, with its alignment."""
        unit = self._alignment or alignment_of(target.context)
        return -(-result.nbytes // unit) * unit

    def _forced(self, result: Idle, moment: int, row: IntArray, excess: int) -> Idle:
        """Return ``result`` with deadlines that keep it offloaded during the crowded steps around ``moment``.

        A step is crowded if more than ``excess`` bytes are alive. The computation waits for the copies if necessary.
        """
        if moment < self._num_forward:
            low = max(result.used, result.produced) + 1
            calm = np.flatnonzero(row[low:moment] <= excess)
            return replace(result, by=min(result.by, low + int(calm[-1]) + 1 if len(calm) else low))
        calm = np.flatnonzero(row[moment : result.needed] <= excess)
        return replace(result, since=max(result.since, moment + int(calm[0]) if len(calm) else result.needed))

    def _leaves(self, trial: Sequence[Idle], position: int, moment: int) -> bool:
        """Return whether the result at index ``position`` is offloaded at step ``moment``, which does not use it."""
        if moment < self._num_forward:
            return self._times.leaving(trial)[0][position] <= moment
        return self._times.returning(trial)[0][position] > moment

    def _worth(self, result: Idle) -> float:
        """Return the byte-seconds freed per second of copying."""
        gap = self._times.starts[result.needed] - self._times.starts[result.used + 1]
        return gap * result.nbytes / PCIE.seconds(result.nbytes)
