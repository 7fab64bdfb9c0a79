"""Independent branches of a graph on the streams of one device: all streams are used, and their work overlaps."""

import collections
from typing import NamedTuple

import numpy as np
import pytest

import weftplan as mx
from tests.contract.devices import place
from tests.standin_cupy.memory import Memory
from weftplan import device, planner
from weftplan.device.simulated import CostModel, seconds_of
from weftplan.device.simulated_device import SimStream
from weftplan.planner.symbolic import node_seconds
from weftplan.planner.symbolic.pipeline import size_symbol

BRANCHES, DEPTH = 4, 3
DATA = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)


def four_branches():
    """Return four chains of equal length on one input, whose results are added.

    data --- tanh --- tanh --- tanh ---.
       '---- sigmoid, …  (four rows) --+-- add_n
    """
    data = mx.sym.Variable("data")
    ends = []
    for branch in range(BRANCHES):
        x = data * (branch + 1.0)
        for _ in range(DEPTH):
            x = mx.sym.tanh(x)
        ends.append(x)
    return mx.sym.add_n(*ends)


def expected():
    """Return the result of the four branches, computed with NumPy."""
    total = np.zeros_like(DATA)
    for branch in range(BRANCHES):
        x = DATA * np.float32(branch + 1.0)
        for _ in range(DEPTH):
            x = np.tanh(x)
        total += x
    return total


def bound(context, monkeypatch):
    """Return an executor that pushes one operation for each node, and whose branches do not share memory."""
    monkeypatch.setenv("MXNET_EXEC_BULK_EXEC_INFERENCE", "0")
    monkeypatch.setenv("MXNET_USE_FUSION", "0")  # otherwise one kernel computes all branches
    monkeypatch.setenv("MXNET_EXEC_NUM_TEMP", str(BRANCHES))  # branches do not share memory, which would order them
    executor = four_branches().simple_bind(context, grad_req="null", data=(3, 4))
    executor.arg_dict["data"][:] = mx.nd.array(DATA, ctx=context)
    mx.nd.waitall()
    return executor


class Timeline:
    """Records the work on each stream of a simulated device as (start, end) in virtual seconds."""

    def __init__(self, monkeypatch):
        self.spans = collections.defaultdict(list)
        real = SimStream._append

        def append(stream, kind, item, end):
            begin = stream._end
            real(stream, kind, item, end)
            if kind == "run":
                self.spans[stream.index].append((begin, end))

        monkeypatch.setattr(SimStream, "_append", append)

    def overlap(self):
        """Return the virtual seconds during which at least two streams work."""
        moments = sorted((moment, change) for spans in self.spans.values() for begin, end in spans
                         for moment, change in ((begin, 1), (end, -1)))  # fmt: skip
        busy, last, actual = 0, 0.0, 0.0
        for moment, change in moments:
            if busy > 1:
                actual += moment - last
            busy, last = busy + change, moment
        return actual

    def length(self):
        """Return the virtual seconds from the start of the first work to the end of the last."""
        spans = [span for row in self.spans.values() for span in row]
        return max(end for _, end in spans) - min(begin for begin, _ in spans)


def test_branches_overlap_on_a_simulated_device(monkeypatch):
    """Two workers use two streams and take at most 60 % of the virtual time of one."""
    lengths = {}
    for workers in (1, 2):
        result = mx.engine.create("ThreadedEnginePerDevice", gpu_workers=workers)
        with monkeypatch.context() as patch, mx.engine.using(result):
            executor = bound(mx.sim(58), patch)  # no other test uses this device
            timeline = Timeline(patch)
            executor.forward()
            np.testing.assert_allclose(executor.outputs[0].asnumpy(), expected(), rtol=1e-5)
            del executor
            result.stop()
        lengths[workers] = timeline.length()
        assert sum(len(spans) >= BRANCHES for spans in timeline.spans.values()) == workers, timeline.spans
        assert (timeline.overlap() > 0) == (workers > 1)
    assert lengths[2] <= 0.6 * lengths[1]


class Work(NamedTuple):
    """One piece of work: its stream, its position there, and the positions in other streams that it waits for."""

    stream: int
    place: int
    after: dict[int, int]


def are_unordered(a, b):
    """Return whether no wait orders two pieces of work, so that a GPU may run them at the same time."""
    return a.stream != b.stream and a.after.get(b.stream, 0) < b.place and b.after.get(a.stream, 0) < a.place


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("how", ["graph", "arrays"])
def test_branches_are_not_ordered_on_a_gpu(how, workers, monkeypatch):
    """There are as many streams as workers; with several workers some work is unordered, with one worker none."""
    works = []
    real = Memory.touch

    def touch(memory, start, stop, stream, **said):
        if said["what"] == "tanh" and said["write"]:
            works.append(Work(stream.key, stream.count, dict(stream.seen)))
        real(memory, start, stop, stream, **said)

    with place("standin", gpu_workers=workers) as context:
        if how == "graph":
            executor = bound(context(0), monkeypatch)
            monkeypatch.setattr(Memory, "touch", touch)
            actual = executor.forward()[0].asnumpy()
            del executor
        else:
            data = mx.nd.array(DATA, ctx=context(0))
            mx.nd.waitall()
            monkeypatch.setattr(Memory, "touch", touch)
            ends = [data * (branch + 1.0) for branch in range(BRANCHES)]
            for _ in range(DEPTH):
                ends = [mx.nd.tanh(x) for x in ends]
            actual = mx.nd.add_n(*ends).asnumpy()
            del ends, data
    np.testing.assert_allclose(actual, expected(), rtol=1e-5)
    assert len(works) == BRANCHES * DEPTH
    assert len({work.stream for work in works}) == workers
    pairs = [are_unordered(a, b) for k, a in enumerate(works) for b in works[:k]]
    assert any(pairs) == (workers > 1)


def simulated(number, net, *, share=1.0, workers=1, **shapes):
    """Return the virtual seconds of one training step on the simulated device ``number``.

    ``share`` is the fraction of modelled kernel time that the device takes.
    """
    context = mx.sim(number)
    device.get(context).configure(cost=CostModel(launch=0.0, share=share))
    with mx.engine.using(mx.engine.create("ThreadedEnginePerDevice", gpu_workers=workers)):
        executor = net.simple_bind(context, **shapes)
        for array in executor.arg_arrays:
            array[:] = 0.1
        mx.nd.waitall()

        def step():
            executor.forward(is_train=True)
            executor.backward()
            mx.nd.waitall()

        return seconds_of(step, [context])


def wide(hidden):
    """Return two fully connected layers with ``hidden`` outputs each, and a softmax loss."""
    x = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=hidden, name="a")
    return mx.sym.SoftmaxOutput(mx.sym.FullyConnected(x, num_hidden=hidden, name="b"), name="softmax")


def test_simulated_time_follows_the_planners_model():
    """On one stream a step takes the sum of the modelled times of its nodes, times ``share``."""
    net, shapes = wide(1024), {"data": (256, 1024)}
    planned = planner.plan_symbol(net, shapes, grad_req="write", context=mx.sim(0))
    wanted = sum(node_seconds.seconds_of(planned, nid) for nid in planned.order if nid not in planned.skipped)
    assert wanted > 1e-4
    assert simulated(5901, net, **shapes) == pytest.approx(wanted)
    assert simulated(5902, net, share=0.5, **shapes) == pytest.approx(wanted / 2)
    assert simulated(5903, net, share=0.0, **shapes) == 0.0
    assert simulated(5904, wide(2048), **shapes) > 2 * wanted


def test_one_model_serves_plans_and_runs():
    """The modelled time of a planned node is the planner's time for the node, minus the overhead of a call."""
    sized = size_symbol(wide(64), {"data": (8, 32)}, grad_req="write", context=mx.sim(0))
    planned = sized.plan()
    for nid, seconds in enumerate(node_seconds.node_seconds(sized.program)):
        if not planned.graph.is_variable[nid] and nid not in planned.skipped:
            assert node_seconds.seconds_of(planned, nid) + node_seconds.ACCELERATOR.call == pytest.approx(seconds)
