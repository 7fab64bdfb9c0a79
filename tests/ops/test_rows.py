"""Every kernel that is a formula: dtypes, memory, special values, gradients; and rows that are refused."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import numpy as np
import pytest

import weftplan as mx
import weftplan.ops
from tests.support.ops_harness import check_contract, check_gradient, garbage_bytes
from weftplan.ndarray.arithmetic import MASK_MAKERS
from weftplan.ops.core import registry, tiling
from weftplan.ops.core.expression import Expr, FormulaError, Scalar, cast, f, where
from weftplan.ops.core.formula_kernel import FormulaKernel
from weftplan.ops.core.gradient_kernel import GradientKernel
from weftplan.ops.core.lowering import lower
from weftplan.ops.core.params import p_float
from weftplan.ops.core.rules import floats_only, grad
from weftplan.ops.core.schema import OpContext, Param, TensorSpec
from weftplan.ops.elementwise import binary
from weftplan.ops.elementwise.rows import ONNX, row

FORMULAS = [name for name in sorted(registry.names(aliases=False))
            if isinstance(registry.get(name).forward, FormulaKernel)]  # fmt: skip
UNARY = [name for name in FORMULAS if registry.get(name).inputs == ("data",) and not registry.get(name).backward_of]
DTYPES = ("float16", "float32", "float64", "int32", "uint8")
SPECIAL = np.array([0.0, -0.0, 0.3, -0.7, 1.0, -1.0, 2.5, np.inf, -np.inf, np.nan, 1e-40, 3e4])
STEP = {
    "lr": 0.1,
    "eta": 0.3,
    "wd": 0.01,
    "t": 3,
    "eps": 1e-8,
    "a_min": -0.5,
    "a_max": 0.5,
    "act_type": "tanh",
    "scalar": 1.5,
    "num_args": 2,
}
JUMPS = ("clip", "mod_scalar", "round", "rint")
"""Ends of the names of operators whose values or gradients jump near the points where gradients are checked."""


def params_of(name: str) -> dict[str, Any]:
    """Return parameters of an operator: those in ``STEP`` that it has, and defaults."""
    op = registry.get(name)
    return registry.parse_params(op, {k: v for k, v in STEP.items() if k in {one.name for one in op.params}})


def computed(name: str, arrays: list[np.ndarray], *outs: np.ndarray) -> list[np.ndarray]:
    """Run a kernel with exactly its declared workspace; return the outputs and the states."""
    op, params = registry.get(name), params_of(name)
    specs, targets = ([TensorSpec(x.shape, x.dtype) for x in group] for group in (arrays, outs))
    context = OpContext(np, workspace=garbage_bytes(op.workspace_bytes(params, specs, targets)))
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # half precision overflows in conversions
        op.forward(context, params, arrays, outs)
    return [*outs, *(arrays[k] for k in op.mutated(params))]


def arrays_of(name: str, dtype: str, size: int) -> list[np.ndarray]:
    """Return inputs with special values first, or skip if the operator refuses the dtype."""
    op = registry.get(name)
    rng = np.random.default_rng(len(name))
    count = len(op.input_names(params_of(name)))
    if op.infer_dtype is not None and op.backward_of is None:
        try:
            op.infer_dtype(params_of(name), [np.dtype(dtype)] * count, [None])
        except mx.errors.DTypeError:
            pytest.skip(f"{name} refuses {dtype}")
    result = []
    for k in range(count):
        own = 1 if f"x{k}" in op.forward.numbers else size
        values = np.concatenate([np.roll(SPECIAL, k), rng.standard_normal(max(0, size - SPECIAL.size))])[:own]
        with np.errstate(all="ignore"):
            result.append((values if dtype[0] == "f" else np.nan_to_num(values).clip(-9, 9) * 3).astype(dtype))
    return result


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMULAS)
def test_memory_does_not_change_bits(name: str, dtype: str):
    """In each in-place pair, for 0, 1 and more elements, outputs and states have the bits of separate memory."""
    op = registry.get(name)
    if "mp_" in name or (op.backward_of and dtype[0] != "f" and registry.get(op.backward_of).name in ("Activation",)):
        pytest.skip("arrays of several dtypes, or a dtype that the forward operator refuses")
    for size in (0, 1, 40):
        expected = computed(name, arrays_of(name, dtype, size), *outputs_of(name, dtype, size))
        for pair in op.inplace_pairs(params_of(name)):
            arrays, outs = arrays_of(name, dtype, size), outputs_of(name, dtype, size)
            if arrays[pair.input].dtype != outs[pair.output].dtype:
                continue
            outs[pair.output] = arrays[pair.input]
            actual = computed(name, arrays, *outs)
            for mine, theirs in zip(actual, expected, strict=True):
                assert mine.tobytes() == theirs.tobytes(), f"{name}, {dtype}, {size} elements, {pair}"


def outputs_of(name: str, dtype: str, size: int) -> list[np.ndarray]:
    """Return arrays for the outputs: one of ``size`` elements, or the gradient of each input."""
    if isinstance(registry.get(name).forward, GradientKernel):
        return [np.empty_like(array) for array in arrays_of(name, dtype, size)[1:]]
    return [np.empty(size, op_dtype(name, dtype))]


def op_dtype(name: str, dtype: str) -> np.dtype:
    """Return the dtype of the output."""
    op = registry.get(name)
    if op.backward_of:
        return np.dtype(dtype)
    count = len(op.input_names(params_of(name)))
    return op.infer_dtype(params_of(name), [np.dtype(dtype)] * count, [None])[1][0]


@pytest.mark.parametrize("name", FORMULAS)
def test_nan_is_not_lost(name: str):
    """A NaN in the first input gives NaN, except in comparisons and tests."""
    op = registry.get(name)
    tests = ("equal", "greater", "less", "logical", "isnan", "isinf", "isfinite", "hypot")  # hypot(nan, inf) is inf
    if any(word in name for word in tests) or op.backward_of or op.loss or "mp_" in name:
        pytest.skip("the result is no number, or the first input is not read")
    arrays = arrays_of(name, "float32", 40)
    at = int(np.flatnonzero(np.isnan(arrays[0]))[0])
    assert np.isnan(computed(name, arrays, np.empty(40, op_dtype(name, "float32")))[0][at])


@pytest.mark.parametrize("name", [name for name in UNARY if registry.get(name).gradient is not None])
def test_gradient_of_unary_operators(name: str):
    """The gradient equals central differences in float64, and forward and backward meet the kernel contract."""
    x = np.linspace(0.2, 0.7, 6).reshape(2, 3) + (2.0 if "arccosh" in name else 0.0)
    values = {k: v for k, v in STEP.items() if k in {one.name for one in registry.get(name).params}}
    check_contract(name, [x], values)
    if not name.endswith(JUMPS):
        check_gradient(name, [x], values)


# ------------------------------------------------------------------------------------------------- scratch and order


def lowered(formula: Any, *names: str, dtype: str = "float32", compute: Any = None, overlaps: str = "") -> Any:
    """Return the program of a formula of the inputs ``names``, whose output may be the inputs ``overlaps``."""
    kind = np.dtype(dtype)
    return lower(
        {"out": formula(*(Expr("input", name) for name in names))}, [*names, "out"],
        dict.fromkeys([*names, "out"], kind), {"out": frozenset(overlaps.split() or names)},
        dtype=kind, compute=compute,
    )  # fmt: skip


def test_output_is_scratch_after_the_last_use_of_an_input():
    """A chain needs no scratch; a result that must outlive an input's memory does."""
    assert not lowered(lambda x: f.exp(-x) + 1.0, "x").scratch
    assert len(lowered(lambda x: f.exp(x) * x, "x").scratch) == 1
    assert not lowered(lambda g, x: g / x * g, "g", "x", overlaps="x").scratch
    assert len(lowered(lambda x: f.exp(x) * f.sin(x) * x, "x").scratch) == 2


def test_masked_copy_keeps_its_operands():
    """A selection never overwrites its mask or its value before it has read them."""
    program = lowered(lambda x, y: where(f.less(x, y), x, y), "x", "y")
    step = program.step(np, {})
    for target in (0, 1):
        arrays = [np.array([1.0, 5.0], np.float32), np.array([3.0, 2.0], np.float32)]
        scratch = [np.empty(2, dtype) for dtype, _ in program.scratch]
        step(*arrays, arrays[target], *scratch)
        assert arrays[target].tolist() == [1.0, 2.0]


def test_no_output_holds_the_value_of_another():
    """Each of several outputs of one program gets its own value, whatever the order in which they are computed."""
    g, x = Expr("input", "g"), Expr("input", "x")
    square = x * x
    half = x * 0.5
    results = {"out": g * -half, "out1": g * half, "out2": g * (square - 1.0)}
    arrays = ["g", "x", *results]
    kind = np.dtype(np.float64)
    program = lower(results, arrays, dict.fromkeys(arrays, kind), dict.fromkeys(results, frozenset()), dtype=kind)
    outs = np.empty((3, 4))
    program.step(np, {})(np.full(4, 3.0), np.full(4, 2.0), *outs, *[np.empty(4) for _ in program.scratch])
    assert outs[:, 0].tolist() == [-3.0, 3.0, 9.0]


def test_broadcasting_formulas_are_cut_into_blocks():
    """Scratch has at most the elements of a block, also where one row has more, and blocks do not change bits."""
    kernel = FormulaKernel(lambda p, a, b: f.exp(a * b) + a, 2)
    rng = np.random.default_rng(0)
    a, b, out = rng.standard_normal((7, 3, 50)), rng.standard_normal((3, 1)), np.empty((7, 3, 50))
    specs = [TensorSpec(x.shape, x.dtype) for x in (a, b, out)]
    for block in (16, 60, 10_000):
        with tiling.using(tiling.Grain(block, 1)):
            size = kernel.workspace({}, specs[:2], specs[2:])
            assert 0 < size <= -(-8 * min(block, a.size) // 64) * 64
            kernel(OpContext(np, workspace=garbage_bytes(size)), {}, [a, b], [out])
        assert out.tobytes() == (np.exp(a * b) + a).tobytes()


@pytest.mark.parametrize("limit", [None, 7, 64])
@pytest.mark.parametrize("wanted", [(0, 1, 2), (1,), (0, 2)])
@pytest.mark.parametrize("groups", [None, ((2, 0), (1,))])
@pytest.mark.parametrize("sums", [False, True])
def test_gradients_are_summed_to_the_shapes_of_inputs(sums: bool, groups: Any, wanted: tuple[int, ...], limit: Any):
    """A formula of three arrays has the gradients of NumPy's sums, for any blocks, groups and subset of outputs."""
    kernel = GradientKernel(
        lambda p, g, a, b, c: (g * b, g * a + c, g * c), 4, sums=sums, groups=groups, overlaps=(),
        limit=limit and (lambda size: limit),
    )  # fmt: skip
    rng = np.random.default_rng(1)
    g, a, b, c = (rng.standard_normal(shape) for shape in ((4, 3, 5), (4, 3, 5), (3, 1), (4, 1, 5)))
    terms = [g * b, g * a + c, g * c]
    expected = [terms[0], terms[1].sum(axis=(0, 2)).reshape(3, 1), terms[2].sum(axis=1, keepdims=True)]
    outs = [np.full_like(x, 7.0) if k in wanted else None for k, x in enumerate((a, b, c))]
    specs = [None if x is None else TensorSpec(x.shape, x.dtype) for x in (g, a, b, c, *outs)]
    with tiling.using(tiling.Grain(30, 1)):
        workspace = garbage_bytes(kernel.workspace({}, specs[:4], specs[4:]))
        kernel(OpContext(np, workspace=workspace), {}, [g, a, b, c], outs)
    for k in wanted:
        np.testing.assert_allclose(outs[k], expected[k], rtol=1e-13)


def test_casts_round_once():
    """A result in a wider dtype is rounded when it is written, and a cast to the same dtype costs nothing."""
    program = lowered(lambda x: cast(x, "float") * 3.0, "x", dtype="float16", compute="float")
    assert [dtype for dtype, _ in program.scratch] == [np.dtype(np.float32)]
    assert not lowered(lambda x: cast(x, "float") * 3.0, "x", compute="float").scratch


@pytest.mark.parametrize("dtype", ["int32", "uint8", "float32", "float16"])
def test_arithmetic_of_arrays_is_one_ufunc(dtype: str):
    """A formula of one function of arrays is NumPy's function, without a step around it."""
    kind = np.dtype(dtype)
    for name in ("add", "multiply", "remainder"):
        kernel = FormulaKernel(lambda p, a, b, name=name: getattr(f, name)(a, b), 2)
        assert kernel.function(np, [kind, kind], kind) is getattr(np, name)


def test_bools_take_functions_without_a_loop_of_bools():
    """Differences, squares, quotients and remainders of bools are computed in another dtype, and converted."""
    x, y = mx.nd.array([True, False], dtype=bool), mx.nd.array([True, True], dtype=bool)
    assert mx.nd.square(x).asnumpy().tolist() == mx.nd.elemwise_div(x, y).asnumpy().tolist() == [True, False]
    assert mx.nd._internal._mod_scalar(x, scalar=2).asnumpy().tolist() == [False, False]
    assert mx.nd.broadcast_mod(x, y).asnumpy().tolist() == [False, False]
    assert mx.nd.elemwise_sub(x, y).asnumpy().tolist() == mx.nd._internal._minus_scalar(x).asnumpy().tolist()
    for name in ("negative", "sign", "relu"):
        assert getattr(mx.nd, name)(x).asnumpy().tolist() == [True, False]


def test_operators_that_accept_bools_compute_them():
    """No formula calls a function of NumPy that refuses bools, unless its operator does."""
    for name in FORMULAS:
        op = registry.get(name)
        count = len(op.input_names(params_of(name)))
        try:
            (out,) = op.infer_dtype(params_of(name), [np.dtype(bool)] + [None] * (count - 1), [None])[1]
        except mx.errors.DTypeError:
            continue
        if op.backward_of is None:
            computed(name, [np.arange(4) > k for k in range(count)], np.empty(4, out))


def test_exponent_of_bools_is_converted():
    """The exponent 2 of bools is True, that is 1, so the gradient is the output gradient."""
    op, g, x = registry.get("_backward_power_scalar"), np.array([True, True, False]), np.array([True, False, True])
    spec, params, out = TensorSpec(x.shape, x.dtype), {"scalar": 2.0, "is_int": True}, np.empty(3, bool)
    context = OpContext(np, workspace=garbage_bytes(op.workspace_bytes(params, [spec, spec], [spec])))
    op.forward(context, params, [g, x], [out])
    assert out.tolist() == g.tolist()


# -------------------------------------------------------------------------------------------------------- bad rows


_A = Param("a", p_float, 1.0)
_BY_A = {"choices": {"big": lambda p: p["a"] > 1.0}, "examples": ({}, {"a": 2.0})}


def registered() -> list[Any]:
    """Return all that a declaration changes: the operators, their aliases, and their names in ONNX."""
    return [dict(table) for table in (registry._OPS, registry._ALIASES, ONNX)]


def test_rows_are_refused_by_name():
    """An error at registration names the row; nothing is registered."""
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("unknown function 'exq'", {"formula": "exq"}),
        ("unknown function 'exq'", {"formula": lambda x: f.exq(x)}),
        ("unknown function 'exq'", {"formula": lambda p, x: f.exq(x) if p.big else x, "params": (_A,), **_BY_A}),
        ("a function of 3 values: g, x, y; no other is kept", {"formula": "exp", "grad": lambda g, x, y, z: z}),
        ("a function of 1 values: x", {"formula": 3}),
        ("its dtype rule says float32", {"formula": lambda x: cast(f.exp(x), np.dtype(np.float64))}),
        ("formula for integers, which", {"formula": "exp", "integer": lambda x: x, "infer_dtype": floats_only("")}),
        ("dtype rule for float32: ZeroDivisionError", {"formula": "exp", "infer_dtype": lambda p, ins, outs: 1 / 0}),
        ("expected the dtypes of all", {"formula": "exp", "infer_dtype": lambda p, ins, outs: (ins, [None])}),
        ("branches on a parameter", {"formula": lambda p, x: x if p.a > 0 else -x, "params": (_A,)}),
        ("branches on a parameter", {"formula": lambda p, x: {1.0: x}[p.a], "params": (_A,)}),
        ("branches on the elements", {"formula": lambda x: x if x else -x}),
        ("use `f.equal`", {"formula": lambda x: where(x == 2, 1, x)}),
        ("maximum recursion", {"formula": (endless := lambda x: endless(x))}),
        ("does not support ufuncs", {"formula": "exp", "grad": lambda g, x, y: g * np.exp(x)}),
        ("has no attribute 'exp'", {"formula": "exp", "grad": lambda g, x, y: g * x.exp()}),
        ("returns .None,., expected one expression", {"formula": "exp", "grad": lambda g, x, y: None}),
        ("expected one expression", {"formula": lambda x: (x, x)}),
        ("KeyError: 'b'", {"formula": lambda p, x: x * p.b, "params": (_A,)}),
        ("KeyError: 'b'", {"formula": "exp", "grad": lambda p, g, x, y: g * p.b, "params": (_A,)}),
        ("add an example", {"formula": lambda p, x: x, "params": (_A,), "choices": {"big": lambda p: p["a"] > 1.0}}),
        ("unknown parameter 'b'", {"formula": lambda p, x: x, "params": (_A,), "examples": ({"b": 1.0},)}),
        ("default of a: '1'", {"formula": lambda p, x: x * p.a, "params": (Param("a", p_float, "1"),)}),
        ("different identifiers", {"formula": lambda p, x: x * p.a, "params": (_A, _A)}),
        ("power.. takes from 2", {"formula": "power"}),
        ("integers='slopes'", {"formula": "exp", "integers": "slopes"}),
        ("compute='flaot'", {"formula": "exp", "compute": "flaot"}),
        ("kind='float32' of cast", {"formula": lambda x: cast(x, "float32") * 2.0}),
        ("reads x1", {"formula": "exp", "gradient": grad("elemwise_mul", "g0", "x1")}),
        ("gives elemwise_mul 1 inputs", {"formula": "exp", "gradient": grad("elemwise_mul", "g0")}),
        ("unknown operator 'nagative'", {"formula": "exp", "gradient": grad("nagative", "g0")}),
        ("either grad or gradient", {"formula": "exp", "gradient": grad("negative", "g0"), "grad": lambda g, x, y: g}),
    ]  # fmt: skip
    before = registered()
    for words, options in wrong:
        with pytest.raises(FormulaError, match=f"row 'wrong'.*{words}"):
            row("wrong", **{"doc": "", "onnx": "Wrong", **options})
        assert registered() == before, words


@pytest.mark.parametrize(
    ("name", "aliases", "words"),
    [
        ("sign", (), "operator 'sign' is registered already"),
        ("wrong", ("free", "sign"), "alias 'sign' of operator 'wrong' is registered already"),
        ("wrong", ("wrong",), "operator 'wrong' is registered already"),
        ("wrong", ("_backward_wrong",), "operator '_backward_wrong' is registered already"),
        ("wrong", "free", "expected identifiers, the aliases in a tuple"),
        ("not a name", (), "'not a name'.*expected identifiers"),
    ],
)
def test_rows_need_free_names(name: str, aliases: Any, words: str):
    """A row is registered with all of its names, or not at all."""
    before = registered()
    with pytest.raises(mx.errors.ParameterError, match=words):
        row(name, "exp", lambda g, x, y: g, aliases=aliases, onnx="Wrong", doc="")
    assert registered() == before


def test_gradients_keep_the_values_of_every_choice(monkeypatch: pytest.MonkeyPatch):
    """A gradient keeps the values that it reads with any choice and any dtype."""
    for table in ("_OPS", "_ALIASES"):
        monkeypatch.setattr(registry, table, dict(getattr(registry, table)))
    row("bent", lambda p, x: x * x, lambda p, g, x, y: g * (y if p.big else x), params=(_A,), doc="", **_BY_A)
    assert registry.get("_backward_bent").inputs == ("ograd", "data", "output")


_PRODUCT = (lambda g, a, b: g * b, lambda g, a, b: g * a)


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ("row '_wrong_scalar', float32: unknown function 'exq'", {"formula": lambda a, b: f.exq(a)}),
        ("operation 'wrong', .*unknown function", {"formula": lambda a, b: a if isinstance(b, Scalar) else f.exq(a)}),
        ("operation 'wrong': 1 gradients", {"grads": _PRODUCT[:1]}),
        ("operation 'wrong': 2 gradients, sign=1", {"sign": 1}),
        ("operation 'wrong', gradients, .*'exq'", {"grads": (_PRODUCT[0], lambda g, a, b: f.exq(g))}),
        ("operation 'wrong', gradients, .*None", {"grads": (_PRODUCT[0], lambda g, a, b: None)}),
        ("operation 'wrong', gradients, .*TypeError", {"grads": (_PRODUCT[0], lambda g, a: g)}),
        ("row '_rwrong_scalar', float32: .*'exq'", {"left": {"formula": lambda p, x: f.exq(x)}}),
        ("operation 'wrong', int32: .*'exq'", {"integer": lambda a, b: f.exq(a), "right": {"integer": None}}),
        ("no operator '_nothing_scalar'", {"mirrored": "nothing"}),
        ("mirrored or left", {"left": {}, "mirrored": "add"}),
    ],
)
def test_operations_are_refused_by_name(words: str, options: dict[str, Any]):
    """A wrong formula of any of its operators is an error when an operation is declared, and none is registered."""
    before = registered()
    with pytest.raises(FormulaError, match=words):
        binary.arithmetic("wrong", doc="", **{"formula": lambda a, b: a * b, "grads": _PRODUCT,
                                              "onnx": "Wrong", **options})  # fmt: skip
    assert registered() == before


@pytest.mark.parametrize("taken", ["_rmixed_scalar", "_RMixedScalar", "_Mixed", "broadcast_mixed", "_backward_mixed"])
def test_operations_need_free_names(taken: str, monkeypatch: pytest.MonkeyPatch):
    """If any name of an operation is registered already, none of its operators is registered."""
    for table in ("_OPS", "_ALIASES"):
        monkeypatch.setattr(registry, table, dict(getattr(registry, table)))
    registry.register(dataclasses.replace(registry.get("exp"), name=taken, aliases=()))
    before = registered()
    with pytest.raises(mx.errors.ParameterError, match=f"'{taken}'.*is registered already"):
        binary.arithmetic("mixed", lambda a, b: a * b, "", grads=_PRODUCT, left={}, onnx="Wrong")
    assert registered() == before


def test_an_operation_is_declared_once(monkeypatch: pytest.MonkeyPatch):
    """All operators of an operation, and their gradients, follow from one declaration; so does the name in errors."""
    for table in ("_OPS", "_ALIASES"):  # operators of the test disappear after it
        monkeypatch.setattr(registry, table, dict(getattr(registry, table)))
    sides = (lambda g, a, b: a * g * 2.0 - b * g, lambda g, a, b: -(a * g))
    binary.arithmetic("mixed", lambda a, b: a * a - a * b, "{0}² - {0} * {1}.", grads=sides, left={}, in_mxnet=False)
    x, y = np.linspace(0.2, 0.7, 6).reshape(2, 3), np.linspace(-1, 1, 3)
    for name, inputs, expected, doc in (
        ("_mixed", [x, x[::-1]], x * x - x * x[::-1], "lhs² - lhs * rhs. Shapes must be equal."),
        ("broadcast_mixed", [x, y], x * x - x * y, "lhs² - lhs * rhs. Shapes broadcast."),
        ("_mixed_scalar", [x], x * x - x * 1.5, "data² - data * scalar."),
        ("_rmixed_scalar", [x], 1.5 * 1.5 - 1.5 * x, "scalar² - scalar * data."),
    ):
        params = {"scalar": 1.5} if name.endswith("_scalar") else {}
        check_contract(name, inputs, params)
        check_gradient(name, inputs, params)
        result = getattr(mx.nd, name)(*[mx.nd.array(one, dtype="float64") for one in inputs], **params)
        np.testing.assert_allclose(result.asnumpy(), expected, rtol=1e-15)
        assert registry.get(name).doc == doc
    assert registry.get("_mixed").with_number == ("_mixed_scalar", "_rmixed_scalar")
    assert registry.get("_RMixedScalar") is registry.get("_rmixed_scalar")


def test_arrays_know_all_comparisons():
    """The masks that select elements are the results of all operations that are declared as comparisons."""
    names = {name for word, *_ in binary.COMPARISONS for name in (f"broadcast_{word}", f"_{word}_scalar")}
    assert {name for name in MASK_MAKERS if registry.get(name).inputs != ("data",) or "_scalar" in name} == names


def test_scalars_compute_in_the_order_of_python():
    """Parameters of a formula have Python's arithmetic, on both sides of every operator."""
    a = Scalar.of("a")
    values = {"a": 3.0}
    for made, plain in ((a + 1, 4.0), (1 + a, 4.0), (a - 1, 2.0), (1 - a, -2.0), (a * 2, 6.0), (2 * a, 6.0),
                        (a / 2, 1.5), (6 / a, 2.0), (-a, -3.0), (a**2, 9.0)):  # fmt: skip
        assert made.at(values) == plain
