"""Tasks on plain arrays: vars found from arrays, order, errors, debug mode, waiting, asyncio."""

from __future__ import annotations

import asyncio
import gc
import mmap
import threading
from pathlib import Path

import numpy as np
import pytest

import weftplan as mx
from weftplan import engine
from weftplan.engine import arrays
from weftplan.errors import EngineError, UndeclaredWriteError, WaitInWorkerError


@pytest.fixture(params=["NaiveEngine", "ThreadedEngine", "ThreadedEnginePerDevice", "Simulator"])
def driver(request: pytest.FixtureRequest):
    """Each kind of engine, as the process-wide one."""
    made = engine.create(request.param)
    before = engine.set_engine(made)
    yield made
    engine.set_engine(before)
    made.stop()


@pytest.fixture
def threaded():
    """Two worker threads."""
    made = engine.create("ThreadedEngine", cpu_workers=2)
    before = engine.set_engine(made)
    yield made
    engine.set_engine(before)
    made.stop()


class TestVarOf:
    """Which var stands for which memory."""

    def test_views_share_a_var(self, driver):
        """A slice, a transpose, a reinterpretation and the whole are one buffer; a copy is another."""
        whole = np.zeros((4, 6))
        var = engine.var_of(whole)
        for view in (whole[1:3], whole.T, whole.view(np.uint8), whole[:, ::2][1:], whole.reshape(-1)[5:]):
            assert engine.var_of(view) is var
        assert engine.var_of(whole.copy()) is not var
        assert var.engine is driver

    def test_buffers_of_others(self, driver, tmp_path: Path):
        """Arrays made apart over one bytearray, memoryview or map share its var."""
        text = bytearray(64)
        first, second = np.frombuffer(text, np.uint8), np.frombuffer(text, np.float64)
        assert engine.var_of(first) is engine.var_of(second[2:])
        base = np.zeros(8)
        window = memoryview(base)
        assert engine.var_of(np.asarray(window)) is engine.var_of(base)
        path = tmp_path / "data"
        path.write_bytes(bytes(64))
        with path.open("r+b") as file:
            mapped = mmap.mmap(file.fileno(), 64)
        one, other = np.frombuffer(mapped, np.uint8), np.frombuffer(mapped, np.uint8, 8)
        assert engine.var_of(one) is engine.var_of(other)

    def test_ndarrays_and_vars_bring_their_own(self, driver):
        """An NDArray has a var already; a var stands for itself."""
        array = mx.nd.zeros((2,))
        assert engine.var_of(array) is array.var
        var = driver.new_variable()
        assert engine.var_of(var) is var

    def test_entries_die_with_their_arrays(self, driver):
        """The registry keeps no array alive, and forgets an owner with the last array over it."""
        gc.collect()
        before = len(arrays._registry)
        whole = np.zeros(100)
        view = whole[10:]
        engine.var_of(view)
        del whole
        assert len(arrays._registry) == before + 1
        del view
        assert len(arrays._registry) == before

    def test_a_reused_address_gets_a_fresh_var(self, driver):
        """Thousands of short-lived arrays land on the same few addresses; none inherits a dead one's var."""
        seen = []
        for _ in range(3000):
            var = engine.var_of(np.empty(16))
            assert var.version == 0
            assert var not in seen[-1:]
            seen.append(var)
        assert len(set(map(id, seen))) == 3000

    def test_one_var_whoever_asks(self, driver):
        """Eight threads asking for the same new array at once get one var."""
        for _ in range(50):
            whole, found, gate = np.zeros(8), [], threading.Barrier(8)

            def ask(whole=whole, found=found, gate=gate) -> None:
                gate.wait()
                found.append(engine.var_of(whole[2:]))

            threads = [threading.Thread(target=ask) for _ in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert len(found) == 8
            assert len(set(map(id, found))) == 1

    def test_finalizers_may_ask_too(self, driver):
        """Arrays that die in reference cycles, whose finalizers ask for vars, while eight threads make and drop views:
        nothing hangs, nothing is forgotten that lives, and nothing stays that died."""
        gc.collect()
        kept = [np.zeros(4) for _ in range(4)]
        before, variables, errors = len(arrays._registry), [engine.var_of(array) for array in kept], []

        class Cycle:
            def __init__(self) -> None:
                self.me, self.array = self, np.zeros(2)
                engine.var_of(self.array)

            def __del__(self) -> None:
                engine.var_of(kept[0])
                engine.var_of(np.zeros(3))

        def churn() -> None:
            try:
                for i in range(300):
                    Cycle()
                    engine.var_of(np.zeros(8)[i % 4 :])
                    assert [engine.var_of(array[1:]) for array in kept] == variables
                    if i % 100 == 0:
                        gc.collect()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=churn) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        gc.collect()
        assert len(arrays._registry) == before + 4

    def test_no_array(self, driver):
        """Something else is refused with its type."""
        with pytest.raises(EngineError, match=r"NumPy or CuPy array.*got list"):
            engine.var_of([1, 2])

    def test_another_engine(self, threaded):
        """An idle array moves to the engine that is asked; a busy one is an error: nothing would order the two."""
        array, hold = np.zeros(2), threading.Event()
        engine.submit(lambda out: hold.wait(10), out=array)
        second = engine.create("NaiveEngine")
        with engine.using(second):
            with pytest.raises(EngineError, match=r"still used by operations on"):
                engine.submit(np.add, array, 1, out=array)
            hold.set()
            threaded.wait_for_all()
            engine.submit(np.add, array, 1, out=array)
        assert array.tolist() == [1.0, 1.0]


class TestSubmit:
    """Functions with their arrays as arguments."""

    def test_reads_wait_for_writes(self, driver):
        """
        a --add--> b --multiply--> c, while a is overwritten behind: each step sees what program order says.
        """
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
        """200 random operations on overlapping views of four buffers give the bits of running them one by one."""

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

    def test_arrays_in_containers(self, driver):
        """Arrays in lists and dictionaries, and in keyword arguments, order the task like any other."""
        a, b, out, total = np.zeros(2), np.zeros(2), np.empty(4), np.zeros(1)
        engine.submit(np.copyto, a, 1, writes=[a])
        engine.submit(np.copyto, b, 2, writes=[b])
        engine.submit(np.concatenate, [a, b], out=out)
        engine.submit(
            lambda extra, out: out.__setitem__(0, extra["x"][0].sum()), kwargs={"extra": {"x": [out]}}, out=total
        )
        engine.wait(total)
        assert total.tolist() == [6.0]

    def test_two_outputs(self, driver):
        """A tuple of outputs is passed as it is."""
        whole, rest = np.empty(3), np.empty(3)
        engine.submit(np.divmod, np.array([7.0, 8.0, 9.0]), 4, out=(whole, rest))
        engine.wait(whole, rest)
        assert (whole.tolist(), rest.tolist()) == ([1.0, 2.0, 2.0], [3.0, 0.0, 1.0])

    def test_ndarrays_mix_with_plain_arrays(self, driver):
        """An NDArray arrives as its raw array, in order with imperative operations on it."""
        x, plain = mx.nd.ones((3,)), np.zeros(3)
        x += 1
        engine.submit(np.multiply, x, 3, out=plain)
        x += 10
        engine.submit(np.add, plain, 1, out=x)
        x += 100
        assert x.asnumpy().tolist() == [107.0] * 3
        assert plain.tolist() == [6.0] * 3

    def test_arrays_stay_alive_until_used(self, driver):
        """The last reference may go right after the submission."""
        out = np.zeros(1000)
        engine.submit(np.add, np.ones(1000), np.full(1000, 2.0), out=out)
        gc.collect()
        engine.wait(out)
        assert out.sum() == 3000

    def test_independent_tasks_overlap(self, threaded):
        """Two tasks that share nothing run at the same time: each waits for the other to have begun."""
        meet = threading.Barrier(2, timeout=20)
        a, b = np.zeros(1), np.zeros(1)
        for array in (a, b):
            engine.submit(lambda out: out.__setitem__(0, meet.wait() >= 0), out=array)
        engine.wait()
        assert (a[0], b[0]) == (1.0, 1.0)

    def test_bad_output_schedules_nothing(self, driver):
        """An output that is no array names the task; the arrays keep their versions."""
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

    def test_a_failure_reaches_whoever_waits(self, threaded):
        """The original exception, with task and line; what depends on it fails alike, the rest does not."""
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
        assert "test_task.py" in caught.value.__notes__[0]
        engine.submit(np.copyto, a, 5, writes=[a])
        engine.wait(a)
        assert a.tolist() == [5.0, 5.0]
        threaded.wait_for_all()

    def test_context_from_the_arrays(self, threaded):
        """Without ctx the task runs where its first written array is."""
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

    def test_without_debug_mode_arrays_arrive_as_they_are(self, threaded):
        """Off, a function gets the very array: no view, no cost."""
        got: list[object] = []
        a = np.zeros(2)
        engine.submit(got.append, a)
        engine.wait()
        assert got[0] is a


class TestTask:
    """The decorator."""

    def test_declared_by_name(self, driver):
        """Positions, keywords and defaults are all found by parameter name."""

        @engine.task(reads=["a", "b"], writes=["out"])
        def weighted(a, b, out, *, scale=1.0):
            out[:] = a + scale * b

        a, b, out = np.ones(2), np.full(2, 2.0), np.zeros(2)
        assert weighted(a, b, out) is None
        weighted(out, b=b, out=a, scale=10.0)
        engine.wait(a)
        assert (out.tolist(), a.tolist()) == ([3.0, 3.0], [23.0, 23.0])
        weighted.__wrapped__(b, b, out)
        assert out.tolist() == [4.0, 4.0]
        assert weighted.__name__ == "weighted"

    def test_methods(self, driver):
        """A method is a task like a function; ``self`` is no array."""

        class Model:
            def __init__(self) -> None:
                self.scale = 4.0

            @engine.task(writes=["out"])
            def apply(self, x, out):
                np.multiply(x, self.scale, out=out)

        out = np.zeros(2)
        Model().apply(np.ones(2), out)
        engine.wait(out)
        assert out.tolist() == [4.0, 4.0]

    @pytest.mark.parametrize(
        ("reads", "writes", "message"),
        [
            (["x"], ["out"], r"reads names 'x', which is none of its parameters: a, out"),
            (["a"], ["result"], r"writes names 'result'"),
            (["a", "out"], ["out"], r"'out' is in reads and in writes"),
            ("a", ["out"], r"reads must be a sequence of names, such as \['a'\]"),
        ],
    )
    def test_stale_declarations(self, reads, writes, message):
        """A name that the function does not have is found when it is decorated."""
        with pytest.raises(EngineError, match=message):

            @engine.task(reads=reads, writes=writes)
            def work(a, out):
                """Never runs."""

    def test_undeclared_array(self, driver):
        """With reads given, an array in another parameter is refused, and nothing is scheduled."""

        @engine.task(reads=["a"], writes=["out"])
        def work(a, b, out):
            out[:] = a + b

        out = np.zeros(2)
        work(np.ones(2), 1.0, out)
        with pytest.raises(EngineError, match=r"task '.*work' got an array in parameter 'b'.*neither reads nor writes"):
            work(np.ones(2), np.ones(2), out)
        with pytest.raises(EngineError, match=r"parameter 'out' is declared as written.*got float"):
            work(np.ones(2), 1.0, 2.0)
        with pytest.raises(TypeError, match="missing"):
            work(np.ones(2))
        engine.wait(out)
        assert out.tolist() == [2.0, 2.0]
        assert engine.var_of(out).version == 1


class TestDebugMode:
    """WEFTPLAN_ENGINE_DEBUG=1."""

    @pytest.fixture(autouse=True)
    def debug(self, monkeypatch: pytest.MonkeyPatch):
        """A threaded engine in debug mode."""
        monkeypatch.setenv("WEFTPLAN_ENGINE_DEBUG", "1")
        made = engine.create("ThreadedEngine", cpu_workers=1)
        before = engine.set_engine(made)
        yield
        engine.set_engine(before)
        made.stop()

    def test_undeclared_write_names_task_and_array(self):
        """Of two arrays read, the one that the failing line writes is named, as the function calls it."""

        @engine.task(reads=["left", "right"], writes=["out"])
        def careless(left, right, out):
            out[:] = left
            right[0] = 7

        left, right, out = np.zeros((2, 3)), np.zeros(5), np.zeros((2, 3))
        careless(left, right, out)
        with pytest.raises(UndeclaredWriteError, match=r"careless.*'right', ndarray of shape \(5,\)") as caught:
            engine.wait(out)
        assert "left" not in str(caught.value)
        assert isinstance(caught.value.__cause__, ValueError)
        assert right.tolist() == [0.0] * 5
        engine.submit(np.copyto, out, 1, writes=[out])
        engine.wait()

    def test_undeclared_write_in_compiled_code(self):
        """A NumPy function submitted as it is names what it got to read."""
        a, b = np.zeros(4), np.zeros(4)
        engine.submit(np.copyto, a, 3, reads=[b])
        with pytest.raises(UndeclaredWriteError, match=r"'copyto'.*shape \(4,\)"):
            engine.wait()
        assert a.tolist() == [0.0] * 4

    def test_declared_writes_pass(self):
        """Written arrays, also when they are among the arguments or views of one, stay writable."""
        a = np.zeros(4)
        engine.submit(np.add, a[1:], 1, out=a[1:])
        engine.submit(lambda x: x.fill(3), a[:1], writes=[a])
        engine.wait(a)
        assert a.tolist() == [3.0, 1.0, 1.0, 1.0]

    def test_other_errors_stay_what_they_are(self):
        """A ValueError of the task's own is not explained away."""
        a = np.zeros(4)
        engine.submit(np.add, np.zeros(3), np.zeros(2), out=a)
        with pytest.raises(ValueError, match="broadcast"):
            engine.wait(a)
        engine.submit(np.copyto, a, 1, writes=[a])
        engine.wait()


class TestWait:
    """Waiting from threads and from coroutines."""

    def test_readers(self, threaded):
        """``readers=True`` waits for a task that only reads."""
        a, hold, seen = np.zeros(1), threading.Event(), []

        def slow(array) -> None:
            hold.wait(20)
            seen.append(float(array[0]))

        engine.submit(slow, a)
        engine.wait(a)
        assert seen == []
        threading.Timer(0.05, hold.set).start()
        engine.wait(a, readers=True)
        assert seen == [0.0]

    def test_inside_a_task(self, threaded):
        """A wait inside a task could hang for ever, so it raises with the fix."""
        a, b = np.zeros(1), np.zeros(1)
        engine.submit(lambda out: engine.wait(a), out=b)
        with pytest.raises(WaitInWorkerError, match="const_vars"):
            engine.wait(b)

    def test_future(self, driver):
        """A future of an array is done when it is written."""
        a = np.zeros(2)
        engine.submit(np.add, a, 1, out=a)
        done = engine.future(a)
        engine.wait()
        assert done.result(timeout=20) is a
        assert a.tolist() == [1.0, 1.0]

    def test_future_with_a_failure(self, threaded):
        """A future carries what the task raised, which then counts as seen."""
        a = np.zeros(2)
        engine.submit(lambda out: 1 / 0, out=a)
        with pytest.raises(ZeroDivisionError):
            engine.future(a).result(timeout=20)
        threaded.wait_for_all()

    def test_await(self, threaded):
        """``await var`` gives the loop back while the task runs; a failure is raised in the coroutine."""
        a, order, hold = np.zeros(2), [], threading.Event()

        def slow(out) -> None:
            hold.wait(20)
            out += 1

        async def other() -> None:
            order.append("the loop goes on")
            hold.set()

        async def main() -> None:
            engine.submit(slow, out=a)
            beside = asyncio.create_task(other())
            var = await engine.var_of(a)
            order.append(f"version {var.version}")
            await beside
            assert await asyncio.wrap_future(engine.future(a)) is a
            engine.submit(lambda out: 1 / 0, out=a)
            with pytest.raises(ZeroDivisionError):
                await engine.var_of(a)

        asyncio.run(main())
        assert order == ["the loop goes on", "version 1"]
        assert a.tolist() == [1.0, 1.0]
