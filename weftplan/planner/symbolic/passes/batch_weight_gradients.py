"""Batch the gradients of a weight that many FullyConnected layers share.

The gradient of such a weight is a chain of sums with one term per layer (in an unrolled cell, one per time step).
One node of :data:`SHARED_GRADIENT` computes several consecutive terms of the chain, at the position of the last. If
the gradient nodes of these layers are contiguous, it also computes their gradients with respect to the data.

Batching pays for layers with few rows, because their products are small and each is followed by a sum. A batch rounds
the sum in another order than its terms do. So sums of fewer than :data:`LONG_SUM` terms are never batched: whether such
a sum is a chain depends on options that must not change a bit.

The rewrite creates no cycle: number the nodes in the original order. A new node has the position of the last layer of
its batch; all its inputs precede the layers of the batch, and all its readers follow the last of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from weftplan.device.amounts import counted
from weftplan.ops.core.schema import Shape
from weftplan.ops.fusion.shared_gradient import SHARED_GRADIENT
from weftplan.planner.options import LONG_SUM
from weftplan.planner.symbolic.network import Edit, Network, alike
from weftplan.planner.symbolic.passes.graph_pass import BACKWARD, FUSION, GRADIENTS, SIZES, GraphPass, PassSettings
from weftplan.symbol.node import NodeParams

ROWS = 256
"""Target number of rows of one batch, also limited by the columns of the weight. Then the results that stay alive until
the last layer of the batch, and the scratch, are about as large as the weight."""
MAX_LAYERS = 32
"""Maximum number of layers of one batch."""
FLOATS = frozenset((np.dtype(np.float32), np.dtype(np.float64)))
"""Dtypes whose products need no copies in a wider dtype."""
_LAYER, _SUM = "_backward_FullyConnected", "_grad_add"


@dataclass(slots=True)
class _Chain:
    """A chain of sums ``terms[0] + terms[1] + …``; node ``sums[i]`` adds term ``i + 1``."""

    terms: list[int]
    sums: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Weight:
    """One shared weight."""

    layers: Sequence[int]
    """Gradient nodes of its layers, in the order of the sum."""
    chains: Sequence[_Chain]
    """Chain of the weight's gradient, and that of the bias if there is one."""
    max_layers: int
    """Maximum number of layers of one batch."""

    @property
    def ends(self) -> list[int]:
        """Number of layers up to the end of each batch."""
        count = -(-len(self.layers) // self.max_layers)
        return [len(self.layers) * (k + 1) // count for k in range(count)]


def batch_weight_gradients(network: Network, settings: PassSettings) -> tuple[Network, str]:
    """Batch the gradients of shared weights."""
    weights = _weights(network)
    if not weights:
        return network, ""
    edit = Edit(network)
    layers = sum(_batch(edit, weight) for weight in weights)
    return edit.finish(), f"gathered gradients of {counted(layers, 'layer')} with shared weights"


def _max_layers(network: Network, nid: int) -> int:
    """Return the maximum number of layers of one batch, if all are like that of gradient ``nid``; below 2: no batch."""
    graph, shapes, dtypes = network.graph, network.shapes, network.dtypes
    layer = graph.controls[nid][0]
    output, (data, weight) = graph.row[layer], graph.inputs[layer][:2]
    rows = prod(shapes[output]) // shapes[weight][0]
    kinds = {dtypes[e] for e in (output, data, weight)}
    if not network.devices[nid].is_host or not rows or len(kinds) > 1 or kinds.pop() not in FLOATS:
        return 0
    return min(-(-min(ROWS, shapes[weight][1]) // rows), MAX_LAYERS)


def _match(network: Network, a: int, b: int) -> bool:
    """Return whether two gradient nodes may be in one batch."""
    graph, devices = network.graph, network.devices
    node, other = graph.nodes[a], graph.nodes[b]

    def inputs(nid: int) -> list[Shape]:
        return [network.shapes[e] for e in graph.inputs[graph.controls[nid][0]]]

    return devices[a] == devices[b] and node.params == other.params and alike(node, other) and inputs(a) == inputs(b)


def _weights(network: Network) -> list[_Weight]:
    """Return the shared weights whose gradients can be batched."""
    graph, begin = network.graph, network.num_forward
    nodes, makers, row = graph.nodes, graph.entry_node, graph.row
    backward = range(begin, graph.num_nodes)
    sums = [nid for nid in backward if (op := nodes[nid].op) is not None and op.name == _SUM]
    if not sums:
        return []
    added = {makers[e] for nid in sums for e in graph.inputs[nid]}
    uses = Counter([e for nid in backward for e in graph.inputs[nid] if makers[e] in added])
    uses.update(e for e in graph.outputs if makers[e] in added)
    chains: dict[int, _Chain] = {}  # last sum -> its chain
    for nid in sums:
        data, right = graph.inputs[nid]
        begun = makers[data] in chains and uses[row[makers[data]]] == 1
        chain = chains.pop(makers[data]) if begun else _Chain([data])
        chain.terms.append(right)
        chain.sums.append(nid)
        chains[nid] = chain
    by_layers: dict[tuple[int, ...], dict[int, _Chain]] = {}
    for chain in chains.values():
        layers = tuple(makers[e] for e in chain.terms)
        outputs = {e - row[makers[e]] for e in chain.terms}
        fit = len(outputs) == 1 and all(
            nid >= begin and (op := nodes[nid].op) is not None and op.name == _LAYER for nid in layers
        )
        if fit and len(layers) >= LONG_SUM and all(uses[e] == 1 for e in chain.terms):
            by_layers.setdefault(layers, {})[outputs.pop()] = chain
    weights = []
    for layers, by_output in by_layers.items():
        base, *later = layers
        weight, bias = by_output.get(1), by_output.get(2)
        same = all(graph.inputs[nid][2] == graph.inputs[base][2] and _match(network, base, nid) for nid in later)
        onwards = all(a < b for a, b in zip(layers, later, strict=False))
        limit = _max_layers(network, base) if weight is not None and same and onwards else 0
        if weight is None or limit < 2:
            continue
        biased = row[base + 1] - row[base] > 2
        if bias is None and biased and any(uses[row[nid] + 2] for nid in layers):
            continue
        weights.append(_Weight(layers, [weight] if bias is None else [weight, bias], limit))
    return weights


def _batch(edit: Edit, weight: _Weight) -> int:
    """Add the batched nodes of one weight; return the number of layers that they replace."""
    ends, batched = weight.ends, 0
    sums = {nid for chain in weight.chains for nid in chain.sums}
    params: dict[tuple[int, bool], dict[str, Any]] = {}  # equal batches share one dictionary
    for begin, end in zip([0, *ends], ends, strict=False):
        group = weight.layers[begin:end]
        if len(group) > 1:
            _group(edit, group, all_gradients=_is_run(edit, group, sums), shared_params=params)
            batched += len(group)
    for chain in weight.chains:
        total = chain.terms[0] if ends[0] == 1 else -1
        for number, nid in enumerate(chain.sums, 1):
            entry = edit.network.graph.row[nid]
            if number + 1 in ends:  # the sum after a batch stays; the sums between its terms become dead
                term = chain.terms[number]
                if total < 0:
                    edit.stand_for(entry, term)
                    total = term
                else:
                    edit.inputs[nid] = [total, term]
                    total = entry
            if total != entry:
                edit.node_stands_for(nid, None if total < 0 else edit.makers[edit.at(total)])
    return batched


def _is_run(edit: Edit, group: Sequence[int], sums: set[int]) -> bool:
    """Return whether only sums lie between the layers in the node order, and no layer reads another or a sum."""
    graph = edit.network.graph
    inside = {*group, *sums}
    reads = (graph.entry_node[e] for nid in group for e in graph.inputs[nid])
    return inside.issuperset(range(group[0], group[-1])) and inside.isdisjoint(reads)


def _group(
    edit: Edit, layers: Sequence[int], *, all_gradients: bool, shared_params: dict[tuple[int, bool], NodeParams]
) -> None:
    """Replace a batch of gradient nodes by one node; with ``all_gradients`` it also computes those of the data."""
    graph, count = edit.network.graph, len(layers)
    base, final = layers[0], layers[-1]
    layer_params, row = graph.nodes[base].params, graph.row
    params = shared_params.setdefault((count, all_gradients), {**layer_params, "count": count, "whole": all_gradients})
    inputs = [graph.inputs[nid][k] for k in (0, 1) for nid in layers]
    entry = edit.add(
        SHARED_GRADIENT,
        f"{graph.names[final]}_shared",
        inputs=[*inputs, graph.inputs[base][2]] if all_gradients else inputs,
        main=final,
        params=params,
        attrs={**graph.nodes[final].attrs, "count": str(count)},
        controls=[dep for nid in layers for dep in graph.controls[nid] if dep not in layers],
    )
    sums = SHARED_GRADIENT.num_outputs(params) - count * all_gradients
    for k in range(sums):
        edit.stand_for(row[final] + 1 + k, entry + k)
    if all_gradients:
        for k, nid in enumerate(layers):
            edit.stand_for(row[nid], entry + sums + k)
            edit.node_stands_for(nid, edit.makers[entry])


PASS: GraphPass = GraphPass(
    name="shared gradients gathered",
    switch=FUSION,
    enabled=lambda settings: settings.fuses() and settings.options.drop_dead_outputs,
    run=batch_weight_gradients,
    changes=frozenset((BACKWARD,)),
    needs=frozenset((GRADIENTS, SIZES)),
)
