"""The engine's contract, written once and run on every driver: order, versions, waits, errors, deletes, bulk."""

import random
import threading
import time

import pytest

from weftplan import engine
from weftplan.device.context import cpu
from weftplan.engine import FnProperty
from weftplan.errors import ConfigError, DuplicateVarError, EngineError, WaitInWorkerError

DRIVERS = {
    "naive": lambda: engine.create("NaiveEngine"),
    "threaded": lambda: engine.create("ThreadedEngine", cpu_workers=4),
    "per_device_1": lambda: engine.create("ThreadedEnginePerDevice", cpu_workers=1),
    "per_device_4": lambda: engine.create("ThreadedEnginePerDevice", cpu_workers=4),
    "simulator": lambda: engine.create("Simulator", seed=5),
}


@pytest.fixture(params=DRIVERS)
def eng(request):
    """An engine of each kind, stopped afterwards; no failure may be left unseen."""
    made = DRIVERS[request.param]()
    yield made
    made.stop()
    made.wait_for_all()


@pytest.fixture(params=[name for name in DRIVERS if name != "naive"])
def deferred(request):
    """Engines on which a push does not raise (all but the naive one)."""
    made = DRIVERS[request.param]()
    yield made
    made.stop()
    made.wait_for_all()


class Boom(Exception):
    """What failing operations raise here."""


def boom():
    """A failing operation."""
    raise Boom("boom")


def test_writes_of_one_var_run_in_push_order(eng):
    """1,000 writes of one var: order kept, version 1,000."""
    var, seen = eng.new_variable(), []
    for i in range(1000):
        eng.push(lambda i=i: seen.append(i), (), [var])
    eng.wait_for_var(var)
    assert seen == list(range(1000))
    assert var.version == 1000


def test_readers_see_the_write_before_them(eng):
    """write, many reads, write, many reads: every read sees its write; versions count writes only."""
    var, value, seen = eng.new_variable(), [0], []
    for i in range(50):
        eng.push(lambda i=i: value.__setitem__(0, i), (), [var])
        for _ in range(5):
            eng.push(lambda i=i: seen.append((i, value[0])), [var])
    eng.wait_for_all()
    assert len(seen) == 250
    assert all(want == got for want, got in seen)
    assert var.version == 50


def test_reads_run_concurrently():
    """Two readers meet at a barrier: they are running at the same time."""
    eng = engine.create("ThreadedEnginePerDevice", cpu_workers=2)
    var, barrier = eng.new_variable(), threading.Barrier(2)
    for _ in range(2):
        eng.push(lambda: barrier.wait(10), [var])
    eng.wait_for_all()
    assert barrier.n_waiting == 0
    eng.stop()


def test_a_write_excludes_everything():
    """While a write runs, neither another write nor a read of that var runs."""
    eng = engine.create("ThreadedEnginePerDevice", cpu_workers=4)
    var, inside, worst, lock = eng.new_variable(), [0, 0], [], threading.Lock()

    def enter(kind):
        with lock:
            inside[kind] += 1
            worst.append(tuple(inside))
        with lock:
            inside[kind] -= 1

    for i in range(400):
        if i % 3 == 0:
            eng.push(lambda: enter(1), (), [var])
        else:
            eng.push(lambda: enter(0), [var])
    eng.wait_for_all()
    assert all(writes <= 1 and not (writes and reads) for reads, writes in worst)
    eng.stop()


@pytest.mark.parametrize("seed", range(3))
def test_random_programs_equal_serial_execution(eng, seed):
    """10,000 operations over 100 vars, 2 to 19 reads with duplicates: exact equality with serial execution."""
    rng = random.Random(seed)
    program = []
    for _ in range(10_000):
        reads = [rng.randrange(100) for _ in range(rng.randint(2, 19))]
        target = rng.randrange(100)
        program.append(([r for r in reads if r != target], target))

    def apply(values, reads, target, i):
        values[target] = (values[target] * 31 + sum(values[r] for r in reads) + i) % 1_000_003

    want = list(range(100))
    for i, (reads, target) in enumerate(program):
        apply(want, reads, target, i)
    got = list(range(100))
    made = [eng.new_variable() for _ in range(100)]
    for i, (reads, target) in enumerate(program):
        eng.push(lambda r=reads, t=target, i=i: apply(got, r, t, i), [made[r] for r in reads], [made[target]])
    eng.wait_for_all()
    assert got == want
    counts = [sum(t == k for _, t in program) for k in range(100)]
    assert [v.version for v in made] == counts


def test_version_scenario(eng):
    """MXNet's VarVersion: 0 at first, 0 after a read, 10 after ten writes."""
    var = eng.new_variable()
    assert var.version == 0
    eng.push(lambda: None, [var])
    eng.wait_for_var(var)
    assert var.version == 0
    for _ in range(10):
        eng.push(lambda: None, (), [var])
    eng.wait_for_var(var)
    assert var.version == 10


def test_operators_are_reused(eng):
    """A stored operator runs as often as it is pushed; its deletion lets scheduled runs finish and forbids new ones."""
    var, runs = eng.new_variable(), []
    operator = eng.new_operator(lambda: runs.append(1), (), [var], name="again")
    for _ in range(20):
        eng.push(operator)
    eng.delete_operator(operator)
    with pytest.raises(EngineError, match="was deleted"):
        eng.push(operator)
    eng.wait_for_all()
    assert len(runs) == 20
    assert var.version == 20


def test_async_operations(eng):
    """The operation is over when on_complete is called, from another thread; an error given there is its failure."""
    if eng.kind == "Simulator":
        pytest.skip("the simulator has one thread: nobody else could call on_complete")
    var, order = eng.new_variable(), []

    def start(on_complete):
        threading.Thread(target=lambda: (order.append("work"), on_complete())).start()

    eng.push_async(start, (), [var])
    eng.push(lambda: order.append("after"), [var])
    eng.wait_for_all()
    assert order == ["work", "after"]

    def fail(on_complete):
        threading.Thread(target=lambda: on_complete(Boom("later"))).start()

    with pytest.raises(Boom, match="later"):  # noqa: PT012 - the naive engine raises at the push, the others at the wait
        eng.push_async(fail, (), [var])
        eng.wait_for_var(var)


def test_on_complete_twice_is_an_error(eng):
    """The second call raises where it is made, and changes nothing."""
    var, errors, over = eng.new_variable(), [], threading.Event()

    def start(on_complete):
        on_complete()
        try:
            on_complete()
        except EngineError as error:
            errors.append(str(error))
        over.set()

    eng.push_async(start, (), [var])
    eng.wait_for_all()  # for the first call, not for the end of the function
    assert over.wait(60)
    assert len(errors) == 1
    assert "called twice" in errors[0]
    assert var.version == 1


# -- errors ---------------------------------------------------------------------------------------------------------


def test_failure_is_raised_with_name_and_line(deferred):
    """The wait raises the original exception; its note names the operation and the line that pushed it."""
    var = deferred.new_variable()
    deferred.push(boom, (), [var], name="the culprit")
    with pytest.raises(Boom) as caught:
        deferred.wait_for_var(var)
    assert "'the culprit'" in caught.value.__notes__[0]
    assert "test_engine.py:" in caught.value.__notes__[0]
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


# -- deletes --------------------------------------------------------------------------------------------------------


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


# -- misuse ---------------------------------------------------------------------------------------------------------


def test_duplicate_declarations(eng):
    """Duplicate reads count once; the two deadlocking cases are errors that show the fix, and nothing is pushed."""
    a, b, runs = eng.new_variable("a"), eng.new_variable("b"), []
    eng.push(lambda: runs.append(1), [a, a, a], [b])
    with pytest.raises(DuplicateVarError, match=r"writes <Var 'b'.*twice.*dedupe"):
        eng.push(lambda: runs.append(2), [a], [b, b])
    with pytest.raises(DuplicateVarError, match=r"as read and as written.*mutable_vars only"):
        eng.push(lambda: runs.append(3), [a, b], [b])
    with pytest.raises(DuplicateVarError):
        eng.new_operator(lambda: None, [a], [a])
    reads, writes = engine.dedupe([a, b, a], [b, b])
    eng.push(lambda: runs.append(4), reads, writes)
    eng.wait_for_all()
    assert runs == [1, 4]
    assert b.version == 2


def test_foreign_vars_and_no_function(eng):
    """A var of another engine, something that is no var, something that cannot be called."""
    other = engine.create("NaiveEngine")
    with pytest.raises(EngineError, match="belongs to <NaiveEngine"):
        eng.push(lambda: None, [other.new_variable()])
    with pytest.raises(EngineError, match=r"made by engine.new_variable\(\), got str"):
        eng.push_async(lambda done: done(), ["x"])
    with pytest.raises(EngineError, match="needs a function"):
        eng.push(3)
    assert eng.statistics().pushed == 0


@pytest.mark.parametrize("what", ["var", "all"])
def test_wait_inside_an_operation(what):
    """A worker that would wait for itself raises, with the fix; the engine works on."""
    eng = engine.create("ThreadedEnginePerDevice", cpu_workers=1)
    a, b = eng.new_variable(), eng.new_variable()

    def wait_here():
        eng.wait_for_var(b) if what == "var" else eng.wait_for_all()

    eng.push(wait_here, (), [a])
    with pytest.raises(WaitInWorkerError, match="const_vars"):
        eng.wait_for_var(a)
    eng.push(lambda: None, (), [b])
    eng.wait_for_var(b)
    eng.stop()


def test_unknown_kind_and_bad_counts():
    """The message names what is legal."""
    with pytest.raises(ConfigError, match=r"did you mean 'NaiveEngine'\?.*ThreadedEnginePerDevice"):
        engine.create("NaivEngine")
    for bad in (0, -1, True, "2"):
        with pytest.raises(ConfigError, match="cpu_workers must be an integer >= 1"):
            engine.create("ThreadedEngine", cpu_workers=bad)


# -- re-entry, threads, priorities, routing -------------------------------------------------------------------------


def test_pushes_from_inside_an_operation(eng):
    """An operation pushes others, also onto its own var: they run after it."""
    var, log = eng.new_variable(), []

    def outer():
        eng.push(lambda: log.append("inner on the same var"), (), [var])
        eng.push(lambda: log.append("inner elsewhere"), (), [eng.new_variable()])
        log.append("outer")

    eng.push(outer, (), [var])
    eng.push(lambda: log.append("last"), (), [var])
    eng.wait_for_all()
    assert sorted(log) == ["inner elsewhere", "inner on the same var", "last", "outer"]
    assert log.index("outer") < log.index("inner on the same var")


def test_pushes_from_many_threads(eng):
    """Eight threads push 500 increments each onto one var: none is lost."""
    if eng.kind == "Simulator":
        pytest.skip("the simulator belongs to one thread")
    var, count = eng.new_variable(), [0]

    def add():
        count[0] += 1

    def work():
        for _ in range(500):
            eng.push(add, (), [var])

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    eng.wait_for_all()
    assert count[0] == 4000
    assert var.version == 4000


def test_priority_queue_order():
    """The CPU priority queue runs larger priorities first, equal ones in push order; the plain queue ignores them."""
    eng = engine.create("ThreadedEnginePerDevice", cpu_workers=1, priority_workers=1)
    for prop, want in ((FnProperty.CPU_PRIORITIZED, [9, 9, 5, 1, 0]), (FnProperty.NORMAL, [1, 9, 5, 9, 0])):
        gate, order = threading.Event(), []
        eng.push(gate.wait, prop=prop, priority=100)
        for p in (1, 9, 5, 9, 0):
            eng.push(lambda p=p, order=order: order.append(p), prop=prop, priority=p)
        gate.set()
        eng.wait_for_all()
        assert order == want
    eng.stop()


def test_contexts_have_pools_of_their_own():
    """cpu(0) and cpu(1) run at the same time although each has one worker; statistics name the queues."""
    eng = engine.create("ThreadedEnginePerDevice", cpu_workers=1)
    barrier = threading.Barrier(2)
    for i in range(2):
        eng.push(lambda: barrier.wait(10), ctx=cpu(i))
    eng.push(lambda: None, prop=FnProperty.CPU_PRIORITIZED)
    eng.wait_for_all()
    rows = {(str(q.context), q.queue): q.completed for q in eng.statistics().queues}
    assert rows == {("cpu(0)", "worker"): 1, ("cpu(1)", "worker"): 1, ("None", "priority"): 1}
    eng.stop()


# -- bulk -----------------------------------------------------------------------------------------------------------


def test_bulk_runs_everything_in_order(eng):
    """Pushes inside a bulk run in order, in fewer operations; leaving it restores the size."""
    var, log = eng.new_variable(), []
    with eng.bulk(10):
        for i in range(25):
            eng.push(lambda i=i: log.append(i), (), [var])
    eng.wait_for_all()
    assert log == list(range(25))
    assert eng.set_bulk_size(0) == 0


def test_bulk_member_fails_alone(deferred):
    """One member fails: what depends on it is skipped, everything else of the bulk runs."""
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
    """A wait inside a bulk does not wait for ever."""
    var, log = eng.new_variable(), []
    with eng.bulk(100):
        eng.push(lambda: log.append(1), (), [var])
        eng.wait_for_var(var)
        assert log == [1]
    with pytest.raises(EngineError, match="bulk size"):
        eng.set_bulk_size(-1)


# -- life -----------------------------------------------------------------------------------------------------------


def test_stop_and_start(eng):
    """Stop ends all threads after all work; pushing afterwards starts them again."""
    var = eng.new_variable()
    for _ in range(3):
        for _ in range(10):
            eng.push(lambda: None, (), [var])
        eng.stop()
        eng.start()
    eng.push(lambda: None, (), [var])
    eng.wait_for_all()
    assert var.version == 31


def test_many_engines_leave_no_thread():
    """A hundred engines made, used and stopped: no thread is left."""
    before = set(threading.enumerate())
    for i in range(100):
        eng = engine.create("ThreadedEnginePerDevice", cpu_workers=2)
        eng.push(lambda: None, (), [eng.new_variable()], cpu(i % 3))
        eng.stop()
    assert set(threading.enumerate()) <= before


def test_future(deferred):
    """A var as a future: done when readable, with the failure as its exception."""
    if deferred.kind == "Simulator":
        pytest.skip("nobody would run the simulator while the future is waited for")
    var = deferred.new_variable()
    deferred.push(lambda: time.sleep(0.01), (), [var])
    assert deferred.future(var).result(10) is var
    deferred.push(boom, (), [var])
    with pytest.raises(Boom):
        deferred.future(var).result(10)
    deferred.wait_for_all()


def test_repr_tells_the_state():
    """States and counts in words."""
    eng = engine.create("Simulator")
    var = eng.new_variable("x")
    assert repr(var) == "<Var 'x' version 0: IDLE>"
    eng.push(lambda: None, [var])
    assert repr(var) == "<Var 'x' version 0: READING by 1>"
    eng.push(lambda: None, (), [var])
    eng.push(lambda: None, [var])
    assert repr(var) == "<Var 'x' version 0: DRAINING by 1, 1 waiting>"
    assert repr(eng) == "<Simulator: 3 pushed, 3 pending>"
    eng.wait_for_all()
    assert repr(var) == "<Var 'x' version 1: IDLE>"
