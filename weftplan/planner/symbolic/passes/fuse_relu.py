"""Fuse a layer and its relu, the gradients of a relu and its layer, and a convolution and its batch norm.

A convolution and a batch norm are fused only if neither has a gradient node. The array between two fused nodes is never
written and not read again; results are bitwise equal. Two nodes are fused if no other node reads the value between them
and if their attributes for device and forced recomputation are equal. A fused node has the name of its last member,
whose output it makes. The pass runs on the graph with gradients.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence

from weftplan.device.amounts import counted
from weftplan.ops.core import registry
from weftplan.ops.fusion import relu as fused
from weftplan.ops.nn.batch_norm import NORM
from weftplan.planner.symbolic.indexed_graph import IndexedGraph
from weftplan.planner.symbolic.network import Edit, Network, alike, shared
from weftplan.planner.symbolic.passes.graph_pass import BACKWARD, FORWARD, FUSION, GraphPass, PassSettings
from weftplan.symbol.node import Entry, Node, NodeParams

LAYER = "__layer__"
"""Attribute of a fused node: the name of its layer."""
NORMALIZED = "__norm__"
"""Attribute of a fused node that contains a batch norm: the name and the attributes of the batch norm, as JSON."""
FOLLOWERS = frozenset(("BatchNorm", "Activation", "relu", *fused.GRADIENTS))
"""Operators of nodes that may be fused with the maker of their first input."""


def fuse_relu(network: Network, settings: PassSettings) -> tuple[Network, str]:
    """Fuse all pairs that meet the conditions in this module's docstring."""
    graph = network.graph
    nodes, makers, row = graph.nodes, graph.entry_node, graph.row
    candidates = [
        nid for nid, node in enumerate(nodes) if node.op is not None and node.op.name in FOLLOWERS and graph.inputs[nid]
    ]
    if not candidates:
        return network, ""
    first_of = {nid: makers[graph.inputs[nid][0]] for nid in candidates}
    counted_nodes = {*first_of.values(), *candidates}
    uses = Counter([e for ins in (*graph.inputs, graph.outputs) for e in ins if makers[e] in counted_nodes])
    dependants: dict[int, list[int]] = {}  # node -> nodes with a control dependency on it: its gradients
    for nid, deps in enumerate(graph.controls):
        for dep in deps:
            dependants.setdefault(dep, []).append(nid)
    layers: dict[int, int] = {}  # layer -> its relu
    inner: dict[int, int] = {}  # gradient of a layer -> gradient of the relu before it
    before_norm: dict[int, int] = {}  # batch norm -> the convolution before it
    for nid in candidates:
        node, entry, producer = nodes[nid], graph.inputs[nid][0], first_of[nid]
        relu_op, op = node.op, nodes[producer].op
        if relu_op is None or op is None or uses[entry] != 1 or not alike(nodes[producer], node):
            continue
        if fused.is_relu(relu_op, node.params):
            waits = graph.controls[producer] or graph.controls[nid]
            if op.name in fused.LAYERS and entry == row[producer] and not waits:
                layers[producer] = nid
        elif relu_op.name == "BatchNorm":
            free = not any(graph.controls[member] or member in dependants for member in (producer, nid))
            only_result = free and not uses[row[nid] + 1] and not uses[row[nid] + 2]
            if only_result and op.name == "Convolution" and node.params["axis"] == 1:
                before_norm[nid] = producer
        elif producer in dependants or not fused.is_gradient_of_relu(op, nodes[producer].params):
            continue
        elif _norm_of(graph, nid, producer) is not None:
            inner[nid] = producer
    # A gradient takes its shapes from its forward node's inputs, so a relu whose gradient remains cannot be fused.
    removed = set(inner.values())
    layers = {layer: relu for layer, relu in layers.items() if removed.issuperset(dependants.get(relu, ()))}
    count = len(layers) + len(inner) + len(before_norm)
    if not count:
        return network, ""
    edit = Edit(network)
    _fuse_norms(edit, before_norm, layers)
    for layer, relu in layers.items():
        if layer not in before_norm:
            _fuse_layer(edit, layer, relu)
    for gradient, forward_gradient in inner.items():
        _fuse_gradients(edit, gradient, forward_gradient)
    return edit.finish(), f"joined {counted(count, 'pair')} of nodes that follow one another"


def _fuse_norms(edit: Edit, before_norm: dict[int, int], layers: dict[int, int]) -> None:
    """Fuse each convolution with its batch norm, and with the relu after that, if there is one."""
    graph = edit.network.graph
    params: dict[tuple[int, int], dict[str, object]] = {}  # equal layers share one dictionary
    for norm, conv_id in before_norm.items():
        relu = layers.get(norm)
        conv, node, final = graph.nodes[conv_id], graph.nodes[norm], graph.nodes[norm if relu is None else relu]
        inputs = graph.inputs[conv_id]
        fused_entry = edit.add(
            fused.NORMALIZED["" if relu is None else fused.RELU],
            final.name,
            inputs=[*inputs[:2], *graph.inputs[norm][1:], *inputs[2:]],
            main=conv_id,
            params=params.setdefault((id(conv.params), id(node.params)), {**conv.params, NORM: node.params}),
            attrs={**conv.attrs, LAYER: conv.name, NORMALIZED: json.dumps([node.name, node.attrs])},
            like=[graph.row[norm]],
        )
        removed = (norm,) if relu is None else (norm, relu)
        edit.fuse(removed, {graph.row[nid]: fused_entry for nid in removed})


def _fuse_layer(edit: Edit, layer: int, relu: int) -> None:
    """Fuse a layer and its relu."""
    graph = edit.network.graph
    node, row = graph.nodes[layer], graph.row
    assert node.op is not None
    fused_entry = edit.add(
        fused.LAYERS[node.op.name],
        graph.names[relu],
        inputs=graph.inputs[layer],
        main=layer,
        params=node.params,
        attrs={**node.attrs, LAYER: node.name},
        controls=[*graph.controls[layer], *graph.controls[relu]],
        like=range(row[layer], row[layer + 1]),
    )
    outputs = {row[layer] + k: fused_entry + k for k in range(row[layer + 1] - row[layer])}
    edit.fuse((layer, relu), {**outputs, row[relu]: fused_entry})


def _fuse_gradients(edit: Edit, gradient: int, norm_gradient: int) -> None:
    """Fuse the gradient of a batch norm with the gradient ``norm_gradient`` of the relu after the batch norm."""
    graph = edit.network.graph
    node, row = graph.nodes[gradient], graph.row
    norm = _norm_of(graph, gradient, norm_gradient)
    assert norm is not None
    assert node.op is not None
    inputs = graph.inputs[gradient]
    fused_entry = edit.add(
        fused.GRADIENTS[node.op.name],
        node.name,
        inputs=[graph.inputs[norm_gradient][0], *inputs[1:3], graph.inputs[norm][2], *inputs[3:]],
        main=gradient,
        params=node.params,
        attrs=dict(node.attrs),
        controls=[*graph.controls[gradient], *graph.controls[norm_gradient]],
        like=range(row[gradient], row[gradient + 1]),
    )
    edit.fuse((gradient,), {row[gradient] + k: fused_entry + k for k in range(row[gradient + 1] - row[gradient])})


def _norm_of(graph: IndexedGraph, gradient: int, norm_gradient: int) -> int | None:
    """Return the forward node of ``gradient`` if ``norm_gradient`` is the gradient of its relu, else None."""
    relu = graph.entry_node[graph.inputs[norm_gradient][1]]
    norm = graph.entry_node[graph.inputs[relu][0]] if graph.inputs[relu] else None
    return norm if norm in graph.controls[gradient] else None


def unfuse(node: Node, inputs: Sequence[Entry]) -> list[Entry]:
    """Return the visible outputs of a fused node, on a new layer, batch norm and relu."""
    assert node.op is not None
    attrs = {key: text for key, text in node.attrs.items() if key not in (LAYER, NORMALIZED)}
    normalized = NORMALIZED in node.attrs

    def _node(op: str, name: str, attrs: dict[str, str], params: NodeParams, inputs: list[Entry]) -> Node:
        return Node(registry.get(op), name, attrs=attrs, params=params, inputs=inputs, created_at=node.created_at)

    params = {key: value for key, value in node.params.items() if key != NORM}
    inputs_of_layer = [*inputs[:2], *inputs[6:]] if normalized else list(inputs)
    layer = _node(fused.layer_of(node.op.name), node.attrs[LAYER], attrs, params, inputs_of_layer)
    if normalized:
        name, norm_attrs = json.loads(node.attrs[NORMALIZED])
        layer = _node("BatchNorm", name, norm_attrs, node.params[NORM], [Entry(layer), *inputs[2:6]])
    outputs = [Entry(layer, k) for k in range(layer.num_outputs)]
    if node.op.name.endswith(fused.RELU):
        act = {"act_type": "relu"}
        params = registry.parse_params(registry.get("Activation"), act)
        outputs[0] = Entry(_node("Activation", node.name, act | shared(node), params, outputs[:1]))
    return outputs


def members(node: Node) -> list[str]:
    """Return the names of the members whose outputs a fused node does not make."""
    assert node.op is not None
    names = [node.attrs[LAYER]]
    if NORMALIZED in node.attrs and node.op.name.endswith(fused.RELU):
        names.append(json.loads(node.attrs[NORMALIZED])[0])
    return names


PASS: GraphPass = GraphPass(
    name="layers joined",
    switch=FUSION,
    enabled=lambda settings: settings.fuses() and settings.context.is_host and not settings.group2ctx,
    run=fuse_relu,
    changes=frozenset((FORWARD, BACKWARD)),
    fused=(*fused.LAYERS.values(), *fused.NORMALIZED.values()),
    unfuse=unfuse,
    members=members,
)
