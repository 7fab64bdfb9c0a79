"""Export of a symbol and its parameters as an ONNX model: one function per operator.

The graph is for inference: dropout is the identity, and losses return their outputs. Shapes are inferred first, so an
operator whose ONNX counterpart needs sizes (Reshape, Split) gets numbers. :mod:`.free_sizes` exports models with open
sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

import weftplan.convert.onnx_out.layers
import weftplan.convert.onnx_out.recurrent
import weftplan.convert.onnx_out.shapes  # noqa: F401 - they fill the table
from weftplan.convert.library import onnx_module
from weftplan.convert.onnx_out.elements import add_rows
from weftplan.convert.onnx_out.writing import RULES, NodeWriter, OnnxGraph
from weftplan.errors import ShapeError, UnknownOperatorError, listed
from weftplan.ops.core.schema import Shape
from weftplan.symbol import Symbol, topological_order
from weftplan.symbol.node import Entry

OPSET = 17
Arrays = Mapping[str, Any]


def export_model(symbol: Symbol, args: Arrays, aux: Arrays, shapes: Mapping[str, Shape], *, name: str = "model") -> Any:
    """Return the ONNX model (a ``ModelProto``) of a network for inputs of these shapes.

    Args:
        args, aux: parameters by name, NDArrays; every other variable except labels is an input.
        shapes: shapes of the inputs.

    Raises:
        UnknownOperatorError: operators that ONNX models cannot have; names all of them.
        ShapeError: shapes that are missing or do not fit.
        MXNetError: parameters of an operator that ONNX has no counterpart for; ``onnx`` is not installed.
    """
    onnx = onnx_module()
    add_rows()
    nodes = topological_order(symbol.entries)
    lost: dict[str, list[str]] = {}
    for node in nodes:
        if node.op is not None and node.op.name not in RULES:
            lost.setdefault(node.op.name, []).append(node.name)
    if lost:
        lines = "; ".join(f"{op} ({len(names)}: {', '.join(names[:3])})" for op, names in lost.items())
        raise UnknownOperatorError(f"convert: no ONNX counterpart is known for {len(lost)} operator(s): {lines}")
    stored = {key: value.asnumpy() for table in (args, aux) for key, value in table.items()}
    input_shapes = {**{key: value.shape for key, value in stored.items()}, **shapes}
    graph = OnnxGraph(symbol, input_shapes, {key: value.dtype for key, value in stored.items()})
    for node in nodes:
        if node.op is not None:
            RULES[node.op.name](NodeWriter(graph, node))
    used, needed = {graph.name(entry) for entry in symbol.entries}, []
    for candidate in reversed(graph.nodes):  # omits nodes that only a loss needs, such as its label's shape
        if used.intersection(candidate.output):
            used.update(candidate.input)
            needed.append(candidate)
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
    onnx_graph = onnx.helper.make_graph(
        needed[::-1],
        name,
        [described(node.name, Entry(node)) for node in inputs],
        [described(label, entry) for label, entry in heads.items()],
        [onnx.numpy_helper.from_array(np.ascontiguousarray(value), key) for key, value in tables.items()],
    )
    opsets = [onnx.helper.make_opsetid("", OPSET)]
    model = onnx.helper.make_model(onnx_graph, producer_name="weftplan", opset_imports=opsets, ir_version=8)
    onnx.checker.check_model(model)
    return model
