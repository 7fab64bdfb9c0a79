"""Who computes each node, and the scratch that the chosen kernels declare.

The implementations are those of :mod:`weftplan.ops.implementations`; the executor obeys what is chosen here. Nothing is
kept between calls; any thread may call them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from weftplan.device.context import Context
from weftplan.errors import PlanError
from weftplan.ops import grain, implementations, measured
from weftplan.ops.implementations import Choice
from weftplan.ops.schema import DType, Shape, TensorSpec, aligned
from weftplan.planner.symbolic.indexed_graph import IndexedGraph


def operator_choices(
    graph: IndexedGraph,
    shapes: list[Shape],
    *,
    dtypes: list[DType],
    devices: Sequence[Context],
    mode: str,
    tune: int,
) -> dict[int, Choice]:
    """Which implementation computes each node that has several or declares scratch, by node id.

    Args:
        devices: of each node.
        mode: :attr:`PlanOptions.kernels <weftplan.planner.options.PlanOptions.kernels>`.
        tune: :attr:`PlanOptions.autotune <weftplan.planner.options.PlanOptions.autotune>`.
    """
    choices: dict[int, Choice] = {}
    # Repeated layers ask once: the parser gives equal parameters one dictionary.
    known: dict[tuple[object, ...], Choice] = {}
    row = graph.row
    for nid, node in enumerate(graph.nodes):
        op = node.op
        if op is None:
            continue
        where = "host" if devices[nid].is_host else devices[nid].device_type
        if op.workspace is None and op.name not in implementations.provided(where):
            continue
        entries = (*graph.inputs[nid], *range(row[nid], row[nid + 1]))
        key = (id(op), id(node.params), where, *[shapes[e] for e in entries], *[dtypes[e] for e in entries])
        found = known.get(key)
        if found is None:
            ins, outs = _specs(graph, nid, shapes, dtypes)
            found = implementations.choose(op, node.params, ins, outs, mode, on=where)
            if mode == "auto" and where == "host" and found.several:
                found = measured.tuned(op, node.params, ins, outs, tune=tune, given=found)
            known[key] = found
        choices[nid] = found
    return choices


def operator_workspaces(
    graph: IndexedGraph,
    shapes: list[Shape],
    *,
    dtypes: list[DType],
    devices: Sequence[Context],
    choices: Mapping[int, Choice],
) -> dict[int, int]:
    """Bytes that the chosen implementations declare for the devices of their nodes, by node id; nodes without scratch
    are absent.

    Raises:
        PlanError: an operator declares a negative number or none at all.
    """
    needs: dict[int, int] = {}
    known: dict[tuple[object, ...], int] = {}
    row = graph.row
    for nid, choice in choices.items():
        node = graph.nodes[nid]
        entries = (*graph.inputs[nid], *range(row[nid], row[nid + 1]))
        where = devices[nid].device_type
        key = (id(choice), id(node.params), where, *[shapes[e] for e in entries], *[dtypes[e] for e in entries])
        found = known.get(key)
        if found is None:
            ins, outs = _specs(graph, nid, shapes, dtypes)
            with grain.using(grain.of(where)):
                nbytes = choice.implementation.workspace(node.params, ins, outs)
            if isinstance(nbytes, bool) or int(nbytes) != nbytes or nbytes < 0:
                raise PlanError(
                    f"operator {node.op.name} ({node.name!r}) declares "  # type: ignore[union-attr]
                    f"{nbytes!r} bytes of workspace: expected >= 0"
                )
            found = known[key] = aligned(int(nbytes))
        if found:
            needs[nid] = found
    return needs


def _specs(
    graph: IndexedGraph, nid: int, shapes: list[Shape], dtypes: list[DType]
) -> tuple[list[TensorSpec], list[TensorSpec]]:
    ins = [TensorSpec(shapes[e], dtypes[e]) for e in graph.inputs[nid]]
    return ins, [TensorSpec(shapes[e], dtypes[e]) for e in range(graph.row[nid], graph.row[nid + 1])]
