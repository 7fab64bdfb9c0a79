"""Golden cases of MXNet's NumPy interface (pure data).

Shapes without dimensions are tested in ``tests/ops/test_numpy_names.py``.
"""

CASES = []
POSITIVE = {"shape": (2, 3), "low": 0.2, "high": 2.0}
WIDE = {"shape": (3, 4), "low": -3.0, "high": 3.0}


def _add(op, *inputs, **more):
    CASES.append({"op": op, "inputs": list(inputs), **more})


for _op in ("exp", "square", "sin", "tanh", "negative", "absolute", "sign", "floor", "rint", "fix", "cbrt"):
    _add("_npi_" + _op, WIDE)
for _op in ("log", "sqrt", "reciprocal"):
    _add("_npi_" + _op, POSITIVE)
for _op in ("add", "subtract", "multiply", "true_divide", "mod", "power", "hypot", "maximum", "minimum"):
    _add("_npi_" + _op, POSITIVE, {**POSITIVE, "shape": (1, 3)})
for _op in ("add", "subtract", "rsubtract", "multiply", "true_divide", "rtrue_divide", "mod", "rmod", "power", "rpower",
            "maximum", "minimum", "hypot"):  # fmt: skip
    _add("_npi_" + _op + "_scalar", POSITIVE, params={"scalar": 1.5, "is_int": False})
for _op in ("equal", "not_equal", "greater", "greater_equal", "less", "less_equal"):
    _add("_npi_" + _op, {"value": [0.0, 1.0, 2.0]}, {"value": [0.0, 2.0, 1.0]}, grad=False)
    _add("_npi_" + _op + "_scalar", {"value": [0.0, 1.0, 2.0]}, params={"scalar": 1.0}, grad=False)
_add("_npi_logical_not", {"value": [0.0, 1.0, -2.0]}, grad=False)
_add("_npi_full_like", (2, 3), params={"fill_value": 2.5}, grad=False)
_add("_npi_where", {"value": [[1.0, 0.0], [0.0, 1.0]]}, (2, 2), (2, 2), grad=(1, 2))
for _op in ("_np_sum", "_np_prod", "_npi_mean", "_np_max", "_np_min"):
    for _params in ({"axis": 1}, {"axis": (0, 2), "keepdims": True}, {"axis": -1}):
        _add(_op, {"shape": (2, 3, 4), "distinct": True, "low": 0.5, "high": 1.5}, params=_params)
for _op in ("_npi_var", "_npi_std"):
    for _params in ({"axis": 1}, {"axis": (0, 2), "keepdims": True, "ddof": 1}):
        _add(_op, (2, 3, 4), params=_params, grad=False)  # MXNet gives them gradients of zeros
for _op in ("_npi_argmax", "_npi_argmin"):
    _add(_op, {"shape": (3, 4), "distinct": True}, params={"axis": 1}, grad=False)
_add("_np_transpose", (2, 3, 4))
_add("_np_transpose", (2, 3, 4), params={"axes": (1, 2, 0)})
_add("_np_squeeze", (2, 1, 3, 1), params={"axis": 1})
_add("_npi_expand_dims", (2, 3), params={"axis": 1})
for _axis in (0, 1, -1):
    _add("_npi_concatenate", (2, 3, 4), (2, 3, 4), params={"axis": _axis, "num_args": 2})
_add("_npi_stack", (2, 3), (2, 3), params={"axis": 1, "num_args": 2})
_add("_np_reshape", (2, 3, 4), params={"newshape": (4, -1)})
for _codes in ((-2, -1), (-5, 4), (-4,), (-6, 1, 2, -4), (-1, 3, -2)):
    _add("_npx_reshape", (2, 3, 4), params={"newshape": _codes})
_add("_np_dot", (2, 3), (3, 4))
_add("_np_copy", (2, 3))
_add("_npx_relu", WIDE)
_add("_npx_sigmoid", WIDE)
_add("_npi_swapaxes", (2, 3, 4), params={"dim1": 0, "dim2": 2})
_add("_npi_flip", (2, 3), params={"axis": (1,)})
