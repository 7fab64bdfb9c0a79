"""Small work on the calling thread: it happens only where no order can be seen, and leaves nothing when it does not."""

import threading

import pytest

from weftplan import engine
from weftplan.errors import EngineError


def test_it_runs_on_the_calling_thread_and_counts_as_an_operation(eng):
    """Work on idle vars runs here, and statistics count it as pushed and completed."""
    var = eng.new_variable()
    before = eng.statistics()
    threads = []
    assert eng.at_once((var,), lambda *args: threads.append(threading.get_ident()) or args, 1, 2) == (1, 2)
    after = eng.statistics()
    assert threads == [threading.get_ident()]
    assert (after.pushed, after.completed, after.pending) == (before.pushed + 1, before.completed + 1, 0)


def test_it_does_not_pass_a_write_that_was_pushed_before(eng):
    """While a write of what it reads is pending, nothing runs here."""
    var, gate, ran = eng.new_variable(), threading.Event(), []
    eng.push(gate.wait, (), (var,))
    assert not eng.at_once((var,), lambda: ran.append(1) or True)
    gate.set()
    eng.wait_for_var(var)
    assert not ran
    assert eng.at_once((var,), lambda: ran.append(1) or True)


def test_a_write_in_the_middle_undoes_it(eng):
    """Work during which what it reads was written does not count: it has to be pushed."""
    var = eng.new_variable()

    def work():
        eng.push(lambda: None, (), (var,))
        eng.wait_for_var(var)
        return True

    pushed = eng.statistics().pushed
    assert not eng.at_once((var,), work)
    assert eng.statistics().pushed == pushed + 1  # the write alone


def test_a_write_that_is_still_pending_undoes_it(eng):
    """So does one that has not ended yet."""
    var, gate = eng.new_variable(), threading.Event()
    assert not eng.at_once((var,), lambda: eng.push(gate.wait, (), (var,)) or True)
    gate.set()
    eng.wait_for_all()


def test_errors_leave_nothing(eng):
    """Work that raises has not happened: no failure is kept, and the var can be used."""
    var = eng.new_variable()

    def work():
        raise ValueError("no")

    assert not eng.at_once((var,), work)
    assert eng.unobserved_failures() == []
    eng.wait_for_all()


def test_an_interrupt_comes_through_and_leaves_nothing(eng):
    """KeyboardInterrupt in the work is the caller's, and nothing is pending afterwards."""
    var = eng.new_variable()

    def work():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        eng.at_once((var,), work)
    eng.wait_for_all()
    assert eng.at_once((var,), lambda: True)


def test_a_wait_in_the_middle_ends(eng):
    """What interrupts the work (a signal handler, a destructor) may push and wait as anywhere else."""
    var, other = eng.new_variable(), eng.new_variable()
    seen = []

    def work():
        eng.push(lambda: seen.append(1), (var,), (other,))
        eng.wait_for_var(other)
        eng.wait_for_all()
        return True

    assert eng.at_once((var,), work)
    assert seen == [1]


def test_it_leaves_to_the_queues_what_somebody_watches(eng):
    """With a tracer, in a bulk, or where something has failed, work is pushed as ever."""
    var = eng.new_variable()
    eng.tracer = lambda *args: None
    assert not eng.at_once((var,), lambda: True)
    eng.tracer = None
    with eng.bulk(4):
        assert not eng.at_once((var,), lambda: True)
    eng.push(lambda: 1 / 0, (), (eng.new_variable(),))
    with pytest.raises(ZeroDivisionError):
        eng.wait_for_all()


def test_vars_of_others_and_deleted_ones_are_left_to_push(eng):
    """The push that follows explains what is wrong with them."""
    other = engine.create("NaiveEngine")
    assert not eng.at_once((other.new_variable(),), lambda: True)
    gone = eng.new_variable()
    eng.delete_variable(gone)
    assert not eng.at_once((gone,), lambda: True)
    assert not other.at_once((other.new_variable(),), lambda: True)


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
        eng.at_once((var,), lambda: True)
    for thread in threads:
        thread.join()
    eng.wait_for_all()
    assert len(ran) == 4 * count
    assert eng.statistics().pending == 0


def test_writing_runs_here_and_counts_as_an_operation(eng):
    """Work that writes runs on the calling thread where all vars are idle; versions and statistics say so."""
    source, target = eng.new_variable(), eng.new_variable()
    before, threads = eng.statistics(), []
    assert eng.write_at_once(lambda: threads.append(threading.get_ident()), (source,), (target,))
    after = eng.statistics()
    assert threads == [threading.get_ident()]
    assert (after.pushed, after.completed, after.pending) == (before.pushed + 1, before.completed + 1, 0)
    assert (source.version, target.version, target.state) == (0, 1, "IDLE")


@pytest.mark.parametrize("role", ["reads what is read", "reads what is written", "writes what is read", "writes"])
def test_writing_passes_nothing_that_uses_its_vars(eng, role):
    """What is written must have no reader and no writer, what is read no writer; two readers are no conflict."""
    source, target = eng.new_variable(), eng.new_variable()
    gate, ran = threading.Event(), []
    var = target if role.endswith(("what is written", "writes")) else source
    reads, writes = ((var,), ()) if role.startswith("reads") else ((), (var,))
    eng.push(gate.wait, reads, writes)
    runs = role == "reads what is read"
    assert eng.write_at_once(lambda: ran.append(1), (source,), (target,)) == runs
    gate.set()
    eng.wait_for_all()
    assert ran == [1] * runs
    assert eng.write_at_once(lambda: ran.append(1), (source,), (target,))


def test_nobody_reads_in_the_middle_of_a_write(eng):
    """A read that is pushed during the work sees all of it: other threads wait for the end of the step."""
    target, seen, values = eng.new_variable(), [], [0, 0]
    begun, pushed = threading.Event(), threading.Event()

    def reader():
        begun.wait()
        eng.push(lambda: seen.append(tuple(values)), (target,), ())
        pushed.set()

    def work():
        values[0] = 1
        begun.set()
        assert pushed.wait(60)
        values[1] = 1

    thread = threading.Thread(target=reader)
    thread.start()
    assert eng.write_at_once(work, (), (target,))
    thread.join()
    eng.wait_for_all()
    assert seen == [(1, 1)]


def test_writing_that_raises_leaves_the_vars_idle(eng):
    """An error says that the work is to be pushed. Nothing stays pending."""
    target = eng.new_variable()

    def work():
        raise ValueError

    assert not eng.write_at_once(work, (), (target,))
    assert target.version == 0
    eng.push(lambda: None, (), (target,))
    eng.wait_for_all()
    assert target.version == 1


def test_an_interrupted_write_is_made_again(eng):
    """Ctrl-C in the middle leaves half of it written; an operation writes all of it, and the interrupt goes on."""
    source, target = eng.new_variable(), eng.new_variable()
    values, interrupts = [0, 0], [KeyboardInterrupt()]

    def work():
        values[0] = 1
        if interrupts:
            raise interrupts.pop()
        values[1] = 1

    with pytest.raises(KeyboardInterrupt):
        eng.write_at_once(work, (source,), (target,))
    eng.wait_for_all()
    assert values == [1, 1]
    assert (source.version, target.version, target.state) == (0, 1, "IDLE")


def test_what_interrupts_a_write_may_push_but_not_wait(eng):
    """As in the middle of any change of the engine's state: a wait would be for itself."""
    target, other, seen = eng.new_variable(), eng.new_variable(), []

    def work():
        eng.push(lambda: seen.append(1), (), (other,))
        with pytest.raises(EngineError, match="in the middle of a change"):
            eng.wait_for_var(other)

    assert eng.write_at_once(work, (), (target,))
    eng.wait_for_all()
    assert seen == [1]


def test_writing_is_left_to_the_queues_where_somebody_watches(eng):
    """With a tracer, in a bulk, on an engine without workers, and for vars of others."""
    var = eng.new_variable()
    eng.tracer = lambda *args: None
    assert not eng.write_at_once(lambda: None, (), (var,))
    eng.tracer = None
    with eng.bulk(4):
        assert not eng.write_at_once(lambda: None, (), (var,))
    other = engine.create("NaiveEngine")
    assert not eng.write_at_once(lambda: None, (), (other.new_variable(),))
    assert not other.write_at_once(lambda: None, (), (other.new_variable(),))
    gone = eng.new_variable()
    eng.delete_variable(gone)
    assert not eng.write_at_once(lambda: None, (gone,), (var,))


def begun(eng, reads=(), writes=()):
    """What ends an operation of this thread, or None where it is to be pushed."""
    return eng.begin(lambda on_complete: None, tuple(reads), tuple(writes), "begun")


@pytest.mark.parametrize("count", [1, 12])
def test_an_operation_begins_on_the_calling_thread(eng, count):
    """As if it had been pushed: what comes later waits until it is told to end, and its failure is raised there."""
    reads, writes, order = [eng.new_variable() for _ in range(2)], [eng.new_variable() for _ in range(count)], []
    before = eng.statistics()
    end = begun(eng, reads, writes)
    assert eng.statistics().pushed == before.pushed + 1
    assert eng.statistics().pending == 1
    eng.push(lambda: order.append("beside"), (reads[0],), ())
    eng.push(lambda: order.append("behind"), (), (reads[1],))
    for var in writes:
        eng.push(lambda: order.append("behind"), (var,), ())
    assert not eng.wait_until_written(writes[0], timeout=0.01)
    order.append("ended")
    end()
    eng.wait_for_all()
    assert sorted(order[: order.index("ended")]) in ([], ["beside"])
    assert order.count("behind") == 1 + count
    assert [var.version for var in (*reads, *writes)] == [0, 1] + [1] * count

    begun(eng, reads, writes)(ValueError("lost"))
    for var in writes:
        with pytest.raises(ValueError, match="lost"):
            eng.wait_for_var(var)
    assert begun(eng, (), [eng.new_variable()]) is None  # as long as something has failed


def test_an_operation_begins_only_where_nobody_uses_its_vars(eng):
    """One that is written, or read where it writes, a tracer, a bulk, an engine without workers: it is to be pushed."""
    gate, read, written, idle = threading.Event(), eng.new_variable(), eng.new_variable(), eng.new_variable()
    eng.push(gate.wait, (read,), (written,))
    assert begun(eng, (written,), (idle,)) is None
    assert begun(eng, (), (idle, read)) is None
    assert begun(eng, (), (idle, written)) is None
    assert (idle.write, idle.readers, read.readers) == (None, 0, 1)
    end = begun(eng, (read,), (idle,))
    assert read.readers == 2
    assert begun(eng, (idle,), ()) is None
    end()
    gate.set()
    eng.wait_for_all()
    eng.tracer = lambda *args: None
    assert begun(eng, (), (idle,)) is None
    eng.tracer = None
    with eng.bulk(4):
        assert begun(eng, (), (idle,)) is None
    other = engine.create("NaiveEngine")
    assert begun(other, (), (other.new_variable(),)) is None
    assert begun(eng, (), (other.new_variable(),)) is None


def test_the_end_of_what_has_begun_is_made_at_once(eng):
    """Where nobody waits for it, whether or not others are pending: all its vars are idle then, by no request."""
    gate, busy = threading.Event(), eng.new_variable()
    reads, writes = ([eng.new_variable() for _ in range(3)] for _ in range(2))
    for round in range(2):
        end = begun(eng, reads, writes)
        apply, eng._region.apply = eng._region.apply, None
        end()
        eng._region.apply = apply
        assert [var.version for var in (*reads, *writes)] == [0] * 3 + [round + 1] * 3
        assert all(var.write is None and not var.readers for var in (*reads, *writes))
        assert eng.statistics().pending == round
        if not round:
            eng.push(gate.wait, (), (busy,))
    gate.set()
    eng.wait_for_all()


@pytest.mark.parametrize("stage", ["begin", "end"])
def test_a_signal_handler_that_waits_in_the_middle_is_refused(eng, monkeypatch, stage):
    """It would wait for itself; the operation goes on."""
    from weftplan.engine import region

    read, write, found = eng.new_variable(), eng.new_variable(), []

    def wait(*args):
        monkeypatch.undo()
        with pytest.raises(EngineError, match="in the middle of a change"):
            eng.wait_for_all()
        found.append(1)
        return getattr(region, name)(*args)

    name = "_ours" if stage == "begin" else "_release"
    monkeypatch.setattr(region, name, wait)
    end = begun(eng, (read,), (write,))
    end()
    assert found == [1]
    eng.wait_for_all()
    assert (write.version, read.readers) == (1, 0)


def test_a_signal_handler_that_raises_leaves_no_half_of_an_end(eng, monkeypatch):
    """At the end of a turn some vars are released: the others are, too, before it is raised."""
    from weftplan.engine import region

    reads, writes = ([eng.new_variable() for _ in range(3)] for _ in range(2))
    release = region._release

    def interrupted(reads, writes):
        monkeypatch.undo()
        release(iter([next(reads)]), iter([next(writes)]))
        raise TimeoutError

    end = begun(eng, reads, writes)
    monkeypatch.setattr(region, "_release", interrupted)
    with pytest.raises(TimeoutError):
        end()
    assert [(var.readers, var.write, var.version) for var in reads] == [(0, None, 0)] * 3
    assert [(var.readers, var.write, var.version) for var in writes] == [(0, None, 1)] * 3
    eng.wait_for_all()
