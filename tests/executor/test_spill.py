"""Results offloaded to the host, on simulated devices: equal bits, planned bytes, and copies during computation."""

import itertools

import numpy as np
import pytest

import weftplan as mx
from weftplan import device, engine, planner, storage, sym
from weftplan.device.offload_targets import Link
from weftplan.device.simulated import CostModel, configure
from weftplan.errors import OutOfMemoryError
from weftplan.storage.adaptors import PoisonResource
from weftplan.storage.raw import RawResource

ENGINES = ["NaiveEngine", "ThreadedEngine", "ThreadedEnginePerDevice", "Simulator"]
DEVICES = itertools.count(100)
"""Numbers of simulated devices; each use takes a new device, because a device has a clock and a capacity."""


def network(dropout=0.0, layers=6):
    """Return layers of 1x1 convolution, batch norm, tanh and dropout; backward needs most of their results."""
    net = sym.Variable("data")
    for k in range(layers):
        net = sym.Convolution(net, kernel=(1, 1), num_filter=8, name=f"conv{k}")
        net = sym.BatchNorm(net, fix_gamma=False, name=f"norm{k}")
        net = sym.Activation(net, act_type="tanh", name=f"act{k}")
        if dropout:
            net = sym.Dropout(net, p=dropout, name=f"drop{k}")
    return sym.SoftmaxOutput(sym.FullyConnected(sym.Flatten(net), num_hidden=5, name="fc"), name="softmax")


SHAPES = {"data": (8, 3, 16, 16)}


def requests(net):
    """Return the grad_req of all arguments: gradients for parameters only."""
    return {name: "null" if name in ("data", "softmax_label") else "write" for name in net.list_arguments()}


def bound(net, ctx, share=None, shared=None, shapes=None, **options):
    """Return an executor with fixed contents, and with a budget of ``share`` of its plain peak unless this is None."""
    shapes = SHAPES if shapes is None else shapes
    reqs = requests(net)
    if share is not None:
        options["budget"] = int(net.plan(shapes, grad_req=reqs, context=ctx).peak * share)
    chosen = planner.PlanOptions.from_environment(**options)
    executor = net.simple_bind(ctx, grad_req=reqs, plan_options=chosen, shared_exec=shared, **shapes)
    fill(executor)
    return executor


def fill(executor):
    """Write fixed values to every argument and state."""
    seeded = np.random.default_rng(3)
    for _, array in sorted(executor.arg_dict.items()):
        array[:] = (seeded.standard_normal(array.shape) * 0.3).astype("float32")
    executor.arg_dict["softmax_label"][:] = np.arange(executor.arg_dict["softmax_label"].shape[0]) % 5
    for name, array in executor.aux_dict.items():
        array[:] = 1.0 if name.endswith("var") else 0.0


def train(executor, runs=2):
    """Run ``runs`` training steps and return the bytes of outputs, gradients and states."""
    mx.random.seed(7)
    for _ in range(runs):
        executor.forward(is_train=True)
        executor.backward()
    arrays = (*executor.outputs, *executor.grad_arrays, *executor.aux_arrays)
    return [array.asnumpy().tobytes() for array in arrays if array is not None]


def spills(executor):
    """Return the nodes that copy results to the host."""
    return [node for node in executor.planned.graph.nodes if node.attrs.get("__spill__") == "out"]


@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize("order", ["lazy", "random"])
@pytest.mark.parametrize("bulk", ["0", "1"])
def test_same_bits_with_results_on_the_host(monkeypatch, kind, order, bulk):
    """On every engine, with any order of streams, training with offloaded results has the bits of training without.

    Memory of simulated devices is poisoned when it is allocated and freed. A copy that did not wait for its source, and
    memory reused before its copy has ended, would give wrong bits.
    """
    ctx = mx.sim(next(DEVICES))
    want = train(bound(network(dropout=0.3), ctx))
    monkeypatch.setenv("MXNET_EXEC_BULK_EXEC_TRAIN", bulk)
    configure(ctx.device_id, order=order, seed=5)
    with engine.using(engine.create(kind)):
        executor = bound(network(dropout=0.3), ctx, share=0.7)
        assert len(spills(executor)) >= 2
        planner.validate(executor.planned)
        assert train(executor) == want


@pytest.mark.parametrize("strategy", ["auto", "arena", "match_range"])
def test_bytes_on_both_sides_are_the_planned_ones(strategy):
    """The device and the host allocate exactly the planned bytes."""
    ctx = mx.sim(next(DEVICES))
    host = mx.Context("cpu_pinned", ctx.device_id)
    net = network()
    with storage.using(PoisonResource(RawResource(device.get(ctx)))) as near:
        plain = bound(net, ctx, strategy=strategy)
        assert plain.memory_plan.on_host == 0
        before = near.statistics().requested_bytes, storage.get(host).statistics().requested_bytes
        options = planner.PlanOptions.from_environment(budget=int(plain.memory_plan.peak * 0.7), strategy=strategy)
        reqs = requests(net)
        arguments = [plain.arg_arrays, plain.grad_arrays, plain.aux_arrays]
        executor = net.bind(ctx, *arguments[:2], grad_req=reqs, aux_states=arguments[2], plan_options=options)
        plan = executor.memory_plan
        gained = (
            near.statistics().requested_bytes - before[0],
            storage.get(host).statistics().requested_bytes - before[1],
        )
        assert gained == (plan.peak_by_device[ctx], plan.peak_by_device[host])
        assert plan.on_host == plan.peak_by_device[host] > 0
        assert plan.peak == executor.allocated_bytes == sum(gained)
        assert plan.peak - plan.on_host <= plan.options.budget
        del plain, executor, arguments
        mx.nd.waitall()


def test_a_device_too_small_for_the_network_trains_it():
    """On a device that is too small for the plain plan, a bind with a budget trains to the same bits."""
    net = network()
    want = train(bound(net, mx.cpu()))
    ctx = mx.sim(next(DEVICES))
    reqs = requests(net)
    plain = net.plan(SHAPES, grad_req=reqs, context=ctx)
    around = sum(plain.external_bytes.values())
    with storage.using(PoisonResource(RawResource(device.get(ctx)))):
        configure(ctx.device_id, capacity=around + int(plain.peak * 0.8))
        with pytest.raises(OutOfMemoryError):
            bound(net, ctx)
        executor = net.simple_bind(ctx, grad_req=reqs, memory_budget=around + int(plain.peak * 0.75), **SHAPES)
        fill(executor)
        assert spills(executor)
        assert train(executor) == want
        del executor
        mx.nd.waitall()


def test_recomputation_and_offloading_together(monkeypatch):
    """On a link of middle speed, plans both recompute and offload results, and training has the same bits."""
    monkeypatch.setattr("weftplan.planner.spill.search.PCIE", Link(bandwidth=3e9, latency=1e-5))
    net = network(dropout=0.3, layers=3)
    ctx = mx.sim(next(DEVICES))
    want = train(bound(net, ctx))
    mixed = 0
    for share in (0.75, 0.6):
        executor = bound(net, ctx, share=share)
        planner.validate(executor.planned)
        assert train(executor) == want, share
        nodes = executor.planned.graph.nodes
        mixed += bool(spills(executor)) and any(node.mirror_of is not None for node in nodes)
    assert mixed


def test_inference_copies_nothing_to_the_host():
    """A forward run with ``is_train=False`` does not write to the host's memory."""
    ctx = mx.sim(next(DEVICES))
    executor = bound(network(), ctx, share=0.7)
    planned = executor.planned
    out = next(nid for nid in planned.order if planned.graph.nodes[nid].attrs.get("__spill__") == "out")
    executor._prepare_once()  # creates the arrays of all planned entries
    host = executor._memory.entry(planned.graph.row[out])
    host[:] = 5.0
    executor.forward(is_train=False)[0].wait_to_read()
    assert (host.asnumpy() == 5.0).all()
    executor.forward(is_train=True)[0].wait_to_read()
    assert (host.asnumpy() != 5.0).any()


def seconds_of_a_run(share, bandwidth):
    """Return the virtual seconds of a run with kernels of 1 ms, and the seconds that its copies take."""
    ctx = mx.sim(next(DEVICES))
    place = configure(ctx.device_id, cost=CostModel(launch=1e-3, latency=1e-5, bandwidth=bandwidth))
    with engine.using(engine.create("ThreadedEnginePerDevice", gpu_workers=1)):
        executor = bound(network(), ctx, share)
        train(executor, runs=1)
        mx.nd.waitall()
        place.synchronize()
        before = place.clock
        train(executor, runs=1)
        place.synchronize()
        out = sum(
            executor.planned.memory.entry_nbytes[executor.planned.graph.row[nid]]
            for nid, node in enumerate(executor.planned.graph.nodes)
            if node in spills(executor)
        )
        return place.clock - before, 2 * float(out) / bandwidth


def test_copies_overlap_with_computation():
    """Kernels of 1 ms hide at least half of the time of copies.

    Copies that take much longer than the run are not hidden, which shows that the clock counts copies.
    """
    plain, _ = seconds_of_a_run(None, 1e9)
    hidden, copying = seconds_of_a_run(0.7, 1.2e8)
    assert copying > 0.1 * plain
    assert hidden < plain + 0.5 * copying
    shown, copying = seconds_of_a_run(0.7, 1e6)
    assert shown > max(plain, 0.5 * copying)


def test_executors_with_results_on_the_host_share_their_memory():
    """A pool of two executors has the same bytes for both orders of binding, and both compute the right values."""
    net = network()
    sizes = [{"data": (4, 3, 16, 16)}, {"data": (8, 3, 16, 16)}]
    want = [train(bound(net, mx.cpu(), shapes=shapes)) for shapes in sizes]
    held = []
    for order in ((0, 1), (1, 0)):
        ctx = mx.sim(next(DEVICES))
        bindings = {}
        for k in order:
            first = next(iter(bindings.values()), None)
            bindings[k] = bound(net, ctx, share=0.7, shapes=sizes[k], shared=first)
            if first is not None:
                assert spills(first)
        for k in (*order, *order):
            fill(bindings[k])
            assert train(bindings[k]) == want[k]
        held.append(sorted(bindings[0].pool.nbytes.values()))
    assert held[0] == held[1]


def test_budget_on_a_cpu_offloads_nothing():
    """A budget on a CPU offloads nothing, because the target would be the same memory."""
    executor = bound(network(layers=3), mx.cpu(), share=0.8)
    assert not spills(executor)
    assert executor.memory_plan.on_host == 0


def test_two_devices_offload_to_separate_host_memory():
    """Each of two devices offloads results to its own host memory, and training has the same bits."""
    first, second = (mx.sim(next(DEVICES)) for _ in range(2))
    groups = {"low": first, "high": second}

    def halves():
        net = sym.Variable("data")
        for group in ("low", "high"):
            with mx.AttrScope(ctx_group=group):
                for k in range(3):
                    net = sym.Convolution(net, kernel=(1, 1), num_filter=8, name=f"{group}{k}")
                    net = sym.Activation(sym.BatchNorm(net, name=f"{group}norm{k}"), act_type="tanh")
        with mx.AttrScope(ctx_group="high"):
            return sym.SoftmaxOutput(sym.FullyConnected(sym.Flatten(net), num_hidden=5), name="softmax")

    def run(where, budget):
        net = halves()
        options = planner.PlanOptions.from_environment(budget=budget)
        executor = net.simple_bind(
            where["low"], grad_req=requests(net), group2ctx=where, plan_options=options, **SHAPES
        )
        fill(executor)
        return executor, train(executor)

    plain, want = run(groups, None)
    executor, got = run(groups, int(plain.memory_plan.peak * 0.6))
    assert got == want == run({"low": mx.cpu(0), "high": mx.cpu(1)}, None)[1]
    planner.validate(executor.planned)
    held = executor.pool.nbytes
    assert held == executor.memory_plan.peak_by_device
    for ctx in (first, second):
        assert held[mx.Context("cpu_pinned", ctx.device_id)] > 0
        assert held[ctx] < plain.pool.nbytes[ctx]
