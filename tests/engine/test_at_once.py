"""Small work on the calling thread: it happens only where no order can be seen, and leaves nothing when it does not."""

import threading

import pytest

from weftplan import engine


@pytest.fixture
def eng():
    """An engine with workers, idle."""
    made = engine.create("ThreadedEnginePerDevice", cpu_workers=1)
    yield made
    made.stop()


def test_it_runs_on_the_calling_thread_and_counts_as_an_operation(eng):
    """Work on idle vars runs here, and statistics count it as pushed and completed."""
    var = eng.new_variable()
    before = eng.statistics()
    threads = []
    assert eng.at_once(lambda: threads.append(threading.get_ident()), (var,))
    after = eng.statistics()
    assert threads == [threading.get_ident()]
    assert (after.pushed, after.completed, after.pending) == (before.pushed + 1, before.completed + 1, 0)


def test_it_does_not_pass_a_write_that_was_pushed_before(eng):
    """While a write of what it reads is pending, nothing runs here."""
    var, gate, ran = eng.new_variable(), threading.Event(), []
    eng.push(gate.wait, (), (var,))
    assert not eng.at_once(lambda: ran.append(1), (var,))
    gate.set()
    eng.wait_for_var(var)
    assert not ran
    assert eng.at_once(lambda: ran.append(1), (var,))


def test_a_write_in_the_middle_undoes_it(eng):
    """Work during which what it reads was written does not count: it has to be pushed."""
    var = eng.new_variable()

    def work():
        eng.push(lambda: None, (), (var,))
        eng.wait_for_var(var)

    pushed = eng.statistics().pushed
    assert not eng.at_once(work, (var,))
    assert eng.statistics().pushed == pushed + 1  # the write alone


def test_a_write_that_is_still_pending_undoes_it(eng):
    """So does one that has not ended yet."""
    var, gate = eng.new_variable(), threading.Event()
    assert not eng.at_once(lambda: eng.push(gate.wait, (), (var,)), (var,))
    gate.set()
    eng.wait_for_all()


def test_errors_leave_nothing(eng):
    """Work that raises has not happened: no failure is kept, and the var can be used."""
    var = eng.new_variable()

    def work():
        raise ValueError("no")

    assert not eng.at_once(work, (var,))
    assert eng.unobserved_failures() == []
    eng.wait_for_all()


def test_an_interrupt_comes_through_and_leaves_nothing(eng):
    """KeyboardInterrupt in the work is the caller's, and nothing is pending afterwards."""
    var = eng.new_variable()

    def work():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        eng.at_once(work, (var,))
    eng.wait_for_all()
    assert eng.at_once(lambda: None, (var,))


def test_a_wait_in_the_middle_ends(eng):
    """What interrupts the work (a signal handler, a destructor) may push and wait as anywhere else."""
    var, other = eng.new_variable(), eng.new_variable()
    seen = []

    def work():
        eng.push(lambda: seen.append(1), (var,), (other,))
        eng.wait_for_var(other)
        eng.wait_for_all()

    assert eng.at_once(work, (var,))
    assert seen == [1]


def test_it_leaves_to_the_queues_what_somebody_watches(eng):
    """With a tracer, in a bulk, or where something has failed, work is pushed as ever."""
    var = eng.new_variable()
    eng.tracer = lambda *args: None
    assert not eng.at_once(lambda: None, (var,))
    eng.tracer = None
    with eng.bulk(4):
        assert not eng.at_once(lambda: None, (var,))
    eng.push(lambda: 1 / 0, (), (eng.new_variable(),))
    with pytest.raises(ZeroDivisionError):
        eng.wait_for_all()


def test_vars_of_others_and_deleted_ones_are_left_to_push(eng):
    """The push that follows explains what is wrong with them."""
    other = engine.create("NaiveEngine")
    assert not eng.at_once(lambda: None, (other.new_variable(),))
    gone = eng.new_variable()
    eng.delete_variable(gone)
    assert not eng.at_once(lambda: None, (gone,))
    assert not other.at_once(lambda: None, (other.new_variable(),))


def test_requests_that_come_meanwhile_are_carried_out(eng):
    """Pushes of other threads while work is made at once are not left lying."""
    var, count, ran = eng.new_variable(), 300, []
    others = [eng.new_variable() for _ in range(4)]

    def pusher(own):
        for _ in range(count):
            eng.push(lambda: ran.append(1), (var,), (own,))

    threads = [threading.Thread(target=pusher, args=(own,)) for own in others]
    for thread in threads:
        thread.start()
    for _ in range(count):
        eng.at_once(lambda: None, (var,))
    for thread in threads:
        thread.join()
    eng.wait_for_all()
    assert len(ran) == 4 * count
    assert eng.statistics().pending == 0
