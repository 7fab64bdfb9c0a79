"""Where results of a device may wait, how fast the way there is, and when copies run: a model of the links, in seconds.

Homes come from the options, in their order and with their limits. A device copies in both directions while it
computes; each direction takes one copy at a time, wherever it goes. Copies out start as soon as a result is there, in
the order of results. Copies back are the same with time reversed: they end just when a result is needed, in the order
of needs. If memory is wanted before a copy out has ended, or is free only after a copy
back should have started, the computation waits.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from weftplan.device.context import Context
from weftplan.device.offload_targets import Link
from weftplan.planner.options import PlanOptions

PCIE = Link(bandwidth=1.2e10)
"""Sixteen lanes of the third generation, or half of the data sheet's figure for the fourth."""
FILE = Link(bandwidth=1.0e9, latency=1.0e-4)
"""A solid-state disk under the page cache."""
PEER = Link(bandwidth=2.0e10)
"""Another device on the same switch."""


@dataclass(frozen=True, slots=True)
class Place:
    """One place that takes results."""

    context: Context
    """Its memory."""
    link: Link
    """The way there and back."""
    target: int
    """Which of the offload targets it belongs to."""
    limit: int | None
    """Most bytes that may go to that offload target now; None: as many as there are."""


def places(context: Context, options: PlanOptions) -> list[Place]:
    """Return the places for results of ``context`` in the order of trials."""
    known = {target: Link(*how) for device, target, *how in options.links if device == str(context)}
    assumed = {"host": PCIE, "file": FILE, "peer": PEER}
    listed: list[Place] = []
    files = 0
    for number, target in enumerate(options.targets):
        taken = options.spill_taken[number] if number < len(options.spill_taken) else 0
        limit = None if target.nbytes is None else max(target.nbytes - taken, 0)
        for there in target.contexts(context, files=files, peers=options.peer_contexts):
            link = assumed[target.kind]
            # What is known of the memory of the host says nothing of a disk.
            listed.append(Place(there, link if target.kind == "file" else known.get(str(there), link), number, limit))
        files += target.kind == "file"
    return listed if context.device_type in ("cpu", "gpu", "sim") else []


@dataclass(frozen=True, slots=True)
class Idle:
    """A forward result that waits for the backward part."""

    entry: int
    group: int
    """Its buffer."""
    nbytes: int
    made: int
    """The step that makes it."""
    used: int
    """The last forward step that needs its memory, at least :attr:`made`."""
    wanted: int
    """The first backward step that reads it."""
    by: int
    """The step before which it has to be away; the turn at the latest."""
    since: int
    """The step before which it may not be back; the turn at the earliest."""
    place: Place | None = None
    """Its place, with the link; None until one is chosen."""

    @property
    def seconds(self) -> float:
        """Seconds of one copy."""
        assert self.place is not None
        return self.place.link.seconds(self.nbytes)


class StepTimes:
    """Seconds at which each step starts, and after them the end of the last; the same with time reversed."""

    def __init__(self, seconds: Iterable[float]) -> None:
        self.starts = [0.0, *accumulate(seconds)]
        self.end = len(self.starts) - 1
        self._mirrored = [self.starts[-1] - moment for moment in reversed(self.starts)]

    def leaving(self, idle: Sequence[Idle]) -> tuple[list[int], float]:
        """(step before which each copy out has ended, seconds that the computation waits for them)."""
        jobs = [(one.made + 1, one.by, one.seconds) for one in idle]
        return _one_way(jobs, self.starts)

    def returning(self, idle: Sequence[Idle]) -> tuple[list[int], float]:
        """(step before which each copy back starts, seconds that the computation waits for them)."""
        jobs = [(self.end - one.wanted, self.end - one.since, one.seconds) for one in idle]
        done, waited = _one_way(jobs, self._mirrored)
        return [self.end - step for step in done], waited


def _one_way(jobs: Sequence[tuple[int, int, float]], times: Sequence[float]) -> tuple[list[int], float]:
    """(step before which each copy has ended, seconds that the computation waits), first come first served.

    A job is (ready, due, seconds): it may start with step ``ready``; the computation waits before step ``due`` until it
    has ended. Steps after that are later by as much, which gives later copies more time.
    """
    done, ends = [0] * len(jobs), [0.0] * len(jobs)
    free = delay = 0.0
    events = [(ready, 1, due, seconds, k) for k, (ready, due, seconds) in enumerate(jobs)]
    events += [(due, 0, due, seconds, k) for k, (ready, due, seconds) in enumerate(jobs) if due > ready]
    events.sort()
    for step, starts, due, seconds, k in events:
        now = times[step] + delay
        if starts:
            free = ends[k] = max(free, now) + seconds
            # Later waits can only make the step later that this wait names.
            done[k] = min(max(bisect_left(times, free - delay), step), due)
        if ends[k] > now and step == due:
            delay += ends[k] - now
    return done, delay
