"""Task decorator and debug mode: declared parameter names and undeclared writes."""

from __future__ import annotations

import operator

import numpy as np
import pytest

import weftplan as mx
from weftplan import engine
from weftplan.errors import EngineError, UndeclaredWriteError


class TestTask:
    """The decorator ``engine.task``."""

    def test_declared_by_name(self, driver):
        """Declared names match positional, keyword and default arguments; ``__wrapped__`` is the function itself."""

        @engine.task(reads=["a", "b"], writes=["out"])
        def weighted(a, b, out, *, scale=1.0):
            out[:] = a + scale * b

        a, b, out = np.ones(2), np.full(2, 2.0), np.zeros(2)
        assert isinstance(weighted(a, b, out), engine.Task)
        weighted(out, b=b, out=a, scale=10.0)
        engine.wait(a)
        assert (out.tolist(), a.tolist()) == ([3.0, 3.0], [23.0, 23.0])
        weighted.__wrapped__(b, b, out)
        assert out.tolist() == [4.0, 4.0]
        assert weighted.__name__ == "weighted"

    def test_default_arrays_order_the_task(self, driver):
        """A default array orders the task like a passed array; if ``reads`` omits it, a call raises EngineError."""
        total, second, extra = np.zeros(2), np.zeros(2), mx.nd.ones((2,))

        @engine.task(writes=["out", "more"])
        def add(a, out=total, *, more=None, plus=extra):
            out += a
            out += plus

        before = engine.var_of(total).version
        for i in range(50):
            add(np.full(2, i))
            add(np.full(2, i), second)
        add(np.zeros(2), plus=np.ones(2))
        engine.wait(total, second)
        assert (total.tolist(), second.tolist()) == ([1276.0] * 2, [1275.0] * 2)
        assert (engine.var_of(total).version, engine.var_of(second).version) == (before + 51, 50)

        @engine.task(reads=["a"], writes=["out"])
        def undeclared(a, out, factor=second):
            pass

        with pytest.raises(EngineError, match="parameter 'factor', which is in neither"):
            undeclared(total, second)

    def test_methods(self, driver):
        """A decorated method is a task like a decorated function; ``self`` need not be an array."""

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

    def test_every_parameter_kind_is_matched(self, driver):
        """Arrays in positional-only, keyword-only and starred parameters are matched by name.

        A call with wrong arguments raises TypeError immediately, and no task is scheduled.
        """

        @engine.task(reads=["a", "more", "named"], writes=["out"])
        def gather(a, /, *more, out, **named):
            out[:] = a + sum(more) + sum(named.values())

        out = np.zeros(2)
        gather(np.ones(2), np.full(2, 10.0), np.full(2, 100.0), out=out, x=np.full(2, 1000.0))
        engine.wait(out)
        assert out.tolist() == [1111.0, 1111.0]
        for args, kwargs in (((np.ones(2), out), {}), ((), {"out": out}), ((), {"a": np.ones(2), "out": out})):
            with pytest.raises(TypeError):
                gather(*args, **kwargs)

        @engine.task(writes=["out"])
        def double(x, *, out):
            np.multiply(x, 2, out=out)

        with pytest.raises(TypeError, match="positional"):
            double(np.ones(2), out)
        engine.wait()
        assert engine.var_of(out).version == 1

    @pytest.mark.parametrize(
        ("reads", "writes", "message"),
        [
            (["x"], ["out"], r"reads names 'x', which is none of its parameters: a, out"),
            (["a"], ["result"], r"writes names 'result'"),
            (["a", "out"], ["out"], r"'out' is in reads and in writes"),
            ("a", ["out"], r"reads must be a sequence of names, such as \['a'\]"),
        ],
    )
    def test_unknown_declared_name_is_refused(self, reads, writes, message):
        """An unknown or duplicate name, or a string in place of a sequence, raises EngineError at decoration."""
        with pytest.raises(EngineError, match=message):

            @engine.task(reads=reads, writes=writes)
            def work(a, out):
                """Do nothing; the decoration of this function raises."""

    def test_undeclared_array_is_refused(self, driver):
        """If ``reads`` is declared, an array in another parameter raises EngineError, and no task is scheduled."""

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
    """Checks with WEFTPLAN_ENGINE_DEBUG=1."""

    @pytest.fixture(autouse=True)
    def debug(self, monkeypatch: pytest.MonkeyPatch):
        """Use a threaded engine in debug mode."""
        monkeypatch.setenv("WEFTPLAN_ENGINE_DEBUG", "1")
        eng = engine.create("ThreadedEngine", cpu_workers=1)
        before = engine.set_engine(eng)
        yield
        engine.set_engine(before)
        eng.stop()

    def test_undeclared_write_names_task_and_array(self):
        """UndeclaredWriteError names only the array that the failing line wrote, by its name in the function."""

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

    def test_error_describes_the_written_array(self):
        """UndeclaredWriteError names the written array, the first of two inputs, with its shape, dtype and line."""

        @engine.task(reads=["left", "right"], writes=["out"])
        def careless(left, right, out):
            left[0] = 7

        left, right, out = np.zeros((2, 3)), np.zeros(5), np.zeros((2, 3))
        careless(left, right, out)
        with pytest.raises(UndeclaredWriteError, match=r"'left', ndarray of shape \(2, 3\) and dtype float64 at .*;"):
            engine.wait(out)
        engine.submit(np.copyto, out, 1, writes=[out])
        engine.wait()

    def test_unprotected_write_is_detected(self):
        """A write to read-only bytes that the function made writable raises UndeclaredWriteError in debug mode."""
        text, out = np.frombuffer(b"12345678", np.uint8), np.zeros(1)

        @engine.task(reads=["x"], writes=["out"])
        def stubborn(x, out):
            x.flags.writeable = True
            x[0] = 7

        stubborn(text, out)
        with pytest.raises(UndeclaredWriteError, match=r"stubborn.*'x', ndarray of shape \(8,\) and dtype uint8"):
            engine.wait(out)
        engine.submit(np.copyto, out, 1, writes=[out])
        engine.wait()

    def test_undeclared_write_in_compiled_code(self):
        """If compiled code writes an undeclared argument, UndeclaredWriteError names the function and the shape."""
        a, b = np.zeros(4), np.zeros(4)
        engine.submit(operator.call, np.cumsum, b, 0, None, a)
        with pytest.raises(UndeclaredWriteError, match=r"'call'.*shape \(4,\)"):
            engine.wait()
        assert a.tolist() == [0.0] * 4

    def test_declared_writes_pass(self):
        """Arrays declared as written stay writable, also if an argument is a view of a declared array."""
        a = np.zeros(4)
        engine.submit(np.add, a[1:], 1, out=a[1:])
        engine.submit(lambda x: x.fill(3), a[:1], writes=[a])
        engine.wait(a)
        assert a.tolist() == [3.0, 1.0, 1.0, 1.0]

    def test_other_errors_are_unchanged(self):
        """A ValueError that the task itself raises is not replaced by UndeclaredWriteError."""
        a = np.zeros(4)
        engine.submit(np.add, np.zeros(3), np.zeros(2), out=a)
        with pytest.raises(ValueError, match="broadcast"):
            engine.wait(a)
        engine.submit(np.copyto, a, 1, writes=[a])
        engine.wait()
