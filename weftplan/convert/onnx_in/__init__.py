"""Import of ONNX models as a symbol and its parameters: one function per ONNX operator.

Initializers that layers use become parameters. Values that depend on constants alone are computed during the import,
because models exported from other frameworks compute shapes that way. If an ONNX operator needs a shape that ours does
not, it is inferred from the input shapes, which the file (or the caller) provides.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np

import weftplan.convert.onnx_in.constants
import weftplan.convert.onnx_in.layers
import weftplan.convert.onnx_in.recurrent
import weftplan.convert.onnx_in.shapes  # noqa: F401 - they fill the tables
from weftplan import ndarray as nd
from weftplan import symbol as sym
from weftplan.convert.library import onnx_module
from weftplan.convert.onnx_in.elements import add_rows
from weftplan.convert.onnx_in.external import check_amount, external_tensor
from weftplan.convert.onnx_in.reading import FOLDS, RULES, OnnxCall, OnnxModel
from weftplan.errors import FormatError, MXNetError, UnknownOperatorError
from weftplan.ndarray import NDArray
from weftplan.ops.core.schema import Shape
from weftplan.support.array_types import RawArray
from weftplan.support.atomic_files import FREE, RATIO, open_to_read, other_kind
from weftplan.symbol import Symbol
from weftplan.symbol.node import Node

Params = dict[str, NDArray]


def import_model(
    path: str | os.PathLike[str], shapes: Mapping[str, Shape] | None = None
) -> tuple[Symbol, Params, Params]:
    """Return (symbol, arg_params, aux_params) of an ONNX file.

    An operator is named after its output, without the suffix ``_output``, unless the name is taken.

    Args:
        shapes: shapes of inputs that the file leaves open (by default, an open first dimension is 1).

    Raises:
        FormatError: the file is damaged or not an ONNX model.
        UnknownOperatorError: unsupported operators; names all of them.
        MXNetError: ``onnx`` is not installed.
    """
    return OnnxFile(path).read(shapes)


class OnnxFile:
    """An ONNX file in memory.

    Raises:
        FormatError: the file is damaged or not an ONNX model.
        MXNetError: ``onnx`` is not installed.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.fspath(path)
        self._onnx = onnx_module()
        add_rows()
        with open_to_read(path) as file:
            content = file.read()
        try:
            model = self._onnx.load_model_from_string(content)
            self._opset = max(
                (opset.version for opset in model.opset_import if opset.domain in ("", "ai.onnx")), default=0
            )
            if not model.graph.node and not model.graph.output:
                raise FormatError(f"{self._path}: no ONNX model: it has no nodes and no outputs")
        except FormatError:
            raise
        except Exception as error:  # protobuf's own classes, which differ between versions
            what = other_kind(content[:64]) or f"no ONNX model, or a damaged one: {error}"
            raise FormatError(f"{self._path}: {what}") from error
        self.model = model
        """The content of the file, parsed by ``onnx``."""
        self._graph = model.graph
        self._budget = max(FREE, RATIO * len(content))

    def read(self, shapes: Mapping[str, Shape] | None = None) -> tuple[Symbol, Params, Params]:
        """Return the result of :func:`import_model`, with its errors about the model."""
        try:
            lost = self.unread()
            if lost:
                names = ", ".join(f"{name} ({count})" for name, count in lost.items())
                raise UnknownOperatorError(f"{self._path}: {len(lost)} operator(s) of ONNX are not read: {names}")
            return _read(self._onnx, self._graph, shapes or {}, self._opset, self._path, self._budget)
        except MXNetError:
            raise
        except (ValueError, TypeError, IndexError, KeyError, AttributeError, OverflowError, ArithmeticError) as error:
            raise FormatError(f"{self._path}: damaged, or beyond what is read: {error}") from error

    def unread(self) -> dict[str, int]:
        """Return unsupported operators, with the number of occurrences."""
        lost: dict[str, int] = {}
        for node in self._graph.node:
            if node.op_type not in RULES and node.op_type not in FOLDS:
                lost[node.op_type] = lost.get(node.op_type, 0) + 1
        return lost

    def declared_shapes(self) -> tuple[dict[str, Shape], dict[str, Shape]]:
        """Return the shapes of (inputs that are not parameters, outputs) that the file declares; 0 for an open size."""
        constants = {tensor.name for tensor in self._graph.initializer}
        inputs = {value.name: _dims(value) for value in self._graph.input if value.name not in constants}
        return inputs, {value.name: _dims(value) for value in self._graph.output}


def _dims(value: Any) -> Shape:
    return tuple(dim.dim_value if dim.HasField("dim_value") else 0 for dim in value.type.tensor_type.shape.dim)


def _read(
    onnx: ModuleType, graph: Any, shapes: Mapping[str, Shape], opset: int, file: str, budget: int
) -> tuple[Symbol, Params, Params]:
    check_amount(graph.initializer, file)
    constants = {tensor.name: _tensor(onnx, tensor, file) for tensor in graph.initializer}
    model = OnnxModel({}, opset, file, budget)
    for value in graph.input:
        if value.name in constants:
            continue
        dims = _dims(value)
        shape = tuple(shapes.get(value.name, (1, *dims[1:]) if dims and not dims[0] else dims))
        if shape and 0 not in shape:
            model.shapes[value.name] = shape
        kind = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        model.values[value.name] = sym.Variable(value.name, dtype=kind if kind != np.float64 else np.float32)
    model.values.update(constants)
    named = _Names(graph)
    for node in graph.node:
        attrs = {attribute.name: _attribute(onnx, attribute, file) for attribute in node.attribute}
        call = OnnxCall(model, node, attrs)
        for name in node.input:
            if name and name not in model.values:
                raise call.refuse(f"its input {name!r} comes from nowhere")
        results = _fold(call)
        if results is None:
            if node.op_type not in RULES:
                raise call.refuse("it is read only where its inputs are constants")
            results = RULES[node.op_type](call)
        several = results if isinstance(results, (list, tuple)) else [results]
        named.give(several, node.output)
        model.values.update((name, value) for name, value in zip(node.output, several, strict=False) if name)
    heads = []
    for output in graph.output:
        value = model.values.get(output.name)
        if value is None:
            raise FormatError(f"{file}: output {output.name!r} comes from nowhere")
        heads.append(value if isinstance(value, Symbol) else model.parameter(output.name, value))
    symbol = heads[0] if len(heads) == 1 else sym.Group(heads)
    used = {*symbol.list_arguments(), *symbol.list_auxiliary_states()}
    return (
        symbol,
        {key: nd.array(value, dtype=value.dtype) for key, value in model.args.items() if key in used},
        {key: nd.array(value, dtype=value.dtype) for key, value in model.aux.items() if key in used},
    )


class _Names:
    """Namer of operators after their outputs in the file."""

    def __init__(self, graph: Any) -> None:
        self._used_names = {value.name for value in (*graph.input, *graph.initializer)}
        self._seen: set[Node] = set()

    def give(self, nodes: Sequence[object], outputs: Sequence[str]) -> None:
        """Name the nodes of the outputs, except nodes that another operator created."""
        for value, output in zip(nodes, outputs, strict=False):
            node = value.entries[0].node if isinstance(value, Symbol) else None
            if node is None or node.is_variable or node in self._seen:
                continue
            self._seen.add(node)
            name = output.removesuffix("_output")
            if name and name not in self._used_names:
                node.name = name
            self._used_names.add(node.name)


def _tensor(onnx: ModuleType, tensor: Any, file: str) -> RawArray:
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        return external_tensor(onnx, tensor, file)
    if any(dim < 0 for dim in tensor.dims) or math.prod(tensor.dims) > max(8 * tensor.ByteSize(), 8):
        raise FormatError(f"{file}: damaged: {tensor.name!r} has shape {list(tensor.dims)} and fewer bytes")
    values: RawArray = onnx.numpy_helper.to_array(tensor)
    return values


def _attribute(onnx: ModuleType, attribute: Any, file: str) -> Any:
    value = onnx.helper.get_attribute_value(attribute)
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, list) and value and isinstance(value[0], bytes):
        return [text.decode(errors="replace") for text in value]
    return _tensor(onnx, value, file) if isinstance(value, onnx.TensorProto) else value


def _fold(call: OnnxCall) -> RawArray | None:
    """Return the value of a node with constant inputs, or None."""
    fold = FOLDS.get(call.op)
    ready = call.op in ("Shape", "Size") or call.is_constant()  # a shape is known before the values
    return fold(call, call.inputs) if fold is not None and ready else None
