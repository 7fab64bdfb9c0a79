"""ONNX export of elementwise operators and softmax.

Each rule adds the ONNX nodes of one operator to the graph of its :class:`.NodeWriter`. Importing the module registers
the rules; only one thread may build a graph.
"""

from __future__ import annotations

import math

import numpy as np

from weftplan.convert.kinds import ACTIVATIONS, LEAKY_RELU
from weftplan.convert.library import onnx_module
from weftplan.convert.onnx_out.writing import RULES, NodeWriter, rule
from weftplan.ops.elementwise import unary  # noqa: F401 - it fills the table of names
from weftplan.ops.elementwise.binary import COMPARISONS
from weftplan.ops.elementwise.rows import ONNX

_OTHERS = {**dict.fromkeys(("_copy", "BlockGrad", "MakeLoss", "make_loss"), "Identity"), "add_n": "Sum"}
_TRUTHS = {theirs for *_, theirs in COMPARISONS if theirs}
_NOT_EQUAL = ("broadcast_not_equal", "_not_equal", "_not_equal_scalar")


@rule(*ONNX, *_OTHERS, *_NOT_EQUAL)
def _elementwise(call: NodeWriter) -> None:
    assert call.node.op is not None
    name, inputs = call.node.op.name, [*call.inputs]
    theirs = {**ONNX, **_OTHERS}.get(name, "Equal")
    if "scalar" in call.params:
        inputs.insert(0 if name.startswith("_r") else 1, call.constant(call.params["scalar"], call.dtype()))
    if theirs not in _TRUTHS:
        call.end(theirs, inputs)
        return
    truth = call.emit(theirs, inputs)
    truth = call.emit("Not", [truth]) if name in _NOT_EQUAL else truth
    call.end("Cast", [truth], to=onnx_module().helper.np_dtype_to_tensor_dtype(call.dtype()))


def add_rows() -> None:
    """Register the rule of elementwise operators for rows that have been declared since the last call."""
    rule(*(ONNX.keys() - RULES.keys()))(_elementwise)


@rule("Dropout", "LinearRegressionOutput", "MAERegressionOutput")
def _first_axis(call: NodeWriter) -> None:
    call.end("Identity", call.inputs[:1])


@rule("LogisticRegressionOutput")
def _logistic(call: NodeWriter) -> None:
    call.end("Sigmoid", call.inputs[:1])


@rule("where")
def _where(call: NodeWriter) -> None:
    condition, shape = call.inputs[0], call.shape(1)
    if call.shape() != shape:  # one number for each row
        dims = [call.shape()[0], *[1] * (len(shape) - 1)]
        condition = call.emit("Reshape", [condition, call.constant(dims, np.int64)])
    call.end("Where", [call.emit("Cast", [condition], to=onnx_module().TensorProto.BOOL), *call.inputs[1:]])


@rule("square")
def _square(call: NodeWriter) -> None:
    call.end("Mul", [call.inputs[0], call.inputs[0]])


@rule("rsqrt")
def _rsqrt(call: NodeWriter) -> None:
    call.end("Reciprocal", [call.emit("Sqrt", call.inputs)])


@rule("Activation")
def _activation(call: NodeWriter) -> None:
    call.end({**ONNX, **ACTIVATIONS}[call.params["act_type"]], call.inputs)


@rule("LeakyReLU")
def _leaky(call: NodeWriter) -> None:
    kind, slope = call.params["act_type"], float(call.params["slope"])
    if kind in ("leaky", "rrelu"):
        alpha = slope if kind == "leaky" else (call.params["lower_bound"] + call.params["upper_bound"]) / 2
        call.end(LEAKY_RELU["leaky"], call.inputs[:1], alpha=float(alpha))
    elif kind == "elu":
        call.end(LEAKY_RELU[kind], call.inputs[:1], alpha=slope)
    elif kind == "selu":
        call.end(LEAKY_RELU[kind], call.inputs[:1])
    elif kind == "prelu":
        shape = call.shape(1)
        dims = (math.prod(shape), *(1,) * (len(call.shape()) - 2)) if len(shape) == 1 else shape
        slopes = call.emit("Reshape", [call.inputs[1], call.constant(dims, np.int64)])
        call.end(LEAKY_RELU[kind], [call.inputs[0], slopes])
    else:
        x, dtype = call.inputs[0], call.dtype()
        inner = call.emit("Erf", [call.emit("Mul", [x, call.constant(math.sqrt(0.5), dtype)])])
        half = call.emit("Mul", [x, call.constant(0.5, dtype)])
        call.end("Mul", [half, call.emit("Add", [inner, call.constant(1, dtype)])])


@rule("softmax", "log_softmax")
def _softmax(call: NodeWriter) -> None:
    assert call.node.op is not None
    if len(call.inputs) > 1:
        raise call.refuse("use_length has no counterpart")
    data, heat = call.inputs[0], call.params["temperature"]
    if heat not in (None, 1.0):
        data = call.emit("Div", [data, call.constant(heat, call.dtype())])
    call.end("Softmax" if call.node.op.name == "softmax" else "LogSoftmax", [data], axis=call.params["axis"])


@rule("SoftmaxOutput", "SoftmaxActivation")
def _softmax_output(call: NodeWriter) -> None:
    shape, p = call.shape(), call.params
    if p.get("multi_output") or p.get("mode") == "channel" or len(shape) == 2:
        call.end("Softmax", call.inputs[:1], axis=1)
    elif p.get("preserve_shape"):
        call.end("Softmax", call.inputs[:1], axis=-1)
    else:
        flat = call.emit("Softmax", [call.emit("Flatten", call.inputs[:1], axis=1)], axis=1)
        call.end("Reshape", [flat, call.constant(shape, np.int64)])


@rule("clip")
def _clip(call: NodeWriter) -> None:
    bounds = [call.constant(call.params[key], call.dtype()) for key in ("a_min", "a_max")]
    call.end("Clip", [call.inputs[0], *bounds])


@rule("Cast")
def _cast(call: NodeWriter) -> None:
    kind = onnx_module().helper.np_dtype_to_tensor_dtype(np.dtype(call.params["dtype"]))
    call.end("Cast", call.inputs, to=int(kind))


@rule("hard_sigmoid")
def _hard_sigmoid(call: NodeWriter) -> None:
    call.end("HardSigmoid", call.inputs, alpha=call.params["alpha"], beta=call.params["beta"])
