"""Link model of offloading: targets of a device, link speeds, and the start and end of copies, in seconds.

Targets come from the options, in their order and with their limits. A device copies in both directions while it
computes; each direction runs one copy at a time, whatever its target. A copy out starts as soon as its result exists,
in the order of results. Copies back mirror this in time: each ends just before the first reader, in the order of
readers. The computation waits if it needs memory before a copy out has ended, or if memory for a copy back becomes
free only after the copy should have started.
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
"""Assumed link to the host: 16 lanes of PCIe 3, or half of the data-sheet figure of PCIe 4."""
FILE = Link(bandwidth=1.0e9, latency=1.0e-4)
"""Assumed link to a solid-state disk behind the page cache."""
PEER = Link(bandwidth=2.0e10)
"""Assumed link to another device on the same switch."""


@dataclass(frozen=True, slots=True)
class Place:
    """Memory of an offload target."""

    context: Context
    """Context of the memory."""
    link: Link
    """Link between the device and the target, in both directions."""
    target: int
    """Index of the target in the options."""
    limit: int | None
    """Free bytes of the target; None without a limit."""


def places(context: Context, options: PlanOptions) -> list[Place]:
    """Return the places for results of ``context``, in order of preference."""
    known = {target: Link(*how) for device, target, *how in options.links if device == str(context)}
    assumed = {"host": PCIE, "file": FILE, "peer": PEER}
    listed: list[Place] = []
    files = 0
    for number, target in enumerate(options.targets):
        taken = options.spill_taken[number] if number < len(options.spill_taken) else 0
        limit = None if target.nbytes is None else max(target.nbytes - taken, 0)
        for there in target.contexts(context, files=files, peers=options.peer_contexts):
            link = assumed[target.kind]
            # A measured link to host memory says nothing about a disk.
            listed.append(Place(there, link if target.kind == "file" else known.get(str(there), link), number, limit))
        files += target.kind == "file"
    return listed if context.device_type in ("cpu", "gpu", "sim") else []


@dataclass(frozen=True, slots=True)
class Idle:
    """A forward result that is idle until the backward part reads it."""

    entry: int
    group: int
    """Index of its buffer."""
    nbytes: int
    made: int
    """Step that computes it."""
    used: int
    """Last forward step that needs its memory, at least :attr:`made`."""
    wanted: int
    """First backward step that reads it."""
    by: int
    """Step before which its copy out must end, at most the first backward step."""
    since: int
    """Step before which its copy back must not start, at least the first backward step."""
    place: Place | None = None
    """Chosen place; None before the choice."""

    @property
    def seconds(self) -> float:
        """Seconds of one copy."""
        assert self.place is not None
        return self.place.link.seconds(self.nbytes)


class StepTimes:
    """Start time of every step and end time of the last, in seconds, also with time reversed."""

    def __init__(self, seconds: Iterable[float]) -> None:
        self.starts = [0.0, *accumulate(seconds)]
        self.end = len(self.starts) - 1
        self._mirrored = [self.starts[-1] - moment for moment in reversed(self.starts)]

    def leaving(self, idle: Sequence[Idle]) -> tuple[list[int], float]:
        """Return the step before which each copy out has ended, and the seconds for which the computation waits."""
        jobs = [(one.made + 1, one.by, one.seconds) for one in idle]
        return _one_way(jobs, self.starts)

    def returning(self, idle: Sequence[Idle]) -> tuple[list[int], float]:
        """Return the step before which each copy back starts, and the seconds for which the computation waits."""
        jobs = [(self.end - one.wanted, self.end - one.since, one.seconds) for one in idle]
        done, waited = _one_way(jobs, self._mirrored)
        return [self.end - step for step in done], waited


def _one_way(jobs: Sequence[tuple[int, int, float]], times: Sequence[float]) -> tuple[list[int], float]:
    """Return the step before which each copy has ended, and the seconds of waiting; copies run first come first served.

    A job is (ready, due, seconds). It may start with step ``ready``; the computation waits for it before step ``due``.
    A wait delays all later steps, which gives later copies more time.
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
            # `delay` may still grow before `due`, which makes this step an upper bound.
            done[k] = min(max(bisect_left(times, free - delay), step), due)
        if ends[k] > now and step == due:
            delay += ends[k] - now
    return done, delay
