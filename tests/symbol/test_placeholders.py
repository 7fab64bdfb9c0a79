"""Files with unknown operators: what works with them, and the error messages for the rest."""

from __future__ import annotations

import json

import numpy as np
import pytest

import weftplan as mx
from weftplan import symbol as sym
from weftplan.errors import FormatError, UnknownOperatorError


def network() -> str:
    """Return the JSON of data - fc1 - Mystery (two outputs) - fc2 - Mystery, and fc1 - side."""
    data = sym.Variable("data")
    first = sym.FullyConnected(data, num_hidden=4, name="fc1")
    parts = sym.SliceChannel(first, num_outputs=2, name="odd")
    last = sym.Activation(sym.FullyConnected(parts[1], num_hidden=3, name="fc2"), act_type="relu", name="end")
    result = json.loads(sym.Group([last, sym.exp(first, name="side")]).tojson())
    for node in result["nodes"]:
        if node["op"] in ("SliceChannel", "Activation"):
            node["op"] = "Mystery"
    return json.dumps(result)


def test_a_file_with_unknown_operators_is_read_and_written() -> None:
    """A file with unknown operators is read with its names, outputs and attributes, and saved unchanged."""
    loaded = sym.load_json(network())
    assert loaded.list_arguments() == ["data", "fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias"]
    assert loaded.get_internals()["odd_output1"].attr("num_outputs") == "2"
    assert json.loads(loaded.tojson()) == json.loads(network())


def test_unused_outputs_of_unknown_operators_are_counted() -> None:
    """The table of a file says how many outputs an unknown operator has, also if no node reads the last of them."""
    graph = json.loads(network())
    rows = graph["node_row_ptr"]
    position = [node["name"] for node in graph["nodes"]].index("odd")
    graph["node_row_ptr"] = [row + (k > position) for k, row in enumerate(rows)]
    loaded = sym.load_json(json.dumps(graph))
    assert [name for name in loaded.get_internals().list_outputs() if name.startswith("odd")] == [
        f"odd_output{k}" for k in range(3)
    ]


def test_part_without_unknown_operators_works() -> None:
    """The part of a network before unknown operators can be inferred, bound and trained.

    Partial inference of the whole network returns the shapes of this part.
    """
    loaded = sym.load_json(network())
    side = loaded.get_internals()["side_output"]
    assert side.infer_shape(data=(2, 3))[1] == [(2, 4)]
    executor = side.simple_bind(mx.cpu(), data=(2, 3))
    executor.copy_params_from({name: mx.nd.zeros(array.shape) for name, array in executor.arg_dict.items()})
    np.testing.assert_array_equal(executor.forward(is_train=True)[0].asnumpy(), np.ones((2, 4)))
    executor.backward(mx.nd.ones((2, 4)))
    np.testing.assert_array_equal(executor.grad_dict["fc1_bias"].asnumpy(), [2, 2, 2, 2])
    arguments, outputs, _ = loaded.infer_shape_partial(data=(2, 3))
    assert arguments[:3] == [(2, 3), (4, 3), (4,)]
    assert outputs == [(), (2, 4)]


@pytest.mark.parametrize(
    "act",
    [
        lambda symbol: symbol.infer_shape(data=(2, 3)),
        lambda symbol: symbol.simple_bind(mx.cpu(), data=(2, 3)),
        lambda symbol: symbol.plan({"data": (2, 3)}),
    ],
)
def test_error_names_all_unknown_operators(act) -> None:  # type: ignore[no-untyped-def]
    """Inference, binding and planning raise an error with all unknown operators, their nodes, and the usable part."""
    text = network().replace('"op": "Mystery", "name": "end"', '"op": "Riddle", "name": "end"')
    with pytest.raises(UnknownOperatorError) as caught:
        act(sym.load_json(text))
    message = str(caught.value)
    assert "2 operators" in message
    assert "Mystery (1 node: odd)" in message
    assert "Riddle (1 node: end" in message
    assert "Of 5 operations 2 can be used without" in message
    assert "get_internals()['side_output']" in message
    assert "mx.operator.register" in message


def test_more_outputs_than_any_operator_has_are_refused() -> None:
    """A head that refers to output 2,147,483,647 of an unknown operator raises a FormatError."""
    text = json.dumps({"nodes": [{"op": "Mystery", "name": "m", "inputs": []}], "heads": [[0, 2147483647, 0]]})
    with pytest.raises(FormatError, match="at most 65,536"):
        sym.load_json(text)


def test_custom_operator_replaces_an_unknown_one() -> None:
    """A custom operator registered under an unknown name computes its nodes, and the file is saved unchanged."""

    class Doubling(mx.operator.CustomOp):
        def forward(self, is_train, req, in_data, out_data, aux):  # type: ignore[no-untyped-def]
            self.assign(out_data[0], req[0], in_data[0] * float(2))

        def backward(self, req, out_grad, in_data, out_data, in_grad, aux):  # type: ignore[no-untyped-def]
            self.assign(in_grad[0], req[0], out_grad[0] * 2)

    @mx.operator.register("TwiceOfTheTests")
    class Property(mx.operator.CustomOpProp):
        def __init__(self, factor: str) -> None:
            super().__init__()
            assert factor == "2"

        def create_operator(self, ctx, in_shapes, in_dtypes):  # type: ignore[no-untyped-def]
            return Doubling()

    result = json.loads(sym.exp(sym.Variable("x"), name="e").tojson())
    result["nodes"][1].update(op="TwiceOfTheTests", attrs={"factor": "2"})
    loaded = sym.load_json(json.dumps(result))
    executor = loaded.simple_bind(mx.cpu(), x=(2,))
    assert executor.forward(is_train=True, x=mx.nd.array([1, 3]))[0].asnumpy().tolist() == [2, 6]
    executor.backward(mx.nd.ones((2,)))
    assert executor.grad_dict["x"].asnumpy().tolist() == [2, 2]
    assert json.loads(loaded.tojson())["nodes"][1]["op"] == "TwiceOfTheTests"
