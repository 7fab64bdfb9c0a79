"""Branches of a graph as separate segments: their chains, their time on simulated devices, and their bits."""

import itertools
import random
from types import SimpleNamespace

import numpy as np
import pytest

import weftplan as mx
from tests.contract.devices import place
from weftplan import device
from weftplan.device.simulated import CostModel, seconds_of
from weftplan.executor import segments
from weftplan.executor.segments import ancestors, chains, parents


def step(number, reads, writes, context="gpu", copies=None):
    """Return the step ``number``, which reads and writes these vars on ``context``."""
    return SimpleNamespace(number=number, reads=reads, writes=writes, context=context, copies=copies)


def graph(*needs):
    """Return one step for each of ``needs``, the numbers of the steps whose results it reads."""
    results = [object() for _ in needs]
    return [step(k, [results[n] for n in need], [results[k]]) for k, need in enumerate(needs)]


def step_numbers(found):
    """Return the numbers of the steps of each chain."""
    return [[one.number for one in chain] for chain in found]


LONG, SHORT = 1e-3, 1e-6


@pytest.mark.parametrize(
    ("needs", "short", "wanted"),
    [
        ([(), (0,), (1,), (2,)], (), [[0, 1, 2, 3]]),
        ([(), (0,), (1,), (0,), (3,), (2, 4)], (), [[0], [1, 2], [3, 4], [5]]),  # a diamond
        ([(), (0,), (0,), (1,), (2,), (3, 4)], (), [[0], [1, 3], [2, 4], [5]]),  # a diamond, breadth first
        ([(), (0,), (1,), (2, 0), (3,)], (), [[0, 1, 2, 3, 4]]),  # a skip connection is no branch
        ([(), (), (0,), (1,), (2, 3)], (), [[0, 2], [1, 3], [4]]),  # two independent branches
        ([(), (0,), (1,), (0,), (3,), (2, 4), (5,)], (5,), [[0], [1, 2], [3, 4], [5, 6]]),  # a short join
        ([(), (0,), (1,), (0,), (2, 3)], (3,), [[0], [1, 2, 3], [4]]),  # a short branch
        ([(), (0,), (1,), (0,), (3,), (2, 4)], (0, 1, 2, 3, 4, 5), [[0, 1, 2, 3, 4, 5]]),  # all steps are short
        ([(), (0,), (1,), (0,), (3,), (2, 4)], (0,), [[0], [1, 2], [3, 4], [5]]),  # a short stem
        ([(), (0,), (0,)], (0, 1), [[0, 1, 2]]),  # a merged stem is merged again
        ([(), (), (0, 1), (1,)], (0, 1), [[0, 1], [2], [3]]),  # one user of a merged stem must not wait for the other
    ],
)
def test_chains(needs, short, wanted):
    """Steps of small graphs are grouped into the expected chains, in the expected order."""
    actual = chains(graph(*needs), lambda one: SHORT if one.number in short else LONG)
    assert step_numbers(actual) == wanted


def test_copies_and_other_devices_are_separate_chains():
    """A copy is a separate chain, and a chain ends where the device changes."""
    a, b, c = object(), object(), object()
    steps = [step(0, [], [a]), step(1, [a], [b], copies=1), step(2, [b], [c], context="other"), step(3, [c], [])]
    assert step_numbers(chains(steps, lambda one: SHORT)) == [[0], [1], [2], [3]]


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_chains_of_random_graphs(share):
    """In random graphs each step is in one chain, after all steps that it conflicts with.

    If every step is long, a step waits only for the steps that a separate operation would wait for, and each step of a
    chain needs the step before it.
    """
    rng = random.Random(share)
    for _ in range(150):
        results = [object() for _ in range(12)]
        steps = []
        for number in range(rng.randint(2, 14)):
            used = rng.sample(results, rng.randint(1, 3))
            steps.append(step(number, used[1:], used[:1]))
        short = {number for number in range(len(steps)) if rng.random() < share}
        actual = step_numbers(chains(steps, lambda one, short=short: SHORT if one.number in short else LONG))
        order = [number for chain in actual for number in chain]
        assert sorted(order) == list(range(len(steps)))
        masks = ancestors(parents(steps))
        at = {number: place for place, number in enumerate(order)}
        for number, mask in enumerate(masks):
            assert all(at[second] < at[number] for second in range(number) if mask >> second & 1)
        if short:
            continue
        chain_of = {number: chain for chain in actual for number in chain}
        for chain in actual:
            assert all(masks[later] >> earlier & 1 for earlier, later in itertools.pairwise(chain))
            for number in chain:
                waits = {second for earlier in parents(steps)[chain[0]] for second in chain_of[earlier]}
                allowed = {second for second in range(len(steps)) if masks[number] >> second & 1} | set(chain)
                assert waits <= allowed


def four_branches(depth=8):
    """Return four chains of ``depth`` operators on one input, whose results are added."""
    data, ends = mx.sym.Variable("data"), []
    for branch in range(4):
        x = data * (branch + 1.0)
        for _ in range(depth - 1):
            x = mx.sym.tanh(x)
        ends.append(x)
    return mx.sym.add_n(*ends)


def forward_run(context):
    """Return the virtual seconds of one forward run, its result, and the number of pushed operations."""
    executor = four_branches().simple_bind(context, grad_req="null", data=(3, 4))
    executor.arg_dict["data"][:] = 0.5
    mx.nd.waitall()
    spent = seconds_of(lambda: (executor.forward(), mx.nd.waitall()), [context])
    return (
        spent,
        executor.outputs[0].asnumpy(),
        sum(segment.pushed for segment in executor._prepare_once().forward_segments),
    )


@pytest.mark.shows("MXNET_GPU_WORKER_NTHREADS")
def test_streams_shorten_a_bound_graph(monkeypatch):
    """Four branches of eight kernels of 1 ms take about 32 ms on one stream, 16 ms on two and 8 ms on four.

    Each branch is one operation.
    """
    monkeypatch.setenv("MXNET_EXEC_NUM_TEMP", "4")  # branches do not share memory, which would order them
    lengths, values = {}, []
    for workers in (1, 2, 4):
        context = mx.sim(5950 + workers)
        device.get(context).configure(cost=CostModel(launch=1e-3, share=0))
        with mx.engine.using(mx.engine.create("ThreadedEnginePerDevice", gpu_workers=workers)):
            lengths[workers], value, operations = forward_run(context)
        values.append(value)
        assert operations <= 6, "one operation for each branch, not for each node"
    assert lengths[1] == pytest.approx(33e-3)
    assert lengths[2] <= 18e-3
    assert lengths[4] <= 10e-3
    for value in values[1:]:
        np.testing.assert_array_equal(values[0], value)


def layers():
    """Return four branches of two layers with separate weights, and one layer in parallel to them."""
    data = mx.sym.Variable("data")
    ends = [
        mx.sym.FullyConnected(
            mx.sym.tanh(mx.sym.FullyConnected(data, num_hidden=6, name=f"a{k}")), num_hidden=3, name=f"b{k}"
        )
        for k in range(4)
    ]
    return mx.sym.add_n(*ends, mx.sym.FullyConnected(data, num_hidden=3, name="past"))


def test_branches_have_the_bits_of_one_stream(monkeypatch):
    """On stand-in GPUs, training with branches gives the same weights with one, two or three workers."""
    monkeypatch.setattr(segments, "LEAST_S", 0.0)
    results = []
    for workers in (1, 2, 3):
        with place("standin", gpu_workers=workers) as context:
            mx.random.seed(2)
            net = mx.sym.SoftmaxOutput(layers(), name="softmax")
            executor = net.simple_bind(context(0), data=(4, 5), softmax_label=(4,))
            for name, array in executor.arg_dict.items():
                array[:] = 1 if name == "softmax_label" else 0.1
            for _ in range(3):
                executor.forward(is_train=True)
                executor.backward()
                for name, grad in executor.grad_dict.items():
                    if grad is not None and name.endswith("weight"):
                        executor.arg_dict[name] -= 0.1 * grad
            results.append({name: array.asnumpy() for name, array in executor.arg_dict.items()})
            del executor
    for second in results[1:]:
        for name, array in results[0].items():
            np.testing.assert_array_equal(second[name], array, err_msg=name)
