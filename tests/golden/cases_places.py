"""Golden cases of operators on coordinates, of moments, special functions and number grids."""

CASES = []


def _add(op, *inputs, **kwargs):
    CASES.append({"op": op, "inputs": list(inputs), **kwargs})


def _of(dtype, *shape):
    return {"shape": shape, "dtype": dtype}


# ------------------------------------------------------------------------------------------------ gather_nd, scatter_nd
PLACES = {"value": [[0.0, 2.0, 2.0, 1.0], [1.0, 0.0, 0.0, 2.0]]}
FRONT = {"value": [[1, 0, 1, 2, 1]], "dtype": "int32"}
GRID = {"value": [[[0, 1], [2, 0]], [[1, 2], [0, 1]]], "dtype": "int64"}
for _dtype in ("float32", "float64", "float16"):
    _add("gather_nd", _of(_dtype, 3, 4), {"value": [[0, 2, 2], [1, 1, 3]], "dtype": _dtype}, grad=(0,))
for _index in (PLACES, FRONT, GRID):
    _add("gather_nd", (3, 4, 2), _index, grad=(0,))
_add("gather_nd", (3, 4, 2), {"value": [[0], [1], [1]], "dtype": "int32"}, grad=(0,))
# Negative indices without gradient, which MXNet writes to other places than it read.
_add("gather_nd", (3, 4), {"value": [[0, -1, -3], [1, -2, -4]]}, grad=False)
_add("gather_nd", {"value": [[1, 2], [3, 4]], "dtype": "int32"}, {"value": [[0, 1, 1]], "dtype": "int32"}, grad=False)
_add("scatter_nd", (3,), {"value": [[0.0, 2.0, 1.0], [1.0, 0.0, 3.0]]}, params={"shape": (3, 4)}, grad=(0,))
_add("scatter_nd", (2, 4, 2), {"value": [[2, 0]], "dtype": "int32"}, params={"shape": (3, 4, 2)}, grad=(0,))
_add(
    "scatter_nd",
    _of("float64", 2, 2),
    {"value": [[[2, 0], [1, 1]], [[0, 1], [2, 3]]]},
    params={"shape": (3, 4)},
    grad=(0,),
)
# MXNet has no gradient of batch_take.
_add("batch_take", (4, 3), {"value": [0, 2, 7, -3], "dtype": "int32"}, grad=False)
_add("batch_take", _of("float16", 3, 2), {"value": [1, 0, 1], "dtype": "int32"}, grad=False)

for _dtype in ("float32", "int32", "int64"):
    _add("ravel_multi_index", {"value": [[1, 5, 2], [2, 0, 3]], "dtype": _dtype}, params={"shape": (6, 4)}, grad=False)
    _add("unravel_index", {"value": [1, 5, 11, 12, 0], "dtype": _dtype}, params={"shape": (3, 4)}, grad=False)
_add("ravel_multi_index", {"value": [[1, -5], [2, 0], [1, 1]]}, params={"shape": (-1, 4, 2)}, grad=False)
_add("unravel_index", {"value": [1, 5, 27, 100, -3]}, params={"shape": (-1, 4, 3)}, grad=False)

# ------------------------------------------------------------------------------------------------ moments
for _axes in ((0,), (1,), (0, 2), (-1,), (0, 1, 2)):
    _add("moments", (2, 3, 4), params={"axes": _axes})
_add("moments", (2, 3, 4), params={"axes": (0, 2), "keepdims": True})
_add("moments", _of("float64", 3, 5), params={"axes": (0,), "keepdims": True})

# ------------------------------------------------------------------------------------------------ special functions
WIDE = {"shape": (6, 5), "low": -5.0, "high": 8.0}
POLES = {
    "value": [0.0, -1.0, -2.0, 1.0, 2.0, 5.0, 40.0, -300.5, float("inf"), float("-inf"), float("nan"), 1e-20, 171.0]
}
for _op in ("gamma", "gammaln"):
    _add(_op, WIDE, rtol=3e-5)  # MXNet computes derivatives in float32
    _add(_op, {**WIDE, "dtype": "float64"})
    _add(_op, {"shape": (5, 6), "low": 0.1, "high": 3.0})
    _add(_op, POLES, grad=False)
    _add(_op, {"shape": (3, 4), "low": 0.5, "high": 4.0, "dtype": "float16"}, rtol=2e-3)
_add("gammaln", {"shape": (4, 3), "low": 100.0, "high": 1e6})
_add("erfinv", {"shape": (6, 5), "low": -0.999, "high": 0.999})
_add("erfinv", {"shape": (6, 5), "low": -0.99999, "high": 0.99999, "dtype": "float64"})
_add("erfinv", {"value": [0.0, -1.0, 1.0, 1.5, -2.0, 1e-9, 0.9999999, float("nan")]}, grad=False)
_add("erfinv", {"shape": (3, 4), "dtype": "float16"}, rtol=2e-3)

# ------------------------------------------------------------------------------------------------ grids of numbers
for _params in (
    {"N": 3},
    {"N": 3, "M": 5, "k": 1},
    {"N": 4, "M": 2, "k": -2},
):
    _add("_eye", params=_params)
_add("_eye", params={"N": 3, "M": 4, "k": 2, "dtype": "int32"})
for _params in (
    {"num": 5},
    {"num": 5, "endpoint": False},
    {"num": 1},
    {"num": 7, "dtype": "int32"},
    {"num": 4, "dtype": "float64"},
):
    _add("_linspace", params={"start": 0.5, "stop": 7.0, **_params})
