"""Every environment variable of planner and executor changes the allocated bytes or the pushed operations.

Each case fails if its variable has no effect. None changes a bit of the results of these networks;
``test_gradient_sums.py`` has the variables that change the order of a sum.
"""

import numpy as np
import pytest

import weftplan as mx
from weftplan import engine, planner, sym
from weftplan.planner.storage_assignment import Kind


def chain():
    """Return data -> exp -> sqrt -> square -> exp; each operator can overwrite its input."""
    net = mx.sym.Variable("data")
    for kind in (sym.exp, sym.sqrt, sym.square, sym.exp):
        net = kind(net * 0.1)
    return net


def layers(widths):
    """Return dense layers of these widths; no layer can run in place."""
    net = mx.sym.Variable("data")
    for k, width in enumerate(widths):
        net = sym.FullyConnected(net, num_hidden=width, name=f"fc{k}")
    return net


def branches():
    """Return three parallel chains of dense layers, whose results are added."""
    data = mx.sym.Variable("data")
    ends = []
    for branch in range(3):
        net = data
        for k in range(4):
            net = sym.FullyConnected(net, num_hidden=16 * (k + 1 + branch), name=f"b{branch}_{k}")
        ends.append(sym.sum(net, axis=1, name=f"b{branch}_end"))
    return sym.add_n(*ends)


def fan(readers):
    """Return a wide layer with ``readers`` readers, so that its gradient is a sum of as many terms."""
    wide = sym.FullyConnected(mx.sym.Variable("data"), num_hidden=500, name="wide")
    ends = [sym.FullyConnected(wide, num_hidden=1, name=f"end{k}") for k in range(readers)]
    return sym.MakeLoss(sym.add_n(*ends))


def twice():
    """Return a network with two equal wide expressions."""
    wide = sym.FullyConnected(mx.sym.Variable("data"), num_hidden=500, name="wide")
    first, second = (sym.FullyConnected(sym.tanh(wide), num_hidden=9, name=f"fc{k}") for k in range(2))
    return sym.MakeLoss(first * second)


def deep(activations=6):
    """Return four layers, each followed by ``activations`` pairs of activations, whose results backward needs."""
    net = mx.sym.Variable("data")
    for k in range(4):
        net = sym.FullyConnected(net, num_hidden=64, name=f"fc{k}")
        for _ in range(activations):
            net = sym.sigmoid(sym.tanh(net))
    return sym.MakeLoss(sym.sum(net))


def bound(net, training):
    """Return an executor with fixed contents, with gradients if ``training``."""
    executor = net.simple_bind(mx.cpu(), data=(32, 20), grad_req="write" if training else "null")
    seeded = np.random.default_rng(5)
    for name in sorted(executor.arg_dict):
        array = executor.arg_dict[name]
        array[:] = seeded.standard_normal(array.shape).astype("float32")
    return executor


def results(executor, training):
    """Run once and return the bytes of outputs and gradients."""
    executor.forward(is_train=training)
    if training:
        executor.backward()
    arrays = (*executor.outputs, *executor.grad_arrays)
    return [array.asnumpy().tobytes() for array in arrays if array is not None]


def pushes(executor, training):
    """Return the number of operations of one run."""
    engine.get().wait_for_all()
    before = engine.get().statistics().completed
    executor.forward(is_train=training)
    if training:
        executor.backward()
    engine.get().wait_for_all()
    return engine.get().statistics().completed - before


MEMORY = [
    # (variable, value, other variables, network, training, does the new plan need more or fewer bytes?)
    ("MXNET_EXEC_ENABLE_INPLACE", "0", {}, chain(), False, "more"),
    ("MXNET_EXEC_ENABLE_INPLACE", "0", {"WEFTPLAN_PLANNER_STRATEGY": "arena"}, chain(), False, "more"),
    ("MXNET_EXEC_ENABLE_INPLACE", "0", {"WEFTPLAN_PLANNER_STRATEGY": "match_range"}, chain(), False, "more"),
    ("FLAGS_enable_inplace", "0", {}, chain(), False, "more"),
    ("MXNET_EXEC_MATCH_RANGE", "0", {}, layers([64] * 5), False, "more"),
    ("MXNET_EXEC_MATCH_RANGE", "0", {"WEFTPLAN_PLANNER_STRATEGY": "arena"}, layers([64] * 5), False, "more"),
    ("MXNET_EXEC_MATCH_RANGE", "0", {"WEFTPLAN_PLANNER_STRATEGY": "match_range"}, layers([64] * 5), False, "more"),
    (
        "MXNET_EXEC_MATCH_RANGE",
        "1",
        {"WEFTPLAN_PLANNER_STRATEGY": "match_range"},
        layers([300, 200, 290, 210, 280]),
        False,
        "more",
    ),
    (
        "NNVM_AUTO_SEARCH_MATCH_RANGE",
        "1",
        {"WEFTPLAN_PLANNER_STRATEGY": "match_range"},
        layers([600, 16, 64, 100, 16]),
        False,
        "fewer",
    ),
    ("MXNET_EXEC_NUM_TEMP", "8", {}, branches(), False, "more"),
    ("MXNET_EXEC_NUM_TEMP", "8", {"WEFTPLAN_PLANNER_STRATEGY": "arena"}, branches(), False, "more"),
    ("MXNET_EXEC_NUM_TEMP", "8", {"WEFTPLAN_PLANNER_STRATEGY": "match_range"}, branches(), False, "more"),
    ("MXNET_EXEC_NUM_TEMP", "2", {}, branches(), False, "more"),
    ("MXNET_GPU_TEMP_COPY", "8", {}, branches(), False, "more"),
    ("MXNET_GPU_TEMP_COPY", "8", {"MXNET_EXEC_NUM_TEMP": "1"}, branches(), False, "same"),
    ("FLAGS_max_inplace_grad_add", "7", {}, fan(6), True, "fewer"),
    ("FLAGS_max_inplace_grad_add", "6", {}, fan(6), True, "same"),
    ("MXNET_EXEC_INPLACE_GRAD_SUM_CAP", "2", {}, fan(6), True, "fewer"),
    ("MXNET_EXEC_INPLACE_GRAD_SUM_CAP", "0", {}, fan(6), True, "fewer"),
    ("MXNET_EXEC_INPLACE_GRAD_SUM_CAP", "7", {}, fan(9), True, "same"),
    ("MXNET_EXEC_INPLACE_GRAD_SUM_CAP", "10", {}, fan(9), True, "more"),
    ("MXNET_ELIMINATE_COMMON_EXPR", "0", {}, twice(), False, "more"),
    ("MXNET_BACKWARD_DO_MIRROR", "1", {}, deep(), True, "fewer"),
    ("MXNET_MEMORY_OPT", "1", {}, deep(), True, "fewer"),
    ("WEFTPLAN_PLANNER_STRATEGY", "match_range", {}, layers([300, 200, 290, 210, 280]), False, "more"),
]


@pytest.mark.parametrize(("variable", "value", "others", "net", "training", "bytes_"), MEMORY)
@pytest.mark.shows("MXNET_EXEC_NUM_TEMP", "MXNET_EXEC_MATCH_RANGE", "MXNET_EXEC_ENABLE_INPLACE")
@pytest.mark.shows("MXNET_GPU_TEMP_COPY", "FLAGS_max_inplace_grad_add")
@pytest.mark.shows(
    "NNVM_AUTO_SEARCH_MATCH_RANGE", "MXNET_EXEC_INPLACE_GRAD_SUM_CAP", "MXNET_ELIMINATE_COMMON_EXPR", "MXNET_MEMORY_OPT"
)
def test_a_switch_of_the_planner_changes_what_is_allocated_and_no_bit(
    monkeypatch, variable, value, others, net, training, bytes_
):
    """With the variable, allocated bytes change as the table says and equal the plan; results have the same bits."""
    for name, text in others.items():
        monkeypatch.setenv(name, text)
    before = bound(net, training)
    monkeypatch.setenv(variable, value)
    after = bound(net, training)
    for executor in (before, after):
        planner.validate(executor.planned)
        assert executor.allocated_bytes == executor.memory_plan.peak
    change = after.allocated_bytes - before.allocated_bytes
    assert {"more": change > 0, "fewer": change < 0, "same": change == 0}[bytes_], change
    assert results(before, training) == results(after, training)


@pytest.mark.shows("MXNET_BACKWARD_DO_MIRROR")
def test_mirroring_repeats_forward_nodes(monkeypatch):
    """``MXNET_BACKWARD_DO_MIRROR`` and ``MXNET_MEMORY_OPT`` repeat nodes; without them no node is repeated."""
    repeated = {}
    for variable in ("MXNET_BACKWARD_DO_MIRROR", "MXNET_MEMORY_OPT", None):
        with monkeypatch.context() as patch:
            if variable is not None:
                patch.setenv(variable, "1")
            planned = bound(deep(), training=True).planned
        repeated[variable] = sum(node.mirror_of is not None for node in planned.graph.nodes)
    assert repeated[None] == 0
    assert repeated["MXNET_BACKWARD_DO_MIRROR"] > 0
    assert repeated["MXNET_MEMORY_OPT"] > 0


def count_segments(most_forward, most_backward, executor):
    """Return the number of operations of a run whose segments have at most these numbers of nodes.

    A backward segment also ends when gradients of 64 KiB are ready.
    """
    steps = executor.planned.order
    split = executor.planned.num_forward_nodes
    forward = -(-split // most_forward)
    count = waiting = ready = 0
    grads = {e: executor.grad_dict[name].nbytes for name, e in executor.planned.gradients.items()}
    graph = executor.planned.graph
    for nid in steps[split:]:
        waiting += 1
        ready += sum(grads.get(e, 0) for e in range(graph.row[nid], graph.row[nid + 1]))
        if waiting == most_backward or ready >= 1 << 16:
            count, waiting, ready = count + 1, 0, 0
    return forward + count + (waiting > 0)


@pytest.mark.parametrize(
    ("settings", "forward", "backward"),
    [
        ({}, 15, 15),
        ({"MXNET_EXEC_BULK_EXEC_TRAIN": "0"}, 1, 1),
        ({"MXNET_EXEC_BULK_EXEC_MAX_NODE_TRAIN": "4"}, 4, 4),
        ({"MXNET_EXEC_BULK_EXEC_MAX_NODE_TRAIN_FWD": "3"}, 3, 15),
        ({"MXNET_EXEC_BULK_EXEC_MAX_NODE_TRAIN_BWD": "2"}, 15, 2),
        ({"MXNET_EXEC_BULK_EXEC_MAX_NODE_TRAIN": "4", "MXNET_EXEC_BULK_EXEC_MAX_NODE_TRAIN_BWD": "7"}, 4, 7),
        ({"MXNET_EXEC_BULK_EXEC_INFERENCE": "0"}, 15, 15),
    ],
)
@pytest.mark.shows("MXNET_EXEC_BULK_EXEC_TRAIN", "MXNET_EXEC_BULK_EXEC_MAX_NODE_TRAIN*")
def test_bulk_switches_of_training_change_what_is_pushed(monkeypatch, settings, forward, backward):
    """The variables limit the nodes of forward and backward segments, and results have the same bits."""
    monkeypatch.setenv("WEFTPLAN_PLANNER_STRATEGY", "match_range")  # its plans need no fence operation
    plain = results(bound(deep(1), training=True), training=True)
    for name, text in settings.items():
        monkeypatch.setenv(name, text)
    executor = bound(deep(1), training=True)
    assert results(executor, training=True) == plain
    assert pushes(executor, training=True) == count_segments(forward, backward, executor)


@pytest.mark.parametrize(("value", "expected"), [("1", 1), ("0", 5)])
@pytest.mark.shows("MXNET_EXEC_BULK_EXEC_INFERENCE")
def test_the_bulk_switch_of_inference_changes_what_is_pushed(monkeypatch, value, expected):
    """Inference pushes one operation for all nodes, or one for each node if the variable is 0."""
    monkeypatch.setenv("MXNET_EXEC_BULK_EXEC_INFERENCE", value)
    monkeypatch.setenv("MXNET_EXEC_BULK_EXEC_TRAIN", "0")
    executor = bound(layers([8] * 5), training=False)
    results(executor, training=False)
    assert pushes(executor, training=False) == expected


@pytest.mark.parametrize("range_", [0, 1])
def test_range_zero_keeps_in_place_computation(monkeypatch, range_):
    """A match range of 0 disables reuse of memory by later entries, but not computation in place, as in MXNet."""
    monkeypatch.setenv("MXNET_EXEC_MATCH_RANGE", str(range_))
    monkeypatch.setenv("WEFTPLAN_PLANNER_STRATEGY", "match_range")
    kinds = bound(layers([64] * 5) + 1, training=False).memory_plan.entry_kind.tolist()
    assert (Kind.SHARED in kinds) == bool(range_)
    assert Kind.INPLACE in kinds


@pytest.mark.shows("WEFTPLAN_PLANNER_STRATEGY")
def test_the_strategy_changes_what_is_allocated_and_no_bit(monkeypatch):
    """``arena`` allocates fewer bytes than ``match_range`` for branches of different sizes; the bits are equal."""
    held, by_name = {}, {}
    for strategy in ("match_range", "arena", "auto"):
        monkeypatch.setenv("WEFTPLAN_PLANNER_STRATEGY", strategy)
        executor = bound(branches(), training=False)
        held[strategy], by_name[strategy] = executor.allocated_bytes, results(executor, training=False)
    assert held["match_range"] > held["arena"] == held["auto"]
    assert all(bits == by_name["auto"] for bits in by_name.values())
