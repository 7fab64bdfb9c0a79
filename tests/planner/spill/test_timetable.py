"""The timetable of copies, compared with examples and with a simulated clock."""

import random

import pytest

from tests.support.together import together
from weftplan.device.context import Context
from weftplan.device.offload_targets import Link
from weftplan.planner.spill.search import Idle, SpillTarget, StepTimes

UNIT = SpillTarget(Context("cpu_pinned", 0), Link(bandwidth=1.0, latency=0.0), 0, None)
"""Offload target with a link of 1 byte per second."""


def make_idle(entry, nbytes, produced, needed, turn=5, used=None, by=None, since=None):
    """Return an idle result whose copies take ``nbytes`` seconds each; ``turn`` is the first backward step.

    By default its copy out must end before ``turn``, and its copy back may start from ``turn`` on.
    """
    return Idle(
        entry,
        entry,
        nbytes,
        produced,
        produced if used is None else used,
        needed,
        turn if by is None else by,
        turn if since is None else since,
        UNIT,
    )


def timetable(results, times):
    """Return the steps before which copies out end and copies back start, and the total seconds of waiting."""
    out, late = times.leaving(results)
    back, early = times.returning(results)
    return out, back, late + early


def test_hidden_copy():
    """A copy of 2 s out and a copy of 2 s back overlap with steps of 1 s, five forward and five backward.

    step     0     1     2     3     4  |  5     6     7     8
             produced  copy out--  offloaded.......  copy back-- needed
    """
    assert timetable([make_idle(0, 2, produced=0, used=1, needed=8)], StepTimes([1.0] * 10)) == ([3], [6], 0.0)


def test_copies_of_one_direction_take_turns():
    """Copies in one direction run one after the other; the result that is needed first is copied back first."""
    results = [make_idle(0, 2, produced=0, needed=9), make_idle(1, 2, produced=1, needed=8)]
    assert timetable(results, StepTimes([1.0] * 10)) == ([3, 5], [7, 5], 0.0)


def test_late_copies_delay_the_computation():
    """Copies of 10 s delay the computation by 6 s at the end of the forward part and by 7 s in the backward part."""
    out, back, waited = timetable([make_idle(0, 10, produced=0, needed=8)], StepTimes([1.0] * 10))
    assert (out, back) == ([5], [5])
    assert waited == pytest.approx(13.0)


def test_copies_with_deadlines_delay_the_computation():
    """A copy out that must end 1 s earlier, and a copy back that must start 1 s later, each cost a wait of 1 s."""
    times = StepTimes([1.0] * 10)
    results = [make_idle(0, 2, produced=0, needed=9, by=2), make_idle(1, 2, produced=2, needed=9)]
    out, _, waited = timetable(results, times)
    assert out[0] == 2
    assert waited == pytest.approx(1.0)
    _, back, waited = timetable([make_idle(0, 2, produced=0, needed=9, since=8)], times)
    assert back == [8]
    assert waited == pytest.approx(1.0)


def simulated(jobs, seconds):
    """Run steps and copies out one after the other on a simulated clock.

    A job is (step from which its copy may start, step before which it must end, seconds of the copy); ``seconds`` are
    the times of the steps.

    Returns:
        The seconds of waiting, the end of each copy, and the start of each step.
    """
    starts, ends = [], {}
    now = free = waited = 0.0
    for step in range(len(seconds) + 1):
        due = max([ends[k] for k, (ready, by, _) in enumerate(jobs) if by == step > ready], default=0.0)
        waited += max(0.0, due - now)
        now = max(now, due)
        for k, (ready, by, lasts) in sorted(enumerate(jobs), key=lambda item: item[1]):
            if ready == step:
                free = ends[k] = max(free, now) + lasts
                if by == step:
                    waited += max(0.0, free - now)
                    now = max(now, free)
        starts.append(now)
        now += seconds[step] if step < len(seconds) else 0.0
    return waited, ends, starts


@together()
@pytest.mark.parametrize("seed", range(300))
def test_the_model_of_waiting_is_what_a_simulation_waits(seed):
    """For random steps, results and deadlines the model waits as long as the simulation, and copies end in time."""
    rng = random.Random(seed)
    turn = rng.randint(2, 12)
    steps = 2 * turn
    seconds = [rng.choice([0.0, 0.5, 1.0, 3.0]) for _ in range(steps)]
    results = []
    for entry in range(rng.randint(1, 6)):
        result, needed = rng.randrange(turn), rng.randrange(turn, steps)
        by = rng.randint(result + 1, turn) if rng.random() < 0.5 else turn
        since = rng.randint(turn, needed) if rng.random() < 0.5 else turn
        results.append(make_idle(entry, rng.choice([1, 2, 5]), result, needed, turn=turn, by=by, since=since))
    times = StepTimes(seconds)
    for leaving in (True, False):
        got, waited = times.leaving(results) if leaving else times.returning(results)
        if leaving:
            jobs = [(one.produced + 1, one.by, float(one.nbytes)) for one in results]
            ends_at, clockwise = got, seconds
        else:  # copies back are copies out with time reversed
            jobs = [(steps - one.needed, steps - one.since, float(one.nbytes)) for one in results]
            ends_at, clockwise = [steps - step for step in got], seconds[::-1]
        want, ends, starts = simulated(jobs, clockwise)
        assert waited == pytest.approx(want)
        for k, step in enumerate(ends_at):
            assert jobs[k][0] <= step <= jobs[k][1]
            assert ends[k] <= starts[step] + 1e-9
