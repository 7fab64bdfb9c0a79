"""Dtype inference without a walk, for graphs whose inputs all have one dtype.

Most networks are such graphs, except those with masks. This module keeps no state; any thread may call it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

from weftplan.errors import MXNetError
from weftplan.ops.core.schema import DType
from weftplan.symbol.inference.rules import DTYPES, News, Sort, differ, sort_of
from weftplan.symbol.node import Node


def of_one_dtype(
    nodes: Sequence[Node],
    default: DType,
    *,
    values: Sequence[DType | None],
    rows: Sequence[int],
    inputs: Sequence[Sequence[int]],
    sorts: Mapping[Sort, int],
) -> list[DType] | None:
    """Return the dtypes of all entries if every entry that a node reads has the default dtype, else None.

    This holds if no variable has another known dtype, and if each rule, given the default for all inputs, keeps it for
    them and deviates only for outputs that no node reads.

    Args:
        values: the known dtype of each entry before any rule is called, or None.
        rows, inputs: as for :func:`weftplan.symbol.inference.solver.infer_dtypes`.
        sorts: of each sort of node one.
    """
    for fact in values:
        if fact is not None and fact is not default and fact != default:
            return None
    others: dict[Sort, News] = {}
    for sort, i in sorts.items():
        node, op = nodes[i], nodes[i].op
        if op is None or op.single or op.backward_of is not None:
            return None
        ins, outs = [default] * len(inputs[i]), [None] * (rows[i + 1] - rows[i])
        try:
            new_ins, new_outs, _, open_outs = DTYPES.told(op, node, ins, outs)
        except MXNetError:
            return None
        if new_ins or open_outs:
            return None
        news = [(k, fact) for k, fact in new_outs if differ(fact, default)]
        if news:
            others[sort] = news
    found = [default] * len(values)
    if others:
        ops = {op for op, _, _ in others}
        some = [i for i, node in enumerate(nodes) if id(node.op) in ops]
        odd = {rows[i] + k: fact for i in some for k, fact in others.get(sort_of(nodes[i]), ())}
        if not odd.keys().isdisjoint(chain.from_iterable(inputs)):
            return None
        for e, fact in odd.items():
            found[e] = fact
    return found
