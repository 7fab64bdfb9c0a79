"""Splitting of an operation over idle cores: when it is allowed, and that each part runs once."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import weftplan as mx
from weftplan import config
from weftplan.support import core_sharing, slots

pytestmark = pytest.mark.usefixtures("four_cores")


def on_worker(work, **options):
    """Run ``work()`` as an operation of a new engine and return its result."""
    engine = mx.engine.create(**{"kind": "ThreadedEnginePerDevice", **options})
    results = []
    engine.push(lambda: results.append(work()), [], [engine.new_variable()])
    engine.wait_for_all()
    engine.stop()
    return results[0]


class TestIdle:
    """``idle_cores()``, the number of further cores that an operation may use."""

    def test_single_worker_gets_all_idle_cores(self):
        """On a four-core machine, the only running operation has three idle cores."""
        assert on_worker(core_sharing.idle_cores) == 3

    def test_busy_workers_reduce_idle_cores(self):
        """On a four-core machine, each of two concurrent operations has two idle cores."""
        engine = mx.engine.create("ThreadedEngine", cpu_workers=2)
        both, actual = threading.Barrier(2), []

        def count() -> None:
            both.wait()
            actual.append(core_sharing.idle_cores())
            both.wait()

        for _ in range(2):
            engine.push(count, [], [engine.new_variable()])
        engine.wait_for_all()
        engine.stop()
        assert actual == [2, 2]

    def test_nested_split_finds_no_idle_core(self):
        """A split that uses all idle cores leaves none for a nested split; afterwards they are idle again."""

        def work() -> tuple[set[int], int]:
            seen: set[int] = set()
            core_sharing.split(lambda part: seen.add(core_sharing.idle_cores()), 8)
            return seen, core_sharing.idle_cores()

        assert on_worker(work) == ({0}, 3)

    @pytest.mark.parametrize("kind", ["NaiveEngine", "Simulator"])
    def test_inline_engines_do_not_split(self, kind):
        """``idle_cores()`` is 0 in an operation of a naive engine or simulator, and outside of operations."""
        assert on_worker(core_sharing.idle_cores, kind=kind) == 0
        assert core_sharing.idle_cores() == 0

    @pytest.mark.parametrize("kind", ["ThreadedEngine", "ThreadedEnginePerDevice"])
    def test_single_worker_engine_does_not_split(self, kind):
        """``idle_cores()`` is 0 in an operation of an engine created with one worker."""
        assert on_worker(core_sharing.idle_cores, kind=kind, cpu_workers=1) == 0

    @pytest.mark.parametrize(
        ("variables", "idle"),
        [({"OMP_NUM_THREADS": "1"}, 0), ({"OMP_NUM_THREADS": "3,2"}, 2), ({"OMP_NUM_THREADS": "99"}, 3),
         ({"OMP_NUM_THREADS": "many"}, 3), ({core_sharing.VARIABLE: "2"}, 1),
         ({core_sharing.VARIABLE: "2", "OMP_NUM_THREADS": "1"}, 1)],
        ids=["one", "levels", "more-than-there-are", "nonsense", "ours", "ours-first"],
    )  # fmt: skip
    @pytest.mark.shows("WEFTPLAN_KERNEL_CORES")
    def test_variables_limit_cores(self, monkeypatch, variables, idle):
        """OMP_NUM_THREADS limits the cores of an operation, as in MXNet; WEFTPLAN_KERNEL_CORES overrides it."""
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        config._reset_for_tests()
        assert on_worker(core_sharing.idle_cores) == idle


class TestSplit:
    """``split()`` runs each part once, on any thread."""

    @pytest.mark.parametrize("parts", [0, 1, 2, 3, 8, 100])
    def test_each_part_runs_once(self, parts):
        """Each part runs once, both on a worker with idle cores and on a thread that may not split."""

        def work() -> list[int]:
            seen: list[int] = []
            core_sharing.split(seen.append, parts)
            return sorted(seen)

        assert on_worker(work) == work() == list(range(parts))

    def test_parts_run_concurrently(self):
        """Three parts that wait for each other all finish, so they run at the same time."""
        together = threading.Barrier(3, timeout=60)
        on_worker(lambda: core_sharing.split(lambda part: together.wait(), 3))

    def test_idle_helpers_take_the_next_job(self):
        """After quick splits in a row, three parts that wait for each other still get three threads and finish."""
        together = threading.Barrier(3, timeout=60)

        def work() -> None:
            for _ in range(100):
                for _ in range(5):
                    core_sharing.split(lambda part: None, 3)
                core_sharing.split(lambda part: together.wait(), 3)

        on_worker(work)

    def test_spinning_threads_see_memory_from_python(self, monkeypatch):
        """When the polling function returns to Python, helper and owner see each other's writes."""
        seen: dict[str, list[bool]] = {"helper": [], "owner": []}

        def look(start: int) -> None:
            words = (ctypes.c_int64 * 2).from_address(start)
            end = time.monotonic() + 60
            while words[0] == words[1] and time.monotonic() < end and not over:
                time.sleep(1e-4)
            who = "helper" if "helper" in threading.current_thread().name else "owner"
            seen[who].append(words[0] != words[1])
            if not seen[who][-1]:
                over.append(True)  # end the other waits, too

        over: list[bool] = []
        monkeypatch.setattr(slots.POLLING, "value", lambda: look)
        monkeypatch.setattr(core_sharing._pool, "free", [])
        monkeypatch.setattr(core_sharing._pool, "started", 0)

        def work() -> None:
            for _ in range(20):
                both, slow = threading.Barrier(2, timeout=60), threading.Event()

                def part(number: int, both: threading.Barrier = both, slow: threading.Event = slow) -> None:
                    both.wait()
                    if "helper" in threading.current_thread().name:
                        slow.wait(0.01)

                core_sharing.split(part, 2)

        on_worker(work)
        over.append(True)
        assert seen["owner"] == [True] * 20
        assert len(seen["helper"]) >= 19
        assert all(seen["helper"][:19])

    def test_caller_runs_parts_without_helpers(self, monkeypatch):
        """If the helpers never start, the caller runs all parts."""

        class Sleepy:
            def give(self, *work: object) -> None: ...

        monkeypatch.setattr(core_sharing, "_helpers", lambda wanted: [Sleepy()] * wanted)
        monkeypatch.setattr(core_sharing._pool, "free", [])
        seen: list[str] = []
        on_worker(lambda: core_sharing.split(lambda part: seen.append(threading.current_thread().name), 5))
        assert len(seen) == 5
        assert len(set(seen)) == 1

    def test_caller_runs_parts_if_no_thread_starts(self, monkeypatch):
        """If the system refuses a new thread, the caller runs all parts."""

        def refuse(wanted: int) -> None:
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(core_sharing, "_helpers", refuse)
        seen: list[int] = []
        on_worker(lambda: core_sharing.split(seen.append, 5))
        assert sorted(seen) == list(range(5))

    def test_helpers_are_reused(self):
        """A hundred splits start at most three helpers."""

        def work() -> None:
            for _ in range(100):
                core_sharing.split(lambda part: None, 4)

        before = set(threading.enumerate())  # includes helpers started by other tests
        on_worker(work)
        started = set(threading.enumerate()) - before
        assert sum(thread.name.startswith("weftplan helper") for thread in started) <= 3

    @pytest.mark.parametrize("bad", [0, 5])
    def test_error_of_a_part_is_raised(self, bad):
        """The split raises the ValueError of a part, and afterwards three cores are idle again."""

        def part(number: int) -> None:
            if number == bad:
                raise ValueError(f"part {number}")

        def work() -> tuple[str, int]:
            with pytest.raises(ValueError, match=f"part {bad}") as caught:
                core_sharing.split(part, 6)
            return str(caught.value), core_sharing.idle_cores()

        assert on_worker(work) == (f"part {bad}", 3)

    def test_late_helper_holds_no_reference(self):
        """A finished job drops the reference to its work, and a helper that starts afterwards raises no error."""
        job = core_sharing._Job(lambda lo, hi: None, [(0, 1)])
        late = job._help
        job._finish()
        assert job._work is core_sharing._nothing
        late(core_sharing._Word())

    def test_helpers_use_the_callers_errstate(self):
        """A helper uses the NumPy errstate of the splitting thread."""
        together = threading.Barrier(2, timeout=60)
        modes: list[str] = []

        def part(number: int) -> None:
            together.wait()
            modes.append(np.geterr()["over"])

        def work() -> None:
            with np.errstate(all="ignore"):
                core_sharing.split(part, 2)

        on_worker(work)
        assert modes == ["ignore", "ignore"]

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
    def test_forked_child_starts_new_helpers(self):
        """After a fork, two parts that wait for each other finish in the child and in the parent."""
        code = """
import os, threading, weftplan as mx
from weftplan.support import blas_threads as blas, core_sharing as cores
blas.usable_cpus = lambda: 2
def both():
    together, done = threading.Barrier(2, timeout=60), []
    engine = mx.engine.get()
    engine.push(lambda: cores.split(lambda part: (together.wait(), done.append(part)), 2), [], [engine.new_variable()])
    engine.wait_for_all()
    return sorted(done) == [0, 1]
assert both()
child = os.fork()
if child == 0:
    os._exit(0 if both() else 1)
assert os.waitpid(child, 0)[1] == 0 and both()
"""
        subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=100)


class Awake:
    """Test double of a helper that spins (``looks``) or sleeps; it counts its wake-ups."""

    def __init__(self, looks: bool, words: int = 0):
        self.looks, self.words, self.given = looks, words, 0

    def give(self, *work: object) -> None:
        """Count a wake-up."""
        self.given += 1


class TestLookers:
    """``with_lookers`` passes work to spinning helpers without waking a thread."""

    @pytest.fixture
    def free(self, monkeypatch):
        """Three free helpers; the first and the third spin."""
        helpers = [Awake(True, 1), Awake(False, 2), Awake(True, 3)]
        monkeypatch.setattr(core_sharing._pool, "free", list(helpers))
        monkeypatch.setattr(core_sharing._pool, "started", 3)
        monkeypatch.setattr(core_sharing._Calls, "missed", 0.0)
        monkeypatch.setattr(core_sharing._Calls, "woken", 0.0)
        return helpers

    @pytest.mark.parametrize(("most", "all_or_none", "told"), [
        (1, True, [1]), (2, True, [1, 3]), (3, True, None), (3, False, [1, 3]), (1, False, [1]),
    ])  # fmt: skip
    def test_spinning_helpers_are_notified(self, free, most, all_or_none, told):
        """The function gets up to ``most`` spinning helpers; with ``all_or_none`` and fewer, no call."""
        seen = []
        assert core_sharing.with_lookers(seen.append, most, all_or_none=all_or_none) is (told is not None)
        assert seen == ([] if told is None else [told])
        assert set(core_sharing._pool.free) == set(free)

    def test_notified_helpers_count_as_busy(self, free):
        """The cores of two notified helpers count as busy until the function raises, and as idle afterwards."""

        def run(boxes):
            idle.append(core_sharing.idle_cores())
            assert len(core_sharing._pool.free) == 1
            raise ValueError("no")

        def work():
            with pytest.raises(ValueError, match="no"):
                core_sharing.with_lookers(run, 2, all_or_none=True)
            return core_sharing.idle_cores()

        idle: list[int] = []
        assert on_worker(work) == 3
        assert idle == [1]
        assert set(core_sharing._pool.free) == set(free)

    def test_no_spinning_helper_means_no_call(self, monkeypatch):
        """Without a spinning helper, with_lookers returns a false value and does not call the function."""
        monkeypatch.setattr(core_sharing._pool, "free", [])
        assert not core_sharing.with_lookers(pytest.fail, 1, all_or_none=False)

    def test_repeated_request_wakes_a_sleeping_helper(self, monkeypatch, free):
        """A second request within a millisecond wakes a helper; a third within five milliseconds wakes none."""
        now = [10.0]
        monkeypatch.setattr(core_sharing.time, "monotonic", lambda: now[0])
        woken = []
        for passed in (0.0, 0.1, 0.0005, 0.0005, 0.1, 0.0005):
            now[0] += passed
            core_sharing.call_looker()
            woken.append(sum(helper.given for helper in free))
        assert woken == [0, 0, 1, 1, 1, 2]
        assert set(core_sharing._pool.free) == set(free)

    def test_woken_helper_spins_again(self, monkeypatch):
        """If no helper exists, two quick calls of ``call_looker()`` start one, which then spins."""
        monkeypatch.setattr(core_sharing._pool, "free", [])
        monkeypatch.setattr(core_sharing._pool, "started", 0)
        looked = threading.Event()

        def look(start: int) -> None:
            looked.set()

        monkeypatch.setattr(slots.POLLING, "value", lambda: look)
        for _ in range(2):
            core_sharing.call_looker()
        assert looked.wait(60)
