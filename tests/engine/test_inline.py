"""Inline execution on the calling thread has the effects of a push; a failed attempt has no effect."""

import threading

import pytest

from weftplan import engine
from weftplan.errors import EngineError


def test_inline_work_counts_as_an_operation(eng):
    """Work on idle vars runs on the calling thread, and the statistics count it as pushed and completed."""
    var = eng.new_variable()
    before = eng.statistics()
    threads = []
    assert eng.run_inline((var,), lambda *args: threads.append(threading.get_ident()) or args, 1, 2) == (1, 2)
    after = eng.statistics()
    assert threads == [threading.get_ident()]
    assert (after.pushed, after.completed, after.pending) == (before.pushed + 1, before.completed + 1, 0)


def test_inline_work_waits_for_pending_write(eng):
    """Work does not run inline while a write of an input is pending."""
    var, gate, ran = eng.new_variable(), threading.Event(), []
    eng.push(gate.wait, (), (var,))
    assert not eng.run_inline((var,), lambda: ran.append(1) or True)
    gate.set()
    eng.wait_for_var(var)
    assert not ran
    assert eng.run_inline((var,), lambda: ran.append(1) or True)


def test_concurrent_write_cancels_inline_work(eng):
    """If an input is written during the work, run_inline returns a false value and the statistics omit the attempt."""
    var = eng.new_variable()

    def work():
        eng.push(lambda: None, (), (var,))
        eng.wait_for_var(var)
        return True

    pushed = eng.statistics().pushed
    assert not eng.run_inline((var,), work)
    assert eng.statistics().pushed == pushed + 1  # only the write


def test_pending_concurrent_write_cancels_inline_work(eng):
    """If a write of an input is pushed during the work and is still pending, run_inline returns a false value."""
    var, gate = eng.new_variable(), threading.Event()
    assert not eng.run_inline((var,), lambda: eng.push(gate.wait, (), (var,)) or True)
    gate.set()
    eng.wait_for_all()


def test_inline_error_leaves_no_failure(eng):
    """If the work raises, run_inline returns a false value and stores no failure, and a later wait raises nothing."""
    var = eng.new_variable()

    def work():
        raise ValueError("no")

    assert not eng.run_inline((var,), work)
    assert eng.unobserved_failures() == []
    eng.wait_for_all()


def test_interrupt_in_inline_work_reaches_the_caller(eng):
    """A KeyboardInterrupt in the work reaches the caller; later waits return, and later work runs inline."""
    var = eng.new_variable()

    def work():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        eng.run_inline((var,), work)
    eng.wait_for_all()
    assert eng.run_inline((var,), lambda: True)


def test_push_and_wait_inside_inline_work(eng):
    """A push and waits inside inline work succeed, as a signal handler or destructor might make them."""
    var, second = eng.new_variable(), eng.new_variable()
    seen = []

    def work():
        eng.push(lambda: seen.append(1), (var,), (second,))
        eng.wait_for_var(second)
        eng.wait_for_all()
        return True

    assert eng.run_inline((var,), work)
    assert seen == [1]


def test_tracer_bulk_and_failure_disable_inline_work(eng):
    """With a tracer or inside a bulk, run_inline returns a false value; wait_for_all still raises a later failure."""
    var = eng.new_variable()
    eng.tracer = lambda *args: None
    assert not eng.run_inline((var,), lambda: True)
    eng.tracer = None
    with eng.bulk(4):
        assert not eng.run_inline((var,), lambda: True)
    eng.push(lambda: 1 / 0, (), (eng.new_variable(),))
    with pytest.raises(ZeroDivisionError):
        eng.wait_for_all()


def test_foreign_and_deleted_vars_are_not_inlined(eng):
    """Work does not run inline with a var of another engine, with a deleted var, or on a naive engine."""
    other_engine = engine.create("NaiveEngine")
    assert not eng.run_inline((other_engine.new_variable(),), lambda: True)
    gone = eng.new_variable()
    eng.delete_variable(gone)
    assert not eng.run_inline((gone,), lambda: True)
    assert not other_engine.run_inline((other_engine.new_variable(),), lambda: True)


def test_requests_during_inline_work_are_served(eng):
    """Pushes of other threads during inline work all run."""
    var, count, ran = eng.new_variable(), 300, []
    others = [eng.new_variable() for _ in range(4)]

    def pusher(own):
        for _ in range(count):
            eng.push(lambda: ran.append(1), (var,), (own,))

    threads = [threading.Thread(target=pusher, args=(own,)) for own in others]
    for thread in threads:
        thread.start()
    for _ in range(count):
        eng.run_inline((var,), lambda: True)
    for thread in threads:
        thread.join()
    eng.wait_for_all()
    assert len(ran) == 4 * count
    assert eng.statistics().pending == 0


def test_inline_write_counts_as_an_operation(eng):
    """A write of idle vars runs on the calling thread, and versions and statistics include it."""
    source, target = eng.new_variable(), eng.new_variable()
    before, threads = eng.statistics(), []
    assert eng.write_inline(lambda: threads.append(threading.get_ident()), (source,), (target,))
    after = eng.statistics()
    assert threads == [threading.get_ident()]
    assert (after.pushed, after.completed, after.pending) == (before.pushed + 1, before.completed + 1, 0)
    assert (source.version, target.version, target.state) == (0, 1, "IDLE")


@pytest.mark.parametrize("role", ["reads what is read", "reads what is written", "writes what is read", "writes"])
def test_inline_write_needs_idle_vars(eng, role):
    """An inline write requires that its outputs have no pending reader or writer and its inputs no pending writer."""
    source, target = eng.new_variable(), eng.new_variable()
    gate, ran = threading.Event(), []
    var = target if role.endswith(("what is written", "writes")) else source
    reads, writes = ((var,), ()) if role.startswith("reads") else ((), (var,))
    eng.push(gate.wait, reads, writes)
    runs = role == "reads what is read"
    assert eng.write_inline(lambda: ran.append(1), (source,), (target,)) == runs
    gate.set()
    eng.wait_for_all()
    assert ran == [1] * runs
    assert eng.write_inline(lambda: ran.append(1), (source,), (target,))


def test_reader_sees_complete_inline_write(eng):
    """A read pushed by another thread during an inline write sees all of it."""
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
    assert eng.write_inline(work, (), (target,))
    thread.join()
    eng.wait_for_all()
    assert seen == [(1, 1)]


def test_failed_inline_write_leaves_vars_idle(eng):
    """If an inline write raises, write_inline returns a false value, and the var is idle with its old version."""
    target = eng.new_variable()

    def work():
        raise ValueError

    assert not eng.write_inline(work, (), (target,))
    assert target.version == 0
    eng.push(lambda: None, (), (target,))
    eng.wait_for_all()
    assert target.version == 1


def test_interrupted_inline_write_is_repeated(eng):
    """After Ctrl-C in an inline write, an operation repeats the whole write, and the interrupt reaches the caller."""
    source, target = eng.new_variable(), eng.new_variable()
    values, interrupts = [0, 0], [KeyboardInterrupt()]

    def work():
        values[0] = 1
        if interrupts:
            raise interrupts.pop()
        values[1] = 1

    with pytest.raises(KeyboardInterrupt):
        eng.write_inline(work, (source,), (target,))
    eng.wait_for_all()
    assert values == [1, 1]
    assert (source.version, target.version, target.state) == (0, 1, "IDLE")


def test_interrupt_of_write_may_push_not_wait(eng):
    """During an inline write the same thread may push; a wait raises EngineError, since it would wait for itself."""
    target, second, seen = eng.new_variable(), eng.new_variable(), []

    def work():
        eng.push(lambda: seen.append(1), (), (second,))
        with pytest.raises(EngineError, match="in the middle of a change"):
            eng.wait_for_var(second)

    assert eng.write_inline(work, (), (target,))
    eng.wait_for_all()
    assert seen == [1]


def test_tracer_bulk_and_foreign_vars_disable_inline_write(eng):
    """No write runs inline with a tracer, inside a bulk, with a foreign or deleted var, or on a naive engine."""
    var = eng.new_variable()
    eng.tracer = lambda *args: None
    assert not eng.write_inline(lambda: None, (), (var,))
    eng.tracer = None
    with eng.bulk(4):
        assert not eng.write_inline(lambda: None, (), (var,))
    other_engine = engine.create("NaiveEngine")
    assert not eng.write_inline(lambda: None, (), (other_engine.new_variable(),))
    assert not other_engine.write_inline(lambda: None, (), (other_engine.new_variable(),))
    gone = eng.new_variable()
    eng.delete_variable(gone)
    assert not eng.write_inline(lambda: None, (gone,), (var,))


def begin_inline(eng, reads=(), writes=()):
    """Begin an inline operation; return its completion callback, or None if it must be pushed."""
    return eng.begin(lambda on_complete: None, tuple(reads), tuple(writes), "begun")


@pytest.mark.parametrize("count", [1, 12])
def test_operation_begins_inline(eng, count):
    """Operations pushed after an inline begin wait for its completion, and a wait raises its failure."""
    reads, writes, order = [eng.new_variable() for _ in range(2)], [eng.new_variable() for _ in range(count)], []
    before = eng.statistics()
    end = begin_inline(eng, reads, writes)
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

    begin_inline(eng, reads, writes)(ValueError("lost"))
    for var in writes:
        with pytest.raises(ValueError, match="lost"):
            eng.wait_for_var(var)
    assert begin_inline(eng, (), [eng.new_variable()]) is None  # while a failure exists


def test_begin_needs_idle_vars(eng):
    """``begin`` returns None for a busy var, with a tracer, inside a bulk, for a foreign var and on a naive engine."""
    gate, read, written, idle = threading.Event(), eng.new_variable(), eng.new_variable(), eng.new_variable()
    eng.push(gate.wait, (read,), (written,))
    assert begin_inline(eng, (written,), (idle,)) is None
    assert begin_inline(eng, (), (idle, read)) is None
    assert begin_inline(eng, (), (idle, written)) is None
    assert (idle.write, idle.readers, read.readers) == (None, 0, 1)
    end = begin_inline(eng, (read,), (idle,))
    assert read.readers == 2
    assert begin_inline(eng, (idle,), ()) is None
    end()
    gate.set()
    eng.wait_for_all()
    eng.tracer = lambda *args: None
    assert begin_inline(eng, (), (idle,)) is None
    eng.tracer = None
    with eng.bulk(4):
        assert begin_inline(eng, (), (idle,)) is None
    other_engine = engine.create("NaiveEngine")
    assert begin_inline(other_engine, (), (other_engine.new_variable(),)) is None
    assert begin_inline(eng, (), (other_engine.new_variable(),)) is None


def test_begun_operation_completes_inline(eng):
    """Completion of a begun operation releases its vars without a request to the region, even if others are pending."""
    gate, busy = threading.Event(), eng.new_variable()
    reads, writes = ([eng.new_variable() for _ in range(3)] for _ in range(2))
    for round in range(2):
        end = begin_inline(eng, reads, writes)
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
def test_waiting_signal_handler_is_refused_inside(eng, monkeypatch, stage):
    """A signal handler that waits during begin or completion gets EngineError; the operation still completes."""
    from weftplan.engine import region

    read, write, actual = eng.new_variable(), eng.new_variable(), []

    def wait(*args):
        monkeypatch.undo()
        with pytest.raises(EngineError, match="in the middle of a change"):
            eng.wait_for_all()
        actual.append(1)
        return getattr(region, name)(*args)

    name = "_ours" if stage == "begin" else "_release"
    monkeypatch.setattr(region, name, wait)
    end = begin_inline(eng, (read,), (write,))
    end()
    assert actual == [1]
    eng.wait_for_all()
    assert (write.version, read.readers) == (1, 0)


def test_raising_signal_handler_leaves_complete_release(eng, monkeypatch):
    """If a signal handler raises TimeoutError while vars are released, all vars are idle when the error propagates."""
    from weftplan.engine import region

    reads, writes = ([eng.new_variable() for _ in range(3)] for _ in range(2))
    release = region._release

    def interrupted(reads, writes):
        monkeypatch.undo()
        release(iter([next(reads)]), iter([next(writes)]))
        raise TimeoutError

    end = begin_inline(eng, reads, writes)
    monkeypatch.setattr(region, "_release", interrupted)
    with pytest.raises(TimeoutError):
        end()
    assert [(var.readers, var.write, var.version) for var in reads] == [(0, None, 0)] * 3
    assert [(var.readers, var.write, var.version) for var in writes] == [(0, None, 1)] * 3
    eng.wait_for_all()
