"""Who computes each node, and the scratch that the chosen kernels declare.

The implementations are those of :mod:`weftplan.ops.implementations`; the executor obeys what is chosen here.
"""

from __future__ import annotations

from collections.abc import Sequence

from weftplan.device.context import Context
from weftplan.errors import PlanError
from weftplan.ops import grain, implementations, measured
from weftplan.ops.implementations import Choice
from weftplan.ops.schema import DType, Shape, TensorSpec, aligned
from weftplan.planner.options import PlanOptions
from weftplan.planner.symbolic.indexed_graph import IndexedGraph


def operator_choices(
    graph: IndexedGraph, *, shapes: list[Shape], dtypes: list[DType], devices: Sequence[Context], options: PlanOptions
) -> tuple[dict[int, Choice], dict[int, int]]:
    """Which implementation computes each node that has several or declares scratch, and the bytes of scratch of those
    that need some, both by node id.

    Raises:
        PlanError: an operator declares a negative number of bytes or none at all.
    """
    choices: dict[int, Choice] = {}
    needs: dict[int, int] = {}
    # Repeated layers ask once: the parser gives equal parameters one dictionary.
    known: dict[tuple[object, ...], tuple[Choice, int]] = {}
    row, inputs = graph.row, graph.inputs
    where, offered = "", implementations.provided("")
    last: Context | None = None
    for nid, node in enumerate(graph.nodes):
        op = node.op
        if op is None:
            continue
        if devices[nid] is not last:
            last = devices[nid]
            where = "host" if last.is_host else last.device_type
            offered = implementations.provided(where)
        if op.workspace is None and op.name not in offered:
            continue
        assert last is not None
        start, end, reads = row[nid], row[nid + 1], inputs[nid]
        facts = [shapes[e] for e in reads], [dtypes[e] for e in reads]
        key = (id(op), id(node.params), last.device_type, *facts[0], *facts[1], *shapes[start:end], *dtypes[start:end])
        found = known.get(key)
        if found is None:
            ins = list(map(TensorSpec, *facts))
            outs = list(map(TensorSpec, shapes[start:end], dtypes[start:end]))
            choice = implementations.choose(op, node.params, ins, outs, options.kernels, on=where)
            if options.kernels == "auto" and where == "host" and choice.several:
                choice = measured.tuned(op, node.params, ins, outs, tune=options.autotune, given=choice)
            with grain.using(grain.of(last.device_type)):
                nbytes = choice.implementation.workspace(node.params, ins, outs)
            if isinstance(nbytes, bool) or int(nbytes) != nbytes or nbytes < 0:
                raise PlanError(
                    f"operator {op.name} ({node.name!r}) declares {nbytes!r} bytes of workspace: expected >= 0"
                )
            found = known[key] = choice, aligned(int(nbytes))
        choices[nid] = found[0]
        if found[1]:
            needs[nid] = found[1]
    return choices, needs
