"""ONNX in both directions: exports are run by onnxruntime, imports give what onnxruntime gives, bad files are named."""

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
from weftplan.errors import FormatError, MXNetError, ShapeError, UnknownOperatorError

onnx = pytest.importorskip("onnx")
runtime = pytest.importorskip("onnxruntime")
X = mx.sym.Variable("data")


def parameters(symbol: Any, **shapes: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Random (arguments, states), the same each time; labels and inputs are left out."""
    random = np.random.RandomState(7)
    of_arguments, _, of_states = symbol.infer_shape(**shapes)
    pairs = zip(symbol.list_arguments(), of_arguments, strict=True)
    args = {k: mx.nd.array(random.uniform(0.1, 0.9, s)) for k, s in pairs if k not in shapes and "label" not in k}
    pairs = zip(symbol.list_auxiliary_states(), of_states, strict=True)
    return args, {k: mx.nd.array(random.uniform(0.5, 1, s)) for k, s in pairs}


def ours(symbol: Any, args: Any, aux: Any, **fed: Any) -> list[Any]:
    """Outputs of an executor."""
    shapes = {key: value.shape for key, value in fed.items()}
    executor = symbol.simple_bind(mx.cpu(), grad_req="null", **shapes)
    executor.copy_params_from(args, aux, allow_missing=True)
    return [one.asnumpy() for one in executor.forward(**{k: mx.nd.array(v) for k, v in fed.items()})]


def theirs(content: bytes, **fed: Any) -> list[Any]:
    """Outputs of onnxruntime."""
    session = runtime.InferenceSession(content, providers=["CPUExecutionProvider"])
    return list(session.run(None, {one.name: fed[one.name] for one in session.get_inputs()}))


def conv(data: Any, **params: Any) -> Any:
    """A convolution of four filters."""
    return mx.sym.Convolution(data, **{"kernel": (3, 3), "num_filter": 4, **params})


IMAGES = {
    "conv": conv(X, stride=(2, 1), pad=(1, 0), dilate=(1, 2)),
    "groups": conv(X, num_group=2, no_bias=True),
    "deconv": mx.sym.Deconvolution(X, kernel=(3, 3), num_filter=3, stride=(2, 2), pad=(1, 1), adj=(1, 1)),
    "norms": mx.sym.BatchNorm(mx.sym.InstanceNorm(X), fix_gamma=False)[0] + mx.sym.LRN(X, nsize=3),
    "fixed gamma": mx.sym.BatchNorm(X)[0],
    "max pool": mx.sym.Pooling(X, kernel=(3, 2), stride=(2, 2), pad=(1, 1), pool_type="max"),
    "avg pool": mx.sym.Pooling(X, kernel=(2, 2), stride=(2, 2), pad=(1, 1), pool_type="avg"),
    "avg pool, padding left out": mx.sym.Pooling(
        X, kernel=(2, 2), pad=(1, 1), pool_type="avg", count_include_pad=False
    ),
    "full pool": mx.sym.Pooling(X, kernel=(3, 3), stride=(2, 2), pool_type="max", pooling_convention="full"),
    "sum pool": mx.sym.Pooling(X, kernel=(2, 2), pool_type="sum"),
    "global": mx.sym.Group([mx.sym.Pooling(X, global_pool=True, kernel=(1, 1), pool_type=k) for k in ("avg", "max")]),
    "dense": mx.sym.FullyConnected(mx.sym.FullyConnected(X, num_hidden=3, flatten=False), num_hidden=5, no_bias=True),
    "leaky": mx.sym.Group(
        [mx.sym.LeakyReLU(X - 0.5, act_type=k)[0] for k in ("leaky", "elu", "selu", "gelu", "prelu", "rrelu")]
    ),
    "acts": mx.sym.Group(
        [mx.sym.Activation(X, act_type=k) for k in ("relu", "sigmoid", "tanh", "softrelu", "softsign")]
    ),
    "unary": mx.sym.sqrt(X) + mx.sym.exp(X) * mx.sym.log(X) - mx.sym.square(X) / mx.sym.rsqrt(X) + mx.sym.erf(X),
    "scalars": 2 - (1 / (X + 1)) ** 2 * 3 + 2**X,
    "broadcast": mx.sym.broadcast_mul(X, mx.sym.mean(X, axis=(2, 3), keepdims=True)),
    "several": mx.sym.broadcast_maximum(mx.sym.add_n(X, X, X), mx.sym.clip(X, 0.2, 0.4)),
    "shapes": mx.sym.transpose(mx.sym.reshape(mx.sym.swapaxes(X, 1, 2), shape=(0, -1)), axes=(1, 0)),
    "split": mx.sym.Concat(*[part * (k + 1) for k, part in enumerate(mx.sym.SliceChannel(X, num_outputs=2))], dim=2),
    "squeezed": mx.sym.stack(*mx.sym.SliceChannel(X, num_outputs=4, squeeze_axis=True), axis=1),
    "sliced": mx.sym.slice_axis(mx.sym.slice_axis(X, axis=2, begin=1, end=-1), axis=3, begin=2, end=None),
    "padded": mx.sym.Pad(X, mode="reflect", pad_width=(0, 0, 0, 0, 1, 2, 2, 1)),
    "padded with a number": mx.sym.Pad(X, mode="constant", pad_width=(0, 0, 0, 0, 1, 0, 2, 1), constant_value=3),
    "reduced": mx.sym.Group(
        [mx.sym.sum(X, axis=1, exclude=True), mx.sym.max(X, axis=(1, 2)), mx.sym.mean(X), mx.sym.prod(X, axis=3)]
    ),
    "softmax": mx.sym.softmax(X, axis=1) + mx.sym.log_softmax(X) + mx.sym.softmax(X, temperature=2),
    "channels": mx.sym.SoftmaxOutput(X, multi_output=True),
    "larger": mx.sym.UpSampling(X, scale=2, sample_type="nearest"),
    "lengths": mx.sym.L2Normalization(X) + mx.sym.L2Normalization(X, mode="channel"),
    "products": mx.sym.dot(mx.sym.Flatten(X), mx.sym.Flatten(X), transpose_b=True),
    "dropped": mx.sym.Dropout(mx.sym.BlockGrad(X), p=0.5),
}


@pytest.mark.parametrize("name", IMAGES)
def test_exports_and_imports_give_the_same_numbers(name: str, tmp_path: Path) -> None:
    """An operator's export gives onnxruntime our numbers, and read back it gives them to us."""
    symbol = IMAGES[name]
    data = np.random.RandomState(1).uniform(0.1, 0.9, (2, 4, 5, 6)).astype(np.float32)
    args, aux = parameters(symbol, data=data.shape)
    model = export_model(symbol, args, aux, {"data": data.shape})
    expected = ours(symbol, args, aux, data=data)
    found = theirs(model.SerializeToString(), data=data)
    for left, right in zip(expected, found, strict=True):
        np.testing.assert_allclose(left, right, rtol=2e-4, atol=2e-5)
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    again, of_symbol, states = import_model(path)
    for left, right in zip(expected, ours(again, of_symbol, states, data=data), strict=True):
        np.testing.assert_allclose(left, right, rtol=2e-4, atol=2e-5)


def test_an_embedding_takes_whole_numbers() -> None:
    """Indices are floats here and integers there."""
    symbol = mx.sym.Embedding(X, input_dim=7, output_dim=3)
    data = np.float32([[0, 6], [3, 1]])
    args, aux = parameters(symbol, data=(2, 2))
    (found,) = theirs(export_model(symbol, args, aux, {"data": (2, 2)}).SerializeToString(), data=data)
    np.testing.assert_array_equal(found, ours(symbol, args, aux, data=data)[0])


def written(
    path: Path, nodes: list[Any], shape: Any, *, initializers: Any = (), outputs: int = 1, opset: int = 13
) -> Any:
    """A model of these nodes from x to y, y1, …, written to ``path``; what onnxruntime gives for ones counted up."""
    helper = onnx.helper
    names = ["y", *(f"y{k}" for k in range(1, outputs))]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", 1, shape)],
        [helper.make_tensor_value_info(name, 1, None) for name in names],
        [onnx.numpy_helper.from_array(values, name) for name, values in dict(initializers).items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    onnx.save(model, path)
    data = (np.arange(np.prod(shape)).reshape(shape) / np.prod(shape) + 0.1).astype(np.float32)
    return data, theirs(model.SerializeToString(), x=data)


def node(op: str, inputs: str, outputs: str, **attrs: Any) -> Any:
    """An ONNX node; names with blanks between."""
    return onnx.helper.make_node(op, inputs.split(), outputs.split(), **attrs)


W = np.random.RandomState(2).uniform(-1, 1, (3, 2, 3, 3)).astype(np.float32)
FILES: dict[str, tuple[list[Any], tuple[int, ...], dict[str, Any]]] = {
    "same padding": ([node("Conv", "x w", "y", auto_pad="SAME_UPPER", strides=[2, 2])], (1, 2, 6, 5), {"w": W}),
    "uneven padding": ([node("Conv", "x w", "y", pads=[0, 1, 2, 1])], (1, 2, 6, 5), {"w": W}),
    "uneven pool": ([node("MaxPool", "x", "y", kernel_shape=[2, 2], pads=[0, 0, 1, 1])], (1, 2, 4, 5), {}),
    "average": ([node("AveragePool", "x", "y", kernel_shape=[2, 2], pads=[1, 1, 1, 1])], (1, 2, 4, 5), {}),
    "gemm": (
        [node("Gemm", "x w c", "y", alpha=0.5, beta=2.0)],
        (2, 3),
        {"w": np.ones((3, 4), np.float32), "c": np.arange(4, dtype=np.float32)},
    ),
    "gemm, a number added": (
        [node("Gemm", "x w c", "y", transB=1)],
        (2, 3),
        {"w": np.ones((4, 3), np.float32), "c": np.ones((2, 4), np.float32)},
    ),
    "matmul": ([node("MatMul", "x w", "y")], (2, 5, 3), {"w": np.ones((3, 4), np.float32)}),
    "attention": ([node("Transpose", "x", "t", perm=[0, 1, 3, 2]), node("MatMul", "x t", "y")], (2, 3, 4, 5), {}),
    "shape arithmetic": (
        [
            node("Shape", "x", "s"),
            node("Gather", "s zero", "n", axis=0),
            node("Unsqueeze", "n first", "n1"),
            node("Concat", "n1 rest", "target", axis=0),
            node("Reshape", "x target", "y"),
        ],
        (2, 3, 4),
        {"zero": np.int64(0), "first": np.int64([0]), "rest": np.int64([-1])},
    ),
    "constants": ([node("Sub", "one x", "a"), node("Mul", "a v", "y")], (2, 3), {"one": np.float32(1), "v": W[0, 0]}),
    "slices": (
        [node("Slice", "x s e a p", "y")],
        (4, 6),
        {"s": np.int64([1, 5]), "e": np.int64([9, 0]), "a": np.int64([0, 1]), "p": np.int64([1, -2])},
    ),
    "unsqueeze": ([node("Unsqueeze", "x a", "u"), node("Squeeze", "u b", "y")], (2, 1, 3),
                  {"a": np.int64([0, -1]), "b": np.int64([2])}),
    "gathered": ([node("Gather", "x i", "y", axis=1)], (2, 4), {"i": np.int64([3, 0, -1])}),
    "one taken": ([node("Gather", "x i", "y", axis=1)], (2, 4), {"i": np.int64(-1)}),
    "clipped": ([node("Clip", "x low ", "y")], (2, 3), {"low": np.float32(0.4)}),
    "scaled": ([node("Resize", "x  s", "y", mode="nearest", coordinate_transformation_mode="asymmetric",
                     nearest_mode="floor")], (1, 2, 3, 4), {"s": np.float32([1, 1, 2, 2])}),
    "mean of two": ([node("Mean", "x x", "m"), node("Max", "m x", "y")], (2, 3), {}),
    "prelu": ([node("PRelu", "x w", "y")], (2, 3, 2, 2), {"w": np.float32([0.1, 0.2, 0.3]).reshape(3, 1, 1)}),
    "flattened": ([node("Flatten", "x", "y", axis=2)], (2, 3, 4, 5), {}),
    "largest": ([node("ArgMax", "x", "i", axis=1), node("Cast", "i", "y", to=1)], (2, 5), {}),
    "normed": ([node("ReduceMean", "x", "m", axes=[-1]), node("Sub", "x m", "y")], (2, 3, 4), {}),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_files_of_others(name: str, tmp_path: Path) -> None:
    """What other programs write gives us what it gives onnxruntime."""
    nodes, shape, initializers = FILES[name]
    if name in ("clipped", "scaled"):  # an input that is left out in the middle has no name
        nodes[0].input[:] = ["x", "low"] if name == "clipped" else ["x", "", "s"]
    if name == "constants":
        initializers = {**initializers, "v": np.float32([[1, 2, 3]])}
    data, expected = written(tmp_path / "m.onnx", nodes, shape, initializers=initializers)
    symbol, args, aux = import_model(tmp_path / "m.onnx")
    for left, right in zip(ours(symbol, args, aux, x=data), expected, strict=True):
        assert left.shape == (right.shape or (1,))
        np.testing.assert_allclose(left, right.reshape(left.shape), rtol=1e-4, atol=1e-5)


def test_old_softmax_flattens(tmp_path: Path) -> None:
    """Before version 13, softmax treats all axes from its own on as one."""
    data, expected = written(tmp_path / "m.onnx", [node("Softmax", "x", "y", axis=1)], (2, 3, 4), opset=11)
    symbol, args, aux = import_model(tmp_path / "m.onnx")
    np.testing.assert_allclose(ours(symbol, args, aux, x=data)[0], expected[0], rtol=1e-5)


def test_split_has_several_outputs(tmp_path: Path) -> None:
    """Each part becomes an output."""
    nodes = [node("Split", "x s", "y y1", axis=1)]
    data, expected = written(tmp_path / "m.onnx", nodes, (2, 5), initializers={"s": np.int64([2, 3])}, outputs=2)
    symbol, args, aux = import_model(tmp_path / "m.onnx")
    for left, right in zip(ours(symbol, args, aux, x=data), expected, strict=True):
        np.testing.assert_array_equal(left, right)


def test_an_imported_model_can_be_trained(tmp_path: Path) -> None:
    """Parameters of an imported network get gradients."""
    symbol = mx.sym.FullyConnected(mx.sym.Activation(conv(X), act_type="relu"), num_hidden=2)
    args, aux = parameters(symbol, data=(1, 2, 4, 4))
    onnx.save(export_model(symbol, args, aux, {"data": (1, 2, 4, 4)}), tmp_path / "m.onnx")
    again, found, _ = mx.onnx.import_model(tmp_path / "m.onnx")
    executor = again.simple_bind(mx.cpu(), data=(1, 2, 4, 4))
    executor.copy_params_from(found)
    executor.forward(is_train=True, data=mx.nd.ones((1, 2, 4, 4)))
    executor.backward(mx.nd.ones((1, 2)))
    assert all(np.abs(executor.grad_dict[name].asnumpy()).sum() > 0 for name in found)


def test_what_cannot_be_said_is_listed(tmp_path: Path) -> None:
    """All operators without a counterpart at once, in either direction; missing shapes; parameters beyond ONNX."""
    symbol = mx.sym.ROIPooling(mx.sym.sort(X), mx.sym.Variable("rois"), pooled_size=(1, 1), spatial_scale=1)
    with pytest.raises(UnknownOperatorError, match=r"2 operator\(s\): sort .*ROIPooling"):
        export_model(symbol, {}, {}, {})
    with pytest.raises(ShapeError, match="data"):
        export_model(mx.sym.relu(X), {}, {}, {})
    same = mx.sym.Pooling(X, kernel=(2, 2), pooling_convention="same")
    with pytest.raises(MXNetError, match=r"Pooling.*same"):
        export_model(same, {}, {}, {"data": (1, 1, 4, 4)})
    graph = onnx.helper.make_graph([node("NonMaxSuppression", "x x", "y"), node("Foo", "y", "z")], "g", [], [])
    onnx.save(onnx.helper.make_model(graph), tmp_path / "m.onnx")
    with pytest.raises(UnknownOperatorError, match=r"NonMaxSuppression \(1\), Foo \(1\)"):
        import_model(tmp_path / "m.onnx")


@pytest.mark.parametrize("content", [b"", b"nonsense", b"version https://git-lfs.github.com/spec/v1\n", b"\x00" * 64])
def test_what_is_no_model(content: bytes, tmp_path: Path) -> None:
    """Empty, text, a pointer of Git LFS and zeros are refused by name."""
    (tmp_path / "m.onnx").write_bytes(content)
    with pytest.raises(FormatError, match=r"m\.onnx"):
        import_model(tmp_path / "m.onnx")


def test_damaged_models(tmp_path: Path) -> None:
    """Changed bytes give a model or an error of ours, never another exception."""
    symbol = mx.sym.softmax(mx.sym.FullyConnected(mx.sym.Flatten(conv(X)), num_hidden=3))
    args, aux = parameters(symbol, data=(1, 2, 4, 4))
    content = export_model(symbol, args, aux, {"data": (1, 2, 4, 4)}).SerializeToString()
    random = np.random.RandomState(11)
    refused = 0
    for _ in range(300):
        changed = bytearray(content[: random.randint(1, len(content))] if random.rand() < 0.2 else content)
        for _ in range(random.randint(1, 6)):
            changed[random.randint(len(changed))] = random.randint(256)
        (tmp_path / "m.onnx").write_bytes(changed)
        try:
            import_model(tmp_path / "m.onnx")
        except MXNetError:
            refused += 1
    assert refused > 50


def rnn(mode: str, *, bidirectional: bool = False, layers: int = 1, ends: bool = False, lengths: bool = False) -> Any:
    """The operator RNN on ``data`` and states that are inputs."""
    inputs = {"state": mx.sym.Variable("h")} | ({"state_cell": mx.sym.Variable("c")} if mode == "lstm" else {})
    if lengths:
        inputs["sequence_length"] = mx.sym.Variable("lengths")
    made = mx.sym.RNN(
        X, mx.sym.Variable("packed"), **inputs, mode=mode, state_size=4, num_layers=layers,
        bidirectional=bidirectional, state_outputs=ends, use_sequence_length=lengths, name="rnn",
    )  # fmt: skip
    return mx.sym.Group([made[k] for k in range(len(inputs) + 1 - lengths)]) if ends else made[0]


@pytest.mark.parametrize("mode", ["lstm", "gru", "rnn_tanh", "rnn_relu"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"bidirectional": True, "layers": 2, "ends": True}, {"ends": True, "bidirectional": True, "lengths": True}],
    ids=["plain", "layers", "lengths"],
)
def test_recurrent_layers_go_both_ways(mode: str, settings: dict[str, Any], tmp_path: Path) -> None:
    """Cells, layers, directions, last states, lengths: onnxruntime gives our numbers, and so does what is read back."""
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
    expected = ours(symbol, args, aux, **fed)
    model = export_model(symbol, args, aux, shapes)
    found = theirs(model.SerializeToString(), **fed)
    assert len(found) == len(expected)
    for left, right in zip(expected, found, strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-4, atol=1e-5)
    path = tmp_path / "rnn.onnx"
    onnx.save(folded(model), path)
    again, of_symbol, states = import_model(path)
    assert any(node["op"] == "RNN" for node in json.loads(again.tojson())["nodes"])
    for left, right in zip(expected, ours(again, of_symbol, states, **fed), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-4, atol=1e-5)


def folded(model: Any) -> Any:
    """The model as other exporters write it: what constants alone go into is computed."""
    options = runtime.SessionOptions()
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    with tempfile.TemporaryDirectory() as folder:
        options.optimized_model_filepath = f"{folder}/model.onnx"
        runtime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        return onnx.load(options.optimized_model_filepath)


def weights(gates: int, directions: int = 1) -> dict[str, Any]:
    """W, R and B of a cell with three inputs and four units."""
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
    """What other programs write: parts left out, both places of the reset gate, the other direction."""
    cell, initializers = CELLS[name]
    outputs = 2 if "y1" in cell.output else 1
    if name == "last state alone":
        cell.output[:] = ["", "y"]
    data, found = written(tmp_path / "m.onnx", [cell], (5, 2, 3), initializers=initializers, outputs=outputs, opset=14)
    symbol, args, aux = import_model(tmp_path / "m.onnx")
    for left, right in zip(ours(symbol, args, aux, x=data), found, strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"clip": 1.0}, "clip"),
        ({"activations": ["Relu", "Tanh", "Tanh"]}, "activations"),
        ({"input_forget": 1}, "input_forget"),
    ],
)
def test_cells_that_are_not_read_say_why(settings: dict[str, Any], why: str, tmp_path: Path) -> None:
    """A cell that computes something else is refused, not read wrongly."""
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
    """The unrolled network of LSTM cells, with its states as inputs."""
    symbol = mx.models.lstm.lstm(11, steps=3, layers=2, hidden=4)
    shapes = {"data": (2, 3), **mx.models.lstm.begin_states(2, layers=2, hidden=4)}
    args, aux = parameters(symbol, **shapes, softmax_label=(2, 3))
    random = np.random.RandomState(4)
    fed = {name: random.uniform(-1, 1, shape).astype(np.float32) for name, shape in shapes.items()}
    fed["data"] = np.float32([[0, 10, 3], [4, 5, 6]])
    (found,) = theirs(export_model(symbol, args, aux, shapes).SerializeToString(), **fed)
    fed["softmax_label"] = np.zeros((2, 3), np.float32)
    np.testing.assert_allclose(found, ours(symbol, args, aux, **fed)[0], rtol=1e-4, atol=1e-6)
