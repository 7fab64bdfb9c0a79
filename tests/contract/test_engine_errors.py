"""The engine's contract: failures spread, are raised, stay and heal; deletes run all the same. On every driver."""

import pytest

from tests.contract.engines import Boom, boom
from weftplan import engine
from weftplan.engine import FnProperty
from weftplan.errors import EngineError


def test_failure_is_raised_with_name_and_line(deferred):
    """The wait raises the original exception; its note names the operation and the line that pushed it."""
    var = deferred.new_variable()
    deferred.push(boom, (), [var], name="the culprit")
    with pytest.raises(Boom) as caught:
        deferred.wait_for_var(var)
    assert "'the culprit'" in caught.value.__notes__[0]
    assert "test_engine_errors.py:" in caught.value.__notes__[0]
    deferred.wait_for_all()


def test_naive_raises_at_the_push():
    """On the naive engine the push itself raises, once; reading the var raises again; a write heals."""
    eng = engine.create("NaiveEngine")
    var = eng.new_variable()
    with pytest.raises(Boom):
        eng.push(boom, (), [var])
    eng.wait_for_all()
    with pytest.raises(Boom):
        eng.wait_for_var(var)
    with pytest.raises(Boom):
        eng.push(lambda: None, [var])
    eng.push(lambda: None, (), [var])
    eng.wait_for_var(var)


def test_dependants_are_skipped_and_fail_alike(deferred):
    """An operation that reads a failed var does not run; what it should have written fails with the same error."""
    a, b, c, ran = *(deferred.new_variable() for _ in range(3)), []
    deferred.push(boom, (), [a])
    deferred.push(lambda: ran.append(1), [a], [b])
    deferred.push(lambda: ran.append(2), [b], [c])
    with pytest.raises(Boom):
        deferred.wait_for_var(c)
    with pytest.raises(Boom):
        deferred.wait_for_var(a)
    assert ran == []
    assert deferred.statistics().skipped == 2
    assert deferred.statistics().failed == 1


def test_failed_stays_failed_until_rewritten(deferred):
    """Reading twice raises twice; a later write heals; one pushed before the wait does not."""
    var, ran = deferred.new_variable(), []
    deferred.push(boom, (), [var])
    deferred.push(lambda: ran.append("too early"), (), [var])
    for _ in range(2):
        with pytest.raises(Boom):
            deferred.wait_for_var(var)
    deferred.push(lambda: ran.append("heals"), (), [var])
    deferred.wait_for_var(var)
    assert ran == ["heals"]


def test_wait_for_all_raises_everything_once(deferred):
    """The first failure in push order is raised, the others are in its notes; a second wait is silent."""
    one, two = deferred.new_variable(), deferred.new_variable()

    def other():
        raise ValueError("second")

    deferred.push(boom, (), [one], name="first")
    deferred.push(other, (), [two], name="second")
    with pytest.raises(Boom) as caught:
        deferred.wait_for_all()
    assert any("ValueError: second" in note for note in caught.value.__notes__)
    deferred.wait_for_all()
    with pytest.raises(ValueError, match="second"):
        deferred.wait_for_var(two)


def test_failure_without_vars_is_raised_by_wait_for_all(deferred):
    """An operation that writes nothing cannot lose its error."""
    deferred.push(boom)
    with pytest.raises(Boom):
        deferred.wait_for_all()


def test_no_skip_runs_on_failed_vars(deferred):
    """FnProperty.NO_SKIP runs although an input has failed."""
    var, ran = deferred.new_variable(), []
    deferred.push(boom, (), [var])
    deferred.push(lambda: ran.append(1), [var], prop=FnProperty.NO_SKIP)
    with pytest.raises(Boom):
        deferred.wait_for_all()
    assert ran == [1]


def test_mxnet_error_mode(monkeypatch):
    """WEFTPLAN_ERRORS=mxnet: one raise heals every holder of the failure."""
    monkeypatch.setenv("WEFTPLAN_ERRORS", "mxnet")
    eng = engine.create("ThreadedEnginePerDevice", cpu_workers=2)
    a, b = eng.new_variable(), eng.new_variable()
    eng.push(boom, (), [a, b])
    with pytest.raises(Boom):
        eng.wait_for_var(a)
    eng.wait_for_var(a)
    eng.wait_for_var(b)
    eng.wait_for_all()
    eng.stop()


def test_the_engine_goes_on_after_failures(deferred):
    """A hundred failures, then ordinary work."""
    for _ in range(100):
        deferred.push(boom, (), [deferred.new_variable()])
    with pytest.raises(Boom):
        deferred.wait_for_all()
    var = deferred.new_variable()
    deferred.push(lambda: None, (), [var])
    deferred.wait_for_all()
    assert var.version == 1


def test_delete_runs_last_even_after_a_failure(deferred):
    """The delete function runs after all uses, failed or not; later use of the var is an error."""
    var, log = deferred.new_variable(), []
    deferred.push(boom, (), [var])
    deferred.push(lambda: log.append("skipped"), [var])
    deferred.delete_variable(var, lambda: log.append("deleted"))
    with pytest.raises(Boom):
        deferred.wait_for_all()
    assert log == ["deleted"]
    with pytest.raises(EngineError, match="has been deleted"):
        deferred.push(lambda: None, [var])
    with pytest.raises(EngineError, match="has been deleted"):
        deferred.delete_variable(var)
