"""The time limit of `pack`: every method respects it, packings stay valid, and a large limit changes nothing."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from bench.packing_instances import KINDS, Buffers, planted, skewed_trace
from weftplan.cli.pack_csv import read_csv
from weftplan.planner.packing import Precedence, check_packing, pack, problem
from weftplan.planner.packing.place_by_birth import pack_by_birth
from weftplan.planner.packing.problem import peak_of, sectioned

DATA = Path(__file__).parents[2] / "bench" / "data"


def crowded_buffers(count: int, steps: int) -> Buffers:
    """Return buffers of random sizes and long random lifetimes; hundreds are alive at the same time."""
    rng = np.random.default_rng(0)
    lower = rng.integers(0, steps, count)
    return lower, lower + rng.integers(1, steps // 3, count), rng.integers(1, 1000, count)


@pytest.mark.parametrize(
    ("buffers", "unlimited"),
    [
        (planted(1_500, 5, duration=1 << 11, memory=1 << 12), "search"),
        (planted(20_000, 2, duration=1 << 15, memory=1 << 15), "first fit"),
        (crowded_buffers(2_900, 5_800), "conflict tables"),
        (crowded_buffers(40_000, 1_000), "first fit"),
        (skewed_trace(60_000, 2), "first fit"),
        (read_csv(DATA / "somas_resnet50.csv")[1:], "search"),
    ],
    ids=["planted 1500", "planted 20000", "crowded 2900", "crowded 40000", "skewed 60000", "resnet50"],
)
def test_kept_in_every_method(buffers: Buffers, unlimited: str) -> None:
    """A limit of 0.05 s is respected by all methods; the longest, ``unlimited``, would take 1 to 10 s.

    Reading the input and a first packing are not limited. A run with almost no time measures them, in processor time of
    this thread, so that other threads and programs do not matter.
    """
    spent = []
    for limit in (1e-9, 0.05):
        began = time.thread_time()
        packing = pack(*buffers, effort="max", time_limit=limit)
        spent.append(time.thread_time() - began)
    assert spent[1] < 2 * spent[0] + 0.4, unlimited
    assert check_packing(*buffers, packing.offsets) == packing.peak


class CountedClock:
    """A clock that stands at 0 until it has been read a number of times; then all time is over."""

    def __init__(self, reads: int) -> None:
        self.reads, self.last = 0, reads

    def perf_counter(self) -> float:
        """Return the seconds, and count the call."""
        self.reads += 1
        return 0.0 if self.reads < self.last else 1e9


@pytest.mark.parametrize("name", ["G", "K"])
def test_packing_is_valid_whenever_time_runs_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The packing is valid if time runs out at the n-th check of the clock, for n = 1, 2, 4, ... until it does not."""
    buffers = read_csv(DATA / "minimalloc" / f"{name}.1048576.csv")[1:]
    count = len(buffers[0])
    order = Precedence([1 << k for k in range(count)], [(1 << k) * 2 - 1 for k in range(count)])
    clock, peaks = CountedClock(1), []
    while clock.reads >= clock.last or not peaks:
        clock = CountedClock(2 ** len(peaks))
        monkeypatch.setattr(problem, "time", clock)
        # The deadline comes from the real clock, whose time is far above the 0 of the counted clock.
        packing = pack(*buffers, time_limit=1.0, order=order)
        assert check_packing(*buffers, packing.offsets) == packing.peak
        peaks.append(packing.peak)
    assert peaks[-1] == pack(*buffers, order=order).peak
    assert len(peaks) > 4
    assert peaks[-1] < peaks[0]


@pytest.mark.parametrize("kind", KINDS)
def test_large_problems_fall_back_first(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever time runs out, the packing is at most as high as the fallback, which is made before everything else."""
    buffers = KINDS[kind](6_000, 7)
    whole = sectioned(*buffers, np.arange(len(buffers[0])))
    fallback = peak_of(whole, pack_by_birth(whole))
    peaks = []
    for reads in (1, 10, 100, 1_000):
        monkeypatch.setattr(problem, "time", CountedClock(reads))
        packing = pack(*buffers, time_limit=1.0, effort="fast")
        assert check_packing(*buffers, packing.offsets) == packing.peak <= fallback
        peaks.append(packing.peak)
    assert peaks[-1] <= peaks[0]


def test_a_limit_far_away_changes_nothing() -> None:
    """A limit of 10,000 s gives the same packing as no limit."""
    buffers = read_csv(DATA / "minimalloc" / "H.1048576.csv")[1:]
    assert pack(*buffers, time_limit=10_000.0) == pack(*buffers)
