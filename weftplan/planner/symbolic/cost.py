"""What a node costs: modelled seconds, or measured ones where the caller has them.

The model is a roofline: a node takes as long as its arithmetic or its memory traffic, whichever is longer, plus a fixed
cost of being called. Only ratios matter to the search (which results are cheap to repeat, and what part of a step the
repetition is), so two rough machines are enough: a few host cores under NumPy, and a current accelerator.

Arithmetic is counted for the operators that are more than a few operations per element: matrix products and
convolutions (two per multiply-add, twice that for their backward nodes, which make two products). Everything else is
priced by its traffic; operators that sweep their data several times say how often, and pooling sweeps its output once
for every element of its window.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod, sqrt

from weftplan.device.context import Context
from weftplan.errors import PlanError
from weftplan.ops.joined import RELU
from weftplan.planner.program import Program
from weftplan.planner.symbolic.indexed_graph import IndexedGraph


@dataclass(frozen=True, slots=True)
class Machine:
    """Constants of the roofline."""

    flops: float
    """Arithmetic operations per second of a matrix product of float32."""
    bandwidth: float
    """Bytes moved per second."""
    call: float
    """Seconds that every node takes whatever its size."""


HOST = Machine(flops=3.0e10, bandwidth=1.0e10, call=2.0e-6)
"""Two cores under NumPy. Kernels measured there, beside other work: convolutions 1e10 to 2e10 operations per second,
batch norm 0.9e10 to 1.2e10 bytes per second, activations 2e10; a quiet machine is faster at the products."""
ACCELERATOR = Machine(flops=3.0e13, bandwidth=2.0e12, call=5.0e-6)
"""A data-centre card without reduced precision: taken from data sheets, at about half of what they state."""

SWEEPS: Mapping[str, float] = {
    # Mean, variance and normalisation each pass over the data once.
    "BatchNorm": 2.0,
    "LayerNorm": 2.0,
    "InstanceNorm": 2.0,
    "GroupNorm": 2.0,
    "L2Normalization": 1.5,
    "LRN": 3.0,
    "softmax": 2.0,
    "log_softmax": 2.0,
    "SoftmaxActivation": 2.0,
    "SoftmaxOutput": 2.0,
    # Random bits cost more than the traffic of the mask.
    "Dropout": 4.0,
}
"""How often an operator's memory traffic is more than reading every input and writing every output once."""

_PRODUCTS = frozenset(("FullyConnected", "dot", "batch_dot", "_linalg_gemm", "_linalg_gemm2"))
_CONVOLUTIONS = frozenset(("Convolution", "Deconvolution"))


def machine_of(context: Context) -> Machine:
    """The constants for a device."""
    return HOST if context.is_host else ACCELERATOR


def node_seconds(program: Program, measured: Mapping[str, float] | None = None) -> list[float]:
    """Seconds of every node of a graph (0 for variables).

    Args:
        program: the graph of a symbol with sizes, or what the core made of it.
        measured: seconds by node name; other nodes are modelled. A twin costs what its original costs.

    Raises:
        PlanError: a measured time is negative or not a number.
    """
    measured = {} if measured is None else measured
    for name, value in measured.items():
        if not value >= 0.0:
            raise PlanError(f"measured time of {name!r} must be a number of seconds >= 0, got {value!r}")
    graph, row = program.graph, program.graph.row
    machines = [machine_of(context) for context in program.contexts]
    result: list[float] = []
    base = graph.base
    assert isinstance(base, IndexedGraph)
    variable = graph.is_variable.tolist()
    for nid, origin in enumerate(graph.origin):
        # A node that a rewrite has added copies a result: it has a name of its own, and costs its traffic.
        node = base.nodes[origin] if origin >= 0 else None
        if variable[nid]:
            result.append(0.0)
            continue
        known = measured.get(graph.names[nid] if node is None else (node.mirror_of or node).name)
        if known is not None:
            result.append(float(known))
            continue
        machine = machines[program.device[nid]]
        outs = range(row[nid], row[nid + 1])
        traffic: float = sum(program.nbytes[e] for e in program.reads[nid]) + sum(
            program.nbytes[e] for e in outs if program.refs[e]
        )
        arithmetic = 0.0
        if node is not None and node.op is not None:
            name = (node.op.backward_of or node.op.name).removesuffix(RELU)
            traffic *= SWEEPS.get(name, 1.0)
            if name == "Pooling":
                traffic += 2.0 * _window(node.params) * program.nbytes[_pooled(nid, program)]
            arithmetic = _arithmetic(name, node.op.backward_of is not None, program, graph.inputs[nid], outs)
        result.append(machine.call + max(arithmetic / machine.flops, traffic / machine.bandwidth))
    return result


def _arithmetic(name: str, is_backward: bool, program: Program, inputs: Sequence[int], outs: Sequence[int]) -> float:
    """Operations of one node. Backward nodes of products have the inputs (outgoing gradient, left, right, …)."""
    elements, shapes = program.elements, program.shapes
    if name == "RNN":  # every parameter meets every step of every sample, twice more for the gradients
        data, vector = outs[:2] if is_backward else inputs[:2]
        return (4.0 if is_backward else 2.0) * prod(shapes[data][:2]) * elements[vector]
    if is_backward:
        if len(inputs) < 3 or name not in _PRODUCTS | _CONVOLUTIONS:
            return 0.0
        out, left, right, times = inputs[0], inputs[1], inputs[2], 2.0 * sum(program.refs[e] > 0 for e in outs[:2])
    else:
        if len(inputs) < 2:
            return 0.0
        out, left, right, times = outs[0], inputs[0], inputs[1], 2.0
    if name == "Convolution":
        return times * elements[out] * prod(shapes[right][1:])
    if name == "Deconvolution":
        return times * elements[left] * prod(shapes[right][1:])
    if name in _PRODUCTS:
        # (m, k) by (k, n): the root of mk * kn * mn is mkn; a batch of B products counts B too often under the root.
        batch = shapes[left][0] if name == "batch_dot" else 1
        return times * sqrt(elements[out] * elements[left] * elements[right] / max(batch, 1))
    return 0.0


def _window(params: Mapping[str, object]) -> int:
    """Elements that a pooling window covers; the whole image counts once, because it is one ordinary reduction."""
    kernel = params.get("kernel")
    if params.get("global_pool") or not isinstance(kernel, tuple):
        return 1
    return prod(int(side) for side in kernel)


def _pooled(nid: int, program: Program) -> int:
    """The smaller side of a pooling node, forward or backward: the entry that has one element per window."""
    row = program.graph.row
    entries: list[int] = [*program.graph.inputs[nid], *range(row[nid], row[nid + 1])]
    return min(entries, key=lambda e: program.nbytes[e])
