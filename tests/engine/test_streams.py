"""Order between streams, on simulated devices that defer all work: a missing event gives a wrong value."""

import numpy as np
import pytest

import weftplan as mx
from weftplan import device, engine
from weftplan.device.context import cpu, sim
from weftplan.device.simulated import SimDevice, configure
from weftplan.engine import FnProperty
from weftplan.engine.operation import OprBlock
from weftplan.engine.streams import Mark, StreamWorker, VarEvents


@pytest.fixture(params=["lazy", "random"])
def eng(request):
    """An engine with several streams per device; the simulated devices run work lazily or in random order."""
    for i in range(2):
        configure(i, order=request.param, seed=3)
    eng = engine.create("ThreadedEnginePerDevice", cpu_workers=2, gpu_workers=2, copy_workers=1)
    yield eng
    eng.stop()
    for i in range(2):
        configure(i, order="lazy")


def enqueue(eng, ctx, fn, reads, writes, **options):
    """Push an operation that only enqueues ``fn`` on its worker's stream."""
    place = device.get(ctx)
    eng.push(lambda: place.launch(fn), reads, writes, ctx, **options)


def run_chain_over_streams(eng, steps=40):
    """Pass a value through two devices, a copy queue and the host; return the actual and the expected result."""
    cell, var = np.zeros(1), eng.new_variable()
    want = 0.0
    for i in range(steps):
        where = (sim(0), sim(1), sim(0), cpu(0))[i % 4]
        prop = FnProperty.COPY_FROM_GPU if i % 4 == 2 else FnProperty.NORMAL

        def work(i=i):
            cell[0] = cell[0] * 3 + i if cell[0] < 1e9 else i

        if where.device_type == "cpu":
            eng.push(work, (), [var], where)
        else:
            enqueue(eng, where, work, (), [var], prop=prop)
        want = want * 3 + i if want < 1e9 else i
    eng.wait_for_var(var)
    return float(cell[0]), want


def test_streams_are_ordered_by_events(eng):
    """Operations of different streams that write one var run in push order."""
    got, want = run_chain_over_streams(eng)
    assert got == want


def test_without_events_the_order_is_lost(monkeypatch):
    """Without event waits, a device reads 0 before the other device has written 5."""
    monkeypatch.setattr(StreamWorker, "_wait_for_streams", lambda self, core, op, stream, before: None)
    eng = engine.create("ThreadedEnginePerDevice", gpu_workers=1)
    cell, out, a, b = np.zeros(1), np.zeros(1), eng.new_variable(), eng.new_variable()
    enqueue(eng, sim(0), lambda: cell.fill(5), (), [a])
    enqueue(eng, sim(1), lambda: np.copyto(out, cell), [a], [b])
    eng.wait_for_var(b)
    assert out[0] == 0
    eng.stop()


def test_a_writer_waits_for_readers_on_other_streams(eng):
    """A later write on another device does not overtake an enqueued read."""
    cell, out, a, b = np.ones(1), np.zeros(1), eng.new_variable(), eng.new_variable()
    enqueue(eng, sim(0), lambda: np.copyto(out, cell), [a], [b])
    enqueue(eng, sim(1), lambda: cell.fill(9), (), [a])
    eng.wait_for_var(a)
    assert (out[0], cell[0]) == (1, 9)
    eng.wait_for_var(b)


def test_dispatch_follows_enqueued_inputs():
    """The engine dispatches and completes three dependent operations before the device has run any of them."""
    eng = engine.create("ThreadedEnginePerDevice", gpu_workers=1)
    configure(0, order="lazy")
    log, var = [], eng.new_variable()
    for i in range(3):
        enqueue(eng, sim(0), lambda i=i: log.append(i), (), [var])
    eng._wait_idle()
    assert log == []
    assert (var.version, var.state) == (3, "IDLE")
    eng.wait_for_var(var)
    assert log == [0, 1, 2]
    eng.stop()


def test_host_operations_wait_for_devices(eng):
    """A CPU operation sees values written by devices, and a CPU write waits for the devices that read the var."""
    cell, seen, a, b = np.zeros(1), [], eng.new_variable(), eng.new_variable()
    enqueue(eng, sim(0), lambda: cell.fill(7), (), [a])
    eng.push(lambda: seen.append(cell[0]), [a], (), cpu(0))
    enqueue(eng, sim(0), lambda: seen.append(cell[0]), [a], [b])
    eng.push(lambda: cell.fill(8), (), [a], cpu(1))
    eng.wait_for_all()
    assert seen == [7, 7]
    assert cell[0] == 8


@pytest.mark.parametrize("ctx", [sim(0), cpu(0)], ids=str)
def test_memory_is_freed_after_the_streams(eng, ctx):
    """A delete function on any device runs after the enqueued reads and writes of two devices."""
    memory, out, a, b = np.full(4, 3.0), np.zeros(4), eng.new_variable(), eng.new_variable()
    log = []
    enqueue(eng, sim(0), lambda: (memory.fill(4), log.append("write")), (), [a])
    enqueue(eng, sim(1), lambda: (np.copyto(out, memory), log.append("read")), [a], [b])
    eng.delete_variable(a, lambda: (memory.fill(np.nan), log.append("delete")), ctx)
    eng.wait_for_all()
    assert log == ["write", "read", "delete"]
    assert out.tolist() == [4.0] * 4


def test_streams_of_another_kind_of_device():
    """Streams of different kinds of devices share no events: the host synchronizes before it enqueues the work."""
    eng = engine.create("ThreadedEnginePerDevice", gpu_workers=1)
    log, var = [], eng.new_variable()

    class Other:
        """Stream and event of a device of another kind; it logs each synchronization."""

        def record(self):
            return self

        def synchronize(self):
            log.append("synchronized")

    first = OprBlock(None, (), (var,), "elsewhere")
    eng.push(lambda: None, (), [eng.new_variable()], sim(0))
    eng.wait_for_all()
    var.events = VarEvents(Mark(Other(), Other(), first))
    enqueue(eng, sim(0), lambda: log.append("work"), [var], ())
    eng.wait_for_all()
    assert log == ["synchronized", "work"]
    eng.stop()


def test_statistics_count_deletes_once(eng):
    """The engine's statistics count each delete once, even if it was deferred until its stream finished."""
    variables = [eng.new_variable() for _ in range(5)]
    for var in variables:
        enqueue(eng, sim(0), lambda: None, (), [var])
        eng.delete_variable(var, ctx=sim(0))
    eng.wait_for_all()
    eng.stop()
    counts = eng.statistics()
    assert (counts.pushed, counts.completed, counts.failed) == (10, 10, 0)


def test_queues_count_deletes_once():
    """The queue's statistics count each of five deletes once, in addition to the five writes."""
    eng = engine.create("ThreadedEnginePerDevice", gpu_workers=1)
    variables = [eng.new_variable() for _ in range(5)]
    for var in variables:
        enqueue(eng, sim(0), lambda: None, (), [var])
    eng._wait_idle()
    for var in variables:
        eng.delete_variable(var, ctx=sim(0))
    eng.wait_for_all()
    assert [(q.queue, q.completed) for q in eng.statistics().queues] == [("worker", 10)]
    eng.stop()


def test_device_error_is_raised_at_the_wait():
    """If enqueued work fails, a wait raises its ZeroDivisionError with the operation's name; a later write succeeds."""
    eng = engine.create("ThreadedEnginePerDevice", gpu_workers=1)
    var = eng.new_variable()
    enqueue(eng, sim(0), lambda: 1 / 0, (), [var], name="bad kernel")
    with pytest.raises(ZeroDivisionError) as caught:
        eng.wait_for_var(var)
    assert "bad kernel" in caught.value.__notes__[0]
    enqueue(eng, sim(0), lambda: None, (), [var])
    eng.wait_for_var(var)
    enqueue(eng, sim(0), lambda: 1 / 0, (), [])
    with pytest.raises(ZeroDivisionError):
        eng.wait_for_all()
    eng.stop()


def test_device_error_reaches_host_operations(eng):
    """CPU operations that use the failed var are skipped with its ZeroDivisionError; a NO_SKIP operation runs.

    An operation that overwrites the var is skipped, too, if it was pushed before the error was raised.
    """
    a, b, ran = eng.new_variable(), eng.new_variable(), []
    enqueue(eng, sim(0), lambda: 1 / 0, (), [a], name="bad kernel")
    eng.push(lambda: ran.append("no skip"), [a], (), cpu(0), prop=FnProperty.NO_SKIP)
    eng.push(lambda: ran.append("reads"), [a], [b], cpu(0))
    eng.push(lambda: ran.append("writes"), (), [a], cpu(1))
    for var in (b, a, b):
        with pytest.raises(ZeroDivisionError) as caught:
            eng.wait_for_var(var)
        assert "bad kernel" in caught.value.__notes__[0]
    assert ran == ["no skip"]
    eng.push(lambda: ran.append("heals"), (), [a], cpu(1))
    eng.push(lambda: ran.append("heals, too"), [a], [b], cpu(0))
    eng.wait_for_all()
    assert ran == ["no skip", "heals", "heals, too"]


def test_vars_of_failed_work_can_be_overwritten(eng):
    """After the error was raised, operations on a CPU or another stream overwrite the failed operation's vars."""
    x, y, ran = eng.new_variable(), eng.new_variable(), []
    for where in (cpu(0), sim(1), cpu(0)):
        enqueue(eng, sim(0), lambda: None, (), [x])
        enqueue(eng, sim(0), lambda: 1 / 0, [x], [y], name="bad kernel")
        with pytest.raises(ZeroDivisionError):
            eng.wait_for_var(y)
        for var in (x, y):
            enqueue(eng, where, lambda where=where: ran.append(where), (), [var])
        for var in (x, y):
            eng.wait_for_var(var)
    eng.wait_for_all()
    assert ran == [where for where in (cpu(0), sim(1), cpu(0)) for _ in "xy"]


def test_wait_for_all_raises_unattributed_device_error(eng):
    """wait_for_all raises a device's ZeroDivisionError only once; a wait for the failed var raises it again."""
    a = eng.new_variable()
    enqueue(eng, sim(0), lambda: 1 / 0, (), [a], name="bad kernel")
    eng.push(lambda: None, [a], (), cpu(0), prop=FnProperty.NO_SKIP)
    with pytest.raises(ZeroDivisionError):
        eng.wait_for_all()
    eng.wait_for_all()
    with pytest.raises(ZeroDivisionError):
        eng.wait_for_var(a)
    assert eng.statistics().failed == 1


def test_asynchronous_operations_on_a_device(eng):
    """Work that a push_async function enqueues before it completes is ordered before later operations of the var."""
    cell, var, place = np.zeros(1), eng.new_variable(), device.get(sim(0))

    def start(on_complete):
        place.launch(lambda: cell.fill(6))
        on_complete()

    eng.push_async(start, (), [var], sim(0))
    eng.push(lambda: cell.__imul__(2), (), [var], cpu(0))
    eng.wait_for_var(var)
    assert cell[0] == 12


def test_asynchronous_dispatch_follows_enqueued_inputs():
    """An asynchronous operation is dispatched before its input is computed; its device work runs after the input's."""
    eng = engine.create("ThreadedEnginePerDevice", gpu_workers=1)
    for i in range(2):
        configure(i, order="lazy")
    log, a, b, place = [], eng.new_variable(), eng.new_variable(), device.get(sim(1))

    def start(on_complete):
        place.launch(lambda: log.append("second"))
        on_complete()

    enqueue(eng, sim(0), lambda: log.append("first"), (), [a])
    eng.push_async(start, [a], [b], sim(1))
    eng._wait_idle()
    assert log == []
    eng.wait_for_var(b)
    assert log == ["first", "second"]
    eng.stop()


def test_unusable_device_fails_its_operations(monkeypatch):
    """If a device cannot be opened, a wait raises its DeviceError, and a delete function still runs."""
    from weftplan.errors import DeviceError

    def broken(ctx):
        raise DeviceError(f"{ctx}: no driver")

    monkeypatch.setattr(device, "get", broken)
    eng = engine.create("ThreadedEnginePerDevice")
    var, log = eng.new_variable(), []
    eng.push(lambda: None, (), [var], sim(7))
    with pytest.raises(DeviceError, match="no driver"):
        eng.wait_for_var(var)
    eng.delete_variable(var, lambda: log.append("deleted"), sim(7))
    eng.wait_for_all()
    assert log == ["deleted"]
    eng.stop()


def test_arrays_on_simulated_devices(eng):
    """Arithmetic and copies between the host and two devices equal NumPy, although the devices poison freed memory."""
    with engine.using(eng):
        rng = np.random.default_rng(0)
        x = rng.standard_normal((5, 3)).astype(np.float32)
        a, want = mx.nd.array(x, ctx=sim(0)), x.copy()
        for i in range(30):
            a = a * 2 - 1
            want = want * 2 - 1
            a = a.as_in_context((sim(1), cpu(0), sim(0))[i % 3])
            a += a
            want += want
            a = a / 4
            want = want / 4
        np.testing.assert_allclose(a.asnumpy(), want, rtol=1e-5)


def run_chains(monkeypatch, workers, count=4, steps=3):
    """Run ``count`` independent chains of ``steps`` one-second operations on one device.

    Return the virtual seconds until all are done, and the set of streams that each chain used.
    """
    place = SimDevice(sim(30 + workers))
    monkeypatch.setitem(device.registry._devices, place.context, place)
    eng = engine.create("ThreadedEnginePerDevice", gpu_workers=workers)
    chains = [eng.new_variable() for _ in range(count)]
    seen = [set() for _ in chains]
    for _ in range(steps):
        for var, streams in zip(chains, seen, strict=True):

            def work(streams=streams):
                stream = device.current_stream()
                streams.add(stream)
                stream.enqueue(lambda: None, seconds=1.0)

            eng.push(work, (), [var], place.context)
    eng.wait_for_all()
    eng.stop()
    return place.clock, seen


def test_independent_chains_overlap(monkeypatch):
    """Four 3-second chains take 12 virtual seconds on one stream, and from 6 to under 12 on two workers' streams."""
    one, _ = run_chains(monkeypatch, 1)
    two, seen = run_chains(monkeypatch, 2)
    assert one == 12.0
    assert 6.0 <= two < one
    assert len(set().union(*seen)) == 2


def test_chain_continues_the_stream_of_its_inputs():
    """An operation continues its input's stream if nothing was enqueued there after the input, else takes another."""
    eng = engine.create("ThreadedEnginePerDevice", gpu_workers=3)
    a, b, c = (eng.new_variable() for _ in range(3))
    where = {}

    def note(name, reads, writes):
        eng.push(lambda: where.__setitem__(name, device.current_stream()), reads, writes, sim(0), name=name)
        eng.wait_for_all()  # one at a time: the order must not depend on the workers

    note("first", (), [a])
    note("continues", [a], [b])
    note("branches off", [a], [c])  # after `continues` it would wait for unrelated work
    note("joins", [b], [c])
    eng.stop()
    assert where["continues"] is where["first"] is not where["branches off"]
    assert where["joins"] in (where["continues"], where["branches off"])


def test_copies_overlap_with_compute(monkeypatch):
    """Copies to and from a device and computations, two of each of 1 s, take 2 virtual seconds on three streams."""
    place = SimDevice(sim(33))
    monkeypatch.setitem(device.registry._devices, place.context, place)
    eng = engine.create("ThreadedEnginePerDevice", gpu_workers=1)
    streams = set()
    for prop in (FnProperty.COPY_TO_GPU, FnProperty.NORMAL, FnProperty.COPY_FROM_GPU) * 2:

        def work():
            streams.add(device.current_stream())
            device.current_stream().enqueue(lambda: None, seconds=1.0)

        eng.push(work, (), [eng.new_variable()], place.context, prop=prop)
    eng.wait_for_all()
    eng.stop()
    assert len(streams) == 3
    assert place.clock == 2.0
