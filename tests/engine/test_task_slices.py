"""Slices of one array: tasks on disjoint slices run concurrently, tasks on overlapping slices in submission order."""

from __future__ import annotations

import itertools
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weftplan import engine
from weftplan.errors import EngineError
from weftplan.tasks.array_slices import MAX_PARTS, Parts
from weftplan.tasks.array_vars import in_flight

MODEL = engine.create("NaiveEngine")
access = st.tuples(st.integers(0, 24), st.integers(1, 12), st.booleans(), st.booleans())
"""An access: first byte, number of bytes, whether it writes, and whether all earlier accesses have completed."""


class Order:
    """Model of ordering by vars: the set of all predecessors of each operation."""

    def __init__(self) -> None:
        self.before: list[set[int]] = []
        self.uses: list[tuple[set, set]] = []

    def push(self, reads, writes) -> int:
        """Add an operation and return its number; it follows writers of its vars and users of the vars it writes."""
        reads, writes = set(reads), set(writes)
        predecessors: set[int] = set()
        for number, (read, written) in enumerate(self.uses):
            if writes & (read | written) or reads & written:
                predecessors |= {number, *self.before[number]}
        self.uses.append((reads, writes))
        self.before.append(predecessors)
        return len(self.uses) - 1


@settings(max_examples=300, deadline=None)
@given(st.lists(access, max_size=14), st.integers(3, 40))
def test_overlapping_accesses_are_ordered(accesses, most):
    """If two accesses share a byte and one of them writes, the later follows the earlier unless that has completed."""
    order, parts, done, numbers = Order(), Parts([0], [MODEL.new_variable()]), 0, []

    def idle(var) -> bool:
        return all(var not in (reads | writes) for reads, writes in order.uses[done:])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("weftplan.tasks.array_slices.MAX_PARTS", most)
        for first, count, writes, over in accesses:
            if over:
                done = len(order.uses)
            low, high = first, first + count
            if writes:
                parts, fences = parts.cut(low, high, MODEL.new_variable, idle)
                for fence in fences:
                    order.push((), fence)
            assert list(parts.starts) == sorted(set(parts.starts))
            assert len(set(parts.vars)) == len(parts.vars) == len(parts.starts) <= most
            variables = parts.touched(low, high)
            number = order.push(() if writes else variables, variables if writes else ())
            numbers.append((number, low, high, writes, done))
        for (a, low, high, writes, _), (b, begin, end, also, over) in itertools.combinations(numbers, 2):
            if max(low, begin) < min(high, end) and (writes or also) and a >= over:
                assert a in order.before[b], (low, high, begin, end)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=20), st.randoms())
def test_disjoint_writes_share_no_var(lengths, random):
    """Adjacent slices that are written in any order, with nothing else pending, end with separate vars."""
    ends = list(itertools.accumulate(lengths))
    slices = list(zip([0, *ends], ends, strict=False))
    parts = Parts([0], [MODEL.new_variable()])
    for low, high in random.sample(slices, len(slices)):
        parts, fences = parts.cut(low, high, MODEL.new_variable, lambda var: True)
        assert not fences
    variables = [parts.touched(low, high) for low, high in slices]
    assert all(len(vars_) == 1 for vars_ in variables)
    assert len({vars_[0] for vars_ in variables}) == len(slices)


def test_unused_parts_are_merged():
    """A buffer whose many rows are each written once ends with at most MAX_PARTS parts.

    If all parts are in use, exactly MAX_PARTS remain, and the last part covers the remaining rows.
    """
    parts = Parts([0], [MODEL.new_variable()])
    for low in range(0, 8 * 3 * MAX_PARTS, 8):
        parts, _ = parts.cut(low, low + 8, MODEL.new_variable, lambda var: True)
    assert len(parts.vars) <= MAX_PARTS
    parts = Parts([0], [MODEL.new_variable()])
    for low in range(0, 8 * 3 * MAX_PARTS, 8):
        parts, _ = parts.cut(low, low + 8, MODEL.new_variable, lambda var: False)
    assert len(parts.vars) == MAX_PARTS
    assert parts.touched(8 * 2 * MAX_PARTS, 8 * 2 * MAX_PARTS + 8) == parts.vars[-1:]


def two_workers():
    """Return an engine with two task threads."""
    return engine.create("ThreadedEnginePerDevice", task_workers=2)


def test_two_halves_run_concurrently():
    """Two tasks that write the halves of an array run concurrently: they meet at a barrier."""
    eng = two_workers()
    with engine.using(eng):
        field = np.zeros((4, 4))
        meeting = threading.Barrier(2)

        def meet(out):
            meeting.wait(60)
            out += 1

        for _ in range(3):
            engine.submit(meet, out=field[:2])
            engine.submit(meet, out=field[2:])
        engine.wait(field)
        assert field.tolist() == [[3] * 4] * 4
    eng.stop()


def test_the_whole_and_slices_are_ordered(driver):
    """A task on the whole array runs after earlier tasks on slices and before later ones, in each of four rounds."""
    field, log = np.zeros(12), []
    for turn in range(4):
        for low in range(0, 12, 3):
            engine.submit(np.add, field[low : low + 3], low + turn, out=field[low : low + 3])
        engine.submit(lambda out: log.append(out[::3].tolist()), out=field)
        engine.submit(np.multiply, field[4:8], 1, out=field[4:8])  # overlaps two slices
    engine.wait(field)
    assert log == [[low * (t + 1) + sum(range(t + 1)) for low in range(0, 12, 3)] for t in range(4)]


@pytest.mark.parametrize("seed", range(8))
def test_random_slices_equal_serial(driver, seed):
    """300 operations on slices of two buffers, some strided or reversed, give the same bits as serial execution."""

    def program(run):
        choice = np.random.default_rng(seed)
        buffers = [np.arange(24.0) + i for i in range(2)]

        def view():
            buffer = buffers[choice.integers(2)]
            kind, at = choice.integers(6), choice.integers(17)
            if kind == 0:
                return buffer[::3]
            if kind == 1:
                return buffer.reshape(3, 8)[:, choice.integers(4) : 8][1]
            return buffer[at : at + 8] if kind < 5 else buffer[at : at + 8][::-1]

        for _ in range(300):
            x, y, z = view(), view(), view()
            n = min(len(x), len(y), len(z))
            run([np.add, np.subtract, np.maximum][choice.integers(3)], x[:n], y[:n], z[:n])
        return buffers

    expected = program(lambda fn, x, y, z: fn(x, y, out=z))
    got = program(lambda fn, x, y, z: engine.submit(fn, x, y, out=z))
    engine.wait()
    for left, right in zip(expected, got, strict=True):
        assert left.tobytes() == right.tobytes()


def test_concurrent_submissions_exclude_each_other():
    """Four threads submit tasks on overlapping slices of one array to four workers, 100 each in each of five rounds.

    No two tasks use a byte at the same time, and no addition is lost.
    """
    eng = engine.create("ThreadedEnginePerDevice", task_workers=4)
    with engine.using(eng):
        for _ in range(5):
            field, busy, clashes = np.zeros(16), [0] * 16, []

            def add(out, low, high, busy=busy, clashes=clashes):
                if any(busy[low:high]):
                    clashes.append((low, high))
                busy[low:high] = [1] * (high - low)
                out += 1
                busy[low:high] = [0] * (high - low)

            def storm(number, field=field, add=add):
                choice = np.random.default_rng(number)
                for _ in range(100):
                    low = int(choice.integers(12))
                    engine.submit(add, field[low : low + 4], low, low + 4, writes=[field[low : low + 4]])

            threads = [threading.Thread(target=storm, args=(number,)) for number in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            engine.wait()
            assert clashes == []
            assert field.sum() == 4 * 100 * 4
    eng.stop()
    assert not in_flight


def test_a_failure_stays_in_its_slice(threaded):
    """Tasks that read or update a failed slice raise its ZeroDivisionError; a task on another slice runs.

    A task that overwrites the whole slice clears the failure.
    """
    field = np.zeros(8)
    engine.submit(np.add, field[4:], 1, out=field[4:])
    failed = engine.submit(lambda out: 1 / 0, out=field[:4])
    assert engine.submit(np.sum, field[4:]).result() == 4
    after = engine.submit(np.sum, field[2:6])
    with pytest.raises(ZeroDivisionError):
        after.result()
    with pytest.raises(ZeroDivisionError):
        failed.result()
    with pytest.raises(ZeroDivisionError):
        engine.submit(np.copyto, field[1:3], 5).result()
    with pytest.raises(ZeroDivisionError):
        engine.submit(np.add, field[:4], 1, out=field[:4]).result()
    engine.submit(np.copyto, field[:4], 5)
    assert engine.submit(np.sum, field).result() == 24


def test_pending_failure_reaches_later_slices(threaded):
    """If a pending task on the whole array fails, later tasks on its slices raise the same ValueError."""
    field, door = np.zeros(8), threading.Event()

    def fail(out):
        door.wait(60)
        raise ValueError("late")

    engine.submit(fail, out=field)
    halves = [engine.submit(np.add, half, 1, out=half) for half in (field[:4], field[4:])]
    door.set()
    for half in halves:
        with pytest.raises(ValueError, match="late"):
            half.result()
    assert not field.any()


def test_the_var_of_an_array_orders_its_slices(threaded):
    """An operation ordered by the array's var runs after earlier tasks and before later tasks on slices."""
    field, log, doors = np.zeros(8), [], [threading.Event(), threading.Event()]
    engine.submit(lambda out: doors[0].wait(60), out=field[:4])
    engine.submit(lambda out: doors[1].wait(60), out=field[4:])
    var = engine.var_of(field)
    assert engine.var_of(field[5:]) is var
    threaded.push(lambda: log.append(field.tolist()), [var])
    engine.submit(np.add, field[4:], 1, out=field[4:])
    for door in doors:
        door.set()
    engine.wait(field)
    assert log == [[0] * 8]
    assert field.tolist() == [0] * 4 + [1] * 4


def test_waits_of_slices(threaded):
    """A wait for one half with ``readers=True`` returns while the other half is being written."""
    field, door = np.zeros(8), threading.Event()
    engine.submit(np.add, field[:4], 1, out=field[:4])
    engine.submit(lambda out: door.wait(60), out=field[4:])
    engine.wait(field[:4], readers=True)
    assert field[:4].tolist() == [1] * 4
    door.set()
    engine.wait(field, readers=True)


def test_array_moves_with_its_slices(threaded):
    """While one slice is in use, a second engine raises EngineError for the other slice; later it runs the task."""
    field, door = np.zeros(8), threading.Event()
    engine.submit(lambda out: door.wait(60), out=field[4:])
    with engine.using(MODEL):
        with pytest.raises(EngineError, match="still used by operations"):
            engine.submit(np.add, field[:4], 1, out=field[:4])
        door.set()
        threaded.wait_for_all()
        engine.submit(np.add, field[:4], 1, out=field[:4])
    assert field.tolist() == [1] * 4 + [0] * 4


def test_reading_windows_cut_nothing(threaded):
    """Overlapping windows are read concurrently, both before and after a slice was written."""
    field, meeting = np.zeros(16), threading.Barrier(2)

    def meet(window):
        meeting.wait(60)
        return window.sum()

    for _ in range(3):
        tasks = [engine.submit(meet, field[low : low + 6]) for low in (2, 4)]
        assert all(task.result() == tasks[0].result() for task in tasks)
        engine.submit(np.add, field[4:8], 1, out=field[4:8])
