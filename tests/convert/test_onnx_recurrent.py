"""Recurrent layers in ONNX export and import: outputs equal onnxruntime's; unsupported forms raise errors."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weftplan as mx
from weftplan.convert.onnx_in import import_model
from weftplan.convert.onnx_out import export_model
from weftplan.errors import FormatError

onnx = pytest.importorskip("onnx")
runtime = pytest.importorskip("onnxruntime")
from tests.convert.onnx_models import executor_outputs, node, onnxruntime_outputs, parameters, write_model  # noqa: E402

X = mx.sym.Variable("data")


def rnn(mode: str, *, bidirectional: bool = False, layers: int = 1, ends: bool = False, lengths: bool = False) -> Any:
    """Return an RNN operator with inputs ``data``, ``h``, ``c`` for lstm, and ``lengths`` on request.

    Args:
        ends: also return the last states.
        lengths: read the length of each sequence.
    """
    inputs = {"state": mx.sym.Variable("h")} | ({"state_cell": mx.sym.Variable("c")} if mode == "lstm" else {})
    if lengths:
        inputs["sequence_length"] = mx.sym.Variable("lengths")
    result = mx.sym.RNN(
        X, mx.sym.Variable("packed"), **inputs, mode=mode, state_size=4, num_layers=layers,
        bidirectional=bidirectional, state_outputs=ends, use_sequence_length=lengths, name="rnn",
    )  # fmt: skip
    return mx.sym.Group([result[k] for k in range(len(inputs) + 1 - lengths)]) if ends else result[0]


@pytest.mark.parametrize("mode", ["lstm", "gru", "rnn_tanh", "rnn_relu"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"bidirectional": True, "layers": 2, "ends": True}, {"ends": True, "bidirectional": True, "lengths": True}],
    ids=["plain", "layers", "lengths"],
)
def test_recurrent_layers_go_both_ways(mode: str, settings: dict[str, Any], tmp_path: Path) -> None:
    """Exported layers give the executor's outputs in onnxruntime, and after import in an executor."""
    symbol = rnn(mode, **settings)
    depth = settings.get("layers", 1) * (2 if settings.get("bidirectional") else 1)
    random = np.random.RandomState(5)
    fed = {"data": random.uniform(-1, 1, (6, 2, 3)), "h": random.uniform(-1, 1, (depth, 2, 4))}
    if mode == "lstm":
        fed["c"] = random.uniform(-1, 1, (depth, 2, 4))
    if settings.get("lengths"):
        fed["lengths"] = np.array([6, 3])
    fed = {name: value.astype(np.float32) for name, value in fed.items()}
    shapes = {name: value.shape for name, value in fed.items()}
    args, aux = parameters(symbol, **shapes)
    args["packed"] = mx.nd.array(random.uniform(-0.7, 0.7, args["packed"].shape))
    expected = executor_outputs(symbol, args, aux, **fed)
    model = export_model(symbol, args, aux, shapes)
    actual = onnxruntime_outputs(model.SerializeToString(), **fed)
    assert len(actual) == len(expected)
    for left, right in zip(expected, actual, strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-4, atol=1e-5)
    path = tmp_path / "rnn.onnx"
    onnx.save(optimized_by_onnxruntime(model), path)
    repeated, of_symbol, states = import_model(path)
    assert any(node["op"] == "RNN" for node in json.loads(repeated.tojson())["nodes"])
    for left, right in zip(expected, executor_outputs(repeated, of_symbol, states, **fed), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-4, atol=1e-5)


def optimized_by_onnxruntime(model: Any) -> Any:
    """Return the model with its constant expressions folded, as other exporters write it."""
    options = runtime.SessionOptions()
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    with tempfile.TemporaryDirectory() as folder:
        options.optimized_model_filepath = f"{folder}/model.onnx"
        runtime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        return onnx.load(options.optimized_model_filepath)


def weights(gates: int, directions: int = 1) -> dict[str, Any]:
    """Return the arrays W, R and B of a cell with three inputs and four units."""
    random = np.random.RandomState(9)
    shapes = {"w": (directions, gates * 4, 3), "r": (directions, gates * 4, 4), "b": (directions, gates * 8)}
    return {name: random.uniform(-0.7, 0.7, shape).astype(np.float32) for name, shape in shapes.items()}


CELLS = {
    "no bias, no state": (node("LSTM", "x w r", "y", hidden_size=4), weights(4)),
    "last state alone": (node("GRU", "x w r b", " y", hidden_size=4, linear_before_reset=1), weights(3)),
    "reset before the product": (node("GRU", "x w r b", "y y1", hidden_size=4), weights(3)),
    "backwards": (node("LSTM", "x w r b", "y y1", hidden_size=4, direction="reverse"), weights(4)),
    "reset before, backwards": (node("GRU", "x w r b", "y y1", hidden_size=4, direction="reverse"), weights(3)),
    "both ways": (node("RNN", "x w r b", "y y1", hidden_size=4, direction="bidirectional"), weights(1, 2)),
    "relu": (node("RNN", "x w r b", "y", hidden_size=4, activations=["Relu"]), weights(1)),
}


@pytest.mark.parametrize("name", CELLS)
def test_recurrent_layers_of_others(name: str, tmp_path: Path) -> None:
    """Cells as other programs write them give onnxruntime's outputs after import."""
    cell, initializers = CELLS[name]
    outputs = 2 if "y1" in cell.output else 1
    if name == "last state alone":
        cell.output[:] = ["", "y"]
    data, actual = write_model(
        tmp_path / "m.onnx", [cell], (5, 2, 3), initializers=initializers, outputs=outputs, opset=14
    )
    symbol, args, aux = import_model(tmp_path / "m.onnx")
    for left, right in zip(executor_outputs(symbol, args, aux, x=data), actual, strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"clip": 1.0}, "clip"),
        ({"activations": ["Relu", "Tanh", "Tanh"]}, "activations"),
        ({"input_forget": 1}, "input_forget"),
    ],
)
def test_unsupported_cells(settings: dict[str, Any], why: str, tmp_path: Path) -> None:
    """A cell with an unsupported attribute raises a FormatError that names the attribute."""
    helper = onnx.helper
    graph = helper.make_graph(
        [node("LSTM", "x w r", "y", hidden_size=4, **settings)],
        "g",
        [helper.make_tensor_value_info("x", 1, (5, 2, 3))],
        [helper.make_tensor_value_info("y", 1, None)],
        [onnx.numpy_helper.from_array(value, key) for key, value in weights(4).items() if key != "b"],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 14)]), tmp_path / "m.onnx")
    with pytest.raises(FormatError, match=why):
        import_model(tmp_path / "m.onnx")


def test_the_built_in_language_model_is_exported() -> None:
    """The built-in LSTM network, exported with its states as inputs, gives the executor's outputs in onnxruntime."""
    symbol = mx.models.lstm.lstm(11, steps=3, layers=2, hidden=4)
    shapes = {"data": (2, 3), **mx.models.lstm.begin_states(2, layers=2, hidden=4)}
    args, aux = parameters(symbol, **shapes, softmax_label=(2, 3))
    random = np.random.RandomState(4)
    fed = {name: random.uniform(-1, 1, shape).astype(np.float32) for name, shape in shapes.items()}
    fed["data"] = np.float32([[0, 10, 3], [4, 5, 6]])
    (actual,) = onnxruntime_outputs(export_model(symbol, args, aux, shapes).SerializeToString(), **fed)
    fed["softmax_label"] = np.zeros((2, 3), np.float32)
    np.testing.assert_allclose(actual, executor_outputs(symbol, args, aux, **fed)[0], rtol=1e-4, atol=1e-6)
