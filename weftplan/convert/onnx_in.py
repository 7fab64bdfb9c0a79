"""An ONNX model as a symbol and its parameters: one function per operator of ONNX.

Initializers that layers use become parameters. What can be computed from constants is computed while reading: models
exported from other frameworks work out their shapes that way. Where an ONNX operator needs a shape that ours does not,
it is inferred from the inputs' shapes, which the file (or the caller) gives.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from weftplan import ndarray as nd
from weftplan import symbol as sym
from weftplan.convert.onnx_out import onnx_module
from weftplan.errors import FormatError, MXNetError, ShapeError, UnknownOperatorError
from weftplan.ndarray import NDArray
from weftplan.ops.rules import is_known
from weftplan.ops.schema import Shape
from weftplan.symbol import Symbol

MOST_ELEMENTS = 1 << 27
"""Most elements of an array that a file makes out of a few numbers."""
Params = dict[str, NDArray]
Value = Any
"""What an ONNX name stands for: a Symbol, or a NumPy array that is known while reading."""


class Model:
    """What is read so far."""

    def __init__(self, shapes: Mapping[str, Shape], opset: int, where: str) -> None:
        self.shapes: dict[str, Shape] = dict(shapes)
        self.opset = opset
        self.where = where
        self.values: dict[str, Value] = {"": None}
        self.args: dict[str, Any] = {}
        self.aux: dict[str, Any] = {}
        self.made: dict[tuple[int, str], Symbol] = {}

    def parameter(self, name: str, values: Any, *, state: bool = False) -> Symbol:
        """A variable that holds ``values``."""
        label, count = name, 1
        table = self.aux if state else self.args
        while label in self.args or label in self.aux or label in self.shapes:
            label, count = f"{name}_{count}", count + 1
        table[label] = np.ascontiguousarray(values)
        return sym.Variable(label, shape=np.shape(values), dtype=np.asarray(values).dtype)

    def shape(self, value: Value) -> Shape:
        """The shape of a value; raises ShapeError where it is not known."""
        if not isinstance(value, Symbol):
            return np.shape(value)
        known = {**self.shapes, **{key: np.shape(array) for key, array in self.args.items()}}
        names = set(value.list_arguments())
        _, outputs, _ = value.infer_shape_partial(**{key: shape for key, shape in known.items() if key in names})
        if not is_known(outputs[0]):
            raise ShapeError(f"{self.where}: the shape of {value.name!r} is not known; give the shapes of the inputs")
        shape: Shape = tuple(outputs[0])  # type: ignore[arg-type]
        return shape


class Call:
    """One node: what its function may ask."""

    def __init__(self, model: Model, node: Any, attrs: dict[str, Any]) -> None:
        self.model = model
        self.op = node.op_type
        self.name = node.name or (node.output[0] if node.output else node.op_type)
        self.inputs: list[Any] = [model.values.get(name) for name in node.input]
        self.names = list(node.input)
        self.outputs = len(node.output)
        self.attrs = attrs

    def get(self, key: str, default: Any = None) -> Any:
        """An attribute."""
        return self.attrs.get(key, default)

    def has(self, k: int) -> bool:
        """Whether input ``k`` is there."""
        return k < len(self.inputs) and self.inputs[k] is not None

    def symbol(self, k: int = 0) -> Symbol:
        """Input ``k`` as a symbol; a constant becomes a parameter, one for all its readers."""
        value = self.inputs[k] if k < len(self.inputs) else None
        if value is None:
            raise self.refuse(f"input {k} is missing")
        if isinstance(value, Symbol):
            return value
        key = (id(value), self.names[k])
        found = self.model.made.get(key)
        if found is None:
            found = self.model.made[key] = self.model.parameter(self.names[k], _float(value))
        return found

    def own(self, k: int, values: Any = None, *, state: bool = False) -> Symbol:
        """Input ``k``, a constant, as a parameter of this node (``values``: changed)."""
        values = self.constant(k) if values is None else values
        if np.size(values) == 0:
            raise self.refuse(f"input {k} has no elements")
        return self.model.parameter(self.names[k], _float(values), state=state)

    def constant(self, k: int) -> Any:
        """Input ``k``, which must be known while reading."""
        value = self.inputs[k] if k < len(self.inputs) else None
        if value is None or isinstance(value, Symbol):
            raise self.refuse(f"input {k} ({self.names[k] if k < len(self.names) else 'missing'}) must be a constant")
        return value

    def numbers(self, k: int, attribute: str) -> list[int] | None:
        """Whole numbers from input ``k`` (newer files) or an attribute (older ones)."""
        if self.has(k):
            return [int(number) for number in np.reshape(self.constant(k), -1)]
        found = self.get(attribute)
        return None if found is None else [int(number) for number in ([found] if isinstance(found, int) else found)]

    def is_constant(self) -> bool:
        """All inputs are known while reading."""
        return all(not isinstance(value, Symbol) for value in self.inputs)

    def shape(self, k: int = 0) -> Shape:
        """The shape of input ``k``."""
        return self.model.shape(self.inputs[k])

    def refuse(self, why: str) -> MXNetError:
        """The error for a node that cannot be read."""
        return FormatError(f"{self.model.where}: node {self.name!r} ({self.op}): {why}")

    def make(self, op: str, *inputs: Symbol, **params: Any) -> Symbol:
        """A node of ours."""
        made: Symbol = getattr(sym, op)(*inputs, **params)
        return made


def _float(values: Any) -> Any:
    """A parameter's values: float64 counts as float32, as it does for constants in scripts."""
    array = np.asarray(values)
    return array.astype(np.float32) if array.dtype == np.float64 else array


Rule = Callable[[Call], Any]
RULES: dict[str, Rule] = {}
FOLDS: dict[str, Callable[[Call, list[Any]], Any]] = {}
"""How nodes all of whose inputs are known are computed while reading."""


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Decorator: this function reads these operators; it gives a symbol, or one for each output."""

    def note(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return note


def import_model(
    path: str | os.PathLike[str], shapes: Mapping[str, Shape] | None = None
) -> tuple[Symbol, Params, Params]:
    """(symbol, arg_params, aux_params) of an ONNX file.

    Args:
        shapes: shapes of inputs, where the file leaves them open (an open first dimension is 1).

    Raises:
        FormatError: the file is damaged, or no ONNX model.
        UnknownOperatorError: operators that are not read; names all of them.
        MXNetError: ``onnx`` is not installed.
    """
    onnx = onnx_module()
    where = os.fspath(path)
    with open(path, "rb") as file:
        content = file.read()
    if content.startswith(b"version https://git-lfs"):
        raise FormatError(f"{where}: it is a pointer of Git LFS: run `git lfs pull` there")
    try:
        model = onnx.load_model_from_string(content)
        opset = max((one.version for one in model.opset_import if one.domain in ("", "ai.onnx")), default=0)
        if not model.graph.node and not model.graph.output:
            raise FormatError(f"{where}: no ONNX model: it has no nodes and no outputs")
    except FormatError:
        raise
    except Exception as error:  # protobuf's own classes, which differ between its versions
        raise FormatError(f"{where}: no ONNX model, or a damaged one: {error}") from error
    try:
        return _read(onnx, model.graph, shapes or {}, opset, where)
    except MXNetError:
        raise
    except (ValueError, TypeError, IndexError, KeyError, AttributeError, OverflowError, ArithmeticError) as error:
        raise FormatError(f"{where}: damaged, or beyond what is read: {error}") from error


def _read(onnx: Any, graph: Any, shapes: Mapping[str, Shape], opset: int, where: str) -> tuple[Symbol, Params, Params]:
    lost: dict[str, int] = {}
    for node in graph.node:
        if node.op_type not in RULES and node.op_type not in FOLDS:
            lost[node.op_type] = lost.get(node.op_type, 0) + 1
    if lost:
        names = ", ".join(f"{name} ({count})" for name, count in lost.items())
        raise UnknownOperatorError(f"{where}: {len(lost)} operator(s) of ONNX are not read: {names}")
    constants = {tensor.name: _tensor(onnx, tensor, where) for tensor in graph.initializer}
    found = Model({}, opset, where)
    for value in graph.input:
        if value.name in constants:
            continue
        dims = [dim.dim_value if dim.HasField("dim_value") else 0 for dim in value.type.tensor_type.shape.dim]
        shape = tuple(shapes.get(value.name, (1, *dims[1:]) if dims and not dims[0] else dims))
        if shape and 0 not in shape:
            found.shapes[value.name] = shape
        kind = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        found.values[value.name] = sym.Variable(value.name, dtype=kind if kind != np.float64 else np.float32)
    found.values.update(constants)
    for node in graph.node:
        attrs = {one.name: _attribute(onnx, one, where) for one in node.attribute}
        call = Call(found, node, attrs)
        for name in node.input:
            if name and name not in found.values:
                raise call.refuse(f"its input {name!r} comes from nowhere")
        made = _fold(call)
        if made is None:
            if node.op_type not in RULES:
                raise call.refuse("it is read only where its inputs are constants")
            made = RULES[node.op_type](call)
        several = made if isinstance(made, (list, tuple)) else [made]
        found.values.update(zip(node.output, several, strict=False))
    heads = []
    for output in graph.output:
        value = found.values.get(output.name)
        if value is None:
            raise FormatError(f"{where}: output {output.name!r} comes from nowhere")
        heads.append(value if isinstance(value, Symbol) else found.parameter(output.name, value))
    symbol = heads[0] if len(heads) == 1 else sym.Group(heads)
    used = {*symbol.list_arguments(), *symbol.list_auxiliary_states()}
    return (
        symbol,
        {key: nd.array(value, dtype=value.dtype) for key, value in found.args.items() if key in used},
        {key: nd.array(value, dtype=value.dtype) for key, value in found.aux.items() if key in used},
    )


def _tensor(onnx: Any, tensor: Any, where: str) -> Any:
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        raise FormatError(f"{where}: {tensor.name!r} lies in another file; save the model as one file")
    if any(dim < 0 for dim in tensor.dims) or math.prod(tensor.dims) > max(8 * tensor.ByteSize(), 8):
        raise FormatError(f"{where}: damaged: {tensor.name!r} has shape {list(tensor.dims)} and fewer bytes")
    return onnx.numpy_helper.to_array(tensor)


def _attribute(onnx: Any, attribute: Any, where: str) -> Any:
    value = onnx.helper.get_attribute_value(attribute)
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return _tensor(onnx, value, where) if isinstance(value, onnx.TensorProto) else value


def _fold(call: Call) -> Any:
    """The value of a node whose inputs are known, or None."""
    fold = FOLDS.get(call.op)
    if fold is None:
        return None
    if call.op == "Shape":
        dims = np.array(call.shape(), np.int64)
        return dims[call.get("start", 0) : call.get("end")]
    return fold(call, call.inputs) if call.is_constant() else None


# ------------------------------------------------------------------------------------------------------ constants


def _filled(call: Call, inputs: list[Any]) -> Any:
    dims = [int(dim) for dim in np.reshape(inputs[0], -1)]
    if math.prod(dims) > MOST_ELEMENTS:
        raise call.refuse(f"an array of shape {dims} out of one number; at most {MOST_ELEMENTS:,} elements are made")
    value = call.get("value")
    return np.full(dims, np.float32(0) if value is None else np.reshape(value, -1)[0])


def _sliced(call: Call, inputs: list[Any]) -> Any:
    starts, ends = call.numbers(1, "starts") or [], call.numbers(2, "ends") or []
    axes, steps = call.numbers(3, "axes") or list(range(len(starts))), call.numbers(4, "steps") or [1] * len(starts)
    cut = [slice(None)] * np.ndim(inputs[0])
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        cut[axis] = slice(start, end if step > 0 or end >= -np.shape(inputs[0])[axis] else None, step)
    return inputs[0][tuple(cut)]


def _axes(call: Call) -> tuple[int, ...] | None:
    found = call.numbers(1, "axes")
    return None if found is None else tuple(found)


def _ranged(call: Call, inputs: list[Any]) -> Any:
    start, limit, step = (np.reshape(one, -1)[0] for one in inputs)
    if not step or (limit - start) / step > MOST_ELEMENTS:
        raise call.refuse("a range that never ends")
    return np.arange(start, limit, step)


def _constant(call: Call, inputs: list[Any]) -> Any:
    for key in ("value", "value_float", "value_int", "value_floats", "value_ints"):
        if key in call.attrs:
            kind = np.int64 if "int" in key else np.float32 if "float" in key else None
            return np.asarray(call.attrs[key], kind)
    raise call.refuse("it has no value")


FOLDS.update(
    {
        "Constant": _constant,
        "ConstantOfShape": _filled,
        "Shape": lambda call, inputs: None,
        "Range": _ranged,
        "Slice": _sliced,
        "Gather": lambda call, i: np.take(i[0], np.asarray(i[1], np.int64), axis=call.get("axis", 0)),
        "Concat": lambda call, i: np.concatenate([np.asarray(one) for one in i], axis=call.get("axis", 0)),
        "Unsqueeze": lambda call, i: np.expand_dims(i[0], _axes(call) or ()),
        "Squeeze": lambda call, i: np.squeeze(i[0], _axes(call)),
        "Reshape": lambda call, i: np.reshape(i[0], [int(d) for d in np.reshape(i[1], -1)]),
        "Transpose": lambda call, i: np.transpose(i[0], call.get("perm")),
        "Cast": lambda call, i: np.asarray(i[0]).astype(onnx_module().helper.tensor_dtype_to_np_dtype(call.get("to"))),
        "Add": lambda call, i: i[0] + i[1],
        "Sub": lambda call, i: i[0] - i[1],
        "Mul": lambda call, i: i[0] * i[1],
        "Div": lambda call, i: i[0] // i[1] if np.asarray(i[0]).dtype.kind in "iu" else i[0] / i[1],
        "Floor": lambda call, i: np.floor(i[0]),
        "Ceil": lambda call, i: np.ceil(i[0]),
        "Identity": lambda call, i: i[0],
    }
)

# ------------------------------------------------------------------------------------------------------ layers


def _pads(call: Call, kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int]) -> list[int]:
    """Padding before each axis, then behind each."""
    kind = call.get("auto_pad", "NOTSET")
    axes = len(kernel)
    if kind in ("NOTSET", ""):
        return list(call.get("pads") or [0] * 2 * axes)
    if kind == "VALID":
        return [0] * 2 * axes
    before, behind = [], []
    for size, k, stride, dilate in zip(call.shape()[2:], kernel, strides, dilations, strict=True):
        total = max((-(-size // stride) - 1) * stride + (k - 1) * dilate + 1 - size, 0)
        less, more = total // 2, total - total // 2
        before.append(less if kind == "SAME_UPPER" else more)
        behind.append(more if kind == "SAME_UPPER" else less)
    return before + behind


def _padded(call: Call, data: Symbol, pads: list[int], value: float) -> tuple[Symbol, tuple[int, ...]]:
    """The data, and padding that is the same on both sides; other padding is put on first."""
    axes = len(pads) // 2
    before, behind = pads[:axes], pads[axes:]
    if before == behind:
        return data, tuple(before)
    if any(number < 0 for number in pads):
        raise call.refuse(f"pads={pads}: negative ones are not read")
    return _pad_all(call, data, [0, 0, *before], [0, 0, *behind], "constant", value), (0,) * axes


def _pad_all(call: Call, data: Symbol, before: Sequence[int], behind: Sequence[int], mode: str, value: float) -> Symbol:
    rank = len(before)
    if mode not in ("constant", "edge", "reflect") or rank > 5 or any(n < 0 for n in (*before, *behind)):
        raise call.refuse(f"padding {list(before)} and {list(behind)}, mode {mode}, is not read")
    shape = call.model.shape(data)
    inner = 2 if rank >= 3 else 0
    if any((*before[:inner], *behind[:inner])):
        raise call.refuse("padding of the first two axes is not read")
    lifted = data if rank > 3 else call.make("reshape", data, shape=(*shape[:2], *(1,) * (4 - rank), *shape[2:])
                                             if rank > 2 else (1, 1, *shape))  # fmt: skip
    zeros = [0] * max(0, 4 - rank)
    first = [*before[:2], *zeros, *before[2:]] if rank > 2 else [0, 0, *before]
    last = [*behind[:2], *zeros, *behind[2:]] if rank > 2 else [0, 0, *behind]
    width = tuple(number for pair in zip(first, last, strict=True) for number in pair)
    padded = call.make("Pad", lifted, mode=mode, pad_width=width, constant_value=value)
    if rank > 3:
        return padded
    sizes = tuple(size + a + b for size, a, b in zip(shape, before, behind, strict=True))
    return call.make("reshape", padded, shape=sizes)


@rule("Conv", "ConvTranspose")
def _conv(call: Call) -> Symbol:
    weight = call.constant(1)
    axes = weight.ndim - 2
    kernel = tuple(call.get("kernel_shape") or weight.shape[2:])
    strides, dilations = tuple(call.get("strides") or (1,) * axes), tuple(call.get("dilations") or (1,) * axes)
    group, bias = call.get("group", 1), [call.own(2)] if call.has(2) else []
    shared = {"kernel": kernel, "stride": strides, "dilate": dilations, "num_group": group, "no_bias": not bias}
    if call.op == "ConvTranspose":
        if call.get("output_shape") or call.get("auto_pad", "NOTSET") not in ("NOTSET", "VALID", ""):
            raise call.refuse("output_shape and auto_pad are not read")
        pads = list(call.get("pads") or [0] * 2 * axes)
        if pads[:axes] != pads[axes:]:
            raise call.refuse(f"pads={pads}: only the same on both sides is read")
        shared.update(pad=tuple(pads[:axes]), adj=tuple(call.get("output_padding") or (0,) * axes))
        return call.make(
            "Deconvolution", call.symbol(), call.own(1), *bias, num_filter=weight.shape[1] * group, **shared
        )
    data, pad = _padded(call, call.symbol(), _pads(call, kernel, strides, dilations), 0.0)
    return call.make("Convolution", data, call.own(1), *bias, num_filter=weight.shape[0], pad=pad, **shared)


@rule("MaxPool", "AveragePool", "LpPool")
def _pool(call: Call) -> Symbol:
    kernel = tuple(call.get("kernel_shape"))
    axes = len(kernel)
    strides, ones = tuple(call.get("strides") or (1,) * axes), (1,) * axes
    if tuple(call.get("dilations") or ones) != ones or call.outputs > 1:
        raise call.refuse("dilations and the indices of maxima are not read")
    counted = call.op != "AveragePool" or bool(call.get("count_include_pad", 0))
    pads = _pads(call, kernel, strides, ones)
    uneven = pads[:axes] != pads[axes:]
    if uneven and not counted:
        raise call.refuse(f"pads={pads}: an average that leaves padding out needs the same on both sides")
    data, pad = _padded(call, call.symbol(), pads, -math.inf if call.op == "MaxPool" else 0.0)
    kind = {"MaxPool": "max", "AveragePool": "avg", "LpPool": "lp"}[call.op]
    facts: dict[str, Any] = {"p_value": call.get("p", 2)} if kind == "lp" else {}
    if kind == "avg":
        facts["count_include_pad"] = counted
    convention = "full" if call.get("ceil_mode", 0) else "valid"
    return call.make(
        "Pooling", data, kernel=kernel, stride=strides, pad=pad, pool_type=kind, pooling_convention=convention, **facts
    )


@rule("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool")
def _global_pool(call: Call) -> Symbol:
    kind = {"GlobalAveragePool": "avg", "GlobalMaxPool": "max", "GlobalLpPool": "lp"}[call.op]
    facts = {"p_value": call.get("p", 2)} if kind == "lp" else {}
    return call.make("Pooling", call.symbol(), global_pool=True, kernel=(1,) * (len(call.shape()) - 2),
                     pool_type=kind, **facts)  # fmt: skip


@rule("BatchNormalization")
def _batch_norm(call: Call) -> Symbol:
    states = [call.own(k, state=True) for k in (3, 4)]
    made = call.make(
        "BatchNorm", call.symbol(), call.own(1), call.own(2), *states, fix_gamma=False,
        eps=call.get("epsilon", 1e-5), momentum=call.get("momentum", 0.9),
    )  # fmt: skip
    return made[0]


@rule("InstanceNormalization", "LayerNormalization")
def _norm(call: Call) -> Symbol:
    data, scale = call.symbol(), call.own(1)
    shift = call.own(2) if call.has(2) else call.model.parameter(f"{call.name}_beta", np.zeros_like(call.constant(1)))
    if call.op == "InstanceNormalization":
        return call.make("InstanceNorm", data, scale, shift, eps=call.get("epsilon", 1e-5))
    if call.get("axis", -1) not in (-1, len(call.shape()) - 1):
        raise call.refuse("only the last axis is read")
    return call.make("LayerNorm", data, scale, shift, eps=call.get("epsilon", 1e-5))[0]


@rule("LRN")
def _lrn(call: Call) -> Symbol:
    facts = {"alpha": call.get("alpha", 1e-4), "beta": call.get("beta", 0.75), "knorm": call.get("bias", 1.0)}
    return call.make("LRN", call.symbol(), nsize=call.get("size"), **facts)


@rule("Gemm")
def _gemm(call: Call) -> Symbol:
    alpha, beta = call.get("alpha", 1.0), call.get("beta", 1.0)
    data = call.make("transpose", call.symbol()) if call.get("transA", 0) else call.symbol()
    if isinstance(call.inputs[1], Symbol):
        product = call.make("dot", data, call.symbol(1), transpose_b=bool(call.get("transB", 0)))
        product = product * alpha if alpha != 1 else product
        return call.make("broadcast_add", product, call.symbol(2) * beta) if call.has(2) else product
    weight = call.constant(1) * np.float32(alpha) if alpha != 1 else call.constant(1)
    weight = weight if call.get("transB", 0) else weight.T
    vector = call.has(2) and not isinstance(call.inputs[2], Symbol) and np.size(call.inputs[2]) == weight.shape[0]
    bias = [call.own(2, np.reshape(call.constant(2) * np.float32(beta), -1))] if vector else []
    made = call.make("FullyConnected", data, call.own(1, weight), *bias, num_hidden=weight.shape[0], no_bias=not bias)
    if call.has(2) and not vector:
        return call.make("broadcast_add", made, call.symbol(2) * beta)
    return made


@rule("MatMul")
def _matmul(call: Call) -> Symbol:
    if not isinstance(call.inputs[1], Symbol) and call.constant(1).ndim == 2:
        weight = call.constant(1).T
        return call.make("FullyConnected", call.symbol(), call.own(1, weight), num_hidden=weight.shape[0],
                         no_bias=True, flatten=False)  # fmt: skip
    left, right = call.shape(0), call.shape(1)
    if len(left) == len(right) == 2:
        return call.make("dot", call.symbol(), call.symbol(1))
    if len(left) != len(right) or left[:-2] != right[:-2]:
        raise call.refuse(f"a product of shapes {left} and {right} is not read")
    flat = [call.make("reshape", call.symbol(k), shape=(-1, *shape[-2:])) for k, shape in enumerate((left, right))]
    return call.make("reshape", call.make("batch_dot", *flat), shape=(*left[:-1], right[-1]))


# ------------------------------------------------------------------------------------------------------ elements

_BINARY = {"Add": ("add", "_plus_scalar", "_plus_scalar"), "Sub": ("sub", "_minus_scalar", "_rminus_scalar"),
           "Mul": ("mul", "_mul_scalar", "_mul_scalar"), "Div": ("div", "_div_scalar", "_rdiv_scalar"),
           "Pow": ("power", "_power_scalar", "_rpower_scalar")}  # fmt: skip


@rule(*_BINARY)
def _binary(call: Call) -> Symbol:
    name, right, left = _BINARY[call.op]
    for k, op in ((1, right), (0, left)):
        if not isinstance(call.inputs[k], Symbol) and np.size(call.inputs[k]) == 1:
            number = float(np.reshape(call.inputs[k], -1)[0])
            made: Symbol = getattr(sym, op)(call.symbol(1 - k), scalar=number)
            return made
    return call.make(f"broadcast_{name}", call.symbol(), call.symbol(1))


@rule("Sum", "Max", "Min", "Mean")
def _several(call: Call) -> Symbol:
    parts = [call.symbol(k) for k in range(len(call.inputs))]
    name = {"Sum": "add", "Mean": "add", "Max": "maximum", "Min": "minimum"}[call.op]
    made = parts[0]
    for part in parts[1:]:
        made = call.make(f"broadcast_{name}", made, part)
    return made / len(parts) if call.op == "Mean" else made


_UNARY = {"Relu": "relu", "Sigmoid": "sigmoid", "Tanh": "tanh", "Exp": "exp", "Log": "log", "Sqrt": "sqrt",
          "Abs": "abs", "Neg": "negative", "Floor": "floor", "Ceil": "ceil", "Sin": "sin", "Cos": "cos", "Tan": "tan",
          "Erf": "erf", "Asin": "arcsin", "Acos": "arccos", "Atan": "arctan", "Sinh": "sinh", "Cosh": "cosh",
          "Reciprocal": "reciprocal", "Softsign": "softsign", "Sign": "sign", "Identity": "identity"}  # fmt: skip


@rule(*_UNARY)
def _unary(call: Call) -> Symbol:
    return call.make(_UNARY[call.op], call.symbol())


@rule("Softplus")
def _softplus(call: Call) -> Symbol:
    return call.make("Activation", call.symbol(), act_type="softrelu")


@rule("LeakyRelu", "Elu", "Selu")
def _leaky(call: Call) -> Symbol:
    kind = {"LeakyRelu": "leaky", "Elu": "elu", "Selu": "selu"}[call.op]
    slope = call.get("alpha", 0.01 if kind == "leaky" else 1.0)
    return call.make("LeakyReLU", call.symbol(), act_type=kind, **({} if kind == "selu" else {"slope": slope}))


@rule("PRelu")
def _prelu(call: Call) -> Symbol:
    slope = call.constant(1)
    if np.size(slope) not in (1, np.shape(slope)[0] if np.ndim(slope) else 1):
        raise call.refuse(f"slopes of shape {np.shape(slope)} are not read, only one for each channel")
    return call.make("LeakyReLU", call.symbol(), call.own(1, np.reshape(slope, -1)), act_type="prelu")


@rule("HardSigmoid")
def _hard_sigmoid(call: Call) -> Symbol:
    return call.make("hard_sigmoid", call.symbol(), alpha=call.get("alpha", 0.2), beta=call.get("beta", 0.5))


@rule("Clip")
def _clip(call: Call) -> Symbol:
    bounds = []
    for k, key, default in ((1, "min", -math.inf), (2, "max", math.inf)):
        bounds.append(float(np.reshape(call.constant(k), -1)[0]) if call.has(k) else float(call.get(key, default)))
    return call.make("clip", call.symbol(), a_min=bounds[0], a_max=bounds[1])


@rule("Softmax", "LogSoftmax")
def _softmax(call: Call) -> Symbol:
    op = "softmax" if call.op == "Softmax" else "log_softmax"
    axis = call.get("axis", -1 if call.model.opset >= 13 else 1)
    shape = call.shape()
    if call.model.opset >= 13 or axis % len(shape) == len(shape) - 1:
        return call.make(op, call.symbol(), axis=axis)
    rows = math.prod(shape[: axis % len(shape)])
    flat = call.make(op, call.make("reshape", call.symbol(), shape=(rows, -1)), axis=-1)
    return call.make("reshape", flat, shape=shape)


@rule("Cast")
def _cast(call: Call) -> Symbol:
    kind = onnx_module().helper.tensor_dtype_to_np_dtype(call.get("to"))
    return call.make("Cast", call.symbol(), dtype="float32" if kind == np.float64 else np.dtype(kind).name)


@rule("Dropout")
def _dropout(call: Call) -> list[Symbol]:
    ratio = float(np.reshape(call.constant(1), -1)[0]) if call.has(1) else call.get("ratio", 0.5)
    made = call.make("Dropout", call.symbol(), p=ratio)
    return [made[0]]


# ------------------------------------------------------------------------------------------------------ shapes


@rule("Flatten")
def _flatten(call: Call) -> Symbol:
    axis = call.get("axis", 1)
    if axis == 1:
        return call.make("Flatten", call.symbol())
    shape = call.shape()
    rows = math.prod(shape[: axis if axis >= 0 else len(shape) + axis])
    return call.make("reshape", call.symbol(), shape=(rows, math.prod(shape) // rows))


@rule("Reshape")
def _reshape(call: Call) -> Symbol:
    dims = call.numbers(1, "shape") or []
    if call.get("allowzero", 0) and 0 in dims:
        raise call.refuse("arrays without elements are not read")
    return call.make("reshape", call.symbol(), shape=tuple(dims) or (1,))


@rule("Transpose")
def _transpose(call: Call) -> Symbol:
    return call.make("transpose", call.symbol(), axes=tuple(call.get("perm") or ()))


@rule("Concat")
def _concat(call: Call) -> Symbol:
    parts = [call.symbol(k) for k in range(len(call.inputs))]
    return call.make("Concat", *parts, dim=call.get("axis", 1) % len(call.shape()))


@rule("Split")
def _split(call: Call) -> list[Symbol]:
    axis = call.get("axis", 0)
    size = call.shape()[axis]
    sizes = call.numbers(1, "split") or [-(-size // call.outputs)] * call.outputs
    made, start = [], 0
    for width in sizes:
        made.append(call.make("slice_axis", call.symbol(), axis=axis, begin=start, end=min(start + width, size)))
        start += width
    return made


@rule("Slice")
def _slice(call: Call) -> Symbol:
    starts, ends = call.numbers(1, "starts") or [], call.numbers(2, "ends") or []
    axes, steps = call.numbers(3, "axes") or list(range(len(starts))), call.numbers(4, "steps") or [1] * len(starts)
    shape, made = call.shape(), call.symbol()
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        size = shape[axis]
        if step == 1:
            begin, stop, _ = slice(start, end).indices(size)
            made = call.make("slice_axis", made, axis=axis, begin=begin, end=stop)
        else:
            rank = len(shape)
            pairs = {axis % rank: (start, None if abs(end) > size else end, step)}
            begins, stops, strides = zip(*(pairs.get(k, (None, None, None)) for k in range(rank)), strict=True)
            made = call.make("slice", made, begin=begins, end=stops, step=strides)
    return made


@rule("Squeeze")
def _squeeze(call: Call) -> Symbol:
    axes = call.numbers(1, "axes")
    return call.make("squeeze", call.symbol(), **({} if axes is None else {"axis": tuple(axes)}))


@rule("Unsqueeze")
def _unsqueeze(call: Call) -> Symbol:
    axes = call.numbers(1, "axes") or []
    rank = len(call.shape()) + len(axes)
    made = call.symbol()
    for axis in sorted(axis % rank for axis in axes):
        made = call.make("expand_dims", made, axis=axis)
    return made


@rule("Gather")
def _gather(call: Call) -> Symbol:
    axis = call.get("axis", 0)
    if not isinstance(call.inputs[1], Symbol) and np.ndim(call.inputs[1]) == 0:
        place = int(call.inputs[1]) % call.shape()[axis]
        return call.make(
            "squeeze", call.make("slice_axis", call.symbol(), axis=axis, begin=place, end=place + 1), axis=axis
        )
    return call.make("take", call.symbol(), call.symbol(1), axis=axis, mode="wrap")


@rule("Pad")
def _pad(call: Call) -> Symbol:
    pads = call.numbers(1, "pads") or []
    value = float(np.reshape(call.constant(2), -1)[0]) if call.has(2) else float(call.get("value", 0.0))
    axes = len(pads) // 2
    return _pad_all(call, call.symbol(), pads[:axes], pads[axes:], call.get("mode", "constant"), value)


@rule("ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceProd")
def _reduce(call: Call) -> Symbol:
    axes = call.numbers(1, "axes")
    op = call.op.removeprefix("Reduce").lower()
    keep = bool(call.get("keepdims", 1))
    return call.make(op, call.symbol(), axis=tuple(axes) if axes else (), keepdims=keep)


@rule("Upsample", "Resize")
def _resize(call: Call) -> Symbol:
    shape = call.shape()
    mode = call.get("mode", "nearest")
    k = 1 if call.op == "Upsample" or call.model.opset < 11 else 2
    if call.op == "Resize" and call.has(3):
        sizes = [int(number) for number in np.reshape(call.constant(3), -1)]
    else:
        scales = call.get("scales") if not call.has(k) else np.reshape(call.constant(k), -1)
        sizes = [math.floor(size * float(scale)) for size, scale in zip(shape, scales, strict=True)]
    way = call.get("coordinate_transformation_mode", "half_pixel" if call.model.opset >= 11 else "asymmetric")
    if len(shape) == 4 and list(shape[:2]) == sizes[:2]:
        factor = sizes[2] // shape[2]
        whole = [sizes[2], sizes[3]] == [shape[2] * factor, shape[3] * factor]
        if mode == "nearest" and whole and (way == "asymmetric" or factor in (1, 2)):
            return call.make("UpSampling", call.symbol(), scale=factor, sample_type="nearest", num_args=1)
        if mode == "linear" and way in ("align_corners", "half_pixel", "pytorch_half_pixel"):
            corners = way == "align_corners"
            made: Symbol = sym.contrib.BilinearResize2D(
                call.symbol(), height=sizes[2], width=sizes[3], align_corners=corners
            )
            return made
    raise call.refuse(f"mode {mode} ({way}) from {shape} to {sizes} is not read")


@rule("ArgMax", "ArgMin")
def _argmax(call: Call) -> Symbol:
    keep = bool(call.get("keepdims", 1))
    return call.make(call.op.lower(), call.symbol(), axis=call.get("axis", 0), keepdims=keep)
