"""Tile sizes: small on a CPU, large on a GPU, and equal in the plan and in the kernel."""

import threading

import numpy as np
import pytest

import weftplan as mx
from tests.contract.devices import place
from tests.standin_cupy.memory import default_pool
from tests.support.gpu_counts import counted
from weftplan import device, models, planner
from weftplan.ops.core import registry, tiling
from weftplan.ops.core.schema import TensorSpec

LAUNCHES = {"mlp": (64, 3), "lenet": (64, 4), "vgg16": (16, 6), "resnet50": (32, 5)}
"""Networks: batch size, and the largest mean number of launches per node in a training step."""
LARGE = {"densenet121": (16, 5), "lstm": (32, 3)}
"""As ``LAUNCHES``, for networks that take long to plan."""


@pytest.mark.parametrize("name", [*LAUNCHES, *(pytest.param(name, marks=pytest.mark.stress) for name in LARGE)])
def test_a_training_step(name):
    """A training step takes few launches per node and at most 40 in one operator.

    The host waits at most once, and nothing is allocated outside the plan.
    """
    batch, most = (LAUNCHES | LARGE)[name]
    with place("standin") as context:
        actual = counted(models.get(name), models.input_shapes(name, batch=batch), context(0))
    assert actual.mean <= most
    assert actual.most <= 40
    assert actual.waits <= 1
    assert actual.beside == 0
    assert actual.planned == actual.allocated


@pytest.mark.parametrize(
    ("extra", "noticed"),
    [
        (lambda x: x, ()),
        (lambda x: mx.sym.sort(x, axis=1), ("beside",)),
        (lambda x: mx.sym.gather_nd(x, mx.sym._ones(shape=(1, 4))), ("waits",)),
        (lambda x: mx.sym.concat(*mx.sym.SliceChannel(x, num_outputs=64, axis=1), dim=1), ("most",)),
    ],
)
def test_the_counts_notice(extra, noticed):
    """CuPy's own memory, waits of the host, and operators of many launches are each counted."""
    net = mx.sym.FullyConnected(extra(mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=64)), num_hidden=3)
    with place("standin") as context:
        actual = counted(net, {"data": (4, 64)}, context(0), dry=False)
    over = {"beside": actual.beside > 0, "waits": actual.waits > 1, "most": actual.most > 40}
    assert {name for name, wrong in over.items() if wrong} == set(noticed)


def test_memory_of_cupys_own_pool_counts(monkeypatch):
    """Memory that a kernel takes from CuPy's own pool is counted as outside the plan."""
    net = mx.sym.sort(mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=64), axis=1)
    with place("standin") as context:
        monkeypatch.setattr(device.get(context(0)).temporaries, "allocate", default_pool.malloc)
        assert counted(net, {"data": (4, 64)}, context(0)).beside > 0


def test_the_plan_counts_what_the_device_needs():
    """A network needs more memory on a GPU, with its larger tiles, than on a CPU.

    Its executor allocates exactly the planned peak.
    """
    net = mx.sym.SoftmaxOutput(
        mx.sym.FullyConnected(
            mx.sym.Convolution(mx.sym.Variable("data"), kernel=(3, 3), num_filter=8, pad=(1, 1)), num_hidden=4
        ),
        name="softmax",
    )
    shapes = {"data": (2, 8, 64, 64), "softmax_label": (2,)}
    needed = {ctx: planner.plan_symbol(net, shapes, context=ctx).memory.peak for ctx in (mx.cpu(), mx.sim(), mx.gpu(0))}
    assert needed[mx.cpu()] == needed[mx.sim()] < needed[mx.gpu(0)]
    with place("standin") as context:
        executor = net.simple_bind(context(0), **shapes)
        executor.forward(is_train=True, data=np.ones(shapes["data"], np.float32))
        executor.backward()
        executor.outputs[0].wait_to_read()
        assert executor.allocated_bytes == executor.memory_plan.peak


def test_sizes_are_those_of_the_thread():
    """``using`` changes the sizes of its own thread only, and restores them even after an exception."""
    seen = []

    def work():
        with tiling.using(tiling.GPU):
            thread = threading.Thread(target=lambda: seen.append(tiling.block()))
            thread.start()
            thread.join()
            seen.append((tiling.block(), tiling.tile_bytes(), tiling.share(1)))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        work()
    assert seen == [tiling.HOST.block, tiling.GPU]
    assert tiling.block() == tiling.HOST.block
    assert tiling.bound(tiling.HOST, work) is work


def test_scratch_of_a_small_prelu():
    """For a small array, prelu takes scratch of at most a third of it on the host; on a GPU, of the whole array."""
    op = registry.get("LeakyReLU")
    params = {"act_type": "prelu"}
    specs = [TensorSpec(shape, np.dtype("float32")) for shape in ((1, 28, 22, 22), (28,))]
    nbytes = 4 * 28 * 22 * 22
    assert op.workspace_bytes(params, specs, specs[:1]) <= nbytes // 3
    with tiling.using(tiling.GPU):
        assert op.workspace_bytes(params, specs, specs[:1]) == nbytes
