"""Compiled convolutions against a float64 reference: random geometries, alignments and vector widths."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.ops.convolution_reference import gradients, reference
from weftplan.kernels.compiled import ir, jit, offset_tables, scratch, size_table
from weftplan.kernels.compiled import product as product_module
from weftplan.kernels.compiled.convolution import dense
from weftplan.kernels.compiled.scratch import (
    Scratch,
    channels_at_once,
    data_scratch,
    filters_at_once,
    forward_scratch,
    weight_scratch,
)
from weftplan.kernels.compiled.target import Target, host
from weftplan.ops.nn.conv_geometry import Geometry, geometry, output_extent

pytestmark = pytest.mark.skipif(isinstance(host(), str), reason=f"no compiled kernels: {host()}")
HOST = host()
OTHER = (
    [
        Target(HOST.cpu, HOST.features, bits, registers, HOST.compiler, "x" if bits < HOST.bits else "")
        for bits, registers in ((128, 16), (256, 16), (512, 32))
        if bits != HOST.bits
    ]
    if isinstance(HOST, Target) and HOST.bits != 128
    else []
)
"""Targets of the other vector widths. The compiler emulates them: their code differs, and their bits must not."""


def shifted_copy(array: Any, shift: int) -> Any:
    """Return a copy that starts ``shift`` elements into its memory, so that vectors are not aligned."""
    room = np.empty(array.size + shift, array.dtype)
    room[shift:] = array.reshape(-1)
    return room[shift:].reshape(array.shape)


def check_widths(run: Callable[..., list[Any]], given_case: dict[str, Any]) -> None:
    """Check that ``run(geometry, *arrays, target)`` gives the same bits for every vector width."""
    geo = geometry_of(given_case)
    data = arrays(given_case, geo)
    mine = run(geo, *data)
    for target in OTHER:
        for got, want in zip(run(geo, *data, target), mine, strict=True):
            assert got.tobytes() == want.tobytes(), (target.bits, given_case)


def guarded(nbytes: int) -> tuple[Any, Any]:
    """Return scratch of exactly ``nbytes``, filled with NaN, and the 256 guard bytes after it."""
    room = np.full(nbytes + 256, 0xFF, np.uint8)
    return room[:nbytes], room[nbytes:]


def run(geo: Geometry, x: Any, w: Any, b: Any, dy: Any, target: Target | None = None) -> list[Any]:
    """Return the output and both gradients, computed in exactly the declared scratch.

    Fail if a kernel writes outside its output or its scratch, or if the fused relu differs from a separate relu.
    """
    s = size_table.sizes(geo)
    results, guards = [], []

    def take(need: Scratch) -> tuple[Any, Any]:
        pairs = [guarded(need.packed), guarded(need.padded)]
        guards.extend(guard for _, guard in pairs)
        return pairs[0][0], pairs[1][0] if need.padded else None

    for shape, call in (
        (dy, lambda out: dense.forward(s, x, w, b, out, *take(forward_scratch(s)), target)()),
        (x, lambda out: dense.data_gradient(s, dy, w, out, *take(data_scratch(s)), target)()),
        (w, lambda out: dense.weight_gradient(s, x, dy, out, *take(weight_scratch(s)), target)()),
    ):
        room = np.full(shape.size + 64, np.nan, x.dtype)
        out = room[32:-32].reshape(shape.shape)
        call(out)
        assert np.isnan(room[:32]).all(), "something was written in front of an output"
        assert np.isnan(room[-32:]).all(), "something was written behind an output"
        results.append(out)
    positive = np.empty_like(results[0])
    dense.forward(s, x, w, b, positive, *take(forward_scratch(s)), target, relu=True)()
    assert positive.tobytes() == (np.maximum(results[0], 0) + 0.0).tobytes(), "a relu on the way out is another one"
    assert all((guard == 0xFF).all() for guard in guards), "something was written behind the scratch"
    return results


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    """Return a random convolution of one to three axes."""
    rank = draw(st.sampled_from((1, 2, 2, 2, 3)))
    most = {1: 40, 2: 14, 3: 6}[rank]
    kernel, stride, dilate, pad, image = [], [], [], [], []
    for _ in range(rank):
        k, d, p = draw(st.integers(1, 5)), draw(st.integers(1, 3)), draw(st.integers(0, 3))
        kernel.append(k)
        dilate.append(d)
        pad.append(p)
        stride.append(draw(st.integers(1, 3)))
        image.append(draw(st.integers(max(1, d * (k - 1) + 1 - 2 * p), max(most, d * (k - 1) + 1))))
    groups = draw(st.sampled_from((1, 1, 1, 2, 3)))
    return {
        "batch": draw(st.integers(1, 5)),
        "groups": groups,
        "channels": groups * draw(st.integers(1, 9)),
        "filters": groups * draw(st.integers(1, 35)),
        "image": tuple(image),
        "kernel": tuple(kernel),
        "stride": tuple(stride),
        "dilate": tuple(dilate),
        "pad": tuple(pad),
        "dtype": draw(st.sampled_from((np.float32, np.float32, np.float64))),
        "shift": draw(st.integers(0, 3)),
        "seed": draw(st.integers(0, 99)),
    }


def geometry_of(case: dict[str, Any]) -> Geometry:
    """Return the geometry of a case."""
    grid = tuple(
        output_extent(e, k, s, p, d)
        for e, k, s, p, d in zip(*(case[n] for n in ("image", "kernel", "stride", "pad", "dilate")), strict=True)
    )
    return geometry(
        (case["batch"], case["channels"], *case["image"]), case["filters"], case["kernel"], case["stride"],
        case["dilate"], case["pad"], grid, case["groups"], np.dtype(case["dtype"]), 1024,
    )  # fmt: skip


def arrays(case: dict[str, Any], geo: Geometry) -> tuple[Any, Any, Any, Any]:
    """Return random data, weight, bias and output gradient."""
    rng = np.random.default_rng(case["seed"])
    shapes = (
        (geo.batch, geo.channels, *geo.image),
        (geo.filters, geo.channels // geo.groups, *geo.kernel),
        (geo.filters,),
        (geo.batch, geo.filters, *geo.grid),
    )
    x, w, b, dy = (shifted_copy(rng.uniform(-1, 1, shape).astype(case["dtype"]), case["shift"]) for shape in shapes)
    return x, w, b, dy


def case(**changes: Any) -> dict[str, Any]:
    """Return the settings of a plain 3x3 convolution; ``changes`` override them."""
    return {
        "batch": 2, "groups": 1, "channels": 4, "filters": 16, "image": (8, 8), "kernel": (3, 3), "stride": (1, 1),
        "dilate": (1, 1), "pad": (1, 1), "dtype": np.float32, "shift": 1, "seed": 0, **changes,
    }  # fmt: skip


@settings(max_examples=120, deadline=None)
@given(cases())
@example(case(channels=300, image=(24, 24)))  # bands
@example(case(batch=11, image=(3, 2), channels=64, filters=70))  # several images in one product
@example(case(batch=5, image=(7, 7), channels=40, filters=70))  # two images, then a single last image
@example(case(batch=5, image=(60, 1), kernel=(3, 1), pad=(1, 0), channels=600))  # two images, in bands
@example(case(stride=(2, 2), kernel=(1, 1), pad=(0, 0)))  # phases that no tap reads
@example(case(stride=(3, 2), image=(31, 29), channels=200))  # phases and bands
@example(case(image=(1, 700), kernel=(1, 5), pad=(0, 2), batch=1))  # chunks of a long row
@example(case(image=(4, 5), pad=(0, 0), kernel=(1, 1), channels=1, filters=1, batch=1))
def test_against_the_definition(given_case: dict[str, Any]):
    """Output and both gradients equal a float64 sum within rounding error, in exactly the declared scratch."""
    geo = geometry_of(given_case)
    x, w, b, dy = arrays(given_case, geo)
    expected = [reference(geo, x, w) + b.astype(np.float64).reshape(1, -1, *[1] * len(geo.grid))]
    expected += gradients(geo, x, w, dy)
    eps = np.finfo(given_case["dtype"]).eps
    terms = (w[0].size, w.size // geo.channels * geo.groups, dy[:, 0].size)
    for got, want, count in zip(run(geo, x, w, b, dy), expected, terms, strict=True):
        assert np.abs(got - want).max() <= eps * (8 + count), given_case


@pytest.mark.skipif(not OTHER, reason="one width only")
@settings(max_examples=40, deadline=None)
@given(cases())
@example(case(batch=11, image=(3, 2), channels=64, filters=70))
@example(case(channels=300, image=(24, 24)))
def test_bits_do_not_depend_on_the_width_of_vectors(given_case: dict[str, Any]):
    """The other vector widths give results that are bit-identical to those of this machine's width."""
    check_widths(run, given_case)


def test_not_a_number_and_infinity_arrive():
    """A NaN reaches exactly the windows that read it; with an infinity there, none of their outputs is finite."""
    geo = geometry_of(case(channels=3, filters=9, image=(9, 9)))
    x, w, b, dy = arrays(case(channels=3, filters=9, image=(9, 9)), geo)
    x[0, 1, 4, 4] = np.nan
    y = run(geo, x, w, b, dy)[0]
    assert np.isnan(y[0, :, 3:6, 3:6]).all()
    assert np.isnan(y).sum() == 9 * 9
    x[0, 1, 4, 4] = np.inf
    assert not np.isfinite(run(geo, x, w, b, dy)[0][0, :, 3:6, 3:6]).any()


@pytest.mark.skipif(not OTHER, reason="x86 only")
def test_code_for_avx512_compiles():
    """The modules for a processor with AVX-512 compile on any x86 machine."""
    assert isinstance(HOST, Target)
    features = ",".join(f"+avx512{part}" for part in ("f", "vl", "bw", "dq"))
    target = Target("skylake-avx512", features, 512, 32, HOST.compiler, "v")
    for scalar in ("float", "double"):
        text = ir.module(product_module.functions(scalar, target), target.bits)
        assert jit.compiled(text, target)


@pytest.mark.parametrize("work", [dense.forward, dense.data_gradient, dense.weight_gradient])
def test_offset_tables_live_as_long_as_their_call(monkeypatch: pytest.MonkeyPatch, work: Any) -> None:
    """The size words and offset tables that a call reads live until the call ends.

    This holds even if another thread has replaced the cached tables of the same sizes.
    """
    taken: list[weakref.ref[Any]] = []
    original = offset_tables.address
    makers = (offset_tables.forward, offset_tables.data, offset_tables.weight)

    def noting(array: Any) -> int:
        taken.append(weakref.ref(array))
        return original(array)

    def call(place: int) -> None:
        for make in makers:
            make.cache_clear()
        assert len(taken) > 5
        assert all(one() is not None for one in taken)

    monkeypatch.setattr(offset_tables, "address", noting)
    monkeypatch.setattr(dense, "entries", lambda *_: {"gather": call, "weights": call})
    three, none = (3, 3), (0, 0)
    s = size_table.sizes(geometry((1, 2, 6, 6), 4, three, (1, 1), (1, 1), none, (4, 4), 1, np.dtype(np.float32), 1024))
    array = np.zeros(4096, np.float32)
    for make in makers:
        make.cache_clear()
    inputs = (array, array, None, array) if work is dense.forward else (array, array, array)
    work(s, *inputs, array, array)()


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(
    ("image", "kernel", "stride", "pad"),
    [((9, 7), (3, 3), (1, 1), (1, 1)), ((12, 11), (2, 2), (3, 3), (0, 0)), ((40, 40), (3, 3), (2, 1), (2, 0))],
)
def test_slices_have_the_bits_of_the_whole(monkeypatch, batch, image, kernel, stride, pad):
    """Computing one tile of filters at a time, in the scratch of one tile, gives the bits of all filters at once.

    The same is true of the data gradient and its tiles of channels.
    """
    grid = tuple(output_extent(e, k, t, p, 1) for e, k, t, p in zip(image, kernel, stride, pad, strict=True))
    geo = geometry((batch, 50, *image), 75, kernel, stride, (1, 1), pad, grid, 1, np.dtype(np.float32), 1)
    random = np.random.RandomState(7)
    x, w, b, dy = (
        random.standard_normal(shape).astype(np.float32)
        for shape in ((batch, 50, *image), (75, 50, *kernel), (75,), (batch, 75, *grid))
    )
    s = size_table.sizes(geo)
    monkeypatch.setattr(scratch, "FEW", 1 << 60)
    monkeypatch.setattr(scratch, "NEAR_BYTES", 0)
    monkeypatch.setattr(scratch, "SLICE_BYTES", 1 << 40)
    whole, needed = run(geo, x, w, b, dy), (forward_scratch(s).packed, data_scratch(s).packed)
    monkeypatch.setattr(scratch, "SLICE_BYTES", 1)
    assert (filters_at_once(s), channels_at_once(s)) == (32, 32)
    assert forward_scratch(s).packed * 5 == needed[0] * 2  # a tile of 32 in place of 80 rows
    assert data_scratch(s).packed * 2 == needed[1]
    for one, second in zip(whole, run(geo, x, w, b, dy), strict=True):
        assert one.tobytes() == second.tobytes()


@pytest.mark.parametrize(("image", "kernel"), [((6, 5), (3, 2)), ((2, 2), (1, 1)), ((12, 12), (5, 5))])
def test_panels_have_the_bits_of_the_whole(monkeypatch, image, kernel):
    """For small images, filters are computed one panel at a time, in the scratch of one panel, with the same bits."""
    grid = tuple(output_extent(e, k, 1, 0, 1) for e, k in zip(image, kernel, strict=True))
    geo = geometry((1, 20, *image), 50, kernel, (1, 1), (1, 1), (0, 0), grid, 1, np.dtype(np.float32), 1)
    random = np.random.RandomState(8)
    x, w, b, dy = (
        random.standard_normal(shape).astype(np.float32)
        for shape in ((1, 20, *image), (50, 20, *kernel), (50,), (1, 50, *grid))
    )
    s = size_table.sizes(geo)
    actual, packed = run(geo, x, w, b, dy), forward_scratch(s).packed
    panel = 16 * 20 * int(np.prod(kernel)) * 4
    assert packed <= max(x.nbytes + dy.nbytes, panel)
    monkeypatch.setattr(scratch, "NEAR_BYTES", 0)
    assert forward_scratch(s).packed == 4 * panel
    for one, second in zip(actual, run(geo, x, w, b, dy), strict=True):
        assert one.tobytes() == second.tobytes()


@pytest.mark.parametrize(
    ("image", "kernel", "stride", "pad", "dtype"),
    [
        ((12, 12), (5, 5), (1, 1), (0, 0), np.float32),
        ((12, 11), (5, 5), (2, 2), (1, 0), np.float64),
        ((7,), (5,), (1,), (0,), np.float32),
        ((5, 6, 7), (3, 3, 5), (1, 1, 1), (1, 0, 0), np.float32),
    ],
)
@pytest.mark.parametrize("batch", [1, 6, 9])
def test_a_gradient_that_reads_no_padding(batch, image, kernel, stride, pad, dtype):
    """The data gradient groups positions by the taps that reach them if padding would be much of the work.

    It then needs no padded scratch, reads nothing outside the output gradient, and equals the definition.
    """
    grid = tuple(output_extent(e, k, t, p, 1) for e, k, t, p in zip(image, kernel, stride, pad, strict=True))
    ones = (1,) * len(image)
    geo = geometry((batch, 7, *image), 10, kernel, stride, ones, pad, grid, 1, np.dtype(dtype), 1)
    s = size_table.sizes(geo)
    assert size_table.cuts_columns(s)
    assert data_scratch(s).padded == 0
    random = np.random.RandomState(batch)
    x, w, b, dy = (
        random.standard_normal(shape).astype(dtype)
        for shape in ((batch, 7, *image), (10, 7, *kernel), (10,), (batch, 10, *grid))
    )
    room = np.full(dy.size + 128, np.nan, dtype)  # NaN exposes a read outside of the array
    given_dy = room[64:-64].reshape(dy.shape)
    given_dy[...] = dy
    want = gradients(geo, x, w, dy)[0]
    noise = 8 * np.finfo(dtype).eps * gradients(geo, abs(x), abs(w), abs(dy))[0]
    got = run(geo, x, w, b, given_dy)[1]
    assert (np.abs(got - want) <= noise).all()
