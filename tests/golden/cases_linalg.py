"""Golden cases of linear algebra on stacks of matrices (pure data)."""

from itertools import product

CASES = []


def _add(op, *shapes, low=-1.0, high=1.0, **more):
    for dtype in ("float64", "float32"):
        inputs = [s if isinstance(s, dict) else {"shape": s, "low": low, "high": high} for s in shapes]
        tolerance = {} if dtype == "float64" else {"rtol": 1e-4, "atol": 1e-4}  # LAPACK adds in another order
        CASES.append({"op": op, "inputs": [{**spec, "dtype": dtype} for spec in inputs], **tolerance, **more})
        if "name" in more:
            CASES[-1]["name"] = f"{op} {more['name']} {dtype}"


def _turned(shape, transpose):
    return (*shape[:-2], shape[-1], shape[-2]) if transpose else shape


# Diagonally dominant: well-conditioned, and positive definite when symmetric.
SPREAD = {"value": [[4.0, -0.3, 0.5], [0.7, 3.0, -0.2], [0.1, -0.6, 5.0]]}
PAIR = {"value": [SPREAD["value"], [[-2.0, 0.4, 0.3], [0.2, 1.5, -0.5], [0.6, 0.1, 2.5]]]}
SWAPPED = {
    "value": [[[0.0, 2.0, 1.0], [1.0, 0.5, -1.0], [3.0, 1.0, 0.5]], [[1.0, 2.0, 0.0], [4.0, 0.5, 1.0], [0, 3, 1]]]
}
SYMMETRIC = {"value": [[[4.0, 1.0, -0.5], [1.0, 3.0, 0.2], [-0.5, 0.2, 2.0]], [[1.0, 0, 0], [0, 2, 0.5], [0, 0.5, 3]]]}

for _a, _b in product((False, True), repeat=2):
    for _lead in ((), (2, 2)):
        _left, _right = _turned((*_lead, 3, 4), _a), _turned((*_lead, 4, 2), _b)
        _flags = {"transpose_a": _a, "transpose_b": _b, "alpha": 0.5}
        _add("linalg_gemm", _left, _right, (*_lead, 3, 2), params={**_flags, "beta": -2.0})
        _add("linalg_gemm2", _left, _right, params=_flags)
_add("linalg_gemm", (2, 3, 4), (4, 3, 2), (2, 3, 2), params={"axis": 0})
_add("linalg_gemm2", (3, 5, 2, 4), (4, 5, 2, 3), params={"axis": -4, "alpha": 3.0})
for _transpose in (False, True):
    _add("linalg_syrk", (3, 4), params={"transpose": _transpose, "alpha": -1.5})
    _add("linalg_syrk", (2, 2, 3), params={"transpose": _transpose})
for _transpose, _right, _lower in product((False, True), repeat=3):
    _flags = {"transpose": _transpose, "rightside": _right, "lower": _lower, "alpha": 1.5}
    _wide = (2, 4, 3) if _right else (2, 3, 4)
    for _op in ("linalg_trmm", "linalg_trsm"):
        _add(_op, PAIR, _wide, params=_flags)
        _add(_op, SPREAD, _wide[1:], params=_flags)
_add("linalg_potrf", SYMMETRIC)
_add("linalg_potrf", {"value": [[2.25]]})
_add("linalg_potri", PAIR)
_add("linalg_potri", SPREAD)
_add("linalg_sumlogdiag", {"value": [[[4.0, 1.0], [2.0, 3.0]], [[0.5, 0.0], [-1.0, 2.0]]]})
_add("linalg_sumlogdiag", SPREAD)
for _offset in (0, 1, -2):
    _add("linalg_extractdiag", (2, 4, 4), params={"offset": _offset})
    _add("linalg_makediag", (2, 3), params={"offset": _offset})
    for _lower in (True, False):
        _add("linalg_extracttrian", (2, 4, 4), params={"offset": _offset, "lower": _lower})
        _add("linalg_maketrian", (2, 6), params={"offset": _offset, "lower": _lower})
_add("linalg_makediag", (3,))
_add("linalg_extracttrian", (3, 3))
for _op in ("linalg_inverse", "linalg_det", "linalg_slogdet"):
    _add(_op, SPREAD)
    _add(_op, PAIR)
    _add(_op, SWAPPED, name="rows swapped")
for _op in ("linalg_det", "linalg_slogdet"):
    _add(_op, {"value": [[[1.0, 2.0], [2.0, 4.0]], [[1.0, 2.0], [3.0, 4.0]]]})
UPPER = {"value": [[[4.0, -0.3, 0.5], [0.0, 3.0, -0.2], [0.0, 0.0, 5.0]]]}
_add("linalg_potrf", SYMMETRIC, params={"lower": False})
_add("linalg_potrf", {"value": SPREAD["value"]}, params={"lower": False}, name="one triangle, upper")
_add("linalg_potrf", {"value": SPREAD["value"]}, params={"lower": True}, name="one triangle, lower")
_add("linalg_potri", UPPER, params={"lower": False})
_add("linalg_potri", PAIR, params={"lower": False})
for _shape in ((2, 3), (3, 3), (1, 1), (1, 4), (2, 3, 5)):
    _add("linalg_gelqf", _shape)
_add("linalg_gelqf", SPREAD, name="spread")
_add("_linalg_syevd", SYMMETRIC)
_add("_linalg_syevd", {"value": [[2.0]]})
_add("_linalg_syevd", {"value": [[1.0, 2.0], [2.0, -3.0]]})
