"""Fuse a depthwise convolution with the batch norms around it, and the gradients of the three nodes.

The block is fused if no other node reads the values between its members. Then the array between the first batch norm
and the convolution, and the gradients between the three, are never written. ``ops/fusion/depthwise_block.py`` defines
the operators. The pass runs after size inference and only fuses blocks that have a kernel.

The rewrite creates no cycle. All readers of the fused forward node read one of its three members before. The fused
gradient reads only results of the forward part and of nodes that precede all three gradients.

Under recomputation (:attr:`PassSettings.rematerializes`) the backward part reads a second copy of a block's result,
which :data:`NORMALIZE` recomputes in one sweep from the result of the convolution and the statistics. The gradient of
the block keeps these alive anyway.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from weftplan.device.amounts import counted
from weftplan.ops.core import registry
from weftplan.ops.core.implementations import choose
from weftplan.ops.core.schema import TensorSpec
from weftplan.ops.fusion.depthwise_block import BEFORE, BEHIND, BLOCK, BLOCK_GRADIENT, LAYER, RELU, norm, norm_gradient
from weftplan.ops.fusion.normalize import NORMALIZE
from weftplan.planner.symbolic.indexed_graph import IndexedGraph
from weftplan.planner.symbolic.network import Edit, Network, alike, shared
from weftplan.planner.symbolic.passes import fuse_relu
from weftplan.planner.symbolic.passes.graph_pass import (
    BACKWARD,
    FORWARD,
    FUSION,
    GRADIENTS,
    SIZES,
    GraphPass,
    PassSettings,
)
from weftplan.symbol.node import Entry, Node, NodeParams

MEMBERS = "__block__"
"""Attribute of a fused block: names and attributes of its three forward members in order, as JSON."""
Readers = dict[int, list[tuple[int, int]]]
"""Entry -> list of (reading node, input slot)."""
HEAD = -1
"""Input slot that stands for an output of the graph."""


@dataclass(frozen=True, slots=True)
class DepthwiseBlock:
    """The six nodes that two fused nodes can replace, in execution order."""

    graph: IndexedGraph
    norm_before: int
    layer: int
    behind: int
    behind_gradient: int
    layer_gradient: int
    before_gradient: int

    @property
    def forward(self) -> tuple[int, int, int]:
        """The three forward nodes, in execution order."""
        return self.norm_before, self.layer, self.behind

    @property
    def backward(self) -> tuple[int, int, int]:
        """The three gradient nodes, in execution order."""
        return self.behind_gradient, self.layer_gradient, self.before_gradient

    @property
    def has_relu(self) -> bool:
        """Whether the second batch norm includes a relu."""
        return self.graph.nodes[self.behind].op is norm(True)

    @property
    def params(self) -> NodeParams:
        """Parameters of the fused nodes."""
        pointwise, layer, after_layer = (self.graph.nodes[nid].params for nid in self.forward)
        return {BEFORE: pointwise, LAYER: layer, BEHIND: after_layer, RELU: self.has_relu}

    def entry(self, nid: int, index: int = 0) -> int:
        """Return an output entry of one of the nodes."""
        return self.graph.row[nid] + index

    @property
    def inputs(self) -> list[int]:
        """Input entries of the fused forward node."""
        pointwise, layer, after_layer = (self.graph.inputs[nid] for nid in self.forward)
        return [*pointwise, layer[1], *after_layer[1:]]

    @property
    def outputs(self) -> list[int]:
        """Entries that the outputs of the fused forward node replace."""
        pointwise, layer, after_layer = self.forward
        entry = self.entry
        return [
            entry(after_layer),
            entry(layer),
            entry(pointwise, 1),
            entry(pointwise, 2),
            entry(after_layer, 1),
            entry(after_layer, 2),
        ]

    @property
    def gradient_inputs(self) -> list[int]:
        """Input entries of the fused gradient node."""
        inputs = self.graph.inputs
        pointwise, layer, after_layer = self.forward
        entries = [inputs[self.behind_gradient][0], self.entry(layer), inputs[pointwise][0], inputs[layer][1]]
        for nid in (pointwise, after_layer):
            entries += [*inputs[nid][1:3], self.entry(nid, 1), self.entry(nid, 2)]
        return entries

    @property
    def gradients(self) -> list[int]:
        """Entries that the outputs of the fused gradient node replace."""
        outer, gradient, inner = self.backward
        entry = self.entry
        return [entry(inner), entry(inner, 1), entry(inner, 2), entry(gradient, 1), entry(outer, 1), entry(outer, 2)]


def fuse_depthwise(network: Network, settings: PassSettings) -> tuple[Network, str]:
    """Fuse every depthwise block on a host for which there is a fused kernel."""
    blocks = [block for block in _blocks(network.graph) if _has_kernel(network, block, settings.options.kernels)]
    if not blocks:
        return network, ""
    edit = Edit(network)
    shared_params: dict[tuple[object, ...], dict[str, Any]] = {}  # equal blocks share one dictionary
    nodes = network.graph.nodes
    for block in blocks:
        key = (*(id(nodes[nid].params) for nid in block.forward), block.has_relu)
        params = shared_params.setdefault(key, block.params)
        behind, first_gradient = nodes[block.behind], nodes[block.before_gradient]
        named = json.dumps([(nodes[nid].name, nodes[nid].attrs) for nid in block.forward])
        entry = edit.add(BLOCK, behind.name, inputs=block.inputs, main=block.layer, params=params, like=block.outputs,
                         attrs={**shared(behind), MEMBERS: named},
                         controls=_controls(network.graph, block.forward))  # fmt: skip
        edit.fuse(block.forward, {e: entry + k for k, e in enumerate(block.outputs)})
        entry = edit.add(BLOCK_GRADIENT, first_gradient.name, inputs=block.gradient_inputs, main=block.layer_gradient,
                         params=params, like=block.gradients, attrs=first_gradient.attrs,
                         controls=_controls(network.graph, block.backward))  # fmt: skip
        edit.fuse(block.backward, {e: entry + k for k, e in enumerate(block.gradients)})
    return edit.finish(), f"joined {counted(len(blocks), 'depthwise convolution')} with the batch norms around"


def rematerialize(network: Network, settings: PassSettings) -> tuple[Network, str]:
    """Redirect backward readers of fused blocks' results to recomputed copies."""
    graph, edit = network.graph, Edit(network)
    results: dict[int, int] = {}
    params_of: dict[int, dict[str, Any]] = {}

    def rematerialized(entry: int) -> int:
        block = graph.entry_node[entry]
        node = graph.nodes[block]
        if node.op is not BLOCK or entry != graph.row[block]:
            return entry
        if entry not in results:
            normalize = {"fix_gamma": node.params[BEHIND]["fix_gamma"], "relu": node.params[RELU]}
            reads = [entry + 1, *graph.inputs[block][6:8], entry + 4, entry + 5]
            params = params_of.setdefault(id(node.params), normalize)
            results[entry] = edit.add(NORMALIZE, f"{node.name}_again", inputs=reads, main=block, params=params,
                                      attrs=shared(node), like=[entry])  # fmt: skip
        return results[entry]

    for nid in range(network.num_forward, graph.num_nodes):
        ignored = graph.works[nid].ignored
        edit.inputs[nid] = [e if slot in ignored else rematerialized(e) for slot, e in enumerate(graph.inputs[nid])]
    return edit.finish(), f"made {counted(len(results), 'result')} of blocks again from what their gradients keep"


def _has_kernel(network: Network, block: DepthwiseBlock, mode: str) -> bool:
    """Return whether the block has a fused kernel under ``mode`` (:attr:`PlanOptions.kernels`)."""
    devices = {network.devices[nid] for nid in (*block.forward, *block.backward)}
    if len(devices) > 1 or not devices.pop().is_host:
        return False
    ins, outs = (
        [TensorSpec(network.shapes[e], network.dtypes[e]) for e in entries] for entries in (block.inputs, block.outputs)
    )
    return choose(BLOCK, block.params, ins, outs, mode).implementation.name != "numpy"


def _blocks(graph: IndexedGraph) -> list[DepthwiseBlock]:
    """Return all blocks of the graph that can be fused."""
    nodes = graph.nodes
    layers = [nid for nid, node in enumerate(nodes) if node.op is not None and node.op.name == "_backward_Convolution"]
    layers = [nid for nid in layers if nodes[nid].params["num_group"] > 1 and nodes[nid].params["no_bias"]]
    if not layers:
        return []
    makers = graph.entry_node
    near = {*layers}.union(*([makers[e] for e in graph.inputs[nid]] + graph.controls[nid] for nid in layers))
    near.update(nid for nid, node in enumerate(nodes) if node.op is norm_gradient(True))
    readers: Readers = {}
    waiting: dict[int, list[int]] = {}
    for nid, inputs in enumerate(graph.inputs):
        for slot, e in enumerate(inputs):
            if makers[e] in near:
                readers.setdefault(e, []).append((nid, slot))
        for dep in graph.controls[nid]:
            waiting.setdefault(dep, []).append(nid)
    for e in graph.outputs:
        readers.setdefault(e, []).append((makers[e], HEAD))
    candidates = [_around(graph, nid, readers) for nid in layers]
    return [block for block in candidates if block is not None and _is_closed(block, readers, waiting)]


def _around(graph: IndexedGraph, gradient: int, readers: Readers) -> DepthwiseBlock | None:
    """Return the block around ``gradient``, the gradient of a convolution; None if its neighbours do not match."""
    nodes, makers, row = graph.nodes, graph.entry_node, graph.row
    ograd, data, weight = graph.inputs[gradient][:3]
    behind_gradient, norm_before = makers[ograd], makers[data]
    convolution = registry.get("Convolution")
    layer = next((dep for dep in graph.controls[gradient] if nodes[dep].op is convolution), None)
    if layer is None or data != row[norm_before] or nodes[norm_before].op is not norm(True):
        return None
    if graph.inputs[layer] != [data, weight] or ograd != row[behind_gradient]:
        return None
    norms = (norm(False), norm(True))
    behind = next((nid for nid, slot in readers.get(row[layer], ()) if slot == 0 and nodes[nid].op in norms), None)
    later_readers = [nid for nid, slot in readers.get(row[gradient], ()) if slot == 0]
    if behind is None or len(later_readers) != 1 or nodes[later_readers[0]].op is not norm_gradient(True):
        return None
    return DepthwiseBlock(graph, norm_before, layer, behind, behind_gradient, gradient, later_readers[0])


def _is_closed(block: DepthwiseBlock, readers: Readers, waiting: dict[int, list[int]]) -> bool:
    """Return whether the block can be fused.

    1. The gradient nodes belong to the forward nodes.
    2. No other node reads a value between the nodes or has a control dependency on one of them.
    3. The gradient of the data has a reader, because the kernel uses its memory for another gradient meanwhile.
    4. No node reads the other gradients; they may only be outputs of the graph.
    """
    graph = block.graph
    pointwise, layer, after_layer = block.forward
    outer, gradient, inner = block.backward
    entry = block.entry

    def of_norm(nid: int, *, data: int, ograd: int, relu: bool) -> list[int]:
        gamma, beta = graph.inputs[nid][1:3]
        return [ograd, data, gamma, *((beta,) if relu else ()), entry(nid, 1), entry(nid, 2)]

    if graph.nodes[outer].op is not norm_gradient(block.has_relu):
        return False
    if graph.inputs[outer] != of_norm(
        after_layer, data=entry(layer), ograd=graph.inputs[outer][0], relu=block.has_relu
    ):
        return False
    if graph.inputs[inner] != of_norm(pointwise, data=graph.inputs[pointwise][0], ograd=entry(gradient), relu=True):
        return False
    inside = {*block.forward, *block.backward}
    if any(nid not in inside for member in inside for nid in waiting.get(member, ())):
        return False
    passed = (entry(pointwise), entry(pointwise, 1), entry(pointwise, 2), entry(layer), entry(outer), entry(gradient))
    if any(slot == HEAD or nid not in inside for e in passed for nid, slot in readers.get(e, ())):
        return False
    if all(
        slot != HEAD and not graph.is_variable[nid] and slot in graph.works[nid].ignored  # reads only the shape
        for nid, slot in readers.get(entry(inner), ())
    ):
        return False
    side_results = (entry(outer, 1), entry(outer, 2), entry(gradient, 1))
    if any(slot != HEAD for e in side_results for _, slot in readers.get(e, ())):
        return False
    return all(alike(graph.nodes[gradient], graph.nodes[nid]) for nid in inside if nid != gradient)


def _controls(graph: IndexedGraph, nids: Sequence[int]) -> list[int]:
    """Return the control dependencies of these nodes on other nodes."""
    return [dep for nid in nids for dep in graph.controls[nid] if dep not in nids]


def _members(node: Node) -> list[tuple[str, dict[str, str]]]:
    """Return (name, attributes) of each forward member of a fused block."""
    return [(name, attrs) for name, attrs in json.loads(node.attrs[MEMBERS])]


def members(node: Node) -> list[str]:
    """Return the names of the forward members whose outputs a block does not make, and of layers fused into members."""
    forward = _members(node)
    layers = [attrs[fuse_relu.LAYER] for _, attrs in forward if fuse_relu.LAYER in attrs]
    return [*(name for name, _ in forward[:-1]), *layers]


def unfuse(node: Node, inputs: Sequence[Entry]) -> list[Entry]:
    """Return the result of a fused block, on new unfused nodes."""
    ops = norm(True), registry.get("Convolution"), norm(node.params[RELU])
    result = inputs[0]
    for op, (name, attrs), of, extra_inputs in zip(
        ops, _members(node), (BEFORE, LAYER, BEHIND), (inputs[1:5], inputs[5:6], inputs[6:]), strict=True
    ):
        node_of_member = Node(
            op, name, attrs=attrs, params=node.params[of], inputs=[result, *extra_inputs], created_at=node.created_at
        )
        result = (
            fuse_relu.unfuse(node_of_member, node_of_member.inputs)[0]
            if fuse_relu.LAYER in attrs
            else Entry(node_of_member)
        )
    return [result]


PASS: GraphPass = GraphPass(
    name="depthwise blocks joined",
    switch=FUSION,
    enabled=PassSettings.fuses,
    run=fuse_depthwise,
    changes=frozenset((FORWARD, BACKWARD)),
    needs=frozenset((GRADIENTS, SIZES)),
    fused=(BLOCK,),
    unfuse=unfuse,
    members=members,
)
REMATERIALIZE: GraphPass = GraphPass(
    name="block results rematerialized",
    switch="MXNET_BACKWARD_DO_MIRROR",
    enabled=lambda settings: settings.fuses() and settings.rematerializes,
    run=rematerialize,
    changes=frozenset((BACKWARD,)),
    needs=frozenset((GRADIENTS, SIZES)),
)
