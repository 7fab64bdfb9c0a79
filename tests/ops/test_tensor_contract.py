"""The contract of every tensor operator.

It covers numeric gradients, in-place pairs, unwanted outputs, exact workspace and dtypes.
"""

import re
from pathlib import Path

import numpy as np
import pytest

from tests.support import ops_nn_cases
from tests.support.ops_harness import check_contract, check_gradient, check_hidden, differentiate, prepare, run
from tests.support.ops_tensor_cases import BINARY, CASES, NO_GRADIENT, UPDATES, ident
from tests.support.together import operator, together
from weftplan.ops.core import registry, tiling
from weftplan.ops.core.formula_kernel import FormulaKernel

CONSTANT = {
    "take": (0,),
    "pick": (0,),
    "where": (1, 2),
    "reshape_like": (0,),
    "gather_nd": (0,),
    "scatter_nd": (0,),
    "_identity_with_attr_like_rhs": (0,),
}

UNSTEADY = re.compile("[Cc]ast|mod")
"""Operators not comparable across dtypes: rounding moves values over the steps of a cast or remainder."""


FAMILIES = ("_np", "_random_", "_sample_", "broadcast_", "preloaded_multi_")
"""Prefixes of operators whose names the tests assemble from parts."""


def test_every_operator_has_a_case():
    """Every operator is in a list of cases, or a test or golden case names it or its alias, or it is a formula."""
    listed = {registry.get(op).name for op, _, _ in (*CASES, *NO_GRADIENT, *UPDATES, *ops_nn_cases.CASES)}
    here = Path(__file__).parent
    files = [*here.rglob("test_*.py"), *(here.parent / "golden").glob("cases_*.py")]
    words = {word for path in files for word in re.findall(r"\w+", path.read_text())}
    named = {registry.get(word).name for word in words if registry.contains(word)}
    operators = [name for name in registry.names(aliases=False) if registry.get(name).backward_of is None]
    operators = [name for name in operators if not isinstance(registry.get(name).forward, FormulaKernel)]
    missing = [name for name in operators if name not in listed | named and not name.startswith(FAMILIES)]
    assert missing == [], "test them in tests/ops with check_contract and check_gradient"


@together(by=operator)
@pytest.mark.parametrize("case", CASES, ids=ident)
def test_gradient(case):
    """The gradient rule agrees with central differences in float64."""
    op, arrays, params = case
    check_gradient(op, arrays, params, wrt=CONSTANT.get(op))


@together(by=operator)
@pytest.mark.parametrize("case", CASES + NO_GRADIENT + UPDATES, ids=ident)
def test_contract(case):
    """Forward and backward calls meet the contract: in-place pairs, unwanted outputs, exact workspace."""
    op, arrays, params = case
    if registry.get(op).gradient is None:
        assert op.endswith("_update")
    check_contract(op, arrays, params)


@together(by=operator)
@pytest.mark.parametrize("case", CASES + UPDATES, ids=ident)
def test_contract_in_small_blocks(case, monkeypatch):
    """With blocks of 4 elements kernels meet the contract and give equal results within rounding error."""
    op, arrays, params = case
    call = prepare(op, arrays, params)
    call.inputs = [x.copy() for x in call.inputs]
    whole = [y.copy() for y in call()]
    monkeypatch.setattr(tiling._thread, "grain", tiling.Grain(4, 2 << 20))
    check_contract(op, arrays, params)
    for expected, actual in zip(whole, run(op, [x.copy() for x in arrays], params), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-12)
    if registry.get(op).gradient is not None:
        check_gradient(op, arrays, params, wrt=CONSTANT.get(op))


@together(by=operator)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("case", [c for c in CASES if not UNSTEADY.search(c[0])], ids=ident)
def test_dtype(case, dtype):
    """float16 and float32 inputs give outputs of their dtype, close to the float64 result, forward and backward."""
    op, arrays, params = case
    exact = prepare(op, arrays, params)
    narrow = prepare(op, [x.astype(dtype) if x.dtype == np.float64 else x for x in arrays], params)
    rtol = 1e-4 if dtype == "float32" else 3e-2
    ograds = [np.full(s.shape, 0.5, s.dtype) for s in exact.out_specs]
    pairs = list(zip(narrow(), exact(), strict=True))
    pairs += zip(
        differentiate(narrow, [g.astype(dtype) for g in ograds])[0], differentiate(exact, ograds)[0], strict=True
    )
    for got, want in pairs:
        assert got.dtype == (dtype if want.dtype == np.float64 else want.dtype)
        np.testing.assert_allclose(got.astype(np.float64), want, rtol=rtol, atol=rtol)


@together()
@pytest.mark.parametrize("case", NO_GRADIENT, ids=ident)
def test_zero_gradient(case):
    """Rounding, comparing and filling have the gradient 0, without a backward node."""
    op, arrays, params = case
    call = prepare(op, arrays, params)
    call()
    actual, builder = differentiate(call, [np.ones(s.shape, s.dtype) for s in call.out_specs])
    assert not builder.calls
    assert not any(g.any() for g in actual)


BIG = np.linspace(0.1, 2.0, 1 << 20, dtype=np.float32)
WIDE = BIG.reshape(1024, 1024)
LARGE = [
    *(
        (op, [BIG], {})
        for op in ("exp", "tanh", "relu", "softsign", "erf", "log1p", "rsqrt", "round", "sigmoid", "abs")
    ),
    *((op, [BIG], {"scalar": 1.5}) for op in ("_rdiv_scalar", "_power_scalar", "_maximum_scalar", "_greater_scalar")),
    *((f"broadcast_{op}", [WIDE, WIDE[:1]], {}) for op in BINARY),
    *((f"broadcast_{op}", [WIDE[:, :1], WIDE], {}) for op in BINARY),
    *((op, [WIDE], {"axis": axis}) for op in ("sum", "mean", "max", "norm") for axis in (0, 1)),
    ("elemwise_div", [BIG, BIG], {}),
    ("_power", [BIG, BIG], {}),
    ("add_n", [BIG] * 3, {}),
    ("argmax", [WIDE], {"axis": 1}),
    ("argmax", [WIDE], {"axis": 0}),
    ("transpose", [WIDE], {}),
    ("Concat", [WIDE, WIDE], {}),
    ("SliceChannel", [WIDE], {"num_outputs": 2}),
    ("Cast", [BIG], {"dtype": "float64"}),
    ("Cast", [BIG], {"dtype": "uint8"}),
    ("clip", [BIG], {"a_min": 0.5, "a_max": 1.0}),
    ("where", [BIG > 1, BIG, BIG], {}),
    ("slice_axis", [WIDE], {"axis": 1, "begin": 1, "end": 900}),
    ("take", [WIDE, np.arange(1000, dtype=np.float32)], {}),
    ("pick", [WIDE, np.arange(1024, dtype=np.float32)], {}),
    ("one_hot", [np.arange(1024, dtype=np.float32)], {"depth": 1024}),
    ("repeat", [WIDE], {"repeats": 2, "axis": 1}),
    ("tile", [WIDE], {"reps": (2, 2)}),
    ("Pad", [WIDE], {"mode": "edge", "pad_width": (2, 2, 3, 3)}),
    ("dot", [WIDE[:64], WIDE], {}),
    ("dot", [WIDE[:, :64], WIDE], {"transpose_a": True}),
    ("_arange", [], {"start": 1000000}),
    ("_random_normal", [], {"shape": (1000, 1000), "dtype": "float16"}),
    ("adam_update", [BIG, BIG, BIG, BIG], {"lr": 0.1}),
]


@pytest.mark.parametrize("case", LARGE, ids=ident)
def test_no_hidden_memory(case):
    """On 4 MB arrays, a call allocates at most 400,000 bytes outside its workspace, forward and backward.

    The workspace itself is at most 1,600,000 bytes, except for Pad and for argmax of axis 0.
    """
    op, arrays, params = case
    call = prepare(op, [np.ascontiguousarray(x) for x in arrays], params)
    check_hidden(call, 400_000)
    calls = [call]
    if call.op.gradient is not None:
        calls += differentiate(call, [np.ones(s.shape, s.dtype) for s in call.out_specs])[1].calls
    for each in calls:
        check_hidden(each, 400_000)
        if not (op == "argmax" and params["axis"] == 0) and op != "Pad":
            assert each.declared <= 1_600_000, f"{each.op.name} declares {each.declared} bytes"
