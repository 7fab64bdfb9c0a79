"""NumPy's 3x3 convolutions by Winograd's products: right in any shape, block and part, in just the declared scratch."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

import weftplan as mx
from tests.ops.convolution_reference import gradients, reference
from tests.ops.test_convolution_parts import step
from weftplan.ops.core.schema import OpContext
from weftplan.ops.nn import conv_geometry, winograd_sizes
from weftplan.ops.nn.conv_gemm import adjoint, correlate
from weftplan.ops.nn.conv_geometry import Geometry, geometry, tiled, winograd, winograd_of_weight
from weftplan.support import core_sharing


def _forget() -> None:
    of_winograd = winograd_sizes._fitting, winograd_sizes.parts, winograd_sizes.weight_parts
    for cached in (*of_winograd, conv_geometry.parts, winograd, winograd_of_weight, tiled):
        cached.cache_clear()


@pytest.fixture(autouse=True)
def fresh() -> Any:
    """No sizes from other settings."""
    _forget()
    yield
    _forget()


def layer(monkeypatch: pytest.MonkeyPatch, seed: int) -> Geometry:
    """A random layer with random settings, so that blocks, pieces of the weight and parts begin and end everywhere."""
    rng = random.Random(seed)
    few = rng.choice((1 << 24, 1 << 10))
    monkeypatch.setattr(winograd_sizes, "LEAST", 1)
    monkeypatch.setattr(winograd_sizes, "LEAST_TILES", 1)
    monkeypatch.setattr(winograd_sizes, "WHOLE", rng.choice((0, 1 << 22)))
    monkeypatch.setattr(winograd_sizes, "FEW", few)
    monkeypatch.setattr(conv_geometry, "FEW", few)
    pad = rng.randint(0, 2), rng.randint(0, 2)
    image = rng.randint(3, 12), rng.randint(3, rng.choice((9, 9, 40)))
    batch, channels, filters = rng.choice((1, 2, 3, 5, 8)), rng.choice((1, 3, 64, 70)), rng.choice((1, 5, 64, 140))
    grid = tuple(extent + 2 * p - 2 for extent, p in zip(image, pad, strict=True))
    ones, tile_bytes = (1, 1), rng.choice((1 << 12, 1 << 15, 2 << 20))
    shape, dtype = (batch, channels, *image), np.dtype(np.float32)
    return tiled(shape, filters, (3, 3), ones, ones, pad, grid, 1, dtype, 1024, tile_bytes)


def _context(nbytes: int) -> OpContext:
    return OpContext(np, workspace=np.full(nbytes, 0xFF, np.uint8))  # every number in it is NaN


SEEDS = range(40)


@pytest.mark.parametrize("seed", SEEDS)
def test_random_layers_are_right(monkeypatch: pytest.MonkeyPatch, four_cores: None, seed: int) -> None:
    """Results and gradients against the definition in float64, each alone and both together."""
    geo = layer(monkeypatch, seed)
    rng = np.random.default_rng(seed)
    shapes = (
        (geo.batch, geo.channels, *geo.image),
        (geo.filters, geo.channels, 3, 3),
        (geo.batch, geo.filters, *geo.grid),
    )
    x, w, dy = (rng.uniform(-1, 1, shape).astype(np.float32) for shape in shapes)
    bias = rng.uniform(-1, 1, geo.filters).astype(np.float32)
    plain, shifted, dx, dw, only = (
        np.empty_like(dy),
        np.empty_like(dy),
        np.empty_like(x),
        np.empty_like(w),
        np.empty_like(x),
    )
    correlate(_context(geo.forward_nbytes()), geo, x, w, None, plain)
    correlate(_context(geo.forward_nbytes()), geo, x, w, bias, shifted)
    adjoint(_context(geo.backward_nbytes()), geo, x, dy, w, dx, dw)
    adjoint(_context(geo.backward_nbytes(weight=False)), geo, None, dy, w, only, None)
    alone, of_less = np.empty_like(w), np.empty_like(x)
    adjoint(_context(geo.backward_nbytes(data=False)), geo, x, dy, None, None, alone)
    adjoint(_context(geo.backward_nbytes()), geo, x, dy, w, of_less, None)  # less than was declared for
    want = reference(geo, x, w)
    of_x, of_w = gradients(geo, x, w, dy)
    made = plain, shifted, dx, dw, alone, of_less
    for got, one in zip(made, (want, want + bias.reshape(-1, 1, 1), of_x, of_w, of_w, of_x), strict=True):
        assert np.abs(got - one).max() <= 2e-6 * max(1.0, np.abs(one).max()), geo
    if winograd(geo, back=True) is not None:
        assert only.tobytes() == dx.tobytes()


def test_the_seeds_cover_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The seeds cover both ways to keep the weight, several parts and blocks, both layouts, and refused layers."""
    found: set[Any] = set()
    for seed in SEEDS:
        geo = layer(monkeypatch, seed)
        _forget()
        sums = winograd_of_weight(geo)
        if sums is not None:
            found.add("parts of a weight" if len(winograd_sizes.weight_parts(sums)) > 1 else "a weight in one part")
        for back in (False, True):
            p = winograd(geo, back=back)
            found |= {"refused"} if p is None else {
                ("back" if back else "forward", "whole" if p.whole else "pieces"),
                "parts" if len(winograd_sizes.parts(p)) > 1 else "one part",
                "blocks of rows" if p.rows < p.grid[0] else "blocks of images" if p.images < p.batch else "one block",
                "one run" if p.columns(p.images) > p.grid[1] else "exact",
            }  # fmt: skip
    ways = {(way, kept) for way in ("back", "forward") for kept in ("whole", "pieces")}
    assert found >= {
        *ways,
        "parts of a weight",
        "a weight in one part",
        "refused",
        "parts",
        "one part",
        "blocks of rows",
        "blocks of images",
        "one run",
        "exact",
    }


def test_an_exact_product_is_exact() -> None:
    """Small whole numbers, whose sums are exact in float32, halves and quarters of the weight included."""
    rng = np.random.default_rng(0)
    geo = geometry((4, 64, 12, 12), 64, (3, 3), (1, 1), (1, 1), (1, 1), (12, 12), 1, np.dtype(np.float32), 1024)
    assert winograd(geo, back=False) is not None
    x, w = (rng.integers(-2, 3, shape).astype(np.float32) for shape in ((4, 64, 12, 12), (64, 64, 3, 3)))
    out = np.empty((4, 64, 12, 12), np.float32)
    correlate(_context(geo.forward_nbytes()), geo, x, w, None, out)
    np.testing.assert_array_equal(out, reference(geo, x, w))


@pytest.mark.parametrize(
    ("change", "chosen"),
    [
        ({}, True),
        ({"stride": (2, 2), "grid": (16, 16)}, False),
        ({"dilate": (2, 2), "grid": (30, 30)}, False),
        ({"kernel": (1, 3), "grid": (34, 32)}, False),
        ({"pad": (3, 3), "grid": (36, 36)}, False),
        ({"groups": 2}, False),
        ({"dtype": np.dtype(np.float64)}, False),
        ({"dtype": np.dtype(np.float16)}, False),
        ({"filters": 32}, False),
        ({"image": (32, 32, 32, 32)}, False),
        ({"image": (1, 64, 14, 14), "grid": (14, 14)}, False),
    ],
)
def test_which_layers_are_computed_so(change: dict[str, Any], chosen: bool) -> None:
    """3x3 convolutions of many channels in float32 with enough tiles are chosen."""
    sizes: dict[str, Any] = {
        "image": (32, 64, 32, 32), "filters": 64, "kernel": (3, 3), "stride": (1, 1), "dilate": (1, 1), "pad": (1, 1),
        "grid": (32, 32), "groups": 1, "dtype": np.dtype(np.float32), "workspace": 1024,
    }  # fmt: skip
    geo = geometry(*{**sizes, **change}.values())
    found = winograd(geo, back=False), winograd(geo, back=True), winograd_of_weight(geo)
    assert [one is not None for one in found] == [chosen] * 3


def test_the_sums_of_large_weights_are_not_kept() -> None:
    """The gradient of a weight of 512 x 512 is computed the other way: 16 sums for each of its kernels are too many."""
    sizes = (32, 512, 4, 4), 512, (3, 3), (1, 1), (1, 1), (1, 1), (4, 4), 1, np.dtype(np.float32), 1024
    assert winograd(geometry(*sizes), back=True) is not None
    assert winograd_of_weight(geometry(*sizes)) is None


def test_scratch_is_no_more_than_twice_what_is_read_and_written() -> None:
    """Or than that of the other way."""
    for batch in (1, 2, 8, 32):
        for channels in (64, 128, 256, 512):
            for extent in (4, 7, 8, 14, 16, 28, 32, 56):
                shape, ones, grid = (batch, channels, extent, extent), (1, 1), (extent, extent)
                geo = geometry(shape, channels, (3, 3), ones, ones, ones, grid, 1, np.dtype(np.float32), 1024)
                images, weight = 8 * batch * channels * extent**2, 36 * channels**2
                if winograd(geo, back=False) is not None:
                    assert geo.forward_nbytes() <= max(2 * (images + weight), geo._rooms_nbytes(weight=False))
                if winograd_of_weight(geo) is not None:
                    most = max(2 * (images + 2 * weight), geo._rooms_nbytes(weight=True))
                    assert geo.backward_nbytes(data=False) <= most


@pytest.mark.parametrize("kind", ["Convolution", "Deconvolution"])
@pytest.mark.parametrize("kept", [0, 1 << 22])
def test_same_bits_with_any_number_of_cores(
    monkeypatch: pytest.MonkeyPatch, four_cores: None, kind: str, kept: int
) -> None:
    """Training steps on every engine, with one to four cores; the allocated bytes equal the plan."""
    monkeypatch.setattr(winograd_sizes, "WHOLE", kept)
    monkeypatch.setattr(winograd_sizes, "FEW", 1 << 10)
    split, counts, found = core_sharing.split, [], []

    def noting(work: Any, count: int) -> None:
        counts.append(count)
        split(work, count)

    monkeypatch.setattr(core_sharing, "split", noting)
    for engine_kind, count in (("NaiveEngine", 4), *(("ThreadedEnginePerDevice", count) for count in (1, 2, 3, 4))):
        monkeypatch.setattr(core_sharing, "usable_cores", lambda count=count: count)
        engine = mx.engine.create(engine_kind)
        with mx.engine.using(engine):
            found.append(step(kind, (7, 128, 14, 13), 128))
        engine.stop()
    assert max(counts) > 1
    assert all(one == found[0] for one in found)
