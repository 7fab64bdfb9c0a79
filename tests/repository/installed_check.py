"""A check of an installed package: import every module, and use every subpackage.

It is run by an interpreter whose environment has only the package and its dependencies.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import tempfile
from pathlib import Path

import numpy as np

OPTIONAL = {"cupy", "mpi4py", "onnx", "onnxruntime", "safetensors", "llvmlite", "PIL", "matplotlib", "sklearn", "torch"}


def check_modules() -> None:
    """Import every module; only optional packages may be missing."""
    import weftplan

    for module in pkgutil.walk_packages(weftplan.__path__, "weftplan."):
        if module.name.endswith("__main__"):
            continue
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] not in OPTIONAL:
                raise


def check_subpackages() -> None:
    """Call every sample, and check that the samples cover all subpackages."""
    import weftplan

    folders = Path(weftplan.__file__).parent.iterdir()
    rooms = {folder.name for folder in folders if folder.is_dir() and (folder / "__init__.py").is_file()}
    assert rooms == {name for names in SAMPLES for name in names.split()}, "a room has no sample here"
    for sample in SAMPLES.values():
        sample()


def plan_and_run() -> None:
    """Plan, report, bind and run a network."""
    import weftplan as mx

    net = mx.models.digits("mlp")
    plan = net.plan(data=(8, 64), grad_req="write")
    assert "<html" in plan.to_html()
    mx.profiler.set_config(aggregate_stats=True, filename=os.devnull)
    mx.profiler.set_state("run")
    executor = net.simple_bind(mx.cpu(), data=(8, 64))
    assert executor.allocated_bytes == plan.peak
    executor.forward(is_train=True, data=np.ones((8, 64), np.float32))
    executor.backward()
    assert all(np.isfinite(array.asnumpy()).all() for array in executor.grad_arrays if array is not None)
    mx.profiler.set_state("stop")
    assert "fc1" in mx.profiler.dumps()


def order_tasks() -> None:
    """Run tasks that the engine orders by the arrays they write."""
    from weftplan import engine

    field = np.zeros((4, 4))
    for number in range(4):
        engine.submit(np.add, field[number], number, out=field[number])
    engine.wait(field)
    assert field[:, 0].tolist() == [0, 1, 2, 3]


def sum_in_store() -> None:
    """Sum three values in a kvstore."""
    import weftplan as mx

    kv = mx.kv.create("device")
    kv.init("w", mx.nd.zeros((2,)))
    kv.push("w", [mx.nd.ones((2,), ctx=mx.cpu(i)) for i in range(3)])
    out = mx.nd.empty((2,))
    kv.pull("w", out=out)
    assert out.asnumpy().tolist() == [3, 3]
    assert "cpu(0)" in mx.storage.memory_summary()


def train_module() -> None:
    """Train a module on two contexts, save it, and load it."""
    import weftplan as mx

    images = np.random.default_rng(0).random((32, 64), dtype=np.float32)
    batches = mx.io.NDArrayIter(images, images.argmax(1) % 10, batch_size=16)
    module = mx.mod.Module(mx.models.digits("mlp"), context=[mx.cpu(0), mx.cpu(1)])
    module.fit(batches, num_epoch=1, progress=False)
    with tempfile.TemporaryDirectory() as folder:
        module.save_checkpoint(f"{folder}/net", 1)
        symbol, arguments, states = mx.model.load_checkpoint(f"{folder}/net", 1)
    assert symbol.list_outputs() == ["softmax_output"]
    assert set(arguments) == set(module.get_params()[0])
    assert not states


def unroll_cell() -> None:
    """Unroll a recurrent cell, and fold the constants of its graph."""
    import weftplan as mx
    from weftplan import convert

    outputs, _ = mx.rnn.LSTMCell(8, prefix="l_").unroll(3, mx.sym.Variable("data"), merge_outputs=True)
    symbol, _, _ = convert.fold_constants(outputs, {}, {})
    assert symbol.list_outputs() == outputs.list_outputs()


def access_torch() -> None:
    """Access ``weftplan.torch``; without PyTorch the error names the package to install."""
    from weftplan import torch

    try:
        actual = str(torch.budget)
    except ModuleNotFoundError as error:
        actual = str(error)
    assert "budget" in actual or "pip install" in actual


def read_switches() -> None:
    """Check that NumPy semantics are off and that the list of build features is not empty."""
    import weftplan as mx

    assert not mx.util.is_np_array()
    assert mx.runtime.feature_list()


def call_command() -> None:
    """Run ``weftplan plan`` in this process."""
    from weftplan.cli import main

    code: object = 0
    try:
        main(["plan", "lenet", "--json"])
    except SystemExit as stop:
        code = stop.code
    assert not code


SAMPLES = {
    "planner symbol models ops kernels executor ndarray device support report profiler": plan_and_run,
    "tasks engine": order_tasks,
    "kvstore storage": sum_in_store,
    "training data": train_module,
    "rnn convert": unroll_cell,
    "torch": access_torch,
    "compat": read_switches,
    "cli": call_command,
}
"""{subpackages: function that uses them}."""


if __name__ == "__main__":
    check_modules()
    check_subpackages()
