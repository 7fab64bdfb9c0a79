"""A symbol and its parameters as an ONNX model: one function per operator, all shapes fixed.

The graph is that of inference: dropout passes its input on, losses give their outputs. Shapes are inferred first, so an
operator whose ONNX counterpart wants sizes (Reshape, Split) gets numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from weftplan.errors import MXNetError, ShapeError, UnknownOperatorError, listed
from weftplan.ops.schema import Shape
from weftplan.symbol import Symbol, infer, topological_order
from weftplan.symbol.node import Entry, Node

OPSET = 17
Arrays = Mapping[str, Any]


def onnx_module() -> Any:
    """The package ``onnx``; raises MXNetError that says how to get it."""
    try:
        import onnx
    except ImportError as error:
        raise MXNetError("ONNX files need the package onnx: pip install 'weftplan[convert]'") from error
    return onnx


class Call:
    """One node on its way: what its function may ask and write."""

    def __init__(self, graph: _Graph, node: Node) -> None:
        self.graph = graph
        self.node = node
        self.params = node.params
        self.inputs = [graph.name(entry) for entry in node.inputs]
        self.outputs = [graph.name(Entry(node, k)) for k in range(node.num_outputs)]
        self.count = 0

    def shape(self, k: int = 0) -> Shape:
        """The shape of input ``k``."""
        return self.graph.shape(self.node.inputs[k])

    def out_shape(self, k: int = 0) -> Shape:
        """The shape of output ``k``."""
        return self.graph.shape(Entry(self.node, k))

    def dtype(self, k: int = 0) -> np.dtype[Any]:
        """The dtype of input ``k``."""
        return self.graph.dtype(self.node.inputs[k])

    def fresh(self) -> str:
        """A name for something between."""
        self.count += 1
        return f"{self.node.name}__{self.count}"

    def constant(self, values: Any, dtype: Any = None) -> str:
        """The name of a constant array."""
        name = self.fresh()
        self.graph.initializers[name] = np.asarray(values, dtype)
        return name

    def emit(self, op: str, inputs: Sequence[str], output: str | Sequence[str] | None = None, **attrs: Any) -> str:
        """An ONNX node; its (first) output. Without ``output`` a new name."""
        outputs = [output or self.fresh()] if output is None or isinstance(output, str) else list(output)
        self.graph.emit(op, inputs, outputs, f"{self.node.name}__{op}_{len(self.graph.nodes)}", attrs)
        return outputs[0]

    def end(self, op: str, inputs: Sequence[str], **attrs: Any) -> None:
        """An ONNX node whose output is the node's."""
        self.emit(op, inputs, self.outputs[0], **attrs)

    def refuse(self, why: str) -> MXNetError:
        """The error for what ONNX, or this table, cannot say."""
        assert self.node.op is not None
        return MXNetError(f"convert: operator {self.node.op.name} ({self.node.name!r}): {why}")


class _Graph:
    def __init__(self, symbol: Symbol, shapes: Mapping[str, Shape], dtypes: Mapping[str, Any]) -> None:
        self.all = topological_order(symbol.entries)
        self.rows = dict(zip(self.all, infer.entry_rows(self.all), strict=False))
        self.shapes = infer.infer_shapes(self.all, shapes)
        known = {node: np.dtype(dtypes.get(node.name, np.float32)) for node in self.all if node.op is None}
        self.dtypes = infer.infer_dtypes(self.all, known)
        self.nodes: list[Any] = []
        self.initializers: dict[str, Any] = {}
        self.taken = {node.name for node in self.all if node.op is None}

    def name(self, entry: Entry) -> str:
        node = entry.node
        if node.op is None:
            return node.name
        name = f"{node.name}_{node.op.output_names(node.params)[entry.index]}"
        return f"{name}_" if name in self.taken else name

    def shape(self, entry: Entry) -> Shape:
        shape: Shape | None = self.shapes[self.rows[entry.node] + entry.index]
        if shape is None or 0 in shape:
            raise ShapeError(f"convert: the shape of {self.name(entry)!r} is not known; give the shapes of all inputs")
        return shape

    def dtype(self, entry: Entry) -> np.dtype[Any]:
        dtype = self.dtypes[self.rows[entry.node] + entry.index]
        return np.dtype(np.float32 if dtype is None else dtype)

    def emit(self, op: str, inputs: Sequence[str], outputs: list[str], name: str, attrs: Mapping[str, Any]) -> None:
        onnx = onnx_module()
        self.nodes.append(onnx.helper.make_node(op, list(inputs), outputs, name=name, **attrs))


Rule = Callable[[Call], None]
RULES: dict[str, Rule] = {}


def export_model(symbol: Symbol, args: Arrays, aux: Arrays, shapes: Mapping[str, Shape], *, name: str = "model") -> Any:
    """The ONNX model (a ``ModelProto``) of a network for inputs of these shapes.

    Args:
        args, aux: parameters by name, NDArrays; what is neither here nor a label is an input.
        shapes: shapes of the inputs.

    Raises:
        UnknownOperatorError: operators that ONNX models cannot have; names all of them.
        ShapeError: shapes that are missing or do not fit.
        MXNetError: parameters of an operator that ONNX has no counterpart for; ``onnx`` is not installed.
    """
    onnx = onnx_module()
    nodes = topological_order(symbol.entries)
    lost: dict[str, list[str]] = {}
    for node in nodes:
        if node.op is not None and node.op.name not in RULES:
            lost.setdefault(node.op.name, []).append(node.name)
    if lost:
        lines = "; ".join(f"{op} ({len(names)}: {', '.join(names[:3])})" for op, names in lost.items())
        raise UnknownOperatorError(f"convert: no ONNX counterpart is known for {len(lost)} operator(s): {lines}")
    stored = {key: value.asnumpy() for table in (args, aux) for key, value in table.items()}
    known = {**{key: value.shape for key, value in stored.items()}, **shapes}
    graph = _Graph(symbol, known, {key: value.dtype for key, value in stored.items()})
    for node in nodes:
        if node.op is not None:
            RULES[node.op.name](Call(graph, node))
    used = {one for node in graph.nodes for one in node.input}
    variables = [node for node in nodes if node.op is None]
    inputs = [node for node in variables if node.name not in stored and node.name in used]
    unfed = [node.name for node in inputs if node.name not in shapes]
    if unfed:
        raise ShapeError(f"convert: {listed(unfed)} are neither parameters nor inputs with a shape")
    tables = {key: value for key, value in {**stored, **graph.initializers}.items() if key in used}

    def described(label: str, entry: Entry) -> Any:
        kind = onnx.helper.np_dtype_to_tensor_dtype(graph.dtype(entry))
        return onnx.helper.make_tensor_value_info(label, kind, list(graph.shape(entry)))

    heads = {graph.name(entry): entry for entry in symbol.entries}
    made = onnx.helper.make_graph(
        graph.nodes,
        name,
        [described(node.name, Entry(node)) for node in inputs],
        [described(label, entry) for label, entry in heads.items()],
        [onnx.numpy_helper.from_array(np.ascontiguousarray(value), key) for key, value in tables.items()],
    )
    opsets = [onnx.helper.make_opsetid("", OPSET)]
    model = onnx.helper.make_model(made, producer_name="weftplan", opset_imports=opsets, ir_version=8)
    onnx.checker.check_model(model)
    return model


# ------------------------------------------------------------------------------------------------------ the operators


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Decorator: this function writes these operators."""

    def note(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return note


def _plain(names: Mapping[str, str]) -> None:
    for ours, theirs in names.items():
        RULES[ours] = lambda call, theirs=theirs: call.end(theirs, call.inputs)  # type: ignore[misc]


_plain(
    {
        "relu": "Relu", "sigmoid": "Sigmoid", "tanh": "Tanh", "exp": "Exp", "log": "Log", "sqrt": "Sqrt", "abs": "Abs",
        "negative": "Neg", "floor": "Floor", "ceil": "Ceil", "sin": "Sin", "cos": "Cos", "tan": "Tan", "erf": "Erf",
        "arcsin": "Asin", "arccos": "Acos", "arctan": "Atan", "sinh": "Sinh", "cosh": "Cosh",
        "reciprocal": "Reciprocal", "softsign": "Softsign", "sign": "Sign", "_copy": "Identity",
        "BlockGrad": "Identity", "MakeLoss": "Identity",
        "make_loss": "Identity", "add_n": "Sum", "elemwise_add": "Add", "elemwise_sub": "Sub", "elemwise_mul": "Mul",
        "elemwise_div": "Div", "broadcast_add": "Add", "broadcast_sub": "Sub", "broadcast_mul": "Mul",
        "broadcast_div": "Div", "broadcast_power": "Pow", "_power": "Pow", "broadcast_maximum": "Max",
        "broadcast_minimum": "Min", "_maximum": "Max", "_minimum": "Min",
    }
)  # fmt: skip


@rule("Dropout", "LinearRegressionOutput", "MAERegressionOutput")
def _first(call: Call) -> None:
    call.end("Identity", call.inputs[:1])


@rule("LogisticRegressionOutput")
def _logistic(call: Call) -> None:
    call.end("Sigmoid", call.inputs[:1])


_SCALARS = {
    "plus": "Add",
    "minus": "Sub",
    "mul": "Mul",
    "div": "Div",
    "power": "Pow",
    "maximum": "Max",
    "minimum": "Min",
}


@rule(*(f"_{side}{word}_scalar" for word in _SCALARS for side in ("", "r")))
def _scalar(call: Call) -> None:
    assert call.node.op is not None
    word = call.node.op.name.removeprefix("_").removesuffix("_scalar")
    number = call.constant(call.params["scalar"], call.dtype())
    pair = [call.inputs[0], number] if word in _SCALARS else [number, call.inputs[0]]
    call.end(_SCALARS[word if word in _SCALARS else word[1:]], pair)


for _word in ("plus", "mul", "maximum", "minimum"):
    RULES.pop(f"_r{_word}_scalar")


@rule("square")
def _square(call: Call) -> None:
    call.end("Mul", [call.inputs[0], call.inputs[0]])


@rule("rsqrt")
def _rsqrt(call: Call) -> None:
    call.end("Reciprocal", [call.emit("Sqrt", call.inputs)])


@rule("Activation")
def _activation(call: Call) -> None:
    names = {"relu": "Relu", "sigmoid": "Sigmoid", "tanh": "Tanh", "softrelu": "Softplus", "softsign": "Softsign"}
    call.end(names[call.params["act_type"]], call.inputs)


@rule("LeakyReLU")
def _leaky(call: Call) -> None:
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


def _window(call: Call, axes: int) -> dict[str, Any]:
    """Attributes of a window: missing ones are those of a step of 1."""
    pad = list(call.params["pad"] or (0,) * axes)
    return {"strides": list(call.params["stride"] or (1,) * axes), "pads": pad + pad}


@rule("Convolution")
def _convolution(call: Call) -> None:
    kernel = call.params["kernel"]
    dilate = list(call.params["dilate"] or (1,) * len(kernel))
    facts = {"kernel_shape": list(kernel), "dilations": dilate, "group": call.params["num_group"]}
    call.end("Conv", call.inputs, **_window(call, len(kernel)), **facts)


@rule("Deconvolution")
def _deconvolution(call: Call) -> None:
    if call.params["target_shape"]:
        raise call.refuse("target_shape has no counterpart; write pad and adj")
    kernel = call.params["kernel"]
    axes = len(kernel)
    facts = {
        "kernel_shape": list(kernel),
        "dilations": list(call.params["dilate"] or (1,) * axes),
        "group": call.params["num_group"],
        "output_padding": list(call.params["adj"] or (0,) * axes),
    }
    call.end("ConvTranspose", call.inputs, **_window(call, axes), **facts)


@rule("BatchNorm")
def _batch_norm(call: Call) -> None:
    if call.params["axis"] % len(call.shape()) != 1:
        raise call.refuse("the channels must be axis 1")
    inputs = list(call.inputs)
    if call.params["fix_gamma"]:
        inputs[1] = call.constant(np.ones(call.shape(1)), call.dtype(1))
    call.emit(
        "BatchNormalization", inputs, call.outputs[0], epsilon=call.params["eps"], momentum=call.params["momentum"]
    )


@rule("InstanceNorm")
def _instance_norm(call: Call) -> None:
    call.end("InstanceNormalization", call.inputs, epsilon=call.params["eps"])


@rule("LayerNorm")
def _layer_norm(call: Call) -> None:
    if call.params["axis"] % len(call.shape()) != len(call.shape()) - 1:
        raise call.refuse("the axis must be the last one")
    call.end("LayerNormalization", call.inputs, epsilon=call.params["eps"], axis=-1)


@rule("LRN")
def _lrn(call: Call) -> None:
    facts = {"alpha": call.params["alpha"], "beta": call.params["beta"], "bias": call.params["knorm"]}
    call.emit("LRN", call.inputs, call.outputs[0], size=call.params["nsize"], **facts)


@rule("FullyConnected")
def _fully_connected(call: Call) -> None:
    data = call.inputs[0]
    if call.params["flatten"] or len(call.shape()) == 2:
        flat = data if len(call.shape()) == 2 else call.emit("Flatten", [data], axis=1)
        call.end("Gemm", [flat, *call.inputs[1:]], transB=1)
        return
    product = call.emit("MatMul", [data, call.emit("Transpose", [call.inputs[1]], perm=[1, 0])],
                        call.outputs[0] if call.params["no_bias"] else None)  # fmt: skip
    if not call.params["no_bias"]:
        call.end("Add", [product, call.inputs[2]])


@rule("Pooling")
def _pooling(call: Call) -> None:
    p, kind, axes = call.params, call.params["pool_type"], len(call.shape()) - 2
    if p["pooling_convention"] == "same":
        raise call.refuse("pooling_convention=same has no counterpart")
    names = {"max": "MaxPool", "avg": "AveragePool", "sum": "AveragePool", "lp": "LpPool"}
    facts: dict[str, Any] = {"p": p["p_value"] or 2} if kind == "lp" else {}
    sizes = call.shape()[2:] if p["global_pool"] else p["kernel"]
    pooled = call.fresh() if kind == "sum" else call.outputs[0]
    if p["global_pool"]:
        call.emit("Global" + names[kind], call.inputs, pooled, **facts)
    else:
        if p["pooling_convention"] == "full" and kind != "lp":
            facts["ceil_mode"] = 1
        elif p["pooling_convention"] == "full":
            raise call.refuse("pooling_convention=full of lp pooling has no counterpart")
        if kind in ("avg", "sum"):
            facts["count_include_pad"] = int(kind == "sum" or p["count_include_pad"] is not False)
        call.emit(names[kind], call.inputs, pooled, kernel_shape=list(sizes), **_window(call, axes), **facts)
    if kind == "sum":
        call.end("Mul", [pooled, call.constant(math.prod(sizes), call.dtype())])


@rule("softmax", "log_softmax")
def _softmax(call: Call) -> None:
    assert call.node.op is not None
    if len(call.inputs) > 1:
        raise call.refuse("use_length has no counterpart")
    data, heat = call.inputs[0], call.params["temperature"]
    if heat not in (None, 1.0):
        data = call.emit("Div", [data, call.constant(heat, call.dtype())])
    call.end("Softmax" if call.node.op.name == "softmax" else "LogSoftmax", [data], axis=call.params["axis"])


@rule("SoftmaxOutput", "SoftmaxActivation")
def _softmax_output(call: Call) -> None:
    shape, p = call.shape(), call.params
    if p.get("multi_output") or p.get("mode") == "channel" or len(shape) == 2:
        call.end("Softmax", call.inputs[:1], axis=1)
    elif p.get("preserve_shape"):
        call.end("Softmax", call.inputs[:1], axis=-1)
    else:
        flat = call.emit("Softmax", [call.emit("Flatten", call.inputs[:1], axis=1)], axis=1)
        call.end("Reshape", [flat, call.constant(shape, np.int64)])


@rule("Reshape", "Flatten", "expand_dims", "squeeze", "reshape_like")
def _reshape(call: Call) -> None:
    call.end("Reshape", [call.inputs[0], call.constant(call.out_shape(), np.int64)])


@rule("transpose")
def _transpose(call: Call) -> None:
    call.end("Transpose", call.inputs, perm=list(call.params["axes"] or range(len(call.shape()) - 1, -1, -1)))


@rule("SwapAxis")
def _swap(call: Call) -> None:
    perm = list(range(len(call.shape())))
    a, b = call.params["dim1"], call.params["dim2"]
    perm[a], perm[b] = perm[b], perm[a]
    call.end("Transpose", call.inputs, perm=perm)


@rule("Concat")
def _concat(call: Call) -> None:
    call.end("Concat", call.inputs, axis=call.params["dim"])


@rule("stack")
def _stack(call: Call) -> None:
    axis = call.params["axis"] % len(call.out_shape())
    dims = list(call.out_shape())
    dims[axis] = 1
    parts = [call.emit("Reshape", [one, call.constant(dims, np.int64)]) for one in call.inputs]
    call.end("Concat", parts, axis=axis)


@rule("SliceChannel")
def _split(call: Call) -> None:
    axis, count = call.params["axis"] % len(call.shape()), call.params["num_outputs"]
    sizes = call.constant([call.shape()[axis] // count] * count, np.int64)
    if not call.params["squeeze_axis"]:
        call.emit("Split", [call.inputs[0], sizes], call.outputs, axis=axis)
        return
    parts = [call.fresh() for _ in call.outputs]
    call.emit("Split", [call.inputs[0], sizes], parts, axis=axis)
    for k, (part, output) in enumerate(zip(parts, call.outputs, strict=True)):
        call.emit("Reshape", [part, call.constant(call.out_shape(k), np.int64)], output)


@rule("slice_axis")
def _slice_axis(call: Call) -> None:
    axis = call.params["axis"] % len(call.shape())
    end = call.shape()[axis] if call.params["end"] is None else call.params["end"]
    numbers = [call.constant([number], np.int64) for number in (call.params["begin"], end, axis)]
    call.end("Slice", [call.inputs[0], *numbers])


@rule("clip")
def _clip(call: Call) -> None:
    bounds = [call.constant(call.params[key], call.dtype()) for key in ("a_min", "a_max")]
    call.end("Clip", [call.inputs[0], *bounds])


@rule("Pad")
def _pad(call: Call) -> None:
    width = call.params["pad_width"]
    pads = call.constant([*width[::2], *width[1::2]], np.int64)
    inputs = [call.inputs[0], pads]
    if call.params["mode"] == "constant":
        inputs.append(call.constant(call.params["constant_value"], call.dtype()))
    call.end("Pad", inputs, mode=call.params["mode"])


_REDUCE = {"sum": "ReduceSum", "mean": "ReduceMean", "max": "ReduceMax", "min": "ReduceMin", "prod": "ReduceProd"}


@rule(*_REDUCE)
def _reduce(call: Call) -> None:
    assert call.node.op is not None
    rank, given = len(call.shape()), call.params["axis"]
    axes = [given] if isinstance(given, int) else list(given or ())
    axes = sorted(axis % rank for axis in axes)
    if call.params["exclude"]:
        axes = [axis for axis in range(rank) if axis not in axes]
    axes = axes or list(range(rank))
    op, keep = _REDUCE[call.node.op.name], int(call.params["keepdims"])
    # What reduces everything has one element of one dimension here.
    target = call.outputs[0] if keep or len(axes) < rank else None
    if op == "ReduceSum":
        made = call.emit(op, [call.inputs[0], call.constant(axes, np.int64)], target, keepdims=keep)
    else:
        made = call.emit(op, call.inputs, target, keepdims=keep, axes=axes)
    if target is None:
        call.end("Reshape", [made, call.constant(call.out_shape(), np.int64)])


@rule("Embedding")
def _embedding(call: Call) -> None:
    call.end("Gather", [call.inputs[1], call.emit("Cast", [call.inputs[0]], to=7)], axis=0)


@rule("take")
def _take(call: Call) -> None:
    call.end("Gather", [call.inputs[0], call.emit("Cast", [call.inputs[1]], to=7)], axis=call.params["axis"])


@rule("Cast")
def _cast(call: Call) -> None:
    kind = onnx_module().helper.np_dtype_to_tensor_dtype(np.dtype(call.params["dtype"]))
    call.end("Cast", call.inputs, to=int(kind))


@rule("UpSampling")
def _upsampling(call: Call) -> None:
    if call.params["sample_type"] != "nearest" or len(call.inputs) != 1:
        raise call.refuse("only nearest neighbours of one input have a counterpart")
    scale = call.params["scale"]
    scales = call.constant([1, 1, scale, scale], np.float32)
    facts = {"mode": "nearest", "nearest_mode": "floor", "coordinate_transformation_mode": "asymmetric"}
    call.end("Resize", [call.inputs[0], "", scales], **facts)


@rule("dot", "batch_dot")
def _dot(call: Call) -> None:
    left, right = call.inputs
    for k, flag in enumerate(("transpose_a", "transpose_b")):
        rank = len(call.shape(k))
        if call.node.op is not None and call.node.op.name == "dot" and rank > 2:
            raise call.refuse("more than two dimensions have no counterpart")
        if call.params[flag] and rank > 1:
            perm = [*range(rank - 2), rank - 1, rank - 2]
            swapped = call.emit("Transpose", [call.inputs[k]], perm=perm)
            left, right = (swapped, right) if k == 0 else (left, swapped)
    made = call.emit("MatMul", [left, right])
    call.end("Reshape", [made, call.constant(call.out_shape(), np.int64)])


@rule("L2Normalization")
def _l2(call: Call) -> None:
    rank = len(call.shape())
    axes = {"instance": list(range(1, rank)), "channel": [1], "spatial": list(range(2, rank))}[call.params["mode"]]
    squares = call.emit(
        "ReduceSum", [call.emit("Mul", [call.inputs[0]] * 2), call.constant(axes, np.int64)], keepdims=1
    )
    norm = call.emit("Sqrt", [call.emit("Add", [squares, call.constant(call.params["eps"], call.dtype())])])
    call.end("Div", [call.inputs[0], norm])


@rule("hard_sigmoid")
def _hard_sigmoid(call: Call) -> None:
    call.end("HardSigmoid", call.inputs, alpha=call.params["alpha"], beta=call.params["beta"])
