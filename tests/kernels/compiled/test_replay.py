"""Compiled kernels compute the sizes of a call once: later runs reuse them and give the bits of a first run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import weftplan as mx
from weftplan.kernels.compiled import replay
from weftplan.kernels.compiled.batch_norm import implementation as batch_norm
from weftplan.kernels.compiled.convolution import implementation as convolution
from weftplan.kernels.compiled.pooling import implementation as pooling
from weftplan.planner import PlanOptions

pytest.importorskip("llvmlite")

MODULES: tuple[Any, ...] = (convolution, batch_norm, pooling)


def network() -> Any:
    """Return a network with one layer for each kind of compiled kernel."""
    net = mx.sym.Variable("data")
    net = mx.sym.Convolution(net, kernel=(3, 3), pad=(1, 1), num_filter=8, name="dense")
    net = mx.sym.Convolution(net, kernel=(3, 3), pad=(1, 1), num_filter=8, num_group=8, no_bias=True, name="single")
    net = mx.sym.Convolution(net, kernel=(1, 1), num_filter=6, no_bias=True, name="point")
    net = mx.sym.BatchNorm(net, fix_gamma=False, name="norm")
    net = mx.sym.Pooling(net, kernel=(2, 2), stride=(2, 2), pool_type="max", name="pool")
    return mx.sym.Deconvolution(net, kernel=(2, 2), stride=(2, 2), num_filter=3, no_bias=False, name="up")


def bound() -> Any:
    """Return an executor with random arguments and states."""
    executor = network().simple_bind(mx.cpu(), data=(3, 4, 10, 10), plan_options=PlanOptions(kernels="native"))
    rng = np.random.default_rng(5)
    for array in (*executor.arg_arrays, *executor.aux_arrays):
        array[:] = rng.uniform(0.5, 1.5, array.shape)
    return executor


def run(executor: Any, data: Any, *, train: bool) -> list[bytes]:
    """Return the bytes of output and gradients of a run on ``data``."""
    out = executor.forward(is_train=train, data=data)[0]
    actual = [out]
    if train:
        executor.backward(mx.nd.ones(out.shape))
        actual += executor.grad_arrays
    return [one.asnumpy().tobytes() for one in actual]


def test_later_runs_reuse_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second run on other data computes no sizes, and has the bits of a new executor's first run."""
    rng = np.random.default_rng(6)
    first, second = (mx.nd.array(rng.standard_normal((3, 4, 10, 10))) for _ in range(2))
    moving, fresh = bound(), bound()
    run(moving, first, train=True)
    run(moving, first, train=False)
    wanted = run(fresh, second, train=True)

    def settled(*_: Any, **__: Any) -> None:
        raise AssertionError("sizes are asked for again")

    for module in MODULES:
        for name in ("sizes", "_extents", "_triple", "take_bytes"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, settled)
    assert run(moving, second, train=True) == wanted
    for name, array in moving.aux_dict.items():  # statistics after more batches
        array.copyto(fresh.aux_dict[name])
    repeated = run(moving, second, train=False)
    monkeypatch.undo()
    assert repeated == run(fresh, second, train=False)


def test_a_call_is_made_when_it_is_first_called() -> None:
    """``RepeatedKernel.bind`` prepares a call on its first run, not at binding, because compiling is slow.

    Calling the kernel directly prepares a call each time.
    """
    result: list[int] = []

    def make(ctx: Any, params: Any, inputs: Any, outputs: Any) -> Any:
        result.append(len(result))
        return lambda: outputs.append(result[-1])

    kernel = replay.RepeatedKernel(make)
    outputs: list[Any] = []
    call = kernel.bind(None, {}, [], outputs)  # type: ignore[arg-type]
    assert not result
    call()
    call()
    assert (result, outputs) == ([0], [0, 0])
    kernel(None, {}, [], outputs)  # type: ignore[arg-type]
    assert (result, outputs) == ([0, 1], [0, 0, 1])
