"""Plans whose results are offloaded to files and other devices, also from CPU contexts: bits, bytes and limits."""

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
    """Make copies cheap, so that plans need no recomputation, whose search takes long."""
    for name in ("FILE", "PEER"):
        monkeypatch.setattr(f"weftplan.planner.spill.search.{name}", Link(bandwidth=1e12, latency=1e-7))


def network(layers=6):
    """Return layers of 1x1 convolution, batch norm, tanh and dropout; backward needs most of their results."""
    net = sym.Variable("data")
    for k in range(layers):
        net = sym.Convolution(net, kernel=(1, 1), num_filter=8, name=f"conv{k}")
        net = sym.BatchNorm(net, fix_gamma=False, name=f"norm{k}")
        net = sym.Activation(net, act_type="tanh", name=f"act{k}")
        net = sym.Dropout(net, p=0.3, name=f"drop{k}")
    return sym.SoftmaxOutput(sym.FullyConnected(sym.Flatten(net), num_hidden=5, name="fc"), name="softmax")


def requests(net):
    """Return the grad_req of all arguments: gradients for parameters only."""
    return {name: "null" if name in SHAPES or "label" in name else "write" for name in net.list_arguments()}


def plain_peak(net, ctx):
    """Return the peak of the plan without a budget, in bytes."""
    return net.plan(SHAPES, grad_req=requests(net), context=ctx).peak


def train(net, ctx, **options):
    """Train for two steps; return the executor and the bytes of its outputs, gradients and states."""
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
    """Return the context of each copy of an offloaded result."""
    planned = executor.planned
    return [
        planned.devices[nid] for nid, node in enumerate(planned.graph.nodes) if node.attrs.get("__spill__") == "out"
    ]


@pytest.mark.parametrize("kind", ["NaiveEngine", "ThreadedEngine", "ThreadedEnginePerDevice", "Simulator"])
@pytest.mark.parametrize(("place", "target"), [("cpu", "file"), ("sim", "file"), ("sim", "peer"), ("cpu", "peer")])
def test_half_the_memory_gives_the_same_bits(kind, place, target, folder):
    """With half the plain peak as budget, results are offloaded to the target, and training has the same bits."""
    net, make = network(), getattr(mx, place)
    ctx, peer = make(next(DEVICES)), make(next(DEVICES))
    _, want = train(net, ctx)
    targets = {"spill": f"file:{folder}"} if target == "file" else {"spill": "peer", "peers": (str(peer),)}
    half = plain_peak(net, ctx) // 2
    with engine.using(engine.create(kind)):
        executor, got = train(net, ctx, budget=half, **targets)
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
def test_targets_hold_the_planned_bytes_up_to_their_limits(place, folder):
    """The device and each offload target allocate the planned bytes; when a target is full, the next one is used."""
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


def test_plans_and_arrays_share_the_limit_of_a_target(folder):
    """Bytes of an executor and of an array in a target are not available to a second executor until they are freed."""
    net, ctx = network(), mx.cpu(next(DEVICES))
    half = plain_peak(net, ctx) // 2
    text = f"file:{folder}:1MiB"
    target = OffloadTarget("file", 1 << 20, str(folder))
    peer = {"peers": (str(mx.cpu(next(DEVICES))),)}
    _, want = train(net, ctx)
    first, got = train(net, ctx, budget=half, spill=f"{text},peer", **peer)
    there = first.memory_plan.peak_by_device[FILE]
    assert got == want
    assert 0 < there < target.nbytes
    assert offload.reserved_bytes(target) == there
    kept = offload.offload(np.zeros(target.nbytes - there - (64 << 10), np.uint8), ctx, (target,), "an array")
    second, got = train(net, ctx, budget=half, spill=f"{text},peer", **peer)
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


def test_plan_for_more_than_is_left_is_refused(folder):
    """Memory for a plan that needs more than is left in the target is refused, and the reserved bytes do not change."""
    net, ctx, target = network(), mx.cpu(next(DEVICES)), OffloadTarget("file", 2 << 20, str(folder))
    half = plain_peak(net, ctx) // 2
    executor, _ = train(net, ctx, budget=half, spill=f"file:{folder}:2MiB")
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


def test_slow_target_is_combined_with_recomputation(monkeypatch, folder):
    """With the link of a disk, some results are offloaded and others recomputed, and training has the same bits."""
    monkeypatch.setattr("weftplan.planner.spill.search.FILE", DISK)
    net, ctx = network(layers=3), mx.cpu(next(DEVICES))
    _, want = train(net, ctx)
    executor, got = train(net, ctx, budget=plain_peak(net, ctx) // 2, spill=f"file:{folder}")
    assert spills(executor)
    assert any(node.mirror_of is not None for node in executor.planned.graph.nodes)
    assert got == want


def test_variable_names_the_targets_of_plans(monkeypatch, folder):
    """``WEFTPLAN_SPILL`` is read at each plan; ``true`` means page-locked memory, which is no target for a CPU."""
    net, ctx = network(layers=2), mx.cpu(next(DEVICES))
    half = int(plain_peak(net, ctx) * 0.7)
    for text, there in (("true", False), (f"file:{folder}", True), ("false", False)):
        monkeypatch.setenv("WEFTPLAN_SPILL", text)
        plan = net.plan(SHAPES, grad_req=requests(net), context=ctx, options=PlanOptions.from_environment(budget=half))
        assert bool(plan.offloaded) is there
        assert ("in file(0)" in " ".join(plan.notes)) is there


def test_peers_are_sorted_by_room(folder):
    """Peers of ``simple_bind`` are other devices in use, those with more free memory first."""
    net = network(layers=3)
    ctx, tight, wide = (mx.sim(next(DEVICES)) for _ in range(3))
    held = [mx.nd.zeros((1 << 20,), ctx=tight), mx.nd.zeros((1,), ctx=wide)]
    mx.nd.waitall()
    executor, _ = train(net, ctx, budget=int(plain_peak(net, ctx) * 0.8), spill="peer")
    peers = executor.memory_plan.options.peers
    assert peers.index(str(wide)) < peers.index(str(tight))
    assert str(ctx) not in peers
    assert set(spills(executor)) == {mx.Context.parse(peers[0])}
    del held


def test_a_device_that_computes_is_no_peer():
    """A device of the graph is no offload target, because its bytes count against the budget."""
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
    """An option that is no list of targets or devices raises an error that names the option."""
    with pytest.raises(PlanError, match=next(iter(wrong))):
        PlanOptions(**wrong)


def test_a_folder_has_one_number(folder, tmp_path_factory):
    """``file(0)`` cannot change to another folder while the process runs."""
    second = tmp_path_factory.mktemp("other")
    net, ctx = network(), mx.cpu(next(DEVICES))
    options = {"budget": plain_peak(net, ctx) // 2, "spill": f"file:{second}"}
    with pytest.raises(DeviceError, match="cannot become"):
        train(net, ctx, **options)


def test_file_copies_run_in_parallel():
    """A copy to a file, a copy from it and an operation on the CPU run in parallel: each waits for the others."""
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


def test_finalizers_do_not_wait_for_the_lock_of_targets(folder):
    """Freeing offloaded bytes does not wait for the lock of the counts, because a finalizer may run while it is held.

    The bytes are subtracted afterwards.
    """
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
    assert not alive, "freeing waits for the lock"
    assert (offload.reserved_bytes(target), offload.waiting_bytes()) == (before, waited)


def test_unused_devices_are_peers():
    """Unused GPUs of the machine, and simulated devices that were configured, are offload targets."""
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
def test_collector_flags_without_effect_warn(monkeypatch, clean_environment, name):
    """A flag of the garbage collector warns in a static executor and names the remedy; in a dynamic one it does not."""
    monkeypatch.setenv(name, "1")
    with pytest.warns(ConfigWarning, match=f"{name} has no effect.*WEFTPLAN_EXECUTOR_STRATEGY=dynamic"):
        network().simple_bind(mx.cpu(), **SHAPES)
    config._reset_for_tests()
    monkeypatch.setenv("WEFTPLAN_EXECUTOR_STRATEGY", "dynamic")
    network().simple_bind(mx.cpu(), **SHAPES)
