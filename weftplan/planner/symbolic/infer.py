"""Shapes and dtypes of every entry of a whole graph, complete and checked; needs nothing, gives sizes.

The rules live with the operators and are solved by :mod:`weftplan.symbol.infer`; this pass adds what planning demands:
nothing may stay unknown, and sizes must fit machine integers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from weftplan.errors import DTypeError, ShapeError, shape_text
from weftplan.ops.schema import DType, Shape
from weftplan.planner.graph import IntArray
from weftplan.planner.symbolic.indexed_graph import IndexedGraph
from weftplan.symbol import infer
from weftplan.symbol.node import Node

MAX_BYTES = (1 << 63) - 1
FLOAT32 = np.dtype(np.float32)


def complete_shapes(
    graph: IndexedGraph, known: Mapping[Any, Any], *, stop: int | None = None, settled: Sequence[Shape] = ()
) -> list[Shape]:
    """The shape of every entry, from shapes of variables by name (or by node).

    Args:
        graph: the graph.
        known: shapes of variables.
        stop: look at the first ``stop`` nodes only, which must not need others.
        settled: result for the first nodes, as an earlier call gave it; they are not looked at again.

    Raises:
        ShapeError: a given shape is malformed, shapes conflict, or one stays unknown; the message names the argument
            and an operator that needs it.
    """
    for name, shape in known.items():
        _check_given(name, shape)
    nodes, rows, inputs = _first(graph, stop)
    shapes = infer.infer_shapes(nodes, known, rows=rows, inputs=inputs, numbers=graph.nid, settled=settled)
    for eid in range(len(settled), len(shapes)):
        shape = shapes[eid]
        if shape is None or 0 in shape:
            raise ShapeError(_unknown(graph, eid, shapes, "shape"))
    return shapes  # type: ignore[return-value]  # every None was refused above


def complete_dtypes(
    graph: IndexedGraph, known: Mapping[Any, Any], *, stop: int | None = None, settled: Sequence[DType] = ()
) -> list[DType]:
    """The dtype of every entry; variables of which nothing is known are float32. Arguments as `complete_shapes`.

    Raises:
        DTypeError: dtypes conflict, or one cannot be inferred.
    """
    nodes, rows, inputs = _first(graph, stop)
    dtypes = infer.infer_dtypes(nodes, known, rows=rows, inputs=inputs, numbers=graph.nid, settled=settled)
    open_variables = [node for node, at in zip(nodes, rows, strict=False) if node.op is None and dtypes[at] is None]
    if open_variables:
        completed = {**known, **dict.fromkeys(open_variables, FLOAT32)}
        dtypes = infer.infer_dtypes(nodes, completed, rows=rows, inputs=inputs, numbers=graph.nid, settled=settled)
    for eid in range(len(settled), len(dtypes)):
        if dtypes[eid] is None:
            raise DTypeError(_unknown(graph, eid, dtypes, "dtype"))
    return dtypes  # type: ignore[return-value]  # every None was refused above


def complete_graph(
    graph: IndexedGraph,
    heads: Sequence[int],
    head_grads: Sequence[Node],
    *,
    shapes: Mapping[str, Shape],
    dtypes: Mapping[str, Any],
) -> tuple[list[Shape], list[DType]]:
    """Shapes and dtypes of all entries: those of the forward part, whose ``heads`` are given, then those of the rest.

    Head gradients are like their outputs.
    """
    # Nodes are numbered from the heads on, so the forward part is the first nodes.
    forward = max(int(graph.entry_node[e]) for e in heads) + 1
    if forward == graph.num_nodes:
        return complete_shapes(graph, shapes), complete_dtypes(graph, dtypes)
    forward_shapes = complete_shapes(graph, shapes, stop=forward)
    forward_dtypes = complete_dtypes(graph, dtypes, stop=forward)
    known_shapes: dict[Any, Any] = dict(shapes)
    known_dtypes: dict[Any, Any] = dict(dtypes)
    for e, variable in zip(heads, head_grads, strict=True):
        known_shapes[variable] = forward_shapes[e]
        known_dtypes[variable] = forward_dtypes[e]
    return (
        complete_shapes(graph, known_shapes, settled=forward_shapes),
        complete_dtypes(graph, known_dtypes, settled=forward_dtypes),
    )


def _first(graph: IndexedGraph, stop: int | None) -> tuple[list[Node], list[int], list[list[int]]]:
    """Nodes, rows and inputs of the first ``stop`` nodes."""
    if stop is None:
        return graph.nodes, graph.row, graph.inputs
    return graph.nodes[:stop], graph.row[: stop + 1], graph.inputs[:stop]


def byte_sizes(graph: IndexedGraph, shapes: list[Shape], dtypes: list[DType]) -> tuple[IntArray, IntArray]:
    """(elements, bytes) of every entry.

    Raises:
        ShapeError: an entry, or all of them together, exceed 2^63 - 1 bytes.
    """
    counted: dict[Shape, int] = {}
    widths: dict[DType, int] = {}
    elements: list[int] = []
    nbytes: list[int] = []
    for shape, dtype in zip(shapes, dtypes, strict=True):
        count = counted.get(shape)
        if count is None:
            count = 1
            for dim in shape:
                count *= dim
            counted[shape] = count
        width = widths.get(dtype)
        if width is None:
            width = widths[dtype] = dtype.itemsize
        elements.append(count)
        nbytes.append(count * width)
    if sum(nbytes) > MAX_BYTES:
        largest = max(range(len(nbytes)), key=nbytes.__getitem__)
        raise ShapeError(
            f"the graph needs {sum(nbytes)} bytes without sharing, more than 2^63 - 1; the largest entry is "
            f"{graph.entry_name(largest)!r}, shape {shapes[largest]}, {dtypes[largest]}"
        )
    return np.array(elements, dtype=np.int64), np.array(nbytes, dtype=np.int64)


def _check_given(name: Any, shape: Any) -> None:
    label = getattr(name, "name", name)
    if shape is None:
        return
    if isinstance(shape, (str, int)) or not hasattr(shape, "__iter__"):
        raise ShapeError(f"shape of {label!r} must be a tuple of integers, got {shape!r}")
    for dim in shape:
        if isinstance(dim, bool) or not isinstance(dim, (int, np.integer)):
            raise ShapeError(f"shape of {label!r} must be a tuple of integers, got {tuple(shape)!r}")
        if dim < 0:
            raise ShapeError(f"shape of {label!r} is {tuple(shape)}: dimensions must be positive (0 means unknown)")


def _shown(fact: Any) -> str:
    return shape_text(fact) if isinstance(fact, tuple) else "unknown" if fact is None else str(fact)


def _unknown(graph: IndexedGraph, eid: int, facts: list[Any], what: str) -> str:
    """Which variable lacks a fact, and who needs it."""
    row = graph.row

    def open_(e: int) -> bool:
        fact = facts[e]
        return fact is None or (what == "shape" and 0 in fact)

    arguments = [nid for nid in graph.variables() if row[nid] < len(facts) and open_(row[nid])]
    if not arguments:
        node = graph.entry(eid).node
        op = "variable" if node.op is None else f"operator {node.op.name}"
        return f"{what} of {graph.entry_name(eid)!r} ({op}) cannot be inferred: {facts[eid]}"
    nid = arguments[0]
    reader = next((n for n, ins in enumerate(graph.inputs) if row[nid] in ins), None)
    text = f"{what} of argument {graph.nodes[nid].name!r} is {_shown(facts[row[nid]])} and cannot be inferred"
    if reader is not None:
        node = graph.nodes[reader]
        assert node.op is not None
        text += f"; operator {node.op.name} ({node.name!r}) needs it"
        text += f", created at {node.created_at}" if node.created_at else ""
    others = [graph.nodes[n].name for n in arguments[1:5]]
    return text + (f" (as do {', '.join(map(repr, others))})" if others else "") + f"; give its {what}"
