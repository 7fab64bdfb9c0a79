"""NumPy's convolutions in parts: correct, with the same bits for any number of cores, each in its own scratch."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

import weftplan as mx
from tests.ops.convolution_reference import gradients, reference
from tests.support.ops_harness import SideBySide
from weftplan.ops.core.schema import OpContext
from weftplan.ops.nn import conv_gemm, conv_geometry
from weftplan.ops.nn.conv_gemm import adjoint, correlate
from weftplan.ops.nn.conv_geometry import Geometry, geometry, output_extent, parts
from weftplan.planner import PlanOptions
from weftplan.support import core_sharing


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch, four_cores: None) -> Any:
    """Cut work of test size into tiles of a few columns, on four cores."""
    monkeypatch.setattr(conv_geometry, "FEW", 1 << 10)
    monkeypatch.setattr(conv_geometry, "LEAST_ROWS", 4)
    monkeypatch.setattr(conv_geometry, "SHARE", 1)
    monkeypatch.setattr("weftplan.ops.core.tiling.tile_bytes", lambda: 1 << 12)
    parts.cache_clear()
    yield
    parts.cache_clear()


def layer(seed: int) -> Geometry:
    """Return a random convolution of one to three axes, in one or several groups, including depthwise."""
    rng = random.Random(seed)
    axes = rng.choice((1, 2, 2, 2, 3))
    kernel, dilate, stride, pad = (
        tuple(rng.randint(*ends) for _ in range(axes)) for ends in ((1, 3), (1, 2), (1, 2), (0, 2))
    )
    groups = rng.choice((1, 1, 1, 2, 5))
    channels, filters = groups * rng.choice((1, 3, 8, 13)), groups * rng.choice((1, 5, 12))
    most = {1: 30, 2: 9, 3: 5}[axes]
    image = tuple(rng.randint((k - 1) * d + 1, most + (k - 1) * d) for k, d in zip(kernel, dilate, strict=True))
    grid = tuple(output_extent(*each) for each in zip(image, kernel, stride, pad, dilate, strict=True))
    shape = rng.choice((1, 2, 5, 8, 16)), channels, *image
    dtype = np.dtype(rng.choice(("float16", "float32", "float64")))
    return geometry(shape, filters, kernel, stride, dilate, pad, grid, groups, dtype, 1024)


def arrays(geo: Geometry) -> tuple[Any, Any, Any]:
    """Return random data, weight and output gradient."""
    rng = np.random.default_rng(3)
    shapes: list[tuple[int, ...]] = [
        (geo.batch, geo.channels, *geo.image),
        (geo.filters, geo.channels // geo.groups, *geo.kernel),
        (geo.batch, geo.filters, *geo.grid),
    ]
    x, w, dy = (rng.uniform(-1, 1, shape).astype(geo.dtype) for shape in shapes)
    return x, w, dy


def passes(geo: Geometry) -> list[Any]:
    """Return the output, both gradients computed together, and each gradient computed alone.

    Every pass has exactly the scratch declared for it.
    """
    x, w, dy = arrays(geo)

    def context(nbytes: int) -> OpContext:
        return OpContext(np, workspace=np.full(nbytes, 0xFF, np.uint8))

    out, both, dx, dw = np.empty_like(dy), (np.empty_like(x), np.empty_like(w)), np.empty_like(x), np.empty_like(w)
    correlate(context(geo.forward_nbytes()), geo, x, w, None, out)
    adjoint(context(geo.backward_nbytes()), geo, x, dy, w, *both)
    adjoint(context(geo.backward_nbytes(weight=False)), geo, None, dy, w, dx, None)
    adjoint(context(geo.backward_nbytes(data=False)), geo, x, dy, None, None, dw)
    adjoint(context(geo.backward_nbytes()), geo, x, dy, w, np.empty_like(x), None)  # needs less scratch
    return [out, *both, dx, dw]


@pytest.mark.parametrize("seed", range(40))
def test_parts_are_right(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Random layers equal the float64 definition while all their parts run at the same time.

    If parts shared scratch, they would overwrite each other's columns.
    """
    together, lay_out, scatter = SideBySide(), conv_gemm._lay_out, conv_gemm._scatter

    def laid_out(*each: Any) -> None:
        lay_out(*each)
        together.meet()

    def scattered(*each: Any) -> None:
        together.meet()
        scatter(*each)

    monkeypatch.setattr(conv_gemm, "split_in_rooms", together)
    monkeypatch.setattr(conv_gemm, "_lay_out", laid_out)
    monkeypatch.setattr(conv_gemm, "_scatter", scattered)
    geo = layer(seed)
    x, w, dy = arrays(geo)
    want = reference(geo, x, w), *gradients(geo, x, w, dy)
    for got, one in zip(passes(geo), (*want, *want[1:]), strict=True):
        eps = np.finfo(geo.dtype).eps
        most = max(1.0, np.abs(one).max(initial=0))
        grows = 1 if geo.dtype == np.float16 else one.size**0.5  # float16 is summed in float32
        assert np.abs(got - one).max(initial=0) <= 4 * eps * most * grows, geo
    cuts = {len(parts(geo, weight=weight)) for weight in (False, True)} - {1}
    assert set(together.counts) <= cuts
    assert set(together.counts) == cuts or geo.pointwise  # pointwise layers use other products


def test_random_layers_are_cut_and_not_cut() -> None:
    """The seeds above include layers of one, two and four parts, with and without groups."""
    cuts_seen = {(weight, geo.groups > 1, len(parts(geo, weight=weight)))
             for geo in map(layer, range(40)) for weight in (False, True)}  # fmt: skip
    for weight in (False, True):
        assert {(weight, False, count) for count in (1, 2, 4)} <= cuts_seen
        assert {(weight, True, count) for count in (2, 4)} <= cuts_seen


def test_same_bits_with_any_number_of_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training steps have the same bits on two engines with one to four cores.

    The allocated bytes equal the plan.
    """
    split, counts = core_sharing.split, []

    def noting(work: Any, count: int) -> None:
        counts.append(count)
        split(work, count)

    monkeypatch.setattr(core_sharing, "split", noting)
    results = []
    for kind, count in (("NaiveEngine", 4), *(("ThreadedEnginePerDevice", count) for count in (1, 2, 3, 4))):
        monkeypatch.setattr(core_sharing, "usable_cores", lambda count=count: count)
        engine = mx.engine.create(kind)
        with mx.engine.using(engine):
            results.append([step(kind, (7, 9, 11, 10), 12) for kind in ("Convolution", "Deconvolution")])
        engine.stop()
    assert max(counts) == 4
    assert all(one == results[0] for one in results)


def step(kind: str, data: tuple[int, ...], filters: int) -> bytes:
    """Return the bytes of the output and the gradients of one layer with 3x3 windows, computed by NumPy."""
    net = getattr(mx.sym, kind)(
        mx.sym.Variable("data"), kernel=(3, 3), num_filter=filters, pad=(1, 1), no_bias=False, name="c"
    )
    bound = net.simple_bind(mx.cpu(), data=data, plan_options=PlanOptions(kernels="numpy"))
    rng = np.random.default_rng(5)
    for array in bound.arg_arrays:
        array[:] = rng.standard_normal(array.shape)
    out = bound.forward(is_train=True)[0]
    bound.backward([mx.nd.array(rng.standard_normal(out.shape))])
    assert bound.allocated_bytes == bound.memory_plan.peak
    return b"".join(one.asnumpy().tobytes() for one in (out, *bound.grad_arrays))


@pytest.mark.parametrize("kind", ["Convolution", "Deconvolution"])
def test_one_image_needs_no_more_scratch(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """An inference plan for one image has the same peak with and without parts."""
    net = getattr(mx.sym, kind)(mx.sym.Variable("data"), kernel=(3, 3), num_filter=12, name="c")
    results = []
    for few in (1 << 10, 1 << 60):
        monkeypatch.setattr(conv_geometry, "FEW", few)
        parts.cache_clear()
        results.append(net.plan({"data": (1, 16, 30, 30)}, grad_req="null", options=PlanOptions(kernels="numpy")).peak)
    assert results[0] == results[1]
