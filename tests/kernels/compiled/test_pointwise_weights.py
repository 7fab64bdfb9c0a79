"""Weight gradients of 1x1 convolutions: definition, bits, parts, choice of kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.kernels.compiled.test_dense import HOST, OTHER, arrays, check_widths, geometry_of
from tests.kernels.compiled.test_pointwise import plain
from tests.ops.convolution_reference import gradients
from weftplan.kernels.compiled import parts, scratch
from weftplan.kernels.compiled.convolution import implementation as convolution
from weftplan.kernels.compiled.pointwise import weights as pointwise_weights
from weftplan.kernels.compiled.pointwise.weights import ProductPass, weight_pass
from weftplan.kernels.compiled.size_table import sizes
from weftplan.kernels.compiled.target import Target
from weftplan.ops.nn.conv_geometry import Geometry

pytestmark = pytest.mark.skipif(isinstance(HOST, str), reason=f"no compiled kernels: {HOST}")


def pass_of(geo: Geometry) -> ProductPass:
    """Return the pass for this geometry, which must be supported."""
    actual = weight_pass(sizes(geo))
    assert actual is not None
    return actual


def run(geo: Geometry, x: Any, w: Any, b: Any, dy: Any, target: Target | None = None) -> list[Any]:
    """Return [gradient of the weight]; fail if the kernel writes outside of it."""
    there = pass_of(geo)
    held = np.full(w.size + 64, np.nan, x.dtype)
    out = held[32:-32].reshape(w.shape)
    pointwise_weights.call(there, x, dy, out, target)()
    assert np.isnan(held[:32]).all(), "something was written in front of the gradient"
    assert np.isnan(held[-32:]).all(), "something was written behind the gradient"
    return [out]


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    """Return a random supported 1x1 convolution."""
    return plain(
        batch=draw(st.integers(1, 6)),
        channels=draw(st.integers(16, 130)),
        filters=draw(st.integers(8, 40)),
        image=(draw(st.integers(1, 20)), draw(st.integers(1, 20))),
        dtype=draw(st.sampled_from((np.float32, np.float32, np.float64))),
        shift=draw(st.integers(0, 3)),
        seed=draw(st.integers(0, 99)),
    )


@settings(max_examples=80, deadline=None)
@given(cases())
@example(plain(batch=3, channels=49, filters=9, image=(23, 37)))  # four chunks of an image, the last short
@example(plain(batch=7, channels=16, filters=8, image=(7, 11)))  # three images in a chain, and one that is left over
@example(plain(batch=2, channels=25, filters=11, image=(16, 16)))  # a chain of the greatest length
def test_against_the_definition(given_case: dict[str, Any]):
    """The weight's gradient equals a float64 sum within rounding error."""
    geo = geometry_of(given_case)
    x, w, b, dy = arrays(given_case, geo)
    want = gradients(geo, x, w, dy)[1]
    eps = np.finfo(given_case["dtype"]).eps
    assert np.abs(run(geo, x, w, b, dy)[0] - want).max() <= eps * (8 + geo.batch * sizes(geo).pixels), given_case


@pytest.mark.skipif(not OTHER, reason="one width only")
@settings(max_examples=25, deadline=None)
@given(cases())
@example(plain(batch=3, channels=49, filters=9, image=(23, 37)))
def test_bits_do_not_depend_on_the_width_of_vectors(given_case: dict[str, Any]):
    """The other vector widths give results that are bit-identical to those of this machine's width."""
    check_widths(run, given_case)


@pytest.mark.parametrize(("channels", "filters"), [(150, 40), (40, 150)])
def test_parts_have_the_bits_of_the_whole(
    monkeypatch: pytest.MonkeyPatch, always_cut: None, channels: int, filters: int
):
    """Parts cut by channels or by filters, run in reverse order, have the bits of uncut work."""
    chosen = plain(batch=2, channels=channels, filters=filters, image=(20, 30))
    geo = geometry_of(chosen)
    x, w, b, dy = arrays(chosen, geo)
    monkeypatch.setattr(scratch, "FEW", 1 << 60)
    assert pass_of(geo).parts == 1
    want = run(geo, x, w, b, dy)[0]
    monkeypatch.setattr(scratch, "FEW", 1 << 12)
    there = pass_of(geo)
    assert there.parts > 1
    counts = []

    def in_the_last(work: Any, count: int) -> None:
        counts.append(count)
        for number in reversed(range(count)):
            work(number, there.parts - 1)

    monkeypatch.setattr(parts, "split_in_rooms", in_the_last)
    got = np.empty_like(w)
    pointwise_weights.call(there, x, dy, got)()
    assert max(counts) > 1
    assert got.tobytes() == want.tobytes()


def test_a_chain_is_a_sum_in_the_order_of_pixels():
    """Chunks of pixels are summed in order, and added image by image.

    Rounding in float32 would reveal another order.
    """
    chosen = plain(batch=2, channels=16, filters=8, image=(24, 24))
    geo = geometry_of(chosen)
    x, w, b, dy = (np.ones_like(one) for one in arrays(chosen, geo))
    there = pass_of(geo)
    assert there.chunk == 192
    x[...] = np.random.default_rng(4).uniform(0, 1e4, x.shape)
    total = None
    for image in range(2):
        for first in range(0, 576, 192):
            chunk = np.zeros(16, np.float32)
            for pixel in range(first, first + 192):
                chunk += x[image].reshape(16, -1)[:, pixel]
            total = chunk if total is None else total + chunk
    got = run(geo, x, w, b, dy)[0].reshape(8, 16)
    assert (got == total).all()


@pytest.mark.parametrize(
    ("changes", "taken"),
    [({}, True), ({"channels": 15}, False), ({"filters": 7}, False), ({"groups": 2}, False), ({"pad": (1, 0)}, False),
     ({"dtype": np.float16}, False)],
)  # fmt: skip
def test_who_computes(changes: dict[str, Any], taken: bool):
    """The kernel supports one group of enough channels and filters, without padding, and needs no scratch."""
    geo = geometry_of(plain(**{"channels": 64, "filters": 64, "image": (9, 9), **changes}))
    actual = weight_pass(sizes(geo))
    assert (actual is not None) == taken
    assert actual is None or convolution._weight_scratch(sizes(geo)).nbytes == 0
