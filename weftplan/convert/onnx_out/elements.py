"""ONNX export of elementwise operators and softmax.

Each rule adds the ONNX nodes of one operator to the graph of its :class:`.NodeWriter`. Importing the module registers
the rules; only one thread may build a graph.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from weftplan.convert.library import onnx_module
from weftplan.convert.onnx_out.writing import RULES, NodeWriter, rule
from weftplan.ops.elementwise import binary, scalar, unary  # noqa: F401 - they fill the tables of names
from weftplan.ops.elementwise.rows import ONNX, ONNX_BINARY, ONNX_SCALAR


def _plain(names: Mapping[str, str]) -> None:
    for ours, theirs in names.items():
        RULES[ours] = lambda call, theirs=theirs: call.end(theirs, call.inputs)  # type: ignore[misc]


_plain({**ONNX, **ONNX_BINARY, **dict.fromkeys(("_copy", "BlockGrad", "MakeLoss", "make_loss"), "Identity"),
        "add_n": "Sum"})  # fmt: skip


@rule("Dropout", "LinearRegressionOutput", "MAERegressionOutput")
def _first_axis(call: NodeWriter) -> None:
    call.end("Identity", call.inputs[:1])


@rule("LogisticRegressionOutput")
def _logistic(call: NodeWriter) -> None:
    call.end("Sigmoid", call.inputs[:1])


@rule(*ONNX_SCALAR)
def _scalar(call: NodeWriter) -> None:
    assert call.node.op is not None
    theirs, number_is_left = ONNX_SCALAR[call.node.op.name]
    number = call.constant(call.params["scalar"], call.dtype())
    call.end(theirs, [number, call.inputs[0]] if number_is_left else [call.inputs[0], number])


_COMPARISONS = {
    "equal": "Equal",
    "greater": "Greater",
    "greater_equal": "GreaterOrEqual",
    "lesser": "Less",
    "lesser_equal": "LessOrEqual",
}


@rule(*(form.format(word) for word in (*_COMPARISONS, "not_equal") for form in ("broadcast_{}", "_{}", "_{}_scalar")))
def _comparison(call: NodeWriter) -> None:
    assert call.node.op is not None
    word = call.node.op.name.removeprefix("broadcast").removeprefix("_").removesuffix("_scalar")
    number = [] if len(call.inputs) == 2 else [call.constant(call.params["scalar"], call.dtype())]
    truth = call.emit(_COMPARISONS.get(word, "Equal"), [*call.inputs, *number])
    truth = call.emit("Not", [truth]) if word == "not_equal" else truth
    call.end("Cast", [truth], to=onnx_module().helper.np_dtype_to_tensor_dtype(call.dtype()))


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
    names = {"relu": "Relu", "sigmoid": "Sigmoid", "tanh": "Tanh", "softrelu": "Softplus", "softsign": "Softsign"}
    call.end(names[call.params["act_type"]], call.inputs)


@rule("LeakyReLU")
def _leaky(call: NodeWriter) -> None:
    kind, slope = call.params["act_type"], float(call.params["slope"])
    if kind in ("leaky", "rrelu"):
        alpha = slope if kind == "leaky" else (call.params["lower_bound"] + call.params["upper_bound"]) / 2
        call.emit("LeakyRelu", call.inputs[:1], call.outputs[0], alpha=float(alpha))
    elif kind == "elu":
        call.end("Elu", call.inputs[:1], alpha=slope)
    elif kind == "selu":
        call.end("Selu", call.inputs[:1])
    elif kind == "prelu":
        shape = call.shape(1)
        dims = (math.prod(shape), *(1,) * (len(call.shape()) - 2)) if len(shape) == 1 else shape
        slopes = call.emit("Reshape", [call.inputs[1], call.constant(dims, np.int64)])
        call.end("PRelu", [call.inputs[0], slopes])
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
