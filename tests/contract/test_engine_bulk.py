"""Engine contract: bulks, which push several operations as one, on every engine."""

import threading

import pytest

from tests.contract.engines import Boom, boom
from weftplan.device.context import cpu
from weftplan.engine import FnProperty
from weftplan.errors import EngineError


def test_bulk_runs_everything_in_order(eng):
    """Pushes inside a bulk run in order, and the end of the block restores the bulk size."""
    var, log = eng.new_variable(), []
    with eng.bulk(10):
        for i in range(25):
            eng.push(lambda i=i: log.append(i), (), [var])
    eng.wait_for_all()
    assert log == list(range(25))
    assert eng.set_bulk_size(0) == 0
    assert not eng._any_failure  # otherwise every later operation would check for failures


def test_bulk_member_fails_alone(deferred):
    """If a member fails, its dependants are skipped and all other members run."""
    a, b, c, log = *(deferred.new_variable() for _ in range(3)), []
    with deferred.bulk(15):
        deferred.push(boom, (), [a], name="bad member")
        deferred.push(lambda: log.append("unrelated"), (), [b])
        deferred.push(lambda: log.append("dependant"), [a], [c])
    with pytest.raises(Boom) as caught:
        deferred.wait_for_var(c)
    assert "'bad member'" in caught.value.__notes__[0]
    deferred.wait_for_var(b)
    with pytest.raises(Boom):
        deferred.wait_for_var(a)
    assert log == ["unrelated"]


def test_waiting_flushes_the_bulk(eng):
    """A wait inside a bulk pushes the collected members and returns after them."""
    var, log = eng.new_variable(), []
    with eng.bulk(100):
        eng.push(lambda: log.append(1), (), [var])
        eng.wait_for_var(var)
        assert log == [1]
    with pytest.raises(EngineError, match="bulk size"):
        eng.set_bulk_size(-1)


def test_events_that_flush_a_bulk(deferred):
    """A full bulk, a push with options or another context, an asynchronous push and a delete push the members.

    A new bulk size pushes them if it is at most their number.
    """
    var = deferred.new_variable()

    def member(**options):
        deferred.push(lambda: None, (), [var], **options)

    def pushed():
        return deferred.statistics().pushed

    assert deferred.set_bulk_size(3) == 0
    member()
    member()
    assert pushed() == 0
    member()
    assert pushed() == 1  # full
    member()
    member(ctx=cpu(0))  # the default
    assert pushed() == 1
    member(ctx=cpu(1))
    assert pushed() == 2  # both on cpu(0)
    member(priority=1)
    assert pushed() == 4  # the member on cpu(1), then the push itself
    member()
    member(prop=FnProperty.CPU_PRIORITIZED)
    assert pushed() == 6
    member()
    deferred.push_async(lambda done: done(), (), [var])
    assert pushed() == 8
    member()
    deferred.delete_variable(deferred.new_variable())
    assert pushed() == 10
    member()
    member()
    assert deferred.set_bulk_size(4) == 3
    assert pushed() == 10
    assert deferred.set_bulk_size(2) == 4
    assert pushed() == 11
    member()
    assert deferred.set_bulk_size(0) == 2
    assert pushed() == 12
    member()
    assert pushed() == 13  # off
    deferred.wait_for_all()
    assert var.version == 16


def test_stored_operator_joins_a_bulk(eng):
    """A stored operator pushed inside a bulk runs in order with the other members."""
    var, log = eng.new_variable(), []
    operator = eng.new_operator(lambda: log.append("stored"), (), [var])
    with eng.bulk(10):
        eng.push(lambda: log.append("first"), (), [var])
        eng.push(operator)
        eng.push(lambda: log.append("last"), (), [var])
    eng.wait_for_all()
    assert log == ["first", "stored", "last"]


def test_a_bulk_belongs_to_its_thread(deferred):
    """Other threads do not wait for members that a thread has collected, and their own pushes are not collected."""
    if deferred.kind == "Simulator":
        pytest.skip("the simulator belongs to one thread")
    var, log, seen = deferred.new_variable(), [], []

    def other():
        deferred.wait_for_var(var)
        deferred.wait_for_all()
        seen.append((var.version, list(log), deferred.set_bulk_size(0)))
        deferred.push(lambda: log.append("other"))
        deferred.wait_for_all()

    with deferred.bulk(10):
        deferred.push(lambda: log.append("mine"), (), [var])
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(60)
        assert seen == [(0, [], 0)]
        assert log == ["other"]
    deferred.wait_for_var(var)
    assert log == ["other", "mine"]


def test_a_bulk_is_one_operation(deferred):
    """A bulk is one operation that reads and writes what its members do; no other operation runs between them."""
    a, b, c, log = *(deferred.new_variable() for _ in range(3)), []
    with deferred.bulk(10):
        deferred.push(lambda: log.append(1), [a], [b], name="one")
        deferred.push(lambda: log.append(2), [b, a], [c], name="two")
    deferred.push(lambda: log.append(3), (), [a], name="behind")
    deferred.push(lambda: log.append(4), [c, b], (), name="reader")
    deferred.wait_for_all()
    assert log[:2] == [1, 2]
    assert (a.version, b.version, c.version) == (1, 1, 1)
    assert deferred.statistics().pushed == 3


def test_tracer_disables_bulks(deferred):
    """With a tracer, pushes are not collected; members collected earlier come first, as one traced operation."""
    var, names, log = deferred.new_variable(), [], []
    with deferred.bulk(10):
        deferred.push(lambda: log.append(1), (), [var], name="before")
        deferred.push(lambda: log.append(2), (), [var], name="before, too")
        deferred.tracer = lambda name, *rest: names.append(name)
        deferred.push(lambda: log.append(3), (), [var], name="one")
        deferred.push(lambda: log.append(4), (), [var], name="two")
    deferred.wait_for_all()
    deferred.stop()  # a wait may return before the tracer is called
    assert log == [1, 2, 3, 4]
    assert names == ["ImperativeBulk", "one", "two"]


def test_members_after_a_failed_member(deferred):
    """A member that writes or reads a failed output of its bulk is skipped.

    A bulk pushed after the wait runs and clears the failure.
    """
    a, b, log = deferred.new_variable(), deferred.new_variable(), []
    with deferred.bulk(10):
        deferred.push(boom, (), [a])
        deferred.push(lambda: log.append("again"), (), [a])
        deferred.push(lambda: log.append("reads"), [a], [b])
    with pytest.raises(Boom):
        deferred.wait_for_var(b)
    assert log == []
    with deferred.bulk(10):
        deferred.push(lambda: log.append("heals a"), (), [a])
        deferred.push(lambda: log.append("heals b"), [a], [b])
    deferred.wait_for_var(b)
    deferred.wait_for_var(a)
    assert log == ["heals a", "heals b"]
    assert (a.version, b.version) == (3, 2)
    assert (deferred.statistics().failed, deferred.statistics().skipped) == (1, 0)


def test_a_failed_operation_before_a_bulk(deferred):
    """Members that depend on an earlier failed operation are skipped, and the other members run."""
    a, b, c, log = *(deferred.new_variable() for _ in range(3)), []
    deferred.push(boom, (), [a])
    with deferred.bulk(10):
        deferred.push(lambda: log.append("needs it"), [a], [b])
        deferred.push(lambda: log.append("does not"), (), [c])
    deferred.wait_for_var(c)
    with pytest.raises(Boom):
        deferred.wait_for_var(b)
    assert log == ["does not"]


def test_size_is_restored_after_an_error(eng):
    """If the block raises, its members are pushed, and the old bulk size is restored."""
    var, log = eng.new_variable(), []
    eng.set_bulk_size(7)

    def leave():
        with eng.bulk(100):
            eng.push(lambda: log.append(1), (), [var])
            raise KeyError

    with pytest.raises(KeyError):
        leave()
    assert eng.set_bulk_size(0) == 7
    eng.wait_for_all()
    assert log == [1]
    for bad in (True, 1.5, "3", None):
        with pytest.raises(EngineError, match="bulk size must be an integer >= 0"):
            eng.set_bulk_size(bad)


def test_a_future_flushes_the_bulk(deferred):
    """A future of a var that a collected member writes completes after that member."""
    if deferred.kind == "Simulator":
        pytest.skip("nobody would run the simulator while the future is waited for")
    var = deferred.new_variable()
    with deferred.bulk(10):
        deferred.push(lambda: None, (), [var])
        assert deferred.future(var).result(60).version == 1


def test_tracer_change_while_a_bulk_begins(deferred):
    """A tracer that is set while a bulk begins does not let pushes overtake the collected members.

    (1) A thread sets the tracer and sees no bulk. (2) This thread begins a bulk. (3) The first thread continues as if
    there were none.
    """
    var, log, looked, go = deferred.new_variable(), [], threading.Event(), threading.Event()

    class Collecting(list):
        def __bool__(self):
            is_collecting = len(self) > 0
            if threading.current_thread() is other_thread:
                looked.set()
                go.wait(0.2)
            return is_collecting

    deferred._bulking = Collecting()
    other_thread = threading.Thread(target=lambda: setattr(deferred, "tracer", None))
    other_thread.start()
    assert looked.wait(60)
    with deferred.bulk(10):
        deferred.push(lambda: log.append(1), (), [var])
        go.set()
        other_thread.join(60)
        deferred.push(lambda: log.append(2), (), [var])
    deferred.wait_for_var(var)
    assert log == [1, 2]
