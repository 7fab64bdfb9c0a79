"""Which forward results wait elsewhere: from none to all that help, one curve per graph.

A result may go when the backward part reads it, nothing else in its buffer is read there, and its device has a target.
It goes to the first offload target that has room for it next to those that went before. The search starts with nothing
away and descends a ladder of goals. As long as more is alive than the goal, it looks at the fullest moment of the
fullest device and sends away what is idle then. First comes what is gone by then without anybody waiting, and of that
what frees most bytes for longest per second of copying; then what costs least waiting per byte. The times of copies
(:mod:`.links`) are computed every time, because one more copy delays others. Every rung gives a
point of the curve, with its peak (the lower bound of the plan that the planner would make) and the seconds that copies
hold the computation up.

The curve does not depend on a budget, so answers taken from it are monotone; the work is bounded by the graph alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from weftplan.planner.buffers import Buffers, alignment_of
from weftplan.planner.graph import IntArray
from weftplan.planner.program import Program
from weftplan.planner.recompute import Price
from weftplan.planner.spill.links import PCIE, Idle, Place, StepTimes, places
from weftplan.planner.spill.rewrite import Spill
from weftplan.planner.stopping import asked

SMALLEST = 4096
"""Smaller results stay: their copies cost more time than they free memory."""
RUNG = 0.97
"""Each goal is this part of the peak before."""
TRIALS = 4
"""How many results are tried for one moment in each of the two ways."""
SENDS = 4
"""The whole search sends results away, or hurries them, so often per result that may leave."""


@dataclass(frozen=True, slots=True)
class Choice(Price):
    """Results to send away, and nodes that are repeated besides: the peak leaves out what is in targets."""

    spills: tuple[Spill, ...]
    copied: int
    """Bytes that leave: of equally fast choices, the choice that copies less is better."""


class Search:
    """A training graph with the seconds of its nodes; the options of ``buffers`` say where its results may wait."""

    def __init__(self, buffers: Buffers, seconds: Sequence[float]) -> None:
        program, options = buffers.program, buffers.options
        targets = [places(context, options) for context in program.contexts]
        self._room = {place.target: place.limit for row in targets for place in row}
        """Bytes that each offload target still takes; None: as many as there are."""
        self._alignment = options.alignment
        self._num_forward = program.num_forward
        self._times = StepTimes(seconds[nid] for nid in program.order)
        self._live = buffers.live()
        self._devices = [i for i, row in enumerate(targets) if row]
        self._targets = [targets[i] for i in self._devices]
        self._counted = [i for i, context in enumerate(program.contexts) if context.device_type != "cpu_pinned"]
        """Devices whose bytes a budget counts; from those that are no ``_devices`` nothing leaves."""
        self._held = buffers.nbytes.tolist()
        self._idle = [self._candidates(program, buffers, device) for device in self._devices]

    def _candidates(self, program: Program, buffers: Buffers, device: int) -> list[Idle]:
        """Return the results that may leave ``device``, in the order of their steps."""
        turn, order = self._num_forward, program.order
        row = program.graph.row
        group = buffers.entry_group
        maker_step: dict[int, int] = {}
        used: dict[int, int] = {}
        wanted: dict[int, int] = {}
        read_later: dict[int, set[int]] = {}
        for step, nid in enumerate(order):
            for e in program.reads[nid]:
                if group[e] < 0:
                    continue
                if step < turn:
                    used[group[e]] = step
                elif e in maker_step:
                    wanted.setdefault(e, step)
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
                candidates.append(Idle(e, g, program.nbytes[e], step, used[g], wanted[e], turn, turn))
        return candidates

    def choices(self) -> list[Choice]:
        """The curve, beginning with nothing on the host; peaks fall strictly."""
        chosen: list[list[Idle]] = [[] for _ in self._devices]
        choice, live = self._measured(chosen)
        result = [choice]
        left = SENDS * sum(map(len, self._idle))
        while left > 0 and not asked():
            goal = int(result[-1].peak * RUNG)
            sent = 0
            while sent < left and self._peak(live) > goal and self._send(chosen, live, goal):
                sent += 1
            if not sent:
                break
            left -= sent
            choice, live = self._measured(chosen)
            if choice.peak < result[-1].peak:
                result.append(choice)
        return result

    def _peak(self, live: IntArray) -> int:
        return int(live[self._counted].max(axis=1, initial=0).sum())

    def _measured(self, chosen: Sequence[Sequence[Idle]]) -> tuple[Choice, IntArray]:
        """Return the choice, and the bytes alive on each device."""
        live = self._live.copy()
        spills: list[Spill] = []
        copied, stall = 0, 0.0
        for device, idle in zip(self._devices, chosen, strict=True):
            outs, late = self._times.leaving(idle)
            backs, early = self._times.returning(idle)
            stall += late + early
            for one, out, back in zip(idle, outs, backs, strict=True):
                start = max(one.used + 1, out)
                if start < back:  # others have delayed it until it would never be away
                    assert one.place is not None
                    live[device, start:back] -= self._held[one.group]
                    spills.append(Spill(one.entry, out, back, one.place.context))
                    copied += one.nbytes
        return Choice(self._peak(live), stall, (), tuple(spills), copied), live

    def _send(self, chosen: list[list[Idle]], live: IntArray, goal: int) -> bool:
        """Send one more result away from the fullest moment, and bring ``live`` up to date; False: none helps."""
        for k in sorted(range(len(self._devices)), key=lambda k: -int(live[self._devices[k]].max(initial=0))):
            row = live[self._devices[k]]
            moment = int(row.argmax())
            room = goal - (self._peak(live) - int(row[moment]))
            gone = {one.entry: place for place, one in enumerate(chosen[k])}
            idle = [one for one in self._idle[k] if one.used < moment < one.wanted and one.entry not in gone]
            idle.sort(key=lambda one: (-self._worth(one), one.entry))
            near = [housed for one in idle[:TRIALS] if (housed := self._housed(k, one)) is not None]
            for one in near:
                if self._leaves([*chosen[k], one], len(chosen[k]), moment):
                    self._settle(one)
                    chosen[k].append(one)
                    live[:] = self._measured(chosen)[1]
                    return True
            # Results on the way already, but not in time, may be waited for too.
            one_way = self._times.leaving if moment < self._num_forward else self._times.returning
            steps, waited = one_way(chosen[k])
            slow = [
                one
                for one, step in zip(chosen[k], steps, strict=True)
                if one.used < moment < one.wanted and (step > moment) == (moment < self._num_forward)
            ]
            best: tuple[float, int, int, list[Idle]] | None = None
            for one in [*near, *slow[:TRIALS]]:
                forced = self._forced(one, moment, row, room)
                if forced == one:
                    continue
                place = gone.get(one.entry, len(chosen[k]))
                trial = [*chosen[k][:place], forced, *chosen[k][place + 1 :]]
                price = ((one_way(trial)[1] - waited) / one.nbytes, one.entry)
                if best is None or price < best[:2]:
                    best = (*price, place, trial)
            if best is not None and self._leaves(best[3], best[2], moment):
                if best[2] == len(chosen[k]):
                    self._settle(best[3][-1])
                chosen[k] = best[3]
                live[:] = self._measured(chosen)[1]
                return True
        return False

    def _housed(self, k: int, one: Idle) -> Idle | None:
        """The same result with the first place that has room for it; None: no place has."""
        for place in self._targets[k]:
            room = self._room[place.target]
            if room is None or self._bytes_in(place, one) <= room:
                return replace(one, place=place)
        return None

    def _settle(self, one: Idle) -> None:
        """Take the room of ``one`` from its target."""
        assert one.place is not None
        room = self._room[one.place.target]
        if room is not None:
            self._room[one.place.target] = room - self._bytes_in(one.place, one)

    def _bytes_in(self, place: Place, one: Idle) -> int:
        """Bytes that ``one`` takes in an offload target, which holds results one after another."""
        unit = self._alignment or alignment_of(place.context)
        return -(-one.nbytes // unit) * unit

    def _forced(self, one: Idle, moment: int, row: IntArray, room: int) -> Idle:
        """The same result, waited for so that it is away as long as more than ``room`` is alive around ``moment``."""
        if moment < self._num_forward:
            low = max(one.used, one.made) + 1
            calm = np.flatnonzero(row[low:moment] <= room)
            return replace(one, by=min(one.by, low + int(calm[-1]) + 1 if len(calm) else low))
        calm = np.flatnonzero(row[moment : one.wanted] <= room)
        return replace(one, since=max(one.since, moment + int(calm[0]) if len(calm) else one.wanted))

    def _leaves(self, trial: Sequence[Idle], place: int, moment: int) -> bool:
        """Whether the result at ``place`` is away at ``moment``, which no use of it has."""
        if moment < self._num_forward:
            return self._times.leaving(trial)[0][place] <= moment
        return self._times.returning(trial)[0][place] > moment

    def _worth(self, one: Idle) -> float:
        """Byte-seconds freed per second of copying."""
        gap = self._times.starts[one.wanted] - self._times.starts[one.used + 1]
        return gap * one.nbytes / PCIE.seconds(one.nbytes)
