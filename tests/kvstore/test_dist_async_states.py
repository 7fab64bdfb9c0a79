"""Optimizer states of ``dist_async``: saved from all servers, and loaded into all servers or into a ``local`` store."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import weftplan as mx
from tests.kvstore.ranks import run_ranks

STEPS = """
shapes = {"small": (5,), "large": (40, 100), "third": (3, 2)}
folder = os.environ["FOLDER"]

def started(store):
    for key, shape in shapes.items():
        store.init(key, mx.nd.ones(shape))
    store.set_optimizer(mx.optimizer.create(*OPTIMIZER))

def step(store):
    if rank == 0:
        for key, shape in shapes.items():
            store.push(key, mx.nd.arange(int(np.prod(shape))).reshape(shape) * 0.01)
    store.barrier()

def found(store):
    outs = {key: mx.nd.empty(shape) for key, shape in shapes.items()}
    for key, out in outs.items():
        store.pull(key, out=out)
    return {key: out.asnumpy().copy() for key, out in outs.items()}
"""


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("kind", ["ThreadedEnginePerDevice", "Simulator"])
def test_states_come_back(tmp_path: Path, kind: str, optimizer: str):
    """One rank saves the states and one rank loads them; the next step gives the bits of training without a break.

    A ``local`` store that loads the same file also computes these bits.
    """
    result = {
        "sgd": "mx.optimizer.SGD(learning_rate=0.1, momentum=0.9)",
        "adam": "mx.optimizer.Adam(learning_rate=0.1)",
    }
    steps = STEPS.replace("mx.optimizer.create(*OPTIMIZER)", result[optimizer])
    run_ranks(
        tmp_path,
        2,
        steps
        + """
says(lambda: kv.save_optimizer_states(os.path.join(folder, "early")), "set_optimizer")
started(kv)
step(kv)
step(kv)
if rank == 0:
    kv.save_optimizer_states(os.path.join(folder, "states"))
middle = found(kv)
kv.barrier()
step(kv)
whole = found(kv)
kv.barrier()

other = mx.kv.create("dist_async")
started(other)
for key, weight in middle.items():
    for number, part in list(other._server._ranges.items()):
        if part.key == key:
            first, end = next((a, b) for server, a, b in other._ranges[key] if server == rank)
            part.values[:] = weight.reshape(-1)[first:end]
other.barrier()
if rank == 1:
    other.load_optimizer_states(os.path.join(folder, "states"))
other.barrier()
step(other)
again = found(other)
assert all((again[key] == whole[key]).all() for key in shapes), (again, whole)
other.barrier()
if rank == 0:
    np.savez(os.path.join(folder, "weights.npz"), **middle)
    np.savez(os.path.join(folder, "whole.npz"), **whole)
""",
        STORE="dist_async",
        MXNET_ENGINE_TYPE=kind,
        MXNET_KVSTORE_BIGARRAY_BOUND="1000",
    )
    local = mx.kv.create("local")
    weights, whole = np.load(tmp_path / "weights.npz"), np.load(tmp_path / "whole.npz")
    for name in weights:
        local.init(name, mx.nd.array(weights[name]))
    local.set_optimizer(eval(result[optimizer], {"mx": mx}))
    local.load_optimizer_states(tmp_path / "states")
    for name in weights:
        shape = weights[name].shape
        local.push(name, mx.nd.arange(int(np.prod(shape))).reshape(shape) * 0.01)
        out = mx.nd.empty(shape)
        local.pull(name, out=out)
        assert (out.asnumpy() == whole[name]).all(), name


def test_a_module_saves_and_loads_them(tmp_path: Path):
    """``Module`` saves and loads the optimizer states of ``dist_async``; loading a truncated file raises an error."""
    run_ranks(
        tmp_path,
        2,
        """
        net = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=2), name="softmax")
        batches = mx.io.NDArrayIter(np.ones((8, 4), "f4"), np.zeros(8, "f4"), batch_size=4)
        module = mx.mod.Module(net)
        module.fit(batches, kvstore=kv, num_epoch=1, optimizer_params={"learning_rate": 0.2, "momentum": 0.9})
        kv.barrier()
        file = os.path.join(os.environ["FOLDER"], f"states{rank}")
        module.save_optimizer_states(file)
        before = open(file, "rb").read()
        module.load_optimizer_states(file)
        open(file + "cut", "wb").write(before[: len(before) // 2])
        try:
            module.load_optimizer_states(file + "cut")
            raise AssertionError("no error")
        except mx.base.MXNetError as error:
            assert "cut" in str(error)
        kv.barrier()
        """,
        STORE="dist_async",
    )
