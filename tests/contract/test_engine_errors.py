"""Engine contract: failures spread, are raised, persist and are cleared; deletes always run. On every engine."""

import gc

import pytest

from tests.contract.engines import Boom, boom, push_failing
from weftplan import engine
from weftplan.engine import FnProperty
from weftplan.errors import EngineError


def test_failure_is_raised_with_name_and_line(deferred):
    """A wait raises the original exception with a note that has the operation's name and the line of its push."""
    var = deferred.new_variable()
    deferred.push(boom, (), [var], name="the culprit")
    with pytest.raises(Boom) as caught:
        deferred.wait_for_var(var)
    assert "'the culprit'" in caught.value.__notes__[0]
    assert "test_engine_errors.py:" in caught.value.__notes__[0]
    deferred.wait_for_all()


def test_naive_raises_at_the_push():
    """On the naive engine the push raises the failure, and so do later reads until a write clears it."""
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
    """An operation that reads a failed var does not run, and its outputs fail with the same error."""
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
    """Each wait for a failed var raises the failure until an operation pushed after the first wait writes the var."""
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
    """wait_for_all raises the first failure in push order, with the others in its notes, only once."""
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


def test_wait_for_all_raises_failure_without_vars(deferred):
    """wait_for_all raises the error of an operation without outputs."""
    deferred.push(boom)
    with pytest.raises(Boom):
        deferred.wait_for_all()


def test_no_skip_runs_on_failed_vars(deferred):
    """An operation with FnProperty.NO_SKIP runs although an input has failed."""
    var, ran = deferred.new_variable(), []
    deferred.push(boom, (), [var])
    deferred.push(lambda: ran.append(1), [var], prop=FnProperty.NO_SKIP)
    with pytest.raises(Boom):
        deferred.wait_for_all()
    assert ran == [1]


def test_an_order_carries_no_failure(deferred):
    """If the writer of an order fails or is skipped, the readers of the order still run, after it."""
    order, var, after, ran = deferred.new_order("order"), deferred.new_variable(), deferred.new_variable(), []
    deferred.push(boom, (), [var])
    deferred.push(lambda: ran.append("skipped"), [var], [order])
    deferred.push(lambda: ran.append("runs"), [order], [after])
    with pytest.raises(Boom):
        deferred.wait_for_all()
    assert ran == ["runs"]
    assert (order.version, order.failure, after.failure) == (1, None, None)
    deferred.wait_for_var(after)


def test_engine_continues_after_failures(deferred):
    """After a hundred failures the engine runs ordinary operations."""
    for _ in range(100):
        deferred.push(boom, (), [deferred.new_variable()])
    with pytest.raises(Boom):
        deferred.wait_for_all()
    var = deferred.new_variable()
    deferred.push(lambda: None, (), [var])
    deferred.wait_for_all()
    assert var.version == 1


def test_delete_runs_last_even_after_a_failure(deferred):
    """A delete function runs after failed and skipped uses of the var; later uses raise EngineError."""
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


def test_delete_property_keeps_the_failure(deferred):
    """An operation with the property DELETE_VAR keeps the failure of its var; a later write clears it."""
    var = deferred.new_variable()
    deferred.push(boom, (), [var])
    with pytest.raises(Boom):
        deferred.wait_for_var(var)
    deferred.push(lambda: None, (), [var], prop=FnProperty.DELETE_VAR)
    with pytest.raises(Boom):
        deferred.wait_for_var(var)
    deferred.push(lambda: None, (), [var])
    deferred.wait_for_var(var)


def test_versions_count_failed_and_skipped_writes(eng):
    """A failed, a skipped and a successful write each increase the version by one, on every engine."""
    a, b = eng.new_variable(), eng.new_variable()
    push_failing(eng, boom, (), [a])
    push_failing(eng, lambda: None, [a], [b])
    assert_raises(eng, b)
    eng.push(lambda: None, (), [a])
    eng.push(lambda: None, [a], [b])
    eng.wait_for_all()
    assert (a.version, b.version) == (2, 2)


def assert_raises(eng, var):
    """Check that a wait for ``var`` raises Boom."""
    with pytest.raises(Boom):
        eng.wait_for_var(var)


def test_readers_do_not_spread_a_failure(eng):
    """An operation that reads a failed and a good var is skipped; its output fails, the good var does not."""
    bad, good, out = (eng.new_variable() for _ in range(3))
    push_failing(eng, boom, (), [bad])
    push_failing(eng, boom, [good, bad], [out])
    eng.wait_for_var(good)
    assert_raises(eng, out)
    assert_raises(eng, bad)
    eng.push(lambda: None, [good], [out])
    eng.wait_for_var(out)


def test_first_listed_failure_is_taken(deferred):
    """An operation that reads two failed vars gets the failure of the var listed first."""
    one, two, out = (deferred.new_variable() for _ in range(3))

    def other():
        raise ValueError("two")

    deferred.push(other, (), [two])
    deferred.push(boom, (), [one])
    deferred.push(lambda: None, [one, two], [out])
    with pytest.raises(Boom):
        deferred.wait_for_var(out)
    with pytest.raises(ValueError, match="two"):
        deferred.wait_for_all()


def test_a_stored_operator_is_skipped_and_runs_again(deferred):
    """A stored operator is skipped while its input has failed, and runs after the input was written again."""
    a, b, runs = deferred.new_variable(), deferred.new_variable(), []
    operator = deferred.new_operator(lambda: runs.append(1), [a], [b], name="stored")
    deferred.push(boom, (), [a])
    deferred.push(operator)
    with pytest.raises(Boom):
        deferred.wait_for_var(b)
    assert runs == []
    deferred.push(lambda: None, (), [a])
    deferred.push(operator)
    deferred.wait_for_var(b)
    assert runs == [1]


def test_a_failing_operator_fails_each_time(deferred):
    """Each run of a failing stored operator counts as a failure of its own."""
    var = deferred.new_variable()
    operator = deferred.new_operator(boom, (), [var], name="bad")
    for count in (1, 2):
        deferred.push(operator)
        with pytest.raises(Boom) as caught:
            deferred.wait_for_var(var)
        assert "'bad'" in caught.value.__notes__[0]
        assert deferred.statistics().failed == count


def test_no_skip_spreads_no_failure(eng):
    """The output of a NO_SKIP operation has no failure, and a NO_SKIP write clears an unraised failure."""
    bad, out, ran = eng.new_variable(), eng.new_variable(), []
    push_failing(eng, boom, (), [bad])
    eng.push(lambda: ran.append("reads"), [bad], [out], prop=FnProperty.NO_SKIP)
    eng.wait_for_var(out)
    eng.push(lambda: ran.append("writes"), (), [bad], prop=FnProperty.NO_SKIP)
    eng.wait_for_var(bad)
    assert ran == ["reads", "writes"]
    if eng.kind != "NaiveEngine":
        with pytest.raises(Boom):
            eng.wait_for_all()  # the failure was cleared by a write, but not raised


def test_raising_delete_function(deferred):
    """wait_for_all raises the error of a delete function, whose var no longer exists."""
    var = deferred.new_variable()
    deferred.delete_variable(var, boom)
    with pytest.raises(Boom) as caught:
        deferred.wait_for_all()
    assert "'DeleteVariable'" in caught.value.__notes__[0]


def test_waits_that_raise_in_push_order(deferred):
    """Of thirty failures wait_for_all raises the first pushed; its notes list the others once each, in push order."""
    for i in range(30):

        def fail(i=i):
            raise KeyError(i)

        deferred.push(fail, (), [deferred.new_variable()])
    with pytest.raises(KeyError) as caught:
        deferred.wait_for_all()
    assert caught.value.args == (0,)
    told = [note for note in caught.value.__notes__ if note.startswith("another operation failed: ")]
    assert [int(note.split("KeyError: ")[1].split()[0]) for note in told] == list(range(1, 30))


@pytest.mark.parametrize("how", ["healed", "dropped", "deleted", "no var"])
def test_fast_path_returns_after_failures(deferred, how):
    """After a failed var is overwritten, dropped or deleted, operations use the fast path again."""
    var, second = deferred.new_variable(), deferred.new_variable()
    deferred.push(boom, (), [] if how == "no var" else [var])
    with pytest.raises(Boom):
        deferred.wait_for_all()
    assert deferred._any_failure == (how != "no var")
    if how == "deleted":
        deferred.delete_variable(var)
    elif how == "healed":
        deferred.push(lambda: None, (), [var])
    del var
    gc.collect()  # the error's traceback may hold the operation, which holds the var
    for _ in range(2):
        deferred.push(lambda: None, (), [second])
        deferred.wait_for_all()
    assert (deferred._any_failure, deferred._careful) == (False, False)
    deferred.push(boom, (), [second])
    deferred.push(lambda: None, [second], [third := deferred.new_variable()])
    with pytest.raises(Boom):
        deferred.wait_for_var(third)
