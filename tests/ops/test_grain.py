"""Pieces of kernels: small on a CPU, one launch's worth on a GPU; plan and kernel see the same sizes."""

import collections
import threading

import numpy as np
import pytest

import weftplan as mx
from tests.contract.devices import place
from tests.standin_cupy import meter
from weftplan import device, models, planner
from weftplan.ops import grain

LAUNCHES = {"mlp": (64, 3), "lenet": (64, 4), "resnet18": (4, 5), "vgg16": (8, 6)}
"""Networks: batch, most launches per node in a training step."""
LARGE = {"resnet50": (32, 5), "densenet121": (16, 5), "lstm": (32, 3)}
"""The same, of networks that take long to plan."""


def steps_of(executor):
    """Every step of a training run."""
    return [s for segment in (*executor._forward_segments, *executor._backward_segments) for s in segment.steps]


@pytest.mark.parametrize("name", [*LAUNCHES, *(pytest.param(name, marks=pytest.mark.stress) for name in LARGE)])
def test_launches_of_a_training_step(name):
    """Few launches a node, at most 40 in one operator; CuPy makes no operator wait for the device."""
    batch, most = (LAUNCHES | LARGE)[name]
    with place("standin", kind="NaiveEngine") as context:
        shapes = models.input_shapes(name, batch=batch)
        meter.dry = True
        network = models.get(name)
        requests = {n: "null" if n in shapes else "write" for n in network.list_arguments()}
        executor = network.simple_bind(context(0), grad_req=requests, **shapes)
        executor.forward(is_train=True)
        executor.backward()
        mx.nd.waitall()
        counts = collections.defaultdict(list)
        with device.get(context(0)).new_stream():
            for step in steps_of(executor):
                meter.reset()
                if step.bind is not None:
                    step.bind(executor._run)()
                assert not meter.syncs, step.node
                counts[step.node.op.name].append(meter.total)
        del executor, step
    assert sum(map(sum, counts.values())) <= most * sum(map(len, counts.values()))
    assert max(max(found) for found in counts.values()) <= 40


def test_the_plan_counts_what_the_device_needs():
    """A network on a GPU plans larger pieces than on a CPU, and its executor allocates exactly what the plan says."""
    net = mx.sym.SoftmaxOutput(
        mx.sym.FullyConnected(
            mx.sym.Convolution(mx.sym.Variable("data"), kernel=(3, 3), num_filter=8, pad=(1, 1)), num_hidden=4
        ),
        name="softmax",
    )
    shapes = {"data": (16, 8, 64, 64), "softmax_label": (16,)}
    needed = {ctx: planner.plan_symbol(net, shapes, context=ctx).memory.peak for ctx in (mx.cpu(), mx.sim(), mx.gpu(0))}
    assert needed[mx.cpu()] == needed[mx.sim()] < needed[mx.gpu(0)]
    with place("standin") as context:
        executor = net.simple_bind(context(0), **shapes)
        executor.forward(is_train=True, data=np.ones(shapes["data"], np.float32))
        executor.backward()
        executor.outputs[0].wait_to_read()
        assert executor.allocated_bytes == executor.memory_plan.peak


def test_sizes_are_those_of_the_thread():
    """Within ``using`` this thread alone has other sizes; they come back however the block ends."""
    seen = []

    def work():
        with grain.using(grain.GPU):
            thread = threading.Thread(target=lambda: seen.append(grain.block()))
            thread.start()
            thread.join()
            seen.append((grain.block(), grain.tile_bytes()))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        work()
    assert seen == [grain.HOST.block, grain.GPU]
    assert grain.block() == grain.HOST.block
    assert grain.bound(grain.HOST, work) is work
