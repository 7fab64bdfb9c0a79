"""Plans under a budget whose results wait in files and on other devices, of CPU contexts too: bits, bytes, limits."""

import gc
import itertools
import threading

import numpy as np
import pytest

import weftplan as mx
from tests.contract.devices import place as kind_of_place
from weftplan import config, device, engine, planner, storage, sym
from weftplan.device.offload_targets import Link, OffloadTarget, parse
from weftplan.engine import FnProperty
from weftplan.errors import ConfigWarning, DeviceError, OutOfMemoryError, PlanError
from weftplan.executor.memory import PlannedMemory
from weftplan.executor.pool import SlabPool
from weftplan.planner import PlanOptions
from weftplan.planner.spill.search import FILE as DISK
from weftplan.storage import RawResource, offload

DEVICES = itertools.count(9300)
FILE = mx.Context("file", 0)
SHAPES = {"data": (8, 3, 16, 16)}


@pytest.fixture(autouse=True)
def fast_links(monkeypatch):
    """Copies cost little, so that plans need no repetition besides, which takes long to plan."""
    for name in ("FILE", "PEER"):
        monkeypatch.setattr(f"weftplan.planner.spill.search.{name}", Link(bandwidth=1e12, latency=1e-7))


def network(layers=6):
    """Pointwise convolutions, whose scratch is small, batch norm, activations, dropout: backward needs most results."""
    net = sym.Variable("data")
    for k in range(layers):
        net = sym.Convolution(net, kernel=(1, 1), num_filter=8, name=f"conv{k}")
        net = sym.BatchNorm(net, fix_gamma=False, name=f"norm{k}")
        net = sym.Activation(net, act_type="tanh", name=f"act{k}")
        net = sym.Dropout(net, p=0.3, name=f"drop{k}")
    return sym.SoftmaxOutput(sym.FullyConnected(sym.Flatten(net), num_hidden=5, name="fc"), name="softmax")


def requests(net):
    """Gradients of the parameters alone."""
    return {name: "null" if name in SHAPES or "label" in name else "write" for name in net.list_arguments()}


def plain_peak(net, ctx):
    """Return the bytes of the plan without a budget."""
    return net.plan(SHAPES, grad_req=requests(net), context=ctx).peak


def trained(net, ctx, **options):
    """Return (executor, bytes of its arrays after two steps)."""
    executor = net.simple_bind(ctx, grad_req=requests(net), options=PlanOptions.from_environment(**options), **SHAPES)
    seeded = np.random.default_rng(3)
    for _, array in sorted(executor.arg_dict.items()):
        array[:] = (seeded.standard_normal(array.shape) * 0.3).astype("float32")
    executor.arg_dict["softmax_label"][:] = np.arange(8) % 5
    for name, array in executor.aux_dict.items():
        array[:] = 1.0 if name.endswith("var") else 0.0
    mx.random.seed(7)
    for _ in range(2):
        executor.forward(is_train=True)
        executor.backward()
    arrays = (*executor.outputs, *executor.grad_arrays, *executor.aux_arrays)
    return executor, [array.asnumpy().tobytes() for array in arrays if array is not None]


def spills(executor):
    """Return the contexts that hold offloaded results of an executor."""
    planned = executor.planned
    return [
        planned.devices[nid] for nid, node in enumerate(planned.graph.nodes) if node.attrs.get("__spill__") == "out"
    ]


@pytest.mark.parametrize("kind", ["NaiveEngine", "ThreadedEngine", "ThreadedEnginePerDevice", "Simulator"])
@pytest.mark.parametrize(("place", "target"), [("cpu", "file"), ("sim", "file"), ("sim", "peer"), ("cpu", "peer")])
def test_half_the_memory_gives_the_same_bits(kind, place, target, folder):
    """Training under half the planned peak offloads results; the bits are those of the run without a budget."""
    net, make = network(), getattr(mx, place)
    ctx, peer = make(next(DEVICES)), make(next(DEVICES))
    _, want = trained(net, ctx)
    targets = {"spill": f"file:{folder}"} if target == "file" else {"spill": "peer", "peers": (str(peer),)}
    half = plain_peak(net, ctx) // 2
    with engine.using(engine.create(kind)):
        executor, got = trained(net, ctx, budget=half, **targets)
        planner.validate(executor.planned)
        assert set(spills(executor)) == {FILE if target == "file" else peer}
        plan = executor.memory_plan
        assert plan.peak_by_device[ctx] <= half
        assert plan.offloaded == plan.peak - plan.peak_by_device[ctx] > 0
        assert plan.on_host == 0
        assert plan.counted == plan.total - plan.offloaded
        assert got == want
        del executor
        gc.collect()
        mx.nd.waitall()


@pytest.mark.parametrize("place", ["cpu", "sim"])
def test_each_home_holds_the_planned_bytes_up_to_its_limit(place, folder):
    """Storage of the device and of every offload target holds the planned bytes; a full target is followed by the
    next."""
    net, ctx = network(), getattr(mx, place)(next(DEVICES))
    first = "host:160KiB" if place == "sim" else f"file:{folder}:160KiB"
    second = f"file:{folder}" if place == "sim" else "peer"
    peer = getattr(mx, place)(next(DEVICES))
    half = plain_peak(net, ctx) // 2
    rooms = {c: RawResource(device.get(c)) for c in (ctx, FILE, peer, mx.Context("cpu_pinned", ctx.device_id))}
    with storage.using(rooms[ctx]), storage.using(rooms[FILE]), storage.using(rooms[peer]):
        options = PlanOptions.from_environment(budget=half, spill=f"{first},{second}", peers=(str(peer),))
        plain = net.simple_bind(ctx, grad_req=requests(net), **SHAPES)
        before = {c: storage.get(c).statistics().requested_bytes for c in rooms}
        executor = net.bind(
            ctx, plain.arg_arrays, plain.grad_arrays, requests(net), aux_states=plain.aux_arrays, options=options
        )
        plan = executor.memory_plan
        gained = {c: storage.get(c).statistics().requested_bytes - before[c] for c in rooms}
        assert {c: n for c, n in gained.items() if n} == {c: n for c, n in plan.peak_by_device.items() if n}
        used = set(spills(executor))
        assert len(used) == 2
        small = mx.Context("cpu_pinned", ctx.device_id) if place == "sim" else FILE
        assert 0 < plan.peak_by_device[small] <= 160 << 10
        assert type(plan).from_json(plan.to_json()).offloaded == plan.offloaded
        del plain, executor
        gc.collect()
        mx.nd.waitall()


def test_plans_and_arrays_share_the_limit_of_a_home(folder):
    """Bytes of a first executor and of arrays in an offload target are unavailable to a second executor, which is
    planned for the remainder; they are available again afterwards."""
    net, ctx = network(), mx.cpu(next(DEVICES))
    half = plain_peak(net, ctx) // 2
    text = f"file:{folder}:1MiB"
    target = OffloadTarget("file", 1 << 20, str(folder))
    peer = {"peers": (str(mx.cpu(next(DEVICES))),)}
    _, want = trained(net, ctx)
    first, got = trained(net, ctx, budget=half, spill=f"{text},peer", **peer)
    there = first.memory_plan.peak_by_device[FILE]
    assert got == want
    assert 0 < there < target.nbytes
    assert offload.reserved_bytes(target) == there
    kept = offload.offload(np.zeros(target.nbytes - there - (64 << 10), np.uint8), ctx, (target,), "an array")
    second, got = trained(net, ctx, budget=half, spill=f"{text},peer", **peer)
    assert got == want
    remaining = (64 << 10) - second.memory_plan.peak_by_device[FILE]
    assert 0 <= remaining < 64 << 10
    assert offload.reserved_bytes(target) == target.nbytes - remaining
    with pytest.raises(OutOfMemoryError, match="too few are left"):
        offload.offload(np.zeros(remaining + 1, np.uint8), ctx, (target,), "another array")
    kept.free()
    del first, second
    gc.collect()
    mx.nd.waitall()
    assert offload.reserved_bytes(target) == 0


def test_a_plan_that_was_made_for_more_than_is_left_is_refused(folder):
    """Its memory is not taken, and the offload target has what it had."""
    net, ctx, target = network(), mx.cpu(next(DEVICES)), OffloadTarget("file", 2 << 20, str(folder))
    half = plain_peak(net, ctx) // 2
    executor, _ = trained(net, ctx, budget=half, spill=f"file:{folder}:2MiB")
    planned = executor.planned
    pool, there = SlabPool(), offload.reserved_bytes(target)
    kept = offload.offload(np.zeros(target.nbytes - there - 4096, np.uint8), ctx, (target,), "an array")
    with pytest.raises(OutOfMemoryError, match="of which others have 2,093,056"):
        PlannedMemory(planned, pool)
    assert pool.nbytes == {}
    kept.free()
    assert offload.reserved_bytes(target) == there
    memory = PlannedMemory(planned, pool)
    assert offload.reserved_bytes(target) == 2 * there
    del executor, memory, pool
    gc.collect()
    mx.nd.waitall()
    assert offload.reserved_bytes(target) == 0


def test_a_slow_home_is_mixed_with_repetition(monkeypatch, folder):
    """Over the link of a disk some results wait in the file and others are computed again; the bits are the same."""
    monkeypatch.setattr("weftplan.planner.spill.search.FILE", DISK)
    net, ctx = network(layers=3), mx.cpu(next(DEVICES))
    _, want = trained(net, ctx)
    executor, got = trained(net, ctx, budget=plain_peak(net, ctx) // 2, spill=f"file:{folder}")
    assert spills(executor)
    assert any(node.mirror_of is not None for node in executor.planned.graph.nodes)
    assert got == want


def test_the_variable_names_homes_of_plans(monkeypatch, folder):
    """``WEFTPLAN_SPILL`` is read at every bind; ``true`` means page-locked memory, which a CPU has no use for."""
    net, ctx = network(layers=2), mx.cpu(next(DEVICES))
    half = int(plain_peak(net, ctx) * 0.7)
    for text, there in (("true", False), (f"file:{folder}", True), ("false", False)):
        monkeypatch.setenv("WEFTPLAN_SPILL", text)
        plan = net.plan(SHAPES, grad_req=requests(net), context=ctx, options=PlanOptions.from_environment(budget=half))
        assert bool(plan.offloaded) is there
        assert ("in file(0)" in " ".join(plan.notes)) is there


def test_peers_are_the_devices_in_use_with_most_room_first(folder):
    """``simple_bind`` names devices of the same kind with allocated memory, and never the device itself."""
    net = network(layers=3)
    ctx, tight, wide = (mx.sim(next(DEVICES)) for _ in range(3))
    held = [mx.nd.zeros((1 << 20,), ctx=tight), mx.nd.zeros((1,), ctx=wide)]
    mx.nd.waitall()
    executor, _ = trained(net, ctx, budget=int(plain_peak(net, ctx) * 0.8), spill="peer")
    peers = executor.memory_plan.options.peers
    assert peers.index(str(wide)) < peers.index(str(tight))
    assert str(ctx) not in peers
    assert set(spills(executor)) == {mx.Context.parse(peers[0])}
    del held


def test_a_device_that_computes_is_no_peer():
    """A peer that the graph uses otherwise would hold bytes that a budget has to count."""
    net, ctx = network(layers=2), mx.sim(next(DEVICES))
    options = PlanOptions(budget=int(plain_peak(net, ctx) * 0.8), spill="peer", peers=(str(ctx),))
    plan = net.plan(SHAPES, grad_req=requests(net), context=ctx, options=options)
    assert plan.offloaded == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"spill": "disc"},
        {"spill": 3},
        {"spill": "host:5"},
        {"peers": "sim(1)"},
        {"peers": ("sim",)},
        {"spill_taken": (-1,)},
    ],
    ids=str,
)
def test_bad_options_are_refused(wrong):
    """A value that is no list of targets or devices is an error that names the option."""
    with pytest.raises(PlanError, match=next(iter(wrong))):
        PlanOptions(**wrong)


def test_a_folder_has_one_number(folder, tmp_path_factory):
    """``file(0)`` cannot become another folder while a process uses it."""
    second = tmp_path_factory.mktemp("other")
    net, ctx = network(), mx.cpu(next(DEVICES))
    options = {"budget": plain_peak(net, ctx) // 2, "spill": f"file:{second}"}
    with pytest.raises(DeviceError, match="cannot become"):
        trained(net, ctx, **options)


def test_files_are_written_and_read_beside_the_computation():
    """A copy to a file, one from it and an operation of the CPU run at the same time: each waits for the others."""
    meeting = threading.Barrier(3, timeout=60)
    with engine.using(engine.create("ThreadedEnginePerDevice")) as current:
        for ctx, prop in (
            (mx.cpu(0), FnProperty.NORMAL),
            (FILE, FnProperty.COPY_TO_GPU),
            (FILE, FnProperty.COPY_FROM_GPU),
        ):
            current.push(meeting.wait, (), (current.new_variable(),), ctx, prop=prop)
        current.wait_for_all()
        assert not meeting.broken


def test_finalizers_wait_for_nobody_who_counts_bytes_of_homes(folder):
    """Python collects garbage anywhere, also on the thread that counts: what ends there gives its bytes back all the
    same, and they count no more afterwards."""
    target = OffloadTarget("file", folder=str(folder), nbytes=1 << 20)
    device.name_folders((target,))
    before, waited = offload.reserved_bytes(target), offload.waiting_bytes()
    room = offload.Reservation()
    room.hold(mx.Context("file", 0), target, 4096)
    kept = offload.offload(np.zeros(2048, np.uint8), mx.cpu(0), (target,), "test")
    assert (offload.reserved_bytes(target), offload.waiting_bytes()) == (before + 6144, waited + 2048)
    threads = [threading.Thread(target=end, daemon=True) for end in (room.free, kept.free)]
    with offload._lock:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        alive = [thread for thread in threads if thread.is_alive()]
    assert not alive, "they wait for the one that counts"
    assert (offload.reserved_bytes(target), offload.waiting_bytes()) == (before, waited)


def test_peers_are_found_before_they_are_used():
    """Unused GPUs of the machine are offload targets, and simulated devices that have been set up."""
    with kind_of_place("standin") as context:
        assert offload.peers(context(0)) == [context(1), context(2), context(3)]
        raw = device.get(context(0)).allocate(1 << 12)
        raw.fill(3)
        kept = offload.offload(raw, context(0), parse("peer"), "an array")
        assert kept.context in (context(1), context(2), context(3))
        back = device.get(context(0)).allocate(1 << 12)
        kept.read(back, context(0))
        assert (back.get() == 3).all()
        kept.free()
        del kept, raw, back
        gc.collect()
    mine, second = mx.sim(next(DEVICES)), mx.sim(next(DEVICES))
    device.get(second)
    assert second in offload.peers(mine)


@pytest.mark.parametrize(
    "name",
    ["FLAGS_memory_fraction_of_eager_deletion", "FLAGS_fast_eager_deletion_mode", "FLAGS_eager_delete_scope"],
)
def test_flags_of_the_collector_say_when_they_do_nothing(monkeypatch, clean_environment, name):
    """Set while the executor is static, they are named, with the cure; not while it is dynamic."""
    monkeypatch.setenv(name, "1")
    with pytest.warns(ConfigWarning, match=f"{name} has no effect.*WEFTPLAN_EXECUTOR_STRATEGY=dynamic"):
        network().simple_bind(mx.cpu(), **SHAPES)
    config._reset_for_tests()
    monkeypatch.setenv("WEFTPLAN_EXECUTOR_STRATEGY", "dynamic")
    network().simple_bind(mx.cpu(), **SHAPES)
