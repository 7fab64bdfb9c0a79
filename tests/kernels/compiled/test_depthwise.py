"""Compiled depthwise convolutions against NumPy's kernel in float64: geometries, scratch, vector widths."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from weftplan.kernels.compiled import size_table
from weftplan.kernels.compiled.depthwise import tables as depthwise_tables
from weftplan.kernels.compiled.target import Target, host
from weftplan.ops.core import implementations, registry
from weftplan.ops.core.schema import OpContext, TensorSpec
from weftplan.ops.nn.conv_gemm import adjoint, correlate
from weftplan.ops.nn.conv_geometry import Geometry, geometry, output_extent

HOST = host()
pytestmark = pytest.mark.skipif(isinstance(HOST, str), reason=f"no compiled kernels: {HOST}")


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    """Return a random depthwise convolution of one or two axes."""
    rank = draw(st.sampled_from((1, 2, 2)))
    kernel = tuple(draw(st.integers(1, 5)) for _ in range(rank))
    dilate = tuple(draw(st.integers(1, 3)) for _ in range(rank))
    pad = tuple(draw(st.integers(0, 3)) for _ in range(rank))
    image = tuple(
        draw(st.integers(max(1, d * (k - 1) + 1 - 2 * p), 40)) for k, d, p in zip(kernel, dilate, pad, strict=True)
    )
    return {
        "batch": draw(st.integers(1, 3)), "channels": draw(st.integers(2, 5)), "image": image, "kernel": kernel,
        "stride": (draw(st.integers(1, 2)),) * rank, "dilate": dilate, "pad": pad,
        "dtype": draw(st.sampled_from((np.float32, np.float64))), "seed": draw(st.integers(0, 99)),
    }  # fmt: skip


def case(**changes: Any) -> dict[str, Any]:
    """Return the settings of a plain 3x3 convolution; ``changes`` override them."""
    return {
        "batch": 2, "channels": 3, "image": (14, 14), "kernel": (3, 3), "stride": (1, 1), "dilate": (1, 1),
        "pad": (1, 1), "dtype": np.float32, "seed": 0, **changes,
    }  # fmt: skip


def geometry_of(one: dict[str, Any], dtype: Any) -> Geometry:
    """Return the geometry of a case, with elements of ``dtype``."""
    names = ("image", "kernel", "stride", "pad", "dilate")
    grid = tuple(output_extent(e, k, s, p, d) for e, k, s, p, d in zip(*(one[n] for n in names), strict=True))
    channels = one["channels"]
    shape = (one["batch"], channels, *one["image"])
    where = (one["stride"], one["dilate"], one["pad"], grid)
    return geometry(shape, channels, one["kernel"], *where, channels, np.dtype(dtype), 1024)


def arrays(one: dict[str, Any], geo: Geometry) -> tuple[Any, Any, Any]:
    """Return random data, weight and output gradient."""
    rng = np.random.default_rng(one["seed"])
    shapes = (
        (geo.batch, geo.channels, *geo.image),
        (geo.channels, 1, *geo.kernel),
        (geo.batch, geo.channels, *geo.grid),
    )
    x, w, dy = (rng.uniform(-1, 1, shape).astype(one["dtype"]) for shape in shapes)
    return x, w, dy


def run(geo: Geometry, x: Any, w: Any, dy: Any, target: Target | None = None) -> list[Any]:
    """Return the output and both gradients, computed in exactly the declared scratch.

    Fail if a kernel writes outside its output or its scratch.
    """
    s = size_table.sizes(geo)
    assert depthwise_tables.takes(s)
    results = []
    for like, call in (
        (dy, lambda out, room: depthwise_tables.forward_call(s, x, w, None, out, room, target)()),
        (x, lambda out, room: depthwise_tables.data_call(s, dy, w, out, room, target)()),
        (w, lambda out, room: depthwise_tables.weight_call(s, x, dy, out, room, target)()),
    ):
        scratch = np.full(depthwise_tables.scratch(s) + 64, 0xFF, np.uint8)
        room = np.full(like.size + 64, np.nan, x.dtype)
        out = room[32:-32].reshape(like.shape)
        call(out, scratch[:-64])
        assert np.isnan(room[:32]).all(), "something was written in front of an output"
        assert np.isnan(room[-32:]).all(), "something was written behind an output"
        assert (scratch[-64:] == 0xFF).all(), "something was written behind the scratch"
        results.append(out)
    return results


@settings(max_examples=150, deadline=None)
@given(cases())
@example(case(image=(7, 7)))
@example(case(image=(33, 31), stride=(2, 2)))
@example(case(image=(1, 1), pad=(3, 3), kernel=(5, 5), stride=(2, 2)))
@example(case(image=(40, 3), pad=(0, 0), kernel=(2, 3)))
def test_against_the_plain_kernel(given_case: dict[str, Any]):
    """Output and both gradients equal the float64 results of NumPy's kernel within rounding error."""
    geo, wide = geometry_of(given_case, given_case["dtype"]), geometry_of(given_case, np.float64)
    x, w, dy = arrays(given_case, geo)
    x8, w8, dy8 = (a.astype(np.float64) for a in (x, w, dy))
    want = [np.empty_like(dy8), np.empty_like(x8), np.empty_like(w8)]
    scratch = np.empty(wide.forward_nbytes() + wide.backward_nbytes(), np.uint8)
    correlate(OpContext(np, workspace=scratch), wide, x8, w8, None, want[0])
    adjoint(OpContext(np, workspace=scratch), wide, x8, dy8, w8, want[1], want[2])
    eps = np.finfo(given_case["dtype"]).eps
    bias = np.random.default_rng(7).uniform(-1, 1, geo.channels).astype(x.dtype)
    s = size_table.sizes(geo)
    room = np.empty(depthwise_tables.scratch(s), np.uint8)
    for relu in (False, True):  # the forward pass can fuse a relu
        got = np.empty_like(dy)
        depthwise_tables.forward_call(s, x, w, bias, got, room, relu=relu)()
        whole = want[0] + bias.reshape(1, -1, *[1] * (dy.ndim - 2))
        assert np.abs(got - (np.maximum(whole, 0) if relu else whole)).max() <= eps * (8 + w[0].size), given_case
    for got, one, count in zip(run(geo, x, w, dy), want, (w[0].size, w[0].size, dy[:, 0].size), strict=True):
        assert np.abs(got - one).max() <= eps * (8 + count), given_case


@settings(max_examples=30, deadline=None)
@given(cases())
def test_bits_do_not_depend_on_the_width_of_vectors(given_case: dict[str, Any]):
    """Vectors of 128, 256 and 512 bits give bit-identical results."""
    assert isinstance(HOST, Target)
    geo = geometry_of(given_case, given_case["dtype"])
    data = arrays(given_case, geo)
    mine = [one.tobytes() for one in run(geo, *data)]
    for bits in (128, 256, 512):
        target = Target(HOST.cpu, HOST.features, bits, HOST.registers, HOST.compiler)
        assert [one.tobytes() for one in run(geo, *data, target)] == mine, (bits, given_case)


def test_infinity_stays_where_it_is():
    """An infinite element at a row's end reaches only the gradients of taps that read it."""
    geo = geometry_of(case(image=(5, 5)), np.float32)
    x, w, dy = arrays(case(image=(5, 5)), geo)
    x[0, 0, 2, 0] = np.inf
    _, _, dw = run(geo, x, w, dy)
    assert np.isfinite(dw[1:]).all()
    assert np.isfinite(dw[0, 0, :, 2]).all(), "the last column's taps never read the first column"


@pytest.mark.parametrize("stride", [1, 2, 3])
def test_the_operator(stride: int):
    """The compiled operator with bias, in exactly its scratch, agrees with NumPy's.

    For a stride of three NumPy's is chosen.
    """
    op = registry.get("Convolution")
    params = registry.parse_params(
        op, {"kernel": (3, 3), "num_filter": 4, "num_group": 4, "stride": (stride, stride), "pad": (1, 1)}
    )
    rng = np.random.default_rng(0)
    x, w, b = (rng.normal(size=shape).astype(np.float32) for shape in ((2, 4, 10, 11), (4, 1, 3, 3), (4,)))
    y = np.empty((2, 4, -(-10 // stride), -(-11 // stride)), np.float32)
    ins, outs = [TensorSpec(a.shape, a.dtype) for a in (x, w, b)], [TensorSpec(y.shape, y.dtype)]
    by_name = {mode: implementations.choose(op, params, ins, outs, mode).implementation for mode in ("auto", "numpy")}
    assert by_name["auto"].name == ("numpy" if stride == 3 else "native")
    results = []
    for one in by_name.values():
        out = np.empty_like(y)
        scratch = np.empty(one.workspace(params, ins, outs), np.uint8)
        one.kernel(OpContext(np, workspace=scratch), params, [x, w, b], [out])
        results.append(out)
    np.testing.assert_allclose(*results, rtol=1e-5, atol=1e-6)
