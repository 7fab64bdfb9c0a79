"""ONNX import of elementwise operators and softmax.

Each rule turns one ONNX node (a :class:`.OnnxCall`) into symbols and has no other effect. Importing the module
registers the rules; any thread may then call them.
"""

from __future__ import annotations

import math

import numpy as np

from weftplan.convert.kinds import ACTIVATIONS, LEAKY_RELU
from weftplan.convert.library import onnx_module
from weftplan.convert.onnx_in.reading import RULES, OnnxCall, rule
from weftplan.ops.core import registry
from weftplan.ops.elementwise import binary, unary  # noqa: F401 - they fill the table of names
from weftplan.ops.elementwise.rows import ONNX
from weftplan.symbol import Symbol

_OURS = {"Identity": "identity", "Not": "logical_not"}
"""The operator of each elementwise one of ONNX: of two arrays, the operator that broadcasts."""


def add_rows() -> None:
    """Register rules for rows that have been declared since the last call; operators of the package come first."""
    for ours in sorted(ONNX, key=registry.is_packaged, reverse=True):
        if not ours.startswith(("_", "elemwise_")):
            _OURS.setdefault(ONNX[ours], ours)
    rule(*(_OURS.keys() - RULES.keys()))(_elementwise)


def _elementwise(call: OnnxCall) -> Symbol:
    with_number = registry.get(_OURS[call.op]).with_number
    for array, name in enumerate(with_number):
        value = call.inputs[1 - array] if call.has(1 - array) else []
        if not isinstance(value, Symbol) and np.size(value) == 1:
            return call.make(name, call.symbol(array), scalar=float(np.reshape(value, -1)[0]))
    return call.make(_OURS[call.op], *[call.symbol(k) for k in range(2 if with_number else 1)])


@rule("Where")
def _where(call: OnnxCall) -> Symbol:
    parts = [call.symbol(k) for k in range(3)]
    shape = tuple(np.broadcast_shapes(*(call.shape(k) for k in range(3))))
    full = [
        part if call.shape(k) == shape else call.make("broadcast_to", part, shape=shape) for k, part in enumerate(parts)
    ]
    return call.make("where", *full)


@rule("Sum", "Max", "Min", "Mean")
def _several(call: OnnxCall) -> Symbol:
    """Convert the operators of any number of inputs."""
    parts = [call.symbol(k) for k in range(len(call.inputs))]
    name = _OURS.get(call.op, "broadcast_add")
    result = parts[0]
    for part in parts[1:]:
        result = call.make(name, result, part)
    return result / len(parts) if call.op == "Mean" else result


_ACTIVATIONS = {theirs: kind for kind, theirs in ACTIVATIONS.items()}
_LEAKY_RELU = {theirs: kind for kind, theirs in LEAKY_RELU.items() if kind != "prelu"}


@rule(*_ACTIVATIONS)
def _activation(call: OnnxCall) -> Symbol:
    return call.make("Activation", call.symbol(), act_type=_ACTIVATIONS[call.op])


@rule(*_LEAKY_RELU)
def _leaky(call: OnnxCall) -> Symbol:
    kind = _LEAKY_RELU[call.op]
    slope = call.get("alpha", 0.01 if kind == "leaky" else 1.0)
    return call.make("LeakyReLU", call.symbol(), act_type=kind, **({} if kind == "selu" else {"slope": slope}))


@rule("PRelu")
def _prelu(call: OnnxCall) -> Symbol:
    slope = call.constant(1)
    if np.size(slope) not in (1, np.shape(slope)[0] if np.ndim(slope) else 1):
        raise call.refuse(f"slopes of shape {np.shape(slope)} are not read, only one for each channel")
    return call.make("LeakyReLU", call.symbol(), call.as_parameter(1, np.reshape(slope, -1)), act_type="prelu")


@rule("HardSigmoid")
def _hard_sigmoid(call: OnnxCall) -> Symbol:
    return call.make("hard_sigmoid", call.symbol(), alpha=call.get("alpha", 0.2), beta=call.get("beta", 0.5))


@rule("Clip")
def _clip(call: OnnxCall) -> Symbol:
    bounds = []
    for k, key, default in ((1, "min", -math.inf), (2, "max", math.inf)):
        bounds.append(float(np.reshape(call.constant(k), -1)[0]) if call.has(k) else float(call.get(key, default)))
    return call.make("clip", call.symbol(), a_min=bounds[0], a_max=bounds[1])


@rule("Softmax", "LogSoftmax")
def _softmax(call: OnnxCall) -> Symbol:
    op = "softmax" if call.op == "Softmax" else "log_softmax"
    axis = call.get("axis", -1 if call.model.opset >= 13 else 1)
    shape = call.shape()
    if call.model.opset >= 13 or axis % len(shape) == len(shape) - 1:
        return call.make(op, call.symbol(), axis=axis)
    rows = math.prod(shape[: axis % len(shape)])
    flat = call.make(op, call.make("reshape", call.symbol(), shape=(rows, -1)), axis=-1)
    return call.make("reshape", flat, shape=shape)


@rule("Gelu")
def _gelu(call: OnnxCall) -> Symbol:
    """Convert the exact form, or the approximation by ``tanh``."""
    if call.get("approximate", "none") != "tanh":
        return call.make("LeakyReLU", call.symbol(), act_type="gelu")
    x = call.symbol()
    inner = call.make("tanh", (x + x * x * x * 0.044715) * math.sqrt(2.0 / math.pi))
    result: Symbol = x * (inner + 1.0) * 0.5
    return result


@rule("Mod")
def _mod(call: OnnxCall) -> Symbol:
    """Convert the remainder with the divisor's sign, or with ``fmod`` the dividend's."""
    left, right = call.symbol(), call.symbol(1)
    if not call.get("fmod", 0):
        return call.make("broadcast_mod", left, right)
    size = call.make("broadcast_mod", call.make("abs", left), call.make("abs", right))
    return call.make("broadcast_mul", size, call.make("sign", left))


@rule("Cast")
def _cast(call: OnnxCall) -> Symbol:
    kind = onnx_module().helper.tensor_dtype_to_np_dtype(call.get("to"))
    return call.make("Cast", call.symbol(), dtype="float32" if kind == np.float64 else np.dtype(kind).name)


@rule("Dropout")
def _dropout(call: OnnxCall) -> list[Symbol]:
    ratio = float(np.reshape(call.constant(1), -1)[0]) if call.has(1) else call.get("ratio", 0.5)
    result = call.make("Dropout", call.symbol(), p=ratio)
    return [result[0]]


add_rows()
