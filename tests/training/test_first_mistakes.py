"""Mistakes of beginners: each error names the expected value, the actual value and the remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import weftplan as mx
from weftplan.cli import main
from weftplan.errors import BindError, ParameterError, PlanError


def network() -> mx.sym.Symbol:
    """Return a classifier of one layer."""
    return mx.sym.SoftmaxOutput(mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=3, name="fc"), name="softmax")


@pytest.mark.parametrize("context", [2, "gpu", ["gpu"], [0, 1], 1.5])
def test_what_is_no_context(context: Any):
    """A context that is a number, a string or a list of these raises in Module and in ``plan``, with an example."""
    with pytest.raises(BindError, match=r"context must be a context such as mx\.cpu\(0\), or a list of them, got "):
        mx.mod.Module(network(), context=context)
    with pytest.raises(PlanError, match=r"context must be a context such as mx\.cpu\(0\) or mx\.gpu\(0\)"):
        network().plan(data=(2, 4), context=context)


@pytest.mark.parametrize("name", ["num_epoch", "begin_epoch"])
@pytest.mark.parametrize("value", ["3", 1.5, -1, True, [2]])
def test_what_is_no_number_of_epochs(name: str, value: Any):
    """An invalid number of epochs raises before bind; a NumPy integer is accepted."""
    module = mx.mod.Module(network())
    data = mx.io.NDArrayIter(np.zeros((4, 4)), np.zeros(4), 2)
    with pytest.raises(ParameterError, match=rf"fit: {name} must be a whole number of epochs, 0 or more, got "):
        module.fit(data, **{"num_epoch": 2, name: value})
    assert not module.binded
    module.fit(data, num_epoch=np.int64(1))


@pytest.mark.parametrize("array", [np.zeros((2, 4)), mx.nd.zeros((2, 4))], ids=["numpy", "NDArray"])
def test_an_array_for_its_shape(array: Any):
    """``plan`` refuses an array in place of a shape; the error gives the array's shape, not its values."""
    for give in ({"data": array}, {"shapes": {"data": array}}):
        with pytest.raises(PlanError) as caught:
            network().plan(**give)
        assert str(caught.value) == "the shape of 'data' is given as an array of shape (2, 4): give that shape"


@pytest.mark.parametrize(
    ("name", "meant"),
    [("Conv2D", "Convolution"), ("Dense", "FullyConnected"), ("Linear", "FullyConnected"), ("MaxPool", "Pooling"),
     ("ReLU", "relu"), ("LSTM", "RNN"), ("BatchNorm2d", "BatchNorm")],
)  # fmt: skip
def test_names_of_other_libraries(name: str, meant: str):
    """An operator name of another library raises AttributeError, which suggests the name in this package."""
    for space in (mx.sym, mx.nd):
        with pytest.raises(AttributeError, match=f"did you mean '{meant}'"):
            getattr(space, name)


def run_command(*args: object, **environment: str | None) -> tuple[str, int]:
    """Run the command line with extra environment variables; return (output, exit code)."""
    done = CliRunner().invoke(main, [str(arg) for arg in args], env={"COLUMNS": "200", **environment})
    return done.output, done.exit_code


def test_commands(tmp_path: Path):
    """An empty input folder and a CUDA device name raise; kernels are in JSON on request; inspect finds parameters."""
    module = mx.mod.Module(network())
    module.bind([("data", (2, 4))], [("softmax_label", (2,))])
    module.init_params()
    module.save_checkpoint(tmp_path / "net", 3)
    (tmp_path / "photos").mkdir()
    output, code = run_command("run", tmp_path / "net", 3, "--input", tmp_path / "photos")
    assert (code, f"{tmp_path}/photos: no image is in this folder; expected .jpg" in output) == (1, True)
    for wrong, meant in (("cuda", "gpu0"), ("cuda:1", "gpu1"), ("GPU", "gpu0")):
        output, code = run_command("plan", "lenet", "--device", wrong)
        assert (code, f"did you mean {meant}?" in output) == (2, True)
    assert '"kernels"' not in run_command("plan", "lenet", "--json")[0]
    assert '"kernels"' in run_command("plan", "lenet", "--json", "--kernels")[0]
    output, code = run_command("inspect", tmp_path / "net")
    assert code == 0
    assert "parameters of net-0003.params, the only file" in output
    assert "2 matched" in output
    module.save_checkpoint(tmp_path / "net", 4)
    assert "parameters beside it: net-0003.params, net-0004.params" in run_command("inspect", tmp_path / "net")[0]


def test_variables_of_mxnet_that_mean_nothing_here():
    """doctor names each MXNet variable that is set and has no effect, with the reason."""
    output, code = run_command("doctor", MXNET_CPU_PARALLEL_RAND_COPY="1", MXNET_SUBGRAPH_BACKEND="NONE")
    assert code == 0
    for name in ("MXNET_CPU_PARALLEL_RAND_COPY", "MXNET_SUBGRAPH_BACKEND"):
        assert f"{name} is set and has no effect here: " in output
    assert "no effect here" not in run_command("doctor", MXNET_SUBGRAPH_BACKEND=None)[0]
