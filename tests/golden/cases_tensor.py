"""Golden cases of the tensor operators (pure data)."""

POSITIVE = {"shape": (2, 3), "low": 0.2, "high": 2.0}
WIDE = {"shape": (3, 4), "low": -3.0, "high": 3.0}
HALVES = {"value": [-2.5, -1.5, -0.7, -0.5, -0.2, 0.0, 0.3, 0.5, 0.8, 1.5, 2.5, 3.0]}
INTS = {"value": [-7, -2, -1, 1, 2, 9], "dtype": "int32"}

CASES = []


def _add(op, *inputs, **kwargs):
    CASES.append({"op": op, "inputs": list(inputs), **kwargs})


for _op in ("exp", "expm1", "square", "abs", "negative", "sin", "cos", "tanh", "sigmoid", "relu", "softsign", "erf",
            "cbrt", "sign", "sinh", "cosh", "arctan", "arcsinh", "degrees", "radians", "reciprocal", "hard_sigmoid",
            "tan"):  # fmt: skip
    _add(_op, WIDE)
for _op in ("log", "log1p", "log2", "log10", "sqrt", "rsqrt", "rcbrt"):
    _add(_op, POSITIVE)
for _op in ("arcsin", "arccos", "arctanh"):
    _add(_op, (2, 3))
_add("arccosh", {"shape": (2, 3), "low": 1.1, "high": 3.0})
for _op in ("round", "rint", "floor", "ceil", "trunc", "fix", "sign", "abs", "logical_not", "relu", "hard_sigmoid"):
    _add(_op, HALVES)
for _op in ("exp", "sqrt", "square", "sigmoid", "relu", "softsign", "abs", "negative"):
    _add(_op, {"value": [1, 2, 4, 9], "dtype": "int32"}, grad=False)

for _op in ("_plus_scalar", "_minus_scalar", "_rminus_scalar", "_mul_scalar", "_div_scalar", "_rdiv_scalar",
            "_power_scalar", "_rpower_scalar", "_mod_scalar", "_rmod_scalar", "_maximum_scalar", "_minimum_scalar",
            "_hypot_scalar", "_equal_scalar", "_not_equal_scalar", "_greater_scalar", "_greater_equal_scalar",
            "_lesser_scalar", "_lesser_equal_scalar", "_logical_and_scalar", "_logical_or_scalar",
            "_logical_xor_scalar"):  # fmt: skip
    _add(_op, POSITIVE, params={"scalar": 1.5})
    if _op not in ("_hypot_scalar",):
        _add(_op, INTS, params={"scalar": 2.5}, grad=False)
_add("_mod_scalar", WIDE, params={"scalar": -1.25})
_add("_rmod_scalar", {"value": [-2.0, 0.0, 0.75]}, params={"scalar": 5.0}, grad=False)
_add("_mod_scalar", WIDE, params={"scalar": 0.0})
_add("_minus_scalar", {"value": [1, 2, 250], "dtype": "uint8"}, params={"scalar": 10.0}, grad=False)
_add("smooth_l1", WIDE, params={"scalar": 1.3})
_add("smooth_l1", WIDE)
_add("smooth_l1", {"value": [-3, 0, 1, 2], "dtype": "int32"}, params={"scalar": 2.0}, grad=False)

_BINARY = ("add", "sub", "mul", "div", "mod", "power", "maximum", "minimum", "hypot")
_COMPARE = ("equal", "not_equal", "greater", "greater_equal", "lesser", "lesser_equal", "logical_and", "logical_or",
            "logical_xor")  # fmt: skip
for _short in _BINARY:
    _name = f"elemwise_{_short}" if _short in ("add", "sub", "mul", "div") else f"_{_short}"
    _add(_name, POSITIVE, POSITIVE)
    for _a, _b in (((2, 3), (2, 3)), ((2, 3), (1, 3)), ((2, 1, 3), (4, 1)), ((1,), (2, 2)), ((2, 1), (1, 3))):
        if len(_a) == len(_b):
            _add(
                f"broadcast_{_short}",
                {"shape": _a, "low": 0.2, "high": 2.0},
                {"shape": _b, "low": 0.2, "high": 2.0},
            )
for _short in _COMPARE:
    _add(f"_{_short}", {"value": [0.0, 1.0, 2.0, -1.0]}, {"value": [0.0, 2.0, 1.0, 0.0]}, grad=False)
    _add(f"broadcast_{_short}", {"value": [[0.0, 1.0]]}, {"value": [[0.0], [1.0], [2.0]]}, grad=False)
_add("_mod", {"value": [5.0, -5.0, 5.0, -5.0, 3.0]}, {"value": [3.0, 3.0, -3.0, -3.0, 0.0]}, grad=False)
_add("_maximum", {"value": [1.0, 2.0, 3.0]}, {"value": [1.0, 3.0, 2.0]})
_add("_minimum", {"value": [1.0, 2.0, 3.0]}, {"value": [1.0, 3.0, 2.0]})
_add("elemwise_div", INTS, {"value": [2, 2, 2, 2, 3, 4], "dtype": "int32"}, grad=False)
_add("add_n", (2, 3))
_add("add_n", (2, 3), (2, 3), (2, 3))

for _op in ("sum", "mean", "max", "min", "prod"):
    for _params in ({}, {"axis": 1}, {"axis": (0, 2)}, {"axis": (0, 2), "keepdims": True}, {"axis": -1},
                    {"axis": 1, "exclude": True}, {"axis": (), "keepdims": True}):  # fmt: skip
        _add(_op, (2, 3, 4), params=_params)
    _add(_op, INTS, grad=False)
for _ord in (1, 2):
    for _params in ({}, {"axis": 1}, {"axis": (0, 2), "keepdims": True}):
        _add("norm", (2, 3, 4), params={"ord": _ord, **_params})
for _op in ("argmax", "argmin"):
    for _params in ({}, {"axis": 0}, {"axis": 1}, {"axis": -1, "keepdims": True}):
        _add(_op, (3, 4), params=_params, grad=False)
_add("argmax", {"value": [1.0, 3.0, 3.0, 2.0]}, params={"axis": 0}, grad=False)

for _shape, _params in (
    ((2, 3, 4), {"shape": (4, 0, 2)}),
    ((2, 3, 4), {"shape": (2, 0, 0)}),
    ((2, 3, 4), {"shape": (6, 1, -1)}),
    ((2, 3, 4), {"shape": (3, -1, 8)}),
    ((2, 3, 4), {"shape": (-1,)}),
    ((2, 3, 4), {"shape": (-2,)}),
    ((2, 3, 4), {"shape": (2, -2)}),
    ((2, 3, 4), {"shape": (-2, 1, 1)}),
    ((2, 3, 4), {"shape": (-3, 4)}),
    ((2, 3, 4, 5), {"shape": (-3, -3)}),
    ((2, 3, 4), {"shape": (0, -3)}),
    ((2, 3, 4), {"shape": (-3, -2)}),
    ((2, 3, 4), {"shape": (-4, 1, 2, -2)}),
    ((2, 3, 4), {"shape": (2, -4, -1, 3, -2)}),
    ((10, 5, 4), {"shape": (-1, 0)}),
    ((10, 5, 4), {"shape": (-1, 0), "reverse": True}),
    ((2, 3, 4), {"shape": (0, -3), "reverse": True}),
    ((2, 3, 4), {"shape": (24,)}),
    ((2, 3, 4), {"target_shape": (0, 4)}),
    ((2, 3, 4), {"target_shape": (2, 0), "keep_highest": True}),
):
    _add("Reshape", _shape, params=_params)
for _shape in ((2, 3, 4), (3,), (2, 5)):
    _add("Flatten", _shape)
for _axis in (0, 1, 2, -1, -3):
    _add("expand_dims", (2, 3), params={"axis": _axis})
for _params in ({}, {"axis": 1}, {"axis": (1, 3)}, {"axis": -1}):
    _add("squeeze", (2, 1, 3, 1), params=_params)
_add("squeeze", (1, 1))
_add("reshape_like", (2, 6), (3, 4))
_add("reshape_like", (30, 7), (15, 2, 4), params={"lhs_begin": 0, "lhs_end": 1, "rhs_begin": 0, "rhs_end": 2})
_add("Cast", {"value": [1.7, -1.7, 300.5, 0.0]}, params={"dtype": "int32"}, grad=False)
_add("Cast", {"value": [1.7, 44.5, 300.5, 0.0]}, params={"dtype": "uint8"}, grad=False)
_add("Cast", {"value": [1.7, -1.7, 0.0]}, params={"dtype": "bool"}, grad=False)
_add("Cast", (2, 3), params={"dtype": "float64"})
_add("_copy", (2, 3))
_add("zeros_like", (2, 3))
_add("ones_like", (2, 3))
_add("_zeros", params={"shape": (2, 3)})
_add("_ones", params={"shape": (2, 3), "dtype": "int32"})
_add("_full", params={"shape": (2,), "value": 2.5})
for _params in ({"start": 5}, {"start": 0, "stop": 10, "step": 3}, {"start": 0, "stop": 2, "step": 0.5, "repeat": 2},
                {"start": 10, "stop": 0, "step": -4}, {"start": 1, "stop": 4, "dtype": "int32"}):  # fmt: skip
    _add("_arange", params=_params)

_add("Concat", (2, 1, 3), (2, 4, 3), (2, 2, 3))
_add("Concat", (2, 3), (4, 3), params={"dim": 0})
_add("Concat", (2, 3), (2, 1), params={"dim": -1})
_add("stack", (2, 3), (2, 3), (2, 3))
_add("stack", (2, 3), (2, 3), params={"axis": -1})
_add("SliceChannel", (2, 6, 3), params={"num_outputs": 3})
_add("SliceChannel", (2, 3), params={"num_outputs": 2, "axis": 0, "squeeze_axis": True})
_add("SliceChannel", (2, 4), params={"num_outputs": 1, "axis": -1})

for _params in ({}, {"axes": (1, 2, 0)}):
    _add("transpose", (2, 3, 4), params=_params)
_add("SwapAxis", (2, 3, 4), params={"dim1": 0, "dim2": 2})
_add("SwapAxis", (2, 3, 4), params={"dim1": -1, "dim2": 1})
for _a, _b, _params in (
    ((2, 3), (3, 4), {}),
    ((3, 2), (3, 4), {"transpose_a": True}),
    ((2, 3), (4, 3), {"transpose_b": True}),
    ((3, 2), (4, 3), {"transpose_a": True, "transpose_b": True}),
    ((3,), (3,), {}),
    ((3,), (3, 4), {}),
    ((2, 3), (3,), {}),
    ((2, 3, 4), (4, 5), {}),
    ((4, 3, 2), (4, 5), {"transpose_a": True}),
    ((2, 3, 4), (5, 6, 4), {"transpose_b": True}),
):
    _add("dot", _a, _b, params=_params)
for _ta in (False, True):
    for _tb in (False, True):
        _a, _b = ((2, 4, 3) if _ta else (2, 3, 4)), ((2, 5, 4) if _tb else (2, 4, 5))
        _add("batch_dot", _a, _b, params={"transpose_a": _ta, "transpose_b": _tb})
        _add("linalg_gemm2", _a, _b, params={"transpose_a": _ta, "transpose_b": _tb, "alpha": 0.5})
_add("linalg_gemm2", (3, 4), (4, 5))

_add("clip", WIDE, params={"a_min": -1.0, "a_max": 1.5})
_add("clip", {"value": [-2.0, -1.0, 0.0, 1.5, 2.0]}, params={"a_min": -1.0, "a_max": 1.5})
_add("clip", INTS, params={"a_min": -1.5, "a_max": 3.7}, grad=False)
_add("broadcast_to", (2, 1, 3), params={"shape": (2, 4, 3)})
_add("broadcast_to", (2, 1, 1), params={"shape": (0, 4, 3)})
_add("broadcast_axis", (2, 1, 1), params={"axis": (1, 2), "size": (4, 3)})
_add("broadcast_like", (2, 1, 3), (2, 4, 3))
_add("broadcast_like", (1, 2, 1), (4, 5), params={"lhs_axes": (0, 2), "rhs_axes": (1, 0)})
_add("repeat", (2, 3), params={"repeats": 2})
_add("repeat", (2, 3), params={"repeats": 3, "axis": 0})
_add("repeat", (2, 3), params={"repeats": 3, "axis": -1})
_add("tile", (2, 3), params={"reps": (2,)})
_add("tile", (2, 3), params={"reps": (2, 2)})
_add("tile", (2, 3), params={"reps": (2, 1, 3)})
for _mode in ("constant", "edge", "reflect"):
    _add("Pad", (2, 1, 4, 5), params={"mode": _mode, "pad_width": (0, 0, 0, 0, 1, 2, 3, 1), "constant_value": 0.5})
_add("slice", (4, 5), params={"begin": (1, 2), "end": (3, 5)})
_add("slice", (4, 5), params={"begin": (1,), "end": (None,)})
_add("slice", (4, 5), params={"begin": (None, 4), "end": (None, 0), "step": (2, -2)})
_add("slice", (4, 5), params={"begin": (-3, -4), "end": (-1, -1)})
_add("slice_axis", (4, 5), params={"axis": 1, "begin": 1, "end": 4})
_add("slice_axis", (4, 5), params={"axis": -1, "begin": -3, "end": "None"})
_add("slice_axis", (4, 5), params={"axis": 0, "begin": 0, "end": -1})
_add("slice_like", (4, 5), (2, 3))
_add("slice_like", (4, 5), (2, 3), params={"axes": (1,)})
_add("slice_like", (4, 5), (2, 3), params={"axes": (-1,)})
_add("reverse", (2, 3, 4), params={"axis": (1,)})
_add("reverse", (2, 3, 4), params={"axis": (0, 2)})
_INDEX = {"value": [[0, 3, 1], [7, -2, 3]]}
for _mode in ("clip", "wrap"):
    _add("take", (4, 2), _INDEX, params={"mode": _mode}, grad=(0,))
    _add("take", (2, 4, 3), _INDEX, params={"axis": 1, "mode": _mode}, grad=(0,))
    _add("pick", (3, 4), {"value": [1, 7, -1]}, params={"mode": _mode}, grad=(0,))
_add("take", (5, 20), {"value": [1, 1, 4, 1], "dtype": "int32"}, grad=(0,))
_add("pick", (3, 4), {"value": [[1], [3], [0]]}, params={"keepdims": True}, grad=(0,))
_add("pick", (3, 4), {"value": [1, 0, 2, 1]}, params={"axis": 0}, grad=(0,))
_add("pick", (2, 3, 4), {"value": [[1, 0, 2, 1], [0, 0, 2, 2]]}, params={"axis": 1}, grad=(0,))
_add("one_hot", {"value": [0, 2, -1, 5]}, params={"depth": 3}, grad=False)
_add(
    "one_hot",
    {"value": [[0, 2], [1, 1]], "dtype": "int32"},
    params={"depth": 3, "on_value": 8.5, "off_value": -1.5, "dtype": "int32"},
    grad=False,
)
_add("where", {"value": [[1, 0, 2], [0, 0, -1]]}, (2, 3), (2, 3), grad=(1, 2))
_add("where", {"value": [1, 0]}, (2, 3), (2, 3), grad=(1, 2))

for _params in ({"lr": 0.1}, {"lr": 0.1, "wd": 0.01, "rescale_grad": 0.5, "clip_gradient": 0.2}):
    _add("sgd_update", (3, 4), (3, 4), params=_params, imperative=True)
    _add("sgd_mom_update", (3, 4), (3, 4), (3, 4), params={"momentum": 0.9, **_params}, imperative=True)
    _add(
        "adam_update",
        (3, 4),
        (3, 4),
        (3, 4),
        {"shape": (3, 4), "low": 0.1, "high": 1.0},
        params={"beta1": 0.8, "beta2": 0.95, "epsilon": 1e-6, **_params},
        imperative=True,
    )
