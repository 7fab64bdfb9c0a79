"""Shapes and dtypes of backward nodes, derived from the forward nodes in one walk.

This module keeps no state; any thread may call it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

from weftplan.errors import MXNetError
from weftplan.ops.core.schema import DType, Shape
from weftplan.symbol.inference.rules import DTYPES, SHAPES
from weftplan.symbol.node import Node


def infer_rest(
    nodes: Sequence[Node],
    known: Mapping[Node, tuple[Shape, DType]],
    *,
    rows: Sequence[int],
    inputs: Sequence[Sequence[int]],
    controls: Sequence[Sequence[int]],
    shapes: Sequence[Shape],
    dtypes: Sequence[DType],
) -> tuple[list[Shape], list[DType]] | None:
    """Extend shapes and dtypes of the first nodes to all entries: a backward node follows from its forward node.

    One forward walk computes both. Return None if that is not enough, or if a rule raises; the full solver
    (``solver.py``) must run then.

    Args:
        known: shape and dtype of each variable after the first nodes.
        rows, inputs, controls: as for :func:`weftplan.symbol.inference.solver.infer_shapes`.
        shapes, dtypes: the complete facts of the entries of the first nodes.
    """
    found, types = list(shapes), list(dtypes)
    memo: dict[tuple[Any, ...], tuple[list[Any], list[Any]]] = {}
    for i in range(bisect_left(rows, len(found)), len(nodes)):
        node, op = nodes[i], nodes[i].op
        if op is None:
            if node not in known:
                return None
            found.append(known[node][0])
            types.append(known[node][1])
        elif op.backward_of is not None and controls[i]:
            reads, positions = inputs[controls[i][0]], op.grad_inputs
            for position in positions(node.params) if callable(positions) else positions:
                e = reads[position]
                found.append(found[e])
                types.append(types[e])
        else:
            reads = inputs[i]
            ins: tuple[list[Any], list[Any]] = [found[e] for e in reads], [types[e] for e in reads]
            key = (id(op), id(node.params), *ins[0], *ins[1])
            made = memo.get(key)
            if made is None:
                nothing = [None] * (rows[i + 1] - rows[i])
                try:
                    told = [SHAPES.told(op, node, ins[0], nothing), DTYPES.told(op, node, ins[1], nothing)]
                except MXNetError:
                    return None
                if any(new_ins or open_outs for new_ins, _, _, open_outs in told):
                    return None
                shaped, typed = ([fact for _, fact in new_outs] for _, new_outs, _, _ in told)
                made = memo[key] = shaped, typed
            found += made[0]
            types += made[1]
        if len(found) != rows[i + 1]:
            return None
    return found, types
