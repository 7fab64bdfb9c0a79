"""Parameters as safetensors, and ``weftplan convert``."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import weftplan as mx
from weftplan.cli import main
from weftplan.convert import load_safetensors, save_safetensors
from weftplan.errors import FormatError, MXNetError
from weftplan.training.fit.parameter_files import load_checkpoint, save_checkpoint

ARGS = {
    "w": np.arange(6, dtype=np.float32).reshape(2, 3),
    "half": np.float16([1.5, -2]),
    "whole": np.int64([[2**40]]),
    "bytes": np.uint8([0, 255]),
}


def arrays(table: dict[str, Any]) -> dict[str, Any]:
    """Return the arrays of ``table`` as NDArrays of the same dtypes."""
    return {name: mx.nd.array(values, dtype=values.dtype) for name, values in table.items()}


def test_what_is_written_is_read(tmp_path: Path) -> None:
    """Arguments and auxiliary states are read back with their values and dtypes."""
    path = tmp_path / "p.safetensors"
    save_safetensors(path, arrays(ARGS), arrays({"mean": np.float32([3])}))
    args, aux = load_safetensors(path)
    assert list(aux) == ["mean"]
    for name, values in ARGS.items():
        assert args[name].dtype == values.dtype
        np.testing.assert_array_equal(args[name].asnumpy(), values)


def test_the_reference_library_agrees(tmp_path: Path) -> None:
    """The safetensors library reads files of ``save_safetensors``, and ``load_safetensors`` reads its files."""
    reference = pytest.importorskip("safetensors.numpy")
    path = tmp_path / "p.safetensors"
    save_safetensors(path, arrays(ARGS), {})
    for name, values in reference.load_file(path).items():
        np.testing.assert_array_equal(values, ARGS[name])
    reference.save_file(ARGS, path)
    args, aux = load_safetensors(path)
    assert aux == {}
    assert all((args[name].asnumpy() == values).all() for name, values in ARGS.items())


def test_damaged_files(tmp_path: Path) -> None:
    """A file with changed bytes gives arrays or an MXNetError; a wrong header raises an error that names the file."""
    path = tmp_path / "p.safetensors"
    save_safetensors(path, arrays(ARGS), {})
    content = path.read_bytes()
    random = np.random.RandomState(5)
    for _ in range(400):
        changed = bytearray(content[: random.randint(0, len(content))] if random.rand() < 0.2 else content)
        for _ in range(random.randint(1, 4)):
            if changed:
                changed[random.randint(len(changed))] = random.randint(256)
        path.write_bytes(changed)
        with contextlib.suppress(MXNetError):
            load_safetensors(path)
    for header in ({"a": {"dtype": "F32", "shape": [1 << 61, 8], "data_offsets": [0, 0]}}, [], {"a": 1}, {"a": {}}):
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text)
        with pytest.raises(FormatError, match=r"p\.safetensors"):
            load_safetensors(path)


def test_header_longer_than_its_file(tmp_path: Path) -> None:
    """A header that is said to end after the end of the file is refused, even if its text is complete."""
    (tmp_path / "p.safetensors").write_bytes((9).to_bytes(8, "little") + b"{}")
    with pytest.raises(FormatError, match="the header is said to have 9 of 10 bytes"):
        load_safetensors(tmp_path / "p.safetensors")


def call(*args: object) -> Any:
    """Run the command line and return click's result."""
    return CliRunner().invoke(main, list(map(str, args)), catch_exceptions=False)


def test_the_command(tmp_path: Path) -> None:
    """A checkpoint converted to safetensors and back, or to ONNX, gives equal outputs of ``run``."""
    net = mx.sym.BatchNorm(mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=3, name="fc"), name="bn")
    net = mx.sym.SoftmaxOutput(net, name="softmax")
    random = np.random.RandomState(0)
    args = {"fc_weight": random.rand(3, 4), "fc_bias": random.rand(3), "bn_gamma": np.ones(3), "bn_beta": np.zeros(3)}
    aux = {"bn_moving_mean": random.rand(3), "bn_moving_var": np.ones(3)}
    save_checkpoint(tmp_path / "net", 1, net, float32_arrays(args), float32_arrays(aux))
    safe, back = tmp_path / "p.safetensors", tmp_path / "net-0002.params"
    assert call("convert", tmp_path / "net", 1, safe).exit_code == 0
    assert call("convert", tmp_path / "net", safe, back).exit_code == 0
    assert back.read_bytes() == (tmp_path / "net-0001.params").read_bytes() or load_checkpoint(tmp_path / "net", 2)
    np.save(tmp_path / "x.npy", np.ones((2, 4), np.float32))
    outputs = []
    pytest.importorskip("onnxruntime")
    created = call("convert", tmp_path / "net", 1, tmp_path / "m.onnx", "--shape", "data=2,4")
    assert "checked with onnxruntime" in created.output, created.output
    for model in ((tmp_path / "net", 1), (tmp_path / "net", safe), (tmp_path / "net", 2), (tmp_path / "m.onnx",)):
        result = call("run", *model, "--input", tmp_path / "x.npy", "-o", tmp_path / "o.npz")
        assert result.exit_code == 0, result.output
        outputs.append(next(iter(np.load(tmp_path / "o.npz").values())))
    for second in outputs[1:]:
        np.testing.assert_allclose(second, outputs[0], rtol=1e-5)
    assert call("plan", tmp_path / "m.onnx", "--shape", "data=2,4").exit_code == 0
    assert "ONNX" in call("inspect", tmp_path / "m.onnx").output
    assert "ends in .onnx" in call("convert", tmp_path / "net", 1, tmp_path / "m.txt").output
    assert "--shape data=N,FEATURES" in call("convert", tmp_path / "net", 1, tmp_path / "m.onnx").output


def float32_arrays(table: dict[str, Any]) -> dict[str, Any]:
    """Return the arrays of ``table`` as float32 NDArrays."""
    return {name: mx.nd.array(values) for name, values in table.items()}
