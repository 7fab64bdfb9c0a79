"""Infer the shape and dtype of every entry of the symbol's graph.

Operators define the rules, and :mod:`weftplan.symbol.inference.solver` applies them. This pass also checks that no
shape or dtype stays unknown. Sizes of nodes that later passes add follow from those of their inputs
(:class:`~weftplan.planner.symbolic.network.Edit`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from weftplan.errors import DTypeError, ShapeError, shape_text
from weftplan.planner.symbolic.indexed_graph import IndexedGraph
from weftplan.planner.symbolic.network import Network
from weftplan.planner.symbolic.passes.graph_pass import SIZES, GraphPass, PassSettings
from weftplan.symbol.inference.solver import infer_dtypes, infer_shapes

FLOAT32 = np.dtype(np.float32)


def infer_sizes(network: Network, settings: PassSettings) -> tuple[Network, str]:
    """Infer all shapes and dtypes. The default dtype of variables is float32.

    Raises:
        ShapeError: a given shape is malformed, shapes conflict, or one stays unknown; the message names the argument
            and an operator that needs it.
        DTypeError: dtypes conflict, or one cannot be inferred.
    """
    for name, shape in settings.shapes.items():
        _check_shape(name, shape)
    graph = network.graph
    edges = graph.row, graph.inputs, graph.controls
    shapes: Sequence[Any] = infer_shapes(graph.nodes, settings.shapes, edges=edges)
    open_shape = next((eid for eid, shape in enumerate(shapes) if shape is None or 0 in shape), None)
    if open_shape is not None:
        raise ShapeError(_unknown(graph, open_shape, shapes, "shape"))
    dtypes: Sequence[Any] = infer_dtypes(graph.nodes, settings.dtypes, default=FLOAT32, edges=edges)
    open_dtype = next((eid for eid, dtype in enumerate(dtypes) if dtype is None), None)
    if open_dtype is not None:
        raise DTypeError(_unknown(graph, open_dtype, dtypes, "dtype"))
    return replace(network, shapes=shapes, dtypes=dtypes), ""


def _check_shape(name: str, shape: object) -> None:
    if shape is None:
        return
    dims = None if isinstance(shape, (str, int)) or not hasattr(shape, "__iter__") else tuple(shape)
    if dims and set(map(type, dims)) == {int} and min(dims) >= 0:  # fast path
        return
    if dims is None or any(isinstance(dim, bool) or not isinstance(dim, (int, np.integer)) for dim in dims):
        raise ShapeError(f"shape of {name!r} must be a tuple of integers, got {shape if dims is None else dims!r}")
    if any(dim < 0 for dim in dims):
        raise ShapeError(f"shape of {name!r} is {dims}: dimensions must be positive (0 means unknown)")


def _is_open(fact: object) -> bool:
    """Return whether a shape or dtype is unknown or partly unknown."""
    return fact is None or (isinstance(fact, tuple) and 0 in fact)


def _unknown(graph: IndexedGraph, eid: int, facts: Sequence[object], kind: str) -> str:
    """Return the error message that names a variable whose shape or dtype is unknown, and an operator that needs it."""
    row = graph.row
    arguments = [nid for nid in graph.variables() if _is_open(facts[row[nid]])]
    if not arguments:
        node = graph.nodes[graph.entry_node[eid]]
        op = "variable" if node.op is None else f"operator {node.op.name}"
        return f"{kind} of {graph.entry_name(eid)!r} ({op}) cannot be inferred: {facts[eid]}"
    nid = arguments[0]
    reader = next((n for n, ins in enumerate(graph.inputs) if row[nid] in ins), None)
    fact = facts[row[nid]]
    shown = shape_text(fact) if isinstance(fact, tuple) else "unknown" if fact is None else str(fact)
    text = f"{kind} of argument {graph.nodes[nid].name!r} is {shown} and cannot be inferred"
    if reader is not None:
        node = graph.nodes[reader]
        assert node.op is not None
        text += f"; operator {node.op.name} ({node.name!r}) needs it"
        text += f", created at {node.created_at}" if node.created_at else ""
    more = [graph.nodes[n].name for n in arguments[1:5]]
    return text + (f" (as do {', '.join(map(repr, more))})" if more else "") + f"; give its {kind}"


PASS: GraphPass = GraphPass(
    name="sizes inferred", switch="shapes", run=infer_sizes, gives=frozenset((SIZES,)), shown=False
)
