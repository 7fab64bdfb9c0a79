"""Optimizer steps and counts over arrays: contract, blocks, memory, precision, states, wrong inputs."""

from dataclasses import replace

import numpy as np
import pytest

import weftplan as mx
from tests.support.ops_harness import check_contract, check_hidden, prepare, run
from tests.support.together import operator, together
from weftplan.errors import DTypeError, MXNetError, ParameterError, ShapeError
from weftplan.ops.core import registry, tiling
from weftplan.ops.core.expression import FormulaError, f
from weftplan.ops.core.params import p_float
from weftplan.ops.core.schema import Param
from weftplan.ops.optimizer.step import COMMON as SHARED
from weftplan.ops.optimizer.step import COPY, LR, step


def uniform(*shape, low=-1.0, high=1.0, seed=0):
    """Return random float64 numbers from ``low`` to ``high``."""
    return np.random.RandomState(seed).uniform(low, high, shape)


W, G, S, T = (uniform(3, 4, seed=k) for k in range(4))
P, Q = (uniform(3, 4, low=0.1, seed=k) for k in (5, 6))
COMMON = {"lr": 0.1, "wd": 0.05, "rescale_grad": 0.5, "clip_gradient": 0.3}
SAME = [
    ("signsgd_update", [W, G], COMMON),
    ("signum_update", [W, G, S], {**COMMON, "momentum": 0.9, "wd_lh": 0.1}),
    ("nag_mom_update", [W, G, S], {**COMMON, "momentum": 0.9}),
    ("rmsprop_update", [W, G, P], {**COMMON, "clip_weights": 0.5}),
    ("rmspropalex_update", [W, G, P + 1, Q, S], COMMON),
    ("ftrl_update", [W, G, S, P], COMMON),
    ("ftml_update", [W, G, P, Q, S], {"lr": 0.1, "wd": 0.05, "t": 3, "clip_grad": 0.3}),
    ("lamb_update_phase1", [W, G, S, P], {"wd": 0.05, "t": 3}),
    ("lamb_update", [W, G, S, P], {"lr": 0.1, "wd": 0.05, "t": 3}),
    ("lamb_update_phase2", [W, G, np.array([2.0]), np.array([3.0])], {"lr": 0.1}),
]
ADAMW = {"lr": 0.1, "wd": 0.05, "eta": 0.3, "clip_gradient": 0.3}
FACTOR = np.array([0.5], np.float32)
MIXED = [
    ("mp_sgd_update", [W, G, W.astype("float32")], COMMON),
    ("mp_sgd_mom_update", [W, G, S.astype("float32"), W.astype("float32")], {**COMMON, "momentum": 0.9}),
    ("mp_nag_mom_update", [W, G, S.astype("float32"), W.astype("float32")], {**COMMON, "momentum": 0.9}),
    (
        "mp_lamb_update_phase1",
        [W, G, S.astype("float32"), P.astype("float32"), W.astype("float32")],
        {"wd": 0.05, "t": 3, "rescale_grad": 0.5, "clip_gradient": 0.3},
    ),
    ("_adamw_update", [W, G, S, P, FACTOR], ADAMW),
    ("_mp_adamw_update", [W, G, S.astype("float32"), P.astype("float32"), W.astype("float32"), FACTOR], ADAMW),
]
MIXED_STEP = (  # its second input is a direction, not a gradient
    "mp_lamb_update_phase2",
    [W, G.astype("float32"), np.array([2.0], "float32"), np.array([3.0], "float32"), W.astype("float32")],
    {"lr": 0.1},
)
RATES = {"lrs": (0.1, 0.2), "wds": (0.0, 0.1)}
LOADED = [np.array(one, np.float32) for one in RATES.values()]
W32, S32, P32 = (x.astype("float32") for x in (W, S, P))
SEVERAL = {  # for each: the operator for one weight, and the arrays per weight
    "multi_sgd_update": ("sgd_update", [W, G], [S[0], T[0]]),
    "multi_sgd_mom_update": ("sgd_mom_update", [W, G, S], [S[0], T[0], P[0]]),
    "multi_mp_sgd_update": ("mp_sgd_update", [W, G, W32], [S[0], T[0], S32[0]]),
    "multi_mp_sgd_mom_update": ("mp_sgd_mom_update", [W, G, S32, W32], [S[0], T[0], P32[0], S32[0]]),
}
GROUPS = [
    case
    for name, (_, one, other) in SEVERAL.items()
    for more in [{"num_weights": 2, **({"momentum": 0.9} if "mom" in name else {})}]
    for case in (
        (name, [*one, *other], {**RATES, **more}),
        (f"preloaded_{name}", [*one, *other, *LOADED], more),
    )
]
MANY = [
    *GROUPS,
    ("all_finite", [W], {}),
    ("multi_all_finite", [W, S[0]], {"num_arrays": 2}),
    ("multi_sum_sq", [W, S[0]], {"num_arrays": 2}),
    ("multi_lars", [P[0], Q[0], P[1], Q[1]], {"eta": 0.01, "eps": 1e-5, "rescale_grad": 0.5}),
]
CASES = [*SAME, *MIXED, MIXED_STEP, *MANY]


def narrowed(case, dtype):
    """Return the case with its float64 arrays in ``dtype``, and copies of its other arrays."""
    op, arrays, params = case
    return op, [x.astype(dtype) if x.dtype == np.float64 else x.copy() for x in arrays], params


def test_every_operator_has_a_case():
    """Every step has a case here, or among those of tensor operators."""
    plain = {"sgd_update", "sgd_mom_update", "adam_update"}
    assert {name for name in registry.names() if "_update" in name} <= {op for op, _, _ in CASES} | plain


@together(by=operator)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
@pytest.mark.parametrize("elements", [4, 1 << 16])
def test_contract(case, dtype, elements, monkeypatch):
    """Every case meets the kernel contract, in one block and in blocks of 4 elements."""
    monkeypatch.setattr(tiling._thread, "grain", tiling.Grain(elements, 2 << 20))
    check_contract(*narrowed(case, dtype))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_blocks_change_nothing(case, monkeypatch):
    """Outputs and states for blocks of 65,536 and of 5 elements agree within rounding error."""
    results = []
    for elements in (1 << 16, 5):
        monkeypatch.setattr(tiling._thread, "grain", tiling.Grain(elements, 2 << 20))
        op, arrays, params = narrowed(case, "float64")
        results.append([y.copy() for y in run(op, arrays, params)] + arrays)
    for whole, cut in zip(*results, strict=True):
        np.testing.assert_allclose(cut, whole, rtol=1e-6 if case[0] == "multi_sum_sq" else 1e-14)


@pytest.mark.parametrize("case", SAME, ids=lambda case: case[0])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-6), ("float16", 2e-2)])
def test_precision(case, dtype, tolerance):
    """Narrow dtypes give the float64 result within their precision."""
    op, arrays, params = narrowed(case, dtype)
    exact = run(op, [x.astype(np.float64) for x in arrays], params)[0]
    np.testing.assert_allclose(run(op, arrays, params)[0], exact, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_memory(case):
    """Nothing but NumPy's buffers is allocated outside the workspace."""
    op, arrays, params = case
    kept = ((1,), (2,))  # factors, and rates of two weights
    large = [x.astype("float32") if x.shape in kept else np.tile(x.astype("float32"), (500, 100)) for x in arrays]
    size = 8 if op == "lamb_update" else 4  # its norms are computed in float64
    check_hidden(prepare(op, large, params), 3 * 8192 * size + 20_000)


@pytest.mark.parametrize("case", [*SAME[:-1], *MIXED, *GROUPS], ids=lambda case: case[0])
def test_states_change_where_they_lie(case):
    """A call with the weights as outputs changes weights and states in place, but neither gradients nor rates."""
    op, arrays, params = narrowed(case, "float16" if "multi_mp_" in case[0] else "float32")
    inputs = [mx.nd.array(x, dtype=x.dtype) for x in arrays]
    expected = [x.copy() for x in arrays]
    names = registry.get(op).input_names(params)
    weights = [k for k, name in enumerate(names) if name.startswith("weight") and "32" not in name]
    for k, new in zip(weights, run(op, expected, params), strict=True):
        expected[k] = new
    getattr(mx.nd, op)(*inputs, out=[inputs[k] for k in weights], **params)
    for ours, theirs in zip(inputs, expected, strict=True):
        np.testing.assert_array_equal(ours.asnumpy(), theirs)


@pytest.mark.parametrize(
    "case",
    [case for case in (*MIXED, MIXED_STEP) if "mp_" in case[0] and "nag" not in case[0]],
    ids=lambda case: case[0],
)
def test_a_mixed_step_is_the_plain_step_of_the_copy(case):
    """A mixed-precision step is a float32 step of copy and states; its output is the rounded copy, or a direction."""
    op, arrays, params = narrowed(case, "float16")
    at = registry.get(op).inputs.index(COPY)
    others = [x for k, x in enumerate(arrays) if k > 1 and k != at]
    plain = [arrays[at].copy(), arrays[1].astype("float32"), *(x.copy() for x in others)]
    expected = run(op.replace("mp_", ""), plain, params)[0]
    actual = run(op, arrays, params)[0]
    assert actual.dtype == (np.float32 if "phase1" in op else np.float16)
    np.testing.assert_array_equal(actual, expected.astype(actual.dtype))
    np.testing.assert_array_equal(arrays[at], plain[0] if "phase1" in op else expected)
    for ours, theirs in zip(others, plain[2:], strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("case", [*SAME[1:3], SAME[-1], *MIXED, MIXED_STEP], ids=lambda case: case[0])
def test_weights_without_dimensions(case):
    """A step of weights of shape () is that of weights of shape (1,)."""
    op, arrays, params = narrowed(case, "float32")
    flat, scalar = ([x if x.shape == (1,) else x[0, 0].reshape(shape) for x in arrays] for shape in ((1,), ()))
    expected = run(op, [x.copy() for x in flat], params)[0]
    np.testing.assert_array_equal(run(op, scalar, params)[0].reshape(1), expected)


@pytest.mark.parametrize("case", GROUPS, ids=lambda case: case[0])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_multi_weight_step_equals_single_steps(case, dtype):
    """A step of two weights equals two single steps with their own rates and decays, in weights and states."""
    op, arrays, params = narrowed(case, dtype)
    single, *each = SEVERAL[op.removeprefix("preloaded_")]
    before = [x.copy() for x in arrays]
    actual = run(op, arrays, params)
    more = {"momentum": 0.9} if "momentum" in params else {}
    exact = {"rtol": 0} if op.startswith("multi") else {"rtol": 2e-3 if dtype == "float16" else 1e-6}
    first = 0
    for k, mine in enumerate(each):
        inputs = before[first : first + len(mine)]
        new = run(single, inputs, {"lr": RATES["lrs"][k], "wd": RATES["wds"][k], **more})[0]
        np.testing.assert_allclose(actual[k], new, **exact, atol=0 if exact["rtol"] == 0 else 1e-3 * exact["rtol"])
        for ours, theirs in zip(arrays[first : first + len(mine)], inputs, strict=True):
            np.testing.assert_allclose(ours, theirs, **exact, atol=0 if exact["rtol"] == 0 else exact["rtol"])
        first += len(mine)


def test_states_of_several_weights_in_a_graph():
    """The number of weights decides which inputs are states; their names and order are those of MXNet 1.9.1."""
    step = mx.sym.multi_mp_sgd_mom_update(num_weights=2, lrs=(1, 1), wds=(0, 0), name="u")
    assert step.list_arguments() == ["u_weight_0", "u_grad_0", "u_weight_1", "u_grad_1"]
    assert step.list_auxiliary_states() == ["u_mom_0", "u_weight32_0", "u_mom_1", "u_weight32_1"]
    loaded = mx.sym.preloaded_multi_sgd_update(num_weights=1, name="u")
    assert loaded.list_arguments() == ["u_weight_0", "u_grad_0", "u_lrs", "u_wds"]
    assert loaded.list_auxiliary_states() == []
    executor = step.simple_bind(mx.cpu(), u_weight_0=(2,), u_weight_1=(3,), grad_req="null")
    for name, value in (("u_grad_0", 1), ("u_grad_1", 2)):
        executor.arg_dict[name][:] = value
    for _ in range(2):
        outputs = executor.forward()
    assert [out.asnumpy().tolist() for out in outputs] == [[-2, -2], [-4, -4, -4]]
    assert executor.aux_dict["u_weight32_1"].asnumpy().tolist() == [-4, -4, -4]


def test_reset_arrays():
    """reset_arrays fills arrays of any dtype with zeros and returns an empty list, as in MXNet."""
    arrays = [mx.nd.ones((2,)), mx.nd.array([[1, np.nan]], dtype="float16"), mx.nd.ones((3,), dtype="int32")]
    assert mx.nd.reset_arrays(*arrays, num_arrays=3) == []
    assert [array.asnumpy().tolist() for array in arrays] == [[0, 0], [[0, 0]], [0, 0, 0]]
    with pytest.raises(ParameterError, match="2 arrays, expected num_arrays=3"):
        mx.nd.reset_arrays(*arrays[:2], num_arrays=3)
    with pytest.raises(DTypeError, match="number 1"):
        mx.nd.reset_arrays(mx.nd.ones((2,)), np.ones(2), num_arrays=2)


def test_in_a_graph():
    """An optimizer step runs in a bound graph, with a gradient computed from the weight."""
    w, n = mx.sym.Variable("w"), mx.sym.Variable("n")
    out = mx.sym.rmsprop_update(w, mx.sym.square(w), n, lr=0.1, name="step")
    assert out.list_auxiliary_states() == ["n"]
    weight, state = W.astype(np.float32), P.astype(np.float32)
    executor = out.bind(mx.cpu(), {"w": mx.nd.array(weight)}, aux_states={"n": mx.nd.array(state)})
    expected = run("rmsprop_update", [weight, weight**2, state], {"lr": 0.1})[0]
    np.testing.assert_allclose(executor.forward()[0].asnumpy(), expected, rtol=1e-6)
    np.testing.assert_allclose(executor.aux_dict["n"].asnumpy(), state, rtol=1e-6)


@pytest.mark.parametrize(
    ("op", "arrays", "params", "error", "words"),
    [
        ("nag_mom_update", [W, G[:2], S], {"lr": 0.1}, ShapeError, "weight and grad"),
        ("mp_sgd_update", [W, G, W], {"lr": 0.1}, DTypeError, "weight32, expected float32"),
        ("mp_sgd_update", [W.astype(int)] * 2 + [W.astype("f")], {"lr": 0.1}, DTypeError, "expects floats"),
        ("multi_sgd_update", [W, G], {"lrs": (0.1, 0.2), "wds": (0.0,), "num_weights": 1}, ParameterError, "lrs has 2"),
        ("multi_sgd_update", [W, G[0]], {"lrs": (0.1,), "wds": (0.0,)}, ShapeError, "weight 0: .*and grad"),
        ("multi_sgd_mom_update", [W, G, S[0]], {"lrs": (0.1,), "wds": (0.0,)}, ShapeError, "0: .* weight and mom"),
        ("multi_mp_sgd_update", [W, G, W], {"lrs": (0.1,), "wds": (0.0,)}, DTypeError, "weight 0: .*weight32"),
        ("preloaded_multi_sgd_update", [W, G, *LOADED], {"num_weights": 1}, ShapeError, "lrs, one for each weight"),
        ("preloaded_multi_sgd_update", [W, G, P[0][:1], LOADED[1][:1]], {}, DTypeError, "lrs, one for each"),
        ("all_finite", [W], {"init_output": False}, ParameterError, "init_output"),
        ("multi_sum_sq", [W, G.astype("f")], {"num_arrays": 2}, DTypeError, "differ"),
        ("lamb_update_phase2", [W, G, P, P], {"lr": 0.1}, ShapeError, "r1, expected .1,"),
        ("ftml_update", [W, G, P, Q, S], {"lr": 0.1}, ParameterError, "'t'"),
    ],
)
def test_wrong_inputs(op, arrays, params, error, words):
    """Wrong inputs raise an error that names the input or parameter."""
    with pytest.raises(error, match=words):
        prepare(op, arrays, params)
    assert issubclass(error, MXNetError)


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ("unknown function 'sinus'", {"rule": lambda p, w, g, mom: (f.sinus(w), mom)}),
        ("unknown function 'sinus'", {"rule": lambda p, w, g, mom: (w if p.clips else f.sinus(w), mom)}),
        ("unknown function 'sinus'", {"on_copy": lambda p, w, g, mom: (f.sinus(w), mom)}),
        ("rate", {"rule": lambda p, w, g, mom: (w * p.rate, mom)}),
        ("use `where`", {"rule": lambda p, w, g, mom: (w if w else g, mom)}),
        ("expected 2 expressions", {"rule": lambda p, w, g, mom: (w - g * p.lr,)}),
        ("expected 2 expressions", {"rule": lambda p, w, g, mom: (w - g * p.lr, None)}),
        ("default of rate", {"params": (LR, Param("rate", p_float, "x"))}),
        ("different identifiers", {"params": (LR, LR, SHARED[2])}),
        ("different names", {"others": ("mom", "mom", COPY)}),
        ("after all states", {"others": (COPY, "mom")}),
        ("numbers=.'rate',.", {"numbers": ("rate",)}),
        ("a copy if", {"others": ("mom",), "on_copy": lambda p, w, g, mom: (w, mom)}),
    ],
)
def test_wrong_steps(words, options):
    """A step that cannot be computed with every choice is refused by name; none of its operators is registered."""
    usual = {"rule": lambda p, w, g, mom: (w, mom), "others": ("mom", COPY), "params": (LR, SHARED[2])}
    with pytest.raises(FormulaError, match=f"step '(mp_)?leap_update'.*{words}"):
        step("leap_update", doc="A step that is wrong.", in_mxnet=False, **{**usual, **options})
    assert not any(registry.contains(name) for name in ("leap_update", "mp_leap_update"))


def test_steps_need_free_names(monkeypatch):
    """If the multi-precision operator cannot be registered, the plain one is not."""
    monkeypatch.setattr(registry, "_OPS", dict(registry._OPS))
    registry.register(replace(registry.get("sgd_update"), name="mp_leap_update", aliases=()))
    with pytest.raises(ParameterError, match="operator 'mp_leap_update' is registered already"):
        step("leap_update", lambda p, w, g: (w - g * p.lr,), (COPY,), (LR,), "One step.", in_mxnet=False)
    assert not registry.contains("leap_update")
