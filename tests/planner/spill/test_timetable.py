"""The timetable of copies, against examples by hand and a clock that is simulated step by step."""

import random

import pytest

from tests.support.together import together
from weftplan.device.context import Context
from weftplan.device.offload_targets import Link
from weftplan.planner.spill.search import Idle, Place, StepTimes

UNIT = Place(Context("cpu_pinned", 0), Link(bandwidth=1.0, latency=0.0), 0, None)
"""A byte a second."""


def idle(entry, nbytes, made, wanted, turn=5, used=None, by=None, since=None):
    """Return a result; by default no step waits for it before the turn."""
    return Idle(
        entry,
        entry,
        nbytes,
        made,
        made if used is None else used,
        wanted,
        turn if by is None else by,
        turn if since is None else since,
        UNIT,
    )


def timetable(results, times):
    """Return (steps before which copies out are over, steps before which copies back are placed, seconds of
    waiting)."""
    out, late = times.leaving(results)
    back, early = times.returning(results)
    return out, back, late + early


def test_one_copy_that_nobody_waits_for():
    """Steps of a second, five forward and five backward; two bytes made by step 0, used until 1, wanted by 8.

    step     0     1     2  |  3     4     5     6     7     8
             made  used--copy out   away...........back--copy  wanted
    """
    assert timetable([idle(0, 2, made=0, used=1, wanted=8)], StepTimes([1.0] * 10)) == ([3], [6], 0.0)


def test_copies_of_one_direction_take_turns():
    """The second result is ready at 2, but the link is busy until 3; on the way back the last needed goes last."""
    results = [idle(0, 2, made=0, wanted=9), idle(1, 2, made=1, wanted=8)]
    assert timetable(results, StepTimes([1.0] * 10)) == ([3, 5], [7, 5], 0.0)


def test_what_is_not_over_at_the_turn_holds_the_computation_up():
    """Ten bytes end at 11 instead of 5, and have to start back at -2 instead of 5: 6 and 7 seconds of waiting."""
    out, back, waited = timetable([idle(0, 10, made=0, wanted=8)], StepTimes([1.0] * 10))
    assert (out, back) == ([5], [5])
    assert waited == pytest.approx(13.0)


def test_who_is_hurried_is_waited_for():
    """Away by step 2 instead of 4: a second of waiting, which the next copy gains."""
    times = StepTimes([1.0] * 10)
    out, _, waited = timetable([idle(0, 2, made=0, wanted=9, by=2), idle(1, 2, made=2, wanted=9)], times)
    assert out[0] == 2
    assert waited == pytest.approx(1.0)
    _, back, waited = timetable([idle(0, 2, made=0, wanted=9, since=8)], times)
    assert back == [8]
    assert waited == pytest.approx(1.0)


def simulated(jobs, seconds):
    """Return (waiting, end of each copy, start of each step) when steps and copies out really run one after the
    other."""
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
    """Random steps, results and deadlines: seconds of waiting agree, and no copy ends after the step it is said to."""
    rng = random.Random(seed)
    turn = rng.randint(2, 12)
    steps = 2 * turn
    seconds = [rng.choice([0.0, 0.5, 1.0, 3.0]) for _ in range(steps)]
    results = []
    for entry in range(rng.randint(1, 6)):
        result, wanted = rng.randrange(turn), rng.randrange(turn, steps)
        by = rng.randint(result + 1, turn) if rng.random() < 0.5 else turn
        since = rng.randint(turn, wanted) if rng.random() < 0.5 else turn
        results.append(idle(entry, rng.choice([1, 2, 5]), result, wanted, turn=turn, by=by, since=since))
    times = StepTimes(seconds)
    for leaving in (True, False):
        got, waited = times.leaving(results) if leaving else times.returning(results)
        if leaving:
            jobs = [(one.made + 1, one.by, float(one.nbytes)) for one in results]
            ends_at, clockwise = got, seconds
        else:  # the same with time reversed
            jobs = [(steps - one.wanted, steps - one.since, float(one.nbytes)) for one in results]
            ends_at, clockwise = [steps - step for step in got], seconds[::-1]
        want, ends, starts = simulated(jobs, clockwise)
        assert waited == pytest.approx(want)
        for k, step in enumerate(ends_at):
            assert jobs[k][0] <= step <= jobs[k][1]
            assert ends[k] <= starts[step] + 1e-9
