"""Functions submitted with their arrays: execution order, containers, failures and contexts."""

from __future__ import annotations

import functools
import gc
import threading
from collections import OrderedDict, defaultdict, namedtuple

import numpy as np
import pytest

import weftplan as mx
from tests.support.together import together
from weftplan import engine
from weftplan.errors import EngineError
from weftplan.tasks.arrays import is_array


class TestSubmit:
    """Functions with arrays as arguments."""

    def test_reads_wait_for_writes(self, driver):
        """Tasks see the values of program order, although a later task overwrites an input of an earlier task."""
        a, b, c = np.arange(4.0), np.empty(4), np.empty(4)
        engine.submit(np.add, a, 1, out=b)
        engine.submit(np.multiply, b, 10, out=c)
        engine.submit(np.copyto, a, b, writes=[a])
        engine.submit(np.add, b, c, out=b)
        engine.wait(a, b, c)
        assert a.tolist() == [1.0, 2.0, 3.0, 4.0]
        assert c.tolist() == [10.0, 20.0, 30.0, 40.0]
        assert b.tolist() == [11.0, 22.0, 33.0, 44.0]

    @pytest.mark.parametrize("seed", range(6))
    def test_random_programs_equal_serial(self, driver, seed: int):
        """200 random operations on overlapping views of four buffers give the same bits as serial execution."""

        def program(run) -> list[np.ndarray]:
            choice = np.random.default_rng(seed + 1000)
            buffers = [np.arange(12.0) + i for i in range(4)]
            for _ in range(200):
                x, y, z = (buffers[choice.integers(4)][(at := choice.integers(5)) : at + 8] for _ in range(3))
                run([np.add, np.subtract, np.maximum][choice.integers(3)], x, y, z)
            return buffers

        expected = program(lambda fn, x, y, z: fn(x, y, out=z))
        got = program(lambda fn, x, y, z: engine.submit(fn, x, y, out=z))
        engine.wait()
        for left, right in zip(expected, got, strict=True):
            assert left.tobytes() == right.tobytes()

    def test_a_task_among_the_arguments_is_its_result(self, driver):
        """A task passed as an argument, in a container or by keyword, is replaced by its result.

        The call runs after that task, and the caller's list is unchanged.
        """
        started = threading.Event()
        if driver._inline:
            started.set()

        def slow(x):
            started.wait(60)
            return x + 1

        first = engine.submit(slow, np.ones(3))
        held = [first, 4.0]
        total = engine.submit(np.sum, first)
        largest = engine.submit(lambda values, more: values[0].max() + values[1] + more["x"], held, more={"x": total})
        started.set()
        assert total.result() == 6.0
        assert largest.result() == 2.0 + 4.0 + 6.0
        assert held[0] is first

    def test_dependant_of_a_failed_task_is_skipped(self, threaded):
        """A task that takes a failed task as its argument never runs and raises that task's failure."""
        calls = []
        with engine.using(threaded):
            failed = engine.submit(divmod, 1, 0)
            after = engine.submit(calls.append, failed)
            with pytest.raises(ZeroDivisionError):
                after.result()
            failed.exception()
        assert calls == []

    def test_arrays_in_containers(self, driver):
        """Arrays in lists, dictionaries and keyword arguments order a task like direct arguments."""
        a, b, out, total = np.zeros(2), np.zeros(2), np.empty(4), np.zeros(1)
        engine.submit(np.copyto, a, 1, writes=[a])
        engine.submit(np.copyto, b, 2, writes=[b])
        engine.submit(np.concatenate, [a, b], out=out)
        engine.submit(
            lambda extra, out: out.__setitem__(0, extra["x"][0].sum()), kwargs={"extra": {"x": [out]}}, out=total
        )
        engine.wait(total)
        assert total.tolist() == [6.0]

    def test_tasks_may_fill_the_callers_containers(self, driver):
        """Objects that a task puts into the caller's list or dictionary stay there."""
        a, actual, named = np.ones(3), [], {}
        engine.submit(lambda result, x: result.append(x.sum()), actual, a, writes=[])
        engine.submit(lambda result, x: result.update(total=x.sum()), named, a, writes=[])
        engine.submit(lambda results: results[0].append(results[1].max()), [actual, a], writes=[a])
        engine.wait()
        assert (actual, named) == ([3.0, 1.0], {"total": 3.0})

    def test_ndarrays_in_custom_containers(self, driver):
        """NDArrays in containers arrive as NumPy arrays in a container of the same class.

        The other items and the caller's containers are unchanged.
        """
        x, seen = mx.nd.ones((3,)), []
        pair = namedtuple("pair", "left right")
        counts = defaultdict(list, x=x, other=[1])

        class Stack(list):
            """A list with an extra attribute."""

        stack = Stack([x, 2])
        stack.label = "kept"
        for value in (pair(x, 1), counts, OrderedDict(x=x), stack, [x], (x, [x]), {"x": (x,)}):
            engine.submit(seen.append, value)
            engine.wait()
        assert [type(value) for value in seen] == [pair, defaultdict, OrderedDict, Stack, list, tuple, dict]
        raw = [seen[0].left, seen[1]["x"], seen[2]["x"], seen[3][0], seen[4][0], *seen[5][1], *seen[6]["x"]]
        assert all(type(value) is np.ndarray for value in raw)
        assert (seen[0].right, seen[1]["other"], seen[1].default_factory) == (1, [1], list)
        assert (seen[3][1:], seen[3].label) == ([2], "kept")
        assert counts["x"] is x
        assert stack[0] is x

    def test_rows_of_structured_arrays(self, driver):
        """A row of a structured array is a view of it, so tasks on the row are ordered with tasks on the array."""
        table = np.zeros(2, dtype=[("at", [("x", float)]), ("n", int)])
        row, inner, total = table[1], table[1]["at"], np.zeros(1)
        assert engine.var_of(row) is engine.var_of(inner) is engine.var_of(table)
        assert not is_array(np.void(b"alone"))
        go = threading.Event()

        def fill(array):
            go.wait(0 if driver.kind in ("NaiveEngine", "Simulator") else 60)
            array["n"] = 5

        engine.submit(fill, table, writes=[table])
        engine.submit(lambda one, out: out.__setitem__(0, one["n"]), row, out=total)
        engine.submit(lambda one: one.__setitem__("n", 7), row, writes=[row])
        go.set()
        engine.wait(total, table)
        assert (total[0], table["n"].tolist()) == (5.0, [5, 7])

    def test_output_may_be_none(self, driver):
        """If an item of ``out`` is None, the function still fills the other output."""
        whole = np.empty(2)
        engine.submit(np.modf, np.array([1.5, -2.25]), out=(None, whole))
        engine.wait(whole)
        assert whole.tolist() == [1.0, -2.0]

    @together()
    @pytest.mark.parametrize("which", ["reads", "writes"])
    @pytest.mark.parametrize("what", [np.zeros(2), np.zeros((2, 2)), np.zeros(0), np.zeros(()), "ndarray", "var"])
    def test_single_array_for_a_sequence_is_refused(self, driver, which, what):
        """A single array or var as ``reads`` or ``writes`` raises EngineError with the correct form."""
        what = {"ndarray": lambda: mx.nd.ones((2,)), "var": driver.new_variable}.get(str(what), lambda: what)()
        with pytest.raises(EngineError, match=rf"write {which}=\[array\] for one"):
            engine.submit(print, **{which: what})

    def test_functions_without_a_body_run_are_refused(self, driver):
        """Coroutine and generator functions raise EngineError, because a call would not run their body."""

        async def coroutine(x):
            x += 1

        def generator(x):
            yield x

        async def both(x):
            yield x

        class Owner:
            async def method(self, x):
                x += 1

        for fn in (coroutine, generator, both, Owner().method, functools.partial(generator, x=1)):
            with pytest.raises(EngineError, match="would run none of it"):
                engine.submit(fn, np.zeros(1))
            with pytest.raises(EngineError, match="would run none of it"):
                driver.push_async(fn)
            with pytest.raises(EngineError, match="would run none of it"):
                engine.task()(fn)
        assert driver.statistics().pushed == 0

    def test_two_outputs_are_passed_as_a_tuple(self, driver):
        """A tuple of outputs is passed to the function as that tuple."""
        whole, remaining = np.empty(3), np.empty(3)
        engine.submit(np.divmod, np.array([7.0, 8.0, 9.0]), 4, out=(whole, remaining))
        engine.wait(whole, remaining)
        assert (whole.tolist(), remaining.tolist()) == ([1.0, 2.0, 2.0], [3.0, 0.0, 1.0])

    def test_ndarrays_mix_with_plain_arrays(self, driver):
        """An NDArray argument arrives as a NumPy array, in order with imperative operations on it."""
        x, plain = mx.nd.ones((3,)), np.zeros(3)
        x += 1
        engine.submit(np.multiply, x, 3, out=plain)
        x += 10
        engine.submit(np.add, plain, 1, out=x)
        x += 100
        assert x.asnumpy().tolist() == [107.0] * 3
        assert plain.tolist() == [6.0] * 3

    def test_arrays_stay_alive_until_used(self, driver):
        """Input arrays that the caller no longer refers to stay alive until the task has used them."""
        out = np.zeros(1000)
        engine.submit(np.add, np.ones(1000), np.full(1000, 2.0), out=out)
        gc.collect()
        engine.wait(out)
        assert out.sum() == 3000

    def test_independent_tasks_overlap(self, threaded):
        """Two independent tasks run concurrently: each waits until the other has begun."""
        meet = threading.Barrier(2, timeout=60)
        a, b = np.zeros(1), np.zeros(1)
        for array in (a, b):
            engine.submit(lambda out: out.__setitem__(0, meet.wait() >= 0), out=array)
        engine.wait()
        assert (a[0], b[0]) == (1.0, 1.0)

    def test_bad_output_schedules_nothing(self, driver):
        """An output that is no array, or a function that is not callable, raises EngineError; no task is scheduled."""
        a = np.zeros(2)
        engine.submit(np.add, a, 1, out=a)
        engine.wait(a)
        version = engine.var_of(a).version
        with pytest.raises(EngineError, match=r"task 'add': expected a NumPy.*got float"):
            engine.submit(np.add, a, 1, out=(a, 2.0))
        with pytest.raises(EngineError, match="expected a function, got int"):
            engine.submit(3, a)
        engine.wait()
        assert engine.var_of(a).version == version

    def test_failure_is_raised_at_the_wait(self, threaded):
        """A wait for a dependant raises the KeyError with the task and file in a note; an unrelated task succeeds."""
        a, b, c = np.zeros(2), np.zeros(2), np.zeros(2)

        def broken(out) -> None:
            raise KeyError("no such thing")

        engine.submit(broken, out=a)
        engine.submit(np.add, a, 1, out=b)
        engine.submit(np.add, c, 1, out=c)
        engine.wait(c)
        with pytest.raises(KeyError, match="no such thing") as caught:
            engine.wait(b)
        assert "broken" in caught.value.__notes__[0]
        assert "test_task_submit.py" in caught.value.__notes__[0]
        engine.submit(np.copyto, a, 5, writes=[a])
        engine.wait(a)
        assert a.tolist() == [5.0, 5.0]
        threaded.wait_for_all()

    def test_context_from_the_arrays(self, threaded):
        """Without ``ctx`` a task runs on the device of its first written array; ``ctx`` overrides it."""
        seen: list[object] = []
        threaded.tracer = lambda *record: seen.append(record[1])
        x = mx.nd.zeros((2,), ctx=mx.cpu(3))
        seen.clear()
        engine.submit(np.add, np.zeros(2, np.float32), 1, out=x)
        engine.submit(np.add, np.zeros(2), 1, out=np.zeros(2))
        engine.submit(np.add, x, 1, out=np.zeros(2), ctx=mx.cpu(7))
        threaded.wait_for_all()
        threaded.tracer = None
        assert sorted(map(str, seen)).count("cpu(3)") >= 1
        assert {"cpu(0)", "cpu(3)", "cpu(7)"} <= set(map(str, seen))

    def test_arrays_are_passed_unchanged_without_debug_mode(self, threaded):
        """Without debug mode a function receives the original array object, not a view."""
        got: list[object] = []
        a = np.zeros(2)
        engine.submit(got.append, a)
        engine.wait()
        assert got[0] is a


class TestFirstMistakes:
    """Typical mistakes of new users raise EngineError."""

    def test_list_for_an_array_is_explained(self, driver):
        """A list in place of an array raises one EngineError, without a cause, with the task and the received type."""
        with pytest.raises(EngineError, match=r"task 'add': expected a NumPy or CuPy array.*got int") as caught:
            engine.submit(np.add, [1, 2], 1, out=[0, 0])
        assert caught.value.__suppress_context__
        assert caught.value.__cause__ is None

    def test_call_for_a_function_is_explained(self, driver):
        """``submit(f(x))`` raises EngineError, whose message shows the intended ``submit(f, x)``."""
        with pytest.raises(EngineError, match=r"got NoneType: write submit\(fn, x\), not submit\(fn\(x\)\)"):
            engine.submit([].clear())
