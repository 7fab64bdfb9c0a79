"""Compiled SoftmaxOutput: the definition, bits, NaN, shared memory of operands, the choice of kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.kernels.compiled.test_dense import HOST, OTHER
from weftplan.kernels.compiled import softmax
from weftplan.kernels.compiled.target import Target
from weftplan.ops.core import registry
from weftplan.ops.core.implementations import choose
from weftplan.ops.core.schema import OpContext, TensorSpec

pytestmark = pytest.mark.skipif(isinstance(HOST, str), reason=f"no compiled kernels: {HOST}")
F32 = np.dtype(np.float32)
OP = registry.get("SoftmaxOutput")
SIZES = [(1, 1), (3, 15), (3, 16), (2, 63), (2, 64), (5, 80), (4, 100), (3, 1000)]


def numbers(rows: int, classes: int, scale: float = 3) -> Any:
    """Return random float32 rows with standard deviation ``scale``."""
    return (scale * np.random.default_rng(rows * classes).standard_normal((rows, classes))).astype(F32)


def run_softmax(x: Any, target: Target | None = None) -> Any:
    """Return the softmax of rows; fail if the kernel writes outside its output."""
    held = np.full(x.size + 64, np.nan, F32)
    out = held[32:-32].reshape(x.shape)
    softmax.call(x, out, *x.shape, target)()
    assert np.isnan(held[:32]).all(), "something was written in front"
    assert np.isnan(held[-32:]).all(), "something was written behind"
    return out


@pytest.mark.parametrize(("rows", "classes"), SIZES)
def test_against_the_definition(rows: int, classes: int) -> None:
    """Probabilities equal the definition in float64, and their sums equal 1, within rounding error."""
    x = numbers(rows, classes)
    want = np.exp(x.astype(np.float64) - x.max(axis=1, keepdims=True))
    want /= want.sum(axis=1, keepdims=True)
    got = run_softmax(x)
    np.testing.assert_allclose(got, want, rtol=3e-6)
    np.testing.assert_allclose(got.sum(axis=1, dtype=np.float64), 1, rtol=1e-6)


def test_powers_of_all_sizes() -> None:
    """Powers of e have a relative error of at most 2^-21 down to exponent -79; from -88 on they are 0."""
    x = np.concatenate([[0], np.linspace(-79, 0, 100_000), [-88, -104, -1e30]]).astype(F32)[None]
    got = run_softmax(x)[0]
    want = np.exp(x[0].astype(np.float64))
    np.testing.assert_allclose(got[:-3] / got[0], want[:-3], rtol=8 * 2**-24)
    assert (got[-3:] == 0).all()


@pytest.mark.parametrize("classes", [64, 70, 200])
def test_what_is_not_a_number(classes: int) -> None:
    """A row with NaN or plus infinity, or of minus infinity alone, gives NaN.

    In a row with one finite number, the minus infinities get 0.
    """
    bad = np.zeros((4, classes), F32)
    bad[0, classes - 1], bad[1, 3], bad[2] = np.nan, np.inf, -np.inf
    bad[3, 1:] = -np.inf
    got = run_softmax(bad)
    assert np.isnan(got[:3]).all()
    assert got[3, 0] == 1
    assert (got[3, 1:] == 0).all()


@pytest.mark.skipif(not OTHER, reason="one width only")
@pytest.mark.parametrize(("rows", "classes"), SIZES)
def test_bits_do_not_depend_on_the_width_of_vectors(rows: int, classes: int) -> None:
    """Other vector widths give results that are bit-identical to those of this machine's width."""
    x = numbers(rows, classes)
    for target in OTHER:
        assert run_softmax(x, target).tobytes() == run_softmax(x).tobytes(), target.bits


def test_parts_and_the_same_memory(monkeypatch: pytest.MonkeyPatch, always_cut: None) -> None:
    """Rows computed in parts, and rows computed in place, have the bits of one call."""
    x = numbers(50, 100)
    want = run_softmax(x).tobytes()
    monkeypatch.setattr(softmax, "LITTLE", 300)
    monkeypatch.setattr(softmax, "FEW", 300)
    assert run_softmax(x).tobytes() == want
    softmax.call(x, x, *x.shape)()
    assert x.tobytes() == want


@pytest.mark.parametrize(
    ("shape", "params", "dtype", "name"),
    [((300, 100), {}, F32, "native"), ((300, 10, 10), {}, F32, "native"), ((30, 100), {}, F32, "numpy"),
     ((3000, 10), {}, F32, "numpy"), ((300, 100), {}, np.dtype(np.float64), "numpy"),
     ((30, 100, 10), {"multi_output": True}, F32, "numpy"), ((30, 10, 100), {"preserve_shape": True}, F32, "native")],
)  # fmt: skip
def test_who_computes(shape: Any, params: dict[str, Any], dtype: Any, name: str) -> None:
    """Enough long float32 rows are computed by the compiled kernel, others by NumPy; results agree."""
    parsed = registry.parse_params(OP, params)
    x = np.random.default_rng(0).standard_normal(shape).astype(dtype)
    label = np.zeros(shape[:1], dtype)
    specs = [TensorSpec(a.shape, a.dtype) for a in (x, label)], [TensorSpec(x.shape, x.dtype)]
    chosen = choose(OP, parsed, *specs, "auto").implementation
    assert chosen.name == name
    outs = [np.empty_like(x), np.empty_like(x)]
    for one, out in zip((chosen, choose(OP, parsed, *specs, "numpy").implementation), outs, strict=True):
        room = np.empty(one.workspace(parsed, *specs), np.uint8)
        one.kernel(OpContext(np, is_train=True, workspace=room), parsed, [x, label], [out])
    np.testing.assert_allclose(outs[0], outs[1], rtol=3e-6)
