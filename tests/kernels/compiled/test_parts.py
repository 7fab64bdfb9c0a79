"""Compiled kernels in parts on idle cores: the bits of one call for any number of cores, in planned scratch."""

from __future__ import annotations

import ctypes
import os
import random
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import weftplan as mx
from weftplan.kernels.compiled import parts, scratch
from weftplan.kernels.compiled.batch_norm import implementation as batch_norm
from weftplan.kernels.compiled.convolution import dense
from weftplan.kernels.compiled.depthwise import tables as depthwise_tables
from weftplan.kernels.compiled.offset_tables import KernelArguments
from weftplan.kernels.compiled.pooling import implementation as compiled_pooling
from weftplan.kernels.compiled.size_table import ConvSizes
from weftplan.ops.core import products
from weftplan.ops.nn import pooling
from weftplan.planner import PlanOptions
from weftplan.support import core_sharing

pytest.importorskip("llvmlite")


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch, four_cores: None) -> None:
    """Cut work of test size into parts, on four cores."""
    monkeypatch.setattr(pooling, "_FEW_BLOCKS", 2)
    monkeypatch.setattr(dense, "FEW_PACKED", 1 << 12)
    for module, number in ((scratch, 1 << 12), (depthwise_tables, 1 << 8), (batch_norm, 1 << 7), (products, 1 << 10)):
        monkeypatch.setattr(module, "FEW", number)


def disable_cutting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable all cutting except that of matrix products, whose parts affect their bits."""
    for module in (scratch, depthwise_tables, batch_norm, compiled_pooling):
        monkeypatch.setattr(module, "FEW", 1 << 60)
    monkeypatch.setattr(pooling, "MOST", 1)


@pytest.fixture
def cuts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which each call that is cut adds its number of parts."""
    results: list[int] = []
    split = core_sharing.split

    def noting(work: Any, count: int) -> None:
        if count > 1:
            results.append(count)
        split(work, count)

    monkeypatch.setattr(core_sharing, "split", noting)
    # A helper that polls at this moment would get its parts without a split.
    monkeypatch.setattr(parts, "with_lookers", lambda run, most, all_or_none: False)
    return results


def convolution(rng: random.Random) -> tuple[dict[str, Any], tuple[int, ...]]:
    """Return the parameters of a random convolution of one to three axes, and the shape of its data."""
    axes = rng.choice((1, 2, 2, 2, 3))
    most = {1: 40, 2: 14, 3: 6}[axes]
    kernel = tuple(rng.randint(1, 4) for _ in range(axes))
    dilate = tuple(rng.randint(1, 2) for _ in range(axes))
    groups = rng.choice((1, 1, 1, 2))
    single = rng.random() < 0.25
    channels, filters = groups * rng.choice((3, 8, 40, 70)), groups * rng.choice((5, 33, 70, 130))
    if single:
        groups = channels = filters = rng.choice((3, 8, 21))
    params = {
        "kernel": kernel, "dilate": dilate, "stride": tuple(rng.randint(1, 3) for _ in range(axes)),
        "pad": tuple(rng.randint(0, 2) for _ in range(axes)), "num_filter": filters, "num_group": groups,
        "no_bias": rng.random() < 0.5,
    }  # fmt: skip
    image = tuple(rng.randint((k - 1) * d + 1, most + (k - 1) * d) for k, d in zip(kernel, dilate, strict=True))
    return params, (rng.choice((1, 2, 5, 8)), channels, *image)


def network(seed: int) -> tuple[Any, tuple[int, ...], str]:
    """Return a random network of one layer, and the shape and dtype of its data."""
    rng = random.Random(seed)
    dtype = rng.choice(("float32", "float32", "float64"))
    x = mx.sym.Variable("data", dtype=dtype)
    if seed % 10 == 9:
        kind = rng.choice(("max", "max", "avg", "lp"))
        side, kernel = rng.choice((40, 57)), rng.choice(((2, 2), (3, 3), (3, 2)))
        stride = rng.choice((kernel, (2, 2), (1, 2)))
        net = mx.sym.Pooling(x, kernel=kernel, stride=stride, pool_type=kind, p_value=2, pad=(1, 0), name="p")
        return net, (rng.choice((5, 8)), 41, side, side + 3), rng.choice((dtype, "float16"))
    if seed % 5 == 4:
        shape = rng.randint(1, 5), rng.choice((3, 17, 40)), rng.randint(3, 9), rng.randint(3, 9)
        net = mx.sym.BatchNorm(x, fix_gamma=rng.random() < 0.5, name="n")
        return (mx.sym.Activation(net, act_type="relu") if rng.random() < 0.5 else net), shape, dtype
    params, shape = convolution(rng)
    kind = mx.sym.Deconvolution if seed % 5 == 3 else mx.sym.Convolution
    net = kind(x, name="c", **params)
    return (mx.sym.Activation(net, act_type="relu") if rng.random() < 0.3 else net), shape, dtype


def step(seed: int) -> bytes:
    """Return the bytes of output, gradients and moving statistics after one training step.

    Check that the allocated memory is as planned.
    """
    net, shape, dtype = network(seed)
    executor = net.simple_bind(mx.cpu(), plan_options=PlanOptions(kernels="native"), data=shape,
                               type_dict={"data": dtype})  # fmt: skip
    rng = np.random.default_rng(seed)
    for array in executor.arg_arrays:
        array[:] = rng.normal(0, 1, array.shape)
    out = executor.forward(is_train=True)[0].asnumpy()
    executor.backward([mx.nd.array(rng.normal(0, 1, out.shape), dtype=dtype)])
    actual = [out, *(one.asnumpy() for one in (*executor.grad_arrays, *executor.aux_arrays))]
    assert executor.allocated_bytes == executor.memory_plan.peak
    return b"".join(one.tobytes() for one in actual)


@pytest.mark.parametrize(
    "first", [*range(0, 30, 10), *(pytest.param(k, marks=pytest.mark.stress) for k in range(30, 60, 10))]
)
def test_same_bits_in_parts(monkeypatch: pytest.MonkeyPatch, cuts: list[int], first: int) -> None:
    """Random layers cut into parts have the bits of uncut layers, on every engine and with one to four cores."""
    by_name = {}
    ways: list[tuple[str, dict[str, Any], int]] = [
        ("NaiveEngine", {}, 4),
        *(("ThreadedEnginePerDevice", {}, count) for count in (1, 2, 3, 4)),
        ("ThreadedEngine", {}, 4),
        ("ThreadedEnginePerDevice", {"cpu_workers": 1}, 4),
    ]
    for kind, options, count in ways:
        monkeypatch.setattr(core_sharing, "usable_cores", lambda count=count: count)
        engine = mx.engine.create(kind, **options)
        with mx.engine.using(engine):
            by_name[kind, count, *options] = [step(seed) for seed in range(first, first + 10)]
        engine.stop()
    assert cuts
    disable_cutting(monkeypatch)
    cuts.clear()
    want = [step(seed) for seed in range(first, first + 10)]
    assert not cuts
    for way, got in by_name.items():
        assert [first + k for k in range(10) if got[k] != want[k]] == [], way


def sizes(batch: int, channels: int, filters: int, side: int) -> ConvSizes:
    """Return the sizes of a square 3x3 convolution with padding 1."""
    return ConvSizes(
        batch=batch, groups=1, channels=channels, filters=filters, image=(1, side, side), grid=(1, side, side),
        kernel=(1, 3, 3), stride=(1, 1, 1), dilate=(1, 1, 1), pad=(0, 1, 1), itemsize=4,
    )  # fmt: skip


def test_large_images_are_cut_by_images_and_large_weights_by_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work is cut so that the operand repeated by every part is the smaller one; little work is not cut."""
    monkeypatch.setattr(scratch, "FEW", 1 << 23)
    assert scratch.forward_cut(sizes(32, 128, 128, 32)) == scratch.Cut(4, 1)
    assert scratch.forward_cut(sizes(32, 256, 256, 4)) == scratch.Cut(1, 4)
    assert scratch.forward_cut(sizes(32, 512, 512, 4)) == scratch.Cut(
        4, 1
    )  # in slices, because packed as a whole it is too large
    assert scratch.forward_cut(sizes(1, 3, 8, 8)) == scratch.Cut(1, 1)
    assert scratch.weight_rows(sizes(32, 512, 512, 4)) == 128  # all parts read one copy of the images
    assert scratch.weight_rows(sizes(32, 512, 512, 8)) == 256
    assert scratch.weight_rows(sizes(1, 3, 8, 8)) == 8


def test_scratch_of_slices_does_not_grow_with_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of the channels share the packed-weight scratch of a single call."""
    one = sizes(8, 512, 512, 7)
    whole_packed = scratch.forward_scratch(one).packed
    monkeypatch.setattr(scratch, "FEW", 1 << 60)
    assert whole_packed <= scratch.forward_scratch(one).packed


def test_scratch_is_a_small_share_of_a_training_plan() -> None:
    """Scratch of compiled kernels adds at most 2.5 % to the plan of a ResNet-18 for small images."""
    symbol = mx.models.get("resnet18", image_shape=(3, 32, 32))
    weights = dict.fromkeys(set(symbol.list_arguments()) - {"data", "softmax_label"}, "write")
    peaks = [
        symbol.plan({"data": (32, 3, 32, 32)}, grad_req=weights, workspaces=counted).peak for counted in (True, False)
    ]
    assert peaks[1] < peaks[0] <= 1.025 * peaks[1]


def test_parts_share_packed_weights_and_copied_images(cuts: list[int]) -> None:
    """Calls whose parts share packed weights and copied images have the bits of uncut calls."""
    results = []
    for is_whole in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            if is_whole:
                disable_cutting(patch)
            cuts.clear()
            net = mx.sym.Convolution(
                mx.sym.Variable("data"), kernel=(3, 3), num_filter=160, pad=(1, 1), no_bias=True, name="c"
            )
            bound = net.simple_bind(mx.cpu(), data=(12, 70, 6, 6), plan_options=PlanOptions(kernels="native"))
            rng = np.random.default_rng(7)
            for array in bound.arg_dict.values():
                array[:] = rng.standard_normal(array.shape)
            out = bound.forward(is_train=True)[0]
            bound.backward(mx.nd.array(rng.standard_normal(out.shape)))
            arrays: list[Any] = [out, *bound.grad_arrays]
            results.append([one.asnumpy().tobytes() for one in arrays])
            mx.nd.waitall()
            assert is_whole or cuts
    assert results[0] == results[1]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_after_a_fork_splits_again() -> None:
    """A forked child starts its own helper threads and computes the parent's bits."""
    code = """
import os
import numpy as np, weftplan as mx
from weftplan.support import core_sharing as cores
from weftplan.kernels.compiled import scratch
scratch.FEW = 1 << 12
cores.usable_cores = lambda: 4
def run():
    net = mx.sym.Convolution(mx.sym.Variable("data"), kernel=(3, 3), num_filter=40, no_bias=True, name="c")
    executor = net.simple_bind(mx.cpu(), data=(8, 8, 20, 20))
    for array in executor.arg_arrays:
        array[:] = np.random.default_rng(0).normal(0, 1, array.shape)
    executor.forward(is_train=True)
    executor.backward([mx.nd.ones(executor.outputs[0].shape)])
    return b"".join(one.asnumpy().tobytes() for one in executor.grad_arrays)
before = run()
assert cores._pool.started
child = os.fork()
if child == 0:
    assert not cores._pool.started
    same = run() == before and cores._pool.started
    os._exit(7 if same else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert run() == before
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)


@pytest.mark.parametrize("light", [True, False])
@pytest.mark.parametrize("awake", [True, False])
def test_light_parts_wake_no_helper(monkeypatch: pytest.MonkeyPatch, light: bool, awake: bool) -> None:
    """Polling helpers get parts of any kind.

    If helpers sleep, heavy parts are split among them; light parts run in one call, and a helper is woken for the next.
    """
    told: list[str] = []
    ranges: list[tuple[int, int]] = []

    def entry(place: int) -> None:
        ranges.append(tuple((ctypes.c_int64 * 2).from_address(place)))

    def with_lookers(run: Any, most: int, *, all_or_none: bool) -> bool:
        told.append(f"lookers {most} {all_or_none}")
        return awake

    monkeypatch.setattr(parts, "idle_cores", lambda: 2)
    monkeypatch.setattr(parts, "with_lookers", with_lookers)
    monkeypatch.setattr(parts, "call_looker", lambda: told.append("call"))
    arguments = KernelArguments(("first", "last"), np.zeros(2, np.int64))
    parts.in_parts(entry, arguments, 10, 3, light=light)()
    assert told == [f"lookers 2 {not light}", *(["call"] if light and not awake else [])]
    assert sorted(ranges) == ([] if awake else [(0, 10)] if light else [(0, 4), (4, 8), (8, 10)])
