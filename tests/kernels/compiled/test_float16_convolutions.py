"""Compiled float16 convolutions, computed in float32 and rounded once, against NumPy's kernel in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import weftplan as mx
from weftplan.kernels.compiled import scratch
from weftplan.kernels.compiled.convolution import implementation as convolution
from weftplan.kernels.compiled.target import Target, host
from weftplan.planner import PlanOptions

HOST = host()
pytestmark = pytest.mark.skipif(
    isinstance(HOST, str) or not HOST.halves, reason="no compiled kernels, or none for float16"
)


@st.composite
def layers(draw: st.DrawFn) -> tuple[Any, dict[str, Any], tuple[int, ...]]:
    """Return a random (de)convolution of one to three axes, its parameters, and the data's shape."""
    rank = draw(st.integers(1, 3))
    groups = draw(st.sampled_from((1, 1, 1, 2)))

    def each(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(low, high)) for _ in range(rank))

    params = {
        "kernel": each(1, 3), "stride": each(1, 2), "pad": each(0, 2), "dilate": each(1, 2), "num_group": groups,
        "num_filter": draw(st.integers(2, 40)) * groups, "no_bias": draw(st.booleans()),
    }  # fmt: skip
    layer = draw(st.sampled_from((mx.sym.Convolution, mx.sym.Convolution, mx.sym.Deconvolution)))
    channels = draw(st.integers(2, 40)) * groups
    return layer, params, (draw(st.integers(1, 4)), channels, *each(5, (700, 34, 9)[rank - 1]))


def run(layer: Any, params: dict[str, Any], shape: tuple[int, ...], dtype: str, kernels: str) -> list[Any]:
    """Return the output and gradients in ``dtype``; all arguments are float16 numbers."""
    net = layer(mx.sym.Variable("x"), name="c", **params)
    options = PlanOptions(kernels=kernels)
    executor = net.simple_bind(mx.cpu(), x=shape, type_dict={"x": dtype}, plan_options=options)
    assert executor.allocated_bytes == executor.memory_plan.peak
    assert kernels == "numpy" or "Kernel: native" in executor.debug_str()
    rng = np.random.default_rng(7)
    for name in sorted(executor.arg_dict):
        array = executor.arg_dict[name]
        array[:] = rng.uniform(-1, 1, array.shape).astype(np.float16).astype(dtype)
    out = executor.forward(is_train=True)[0]
    executor.backward([mx.nd.array(rng.uniform(-1, 1, out.shape).astype(np.float16), dtype=dtype)])
    return [one.asnumpy() for one in (out, *(executor.grad_dict[name] for name in sorted(executor.grad_dict)))]


@settings(max_examples=25, deadline=None)
@given(layers())
def test_random_layers_are_rounded_once(one: tuple[Any, dict[str, Any], tuple[int, ...]]) -> None:
    """Each result is as close to the float64 result as one rounding to float16, or NumPy's float16 result, is."""
    layer, params, shape = one
    actual = run(layer, params, shape, "float16", "native")
    exact = run(layer, params, shape, "float64", "numpy")
    plain = run(layer, params, shape, "float16", "numpy")
    for got, wanted, numpy_s in zip(actual, exact, plain, strict=True):
        most = np.abs(wanted).max() + 1e-9
        noise = np.abs(numpy_s - wanted).max() / most
        assert np.abs(got - wanted).max() / most <= max(6e-4, 1.1 * noise)


def test_parts_and_slices_have_the_bits_of_the_whole(monkeypatch: pytest.MonkeyPatch, four_cores: None) -> None:
    """Work cut for idle cores, with weights packed a tile at a time, has the bits of uncut work."""
    params = {"kernel": (3, 3), "pad": (1, 1), "num_filter": 70, "no_bias": False}
    whole = run(mx.sym.Convolution, params, (6, 40, 11, 9), "float16", "native")
    monkeypatch.setattr(scratch, "FEW", 1 << 12)
    monkeypatch.setattr(scratch, "NEAR_BYTES", 0)
    monkeypatch.setattr(scratch, "SLICE_BYTES", 1)
    cut = run(mx.sym.Convolution, params, (6, 40, 11, 9), "float16", "native")
    assert [one.tobytes() for one in whole] == [one.tobytes() for one in cut]


@pytest.mark.parametrize("value", [65504.0, 65520.0, np.inf, np.nan, 6e-8, -0.0])
def test_numbers_at_the_ends_of_float16(value: float) -> None:
    """A float16 convolution with weight 1 gives x + 0 for the largest number, infinity, NaN, a subnormal and -0."""
    net = mx.sym.Convolution(mx.sym.Variable("x"), kernel=(2, 2), num_filter=3, no_bias=True, name="c")
    executor = net.simple_bind(mx.cpu(), x=(1, 2, 9, 9), type_dict={"x": "float16"},
                               plan_options=PlanOptions(kernels="native"))  # fmt: skip
    data = np.zeros((1, 2, 9, 9), np.float32)
    data[0, 0, 4, 4] = np.float32(value)
    with np.errstate(over="ignore"):
        executor.arg_dict["x"][:] = data.astype(np.float16)
    weight = np.zeros((3, 2, 2, 2), np.float16)
    weight[:, 0, 0, 0] = 1
    executor.arg_dict["c_weight"][:] = weight
    out = executor.forward(is_train=False)[0].asnumpy()
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(out[0, :, 4, 4], np.float16(value) + np.zeros(3, np.float16))


def test_a_processor_without_instructions_for_float16_refuses() -> None:
    """Without float16 instructions NumPy's kernel is chosen, and ``debug_str`` states the reason."""
    assert isinstance(HOST, Target)
    old = replace(HOST, bits=256, features=HOST.features.replace("+f16c", "-f16c"))
    assert not old.halves
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(convolution, "host", lambda: old)
        net = mx.sym.Convolution(mx.sym.Variable("x"), kernel=(3, 3), num_filter=3, name="c")
        bound = net.simple_bind(mx.cpu(), x=(1, 2, 9, 9), type_dict={"x": "float16"})
        assert "no instructions for float16" in bound.debug_str()
