"""Shapes and dtypes of every entry of a whole graph, complete and checked; needs nothing, gives sizes.

The rules live with the operators and are solved by :mod:`weftplan.symbol.inference.solver`; this pass adds what
planning demands: nothing may stay unknown, and sizes must fit machine integers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from weftplan.errors import DTypeError, ShapeError, shape_text
from weftplan.ops.core.schema import DType, Shape
from weftplan.planner.symbolic.indexed_graph import IndexedGraph
from weftplan.planner.symbolic.network import Network
from weftplan.symbol.inference.backward_shapes import infer_rest
from weftplan.symbol.inference.solver import infer_dtypes, infer_shapes

MAX_BYTES = (1 << 63) - 1
FLOAT32 = np.dtype(np.float32)


def infer_forward(
    network: Network, *, shapes: Mapping[str, Shape], dtypes: Mapping[str, Any]
) -> tuple[list[Shape], list[DType]]:
    """Return shapes and dtypes of the entries of the forward part, which needs no others.

    Variables of whose dtype nothing is known are float32.

    Raises:
        ShapeError: a given shape is malformed, shapes conflict, or one stays unknown; the message names the argument
            and an operator that needs it.
        DTypeError: dtypes conflict, or one cannot be inferred.
    """
    for name, shape in shapes.items():
        _check_given(name, shape)
    return _complete(network.graph, network.num_forward, shapes, dtypes)


def infer_all(
    network: Network, *, shapes: Mapping[str, Shape], dtypes: Mapping[str, Any]
) -> tuple[Sequence[Shape], Sequence[DType]]:
    """Return shapes and dtypes of all entries: those of the forward part, then those of the rest.

    Head gradients are like their outputs. Raises as :func:`infer_forward` does.
    """
    graph, stop = network.graph, network.num_forward
    found = (network.shapes, network.dtypes) if network.shapes else infer_forward(network, shapes=shapes, dtypes=dtypes)
    if stop == graph.num_nodes:
        return found
    like = {
        graph.nodes[nid]: (found[0][e], found[1][e])
        for nid, e in zip(network.head_grads, network.outputs, strict=False)
        if nid >= 0
    }
    rest = infer_rest(
        graph.nodes, like, rows=graph.row, inputs=graph.inputs, controls=graph.controls, shapes=found[0],
        dtypes=found[1],
    )  # fmt: skip
    if rest is not None:
        return rest
    known, types = ({node: facts[k] for node, facts in like.items()} for k in (0, 1))
    return _complete(graph, graph.num_nodes, {**shapes, **known}, {**dtypes, **types})


def _complete(
    graph: IndexedGraph, stop: int, shapes: Mapping[Any, Any], dtypes: Mapping[Any, Any]
) -> tuple[list[Any], list[Any]]:
    """Shapes and dtypes of every entry of the first ``stop`` nodes, which need no others, from those of variables, by
    name or by node; an error where one stays unknown."""
    nodes = graph.nodes[:stop]
    how: dict[str, Any] = {
        "rows": graph.row[: stop + 1],
        "inputs": graph.inputs[:stop],
        "controls": graph.controls[:stop],
    }
    found = infer_shapes(nodes, shapes, **how)
    for eid, shape in enumerate(found):
        if shape is None or 0 in shape:
            raise ShapeError(_unknown(graph, eid, found, "shape"))
    types = infer_dtypes(nodes, dtypes, default=FLOAT32, **how)
    for eid, dtype in enumerate(types):
        if dtype is None:
            raise DTypeError(_unknown(graph, eid, types, "dtype"))
    return found, types


def byte_sizes(graph: IndexedGraph, *, shapes: list[Shape], dtypes: list[DType]) -> list[int]:
    """Bytes of every entry.

    Raises:
        ShapeError: an entry, or all of them together, exceed 2^63 - 1 bytes.
    """
    nbytes = [prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True)]
    if sum(nbytes) > MAX_BYTES:
        largest = max(range(len(nbytes)), key=nbytes.__getitem__)
        raise ShapeError(
            f"the graph needs {sum(nbytes)} bytes without sharing, more than 2^63 - 1; the largest entry is "
            f"{graph.entry_name(largest)!r}, shape {shapes[largest]}, {dtypes[largest]}"
        )
    return nbytes


def _check_given(name: str, shape: Any) -> None:
    if shape is None:
        return
    dims = None if isinstance(shape, (str, int)) or not hasattr(shape, "__iter__") else tuple(shape)
    if dims is None or any(isinstance(dim, bool) or not isinstance(dim, (int, np.integer)) for dim in dims):
        raise ShapeError(f"shape of {name!r} must be a tuple of integers, got {shape if dims is None else dims!r}")
    if any(dim < 0 for dim in dims):
        raise ShapeError(f"shape of {name!r} is {dims}: dimensions must be positive (0 means unknown)")


def _is_open(fact: Any) -> bool:
    """Whether a shape or dtype is unknown, or unknown in part."""
    return fact is None or (isinstance(fact, tuple) and 0 in fact)


def _unknown(graph: IndexedGraph, eid: int, facts: list[Any], what: str) -> str:
    """Which variable lacks a fact, and who needs it."""
    row = graph.row
    arguments = [nid for nid in graph.variables() if row[nid] < len(facts) and _is_open(facts[row[nid]])]
    if not arguments:
        node = graph.nodes[graph.entry_node[eid]]
        op = "variable" if node.op is None else f"operator {node.op.name}"
        return f"{what} of {graph.entry_name(eid)!r} ({op}) cannot be inferred: {facts[eid]}"
    nid = arguments[0]
    reader = next((n for n, ins in enumerate(graph.inputs) if row[nid] in ins), None)
    fact = facts[row[nid]]
    shown = shape_text(fact) if isinstance(fact, tuple) else "unknown" if fact is None else str(fact)
    text = f"{what} of argument {graph.nodes[nid].name!r} is {shown} and cannot be inferred"
    if reader is not None:
        node = graph.nodes[reader]
        assert node.op is not None
        text += f"; operator {node.op.name} ({node.name!r}) needs it"
        text += f", created at {node.created_at}" if node.created_at else ""
    others = [graph.nodes[n].name for n in arguments[1:5]]
    return text + (f" (as do {', '.join(map(repr, others))})" if others else "") + f"; give its {what}"
