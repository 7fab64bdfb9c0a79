"""Engine contract: the effect of waits, from threads, futures and coroutines."""

import asyncio
import concurrent.futures
import itertools
import threading

import pytest

from tests.contract.engines import Boom, boom
from weftplan import engine
from weftplan.errors import EngineError, WaitInWorkerError

THREADED = ("ThreadedEngine", "ThreadedEnginePerDevice")


@pytest.fixture(params=THREADED)
def threaded(request):
    """Threaded engines with two workers, whose operations may block while the test continues."""
    eng = engine.create(request.param, cpu_workers=2)
    yield eng
    eng.stop()
    eng.wait_for_all()


def test_a_wait_for_a_var_ignores_its_readers(threaded):
    """A wait for a var returns while a read of it is blocked; a write of the var waits for that read."""
    var, gate, seen = threaded.new_variable(), threading.Event(), []
    threaded.push(lambda: None, (), [var])
    threaded.push(lambda: (gate.wait(60), seen.append("read")), [var])
    threaded.wait_for_var(var)
    assert seen == []
    threaded.push(lambda: seen.append("write"), (), [var])
    gate.set()
    threaded.wait_for_var(var)
    assert seen == ["read", "write"]


def test_a_wait_for_a_var_ignores_everything_else(threaded):
    """A wait for a var ignores blocked operations on other vars; wait_for_all waits for them."""
    held, free, gate = threaded.new_variable(), threaded.new_variable(), threading.Event()
    threaded.push(lambda: gate.wait(60), (), [held])
    threaded.push(lambda: None, (), [free])
    threaded.wait_for_var(free)
    assert (held.version, free.version) == (0, 1)
    assert threaded.statistics().pending == 1
    threading.Timer(0.05, gate.set).start()
    threaded.wait_for_all()
    assert held.version == 1


def test_several_threads_wait(threaded):
    """Six threads that wait for the same blocked write all get its failure."""
    var, gate, actual = threaded.new_variable(), threading.Event(), []
    threaded.push(lambda: (gate.wait(60), boom()), (), [var])

    def wait():
        try:
            threaded.wait_for_var(var)
        except Boom:
            actual.append(var.version)

    threads = [threading.Thread(target=wait) for _ in range(6)]
    idle = threading.Thread(target=threaded._wait_idle)
    for thread in (*threads, idle):
        thread.start()
    assert actual == []
    assert idle.is_alive()
    gate.set()
    for thread in (*threads, idle):
        thread.join(60)
    assert actual == [1] * 6
    assert not idle.is_alive()


def test_throw_does_not_wait(deferred):
    """``throw`` raises the var's failure on every call, without a wait; wait_for_all then raises nothing."""
    good, bad = deferred.new_variable(), deferred.new_variable()
    deferred.push(boom, (), [bad])
    deferred.throw(good)
    with pytest.raises(Boom):
        deferred.wait_for_var(bad)
    deferred.push(lambda: None, [bad], [good])
    deferred.stop()
    for var in (bad, good, bad):
        with pytest.raises(Boom):
            deferred.throw(var)
    assert deferred.unobserved_failures() == []
    deferred.wait_for_all()


def test_throw_observes_a_failure(deferred):
    """wait_for_all does not raise a failure that ``throw`` has raised; a later write clears it."""
    var = deferred.new_variable()
    deferred.push(boom, (), [var])
    deferred.stop()
    assert [failure.label for failure in deferred.unobserved_failures()] == ["boom"]
    with pytest.raises(Boom):
        deferred.throw(var)
    deferred.wait_for_all()
    deferred.push(lambda: None, (), [var])
    deferred.wait_for_var(var)
    deferred.throw(var)


def test_throw_during_a_blocked_write(threaded):
    """``throw`` returns immediately while the var's write is blocked."""
    var, gate = threaded.new_variable(), threading.Event()
    threaded.push(gate.wait, (), [var])
    threaded.throw(var)
    assert var.state == "WRITING"
    gate.set()
    threaded.wait_for_all()


def test_futures_in_a_pool(threaded):
    """``concurrent.futures.wait`` and ``as_completed`` accept futures of vars and of an executor together."""
    fast, slow, gate = threaded.new_variable("fast"), threaded.new_variable("slow"), threading.Event()
    threaded.push(gate.wait, (), [slow])
    threaded.push(lambda: None, (), [fast])
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        futures = [threaded.future(slow), threaded.future(fast), pool.submit(lambda: "pool")]
        done, pending = concurrent.futures.wait(futures[:2], 60, concurrent.futures.FIRST_COMPLETED)
        assert (done, pending) == ({futures[1]}, {futures[0]})
        gate.set()
        results = [future.result() for future in concurrent.futures.as_completed(futures, 60)]
    assert set(results) == {fast, slow, "pool"}


def test_executor_completes_an_operation(threaded):
    """An operation of push_async can run in a user's executor; the end of the executor's future completes it."""
    var, order = threaded.new_variable(), []
    with concurrent.futures.ThreadPoolExecutor(1) as pool:

        def start(on_complete):
            pool.submit(order.append, "work").add_done_callback(lambda done: on_complete(done.exception()))

        def start_bad(on_complete):
            pool.submit(boom).add_done_callback(lambda done: on_complete(done.exception()))

        threaded.push_async(start, (), [var])
        threaded.push(lambda: order.append("after"), [var])
        threaded.push_async(start_bad, (), [var])
        with pytest.raises(Boom):
            threaded.wait_for_var(var)
    assert order == ["work", "after"]
    assert var.version == 2


def test_cancelled_future(threaded):
    """A cancelled future does not consume the failure: a wait raises it. Callbacks of a future run once."""
    var, gate, called = threaded.new_variable(), threading.Event(), []
    threaded.push(lambda: (gate.wait(60), boom()), (), [var])
    cancelled, kept = threaded.future(var), threaded.future(var)
    assert cancelled.cancel()
    kept.add_done_callback(called.append)
    gate.set()
    assert isinstance(kept.exception(60), Boom)
    with pytest.raises(Boom):
        threaded.wait_for_var(var)
    assert called == [kept]
    assert cancelled.cancelled()


def test_failure_of_a_cancelled_future_stays_unobserved(threaded):
    """wait_for_all raises the failure of a var whose future was cancelled."""
    var, gate = threaded.new_variable(), threading.Event()
    threaded.push(lambda: (gate.wait(60), boom()), (), [var])
    assert threaded.future(var).cancel()
    gate.set()
    with pytest.raises(Boom):
        threaded.wait_for_all()


def test_await_many(threaded):
    """``await`` lets other coroutines run; gathered vars keep their order; a failure reaches only its coroutine."""

    async def main():
        variables = [threaded.new_variable(str(i)) for i in range(20)]
        gate = threading.Event()
        threaded.push(gate.wait, (), [variables[0]])
        for before, after in itertools.pairwise(variables):
            threaded.push(lambda: None, [before], [after])
        bad = threaded.new_variable()
        threaded.push(boom, [variables[19]], [bad])
        waiting = asyncio.gather(*map(_await, variables), _await(bad), return_exceptions=True)
        await asyncio.sleep(0)
        assert not waiting.done()
        gate.set()
        *good, error = await waiting
        assert good == variables
        assert isinstance(error, Boom)
        for _ in range(2):
            with pytest.raises(Boom):
                await bad

    asyncio.run(main())
    threaded.wait_for_all()  # the failure was raised in the coroutine


async def _await(var):
    return await var


def test_await_of_idle_and_deleted_vars(eng):
    """``await`` of an idle var returns immediately; of a deleted var it raises EngineError."""
    if eng.kind == "Simulator":
        pytest.skip("nobody would run the simulator while the loop waits")
    idle, gone = eng.new_variable(), eng.new_variable("gone")
    assert asyncio.run(_await(idle)) is idle
    eng.delete_variable(gone)
    with pytest.raises(EngineError, match=r"await: <Var 'gone'.* has been deleted"):
        asyncio.run(_await(gone))


def test_waits_for_deleted_and_non_vars(eng):
    """Waits for deleted vars and for other objects raise EngineError with their name or type."""
    gone = eng.new_variable("gone")
    eng.delete_variable(gone)
    for wait in (eng.wait_for_var, eng.future):
        with pytest.raises(EngineError, match=r"'gone'.*has been deleted"):
            wait(gone)
        with pytest.raises(EngineError, match="got int"):
            wait(3)
    eng.wait_for_all()


def test_waits_in_callbacks_of_other_threads(threaded):
    """A thread started by an operation may wait, because it is not a worker."""
    a, b, gate, seen = threaded.new_variable(), threaded.new_variable(), threading.Event(), []

    def start(on_complete):
        def work():
            gate.set()
            threaded.wait_for_var(b)
            seen.append(b.version)
            on_complete()

        threading.Thread(target=work).start()

    threaded.push(lambda: gate.wait(60), (), [b])
    threaded.push_async(start, (), [a])
    threaded.wait_for_var(a)
    assert seen == [1]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_every_wait_inside_is_refused(threaded, asynchronous):
    """Inside an operation, wait_for_all and wait_for_var, even of an idle var, raise WaitInWorkerError with the fix."""
    var, idle, errors = threaded.new_variable(), threaded.new_variable(), []

    def waits(on_complete=lambda: None):
        for wait in (lambda: threaded.wait_for_var(var), lambda: threaded.wait_for_var(idle), threaded.wait_for_all):
            try:
                wait()
            except WaitInWorkerError as error:
                errors.append(str(error))
        on_complete()

    (threaded.push_async if asynchronous else threaded.push)(waits, (), [var])
    threaded.wait_for_all()
    assert len(errors) == 3
    assert all("in const_vars (of a push)" in text for text in errors)
