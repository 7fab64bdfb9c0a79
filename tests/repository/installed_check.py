"""A check of an installed package, on any Python: every module imports, and each layer does its work once.

The interpreter of an environment runs it that holds only the package and its dependencies.
"""

from __future__ import annotations

import importlib
import pkgutil

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


def check_layers() -> None:
    """Plan, bind and run a network, order tasks by their arrays, and sum in a store."""
    import weftplan as mx
    from weftplan import engine

    net = mx.models.digits("mlp")
    plan = net.plan(data=(8, 64), grad_req="write")
    executor = net.simple_bind(mx.cpu(), data=(8, 64))
    assert executor.allocated_bytes == plan.peak
    executor.forward(is_train=True, data=np.ones((8, 64), np.float32))
    executor.backward()
    assert all(np.isfinite(array.asnumpy()).all() for array in executor.grad_arrays if array is not None)

    field = np.zeros((4, 4))
    for number in range(4):
        engine.submit(np.add, field[number], number, out=field[number])
    engine.wait(field)
    assert field[:, 0].tolist() == [0, 1, 2, 3]

    store = mx.kv.create("device")
    store.init("w", mx.nd.zeros((2,)))
    store.push("w", [mx.nd.ones((2,), ctx=mx.cpu(i)) for i in range(3)])
    out = mx.nd.empty((2,))
    store.pull("w", out=out)
    assert out.asnumpy().tolist() == [3, 3]


if __name__ == "__main__":
    check_modules()
    check_layers()
