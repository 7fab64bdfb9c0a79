"""ONNX export and import: outputs equal onnxruntime's, and bad files raise errors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weftplan as mx
from weftplan.convert.onnx_in import import_model
from weftplan.convert.onnx_out import export_model
from weftplan.errors import FormatError, MXNetError, ShapeError, UnknownOperatorError

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
from tests.convert.onnx_models import executor_outputs, node, onnxruntime_outputs, parameters, write_model  # noqa: E402

X = mx.sym.Variable("data")


def conv(data: Any, **params: Any) -> Any:
    """Return a convolution of four filters."""
    return mx.sym.Convolution(data, **{"kernel": (3, 3), "num_filter": 4, **params})


IMAGES = {
    "conv": conv(X, stride=(2, 1), pad=(1, 0), dilate=(1, 2)),
    "groups": conv(X, num_group=2, no_bias=True),
    "deconv": mx.sym.Deconvolution(X, kernel=(3, 3), num_filter=3, stride=(2, 2), pad=(1, 1), adj=(1, 1)),
    "norms": mx.sym.BatchNorm(mx.sym.InstanceNorm(X), fix_gamma=False)[0]
    + mx.sym.LRN(mx.sym.LRN(X, nsize=3), nsize=2, alpha=0.5),
    "fixed gamma": mx.sym.BatchNorm(X)[0],
    "norms of several devices": mx.sym.contrib.SyncBatchNorm(X, key="bn", ndev=2, fix_gamma=False),
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
    "softmax over all axes but the first": mx.sym.SoftmaxOutput(X),
    "larger": mx.sym.UpSampling(X, scale=2, sample_type="nearest"),
    "lengths": mx.sym.L2Normalization(X) + mx.sym.L2Normalization(X, mode="channel"),
    "products": mx.sym.dot(mx.sym.Flatten(X), mx.sym.Flatten(X), transpose_b=True),
    "inverse hyperbolic": mx.sym.arcsinh(X) + mx.sym.arctanh(X) + mx.sym.arccosh(X + 1),
    "dropped": mx.sym.Dropout(mx.sym.BlockGrad(X), p=0.5),
}


@pytest.mark.parametrize("name", IMAGES)
def test_exports_and_imports_give_the_same_numbers(name: str, tmp_path: Path) -> None:
    """An exported operator gives the executor's outputs in onnxruntime, and after import in an executor."""
    symbol = IMAGES[name]
    data = np.random.RandomState(1).uniform(0.1, 0.9, (2, 4, 5, 6)).astype(np.float32)
    args, aux = parameters(symbol, data=data.shape)
    model = export_model(symbol, args, aux, {"data": data.shape})
    expected = executor_outputs(symbol, args, aux, data=data)
    actual = onnxruntime_outputs(model.SerializeToString(), data=data)
    for left, right in zip(expected, actual, strict=True):
        np.testing.assert_allclose(left, right, rtol=2e-4, atol=2e-5)
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    repeated, of_symbol, states = import_model(path)
    for left, right in zip(expected, executor_outputs(repeated, of_symbol, states, data=data), strict=True):
        np.testing.assert_allclose(left, right, rtol=2e-4, atol=2e-5)


def test_an_embedding_takes_whole_numbers() -> None:
    """Float indices of an Embedding are exported as integers."""
    symbol = mx.sym.Embedding(X, input_dim=7, output_dim=3)
    data = np.float32([[0, 6], [3, 1]])
    args, aux = parameters(symbol, data=(2, 2))
    (actual,) = onnxruntime_outputs(export_model(symbol, args, aux, {"data": (2, 2)}).SerializeToString(), data=data)
    np.testing.assert_array_equal(actual, executor_outputs(symbol, args, aux, data=data)[0])


W = np.random.RandomState(2).uniform(-1, 1, (3, 2, 3, 3)).astype(np.float32)
FILES: dict[str, tuple[list[Any], tuple[int, ...], dict[str, Any]]] = {
    "same padding": ([node("Conv", "x w", "y", auto_pad="SAME_UPPER", strides=[2, 2])], (1, 2, 6, 5), {"w": W}),
    "same padding of nothing": (
        [node("Conv", "x w", "y", auto_pad="SAME_LOWER", kernel_shape=[1, 1], strides=[3, 1])],
        (1, 2, 6, 5),
        {"w": W[:, :, :1, :1]},
    ),
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
    "constants turned": (
        [node("Slice", "v s e a p", "r"), node("Clip", "r  high", "c"), node("Slice", "v s zero a p", "q"),
         node("Concat", "q w", "d", axis=1), node("Add", "x c", "z"), node("Mul", "z d", "y")],
        (2, 3),
        {"v": np.float32([[1, 2, 3]]), "s": np.int64([-1]), "e": np.int64([-9]), "a": np.int64([1]),
         "p": np.int64([-1]), "high": np.float32(2.5), "zero": np.int64([0]), "w": np.float32([[7]])},
    ),
    "clipped": ([node("Clip", "x low ", "y")], (2, 3), {"low": np.float32(0.4)}),
    "scaled": ([node("Resize", "x  s", "y", mode="nearest", coordinate_transformation_mode="asymmetric",
                     nearest_mode="floor")], (1, 2, 3, 4), {"s": np.float32([1, 1, 2, 2])}),
    "mean of two": ([node("Mean", "x x", "m"), node("Max", "m x", "y")], (2, 3), {}),
    "prelu": ([node("PRelu", "x w", "y")], (2, 3, 2, 2), {"w": np.float32([0.1, 0.2, 0.3]).reshape(3, 1, 1)}),
    "flattened": ([node("Flatten", "x", "y", axis=2)], (2, 3, 4, 5), {}),
    "largest": ([node("ArgMax", "x", "i", axis=1), node("Cast", "i", "y", to=1)], (2, 5), {}),
    "gelu": ([node("Gelu", "x", "y")], (2, 5), {}),
    "gelu by tanh": ([node("Gelu", "x", "y", approximate="tanh")], (2, 5), {}),
    "remainder": ([node("Sub", "x h", "d"), node("Mod", "d m", "y", fmod=1)], (2, 5),
                  {"h": np.float32(0.6), "m": np.float32([[0.3], [-0.4]])}),
    "expanded": ([node("Expand", "x n", "y")], (2, 1, 3), {"n": np.int64([4, 1, 5, 1])}),
    "expanded constant": ([node("Expand", "c n", "e"), node("Add", "x e", "y")], (2, 3),
                          {"c": np.ones((1, 3), np.float32), "n": np.int64([2, 3])}),
    "normed": ([node("ReduceMean", "x", "m", axes=[-1]), node("Sub", "x m", "y")], (2, 3, 4), {}),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_files_of_others(name: str, tmp_path: Path) -> None:
    """ONNX nodes as other programs write them give onnxruntime's outputs after import."""
    nodes, shape, initializers = FILES[name]
    if name == "constants turned":  # an omitted input has an empty name
        nodes[1].input[:] = ["r", "", "high"]
    if name in ("clipped", "scaled"):
        nodes[0].input[:] = ["x", "low"] if name == "clipped" else ["x", "", "s"]
    if name == "constants":
        initializers = {**initializers, "v": np.float32([[1, 2, 3]])}
    opset = 20 if name.startswith("gelu") else 13
    data, expected = write_model(tmp_path / "m.onnx", nodes, shape, initializers=initializers, opset=opset)
    symbol, args, aux = import_model(tmp_path / "m.onnx")
    for left, right in zip(executor_outputs(symbol, args, aux, x=data), expected, strict=True):
        assert left.shape == (right.shape or (1,))
        np.testing.assert_allclose(left, right.reshape(left.shape), rtol=1e-4, atol=1e-5)


def test_old_softmax_flattens(tmp_path: Path) -> None:
    """Before opset 13 softmax is taken over all axes from ``axis`` on."""
    data, expected = write_model(tmp_path / "m.onnx", [node("Softmax", "x", "y", axis=1)], (2, 3, 4), opset=11)
    symbol, args, aux = import_model(tmp_path / "m.onnx")
    np.testing.assert_allclose(executor_outputs(symbol, args, aux, x=data)[0], expected[0], rtol=1e-5)


def test_split_has_several_outputs(tmp_path: Path) -> None:
    """Each part of a Split becomes an output."""
    nodes = [node("Split", "x s", "y y1", axis=1)]
    data, expected = write_model(tmp_path / "m.onnx", nodes, (2, 5), initializers={"s": np.int64([2, 3])}, outputs=2)
    symbol, args, aux = import_model(tmp_path / "m.onnx")
    for left, right in zip(executor_outputs(symbol, args, aux, x=data), expected, strict=True):
        np.testing.assert_array_equal(left, right)


def test_an_imported_model_can_be_trained(tmp_path: Path) -> None:
    """Each parameter of an imported network gets a nonzero gradient."""
    symbol = mx.sym.FullyConnected(mx.sym.Activation(conv(X), act_type="relu"), num_hidden=2)
    args, aux = parameters(symbol, data=(1, 2, 4, 4))
    onnx.save(export_model(symbol, args, aux, {"data": (1, 2, 4, 4)}), tmp_path / "m.onnx")
    repeated, actual, _ = mx.onnx.import_model(tmp_path / "m.onnx")
    executor = repeated.simple_bind(mx.cpu(), data=(1, 2, 4, 4))
    executor.copy_params_from(actual)
    executor.forward(is_train=True, data=mx.nd.ones((1, 2, 4, 4)))
    executor.backward(mx.nd.ones((1, 2)))
    assert all(np.abs(executor.grad_dict[name].asnumpy()).sum() > 0 for name in actual)


def test_what_cannot_be_said_is_listed(tmp_path: Path) -> None:
    """One error lists all operators without a counterpart; missing shapes and unsupported parameters raise errors."""
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


def test_rows_may_be_declared_after_the_first_model(tmp_path: Path) -> None:
    """A row's ONNX name is written and read whenever the row is declared; the package's operators are read first."""
    code = """
import sys
import weftplan as mx
from weftplan.convert.onnx_in import import_model
from weftplan.convert.onnx_out import export_model
from weftplan.ops.core.expression import f
from weftplan.ops.elementwise.rows import row
from weftplan.symbol import topological_order

def read(name):
    path = f"{sys.argv[1]}/{name}.onnx"
    with open(path, "wb") as file:
        file.write(export_model(getattr(mx.sym, name)(mx.sym.Variable("x")), {}, {}, {"x": (2, 3)}).SerializeToString())
    return [node.op.name for node in topological_order(import_model(path)[0].entries) if node.op]

read("exp")
row("fading", lambda x: f.maximum(x, 0) + f.minimum(f.expm1(x), 0), doc="", in_mxnet=False, onnx="Celu")
row("growing", lambda x: f.exp(x), doc="", in_mxnet=False, onnx="Exp")
print(read("fading"), read("growing"))
"""
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=True)
    assert done.stdout == "['fading'] ['exp']\n"


def test_a_crop_of_everything_is_refused(tmp_path: Path) -> None:
    """Negative padding that leaves an axis without elements raises an error that names the axis."""
    write_model(tmp_path / "m.onnx", [node("Pad", "x p", "y")], (2, 3), initializers={"p": np.int64([0, -1, 0, -1])})
    import_model(tmp_path / "m.onnx")
    nodes = [node("Pad", "x p", "y")]
    graph = onnx.helper.make_graph(
        nodes,
        "g",
        [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [2, 3])],
        [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)],
        [onnx.numpy_helper.from_array(np.int64([0, -2, 0, -1]), "p")],
    )
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 13)]), tmp_path / "m.onnx")
    with pytest.raises(MXNetError, match="removes all of axis 1"):
        import_model(tmp_path / "m.onnx")


@pytest.mark.parametrize("content", [b"", b"nonsense", b"version https://git-lfs.github.com/spec/v1\n", b"\x00" * 64])
def test_what_is_no_model(content: bytes, tmp_path: Path) -> None:
    """A file that is no ONNX model raises a FormatError that names the file."""
    (tmp_path / "m.onnx").write_bytes(content)
    with pytest.raises(FormatError, match=r"m\.onnx"):
        import_model(tmp_path / "m.onnx")


def test_damaged_models(tmp_path: Path) -> None:
    """A model with changed bytes is imported or raises an MXNetError."""
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


def test_names_and_shapes_of_a_file(tmp_path: Path) -> None:
    """Export and import keep node names; the metadata has input and output shapes, with 0 for unknown dimensions."""
    net = mx.sym.Activation(conv(X, name="conv"), act_type="relu", name="act")
    net = mx.sym.softmax(mx.sym.FullyConnected(net, num_hidden=2, name="fc"), name="scores")
    args, aux = parameters(net, data=(1, 3, 5, 5))
    path = tmp_path / "net.onnx"
    model = export_model(net, args, aux, {"data": (1, 3, 5, 5)})
    onnx.save(model, path)
    symbol, _, _ = mx.onnx.import_model(path)
    assert symbol.list_outputs() == ["scores_output"]
    assert {"conv_output", "act_output", "fc_output"} <= {*symbol.get_internals().list_outputs()}
    told = mx.contrib.onnx.get_model_metadata(path)
    assert told == {"input_tensor_data": [("data", (1, 3, 5, 5))], "output_tensor_data": [("scores_output", (1, 2))]}
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "N"
    onnx.save(model, path)
    assert mx.contrib.onnx.get_model_metadata(path)["input_tensor_data"] == [("data", (0, 3, 5, 5))]


def test_names_that_two_operators_would_have(tmp_path: Path) -> None:
    """If two operators would get one name, the second gets a default name; a suffix ``_output`` is dropped."""
    nodes = [
        node("Relu", "x", "a_output"),
        node("Tanh", "a_output", "a"),
        node("Sigmoid", "a", "y"),
    ]
    write_model(tmp_path / "net.onnx", nodes, (2, 3))
    symbol, _, _ = import_model(tmp_path / "net.onnx")
    names = symbol.get_internals().list_outputs()
    assert names[:2] == ["x", "a_output"]
    assert names[2].startswith("tanh")
    assert names[3] == "y_output"


def free_batch_network() -> Any:
    """Return a small convolutional classifier whose layers do not depend on the batch size."""
    return mx.sym.FullyConnected(mx.sym.Flatten(mx.sym.relu(conv(X, name="c"))), num_hidden=3, name="f")


def test_an_open_batch(tmp_path: Path) -> None:
    """With ``dynamic`` a model takes any batch, declares it as ``batch``, and gives the executor's outputs."""
    onnxruntime = pytest.importorskip("onnxruntime")
    net = free_batch_network()
    args, aux = parameters(net, data=(2, 3, 6, 6))
    path = mx.onnx.export_model(net, {**args, **aux}, [(2, 3, 6, 6)], onnx_file_path=tmp_path / "m.onnx", dynamic=True)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    assert session.get_inputs()[0].shape == ["batch", 3, 6, 6]
    assert session.get_outputs()[0].shape == ["batch", 3]
    for batch in (1, 5):
        data = np.random.default_rng(batch).random((batch, 3, 6, 6), dtype=np.float32)
        (expected,) = executor_outputs(net, args, aux, data=data)
        np.testing.assert_allclose(session.run(None, {"data": data})[0], expected, rtol=1e-5, atol=1e-6)


def test_an_open_size_that_an_operator_needs(tmp_path: Path) -> None:
    """An operator with the open size in its parameters is named, and no file is written."""
    net = mx.sym.Reshape(X, shape=(6, -1), name="rows")
    with pytest.raises(ShapeError, match=r"rows.* \(Reshape\) depends on a size that is to stay open"):
        mx.onnx.export_model(
            net, {}, onnx_file_path=tmp_path / "m.onnx", dynamic=True, dynamic_input_shapes=[(None, 6)]
        )
    assert not (tmp_path / "m.onnx").exists()
