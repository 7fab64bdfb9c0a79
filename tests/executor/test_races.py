"""The engine orders all operations of an executor that touch the same bytes, for every plan."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest

import weftplan as mx
from tests.executor.races import races
from weftplan import engine, planner
from weftplan.engine.simulator import Simulator
from weftplan.executor.executor import Executor

STRATEGIES = ("auto", "arena", "match_range", "none")
COMPAT = ("none", "mxnet", "paddle", "paddle_pir")


def half_unused() -> mx.sym.Symbol:
    """Return a split with one unread half, and a node with scratch memory of the size of both halves."""
    x = mx.sym.Variable("x")
    a = mx.sym.Activation(x, act_type="softrelu", name="a")
    halves = mx.sym.SliceChannel(a, num_outputs=2, axis=1, name="halves")
    return mx.sym.Group([halves[1], a, mx.sym.LeakyReLU(x, act_type="prelu", name="p")])


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("compat", COMPAT)
@pytest.mark.parametrize("grad_req", ["null", "write", "add"])
def test_unread_output_keeps_operations_ordered(strategy, compat, grad_req, monkeypatch):
    """Operations that reuse the memory of an unread output, which no node writes, are ordered."""
    monkeypatch.setenv("MXNET_EXEC_BULK_EXEC_TRAIN", "0")
    options = planner.PlanOptions(strategy=strategy, compat=compat)
    executor = half_unused().simple_bind(mx.cpu(), x=(8, 8), grad_req=grad_req, plan_options=options)
    planner.validate(executor.planned)
    assert races(executor) == []


@pytest.mark.parametrize("seed", [5, 8, 10])
def test_an_unused_output_changes_no_bit_in_any_order(seed, monkeypatch):
    """With random orders of the simulator, MXNet's plan gives the bits of a plan without sharing."""
    monkeypatch.setenv("MXNET_EXEC_BULK_EXEC_TRAIN", "0")
    values = np.random.default_rng(seed).standard_normal((8, 8)).astype("float32")
    results = []
    for options in (
        planner.PlanOptions(strategy="arena", compat="mxnet"),
        planner.PlanOptions(strategy="none", enable_inplace=False),
    ):
        with engine.using(Simulator(seed=seed)):
            executor = half_unused().simple_bind(mx.cpu(), x=(8, 8), plan_options=options)
            executor.arg_dict["p_gamma"][:] = 0.25
            executor.forward(is_train=True, x=values)
            executor.backward([mx.nd.ones(out.shape) for out in executor.outputs])
            arrays = (*executor.outputs, *executor.grad_arrays)
            results.append([array.asnumpy().tobytes() for array in arrays])
            mx.nd.waitall()
    assert results[0] == results[1]


def parallel_layers() -> mx.sym.Symbol:
    """Return the sums of three layers that have only their input in common."""
    x = mx.sym.Variable("x")
    return mx.sym.Group(
        [mx.sym.sum(mx.sym.tanh(mx.sym.FullyConnected(x, num_hidden=256, name=f"fc{k}"))) for k in range(3)]
    )


@pytest.mark.parametrize("grad_req", ["null", "write"])
def test_single_forward_segment_needs_no_fence(grad_req):
    """A forward part of one segment needs no fence operation, unless a monitor sees every node."""
    net = parallel_layers()
    executor = net.simple_bind(mx.cpu(), x=(256, 256), grad_req=grad_req, options=planner.PlanOptions(strategy="arena"))
    assert executor._overlaps
    assert races(executor, pushed=True) == []
    assert len(executor._prepare_once().forward_segments) == 1

    def operations() -> int:
        before = engine.get().statistics().pushed
        executor.forward(is_train=grad_req == "write")
        mx.nd.waitall()
        return engine.get().statistics().pushed - before

    operations()
    assert operations() == 1
    seen: list[str] = []
    executor.set_monitor_callback(lambda name, array: seen.append(name))
    assert operations() == 1 + len(executor._prepare_once().forward_steps)
    assert len(seen) == len(executor._prepare_once().forward_steps)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_chained_forward_segments_need_no_fence(strategy, monkeypatch):
    """Five segments that each follow the previous one need no fence operation."""
    monkeypatch.setenv("MXNET_EXEC_BULK_EXEC_MAX_NODE_TRAIN", "2")
    x = mx.sym.Variable("x")
    for k in range(5):
        x = mx.sym.softsign(mx.sym.FullyConnected(x, num_hidden=8 + k, name=f"fc{k}"))
    executor = mx.sym.MakeLoss(x).simple_bind(mx.cpu(), x=(8, 8), options=planner.PlanOptions(strategy=strategy))
    assert races(executor, pushed=True) == []
    assert len(executor._prepare_once().forward_segments) > 4
    assert executor._prepare_once().fences_itself == executor._overlaps
    assert executor._prepare_once().fences_itself or strategy != "arena"


def test_parallel_forward_segments_need_a_fence(monkeypatch):
    """Parallel layers, which do not wait for each other, need a fence operation."""
    monkeypatch.setenv("MXNET_EXEC_BULK_EXEC_TRAIN", "0")
    executor = parallel_layers().simple_bind(mx.cpu(), x=(64, 64), options=planner.PlanOptions(strategy="arena"))
    assert executor._overlaps
    assert races(executor, pushed=True) == []
    assert not executor._prepare_once().fences_itself


def test_small_gradients_end_one_segment():
    """A backward segment ends when gradients of 64 KiB are ready, or with the last gradient."""
    x = mx.sym.Variable("x")
    for k, units in enumerate((8, 8, 512, 8, 8)):
        x = mx.sym.FullyConnected(x, num_hidden=units, name=f"fc{k}")
    executor = mx.sym.MakeLoss(x).simple_bind(mx.cpu(), x=(8, 64), grad_req="write")
    executor._prepare_once()
    ends = [segment.steps[-1].node.name for segment in executor._prepare_once().backward_segments]
    assert len(ends) == 1
    larger = mx.sym.MakeLoss(x).simple_bind(mx.cpu(), x=(8, 4096), grad_req="write")
    larger._prepare_once()
    assert len(larger._prepare_once().backward_segments) == 1  # the large gradient comes last
    back = mx.sym.MakeLoss(mx.sym.FullyConnected(x, num_hidden=4096, name="wide")).simple_bind(mx.cpu(), x=(8, 64))
    back._prepare_once()
    ends = [[step.node.name for step in segment.steps] for segment in back._prepare_once().backward_segments]
    assert [names[-1] for names in ends] == ["wide_backward", "fc0_backward"]


def test_run_waits_for_readers_of_earlier_outputs():
    """A run does not overwrite an output that a pending operation reads, nor other results in the same memory."""
    x = mx.sym.Variable("x")
    executor = mx.sym.tanh(mx.sym.FullyConnected(x, num_hidden=64)).simple_bind(
        mx.cpu(), x=(64, 64), grad_req="null", options=planner.PlanOptions(strategy="arena")
    )
    go, actual = threading.Event(), []
    executor.arg_arrays[1][:] = 0.5
    with engine.using(executor._engine):
        out = executor.forward(x=mx.nd.ones((64, 64)))[0]
        before = out.asnumpy()
        engine.get().push(lambda: (go.wait(60), actual.append(out.raw().copy())), [out.var], [])
        executor.forward(x=mx.nd.zeros((64, 64)))
        go.set()
        after = executor.outputs[0].asnumpy()
    assert np.array_equal(actual[0], before)
    assert not np.array_equal(after, before)


def test_a_run_that_failed_does_not_spoil_the_next(monkeypatch):
    """A wait raises the failure of a run once, and the next run succeeds."""
    executor = parallel_layers().simple_bind(
        mx.cpu(), x=(256, 256), grad_req="null", options=planner.PlanOptions(strategy="arena")
    )
    executor.forward(x=np.ones((256, 256), np.float32))
    want = [out.asnumpy() for out in executor.outputs]
    segment = executor._prepare_once().forward_segments[0]
    calls, broken = segment._binds, [*segment._binds]

    def fail() -> None:
        raise ValueError("a broken kernel")

    broken[1] = lambda run: fail
    segment._binds, segment._operators = broken, {}
    executor.forward()
    with pytest.raises(ValueError, match="a broken kernel"):
        mx.nd.waitall()
    segment._binds, segment._operators = calls, {}
    executor.forward()
    for one, value in zip(executor.outputs, want, strict=True):
        assert np.array_equal(one.asnumpy(), value)


def test_race_detector_finds_a_race():
    """Without the plan's reuse edges the race detector lists races."""
    x = mx.sym.Variable("x")
    net = mx.sym.Group([mx.sym.sum(mx.sym.FullyConnected(x, num_hidden=8, name=f"fc{k}")) for k in range(3)])
    whole = net.simple_bind(mx.cpu(), x=(8, 8), grad_req="null", plan_options=planner.PlanOptions(strategy="arena"))
    assert whole.memory_plan.num_reuse_edges > 0
    assert races(whole) == []
    plan = whole.memory_plan
    bare = replace(plan, after_ptr=plan.after_ptr * 0, after_storages=plan.after_storages[:0])
    broken = Executor(
        net, replace(whole.planned, memory=bare), mx.cpu(), whole.arg_arrays, whole.grad_arrays, [], whole.grad_req
    )
    assert any("fc" in actual for actual in races(broken))
