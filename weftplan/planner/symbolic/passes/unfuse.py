"""Nodes that have become one, as the nodes that they were: for readers, and for files, which know no joined operators.

Nothing is kept, and no given node is changed; any thread may call these.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from weftplan.ops.core import registry
from weftplan.ops.fusion import relu as joined
from weftplan.ops.nn.batch_norm import NORM
from weftplan.planner.symbolic.passes import fuse_depthwise
from weftplan.planner.symbolic.passes.fuse_relu import ALIKE, LAYER, NORMALIZED
from weftplan.symbol.node import Entry, Node
from weftplan.symbol.traversal import followed, rewired, topological_order


def joined_layers(nodes: Iterable[Node]) -> list[str]:
    """Names of the nodes that have become one with what is behind them: layers with a relu."""
    found: list[str] = []
    for node in nodes:
        block = fuse_depthwise.members(node)
        found += [name for name, _ in block[:-1]]
        found += [attrs[LAYER] for _, attrs in block if LAYER in attrs]
        if node.op is not None and LAYER in node.attrs:
            found.append(node.attrs[LAYER])
            if NORMALIZED in node.attrs and node.op.name.endswith(joined.RELU):
                found.append(json.loads(node.attrs[NORMALIZED])[0])
    return found


def parted(entries: Sequence[Entry]) -> list[Entry]:
    """The same forward graph with joined nodes as the layer and the relu that they were."""
    layers: dict[Node, Node] = {}
    moved: dict[Node, Node] = {}

    def at(entry: Entry) -> Entry:
        layer = layers.get(entry[0])
        return followed(entry, moved) if layer is None or entry[1] == 0 else Entry(layer, entry[1], entry[2])

    whole = fuse_depthwise.apart(entries)
    for node in topological_order(whole):
        inputs = [at(entry) for entry in node.inputs]
        if node.op is not None and LAYER in node.attrs and joined.layer_of(node.op.name) in joined.LAYERS:
            name = joined.layer_of(node.op.name)
            attrs = {key: text for key, text in node.attrs.items() if key not in (LAYER, NORMALIZED)}
            own = inputs if NORMALIZED not in node.attrs else [*inputs[:2], *inputs[6:]]
            layer = Node(
                registry.get(name),
                node.attrs[LAYER],
                attrs=attrs,
                params={key: value for key, value in node.params.items() if key != NORM},
                inputs=own,
                control_deps=[moved.get(dep, dep) for dep in node.control_deps],
                created_at=node.created_at,
            )
            if NORMALIZED in node.attrs:
                second, given = json.loads(node.attrs[NORMALIZED])
                layer = Node(
                    registry.get("BatchNorm"),
                    second,
                    attrs=given,
                    params=node.params[NORM],
                    inputs=[Entry(layer), *inputs[2:6]],
                    created_at=node.created_at,
                )
            moved[node] = layers[node] = layer
            if node.op.name.endswith(joined.RELU):
                moved[node] = _relu_behind(layer, node)
        else:
            kept = rewired(node, inputs, moved)
            if kept is not node:
                moved[node] = kept
    return [at(entry) for entry in whole]


def _relu_behind(layer: Node, node: Node) -> Node:
    """The relu of a joined node."""
    relu = registry.get("Activation")
    return Node(
        relu,
        node.name,
        attrs={"act_type": "relu", **{key: node.attrs[key] for key in ALIKE if key in node.attrs}},
        params=registry.parse_params(relu, {"act_type": "relu"}),
        inputs=[Entry(layer)],
        created_at=node.created_at,
    )
