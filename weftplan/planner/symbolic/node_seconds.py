"""Modelled or measured seconds of nodes.

The model is a roofline: a node takes the longest of its arithmetic, its memory traffic and, on a host, its elementwise
functions, plus a fixed call overhead.
Recomputation only uses ratios of seconds, so two approximate machines are enough: a few host cores under NumPy, and a
current accelerator.

:mod:`weftplan.ops.core.cost` counts the arithmetic of operators. Pooling also sweeps its output once per element of its
window.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from weftplan.device.context import Context
from weftplan.errors import PlanError
from weftplan.ops.core import cost
from weftplan.ops.core.schema import Req, Shape
from weftplan.ops.fusion.relu import layer_of
from weftplan.planner.drafts import PlannedSteps
from weftplan.planner.program import Program
from weftplan.planner.symbolic.indexed_graph import IndexedGraph
from weftplan.symbol.node import Node


@dataclass(frozen=True, slots=True)
class Machine:
    """Constants of the roofline."""

    flops: float
    """Arithmetic operations per second in a float32 matrix product."""
    bandwidth: float
    """Memory traffic in bytes per second."""
    call: float
    """Overhead of one node in seconds."""
    functions: float = 0.0
    """Seconds of elementwise functions relative to :data:`weftplan.ops.core.cost.FUNCTIONS`."""


HOST = Machine(flops=3.0e10, bandwidth=1.0e10, call=2.0e-6, functions=1.0)
"""Two cores under NumPy. Measured on a loaded machine: convolutions 1e10 to 2e10 operations per second, batch norm
0.9e10 to 1.2e10 bytes per second, activations 2e10; products are faster on an idle machine."""
ACCELERATOR = Machine(flops=3.0e13, bandwidth=2.0e12, call=5.0e-6)
"""A data-centre card without reduced precision, at about half the figures of data sheets. Generated kernels compute
functions while they wait for memory, so these are free."""


def _machine(context: Context) -> Machine:
    """Return the constants of a device; a simulated device counts as an accelerator."""
    return ACCELERATOR if context.has_streams else HOST


def node_seconds(program: Program, measured: Mapping[str, float] | None = None) -> list[float]:
    """Return the seconds of each node of a graph (0 for variables), from ``measured`` by node name, else modelled.

    A twin costs as much as its original.

    Raises:
        PlanError: a measured time is negative or not a number.
    """
    measured = measured or {}
    for name, value in measured.items():
        if not value >= 0.0:
            raise PlanError(f"measured time of {name!r} must be a number of seconds >= 0, got {value!r}")
    graph, row = program.graph, program.graph.row
    machines = [_machine(context) for context in program.contexts]
    result: list[float] = []
    base = graph.base or graph
    assert isinstance(base, IndexedGraph)
    for nid, origin in enumerate(graph.origin):
        # A node without origin is a copy that a rewrite added: it has its own name, and its cost is its traffic.
        node = base.nodes[origin] if origin >= 0 else None
        if graph.is_variable[nid]:
            result.append(0.0)
            continue
        seconds = measured.get(graph.names[nid] if node is None else (node.mirror_of or node).name)
        if seconds is not None:
            result.append(float(seconds))
            continue
        outs = range(row[nid], row[nid + 1])
        is_read = [program.refs[e] > 0 for e in outs]
        result.append(
            _modelled(
                machines[program.device[nid]], node, program.shapes, program.nbytes, inputs=graph.inputs[nid],
                reads=program.reads[nid], outs=outs, is_read=is_read,
            )
        )  # fmt: skip
    return result


def seconds_of(planned: PlannedSteps, nid: int) -> float:
    """Return the modelled seconds of one node of a planned graph, without the call overhead."""
    graph = planned.graph
    assert isinstance(graph, IndexedGraph)
    node = graph.nodes[nid]
    assert node.op is not None
    outs = range(graph.row[nid], graph.row[nid + 1])
    ignored = set(node.op.ignored(node.params))
    reads = [e for k, e in enumerate(graph.inputs[nid]) if k not in ignored]
    nbytes = {e: prod(planned.shapes[e]) * planned.dtypes[e].itemsize for e in (*graph.inputs[nid], *outs)}
    machine = _machine(planned.devices[nid])
    is_read = [planned.requests[e] != Req.NULL for e in outs]
    return (
        _modelled(
            machine, node, planned.shapes, nbytes, inputs=graph.inputs[nid], reads=reads, outs=outs, is_read=is_read
        )
        - machine.call
    )


def _modelled(
    machine: Machine,
    node: Node | None,
    shapes: Sequence[Shape],
    nbytes: Sequence[int] | Mapping[int, int],
    *,
    inputs: Sequence[int],
    reads: Sequence[int],
    outs: Sequence[int],
    is_read: Sequence[bool],
) -> float:
    """Return the modelled seconds of a node (None: a copy) on a machine.

    Args:
        machine: the constants of the roofline.
        node: the node.
        shapes, nbytes: shapes and bytes of all entries.
        inputs: input entries.
        reads: input entries whose values the node reads.
        outs: output entries.
        is_read: for each output, whether it is computed.
    """
    traffic: float = sum(nbytes[e] for e in reads) + sum(
        nbytes[e] for e, counts in zip(outs, is_read, strict=True) if counts
    )
    arithmetic = functions = 0.0
    if node is not None and node.op is not None:
        name = layer_of(node.op.backward_of or node.op.name)
        traffic *= cost.SWEEPS.get(name, 1.0)
        if name == "Pooling":
            # The smaller of input and output has one element per window.
            pooled = min(nbytes[e] for e in (*inputs, *outs))
            traffic += 2.0 * cost.window(node.params) * pooled
        if name in cost.COUNTED:
            arithmetic = cost.operations(
                name,
                [shapes[e] for e in inputs],
                [shapes[e] for e in outs],
                is_backward=node.op.backward_of is not None,
                needed=is_read,
            )
        elif machine.functions:
            seconds = cost.formula_seconds(node.op.forward, node.params, len(inputs), nbytes[outs[0]])
            functions = machine.functions * seconds
    return machine.call + max(arithmetic / machine.flops, traffic / machine.bandwidth, functions)
