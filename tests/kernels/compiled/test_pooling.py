"""Compiled pooling against NumPy's kernel: the same values for any shape, vector width and number of cores."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from weftplan.kernels.compiled.pooling import implementation as pooling
from weftplan.kernels.compiled.pooling import kernels as pooling_kernels
from weftplan.kernels.compiled.target import Target, host
from weftplan.ops.core import implementations, registry
from weftplan.ops.core.schema import OpContext, TensorSpec
from weftplan.support import core_sharing
from weftplan.support.addresses import address

HOST = host()
pytestmark = pytest.mark.skipif(isinstance(HOST, str), reason=f"no compiled kernels: {HOST}")


def compute(name: str, mode: str, params: dict[str, Any], inputs: list[Any], out: Any) -> str:
    """Fill ``out`` by the implementation for ``mode``, in exactly its scratch; return the implementation's name."""
    op = registry.get(name)
    ins, outs = [TensorSpec(a.shape, a.dtype) for a in inputs], [TensorSpec(out.shape, out.dtype)]
    actual = implementations.choose(op, params, ins, outs, mode).implementation
    workspace = np.full(actual.workspace(params, ins, outs), 0xFF, np.uint8)
    actual.kernel(OpContext(np, workspace=workspace, is_train=True), params, inputs, [out])
    return actual.name


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    """Return the sizes and parameters of a random call of one to three axes."""
    rank = draw(st.integers(1, 3))
    kernel = draw(st.tuples(*[st.integers(1, 4)] * rank))
    pairs = draw(st.booleans())  # adjacent windows, two elements wide, have their own gradient kernel
    kernel = (*kernel[:-1], 2) if pairs else kernel
    convention = draw(st.sampled_from(("valid", "full", "same")))
    no_padding = pairs or convention == "same"  # which pads by itself
    pad = tuple(0 if no_padding else draw(st.integers(0, k - 1)) for k in kernel)
    image = tuple(draw(st.integers(max(1, k - 2 * p), (40, 12, 7)[rank - 1])) for k, p in zip(kernel, pad, strict=True))
    return {
        "image": image,
        "kernel": kernel,
        "stride": kernel if pairs else draw(st.tuples(*[st.integers(1, 4)] * rank)),
        "pad": pad,
        "pooling_convention": convention,
        "dtype": draw(st.sampled_from((np.float32, np.float64))),
        "values": draw(st.sampled_from(("normal", "ties", "special"))),
        "seed": draw(st.integers(0, 99)),
    }


def case(**changes: Any) -> dict[str, Any]:
    """Return the settings of a call of ordinary size; ``changes`` override them."""
    return {
        "image": (19, 23), "kernel": (3, 3), "stride": (2, 2), "pad": (1, 1), "pooling_convention": "valid",
        "dtype": np.float32, "values": "ties", "seed": 0, **changes,
    }  # fmt: skip


def numbers(rng: np.random.Generator, kind: str, shape: tuple[int, ...]) -> Any:
    """Return random numbers, numbers with many ties, or numbers with infinities and NaN."""
    if kind == "normal":
        return rng.normal(size=shape)
    some = [0.0, 1.0, -1.0] if kind == "ties" else [0.0, 1.0, -math.inf, -math.inf, -math.inf, math.inf, math.nan]
    return rng.choice(some, size=shape)


@settings(max_examples=150, deadline=None)
@given(cases())
@example(case())
@example(case(stride=(1, 1)))
@example(case(stride=(3, 2), kernel=(3, 2), pad=(0, 0), dtype=np.float64))
@example(case(stride=(2, 2), kernel=(2, 2), pad=(0, 0), image=(24, 24)))
@example(case(stride=(2, 2), kernel=(2, 2), pad=(0, 0), image=(25, 39), pooling_convention="full"))
@example(case(image=(70,), kernel=(3,), stride=(1,), pad=(1,), values="special"))
@example(case(image=(5, 6, 40), kernel=(2, 3, 3), stride=(2, 1, 3), pad=(1, 1, 1), pooling_convention="full"))
def test_values_are_those_of_numpy(given_case: dict[str, Any]) -> None:
    """Maxima and their gradients equal NumPy's exactly.

    Ties go to the first element, sums have NumPy's order, and NaN spreads.
    """
    rng = np.random.default_rng(given_case["seed"])
    op = registry.get("Pooling")
    names = ("kernel", "stride", "pad", "pooling_convention")
    params = registry.parse_params(op, {name: given_case[name] for name in names} | {"pool_type": "max"})
    x = numbers(rng, given_case["values"], (2, 3, *given_case["image"])).astype(given_case["dtype"])
    shape = op.infer_shape(params, [x.shape], [None])[1][0]
    assert shape is not None
    if min(shape) < 1:
        return  # "full" and "same" allow windows larger than the image
    ograd = rng.normal(size=shape).astype(x.dtype)
    by_name = {}
    for mode in ("numpy", "native"):
        y, dx = np.full(shape, 7, x.dtype), np.full(x.shape, 7, x.dtype)
        assert compute("Pooling", mode, params, [x], y) == mode
        assert compute("_backward_Pooling", mode, params, [ograd, x, y], dx) == mode
        by_name[mode] = y, dx
    for got, expected in zip(by_name["native"], by_name["numpy"], strict=True):
        np.testing.assert_array_equal(got, expected)


@settings(max_examples=100, deadline=None)
@given(cases(), st.sampled_from(("avg", "sum")), st.booleans())
@example(case(), "avg", True)
@example(case(stride=(1, 1)), "avg", False)
@example(
    case(image=(5, 6, 40), kernel=(2, 3, 3), stride=(2, 1, 3), pad=(1, 1, 1), pooling_convention="full"), "avg", True
)
def test_averages_and_sums_are_those_of_numpy(given_case: dict[str, Any], kind: str, include_pad: bool) -> None:
    """Averages and sums equal NumPy's exactly, with padding counted or not."""
    rng = np.random.default_rng(given_case["seed"])
    op = registry.get("Pooling")
    names = ("kernel", "stride", "pad", "pooling_convention")
    more = {"pool_type": kind, "count_include_pad": include_pad}
    params = registry.parse_params(op, {name: given_case[name] for name in names} | more)
    x = numbers(rng, given_case["values"], (2, 3, *given_case["image"])).astype(given_case["dtype"])
    shape = op.infer_shape(params, [x.shape], [None])[1][0]
    assert shape is not None
    if min(shape) < 1:
        return
    by_name = {}
    for mode in ("numpy", "native"):
        by_name[mode] = np.full(shape, 7, x.dtype)
        with np.errstate(invalid="ignore"):
            assert compute("Pooling", mode, params, [x], by_name[mode]) == mode
    np.testing.assert_array_equal(by_name["native"], by_name["numpy"])
    known = ~np.isnan(by_name["numpy"])
    np.testing.assert_array_equal(np.signbit(by_name["native"])[known], np.signbit(by_name["numpy"])[known])


@pytest.mark.parametrize("step", [1, 2, 3])
def test_bits_do_not_depend_on_the_width_of_vectors(step: int) -> None:
    """Vectors of 128, 256 and 512 bits give bit-identical results."""
    assert isinstance(HOST, Target)
    rng = np.random.default_rng(1)
    x = rng.choice(np.array([0, 1, 2], np.float32), size=(2, 9, 40))
    columns = (40 - 3) // step + 1
    ograd = rng.normal(size=(2, 4, columns)).astype(np.float32)
    results = []
    for bits in (128, 256, 512):
        target = Target(HOST.cpu, HOST.features, bits, HOST.registers, HOST.compiler)
        y, dx, buffer = np.empty_like(ograd), np.empty_like(x), np.empty((2, 256), np.float32)
        constants = np.array([-np.inf, -np.inf], np.float32)
        values = {name: address(a) for name, a in (("x", x), ("y", y), ("dy", ograd), ("dx", dx), ("buffer", buffer))}
        values |= {"constants": address(constants), "height": 9, "width": 40, "out_height": 4, "out_width": columns}
        values |= {"kernel_height": 2, "kernel_width": 3, "step_height": 2, "step": step, "pitch": 1024, "last": 2}
        values |= dict.fromkeys(("depth", "out_depth", "kernel_depth", "step_depth"), 1)
        words = np.array([values.get(name, 0) for name in pooling_kernels.WORDS], np.int64)
        for name in ("forward", "backward"):
            pooling.entries(x.dtype, step, target)[name](address(words))
        results.append(y.tobytes() + dx.tobytes())
    assert y.max() == 2
    assert dx.any()
    assert results[0] == results[1] == results[2]


def test_planes_are_shared_by_cores_with_the_same_bits(monkeypatch: pytest.MonkeyPatch, always_cut: None) -> None:
    """Pooling cut into parts, each in its own scratch, has NumPy's bits."""
    monkeypatch.setattr(pooling, "FEW", 1 << 8)
    parts = []
    split = core_sharing.split

    def noting(work: Any, count: int) -> None:
        parts.append(count)
        split(work, count)

    monkeypatch.setattr(core_sharing, "split", noting)
    params = registry.parse_params(
        registry.get("Pooling"), {"kernel": (3, 3), "stride": (2, 2), "pad": (1, 1), "pool_type": "max"}
    )
    rng = np.random.default_rng(3)
    x = rng.choice(np.array([0, 1, 2], np.float32), size=(3, 5, 21, 20))
    results = []
    for mode in ("numpy", "native"):
        y, dx = np.empty((3, 5, 11, 10), np.float32), np.empty_like(x)
        compute("Pooling", mode, params, [x], y)
        compute("_backward_Pooling", mode, params, [y, x, y], dx)
        results.append(y.tobytes() + (dx + 0).tobytes())  # a zero of either sign
    assert results[0] == results[1]
    assert parts[-2:] == [4, 4]


@pytest.mark.parametrize(
    ("changes", "dtype", "reason"),
    [
        ({"pool_type": "lp", "p_value": 2, "kernel": (2, 2)}, np.float32, "maxima, averages and sums"),
        ({"pool_type": "max", "global_pool": True}, np.float32, "all pixels of an image"),
        ({"pool_type": "max", "kernel": (2, 2)}, np.float16, "float32 and float64"),
    ],
)
def test_other_kinds_stay_with_numpy(changes: dict[str, Any], dtype: Any, reason: str) -> None:
    """Unsupported kinds stay with NumPy, and the choice states the reason."""
    op = registry.get("Pooling")
    params = registry.parse_params(op, changes)
    data = TensorSpec((1, 2, 8, 8), np.dtype(dtype))
    shape = op.infer_shape(params, [data.shape], [None])[1][0]
    assert shape is not None
    choice = implementations.choose(op, params, [data], [TensorSpec(shape, data.dtype)], "native")
    assert choice.implementation.name == "numpy"
    assert reason in choice.reason
