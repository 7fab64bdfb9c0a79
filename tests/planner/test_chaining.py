"""Chains of elementwise nodes as one node: which are joined, that bits stay, and that plans count what is there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import weftplan as mx
from weftplan.ops.core.registry import get, parse_params
from weftplan.ops.fusion.elementwise import BLOCK, RESULT, Chain, Link
from weftplan.planner import PlanOptions, plan_symbol
from weftplan.planner.symbolic.chaining import LEAST
from weftplan.planner.symbolic.passes.fuse_elementwise import MOST_LINKS, members

LARGE = (5, LEAST // 4)
SHAPES = dict.fromkeys("abcd", LARGE)


def planned(net: Any, grad_req: str = "null", shapes: Any = SHAPES, **options: Any) -> Any:
    """The planned graph of ``net`` for those of the shapes that it has."""
    known = {name: shapes[name] for name in net.list_arguments()}
    return plan_symbol(net, known, grad_req=grad_req, options=PlanOptions(**options))


def operators(net: Any, grad_req: str = "null", **more: Any) -> list[str]:
    """The operators of the planned graph, variables left out."""
    return [node.op.name for node in planned(net, grad_req, **more).graph.nodes if node.op is not None]


def variables() -> list[Any]:
    """Four of them."""
    return [mx.sym.Variable(name) for name in "abcd"]


def test_a_chain_becomes_one_node_with_the_name_of_the_last():
    """Three nodes and their inputs; a plan says so, and so does the text of a bound graph."""
    a, b, c, _ = variables()
    net = mx.sym.relu((a + b) * 0.5 - c, name="r")
    found = planned(net)
    (node,) = [node for node in found.graph.nodes if node.op is not None]
    assert node.name == "r"
    assert len(members(node)) == 4
    assert [entry.node.name for entry in node.inputs] == ["a", "b", "c"]
    assert any("joined 3 elementwise nodes" in note for note in found.memory.notes)
    text = net.simple_bind(mx.cpu(), grad_req="null", **dict.fromkeys("abc", LARGE)).debug_str()
    assert "Op:elementwise, Name=r" in text
    assert f"__members__={','.join(members(node))}" in text


def test_a_smaller_plan():
    """No array between the nodes: the plan of two branches is that of one array less a block."""
    a, b, c, _ = variables()
    net = mx.sym.tanh(a * 2 + 1) * mx.sym.sigmoid(b) + c
    shapes = dict.fromkeys("abcd", (8 * BLOCK,))
    for kernels in ("numpy", "auto"):
        apart = planned(net, shapes=shapes, fusion=False, kernels=kernels).memory
        one = planned(net, shapes=shapes, kernels=kernels).memory
        assert apart.peak == 2 * 8 * BLOCK * 4
        assert one.peak <= 9 * BLOCK * 4 + 64


def two_readers(a: Any, b: Any) -> Any:
    """The sum is read twice."""
    s = a + b
    return mx.sym.Group([mx.sym.exp(s), mx.sym.sin(s)])


def an_output(a: Any, b: Any) -> Any:
    """The sum is an output."""
    s = a + b
    return mx.sym.Group([s, mx.sym.exp(s)])


def a_reduction(a: Any, b: Any) -> Any:
    """A sum over an axis is not elementwise."""
    return mx.sym.sum(mx.sym.exp(a), axis=1)


def other_shapes(a: Any, b: Any) -> Any:
    """What broadcasts is not elementwise."""
    return mx.sym.broadcast_add(mx.sym.sum(a, axis=1, keepdims=True), b)


def forced(a: Any, b: Any) -> Any:
    """One node alone is to be computed again."""
    s = a + b
    with mx.AttrScope(__force_mirroring__="1"):
        return mx.sym.exp(s)


@pytest.mark.parametrize("made", [two_readers, an_output, a_reduction, other_shapes, forced])
def test_nodes_that_stay_apart(made):
    """Where the array between two nodes has to exist, or one of them is something else."""
    assert "elementwise" not in operators(made(*variables()[:2]))


def test_what_is_computed_between_stays_between():
    """A node joins only what runs right before it: its inputs would live longer else."""
    a, b, c, _ = variables()
    early = mx.sym.exp(a + b)
    late = mx.sym.broadcast_mul(c, mx.sym.sum(c, axis=1, keepdims=True))
    found = [members(node) for node in planned(mx.sym.elemwise_add(early, late, name="end")).graph.nodes]
    assert [len(names) for names in found if names] == [2]
    assert not any("end" in names for names in found)


@pytest.mark.parametrize("options", [{"fusion": False}, {"compat": "mxnet"}, {"compat": "paddle"}])
def test_the_switch_and_plans_of_others(options):
    """MXNET_USE_FUSION=0 joins nothing, nor does a plan that is to be MXNet's or Paddle's."""
    a, b, *_ = variables()
    assert "elementwise" not in operators(mx.sym.exp(a + b), **options)


def test_small_arrays_and_long_chains():
    """What is small is left as it is; a chain has a largest length."""
    a, *_ = variables()
    net = a
    for _ in range(3 * MOST_LINKS):
        net = net + 1
    assert operators(net, shapes={"a": (LEAST - 1,)}) == ["_plus_scalar"] * 3 * MOST_LINKS
    assert operators(net, shapes={"a": (LEAST,)}) == ["elementwise"] * 3


def random_network(seed: int, recordable: bool) -> Any:
    """Elementwise nodes on four variables, each made of earlier ones; all that nobody reads are outputs."""
    rng = np.random.default_rng(seed)
    unary = [lambda x: x * 0.5, lambda x: 1.5 - x, mx.sym.square, mx.sym.relu, mx.sym.abs,
             lambda x: mx.sym.Activation(x, act_type="relu")]  # fmt: skip
    if not recordable:
        unary += [mx.sym.tanh, mx.sym.sigmoid, mx.sym.sin, lambda x: mx.sym.Activation(x, act_type="softrelu")]
    binary = [lambda x, y: x + y, lambda x, y: x - y, lambda x, y: x * y, lambda x, y: mx.sym.add_n(x, y, x)]
    values = variables()
    for _ in range(14):
        recent = values[-4:]
        if rng.random() < 0.55:
            values.append(unary[rng.integers(len(unary))](recent[-1 - int(rng.random() < 0.2)]))
        else:
            x, y = (recent[i] for i in rng.integers(4, size=2))
            values.append(binary[rng.integers(len(binary))](x, y))
    return mx.sym.Group([values[-1], values[-2]])


def run(net: Any, grad_req: str, dtype: str) -> tuple[list[Any], Any]:
    """Outputs and gradients, and the executor."""
    rng = np.random.default_rng(5)
    names = net.list_arguments()
    exe = net.simple_bind(mx.cpu(), grad_req=grad_req, type_dict=dict.fromkeys(names, dtype),
                          **dict.fromkeys(names, LARGE))  # fmt: skip
    for name in names:
        exe.arg_dict[name][:] = rng.standard_normal(LARGE)
        if grad_req == "add":
            exe.grad_dict[name][:] = rng.standard_normal(LARGE)
    found = [out.asnumpy() for out in exe.forward(is_train=grad_req != "null")]
    if grad_req != "null":
        exe.backward([mx.nd.array(rng.standard_normal(LARGE), dtype=dtype) for _ in found])
        found += [exe.grad_dict[name].asnumpy() for name in names]
    assert exe.allocated_bytes == exe.memory_plan.peak
    return found, exe


@pytest.mark.parametrize("recordable", [True, False])
@pytest.mark.parametrize("grad_req", ["null", "write", "add"])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.shows("MXNET_USE_FUSION")
def test_same_bits_joined_or_not(seed, grad_req, recordable, monkeypatch):
    """Random networks, forward and backward, with NumPy's kernels and compiled ones; plans are what is allocated."""
    dtype = "float64" if seed == 2 else "float32"
    net = random_network(seed, recordable)
    monkeypatch.setenv("MXNET_USE_FUSION", "0")
    wanted, apart = run(net, grad_req, dtype)
    monkeypatch.setenv("MXNET_USE_FUSION", "1")
    for kernels in ("numpy", "native"):
        monkeypatch.setenv("WEFTPLAN_KERNELS", kernels)
        found, joined = run(net, grad_req, dtype)
        for a, b in zip(wanted, found, strict=True):
            assert a.tobytes() == b.tobytes()
        if grad_req == "null":
            assert any(node.op is not None and node.op.name == "elementwise" for node in joined.planned.graph.nodes)
            assert joined.get_optimized_symbol().list_outputs() == apart.get_optimized_symbol().list_outputs()


@pytest.mark.parametrize("dtype", ["int32", "float16"])
def test_dtypes_that_only_numpy_computes(dtype, monkeypatch):
    """They run block by block."""
    a, b, *_ = variables()
    net = mx.sym.relu(a * 3 - b)
    monkeypatch.setenv("MXNET_USE_FUSION", "0")
    wanted, _ = run(net, "null", dtype)
    monkeypatch.setenv("MXNET_USE_FUSION", "1")
    found, exe = run(net, "null", dtype)
    assert "elementwise" in exe.debug_str()
    assert wanted[0].tobytes() == found[0].tobytes()


def test_same_bits_on_any_number_of_cores(monkeypatch, four_cores):
    """Parts of a compiled chain follow from its size."""
    a, b, *_ = variables()
    net = mx.sym.relu(a * 3 - b)
    shape = (1 << 19,)
    monkeypatch.setenv("WEFTPLAN_KERNELS", "native")
    rng = np.random.default_rng(0)
    given = {name: rng.standard_normal(shape).astype(np.float32) for name in "ab"}
    exe = net.simple_bind(mx.cpu(), grad_req="null", a=shape, b=shape)
    exe.copy_params_from({name: mx.nd.array(value) for name, value in given.items()})
    out = exe.forward()[0].asnumpy()
    np.testing.assert_array_equal(out, np.maximum(given["a"] * np.float32(3) - given["b"], 0))


def test_the_graph_that_a_user_sees_has_all_nodes():
    """``get_optimized_symbol`` has the nodes that were joined, with names and parameters, and a monitor says what it
    does not see."""
    a, b, *_ = variables()
    net = mx.sym.clip(mx.sym.elemwise_add(a, b, name="s") * 2, a_min=-1, a_max=1, name="end")
    exe = net.simple_bind(mx.cpu(), grad_req="null", a=LARGE, b=LARGE)
    parted = exe.get_optimized_symbol()
    assert [n for n in parted.get_internals().list_outputs() if n.startswith(("s_", "end"))] == [
        "s_output",
        "end_output",
    ]
    again = mx.sym.load_json(parted.tojson())
    values = {name: mx.nd.array(np.full(LARGE, 0.25)) for name in "ab"}
    for symbol in (net, again):
        bound = symbol.bind(mx.cpu(), values)
        np.testing.assert_array_equal(bound.forward()[0].asnumpy(), np.ones(LARGE, np.float32))
    with pytest.warns(mx.errors.ConfigWarning, match="no outputs of.*'s'.*MXNET_USE_FUSION=0"):
        exe.set_monitor_callback(lambda name, array: None)


def link(name: str, *operands: int, **params: Any) -> Link:
    """One link."""
    op = get(name)
    return Link(op, parse_params(op, params), operands)


def test_places_of_values():
    """A value lies in the result's block unless that holds what is still read; inputs that are read later stay."""
    line = Chain(2, (link("elemwise_add", 0, 1), link("relu", 2), link("_mul_scalar", 3, scalar=2)))
    assert line.places == (RESULT,) * 3
    assert [pair.input for pair in line.inplace] == [0, 1]
    late = Chain(2, (link("exp", 0), link("elemwise_mul", 2, 1)))
    assert late.places == (RESULT, RESULT)
    assert [pair.input for pair in late.inplace] == [0]
    both = Chain(2, (link("exp", 0), link("sin", 1), link("elemwise_mul", 2, 3)))
    assert both.rooms == 1
    assert len(set(both.places[:2])) == 2


def test_equal_chains_have_one_text():
    """By which measured times are kept; it names no address."""
    made = [Chain(1, (link("exp", 0), link("_mul_scalar", 1, scalar=2))) for _ in range(2)]
    assert repr(made[0]) == repr(made[1])
    assert " at 0x" not in repr(made[0])
    assert repr(made[0]) != repr(Chain(1, (link("exp", 0), link("_mul_scalar", 1, scalar=3))))
