"""Errors of enqueued device work: every dependant fails, and no other operation does."""

import gc
import random
import sys
import threading

import numpy as np
import pytest

from weftplan import device, engine
from weftplan.device.context import cpu, sim
from weftplan.device.simulated import configure
from weftplan.device.simulated_device import SimEvent
from weftplan.engine import FnProperty


@pytest.fixture(params=["lazy", "random"])
def eng(request):
    """An engine with two workers per device, on simulated devices that run work lazily or in random order."""
    for i in range(2):
        configure(i, order=request.param, seed=5)
    eng = engine.create("ThreadedEnginePerDevice", cpu_workers=2, gpu_workers=2)
    yield eng
    eng.stop()
    for i in range(2):
        configure(i, order="lazy")


def push_work(eng, where, fn, reads, writes, **options):
    """Push ``fn``: on a CPU the operation runs it, on a device the operation enqueues it."""
    work = fn if where.device_type == "cpu" else lambda: device.get(where).launch(fn)
    eng.push(work, reads, writes, where, **options)


def wait_fails(eng, var):
    """Return whether a wait for ``var`` raises ZeroDivisionError, the error of this file's operations."""
    try:
        eng.wait_for_var(var)
    except ZeroDivisionError:
        return True
    return False


def test_all_concurrent_waiters_get_the_error(eng, monkeypatch):
    """Host workers, another device and two user threads that wait at the same time all get the error."""
    before, ran = sys.getswitchinterval(), []
    sys.setswitchinterval(1e-5)
    try:
        for _ in range(30):
            bad, result = eng.new_variable(), [eng.new_variable() for _ in range(4)]
            push_work(eng, sim(0), lambda: 1 / 0, (), [bad], name="bad kernel")
            for i, var in enumerate(result[:3]):
                push_work(eng, cpu(i), lambda: ran.append("host"), [bad], [var])
            push_work(eng, sim(1), int, [bad], [result[3]])
            told = []
            threads = [
                threading.Thread(target=lambda bad=bad, told=told: told.append(wait_fails(eng, bad))) for _ in "ab"
            ]
            for thread in threads:
                thread.start()
            assert all(wait_fails(eng, var) for var in result)
            for thread in threads:
                thread.join()
            assert (told, ran) == ([True, True], [])
            eng.wait_for_all()
    finally:
        sys.setswitchinterval(before)


@pytest.mark.parametrize("first", [0, 1, 2])
def test_dependants_fail_in_any_order_of_waits(eng, first):
    """Dependants on the same stream and another device fail, in any order of waits; one failure is counted."""
    chain = [eng.new_variable() for _ in range(3)]
    push_work(eng, sim(0), lambda: 1 / 0, (), chain[:1], name="bad kernel")
    push_work(eng, sim(0), int, chain[:1], chain[1:2])
    push_work(eng, sim(1), int, chain[1:2], chain[2:])
    for var in chain[first:] + chain[:first]:
        with pytest.raises(ZeroDivisionError) as caught:
            eng.wait_for_var(var)
        assert caught.value.__notes__ == [note for note in caught.value.__notes__ if "'bad kernel'" in note]
    eng.wait_for_all()
    assert eng.statistics().failed == 1


def test_unrelated_work_of_the_stream_succeeds(eng):
    """Unrelated operations before and after the failed one on its stream succeed, in either order of waits."""
    good = [eng.new_variable() for _ in range(4)]
    bad = eng.new_variable()
    for var in good[:2]:
        push_work(eng, sim(0), int, (), [var])
    push_work(eng, sim(0), lambda: 1 / 0, (), [bad])
    for var in good[2:]:
        push_work(eng, sim(0), int, (), [var])
    eng.wait_for_var(good[0])
    eng.wait_for_var(good[2])
    assert wait_fails(eng, bad)
    eng.wait_for_var(good[1])
    eng.wait_for_var(good[3])
    eng.wait_for_all()


def test_wait_for_all_raises_each_failure_once(eng):
    """wait_for_all raises all simultaneous device failures in one error, and a second call raises nothing.

    A failed operation whose input had failed is not reported; an operation without outputs is.
    """
    a, b = eng.new_variable(), eng.new_variable()
    push_work(eng, sim(0), lambda: 1 / 0, (), [a], name="first")
    push_work(eng, sim(1), lambda: 1 / 0, (), [b], name="second")
    push_work(eng, sim(0), lambda: 1 / 0, [a], (), name="moot: it would not have run")
    push_work(eng, sim(0), lambda: 1 / 0, (), (), name="third")
    with pytest.raises(ZeroDivisionError) as caught:
        eng.wait_for_all()
    notes = "\n".join(caught.value.__notes__)
    assert [name for name in ("first", "second", "third") if f"'{name}'" in notes] == ["first", "second", "third"]
    assert "moot" not in notes
    eng.wait_for_all()
    assert wait_fails(eng, a)
    assert wait_fails(eng, b)
    assert eng.statistics().failed == 3


def test_skipped_operation_names_its_cause(eng):
    """Waits for an input's failure and for a later device failure raise ZeroDivisionError, each with its own name.

    An operation that overwrites a failed var clears its failure.
    """
    x, y, ran = eng.new_variable(), eng.new_variable(), []
    push_work(eng, cpu(0), lambda: 1 / 0, (), [x], name="known")
    eng._wait_idle()
    push_work(eng, sim(0), lambda: 1 / 0, (), [y], name="late")
    push_work(eng, sim(0), lambda: ran.append("skipped"), [x], [y])
    with pytest.raises(ZeroDivisionError) as caught:
        eng.wait_for_var(x)
    assert "'known'" in caught.value.__notes__[0]
    push_work(eng, cpu(0), lambda: ran.append("heals"), (), [y])
    eng.wait_for_var(y)
    assert ran == ["heals"]
    with pytest.raises(ZeroDivisionError) as caught:
        eng.wait_for_all()
    assert "'late'" in caught.value.__notes__[0]


def test_last_event_holds_no_earlier_events(eng):
    """After 30 operations on one var at most two more events are alive, because an event refers to no earlier event."""
    var = eng.new_variable()

    def events():
        return sum(type(one) is SimEvent for one in gc.get_objects())

    before = events()
    for _ in range(30):
        push_work(eng, sim(0), int, (), [var])
    eng.wait_for_var(var)
    assert events() <= before + 2


def test_work_enqueued_by_a_user_thread(eng):
    """An error of work that another thread enqueued for an asynchronous operation reaches that operation's var."""
    bad, place = eng.new_variable(), device.get(sim(0))

    def start(on_complete):
        stream = device.current_stream()

        def work():
            with stream:
                place.launch(lambda: 1 / 0)
            on_complete()

        threading.Thread(target=work).start()

    eng.push_async(start, (), [bad], sim(0), name="from a thread")
    assert wait_fails(eng, bad)
    assert wait_fails(eng, bad)


def test_raise_once_heals_everything(monkeypatch):
    """With WEFTPLAN_ERRORS=mxnet, one raise clears the failure of all vars, also of those never waited for."""
    monkeypatch.setenv("WEFTPLAN_ERRORS", "mxnet")
    eng = engine.create("ThreadedEnginePerDevice", gpu_workers=1)
    a, b, ran = eng.new_variable(), eng.new_variable(), []
    push_work(eng, sim(0), lambda: 1 / 0, (), [a])
    push_work(eng, sim(0), int, [a], [b])
    assert wait_fails(eng, a)
    assert not wait_fails(eng, a)
    assert not wait_fails(eng, b)
    push_work(eng, cpu(0), lambda: ran.append(1), [a, b], ())
    eng.wait_for_all()
    assert ran == [1]
    eng.stop()


def run_program(eng, seed, places):
    """Run a random program; return for each wait the value of its cell, or the text of the error.

    At most one operation fails. With several failures, a common dependant could raise either, depending on timing.
    """

    def waited(i):
        try:
            eng.wait_for_var(variables[i])
        except ZeroDivisionError as error:
            return str(error)
        return cells[i]

    rng = random.Random(seed)
    count = 5
    cells, seen = np.zeros(count), []
    variables = [eng.new_variable() for _ in range(count)]
    worst = rng.randrange(20)
    for step in range(40):
        if rng.random() < 0.2:
            one = rng.randrange(count)
            seen.append(waited(one))
            continue
        reads = rng.sample(range(count), rng.randrange(3))
        writes = rng.sample([i for i in range(count) if i not in reads], rng.randrange(1, 3))
        bad = step == worst
        prop = FnProperty.NO_SKIP if rng.random() < 0.1 and not reads else FnProperty.NORMAL

        def work(step=step, reads=reads, writes=writes, bad=bad):
            if bad:
                raise ZeroDivisionError(f"step {step}")
            cells[writes] = np.sum(cells[reads]) % 1000 * 3 + step

        where = rng.choice(places)
        push_work(
            eng,
            where,
            work,
            [variables[i] for i in reads],
            [variables[i] for i in writes],
            name=f"step {step}",
            prop=prop,
        )
    seen += [waited(i) for i in range(count)]
    try:
        eng.wait_for_all()
    except ZeroDivisionError as error:  # raised if work overwrote the failure
        seen.append(str(error))
    return seen


@pytest.mark.parametrize("block", range(4))
def test_random_programs_fail_as_without_streams(eng, block):
    """The waits give the same values and failures as on an engine that runs only on CPUs."""
    plain = engine.create("ThreadedEngine")
    for seed in range(block * 15, block * 15 + 15):
        assert run_program(eng, seed, [sim(0), sim(1), cpu(0)]) == run_program(plain, seed, [cpu(0)] * 3), seed
    plain.stop()


def test_every_waiting_thread_gets_the_error(eng):
    """Four threads that wait for the same failed device work all get its error, in any interleaving."""
    interval = sys.getswitchinterval()
    try:
        for number in range(60):
            sys.setswitchinterval((1e-6, 1e-5, interval)[number % 3])
            var, gate = eng.new_variable(), threading.Barrier(4)
            told: list[BaseException] = []

            def wait(var=var, told=told, gate=gate):
                gate.wait(60)
                try:
                    eng.wait_for_var(var)
                except ZeroDivisionError as error:
                    told.append(error)

            eng.push(lambda: device.get(sim(0)).launch(lambda: 1 / 0), (), [var], sim(0))
            threads = [threading.Thread(target=wait) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
            assert len(told) == 4
    finally:
        sys.setswitchinterval(interval)
