"""Parts of one operation on idle cores: who may split, that all parts run once, and that bits do not depend on it."""

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
    """What ``work()`` gives as an operation of a new engine."""
    engine = mx.engine.create(**{"kind": "ThreadedEnginePerDevice", **options})
    found = []
    engine.push(lambda: found.append(work()), [], [engine.new_variable()])
    engine.wait_for_all()
    engine.stop()
    return found[0]


class TestIdle:
    """How many cores may help."""

    def test_a_worker_alone_has_all_others(self):
        """Its own core is at work."""
        assert on_worker(core_sharing.idle_cores) == 3

    def test_other_workers_are_at_work(self):
        """Two operations at once leave two cores."""
        engine = mx.engine.create("ThreadedEngine", cpu_workers=2)
        both, found = threading.Barrier(2), []

        def count() -> None:
            both.wait()
            found.append(core_sharing.idle_cores())
            both.wait()

        for _ in range(2):
            engine.push(count, [], [engine.new_variable()])
        engine.wait_for_all()
        engine.stop()
        assert found == [2, 2]

    def test_helpers_are_at_work(self):
        """Inside a split that has taken all idle cores none is left, and afterwards they are there again."""

        def work() -> tuple[set[int], int]:
            seen: set[int] = set()
            core_sharing.split(lambda part: seen.add(core_sharing.idle_cores()), 8)
            return seen, core_sharing.idle_cores()

        assert on_worker(work) == ({0}, 3)

    @pytest.mark.parametrize("kind", ["NaiveEngine", "Simulator"])
    def test_one_thread_stays_one(self, kind):
        """Engines that run everything on the calling thread split nothing; nor does that thread itself."""
        assert on_worker(core_sharing.idle_cores, kind=kind) == 0
        assert core_sharing.idle_cores() == 0

    @pytest.mark.parametrize("kind", ["ThreadedEngine", "ThreadedEnginePerDevice"])
    def test_one_worker_by_wish(self, kind):
        """Who makes an engine with one worker gets one thread."""
        assert on_worker(core_sharing.idle_cores, kind=kind, cpu_workers=1) == 0

    @pytest.mark.parametrize(
        ("variables", "idle"),
        [({"OMP_NUM_THREADS": "1"}, 0), ({"OMP_NUM_THREADS": "3,2"}, 2), ({"OMP_NUM_THREADS": "99"}, 3),
         ({"OMP_NUM_THREADS": "many"}, 3), ({core_sharing.VARIABLE: "2"}, 1),
         ({core_sharing.VARIABLE: "2", "OMP_NUM_THREADS": "1"}, 1)],
        ids=["one", "levels", "more-than-there-are", "nonsense", "ours", "ours-first"],
    )  # fmt: skip
    @pytest.mark.shows("WEFTPLAN_KERNEL_CORES")
    def test_variables(self, monkeypatch, variables, idle):
        """OMP_NUM_THREADS limits an operation as in MXNet, WEFTPLAN_KERNEL_CORES overrides it, the machine both."""
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        config._reset_for_tests()
        assert on_worker(core_sharing.idle_cores) == idle


class TestSplit:
    """All parts, each once, on whatever threads."""

    @pytest.mark.parametrize("parts", [0, 1, 2, 3, 8, 100])
    def test_each_part_once(self, parts):
        """On a worker with idle cores, and on a thread that may not split."""

        def work() -> list[int]:
            seen: list[int] = []
            core_sharing.split(seen.append, parts)
            return sorted(seen)

        assert on_worker(work) == work() == list(range(parts))

    def test_helpers_help(self):
        """Parts run side by side: three that wait for each other end."""
        together = threading.Barrier(3, timeout=60)
        on_worker(lambda: core_sharing.split(lambda part: together.wait(), 3))

    def test_helpers_help_the_next_job_at_once(self):
        """Who has just done a part is there for the next job, before it has gone to sleep; helpers that came too late
        for one are there for the next, too."""
        together = threading.Barrier(3, timeout=60)

        def work() -> None:
            for _ in range(100):
                for _ in range(5):
                    core_sharing.split(lambda part: None, 3)
                core_sharing.split(lambda part: together.wait(), 3)

        on_worker(work)

    def test_who_waits_looks_first(self, monkeypatch):
        """Helpers see the next job, and owners that a helper has ended, where something can look at memory."""
        seen: dict[str, list[bool]] = {"helper": [], "owner": []}

        def look(start: int) -> None:
            words = (ctypes.c_int64 * 2).from_address(start)
            end = time.monotonic() + 60
            while words[0] == words[1] and time.monotonic() < end and not over:
                time.sleep(1e-4)
            who = "helper" if "helper" in threading.current_thread().name else "owner"
            seen[who].append(words[0] != words[1])
            if not seen[who][-1]:
                over.append(True)  # once is enough

        over: list[bool] = []
        monkeypatch.setattr(slots.POLLING, "value", lambda: look)
        monkeypatch.setattr(core_sharing, "_free", [])
        monkeypatch.setattr(core_sharing, "_started", 0)

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

    def test_parts_that_nobody_takes(self, monkeypatch):
        """A helper that never comes: the caller does all."""

        class Sleepy:
            def give(self, *work: object) -> None: ...

        monkeypatch.setattr(core_sharing, "_helpers", lambda wanted: [Sleepy()] * wanted)
        monkeypatch.setattr(core_sharing, "_free", [])
        seen: list[str] = []
        on_worker(lambda: core_sharing.split(lambda part: seen.append(threading.current_thread().name), 5))
        assert len(seen) == 5
        assert len(set(seen)) == 1

    def test_no_thread_to_be_had(self, monkeypatch):
        """Where the system gives no thread the caller does all."""

        def refuse(wanted: int) -> None:
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(core_sharing, "_helpers", refuse)
        seen: list[int] = []
        on_worker(lambda: core_sharing.split(seen.append, 5))
        assert sorted(seen) == list(range(5))

    def test_helpers_serve_again(self):
        """A hundred splits start no more helpers than one."""

        def work() -> None:
            for _ in range(100):
                core_sharing.split(lambda part: None, 4)

        before = set(threading.enumerate())  # with helpers that other tests have needed
        on_worker(work)
        started = set(threading.enumerate()) - before
        assert sum(thread.name.startswith("weftplan helper") for thread in started) <= 3

    @pytest.mark.parametrize("bad", [0, 5])
    def test_errors(self, bad):
        """What a part raises is raised by the split, after all that run have ended; the helpers serve on."""

        def part(number: int) -> None:
            if number == bad:
                raise ValueError(f"part {number}")

        def work() -> tuple[str, int]:
            with pytest.raises(ValueError, match=f"part {bad}") as caught:
                core_sharing.split(part, 6)
            return str(caught.value), core_sharing.idle_cores()

        assert on_worker(work) == (f"part {bad}", 3)

    def test_a_late_helper_holds_nothing(self):
        """What the parts use is let go when the split is over, though a helper that never came is still asked."""
        job = core_sharing._Job(lambda lo, hi: None, [(0, 1)])
        late = job._help
        job._finish()
        assert job._work is core_sharing._nothing
        late(core_sharing._Word())

    def test_numpy_is_as_quiet_as_for_the_caller(self):
        """A helper treats overflow as the thread that splits does."""
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
    def test_fork(self):
        """A child has none of the helpers, and gets its own."""
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
    """A helper who looks, or does not."""

    def __init__(self, looks: bool, words: int = 0):
        self.looks, self.words, self.given = looks, words, 0

    def give(self, *work: object) -> None:
        """Note it."""
        self.given += 1


class TestLookers:
    """Helpers who look are handed work without being woken."""

    @pytest.fixture
    def free(self, monkeypatch):
        """Of three helpers two look."""
        found = [Awake(True, 1), Awake(False, 2), Awake(True, 3)]
        monkeypatch.setattr(core_sharing, "_free", list(found))
        monkeypatch.setattr(core_sharing, "_started", 3)
        monkeypatch.setattr(core_sharing._Calls, "missed", 0.0)
        monkeypatch.setattr(core_sharing._Calls, "woken", 0.0)
        return found

    @pytest.mark.parametrize(("most", "all_or_none", "told"), [
        (1, True, [1]), (2, True, [1, 3]), (3, True, None), (3, False, [1, 3]), (1, False, [1]),
    ])  # fmt: skip
    def test_who_is_told(self, free, most, all_or_none, told):
        """Those who look, as many as are wanted; where that is too few, nobody."""
        seen = []
        assert core_sharing.with_lookers(seen.append, most, all_or_none=all_or_none) is (told is not None)
        assert seen == ([] if told is None else [told])
        assert set(core_sharing._free) == set(free)

    def test_they_are_at_work_meanwhile(self, free):
        """Their cores are not idle until the work is over, also where that fails."""

        def run(boxes):
            idle.append(core_sharing.idle_cores())
            assert len(core_sharing._free) == 1
            raise ValueError("no")

        def work():
            with pytest.raises(ValueError, match="no"):
                core_sharing.with_lookers(run, 2, all_or_none=True)
            return core_sharing.idle_cores()

        idle: list[int] = []
        assert on_worker(work) == 3
        assert idle == [1]
        assert set(core_sharing._free) == set(free)

    def test_nobody_looks(self, monkeypatch):
        """Nothing is called."""
        monkeypatch.setattr(core_sharing, "_free", [])
        assert not core_sharing.with_lookers(pytest.fail, 1, all_or_none=False)

    def test_a_sleeper_is_called_when_that_is_asked_for_again(self, monkeypatch, free):
        """Twice within a millisecond, and not again within five."""
        now = [10.0]
        monkeypatch.setattr(core_sharing.time, "monotonic", lambda: now[0])
        woken = []
        for passed in (0.0, 0.1, 0.0005, 0.0005, 0.1, 0.0005):
            now[0] += passed
            core_sharing.call_looker()
            woken.append(sum(helper.given for helper in free))
        assert woken == [0, 0, 1, 1, 1, 2]
        assert set(core_sharing._free) == set(free)

    def test_a_helper_who_was_called_looks(self, monkeypatch):
        """It comes back to its looks, and can be told something."""
        monkeypatch.setattr(core_sharing, "_free", [])
        monkeypatch.setattr(core_sharing, "_started", 0)
        looked = threading.Event()

        def look(start: int) -> None:
            looked.set()

        monkeypatch.setattr(slots.POLLING, "value", lambda: look)
        for _ in range(2):
            core_sharing.call_looker()
        assert looked.wait(60)
