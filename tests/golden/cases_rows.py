"""Elementwise operators at special values: zeros of both signs, infinities, NaN, and integers."""

import importlib.util
import pathlib

_spec = importlib.util.spec_from_file_location("golden_names", pathlib.Path(__file__).with_name("random_cases.py"))
_names = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_names)
BINARY, COMPARE, SCALAR, UNARY, WHOLE = (
    getattr(_names, name) for name in ["BINARY", "COMPARE", "SCALAR", "UNARY", "WHOLE"]
)
_INF, _NAN = float("inf"), float("nan")
SPECIAL = [0.0, -0.0, 0.3, -0.7, 1.0, -1.0, 2.5, -2.5, 0.5, -0.5, _INF, -_INF, _NAN, 30.0, -30.0]
INTEGERS = [3, 1, -1, 2, -2, 7, -7, 100]
"""Without 0, because a division of integers by 0 ends MXNet's process."""
LEFT, RIGHT = [a for a in SPECIAL for _ in SPECIAL], [b for _ in SPECIAL for b in SPECIAL]
WHOLE_PAIRS = [a for a in INTEGERS for _ in INTEGERS], [b for _ in INTEGERS for b in INTEGERS]


def _value(values, dtype="float32"):
    return {"value": values, "dtype": dtype}


def _without(name):
    """Return the special values at which an operator has MXNet's results."""
    # MXNet's sign of NaN is 0, and its gamma and the gradient of rsqrt have the sign of a zero.
    refused = {"abs": "nan", "sign": "nan", "gamma": "-0.0", "rsqrt": "-0.0", "Activation relu": "nan",
               "Activation softsign": "inf -inf"}  # fmt: skip
    return [value for value in SPECIAL if str(value) not in refused.get(name, "").split()]


CASES = [{"op": name, "inputs": [_value(_without(name))]} for name in UNARY]
CASES += [{"op": name, "inputs": [_value(INTEGERS, "int32")], "grad": False} for name in WHOLE]
CASES += [
    {"op": name, "params": {"scalar": scalar}, "inputs": [_value(SPECIAL)]}
    for name in SCALAR
    for scalar in (2.0, -1.5, 0.0)
]
CASES += [
    {"op": name, "params": {"scalar": scalar}, "inputs": [_value(INTEGERS, "int32")], "grad": False}
    for name in SCALAR
    if name not in ("smooth_l1", "_hypot_scalar")
    for scalar in (2.0, -3.0)
]
for _name in BINARY + COMPARE:
    CASES += [{"op": f"broadcast_{_name}", "inputs": [_value(LEFT), _value(RIGHT)], "grad": _name in BINARY}]
    if _name != "hypot":
        CASES += [
            {"op": f"broadcast_{_name}", "inputs": [_value(values, "int32") for values in WHOLE_PAIRS], "grad": False}
        ]
CASES += [
    {"op": "Activation", "params": {"act_type": kind}, "inputs": [_value(_without(f"Activation {kind}"))]}
    for kind in ("relu", "sigmoid", "softrelu", "softsign", "tanh")
]
# MXNet's gradient of selu is wrong below 0: lambda * (alpha + y) for y = lambda * alpha * (exp(x) - 1).
CASES += [
    {"op": "LeakyReLU", "params": {"act_type": kind}, "inputs": [_value(SPECIAL)], "grad": kind != "selu"}
    for kind in ("leaky", "elu", "selu", "gelu")
]
CASES += [
    {"op": "clip", "params": {"a_min": -0.6, "a_max": 0.6}, "inputs": [_value(SPECIAL)]},
    {"op": "clip", "params": {"a_min": -2, "a_max": 5}, "inputs": [_value(INTEGERS, "int32")], "grad": False},
    {"op": "hard_sigmoid", "inputs": [_value(SPECIAL)]},
    {"op": "_contrib_quadratic", "params": {"a": 1.5, "b": -2.0, "c": 0.25}, "inputs": [_value(SPECIAL)]},
]
_STEP = {"lr": 0.1, "eta": 0.3, "wd": 0.01, "clip_gradient": 0.4}
_STATES = [(3, 4), {"shape": (3, 4), "low": 0.1, "high": 1.0}]
# MXNet's step in float32 also changes the gradient, and it writes no result if the factor is 0 or not finite.
_HALF = {"shape": (3, 4), "dtype": "float16"}
CASES += [
    {"op": "_mp_adamw_update", "imperative": True, "params": _STEP, "rtol": 2e-3, "atol": 2e-3,
     "inputs": [_HALF, _HALF, *_STATES, (3, 4), {"value": [0.5]}]},
]  # fmt: skip
