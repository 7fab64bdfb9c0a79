"""Winograd convolutions against a float64 reference and the direct kernels: bits, scratch, and the choice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import weftplan as mx
from tests.kernels.compiled.test_dense import HOST, OTHER, arrays, case, check_widths, geometry_of, guarded
from tests.kernels.compiled.test_dense import run as run_directly
from tests.ops.convolution_reference import gradients, reference
from weftplan.kernels.compiled import ir, jit, parts, scratch
from weftplan.kernels.compiled.size_table import sizes
from weftplan.kernels.compiled.target import Target
from weftplan.kernels.compiled.winograd import implementation as winograd
from weftplan.kernels.compiled.winograd import kernels as winograd_kernels
from weftplan.kernels.compiled.winograd import weight_kernels as winograd_weight_kernels
from weftplan.kernels.compiled.winograd import weights as winograd_weights
from weftplan.ops.core import registry
from weftplan.ops.core.implementations import choose
from weftplan.ops.core.schema import TensorSpec
from weftplan.ops.nn.conv_geometry import Geometry
from weftplan.planner import PlanOptions
from weftplan.support import core_sharing

pytestmark = pytest.mark.skipif(isinstance(HOST, str), reason=f"no compiled kernels: {HOST}")
F32 = np.dtype(np.float32)


def run(geo: Geometry, x: Any, w: Any, b: Any, dy: Any, target: Target | None = None) -> list[Any]:
    """Return the output and both gradients, computed in exactly the declared scratch.

    Fail if a kernel writes outside its output or its scratch, or if the fused relu differs from a separate relu.
    """
    s = sizes(geo)
    results = []
    there, back = winograd.forward_pass(s), winograd.data_pass(s)
    for nbytes, like, call in (
        (winograd.layout(there).nbytes, dy, lambda out, room: winograd.call(there, x, w, b, out, room, target)),
        (winograd.layout(back).nbytes, x, lambda out, room: winograd.call(back, dy, w, None, out, room, target)),
        (
            winograd_weights.layout(there).nbytes,
            w,
            lambda out, room: winograd_weights.call(there, x, dy, out, room, target),
        ),
    ):
        room, guard = guarded(nbytes)
        held = np.full(like.size + 64, np.nan, F32)
        out = held[32:-32].reshape(like.shape)
        call(out, room)()
        assert np.isnan(held[:32]).all(), "something was written in front of an output"
        assert np.isnan(held[-32:]).all(), "something was written behind an output"
        assert (guard == 0xFF).all(), "something was written behind the scratch"
        results.append(out)
    positive = np.empty_like(results[0])
    winograd.call(there, x, w, b, positive, guarded(winograd.layout(there).nbytes)[0], target, relu=True)()
    assert positive.tobytes() == (np.maximum(results[0], 0) + 0.0).tobytes(), "a relu on the way out is another one"
    return results


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    """Return a random supported 3x3 convolution."""
    pad = draw(st.integers(0, 2)), draw(st.integers(0, 2))
    return case(
        batch=draw(st.integers(1, 6)),
        channels=draw(st.one_of(st.integers(1, 20), st.sampled_from((63, 64, 65, 130)))),
        filters=draw(st.one_of(st.integers(1, 40), st.sampled_from((64, 65)))),
        image=tuple(draw(st.integers(max(1, 3 - 2 * p), 21)) for p in pad),
        pad=pad,
        shift=draw(st.integers(0, 3)),
        seed=draw(st.integers(0, 99)),
    )


@settings(max_examples=100, deadline=None)
@given(cases())
@example(case(batch=1, channels=8, filters=16, image=(14, 14)))  # 49 tiles
@example(case(batch=3, channels=3, filters=5, image=(9, 70)))  # rows of more tiles than two blocks have
@example(case(batch=40, channels=5, filters=3, image=(1, 1)))  # images of one tile
@example(case(batch=2, channels=200, filters=160, image=(4, 4)))  # transformed weights computed for each block
def test_against_the_definition(given_case: dict[str, Any]):
    """Output with bias, and both gradients, equal a float64 sum within rounding error.

    The bound is sixteen times that of a plain sum of as many products, because the transforms add terms.
    """
    geo = geometry_of(given_case)
    x, w, b, dy = arrays(given_case, geo)
    expected = [reference(geo, x, w) + b.astype(np.float64).reshape(1, -1, 1, 1), *gradients(geo, x, w, dy)]
    eps = np.finfo(F32).eps
    terms = geo.channels, geo.filters, winograd.forward_pass(sizes(geo)).all_tiles
    for got, want, summed in zip(run(geo, x, w, b, dy), expected, terms, strict=True):
        assert np.abs(got - want).max() <= 16 * eps * (8 + summed), given_case


def test_noise_is_that_of_the_direct_kernels():
    """On many channels the root mean square error is at most twice that of the direct kernels."""
    chosen = case(batch=2, channels=256, filters=64, image=(12, 12))
    geo = geometry_of(chosen)
    x, w, b, dy = arrays(chosen, geo)
    expected = [reference(geo, x, w) + b.astype(np.float64).reshape(1, -1, 1, 1), *gradients(geo, x, w, dy)]
    for got, plain, want in zip(run(geo, x, w, b, dy), run_directly(geo, x, w, b, dy), expected, strict=True):
        ours, theirs = (np.sqrt(np.mean((one - want) ** 2)) for one in (got, plain))
        assert ours <= 2 * theirs


@pytest.mark.skipif(not OTHER, reason="one width only")
@settings(max_examples=25, deadline=None)
@given(cases())
@example(case(batch=2, channels=200, filters=160, image=(14, 14)))
def test_bits_do_not_depend_on_the_width_of_vectors(given_case: dict[str, Any]):
    """The other vector widths give results that are bit-identical to those of this machine's width."""
    check_widths(run, given_case)


@pytest.mark.parametrize("kept", [True, False])
def test_bits_do_not_depend_on_blocks_and_parts(
    monkeypatch: pytest.MonkeyPatch, four_cores: None, always_cut: None, kept: bool
):
    """Uncut work, and parts on one core or four with long or short blocks, have the same bits."""
    chosen = case(batch=3, channels=70, filters=90, image=(13, 17))
    geo = geometry_of(chosen)
    data = arrays(chosen, geo)
    monkeypatch.setattr(winograd, "MAX_STORED_BYTES", 1 << 40 if kept else 0)
    monkeypatch.setattr(scratch, "FEW", 1 << 60)

    def results() -> list[bytes]:
        return [one.tobytes() for one in run(geo, *data)]

    expected = results()
    assert winograd.layout(winograd.forward_pass(sizes(geo))).parts == 1
    cut: list[int] = []
    split = core_sharing.split
    monkeypatch.setattr(core_sharing, "split", lambda work, parts: (cut.append(parts), split(work, parts)))
    monkeypatch.setattr(scratch, "FEW", 1 << 12)
    for wide, some in ((64, 32), (16, 16)):
        monkeypatch.setattr(winograd, "WIDE", wide)
        monkeypatch.setattr(winograd, "STORED_GROUP", some)
        monkeypatch.setattr(winograd_weights, "GROUP_CHANNELS", some)
        monkeypatch.setattr(winograd_weights, "GROUP_FILTERS", wide)
        for count in (1, 4):
            monkeypatch.setattr(core_sharing, "usable_cores", lambda count=count: count)
            assert results() == expected
    assert max(cut) > 1


@pytest.mark.parametrize("kept", [True, False])
def test_parts_have_rooms_of_their_own(monkeypatch: pytest.MonkeyPatch, always_cut: None, kept: bool):
    """No two parts of a pass write the same bytes of scratch, so that they may run at the same time."""
    geo = geometry_of(case(batch=3, channels=70, filters=90, image=(13, 17)))
    s, (x, w, b, dy) = sizes(geo), arrays(case(batch=3), geo)
    there, back = winograd.forward_pass(s), winograd.data_pass(s)
    monkeypatch.setattr(winograd, "MAX_STORED_BYTES", 1 << 40 if kept else 0)
    monkeypatch.setattr(scratch, "FEW", 1 << 12)
    needs = [winograd.layout(p).nbytes for p in (there, back)] + [winograd_weights.layout(there).nbytes]
    room = guarded(max(needs))[0]
    counts: list[int] = []

    def each_in_its_room(work: Callable[[int, int], None], count: int) -> None:
        counts.append(count)
        result, left = np.zeros(room.size, dtype=bool), room.copy()
        for part in range(count):
            room[result] = 0xFF  # duplicates show: other parts' results are overwritten first
            before = room.copy()
            work(part, part)
            written = room != before
            assert not (written & result).any(), "two parts write the same bytes"
            result |= written
            left[written] = room[written]
        room[:] = left

    monkeypatch.setattr(parts, "split_in_rooms", each_in_its_room)
    for make in (
        lambda: winograd.call(there, x, w, b, np.empty_like(dy), room),
        lambda: winograd.call(back, dy, w, None, np.empty_like(x), room),
        lambda: winograd_weights.call(there, x, dy, np.empty_like(w), room),
    ):
        room[:] = 0xFF
        counts.clear()
        make()()
        assert max(counts) > 1


@pytest.mark.parametrize("place", [(4, 4), (3, 4), (5, 3), (0, 8)])
def test_not_a_number_and_infinity_arrive(place: tuple[int, int]):
    """A NaN or infinity, anywhere in a tile, reaches exactly the windows that read it."""
    chosen = case(channels=3, filters=9, image=(9, 9))
    geo = geometry_of(chosen)
    for value in (np.nan, np.inf, -np.inf):
        x, w, b, dy = arrays(chosen, geo)
        x[0, 1][place] = value
        reads = reference(geo, 1.0 - np.isfinite(x), np.ones_like(w)) > 0
        assert (~np.isfinite(run(geo, x, w, b, dy)[0]) == reads).all()


@pytest.mark.skipif(not OTHER, reason="x86 only")
def test_code_for_avx512_compiles():
    """The modules for a processor with AVX-512 compile on any x86 machine."""
    assert isinstance(HOST, Target)
    features = ",".join(f"+avx512{part}" for part in ("f", "vl", "bw", "dq"))
    target = Target("skylake-avx512", features, 512, 32, HOST.compiler, "v")
    for functions in (winograd_kernels.functions("float", target), winograd_weight_kernels.functions(target)):
        assert jit.compiled(ir.module(functions, target.bits), target)


def chosen_name(channels: int, filters: int, batch: int, image: tuple[int, int], **settings: Any) -> str:
    """Return the name of the implementation chosen for a convolution, as reports show it."""
    op = registry.get("Convolution")
    inputs = {"kernel": (3, 3), "pad": (1, 1), "num_filter": filters, "no_bias": True, **settings}
    params = registry.parse_params(op, inputs)
    dtype = F32
    data = TensorSpec((batch, channels, *image), dtype)
    groups, stride = params["num_group"], params["stride"] or (1, 1)
    weight = TensorSpec((filters, channels // groups, *inputs["kernel"]), dtype)
    out = TensorSpec((batch, filters, *(-(-e // t) for e, t in zip(image, stride, strict=True))), dtype)
    return choose(op, params, [data, weight], [out], "auto").text


def test_the_choice_follows_from_shapes():
    """Winograd is chosen for many channels and tiles, one group, and no strides; otherwise the direct kernel is."""
    assert chosen_name(64, 64, 8, (14, 14)) == "winograd"
    assert chosen_name(32, 32, 1, (14, 14)) == "winograd"
    assert chosen_name(16, 16, 1, (32, 32)) == "winograd"
    assert chosen_name(16, 16, 8, (8, 8)) == "native"
    assert chosen_name(512, 512, 1, (7, 7)) == "native"
    assert chosen_name(64, 64, 8, (14, 14), stride=(2, 2)) == "native"
    assert chosen_name(64, 64, 8, (14, 14), num_group=2) == "native"
    assert chosen_name(3, 64, 8, (14, 14)) == "native"
    assert chosen_name(64, 64, 8, (14, 14), dilate=(2, 2), pad=(2, 2)) == "native"


def trained(options: PlanOptions) -> tuple[list[bytes], Any]:
    """Return the bytes of output and gradients of two layers, and the executor.

    Check that the executor allocates the planned peak.
    """
    x = mx.sym.Variable("data")
    x = mx.sym.Activation(mx.sym.Convolution(x, kernel=(3, 3), pad=(1, 1), num_filter=40, name="one"), act_type="relu")
    net = mx.sym.Convolution(x, kernel=(3, 3), pad=(0, 2), num_filter=33, no_bias=True, name="two")
    executor = net.simple_bind(mx.cpu(), data=(4, 32, 15, 12), plan_options=options)
    rng = np.random.default_rng(5)
    for array in executor.arg_arrays:
        array[:] = rng.uniform(-1, 1, array.shape)
    out = executor.forward(is_train=True)[0].asnumpy()
    executor.backward([mx.nd.array(rng.uniform(-1, 1, out.shape))])
    assert executor.allocated_bytes == executor.memory_plan.peak
    return [out.tobytes(), *(one.asnumpy().tobytes() for one in executor.grad_arrays)], executor


def test_network_has_the_same_bits_on_every_engine():
    """A network of two Winograd layers gives the same bits on every engine, close to the results of NumPy's kernels.

    The layers have a relu, a bias and odd planes.
    """
    expected, executor = trained(PlanOptions())
    assert executor.debug_str().count("Kernel: winograd\n") == 4
    for kind in ("NaiveEngine", "ThreadedEngine", "ThreadedEnginePerDevice"):
        engine = mx.engine.create(kind)
        with mx.engine.using(engine):
            assert trained(PlanOptions())[0] == expected
        engine.stop()
    for one, second in zip(expected, trained(PlanOptions(kernels="numpy"))[0], strict=True):
        np.testing.assert_allclose(np.frombuffer(one, F32), np.frombuffer(second, F32), rtol=1e-3, atol=1e-3)
