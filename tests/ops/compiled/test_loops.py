"""Small calls by NumPy's inner loops alone: the bits of NumPy's functions, and no call where something is unknown."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from weftplan.ops.compiled import loops
from weftplan.ops.compiled.target import host
from weftplan.ops.core import inner_loops as lists
from weftplan.ops.core import registry
from weftplan.ops.core.node_call import bare_call
from weftplan.ops.core.schema import TensorSpec

HOST = host()
needs_compiler = pytest.mark.skipif(isinstance(HOST, str), reason=f"no compiled kernels: {HOST}")
SIZES = (1, 2, 3, 7, 8, 9, 16, 33, 130)
DTYPES = (np.float32, np.float64)
SPECIAL = (0.0, -0.0, np.inf, -np.inf, 1e-40, np.nan)


def call_of(name: str, shapes: Any, dtype: Any, params: dict[str, Any]) -> tuple[Any, Any, TensorSpec, int]:
    """The loops of a call, NumPy's bare form of it, its output and its workspace."""
    op = registry.get(name)
    parsed = registry.parse_params(op, {**params, op.variadic: len(shapes)} if op.variadic else params)
    inputs = [TensorSpec(shape, np.dtype(dtype)) for shape in shapes]
    _, (shape,) = op.infer_shape(parsed, [one.shape for one in inputs], [None])
    out = TensorSpec(tuple(shape), np.dtype(dtype))
    rule: Any = op.forward
    room = op.workspace_bytes(parsed, inputs, [out])
    return rule.loops(parsed, inputs, [out]), bare_call(op.forward, parsed, inputs, [out], room), out, room


def check(name: str, shapes: Any, dtype: Any, **params: Any) -> None:
    """NumPy's bits, on ordinary numbers and on special ones."""
    found, bare, out, room = call_of(name, shapes, dtype, params)
    assert found is not None, (name, shapes, params)
    call = loops.compiled(found)
    assert call is not None
    rng = np.random.default_rng(3)
    for special in (False, True):
        arrays = [(4 * rng.standard_normal(shape)).astype(dtype) for shape in shapes]
        for array in arrays if special else ():
            array.reshape(-1)[rng.integers(0, array.size, 4)] = rng.choice(SPECIAL, 4)
        wanted, got = np.full(out.shape, 7, dtype), np.full(out.shape, 9, dtype)
        with np.errstate(all="ignore"):
            bare(*arrays, wanted, *([np.empty(room, np.uint8)] if room else []))
        assert call(*arrays, got) is None
        # Which NaN a sum of infinities is, BLAS decides by addresses.
        got[np.isnan(got)], wanted[np.isnan(wanted)] = np.nan, np.nan
        assert got.tobytes() == wanted.tobytes(), (name, shapes, params, special)


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["exp", "tanh", "sqrt", "log", "abs", "negative", "elemwise_add", "_maximum", "_div"])
def test_functions_of_elements(name, dtype):
    """Of one input and of two."""
    for shape in ((1,), (8, 16), (33, 7), (3, 5, 7)):
        check(name, [shape] * len(registry.get(name).input_names({})), dtype)


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["sum", "prod", "max", "min"])
def test_reductions(name, dtype):
    """Over the first axes, over the last ones, over all; over others there are no loops."""
    for shape in itertools.product(SIZES, SIZES):
        if shape[1] > 1:
            check(name, [shape], dtype, axis=1)
            check(name, [shape], dtype)
        if shape[0] > 1:
            check(name, [shape], dtype, axis=0, keepdims=True)
    for axes in ((1, 2), (0, 1), (2,), (0, 1, 2)):
        check(name, [(3, 4, 5)], dtype, axis=axes)
    assert call_of(name, [(3, 4, 5)], dtype, {"axis": 1})[0] is None
    assert call_of(name, [(3, 4, 5)], dtype, {"axis": (0, 2)})[0] is None


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
def test_layers(dtype):
    """Softmax along the last axis, products with and without bias, arrays joined along each axis."""
    for rows, columns in itertools.product(SIZES, SIZES):
        check("softmax", [(rows, columns)], dtype)
        for hidden in {1, 4, 31, rows}:  # as many as rows: in two products
            check("FullyConnected", [(rows, columns), (hidden, columns), (hidden,)], dtype, num_hidden=hidden)
            check("FullyConnected", [(rows, columns), (hidden, columns)], dtype, num_hidden=hidden, no_bias=True)
            check("Concat", [(rows, columns), (rows, hidden)], dtype, dim=1)
            check("Concat", [(rows, columns), (hidden, columns), (2, columns)], dtype, dim=0)
    check("softmax", [(3, 4, 5)], dtype)
    check("FullyConnected", [(3, 4, 5), (6, 20), (6,)], dtype, num_hidden=6)
    check("FullyConnected", [(3, 4, 5), (6, 5), (6,)], dtype, num_hidden=6, flatten=False)
    check("Concat", [(3, 4, 5), (3, 2, 5)], dtype, dim=-2)
    assert call_of("softmax", [(3, 4, 5)], dtype, {"axis": 1})[0] is None
    assert call_of("softmax", [(lists.MOST_SCRATCH, 2)], dtype, {})[0] is None


def test_other_dtypes_have_no_loops():
    """What NumPy computes in a wider dtype, or mixes."""
    for dtype in (np.float16, np.int32):
        for name, shapes, params in (("exp", [(4,)], {}), ("sum", [(4, 4)], {"axis": 1}), ("Concat", [(4,)] * 2, {})):
            assert call_of(name, shapes, dtype, {"dim": 0} if name == "Concat" else params)[0] is None
    assert lists.one_dtype(*(TensorSpec((2,), np.dtype(kind)) for kind in DTYPES)) is None
    assert lists.one_dtype(*[TensorSpec((2,), np.dtype(np.float32))] * (lists.MOST_ARRAYS + 1)) is None


@needs_compiler
def test_what_is_unknown_is_refused(monkeypatch):
    """A function without such a loop, scratch that there is not, a ufunc that is laid out otherwise."""
    plain = lists.elementwise("exp", 4, np.dtype(np.float32), 1)
    assert loops.compiled(replace(plain, scratch=lists.MOST_SCRATCH + 1)) is None
    assert loops.compiled(lists.elementwise("bitwise_count", 4, np.dtype(np.float32), 1)) is None
    monkeypatch.setattr(loops, "_HEAD", loops._HEAD + 4)
    assert loops._fields(np.exp) is None
    loops.refusal.cache_clear()
    assert "unknown way" in loops.refusal()
    monkeypatch.undo()
    loops.refusal.cache_clear()
    assert loops.refusal() == ""


@needs_compiler
def test_none_is_counted():
    """A call returns None as any function does, on Pythons that count it, too."""
    import sys

    call = loops.compiled(lists.elementwise("exp", 4, np.dtype(np.float32), 1))
    assert call is not None
    a, out = np.zeros(4, np.float32), np.zeros(4, np.float32)
    before = sys.getrefcount(None), sys.getrefcount(a)
    kept = [call(a, out) for _ in range(100)]
    assert sys.getrefcount(a) == before[1]
    assert sys.getrefcount(None) - before[0] in (0, *range(90, 111))
    assert kept == [None] * 100
