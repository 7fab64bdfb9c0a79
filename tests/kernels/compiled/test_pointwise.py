"""1x1 convolutions as products that read the weight in place: definition, bits, scratch, choice of kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.kernels.compiled.test_dense import HOST, OTHER, arrays, case, check_widths, geometry_of, guarded
from tests.ops.convolution_reference import gradients, reference
from weftplan.kernels.compiled import parts, scratch
from weftplan.kernels.compiled.pointwise import implementation as pointwise
from weftplan.kernels.compiled.pointwise.implementation import PlanePass
from weftplan.kernels.compiled.size_table import sizes
from weftplan.kernels.compiled.target import Target
from weftplan.ops.core import registry
from weftplan.ops.core.implementations import choose
from weftplan.ops.core.schema import TensorSpec
from weftplan.ops.nn.conv_geometry import Geometry
from weftplan.support import core_sharing

pytestmark = pytest.mark.skipif(isinstance(HOST, str), reason=f"no compiled kernels: {HOST}")
F32 = np.dtype(np.float32)


def plain(**changes: Any) -> dict[str, Any]:
    """Return the settings of a 1x1 convolution; ``changes`` override them."""
    return case(**{"kernel": (1, 1), "pad": (0, 0), **changes})


def run(geo: Geometry, x: Any, w: Any, b: Any, dy: Any, target: Target | None = None) -> list[Any]:
    """Return the output and the data's gradient, computed in exactly the declared scratch.

    Fail if a kernel writes outside its output or its scratch, or if the fused relu differs from a separate relu.
    """
    s = sizes(geo)
    there, back = pointwise.forward_pass(s), pointwise.data_pass(s)
    assert there is not None
    assert back is not None
    results = []
    for one, source, bias, like in ((there, x, b, dy), (back, dy, None, x)):
        room, guard = guarded(one.nbytes)
        held = np.full(like.size + 64, np.nan, x.dtype)
        out = held[32:-32].reshape(like.shape)
        pointwise.call(one, source, w, bias, out, room, target)()
        assert np.isnan(held[:32]).all(), "something was written in front of an output"
        assert np.isnan(held[-32:]).all(), "something was written behind an output"
        assert (guard == 0xFF).all(), "something was written behind the scratch"
        results.append(out)
    positive = np.empty_like(results[0])
    pointwise.call(there, x, w, b, positive, guarded(there.nbytes)[0], target, relu=True)()
    assert positive.tobytes() == (np.maximum(results[0], 0) + 0.0).tobytes(), "a relu on the way out is another one"
    return results


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    """Return a random supported 1x1 convolution."""
    wide = draw(st.booleans())
    return plain(
        batch=draw(st.integers(1, 4)),
        channels=draw(st.integers(1, 128) if wide else st.integers(1, 20)),
        filters=draw(st.integers(1, 20) if wide else st.sampled_from((1, 33, 64, 65, 300))),
        image=(draw(st.integers(2, 15)), draw(st.integers(4, 15))),
        dtype=draw(st.sampled_from((np.float32, np.float32, np.float64))),
        shift=draw(st.integers(0, 3)),
        seed=draw(st.integers(0, 99)),
    )


@settings(max_examples=80, deadline=None)
@given(cases())
@example(
    plain(batch=2, channels=128, filters=700, image=(5, 5))
)  # partial sums stored in the result, in both directions
@example(plain(batch=1, channels=64, filters=600, image=(2, 4), dtype=np.float64))
@example(plain(batch=4, channels=520, filters=300, image=(7, 7)))  # pixels of several images in one panel
@example(plain(batch=7, channels=17, filters=9, image=(2, 4)))
@example(plain(batch=1, channels=450, filters=330, image=(3, 5)))  # weights in two blocks, back
def test_against_the_definition(given_case: dict[str, Any]):
    """The output with bias and the data's gradient equal a float64 sum within rounding error."""
    geo = geometry_of(given_case)
    x, w, b, dy = arrays(given_case, geo)
    expected = [reference(geo, x, w) + b.astype(np.float64).reshape(1, -1, 1, 1), gradients(geo, x, w, dy)[0]]
    eps = np.finfo(given_case["dtype"]).eps
    for got, want, summed in zip(run(geo, x, w, b, dy), expected, (geo.channels, geo.filters), strict=True):
        assert np.abs(got - want).max() <= eps * (8 + summed), given_case


@pytest.mark.skipif(not OTHER, reason="one width only")
@settings(max_examples=25, deadline=None)
@given(cases())
@example(plain(batch=2, channels=128, filters=1500, image=(5, 5)))
def test_bits_do_not_depend_on_the_width_of_vectors(given_case: dict[str, Any]):
    """The other vector widths give results that are bit-identical to those of this machine's width."""
    check_widths(run, given_case)


@pytest.mark.parametrize(("batch", "image"), [(1, (5, 10)), (1, (20, 30)), (6, (9, 15))])
def test_bits_do_not_depend_on_parts(
    monkeypatch: pytest.MonkeyPatch, four_cores: None, always_cut: None, batch: int, image: tuple[int, int]
):
    """Uncut work, and work cut by pixels or by filters, has the same bits on one core and on four."""
    chosen = plain(batch=batch, channels=100, filters=150, image=image)
    geo = geometry_of(chosen)
    data = arrays(chosen, geo)
    monkeypatch.setattr(scratch, "FEW", 1 << 60)
    expected = [one.tobytes() for one in run(geo, *data)]
    monkeypatch.setattr(scratch, "FEW", 1 << 12)
    there = pointwise.forward_pass(sizes(geo))
    assert there is not None
    assert there.parts > 1
    assert there.by_pixels(there.parts) == (image != (5, 10))
    assert there.spans == (batch > 1)
    for count in (1, 4):
        monkeypatch.setattr(core_sharing, "usable_cores", lambda count=count: count)
        assert [one.tobytes() for one in run(geo, *data)] == expected


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("image", [(5, 10), (20, 30)])
def test_each_part_has_a_room_for_itself(
    monkeypatch: pytest.MonkeyPatch, always_cut: None, image: tuple[int, int], back: bool
):
    """A part that uses the last room of scratch writes to no other room."""
    chosen = plain(batch=1, channels=200, filters=150, image=image)
    geo = geometry_of(chosen)
    x, w, b, dy = arrays(chosen, geo)
    monkeypatch.setattr(scratch, "FEW", 1 << 12)
    there = (pointwise.data_pass if back else pointwise.forward_pass)(sizes(geo))
    assert there is not None
    assert there.parts > 1
    want = run(geo, x, w, b, dy)[back]
    monkeypatch.setattr(
        parts, "split_in_rooms", lambda work, count: [work(number, there.parts - 1) for number in range(count)]
    )
    room, _ = guarded(there.nbytes)
    got = np.empty_like(want)
    pointwise.call(there, dy if back else x, w, None if back else b, got, room)()
    assert got.tobytes() == want.tobytes()
    assert (room[: -there.part_bytes] == 0xFF).all()
    assert not (room[-there.part_bytes :] == 0xFF).all()


def test_bits_do_not_depend_on_blocks(monkeypatch: pytest.MonkeyPatch):
    """Bits do not depend on how many channels are summed at a time, or on the size of weight blocks."""
    chosen = plain(channels=190, filters=40, image=(6, 7))
    geo = geometry_of(chosen)
    data = arrays(chosen, geo)
    expected = [one.tobytes() for one in run(geo, *data)]
    for room, w_room in ((7 * 192, pointwise.GATHERED_BYTES), (pointwise.PACKED_BYTES, 24 * 40 * 4)):
        monkeypatch.setattr(pointwise, "PACKED_BYTES", room)
        monkeypatch.setattr(pointwise, "GATHERED_BYTES", w_room)
        pointwise._arguments.cache_clear()
        assert [one.tobytes() for one in run(geo, *data)] == expected
    pointwise._arguments.cache_clear()


def test_a_scale_is_applied_to_whole_sums():
    """With a scale and shift per filter, the result is one fused multiply-add of the unscaled result."""
    geo = geometry_of(plain(channels=300, filters=21, image=(5, 9)))
    x, w, b, dy = arrays(plain(channels=300, filters=21, image=(5, 9)), geo)
    there = pointwise.forward_pass(sizes(geo))
    assert there is not None
    y, scaled = np.empty_like(dy), np.empty_like(dy)
    scale, shift = np.random.default_rng(1).uniform(-2, 2, (2, 21)).astype(F32)
    pointwise.call(there, x, w, b, y, guarded(there.nbytes)[0])()
    pointwise.call(there, x, w, b, scaled, guarded(there.nbytes)[0], scaling=(scale, shift), relu=True)()
    wide = y.astype(np.float64) * scale.reshape(1, -1, 1, 1) + shift.reshape(1, -1, 1, 1)
    np.testing.assert_array_equal(scaled, np.maximum(wide, 0).astype(F32))


@pytest.mark.parametrize(
    ("shape", "filters", "more", "name"),
    [
        ((1, 512, 14, 14), 512, {}, "native"),
        ((8, 64, 2, 2), 64, {}, "numpy"),  # fewer pixels than a vector has
        ((1, 64, 8, 8), 64, {"num_group": 4}, "numpy"),
    ],
)
def test_who_computes(shape: tuple[int, ...], filters: int, more: dict[str, Any], name: str):
    """The heuristic chooses the compiled kernel for one group with enough pixels, else NumPy's product."""
    op = registry.get("Convolution")
    params = registry.parse_params(op, {"kernel": (1, 1), "num_filter": filters, "no_bias": True, **more})
    ins = [TensorSpec(shape, F32), TensorSpec((filters, shape[1] // more.get("num_group", 1), 1, 1), F32)]
    outs = [TensorSpec((shape[0], filters, *shape[2:]), F32)]
    actual = choose(op, params, ins, outs, "auto")
    assert actual.implementation.name == name
    if name == "native":
        one = PlanePass(shape[0], shape[1], filters, shape[2] * shape[3], 4, False)
        assert actual.implementation.workspace(params, ins, outs) == one.nbytes
