"""Compiled FullyConnected: definition, bits, scratch, shared memory of operands, choice of kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.kernels.compiled.test_dense import HOST, OTHER, guarded
from weftplan.kernels.compiled import fully_connected, scratch
from weftplan.kernels.compiled.pointwise import implementation as pointwise
from weftplan.kernels.compiled.pointwise import weights as pointwise_weights
from weftplan.kernels.compiled.target import Target
from weftplan.ops.core import registry
from weftplan.ops.core.implementations import choose
from weftplan.ops.core.schema import OpContext, TensorSpec
from weftplan.ops.fusion.shared_gradient import SHARED_GRADIENT

pytestmark = pytest.mark.skipif(isinstance(HOST, str), reason=f"no compiled kernels: {HOST}")
F32 = np.dtype(np.float32)
OP, BACK = registry.get("FullyConnected"), registry.get("_backward_FullyConnected")


def arrays(case: dict[str, Any]) -> tuple[Any, Any, Any, Any]:
    """Return random (data, weight, bias, gradient of the output) of a case."""
    rng = np.random.default_rng(case["seed"])
    rows, columns, hidden, dtype = (case[name] for name in ("rows", "columns", "hidden", "dtype"))
    shapes = (rows, columns), (hidden, columns), (hidden,), (rows, hidden)
    data, weight, bias, ograd = (rng.standard_normal(shape).astype(dtype) for shape in shapes)
    return data, weight, bias, ograd


def run_op(op: Any, params: dict[str, Any], given: list[Any], like: list[Any], mode: str = "native") -> list[Any]:
    """Return an operator's outputs, computed in exactly the declared scratch.

    ``like`` gives the shapes and dtypes of the outputs. Fail if the kernel writes outside them or its scratch.
    """
    specs = [[TensorSpec(a.shape, a.dtype) for a in some] for some in (given, like)]
    chosen = choose(op, params, *specs, mode).implementation
    assert chosen.name == mode
    room, guard = guarded(chosen.workspace(params, *specs))
    held = [np.full(a.size + 64, np.nan, a.dtype) for a in like]
    outs = [one[32:-32].reshape(a.shape) for one, a in zip(held, like, strict=True)]
    chosen.kernel(OpContext(np, is_train=True, workspace=room), params, given, outs)
    for one in held:
        assert np.isnan(one[:32]).all(), "something was written in front of an output"
        assert np.isnan(one[-32:]).all(), "something was written behind an output"
    assert (guard == 0xFF).all(), "something was written behind the scratch"
    return outs


def layer(case: dict[str, Any], mode: str = "native") -> list[Any]:
    """Return the output, and the gradients of data, weight and bias."""
    data, weight, bias, ograd = arrays(case)
    params = registry.parse_params(OP, {"num_hidden": case["hidden"], "no_bias": case["no_bias"]})
    remaining = [] if case["no_bias"] else [bias]
    return [
        *run_op(OP, params, [data, weight, *remaining], [ograd], mode),
        *run_op(BACK, params, [ograd, data, weight], [data, weight, *remaining], mode),
    ]


def case_of(**changes: Any) -> dict[str, Any]:
    """Return the settings of a small layer; ``changes`` override them."""
    return {"rows": 9, "columns": 20, "hidden": 17, "no_bias": False, "dtype": np.float32, "seed": 0, **changes}


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    """Return a random layer of any size."""
    return case_of(
        rows=draw(st.integers(1, 70)),
        columns=draw(st.integers(1, 600)),
        hidden=draw(st.integers(1, 140)),
        no_bias=draw(st.booleans()),
        dtype=draw(st.sampled_from((np.float32, np.float32, np.float64))),
        seed=draw(st.integers(0, 99)),
    )


@settings(max_examples=80, deadline=None)
@given(cases())
@example(case_of(rows=8, columns=784, hidden=50))  # four chains, each a chunk of columns
@example(case_of(rows=300, columns=16, hidden=530))  # rows and units summed in several steps
@example(case_of(rows=1, columns=1, hidden=1))
def test_against_the_definition(case: dict[str, Any]):
    """Output and gradients equal the definition in float64 within rounding error."""
    data, weight, bias, ograd = (a.astype(np.float64) for a in arrays(case))
    out = data @ weight.T + (0 if case["no_bias"] else bias)
    want = [out, ograd @ weight, ograd.T @ data, ograd.sum(axis=0)]
    sums = case["columns"], case["hidden"], case["rows"], case["rows"]
    for got, one, length in zip(layer(case), want, sums, strict=False):
        assert np.abs(got - one).max() <= np.finfo(case["dtype"]).eps * 2 * (8 + length), case


@pytest.mark.skipif(not OTHER, reason="one width only")
@settings(max_examples=25, deadline=None)
@given(cases())
@example(case_of(rows=40, columns=784, hidden=50))
def test_bits_do_not_depend_on_the_width_of_vectors(case: dict[str, Any]):
    """The other vector widths give results that are bit-identical to those of this machine's width."""
    data, weight, bias, ograd = arrays(case)
    sizes = fully_connected.Matrices(*(TensorSpec(a.shape, a.dtype) for a in (weight, ograd)))

    def products(target: Target | None) -> list[Any]:
        room, _ = guarded(max(sizes.to_weight.nbytes, sizes.to_data.nbytes))
        outs = [np.empty_like(a) for a in (ograd, weight, data)]
        pointwise_weights.call(sizes.forward, weight, data, outs[0], target, bias=bias)()
        pointwise.call(sizes.to_weight, data, ograd, None, outs[1], room, target)()
        pointwise.call(sizes.to_data, weight, ograd, None, outs[2], room, target)()
        return outs

    mine = products(None)
    for target in OTHER:
        for got, want in zip(products(target), mine, strict=True):
            assert got.tobytes() == want.tobytes(), (target.bits, case)


def test_parts_have_the_bits_of_the_whole(monkeypatch: pytest.MonkeyPatch, always_cut: None):
    """Products cut for idle cores have the bits of uncut products."""
    case = case_of(rows=150, columns=300, hidden=200)
    monkeypatch.setattr(scratch, "FEW", 1 << 60)
    want = layer(case)
    monkeypatch.setattr(scratch, "FEW", 1 << 12)
    _, weight, _, ograd = arrays(case)
    sizes = fully_connected.Matrices(*(TensorSpec(a.shape, a.dtype) for a in (weight, ograd)))
    assert min(sizes.forward.parts, sizes.to_weight.parts, sizes.to_data.parts) > 1
    for got, one in zip(layer(case), want, strict=True):
        assert got.tobytes() == one.tobytes()


@pytest.mark.parametrize("wanted", ["data", "weight", "bias", "none"])
def test_single_gradients_are_those_of_all(wanted: str):
    """Only the wanted gradient is computed, with the bits of computing all."""
    case = case_of()
    data, weight, bias, ograd = arrays(case)
    params = registry.parse_params(OP, {"num_hidden": case["hidden"]})
    every = dict(zip(("data", "weight", "bias"), layer(case)[1:], strict=True))
    outs: list[Any] = [
        np.empty_like(a) if name == wanted else None for name, a in zip(every, (data, weight, bias), strict=True)
    ]
    specs = [TensorSpec(a.shape, a.dtype) for a in (ograd, data, weight)]
    chosen = choose(BACK, params, specs, specs[1:], "native").implementation
    room, _ = guarded(chosen.workspace(params, specs, specs[1:]))
    chosen.kernel(OpContext(np, is_train=True, workspace=room), params, [ograd, data, weight], outs)
    for name, out in zip(every, outs, strict=True):
        assert (out is None) == (name != wanted)
        assert out is None or out.tobytes() == every[name].tobytes()


def test_the_gradient_of_the_data_may_take_its_memory():
    """The data's gradient may overwrite the data: the weight's gradient, which reads the data, is computed first."""
    case = case_of()
    data, weight, bias, ograd = arrays(case)
    params = registry.parse_params(OP, {"num_hidden": case["hidden"]})
    want = layer(case)[1:]
    outs = [data, np.empty_like(weight), np.empty_like(bias)]
    specs = [TensorSpec(a.shape, a.dtype) for a in (ograd, data, weight)]
    chosen = choose(BACK, params, specs, specs[1:], "native").implementation
    room, _ = guarded(chosen.workspace(params, specs, specs[1:]))
    chosen.kernel(OpContext(np, is_train=True, workspace=room), params, [ograd, data, weight], outs)
    for got, one in zip(outs, want, strict=True):
        assert got.tobytes() == one.tobytes()


def test_data_of_several_axes():
    """By default all axes but the first form a row; with ``flatten=False`` only the last axis does."""
    rng = np.random.default_rng(1)
    data = rng.standard_normal((6, 4, 10)).astype(F32)
    for flatten, columns, lead in ((True, 40, (6,)), (False, 10, (6, 4))):
        weight = rng.standard_normal((11, columns)).astype(F32)
        params = registry.parse_params(OP, {"num_hidden": 11, "no_bias": True, "flatten": flatten})
        got = run_op(OP, params, [data, weight], [np.empty((*lead, 11), F32)])[0]
        np.testing.assert_allclose(got.reshape(-1, 11), data.reshape(-1, columns) @ weight.T, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "name"),
    [({}, "native"), ({"rows": 7}, "numpy"), ({"columns": 7}, "numpy"), ({"hidden": 7}, "numpy"),
     ({"dtype": np.float16}, "numpy"), ({"dtype": np.float64}, "native")],
)  # fmt: skip
def test_who_computes(changes: dict[str, Any], name: str):
    """The compiled kernel is chosen for float32 and float64 if rows, columns and units number at least 8."""
    data, weight, bias, ograd = (TensorSpec(a.shape, a.dtype) for a in arrays(case_of(**changes)))
    params = registry.parse_params(OP, {"num_hidden": weight.shape[0]})
    assert choose(OP, params, [data, weight, bias], [ograd], "auto").implementation.name == name
    assert choose(BACK, params, [ograd, data, weight], [data, weight, bias], "auto").implementation.name == name


def test_scratch_is_a_small_share_of_a_layer():
    """The forward pass needs no scratch; gradients need at most an eighth of a large weight."""
    params = registry.parse_params(OP, {"num_hidden": 4096, "no_bias": True})
    data, weight, out = (TensorSpec(shape, F32) for shape in ((64, 4096), (4096, 4096), (64, 4096)))
    assert (
        choose(OP, params, [data, weight], [out], "native").implementation.workspace(params, [data, weight], [out]) == 0
    )
    inputs = [out, data, weight]
    need = choose(BACK, params, inputs, inputs[1:], "native").implementation.workspace(params, inputs, inputs[1:])
    assert 0 < need <= 4 * (4096 * 4096 * 4 // 32)


@pytest.mark.parametrize("no_bias", [False, True])
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_gradients_of_layers_with_one_weight(no_bias: bool, whole: bool, dtype: Any):
    """Layers that share a weight have the gradients of one layer with all their rows, bit by bit."""
    count, case = 3, case_of(rows=12, columns=40, hidden=24, no_bias=no_bias, dtype=dtype)
    data, weight, bias, ograd = arrays(case)
    want = layer(case)[1:]
    params = {**registry.parse_params(OP, {"num_hidden": 24, "no_bias": no_bias}), "count": count, "whole": whole}
    inputs = [*np.split(ograd, count), *np.split(data, count), *([weight] if whole else [])]
    like = [weight, *([] if no_bias else [bias]), *(np.split(data, count) if whole else [])]
    got = run_op(SHARED_GRADIENT, params, inputs, like)
    if whole:
        head = 1 if no_bias else 2
        assert np.concatenate(got[head:]).tobytes() == want[0].tobytes()
        got = got[:head]
    for one, second in zip(got, want[1:], strict=True):
        assert one.tobytes() == second.tobytes()
