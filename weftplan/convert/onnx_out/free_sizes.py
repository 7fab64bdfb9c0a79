"""Export with open sizes, such as a batch that the user of the ONNX model chooses.

A network is exported twice, with different numbers in place of each open size. If nodes and tables are equal, the model
does not depend on these numbers, and the sizes stay open. Otherwise an operator needs the number, and the export fails.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weftplan.convert.onnx_out import Arrays, export_model
from weftplan.errors import ShapeError
from weftplan.symbol import Symbol

OpenShape = tuple[int | None, ...]
"""A shape with None for an open size."""
_BATCHES, _SIDES = (2, 3), (224, 256)
"""Numbers for an open size in the two exports: on axis 0, and on other axes (layers need large sides)."""


def export_open(
    symbol: Symbol, args: Arrays, aux: Arrays, shapes: Mapping[str, OpenShape], *, name: str = "model"
) -> bytes:
    """Return the content of an ONNX file as :func:`.export_model` describes it, with open sizes for None in ``shapes``.

    An open size on axis 0 is called ``batch``; on another axis it is called by its input and the axis, ``data_2``.

    Raises:
        ShapeError: an operator needs the number of an open size; the message names it.
    """
    closed = [{key: _closed(shape, k) for key, shape in shapes.items()} for k in range(2)]
    model = export_model(symbol, args, aux, closed[0], name=name)
    if closed[0] != closed[1]:
        _open(model.graph, export_model(symbol, args, aux, closed[1], name=name).graph)
    content: bytes = model.SerializeToString()
    return content


def _open(graph: Any, second: Any) -> None:
    """Name the sizes that differ between two exports; raise ShapeError if nodes or tables differ."""
    tables = {table.name: table for table in second.initializer}
    fixed = {table.name for table in graph.initializer if table != tables.get(table.name)}
    for node, twin in zip(graph.node, second.node, strict=False):
        if node != twin or fixed.intersection(node.input):
            raise ShapeError(
                f"convert: {node.name or node.output[0]} ({node.op_type}) depends on a size that is to stay open; give "
                f"that size a number"
            )
    for value, twin in zip([*graph.input, *graph.output], [*second.input, *second.output], strict=True):
        sizes = zip(value.type.tensor_type.shape.dim, twin.type.tensor_type.shape.dim, strict=True)
        for axis, (size, changed) in enumerate(sizes):
            if size.dim_value != changed.dim_value:
                is_batch = (size.dim_value, changed.dim_value) == _BATCHES
                size.dim_param = "batch" if is_batch else f"{value.name}_{axis}"


def _closed(shape: OpenShape, k: int) -> tuple[int, ...]:
    """Return a shape with the ``k``-th number for each open size."""
    return tuple((_SIDES if axis else _BATCHES)[k] if size is None else size for axis, size in enumerate(shape))
