"""``weftplan inspect`` and ``weftplan run``: output for checkpoints, and errors for damaged files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

import weftplan as mx
from weftplan.cli import main
from weftplan.cli.model_files import epochs
from weftplan.cli.run import results as run_results
from weftplan.report.inspection import inspect
from weftplan.training.fit.parameter_files import save_checkpoint


def call(*args: object) -> Result:
    """Run a command and return click's result; an unexpected exception fails the test."""
    return CliRunner().invoke(main, list(map(str, args)), catch_exceptions=False)


def network() -> mx.sym.Symbol:
    """Return a network for 3 channels: convolution, batch normalization, relu, pooling, and softmax over 5 classes."""
    result = mx.sym.Convolution(mx.sym.Variable("data"), kernel=(3, 3), num_filter=4, pad=(1, 1), name="conv")
    result = mx.sym.Activation(mx.sym.BatchNorm(result, name="bn"), act_type="relu", name="relu")
    result = mx.sym.Pooling(result, global_pool=True, kernel=(1, 1), pool_type="avg", name="pool")
    result = mx.sym.FullyConnected(result, num_hidden=5, name="fc")
    return mx.sym.SoftmaxOutput(result, name="softmax")


def parameters() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (arguments, auxiliary states) of the network, the same at each call."""
    random = np.random.RandomState(3)
    symbol = network()
    shapes, _, states = symbol.infer_shape(data=(1, 3, 8, 8))
    args = {
        name: mx.nd.array(random.uniform(-1, 1, shape))
        for name, shape in zip(symbol.list_arguments(), shapes, strict=True)
        if name not in ("data", "softmax_label")
    }
    args["bn_gamma"][:] = 1
    aux = {
        name: mx.nd.array(random.uniform(0.5, 1, shape))
        for name, shape in zip(symbol.list_auxiliary_states(), states, strict=True)
    }
    return args, aux


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    """Save the network as epoch 7 and return the checkpoint's prefix."""
    save_checkpoint(tmp_path / "net", 7, network(), *parameters())
    return tmp_path / "net"


def test_inspect_counts_what_there_is(prefix: Path) -> None:
    """Inspect reports the network's shapes, parameters, operations and bytes, and the planner's total."""
    result = call("inspect", prefix, 7, "--shape", "data=2,3,8,8", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    layers = {layer["name"]: layer for layer in report["layers"]}
    assert layers["conv"]["shape"] == [2, 4, 8, 8]
    assert layers["conv"]["parameters"] == 4 * 3 * 9 + 4
    assert layers["conv"]["flops"] == 2 * (2 * 4 * 8 * 8) * 27 + 2 * 4 * 8 * 8
    assert layers["fc"]["flops"] == 2 * 2 * 5 * 4 + 2 * 5
    assert layers["conv"]["nbytes"] == 4 * 2 * 4 * 8 * 8
    assert report["parameters"] == sum(array.size for table in parameters() for array in table.values())
    assert report["version"] == "MXNet 1.9.1"
    assert (len(report["matched"]), report["missing"], report["unused"]) == (8, [], [])
    plan = network().plan({"data": (2, 3, 8, 8)}, train=False)
    assert report["inference_bytes"] == plan.total
    assert "it can be run" in report["verdict"]


def test_parameters_tell_the_shape_of_the_input(prefix: Path) -> None:
    """Without --shape the stored convolution gives layout and channels, and the verdict an example of --shape."""
    result = call("inspect", prefix, 7)
    assert "data: ? x 3 x ? x ? (NCHW with 3 channels)" in result.output
    assert "--shape data=1,3,224,224" in result.output
    assert "net-0007.params" in call("inspect", f"{prefix}-symbol.json").output


def test_the_first_fully_connected_layer_tells_the_side_of_images(tmp_path: Path) -> None:
    """The first fully connected layer's weights give the image size, in inspect and in errors about --shape."""
    symbol = mx.models.get("lenet")
    shapes, _, _ = symbol.infer_shape(data=(1, 1, 28, 28))
    known = dict(zip(symbol.list_arguments(), shapes, strict=True))
    args = {name: mx.nd.zeros(shape) for name, shape in known.items() if name not in ("data", "softmax_label")}
    save_checkpoint(tmp_path / "net", 0, symbol, args, {})
    said = "--shape data=N,C,H,W, such as --shape data=1,1,28,28"
    assert said in words(call("inspect", tmp_path / "net", 0))
    assert said in words(call("inspect", tmp_path / "net"))  # the only parameter file is read
    save_checkpoint(tmp_path / "net", 1, symbol, args, {})
    assert "--shape data=N,C,H,W, such as --shape data=1,3,224,224" in words(call("inspect", tmp_path / "net"))
    for command, *tail in (("inspect",), ("convert", tmp_path / "net.onnx")):
        result = call(command, tmp_path / "net", 0, *tail, "--shape", "data=784")
        assert result.exit_code == 1
        assert "differ in rank" in result.output
        assert f"type for example {said}" in words(result)
    assert f"type for example {said}" in words(call("convert", tmp_path / "net", 0, tmp_path / "net.onnx"))


def words(result: Result) -> str:
    """Return the output with line breaks and runs of spaces replaced by single spaces."""
    return " ".join(result.output.split())


def test_built_in_networks_have_usual_shapes() -> None:
    """A built-in network without --shape has its usual shape; an error about --shape suggests it."""
    report = json.loads(call("inspect", "lenet", "--json").stdout)
    assert report["inputs"][0]["shape"] == [1, 1, 28, 28]
    assert report["inference_bytes"] == mx.models.get("lenet").plan({"data": (1, 1, 28, 28)}, train=False).total
    assert json.loads(call("inspect", "lstm", "--json").stdout)["inputs"][0]["shape"] == [1, 35]
    for command in ("inspect", "plan"):
        result = call(command, "lenet", "--shape", "data=1,28,28")
        assert "type for example --shape data=N,C,H,W, such as --shape data=1,1,28,28" in words(result)


def test_shapes_that_an_onnx_file_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An ONNX file's input shape is used unless --shape or --batch is given; the file is parsed once."""
    onnx = pytest.importorskip("onnx")
    parse, parsed = onnx.load_model_from_string, []
    monkeypatch.setattr(onnx, "load_model_from_string", lambda content: parsed.append(1) or parse(content))
    args, aux = parameters()
    model = mx.onnx.export_model(network(), {**args, **aux}, [(2, 3, 8, 8)], onnx_file_path=tmp_path / "net.onnx")
    sizes = [json.loads(call("inspect", model, "--json", *more).stdout)["inputs"][0]["shape"]
             for more in ((), ("--shape", "data=5,3,8,8"))]  # fmt: skip
    assert sizes == [[2, 3, 8, 8], [5, 3, 8, 8]]
    assert len(parsed) == 2
    assert "batch 2" in words(call("plan", model))
    assert "batch 7" in words(call("plan", model, "--batch", 7))
    changed = onnx.load(model)
    for dim in changed.graph.input[0].type.tensor_type.shape.dim[2:]:
        dim.dim_param = "side"
    onnx.save(changed, model)
    result = call("plan", model)
    assert result.exit_code == 1
    assert "shape of argument 'data' is unknown" in words(result)
    assert "created at" not in words(result)


@pytest.mark.parametrize("command", ["inspect", "convert"])
def test_misspelt_inputs_are_refused(prefix: Path, tmp_path: Path, command: str) -> None:
    """--shape for an unknown input exits with 2 and suggests the nearest name."""
    tail = (tmp_path / "net.onnx",) if command == "convert" else ()
    result = call(command, prefix, 7, *tail, "--shape", "dta=1,3,8,8")
    assert result.exit_code == 2
    assert "did you mean 'data'?" in words(result)


def test_features_tell_it_all() -> None:
    """If the first layer takes vectors, its stored weights leave only the batch size unknown."""
    symbol = mx.sym.FullyConnected(mx.sym.Variable("data") * 2, num_hidden=3, name="fc")
    report = inspect(symbol, args={"fc_weight": mx.nd.ones((3, 6)), "fc_bias": mx.nd.ones((3,))}, aux={})
    assert report.inputs[0].shape == (0, 6)
    assert report.inputs[0].known == "6 features in a sample"


def test_what_is_strange_about_a_checkpoint() -> None:
    """Inspect reports an ignored gamma, missing statistics, NaN, another network's names and wrong shapes."""
    args, aux = parameters()
    args["bn_gamma"][:] = 2
    args["fc_bias"][:] = np.nan
    del aux["bn_moving_var"]
    actual = inspect(network(), args=args, aux=aux)
    words = " ".join(actual.warnings)
    assert "fix_gamma is set, so the stored gamma" in words
    assert "moving mean or variance is missing" in words
    assert "['fc_bias']: not every value is a finite number" in words
    assert actual.missing == ["bn_moving_var"]
    second = inspect(network(), args={"a": mx.nd.ones((1,)), "fc_bias": mx.nd.ones((5,))}, aux={})
    assert "another network: 1 of 8 match, 7 are missing, 0 have another shape and 1 are unused" in second.verdict
    args, aux = parameters()
    args["fc_weight"] = mx.nd.ones((5, 9))
    wrong = inspect(network(), args=args, aux=aux, shapes={"data": (1, 3, 8, 8)})
    assert wrong.wrong == ["fc_weight: stored (5, 9), the network needs (5, 4)"]


def test_parameters_of_another_network_with_the_same_names() -> None:
    """Inspect lists stored shapes that contradict the network or each other."""
    args, aux = parameters()
    args["fc_weight"] = mx.nd.ones((7, 4))
    report = inspect(network(), args=args, aux=aux)
    assert report.wrong == ["fc_weight: stored (7, 4), the network needs (5, ?)"]
    assert "but 1 parameter is of another shape; it has" in report.verdict
    args["fc_weight"], args["conv_weight"] = mx.nd.ones((5, 4)), mx.nd.ones((4, 3, 3, 3))
    args["bn_gamma"] = mx.nd.ones((9,))
    report = inspect(network(), args=args, aux=aux)
    assert "BatchNorm" in report.warnings[-1]
    assert "contradict each other" in report.verdict
    deep = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=3, name="a")
    deep = mx.sym.FullyConnected(deep, num_hidden=2, name="b")
    shapes = {"a_weight": (3, 6), "a_bias": (3,), "b_weight": (2, 5), "b_bias": (2,)}
    report = inspect(deep, args={name: mx.nd.ones(shape) for name, shape in shapes.items()}, aux={})
    assert "(2, 5)" in " ".join([*report.wrong, *report.warnings])
    assert "cannot be run with them" in report.verdict or "another shape" in report.verdict


def test_unknown_operators_are_listed(prefix: Path) -> None:
    """Inspect shows a network with an unsupported operator and names its nodes."""
    path = Path(f"{prefix}-symbol.json")
    path.write_text(path.read_text().replace('"op": "Pooling"', '"op": "Mystery"'))
    result = call("inspect", path)
    assert result.exit_code == 0
    assert "Mystery (not supported)" in result.output
    assert "Mystery (1 node: pool)" in result.output


def test_a_page(prefix: Path, tmp_path: Path) -> None:
    """--html writes a page with every layer and the verdict, and no link to another site."""
    result = call("inspect", prefix, 7, "--html", tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert f"wrote {tmp_path / 'page.html'}" in result.output
    assert "<td>conv</td>" in text
    assert "http" not in text.replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert text.count("<svg") == 1


def executor_outputs(data: Any) -> Any:
    """Return the network's output for ``data``, computed by an executor."""
    executor = network().simple_bind(mx.cpu(), data=data.shape, grad_req="null")
    executor.copy_params_from(*parameters())
    return executor.forward(data=mx.nd.array(data))[0].asnumpy()


def test_run_gives_what_an_executor_gives(prefix: Path, tmp_path: Path) -> None:
    """``run`` on .npy and .npz files writes an executor's outputs, and prints the best class by name."""
    data = np.random.RandomState(1).uniform(-1, 1, (2, 3, 8, 8)).astype(np.float32)
    np.save(tmp_path / "x.npy", data)
    np.savez(tmp_path / "x.npz", data=data)
    (tmp_path / "names").write_text("\n".join(f"class{i}" for i in range(5)))
    for inputs in ("x.npy", "x.npz"):
        out = tmp_path / "out.npz"
        options = ("--top", 1, "--labels", tmp_path / "names", "-o", out)
        result = call("run", prefix, 7, "--input", tmp_path / inputs, *options)
        assert result.exit_code == 0, result.output
        written = np.load(out)["softmax_output"]
        np.testing.assert_array_equal(written, executor_outputs(data))
        assert f"class{written[0].argmax()}" in result.output
        assert result.output.count("class") == 2


def test_run_on_an_image(prefix: Path, tmp_path: Path) -> None:
    """``run`` resizes an image, subtracts --mean, divides by --std, and puts the channels first in RGB order."""
    image_module = pytest.importorskip("PIL.Image")
    pixels = np.zeros((4, 6, 3), np.uint8)
    pixels[..., 0], pixels[..., 1], pixels[..., 2] = 10, 20, 30
    image_module.fromarray(pixels).save(tmp_path / "x.png")
    out = tmp_path / "out.npz"
    options = ("--resize", "8", "--mean", "1,2,3", "--std", "2", "-o", out)
    result = call("run", prefix, 7, "--input", f"data={tmp_path / 'x.png'}", *options)
    assert result.exit_code == 0, result.output
    data = np.empty((1, 3, 8, 8), np.float32)
    data[0] = np.float32([4.5, 9, 13.5])[:, None, None]
    np.testing.assert_array_equal(np.load(out)["softmax_output"], executor_outputs(data))


def test_a_label_needs_no_name_and_pixels_no_dtype(tmp_path: Path) -> None:
    """An input that only a loss reads is a label and not required; uint8 pixels and indices are accepted."""
    user, score = mx.sym.Variable("user"), mx.sym.Variable("score")
    pixels = mx.sym.FullyConnected(mx.sym.Variable("pixels"), num_hidden=2, name="fc")
    rated = mx.sym.Embedding(user, input_dim=9, output_dim=2, name="users") * pixels
    save_checkpoint(
        tmp_path / "net",
        0,
        mx.sym.LinearRegressionOutput(rated, score, name="out"),
        {"users_weight": mx.nd.ones((9, 2)), "fc_weight": mx.nd.ones((2, 3)), "fc_bias": mx.nd.zeros((2,))},
        {},
    )
    np.save(tmp_path / "u.npy", np.array([0, 8]))
    np.save(tmp_path / "p.npy", np.full((2, 3), 200, np.uint8))
    inputs = ("--input", f"user={tmp_path / 'u.npy'}", "--input", f"pixels={tmp_path / 'p.npy'}")
    result = call("run", tmp_path / "net", 0, *inputs)
    assert result.exit_code == 0, result.output
    assert "from 600 to 600" in result.output
    assert "score: shape unknown (a label)" in call("inspect", tmp_path / "net", 0).output


@pytest.mark.parametrize("command", ["inspect", "run"])
def test_bad_files_are_named(prefix: Path, tmp_path: Path, command: str) -> None:
    """A missing epoch, swapped files, a Git LFS pointer and a missing file give errors with the reason."""
    np.save(tmp_path / "x.npy", np.ones((1, 3, 8, 8)))
    tail = ("--input", tmp_path / "x.npy") if command == "run" else ()
    symbol, params = f"{prefix}-symbol.json", f"{prefix}-0007.params"
    (tmp_path / "lfs").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    for inputs, words in (
        ((prefix, 8), "beside"),
        ((params, params), "holds arrays and no network"),
        ((symbol, symbol), "holds no parameters"),
        ((symbol, tmp_path / "lfs"), "Git LFS"),
        ((tmp_path / "lfs", params), "Git LFS"),
        ((tmp_path / "nothing", params), "nothing-symbol.json' and no built-in"),
    ):
        result = call(command, *inputs, *tail)
        assert result.exit_code != 0, inputs
        assert words in result.output, result.output


def test_run_says_what_is_missing(prefix: Path, tmp_path: Path) -> None:
    """``run`` lists all missing parameters, and gives the reason why an input cannot be used."""
    np.save(tmp_path / "x.npy", np.ones((1, 3, 8, 8), np.float32))
    np.save(tmp_path / "none.npy", np.ones((0, 3, 8, 8), np.float32))
    np.save(tmp_path / "four.npy", np.ones((1, 4, 8, 8), np.float32))
    np.save(tmp_path / "objects.npy", np.array([{}], object))
    np.save(tmp_path / "flat.npy", np.ones((2, 192), np.float32))
    (tmp_path / "x.png").write_bytes(b"no image")
    (tmp_path / "x.txt").write_text("{}")
    (tmp_path / "lfs.png").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    for name, words in (
        ("four.npy", "conv_weight has shape (4, 3, 3, 3), the inputs ask for (4, 4, 3, 3)"),
        ("objects.npy", "it holds objects of Python, which are not read"),
        ("none.npy", "data has shape (0, 3, 8, 8): there is nothing to compute"),
        ("x.txt", "neither an array (.npy, .npz), a table (.csv) nor an image"),
        ("lfs.png", "a pointer of Git LFS"),
        ("four.npy", "data was given shape (1, 4, 8, 8), the network takes (N, C, H, W), such as (1, 3, 224, 224)"),
        ("flat.npy", "data was given shape (2, 192), the network takes (N, C, H, W)"),
        ("x.png", "no image that can be read"),
    ):
        result = call("run", prefix, 7, "--input", tmp_path / name)
        assert result.exit_code == 1
        assert words in result.output
    args, aux = parameters()
    del args["fc_weight"], aux["bn_moving_var"]
    save_checkpoint(prefix, 9, None, args, aux)
    result = call("run", prefix, 9, "--input", tmp_path / "x.npy")
    assert "lack ['fc_weight', 'bn_moving_var']" in result.output


def test_label_that_passes_a_reshape(tmp_path: Path) -> None:
    """A recurrent network whose label passes a Reshape runs and converts without a label shape."""
    pytest.importorskip("onnxruntime")
    cell = mx.rnn.LSTMCell(4, prefix="l0_")
    embedded = mx.sym.Embedding(mx.sym.Variable("data"), input_dim=9, output_dim=5, name="embed")
    outputs, _ = cell.unroll(6, embedded, merge_outputs=True)
    scores = mx.sym.FullyConnected(mx.sym.Reshape(outputs, shape=(-1, 4)), num_hidden=9, name="pred")
    label = mx.sym.Reshape(mx.sym.Variable("softmax_label"), shape=(-1,))
    module = mx.mod.Module(mx.sym.SoftmaxOutput(scores, label, name="softmax"))
    module.bind([("data", (2, 6))], [("softmax_label", (2, 6))])
    module.init_params(mx.init.Xavier())
    module.save_checkpoint(tmp_path / "lstm", 3)
    words = np.random.RandomState(0).randint(0, 9, (2, 6)).astype("f")
    np.save(tmp_path / "x.npy", words)
    result = call("run", tmp_path / "lstm", 3, "--input", tmp_path / "x.npy", "-o", tmp_path / "out.npz")
    assert result.exit_code == 0, result.output
    module.forward(mx.io.DataBatch([mx.nd.array(words)], [mx.nd.zeros((2, 6))]), is_train=False)
    with np.load(tmp_path / "out.npz") as actual:
        np.testing.assert_allclose(actual["softmax_output"], module.get_outputs()[0].asnumpy(), rtol=1e-5)
    for more in ((), ("--shape", "softmax_label=2,6")):
        result = call("convert", tmp_path / "lstm", 3, tmp_path / "l.onnx", "--shape", "data=2,6", *more)
        assert result.exit_code == 0, result.output
        assert "checked with onnxruntime" in result.output


def save_embedding_network(tmp_path: Path) -> Path:
    """Save a network with an embedding of 5 rows, whose label passes a Reshape; return its prefix."""
    rows = mx.sym.Embedding(mx.sym.Variable("data"), input_dim=5, output_dim=3, name="embed")
    flat = mx.sym.FullyConnected(mx.sym.Reshape(rows, shape=(-1, 3)), num_hidden=4, name="fc")
    label = mx.sym.Reshape(mx.sym.Variable("softmax_label"), shape=(-1,))
    symbol = mx.sym.SoftmaxOutput(flat, label, name="softmax")
    random = np.random.RandomState(0)
    shapes = {"embed_weight": (5, 3), "fc_weight": (4, 3), "fc_bias": (4,)}
    args = {name: mx.nd.array(random.uniform(-1, 1, shape)) for name, shape in shapes.items()}
    save_checkpoint(tmp_path / "words", 1, symbol, args, {})
    return tmp_path / "words"


def test_inspect_gives_sizes_if_a_label_passes_a_reshape(tmp_path: Path) -> None:
    """A label that passes a Reshape gets the shape of data, so all sizes are known from data."""
    result = call("inspect", save_embedding_network(tmp_path), 1, "--shape", "data=2,3", "--json")
    found = json.loads(result.output)
    assert {one["name"]: one["shape"] for one in found["inputs"]} == {"data": [2, 3], "softmax_label": [2, 3]}
    assert found["inference_bytes"] > 0
    assert found["training_bytes"] > found["inference_bytes"]


def test_run_warns_about_indices_outside_and_nan(tmp_path: Path, prefix: Path) -> None:
    """Indices out of range are clipped, as in MXNet, with a warning; NaN in the input gives a warning, too."""
    words_prefix = save_embedding_network(tmp_path)
    outputs = []
    for name, indices in (("inside", [[0, 4, 4]]), ("outside", [[-3, 4, 9]])):
        np.save(tmp_path / "indices.npy", np.array(indices))
        result = call("run", words_prefix, 1, "--input", tmp_path / "indices.npy", "-o", tmp_path / f"{name}.npz")
        assert result.exit_code == 0
        assert ("indices from -3 to 9, and the network has 5" in result.output) == (name == "outside")
        outputs.append(np.load(tmp_path / f"{name}.npz")["softmax_output"])
    assert np.array_equal(*outputs)
    pixels = np.zeros((1, 3, 8, 8), np.float32)
    for value in (0, np.nan):
        pixels[0, 0, 0, 0] = value
        np.save(tmp_path / "pixels.npy", pixels)
        said = call("run", prefix, 7, "--input", tmp_path / "pixels.npy").output
        assert ("data holds NaN" in said) == bool(np.isnan(value))


@pytest.mark.parametrize("head", ["", "left,right\n", "\ufeff"])
def test_run_on_a_table(tmp_path: Path, head: str) -> None:
    """Each CSV row is a sample; a header row and a byte order mark are skipped; a bad table is an error."""
    symbol = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=3, name="fc")
    args = {"fc_weight": mx.nd.array([[1, 0], [0, 1], [1e-9, 0]]), "fc_bias": mx.nd.zeros((3,))}
    save_checkpoint(tmp_path / "net", 0, symbol, args, {})
    path = tmp_path / "rows.csv"
    path.write_text(head + "1,2\n3,4.5\n", encoding="utf-8")
    result = call("run", tmp_path / "net", 0, "--input", path, "-o", tmp_path / "out.npz")
    assert result.exit_code == 0, result.output
    assert "  0:      1e-09      2" in result.output  # a small value is not shown as 0
    assert np.load(tmp_path / "out.npz")["fc_output"][:, :2].tolist() == [[1, 2], [3, 4.5]]
    for text, said in (("a,b\n1,x\n", "no table of numbers"), ("a,b\n", "no row of numbers"), ("", "no row of")):
        path.write_text(text)
        result = call("run", tmp_path / "net", 0, "--input", path)
        assert result.exit_code == 1
        assert said in result.output


def test_a_terminal_shows_the_first_samples(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A pipe gets all samples; a terminal gets the first hundred, and the option that writes all."""
    values, names = np.ones((102, 2), np.float32), [str(k) for k in range(102)]
    run_results.show("out", values, 1, None, names)
    assert len(capsys.readouterr().out.splitlines()) == 103
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    run_results.show("out", values, 1, None, names)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 102
    assert lines[-1] == "  and 2 more samples: -o FILE.csv writes all of them"


def test_run_takes_the_only_parameter_file(prefix: Path, tmp_path: Path) -> None:
    """`run` without PARAMS reads the only parameter file next to the model; with several it lists them."""
    np.save(tmp_path / "x.npy", np.ones((1, 3, 8, 8), np.float32))
    arguments = ["run", str(prefix), "--input", str(tmp_path / "x.npy")]
    (file,) = epochs(prefix)
    assert CliRunner().invoke(main, arguments).exit_code == 0
    shutil.copy(file, file.with_name(f"{prefix.name}-0099.params"))
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert f"{prefix.name}-0099.params" in words(result)


def test_output_files_are_checked_before_the_work(tmp_path: Path) -> None:
    """A missing folder for an output file is an error before anything is planned, converted or run."""
    missing = tmp_path / "none" / "x.html"
    for arguments in (["plan", "mlp", "--html", str(missing)], ["inspect", "mlp", "--html", str(missing)]):
        result = CliRunner().invoke(main, arguments)
        assert result.exit_code == 1
        assert "there is no folder" in words(result)
        assert "in all" not in words(result)
