"""The order in which the terms of a gradient are added, under every switch of the planner and the executor.

Floating-point sums depend on their order, so a switch that changes it changes the last bits of gradients. Two tables
name the switches that keep the order and those that change it; ``docs/flags.md`` must say the same of each.
"""

import random

import numpy as np
import pytest

import weftplan as mx
from weftplan import config, sym
from weftplan.planner.symbolic.passes.gradients import _Pass

KEEPS = [
    ("FLAGS_enable_inplace", "0"),
    ("FLAGS_max_inplace_grad_add", "4"),
    ("FLAGS_max_inplace_grad_add", "100"),
    ("MXNET_EXEC_BULK_EXEC_INFERENCE", "0"),
    ("MXNET_EXEC_BULK_EXEC_MAX_NODE_TRAIN", "2"),
    ("MXNET_EXEC_BULK_EXEC_MAX_NODE_TRAIN_BWD", "1"),
    ("MXNET_EXEC_BULK_EXEC_MAX_NODE_TRAIN_FWD", "1"),
    ("MXNET_EXEC_BULK_EXEC_TRAIN", "0"),
    ("MXNET_EXEC_INPLACE_GRAD_SUM_CAP", "0"),
    ("MXNET_EXEC_INPLACE_GRAD_SUM_CAP", "3"),
    ("MXNET_EXEC_ENABLE_INPLACE", "0"),
    ("MXNET_EXEC_MATCH_RANGE", "0"),
    ("MXNET_EXEC_NUM_TEMP", "8"),
    ("MXNET_ENABLE_CUDA_GRAPHS", "1"),
    ("MXNET_GPU_TEMP_COPY", "8"),
    ("NNVM_AUTO_SEARCH_MATCH_RANGE", "1"),
    ("WEFTPLAN_EXECUTOR_STRATEGY", "dynamic"),
    ("WEFTPLAN_KERNELS", "numpy"),
    ("WEFTPLAN_KERNEL_CACHE", "0"),
    ("WEFTPLAN_PLANNER_STRATEGY", "match_range"),
    ("WEFTPLAN_PLANNER_STRATEGY", "none"),
    ("WEFTPLAN_PLAN_CACHE", "0"),
]
"""Settings that keep the order of every sum."""
CHANGES = {
    ("MXNET_BACKWARD_DO_MIRROR", "1"): "shared",
    ("MXNET_ELIMINATE_COMMON_EXPR", "0"): "equal",
    ("MXNET_EXEC_INPLACE_GRAD_SUM_CAP", "9"): "shared",
    ("MXNET_MEMORY_OPT", "1"): "shared",
    ("MXNET_USE_FUSION", "0"): "shared",
    ("WEFTPLAN_DROP_DEAD_OUTPUTS", "0"): "shared",
}
"""Settings that change the order of sums, and the network that shows it."""
SAID = "rounded in another order"


def random_network(seed):
    """Return a loss over a random graph whose results have up to a dozen readers, and at most seven share a weight."""
    rng = random.Random(seed)
    weight = mx.sym.Variable("weight")
    pool, layers = [mx.sym.Variable("data")], 0
    for _ in range(rng.randrange(6, 24)):
        kind = rng.randrange(7)
        first, second = (rng.choice(pool[-6:] if rng.random() < 0.5 else pool) for _ in range(2))
        if kind < 3:
            net = (sym.tanh, sym.sigmoid, sym.sin)[kind](first)
        elif kind == 3:
            net = first * second
        elif kind == 4:
            net = first + second
        elif kind == 5 or layers == 7:
            net = first * rng.uniform(0.2, 0.9)
        else:
            net, layers = sym.FullyConnected(first, weight=weight, num_hidden=8, no_bias=True), layers + 1
        pool.append(net)
    return sym.MakeLoss(sym.add_n(*[sym.sum(sym.sin(net)) for net in pool]))


def shared():
    """Return eight layers with one weight, the least number whose gradients are batched."""
    net, weight = mx.sym.Variable("data"), mx.sym.Variable("weight")
    for _ in range(8):
        net = sym.FullyConnected(sym.sin(net), weight=weight, num_hidden=8, no_bias=True)
    return sym.MakeLoss(net)


def equal():
    """Return a sum of two equal expressions with different factors."""
    data = mx.sym.Variable("data")
    return sym.MakeLoss(0.3 * sym.tanh(data) + 0.7 * sym.tanh(data))


def results(net):
    """Bind, run once on fixed values, and return the bytes of outputs and gradients."""
    executor = net.simple_bind(mx.cpu(), data=(4, 8), grad_req="write")
    seeded = np.random.default_rng(3)
    for name in sorted(executor.arg_dict):
        array = executor.arg_dict[name]
        array[:] = seeded.standard_normal(array.shape).astype("float32")
    executor.forward(is_train=True)
    executor.backward()
    return [array.asnumpy().tobytes() for array in (*executor.outputs, *executor.grad_arrays)]


@pytest.fixture(scope="module")
def networks():
    """Random networks with the bits of their results under the default settings."""
    return [(net, results(net)) for net in (random_network(seed) for seed in range(12))]


@pytest.mark.parametrize(("variable", "value"), KEEPS)
def test_switch_keeps_the_order_of_sums(monkeypatch, networks, variable, value):
    """Random networks whose gradients are sums of 2 to 12 terms have the same bits with the setting and without."""
    monkeypatch.setenv(variable, value)
    assert [number for number, (net, bits) in enumerate(networks) if results(net) != bits] == []


def test_random_networks_show_another_order(networks, monkeypatch):
    """The networks can tell orders apart: each has other bits if the terms of its sums are added in reverse."""
    aggregate = _Pass.aggregate

    def reversed_terms(self, nid, index):
        self.terms.get(self.graph.row[nid] + index, []).reverse()
        return aggregate(self, nid, index)

    monkeypatch.setattr(_Pass, "aggregate", reversed_terms)
    monkeypatch.setenv("MXNET_EXEC_NUM_TEMP", "2")  # a setting that keeps bits, and whose plans are not cached yet
    assert all(results(net) != bits for net, bits in networks)


@pytest.mark.parametrize(("setting", "network"), CHANGES.items())
@pytest.mark.shows("MXNET_ELIMINATE_COMMON_EXPR", "WEFTPLAN_DROP_DEAD_OUTPUTS", "MXNET_MEMORY_OPT")
@pytest.mark.shows("MXNET_BACKWARD_DO_MIRROR", "MXNET_EXEC_INPLACE_GRAD_SUM_CAP", "MXNET_USE_FUSION")
def test_switch_changes_the_order_of_sums(monkeypatch, setting, network):
    """A setting that is documented to change the order of sums changes it."""
    net = {"shared": shared, "equal": equal}[network]()
    bits = results(net)
    monkeypatch.setenv(*setting)
    assert results(net) != bits


def test_every_switch_says_whether_it_changes_the_order():
    """Each variable of the planner is in a table above; exactly those that change the order say so in their effect."""
    variables = config.table()
    aliases = {alias: variable.name for variable in variables for alias in variable.aliases}
    keeps, changes = {aliases.get(name, name) for name, _ in KEEPS}, {name for name, _ in CHANGES}
    assert {variable.name for variable in variables if SAID in variable.effect} == changes
    assert {variable.name for variable in variables if variable.group == "planner"} <= keeps | changes
