"""Inference of shapes and dtypes in both directions, and its error messages."""

from __future__ import annotations

import numpy as np
import pytest

from weftplan import symbol as sym
from weftplan.errors import DTypeError, ParameterError, ShapeError
from weftplan.ops.core import registry
from weftplan.planner import plan_symbol
from weftplan.symbol import Entry, Node
from weftplan.symbol.inference import solver as infer
from weftplan.symbol.inference.solver import DTYPES, SHAPES


def mlp() -> sym.Symbol:
    """Return data -> fc1(1000) -> relu -> fc2(10) -> softmax."""
    x = sym.FullyConnected(sym.Variable("data"), num_hidden=1000, name="fc1")
    x = sym.FullyConnected(sym.Activation(x, act_type="relu"), num_hidden=10, name="fc2")
    return sym.SoftmaxOutput(x, name="softmax")


def test_forward_from_the_data() -> None:
    """Shapes of weights, biases and the label follow from the shape of the data."""
    args, outs, aux = mlp().infer_shape(data=(100, 100))
    assert args == [(100, 100), (1000, 100), (1000,), (10, 1000), (10,), (100,)]
    assert outs == [(100, 10)]
    assert aux == []
    assert mlp().infer_shape((100, 100)) == (args, outs, aux)


def test_backward_from_a_weight() -> None:
    """Partial inference returns the known shapes and dimensions, () for an unknown shape and 0 for a dimension."""
    x = sym.FullyConnected(sym.Variable("data"), num_hidden=3, name="fc")
    assert x.infer_shape_partial(fc_weight=(3, 7))[0] == [(), (3, 7), (3,)]
    assert x.infer_shape_partial(data=(0, 7))[0] == [(0, 7), (3, 7), (3,)]


def test_inference_in_both_directions() -> None:
    """The shape at the end of a chain reaches its beginning, and from there another branch.

    a -> +1 -> +1 -> ... -> (+) <- b (known)
    a -> exp
    """
    a, b = sym.Variable("a"), sym.Variable("b")
    x = a
    for _ in range(50):
        x = x + 1
    y = sym.Group([sym.exp(a), x + b])
    assert y.infer_shape(b=(2, 3)) == ([(2, 3), (2, 3)], [(2, 3), (2, 3)], [])


def test_partial_shapes_are_combined() -> None:
    """The partial shapes (0, 3) and (2, 0) of two operands give (2, 3); -1 is unknown, too."""
    for unknown in (0, -1):
        x = sym.Variable("a", shape=(unknown, 3)) + sym.Variable("b", shape=(2, unknown))
        assert x.infer_shape()[1] == [(2, 3)]
    rows = sym.FullyConnected(sym.Variable("data"), num_hidden=3, name="fc") + sym.Variable("b", shape=(5, 0))
    assert rows.infer_shape_partial()[1] == [(5, 0)]


def test_unknown_gives_none_with_a_warning() -> None:
    """If a shape or dtype is unknown, inference returns None with a warning; partial inference returns known shapes."""
    with pytest.warns(UserWarning, match=r"unknown: data: \(\)"):
        assert mlp().infer_shape() == (None, None, None)
    assert mlp().infer_shape_partial()[0][2] == (1000,)
    with pytest.warns(UserWarning, match="dtypes"):
        assert (sym.Variable("a") + 1).infer_type() == (None, None, None)


def test_explicit_shape_beats_the_attribute() -> None:
    """A given shape is used instead of the attribute ``__shape__``."""
    x = sym.Variable("a", shape=(2, 3)) + 1
    assert x.infer_shape()[1] == [(2, 3)]
    assert x.infer_shape(a=(5,))[1] == [(5,)]


def test_attribute_fills_unknown_dimensions() -> None:
    """``__shape__`` fills the unknown dimensions of a given shape; on a conflict the given shape is used."""
    x = sym.Variable("x", shape=(2, 3)) + 1
    assert x.infer_shape(x=(0, 3))[0] == [(2, 3)]
    assert x.infer_shape_partial(x=(0, 4))[0] == [(0, 4)]
    assert x.infer_shape_partial(x=(0, 3, 1))[0] == [(0, 3, 1)]


def test_conflict_names_everything() -> None:
    """A conflict raises an error that names the operator, the node, both shapes and the line of the node."""
    x = sym.Variable("a") + sym.Variable("b")
    for method in (x.infer_shape, x.infer_shape_partial):
        with pytest.raises(ShapeError) as caught:
            method(a=(2, 3), b=(4, 3))
        text = str(caught.value)
        for part in ("elemwise_add", "'_plus0'", "(2, 3)", "(4, 3)", f"created at {__file__}:"):
            assert part in text, text


def test_conflict_with_a_given_weight() -> None:
    """A weight that does not fit the data raises an error that names the layer and the shape."""
    with pytest.raises(ShapeError, match=r"FullyConnected.*'fc1'.*\(1000, 99\)"):
        mlp().infer_shape(data=(100, 100), fc1_weight=(1000, 99))


def test_one_variable_two_shapes() -> None:
    """A weight that two layers of different widths share raises an error at the second layer."""
    w, d = sym.Variable("w"), sym.Variable("d")
    x = sym.FullyConnected(d, w, num_hidden=4, no_bias=True, name="one")
    y = sym.FullyConnected(x, w, num_hidden=4, no_bias=True, name="two")
    with pytest.raises(ShapeError, match="two"):
        y.infer_shape(d=(2, 3))
    assert y.infer_shape(d=(2, 4))[0] == [(2, 4), (4, 4)]


def test_wrong_names_and_mixtures() -> None:
    """Unknown names, shapes by position and by name, too many shapes and negative dimensions raise errors."""
    with pytest.raises(ParameterError, match="no variable is called 'dta'"):
        mlp().infer_shape(dta=(1, 2))
    with pytest.raises(ParameterError, match="not both"):
        mlp().infer_shape((1, 2), data=(1, 2))
    with pytest.raises(ParameterError, match="3 shapes given for 1"):
        sym.exp(sym.Variable("a")).infer_shape((1,), (1,), (1,))
    with pytest.raises(ParameterError, match=r"variable 'a' is \(-2, 2\)"):
        sym.exp(sym.Variable("a")).infer_shape(a=(-2, 2))


def test_dtypes() -> None:
    """Dtypes are inferred in both directions, also from attributes; a conflict raises an error with both."""
    x = sym.Variable("a") + sym.Variable("b")
    assert x.infer_type(b="float16") == ([np.float16] * 2, [np.float16], [])
    assert (sym.Variable("a", dtype="float64") * 2).infer_type()[1] == [np.float64]
    assert sym.cast(sym.Variable("a"), dtype="int8").infer_type_partial()[1] == [np.int8]
    with pytest.raises(DTypeError, match=r"elemwise_add.*'_plus0'.*float16.*float32"):
        x.infer_type(a=np.float16, b=np.float32)


def test_backward_nodes_take_shapes_from_their_forward_node() -> None:
    """The outputs of a backward node have the shapes of the inputs of its forward node."""
    x = sym.FullyConnected(sym.Variable("d"), num_hidden=3, name="fc")
    forward = x.entries[0].node
    op = registry.get("_backward_FullyConnected")
    head = Node(None, "head")
    back = Node(
        op, "fc_backward", params=forward.params, inputs=[Entry(head), *forward.inputs[:2]], control_deps=[forward]
    )
    nodes = sym.topological_order([Entry(forward), Entry(back)])
    shapes = infer.infer_shapes(nodes, {"d": (5, 4)})
    assert shapes[-3:] == [(5, 4), (3, 4), (3,)]


def test_repeated_layers_are_inferred_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule of 5,000 equal nodes runs once."""
    x = sym.Variable("x")
    for _ in range(5_000):
        x = x + 1
    calls = 0
    nodes = sym.topological_order(x.entries)
    original = infer.FactKind._rule

    def counted(self: object, *args: object) -> object:
        nonlocal calls
        calls += 1
        return original(self, *args)

    monkeypatch.setattr(infer.FactKind, "_rule", counted)
    assert infer.infer_shapes(nodes, {"x": (2, 2)})[-1] == (2, 2)
    assert calls == 1


def test_added_nodes_get_the_sizes_that_a_solver_finds() -> None:
    """Nodes that passes add have the shapes and dtypes that inference of the whole graph gives."""
    x = sym.FullyConnected(sym.Variable("data"), num_hidden=6, name="fc")
    net = sym.sum(sym.exp(x) * x + sym.Activation(x, act_type="relu"))
    inputs = {"data": (5, 4)}
    planned = plan_symbol(net, inputs, {"data": "float64"}, grad_req={"fc_weight": "write", "data": "add"})
    graph = planned.graph
    names = [node.op.name for node in graph.nodes if node.op is not None]
    assert {"add_n", "_backward_FullyConnected"} <= set(names)
    head = graph.nodes[planned.head_grads[0]]
    edges = graph.row, graph.inputs, graph.controls
    float64 = np.dtype(np.float64)
    assert infer.infer_shapes(graph.nodes, {**inputs, head: (1,)}, edges=edges) == planned.shapes
    assert infer.infer_dtypes(graph.nodes, {"data": float64, head: float64}, edges=edges) == planned.dtypes


def test_outputs_of_known_inputs() -> None:
    """``outputs`` returns the shapes of a node's outputs; inputs that do not fit, and unknown dtypes, raise errors."""
    add, reshape = registry.get("elemwise_add"), registry.get("_zeros_without_dtype")
    assert SHAPES.outputs(add, Node(add, "sum"), [(2, 3), (2, 3)]) == [(2, 3)]
    with pytest.raises(ShapeError, match=r"elemwise_add .*'sum'"):
        SHAPES.outputs(add, Node(add, "sum"), [(2, 3), (2, 4)])
    zeros = Node(reshape, "open", params=registry.parse_params(reshape, {"shape": "(2,)"}))
    with pytest.raises(DTypeError, match=r"dtype of output 0 of operator _zeros_without_dtype .*cannot be inferred"):
        DTYPES.outputs(reshape, zeros, [])
