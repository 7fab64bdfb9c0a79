"""Small calls of every differentiable tensor operator, for tests that apply to all of them.

A case is (operator, inputs, parameters). Values avoid kinks (ties, rounding steps, clip limits), which have no
derivative.
"""

import numpy as np


def uniform(*shape, low=-1.0, high=1.0, seed=0):
    """Return random float64 values of the given shape, at least 0.05 away from 0 if the range contains 0."""
    x = np.random.RandomState(seed + sum(shape)).uniform(low, high, shape)
    return x + np.where(np.abs(x) < 0.05, 0.1, 0.0) if low < 0 < high else x


def distinct(*shape, seed=0):
    """Return random float64 values in (-1, 1) of the given shape, without near ties."""
    size = int(np.prod(shape))
    return ((np.random.RandomState(seed).permutation(size) + 0.5) / size * 2 - 1).reshape(shape)


X = uniform(2, 3)
P = uniform(2, 3, low=0.3, high=2.0)
Q = uniform(2, 3, low=0.4, high=1.7, seed=9)
INDEX = np.array([0, 2, 1, 2])

CASES = []
for _op in ("exp", "expm1", "square", "abs", "negative", "reciprocal", "sin", "cos", "tan", "tanh", "sinh", "cosh",
            "arcsinh", "arctan", "arcsin", "arccos", "arctanh", "sigmoid", "relu", "softsign", "hard_sigmoid", "erf",
            "degrees", "radians", "cbrt", "rcbrt", "smooth_l1", "_copy", "Flatten", "_CrossDeviceCopy", "transpose",
            "_plus_scalar", "_minus_scalar", "_rminus_scalar"):  # fmt: skip
    CASES.append((_op, [X * 0.9], {}))
for _op in ("log", "log2", "log10", "log1p", "sqrt", "rsqrt"):
    CASES.append((_op, [P], {}))
CASES.append(("arccosh", [P + 1.0], {}))
CASES.append(("hard_sigmoid", [uniform(3, 4, low=-4.0, high=4.0)], {"alpha": 0.3, "beta": 0.4}))
CASES.append(("smooth_l1", [uniform(3, 4, low=-3.0, high=3.0)], {"scalar": 0.8}))
for _op in ("_mul_scalar", "_div_scalar", "_rdiv_scalar", "_power_scalar", "_rpower_scalar", "_mod_scalar",
            "_rmod_scalar", "_maximum_scalar", "_minimum_scalar", "_hypot_scalar"):  # fmt: skip
    CASES.append((_op, [P], {"scalar": 1.37}))
CASES.append(("_power_scalar", [X], {"scalar": 2.0}))
CASES.append(("clip", [X], {"a_min": -0.42, "a_max": 0.37}))

BINARY = ("add", "sub", "mul", "div", "mod", "power", "maximum", "minimum", "hypot")
for _short in BINARY:
    _name = f"elemwise_{_short}" if _short in ("add", "sub", "mul", "div") else f"_{_short}"
    CASES.append((_name, [P, Q], {}))
    for _a, _b in (((2, 3), (2, 3)), ((2, 3), (1, 3)), ((2, 1, 3), (4, 1)), ((1,), (2, 2)), ((3, 1), (1, 3)),
                   ((4, 1, 2, 1), (1, 3, 1, 2)), ((1, 1), (1, 1)), ((2, 3, 2), (1,))):  # fmt: skip
        CASES.append((f"broadcast_{_short}", [uniform(*_a, low=0.3, high=2.0), uniform(*_b, low=0.4, high=1.7)], {}))
CASES.append(("_grad_add", [X, P], {}))
CASES.append(("add_n", [X], {}))
CASES.append(("add_n", [X, P, Q], {}))

AXES = ({}, {"axis": 1}, {"axis": (0, 2)}, {"axis": (0, 2), "keepdims": True}, {"axis": -1, "exclude": True})
for _op in ("sum", "mean", "max", "min", "prod"):
    for _params in AXES:
        CASES.append((_op, [distinct(2, 3, 4) * (0.5 if _op == "prod" else 1.0) + (_op == "prod")], _params))
for _ord in (1, 2):
    for _params in AXES[:4]:
        CASES.append(("norm", [uniform(2, 3, 4)], {"ord": _ord, **_params}))

CASES += [
    ("Reshape", [X], {"shape": (3, -1)}),
    ("Flatten", [uniform(2, 3, 4)], {}),
    ("expand_dims", [X], {"axis": 1}),
    ("squeeze", [uniform(2, 1, 3)], {"axis": 1}),
    ("reshape_like", [X, np.zeros((3, 2), np.float32)], {}),
    ("_identity_with_attr_like_rhs", [X, P], {}),
    ("Cast", [X], {"dtype": "float64"}),
    ("transpose", [uniform(2, 3, 4)], {"axes": (1, 2, 0)}),
    ("SwapAxis", [uniform(2, 3, 4)], {"dim1": 0, "dim2": 2}),
    ("Concat", [uniform(2, 1, 3), uniform(2, 4, 3), uniform(2, 2, 3)], {}),
    ("Concat", [uniform(2, 3), uniform(4, 3)], {"dim": 0}),
    ("stack", [X, P, Q], {}),
    ("stack", [X, P], {"axis": -1}),
    ("SliceChannel", [uniform(2, 6, 3)], {"num_outputs": 3}),
    ("SliceChannel", [uniform(2, 3)], {"num_outputs": 2, "axis": 0, "squeeze_axis": True}),
    ("SliceChannel", [uniform(2, 3)], {"num_outputs": 1}),
    ("dot", [uniform(3), uniform(3)], {}),
    ("dot", [uniform(3), uniform(3, 4)], {}),
    ("dot", [uniform(2, 3), uniform(3)], {}),
    ("dot", [uniform(2, 3, 4), uniform(4, 5)], {}),
    ("dot", [uniform(4, 3, 2), uniform(4, 5)], {"transpose_a": True}),
    ("dot", [uniform(2, 3, 4), uniform(5, 6, 4)], {"transpose_b": True}),
    ("dot", [uniform(3, 2), uniform(4, 3)], {"transpose_a": True, "transpose_b": True}),
    ("broadcast_to", [uniform(2, 1, 3)], {"shape": (2, 4, 3)}),
    ("broadcast_axis", [uniform(2, 1, 1)], {"axis": (1, 2), "size": (4, 3)}),
    ("broadcast_like", [uniform(2, 1, 3), np.zeros((2, 4, 3), np.float32)], {}),
    ("repeat", [X], {"repeats": 2}),
    ("repeat", [X], {"repeats": 3, "axis": 0}),
    ("repeat", [X], {"repeats": 3, "axis": -1}),
    ("tile", [X], {"reps": (2, 1, 3)}),
    ("tile", [X], {"reps": (2,)}),
    ("slice", [uniform(4, 5)], {"begin": (1, 2), "end": (3, None)}),
    ("slice", [uniform(4, 5)], {"begin": (None, 4), "end": (None, 0), "step": (2, -2)}),
    ("slice_axis", [uniform(4, 5)], {"axis": -1, "begin": -3, "end": None}),
    ("slice_like", [uniform(4, 5), np.zeros((2, 3), np.float32)], {"axes": (1,)}),
    ("reverse", [uniform(2, 3, 4)], {"axis": (0, 2)}),
    ("take", [uniform(3, 2), INDEX], {}),
    ("take", [uniform(3, 20), INDEX], {}),
    ("take", [uniform(2, 3, 2), np.array([[0, 7], [-1, 2]])], {"axis": 1, "mode": "wrap"}),
    ("pick", [uniform(4, 3), INDEX], {}),
    ("pick", [uniform(2, 3, 4), np.zeros((2, 4), np.int32)], {"axis": 1}),
    ("pick", [uniform(4, 3), INDEX.reshape(4, 1)], {"keepdims": True}),
    ("where", [np.array([[1, 0, 2], [0, 0, 1]]), X, P], {}),
    ("where", [np.array([1, 0]), X, P], {}),
]
for _ta in (False, True):
    for _tb in (False, True):
        _pair = [uniform(2, 4, 3) if _ta else uniform(2, 3, 4), uniform(2, 5, 4) if _tb else uniform(2, 4, 5)]
        CASES.append(("batch_dot", _pair, {"transpose_a": _ta, "transpose_b": _tb}))
        CASES.append(("_linalg_gemm2", _pair, {"transpose_a": _ta, "transpose_b": _tb, "alpha": 0.5}))
for _mode in ("constant", "edge", "reflect"):
    CASES.append(("Pad", [uniform(2, 1, 4, 5)], {"mode": _mode, "pad_width": (0, 0, 0, 0, 1, 2, 3, 1)}))
CASES += [
    ("sort", [distinct(2, 5, 3)], {"axis": 1}),
    ("sort", [distinct(3, 4)], {"is_ascend": False}),
    ("sort", [distinct(3, 4)], {"axis": None}),
    ("topk", [distinct(4, 5)], {"k": 2, "ret_typ": "value"}),
    ("topk", [distinct(4, 5, 2)], {"k": 3, "ret_typ": "both", "axis": 0, "is_ascend": True, "dtype": "int64"}),
    ("topk", [distinct(4, 5)], {"k": 0, "ret_typ": "value", "axis": None}),
    ("amp_cast", [X], {"dtype": "float32"}),
    ("amp_multicast", [X, P, uniform(4)], {"num_outputs": 3}),
    ("cumsum", [X], {}),
    ("cumsum", [uniform(2, 3, 4)], {"axis": 1}),
    ("cumsum", [uniform(2, 3, 4)], {"axis": -1}),
    ("cumsum", [uniform(9, 2)], {"axis": 0}),
    ("cumsum", [uniform(2, 9)], {"axis": 1}),
    ("diag", [uniform(4)], {}),
    ("diag", [uniform(4)], {"k": -2}),
    ("diag", [uniform(3, 5)], {"k": 1}),
    ("diag", [uniform(2, 3, 4)], {"axis1": -1, "axis2": 0, "k": -1}),
    ("depth_to_space", [uniform(2, 8, 2, 3)], {"block_size": 2}),
    ("space_to_depth", [uniform(2, 2, 6, 3)], {"block_size": 3}),
    ("_split_v2", [uniform(2, 5)], {"indices": (0, 1, 3)}),
    ("_split_v2", [uniform(3, 4)], {"indices": (), "sections": 3, "axis": 0, "squeeze_axis": True}),
    ("_split_v2", [uniform(3, 4)], {"indices": (0,), "axis": -1}),
]
for _op in ("nansum", "nanprod"):
    for _params in AXES:
        CASES.append((_op, [distinct(2, 3, 4) + 1.5], _params))
CASES += [
    ("gather_nd", [uniform(3, 4), np.array([[0, 2, 2, -3], [1, -1, 3, 1]])], {}),
    ("_contrib_index_copy", [uniform(5, 3), np.array([3, 0]), uniform(2, 3)], {}),
    ("gather_nd", [uniform(3, 4, 2), np.array([[[1, 0], [1, 2]]], "float64")], {}),
    ("scatter_nd", [uniform(3), np.array([[0, 2, 1], [1, 0, 3]])], {"shape": (3, 4)}),
    ("scatter_nd", [uniform(2, 4, 2), np.array([[2, 0]], "float64")], {"shape": (3, 4, 2)}),
    ("batch_take", [uniform(4, 3), np.array([0, 2, 7, -3], "int32")], {}),
    *(("moments", [uniform(2, 3, 4)], {"axes": axes}) for axes in ((0,), (1,), (0, 2), (-1,), (0, 1, 2))),
    ("moments", [uniform(5, 3)], {"axes": (0,), "keepdims": True}),
    *((op, [uniform(3, 4, low=-0.9, high=2.5)], {}) for op in ("gamma", "gammaln")),
    ("digamma", [uniform(3, 4, low=0.3, high=5.5)], {}),
    ("khatri_rao", [uniform(2, 3), uniform(4, 3), uniform(1, 3)], {}),
    ("khatri_rao", [uniform(2, 3)], {}),
    ("digamma", [uniform(3, 4, low=-0.8, high=-0.2)], {}),
    ("fill_element_0index", [uniform(4, 3), uniform(4), np.array([0, 2, 7, -1])], {}),
    ("gamma", [uniform(3, 4, low=7.0, high=8.9)], {}),  # within the range of float16
    ("gammaln", [uniform(3, 4, low=9.5, high=99.0)], {}),
    ("erfinv", [uniform(3, 4, low=-0.8, high=0.8)], {}),
    ("erfinv", [uniform(3, 4, low=0.8, high=0.97)], {}),
]

NO_GRADIENT = [
    ("_ravel_multi_index", [np.array([[1, 5, 2], [2, 0, 3]])], {"shape": (6, 4)}),
    ("_unravel_index", [np.array([1.0, 5, 11, -3])], {"shape": (3, 2, 2)}),
    ("_eye", [], {"N": 3, "M": 5, "k": 1}),
    ("_eye", [], {"N": 3, "M": 2, "k": -7}),
    ("_linspace", [], {"start": 0.5, "stop": 7.0, "num": 9}),
    ("_linspace", [], {"start": 0.5, "stop": 7.0, "num": 9, "endpoint": False, "dtype": "int32"}),
    ("argsort", [distinct(3, 5)], {}),
    ("argsort", [distinct(3, 5, 2)], {"axis": 1, "is_ascend": False, "dtype": "int32"}),
    ("argsort", [distinct(3, 5)], {"axis": None, "dtype": "float64"}),
    ("topk", [distinct(3, 5)], {"k": 2}),
    ("topk", [distinct(3, 5)], {"k": 2, "ret_typ": "mask", "axis": 0}),
    ("argmax_channel", [uniform(3, 4)], {}),
    ("shape_array", [uniform(3, 4)], {}),
    ("size_array", [uniform(3, 4)], {}),
    ("_contrib_allclose", [X, P], {}),
    *(
        (op, [X * 3], {})
        for op in (
            "sign",
            "round",
            "rint",
            "floor",
            "ceil",
            "trunc",
            "fix",
            "logical_not",
            "_contrib_isnan",
            "_contrib_isinf",
            "_contrib_isfinite",
        )
    ),
    *((op, [X], {}) for op in ("zeros_like", "ones_like")),
    *((op, [uniform(3, 4)], {"axis": axis}) for op in ("argmax", "argmin") for axis in (None, 0, 1)),
    *(
        (f"_{short}", [X, P], {})
        for short in (
            "equal",
            "not_equal",
            "greater",
            "greater_equal",
            "lesser",
            "lesser_equal",
            "logical_and",
            "logical_or",
            "logical_xor",
        )
    ),
    ("one_hot", [INDEX], {"depth": 3}),
    ("_zeros", [], {"shape": (2, 3)}),
    ("_zeros_without_dtype", [], {"shape": (2, 3), "dtype": "float32"}),
    ("_ones", [], {"shape": (2, 3)}),
    ("_full", [], {"shape": (2, 3), "value": 2.5}),
    ("_arange", [], {"start": 3, "repeat": 2}),
    ("_contrib_arange_like", [X], {"start": 2.0, "step": -1.5}),
    ("_contrib_arange_like", [X], {"axis": 1, "repeat": 2}),
    ("_random_uniform", [], {"shape": (2, 3)}),
    ("_random_normal", [], {"shape": (2, 3), "dtype": "float16"}),
    ("_contrib_index_array", [X], {"axes": (1, 0)}),
    ("_greater_scalar", [X], {"scalar": 0.1}),
    ("broadcast_lesser", [X, uniform(1, 3)], {}),
]

UPDATES = [
    ("sgd_update", [X, P], {"lr": 0.1, "wd": 0.01}),
    ("sgd_mom_update", [X, P, Q], {"lr": 0.1, "wd": 0.01, "momentum": 0.9}),
    ("adam_update", [X, P, Q, P], {"lr": 0.1, "wd": 0.01, "clip_gradient": 0.5}),
]


def ident(case):
    """Return the name of a case in test output."""
    op, arrays, params = case
    shapes = ";".join("x".join(map(str, np.shape(x))) for x in arrays)
    return f"{op}[{shapes}]{params or ''}"
