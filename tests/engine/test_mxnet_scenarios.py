"""Scenarios of MXNet's engine tests, and cases that MXNet 1.9.1 handles wrongly, on every engine.

The scenarios are rewritten, not copied. Other files contain the rest: versions and longer programs in
``contract/test_engine_order.py``, deleters in ``test_release.py``, a raising updater in ``contract/test_kvstore.py``,
sizes of other dtypes in ``planner/test_match_range.py``, a million pending operations in ``stress/``.
"""

import os
import random
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest

import weftplan as mx
from tests.contract.engines import DRIVERS, Boom, boom, push_failing
from weftplan import engine
from weftplan.engine import FnProperty
from weftplan.errors import DuplicateVarError, EngineError


@pytest.fixture(params=DRIVERS)
def eng(request):
    """The current engine of the test, one of each kind."""
    eng = DRIVERS[request.param]()
    with engine.using(eng):
        yield eng
    eng.stop()


class TestScenarios:
    """Scenarios of MXNet's own engine tests."""

    def test_start_and_stop(self, eng):
        """Ten rounds of start, work and stop lose no operation; start and stop may be called twice."""
        var, count = eng.new_variable(), [0]
        for done in range(10):
            eng.start()
            eng.start()
            for _ in range(20):
                eng.push(lambda: count.__setitem__(0, count[0] + 1), (), [var])
            if eng.kind == "Simulator":
                eng.wait_for_all()  # it has no threads: operations run in waits
            eng.stop()
            eng.stop()
            assert count[0] == var.version == 20 * (done + 1)

    @pytest.mark.parametrize("wait", [False, True])
    @pytest.mark.parametrize("reads", [2, 7, 19])
    def test_sums_of_random_operands(self, eng, reads, wait):
        """300 operations, each writing the sum of ``reads`` random cells to a cell, give the values of a loop."""
        rng = random.Random(reads)
        want, got = list(range(50)), list(range(50))
        cells = [eng.new_variable() for _ in range(50)]
        for _ in range(300):
            sources, target = [rng.randrange(50) for _ in range(reads)], rng.randrange(50)
            want[target] = sum(want[s] for s in sources) % 9973

            def add(sources=sources, target=target):
                got[target] = sum(got[s] for s in sources) % 9973

            eng.push(add, [cells[s] for s in sources if s != target], [cells[target]])
            if wait and rng.random() < 0.05:
                eng.wait_for_var(cells[target])
                assert got[target] == want[target]
        eng.wait_for_all()
        assert got == want

    def test_persistent_operators_in_a_chain(self, eng):
        """Ten stored operators in a chain give the values of program order in three rounds.

        Pushes before delete_operator still run; later pushes raise EngineError.
        """
        cells, values, deleted = [eng.new_variable() for _ in range(11)], [1] + [0] * 10, []

        def step(i):
            return lambda: values.__setitem__(i + 1, values[i] + i)

        operators = [eng.new_operator(step(i), [cells[i]], [cells[i + 1]], name=f"step {i}") for i in range(10)]
        for start in (1, 100, 7):
            eng.push(lambda start=start: values.__setitem__(0, start), (), [cells[0]])
            for operator in operators:
                eng.push(operator)
            eng.wait_for_var(cells[5])
            assert values[5] == start + 10
            eng.wait_for_all()
            assert values == [start + sum(range(i)) for i in range(11)]
        assert [cell.version for cell in cells] == [3] * 11
        for operator in operators:
            eng.push(operator)
            eng.delete_operator(operator)
        for i, cell in enumerate(cells):
            eng.delete_variable(cell, lambda i=i: deleted.append((i, values[i])))
        eng.wait_for_all()
        assert sorted(deleted) == [(i, 7 + sum(range(i))) for i in range(11)]
        for operator in operators:
            with pytest.raises(EngineError, match="was deleted"):
                eng.push(operator)

    def test_stored_operator_runs_once_per_push(self, eng):
        """A stored operator that only reads runs once per push and does not change its var's version."""
        var, lock, count = eng.new_variable(), threading.Lock(), [0]

        def add():
            with lock:
                count[0] += 1

        operator = eng.new_operator(add, [var], (), prop=FnProperty.CPU_PRIORITIZED)
        for _ in range(100):
            eng.push(operator)
        eng.wait_for_all()
        assert (count[0], var.version) == (100, 0)


class TestMisbehaviour:
    """Cases that MXNet 1.9.1 handles wrongly: what it does, and the right outcome."""

    @pytest.mark.parametrize("twice", ["read and written", "written twice"])
    def test_duplicate_var_is_refused(self, eng, twice):
        """A push with a duplicate var raises DuplicateVarError and changes nothing; in MXNet the next wait hangs."""
        a, b = mx.nd.ones(3), mx.nd.ones(3)
        reads, writes = ([a.var], [a.var]) if twice == "read and written" else ([b.var], [a.var, a.var])
        with pytest.raises(DuplicateVarError):
            eng.push(boom, reads, writes)
        eng.wait_for_all()
        a += b
        assert a.asnumpy().tolist() == [2, 2, 2]

    def test_raising_callback_fails(self, eng):
        """A wait and a read raise an operation's error until a later write clears it; in MXNet both succeed."""
        a = mx.nd.zeros(2)
        push_failing(eng, boom, (), [a.var])
        with pytest.raises(Boom):
            a.wait_to_read()
        with pytest.raises(Boom):
            a.asnumpy()
        a[:] = 5
        assert a.asnumpy().tolist() == [5, 5]
        assert eng.statistics().failed == 1

    def test_failed_result_raises_every_time(self, eng):
        """Each read of a failed result raises its error; in MXNet the second read returns a buffer without it."""
        a = mx.nd.zeros(2)
        push_failing(eng, boom, (), [a.var])
        for _ in range(3):
            with pytest.raises(Boom):
                a.asnumpy()

    def test_dependants_keep_their_failure(self, eng):
        """Dependants keep their failure, even after the source was overwritten; in MXNet one raise clears them all."""
        a = mx.nd.zeros(2)
        b, c = mx.nd.zeros(2), mx.nd.zeros(2)
        push_failing(eng, boom, (), [a.var])
        push_failing(eng, lambda: None, [a.var], [b.var])
        push_failing(eng, lambda: None, [b.var], [c.var])
        with pytest.raises(Boom):
            a.asnumpy()
        a[:] = 1
        assert a.asnumpy().tolist() == [1, 1]
        for array in (b, c, b, c):
            with pytest.raises(Boom):
                array.asnumpy()
        eng.wait_for_all()  # the failure has been raised

    def test_two_failures_are_both_reported(self, eng):
        """wait_for_all raises the first of two failures with a note about the second, and both results raise.

        In MXNet it drops the second failure, and both results can be read.
        """
        if eng.kind == "NaiveEngine":
            pytest.skip("each push raises its own")
        a, b = mx.nd.zeros(2), mx.nd.zeros(2)

        def other():
            raise ValueError("the second")

        eng.push(boom, (), [a.var])
        eng.push(other, (), [b.var])
        with pytest.raises(Boom) as caught:
            eng.wait_for_all()
        assert any("ValueError: the second" in note for note in caught.value.__notes__)
        with pytest.raises(Boom):
            a.asnumpy()
        with pytest.raises(ValueError, match="the second"):
            b.asnumpy()

    def test_unrelated_bulk_member_succeeds(self, eng):
        """In a bulk with a failing operation, ``a += 1`` is done, and only the failed array raises.

        In MXNet the addition is lost, and one of two reads succeeds.
        """
        a, b = mx.nd.zeros(2), mx.nd.zeros(2)
        a.wait_to_read()
        b.wait_to_read()
        with mx.engine.bulk(15):
            push_failing(eng, boom, (), [b.var])
            a += 1
        assert a.asnumpy().tolist() == [1, 1]
        with pytest.raises(Boom):
            b.asnumpy()


@pytest.mark.parametrize("kind", ["NaiveEngine", "ThreadedEngine", "ThreadedEnginePerDevice"])
def test_unobserved_failure_is_reported_at_exit(kind):
    """Exit prints an unraised failure with its operation and line; on the naive engine the push raises.

    In MXNet the process exits silently with status 0.
    """
    text = """
        import sys, time
        from weftplan import engine

        eng = engine.get()
        try:
            eng.push(lambda: 1 / 0, (), [eng.new_variable()], name="lost division")
        except ZeroDivisionError:
            sys.exit("raised at the push")
        while eng.statistics().completed < 1:
            time.sleep(0.001)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "MXNET_ENGINE_TYPE": kind},
    )
    if kind == "NaiveEngine":
        assert (done.returncode, done.stderr) == (1, "raised at the push\n")
    else:
        assert done.returncode == 0
        assert "nobody waited for it: ZeroDivisionError" in done.stderr
        assert "'lost division', pushed at <string>:7" in done.stderr


def test_executor_text_shows_planned_bytes():
    """A plan's summary shows its bytes, and ``debug_str`` whole megabytes as in MXNet.

    In MXNet no log line shows the total of a memory plan.
    """
    net = mx.sym.FullyConnected(mx.sym.exp(mx.sym.Variable("x")), num_hidden=1024, name="fc")
    executor = net.simple_bind(mx.cpu(), x=(1024, 1024), grad_req="null")
    plan = executor.memory_plan
    assert executor.allocated_bytes == plan.peak >= 4 << 20
    assert f"Total {plan.peak >> 20} MB allocated" in executor.debug_str()
    assert f"{plan.peak:,}" in plan.summary()
    executor.forward(x=np.zeros((1024, 1024), np.float32))
    assert executor.outputs[0].shape == (1024, 1024)
