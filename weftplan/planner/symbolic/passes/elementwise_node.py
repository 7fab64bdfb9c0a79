"""The node that stands for a tree of elementwise nodes: how it is made, and which nodes it stands for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from weftplan.ops.core import registry
from weftplan.ops.core.schema import Op, Params, Shape
from weftplan.ops.fusion.normalize import NORMALIZE
from weftplan.ops.fusion.pointwise import GROUP, POINTWISE, Group, Member
from weftplan.planner.symbolic.network import Edit, dict_of, shared
from weftplan.planner.symbolic.passes.elementwise_members import BIAS, NORM, PLAIN, ElementwiseNodes
from weftplan.symbol.node import Entry, Node, NodeParams

MEMBERS = "__members__"
"""The attribute of a fused node that holds name, attributes and kind of each member, as JSON."""
_BROADCAST_ADD = registry.get("broadcast_add")
_NO_PARAMS: Params = {}
_NORM_PARAMS = {fixed: {"fix_gamma": fixed, "relu": False} for fixed in (False, True)}


class SharedParams:
    """Parameters that equal nodes share: equal groups ask operators once, and share a kernel."""

    def __init__(self) -> None:
        self._groups: dict[tuple[object, ...], dict[str, Any]] = {}
        self._unbiased: dict[int, dict[str, Any]] = {}

    def of(self, builder: FusedNode) -> NodeParams:
        """Those of a fused node."""
        return self._groups.setdefault(builder.key, {GROUP: builder.group()})

    def without_bias(self, params: Params) -> NodeParams:
        """Those of a layer without its bias."""
        return self._unbiased.setdefault(id(params), {**params, "no_bias": True})


class FusedNode:
    """Values, members and results of one group."""

    def __init__(self, around: ElementwiseNodes, nodes: Sequence[int]) -> None:
        self.around, self.nodes, self.inside = around, nodes, frozenset(nodes)
        graph, network = around.graph, around.network
        self.shape = network.shapes[around.main(self.nodes[-1])]
        self.entries: list[tuple[int, bool]] = []
        """Inputs: an entry, and whether it is the product of a layer of which the group adds the bias."""
        self.results: list[int] = []
        """Entries that another node reads."""
        self._values: dict[tuple[int, bool], int] = {}
        self._inputs: list[Shape] = []
        calls = [self._call(nid) for nid in nodes]
        computed = {e for nid in nodes for e in around.computed(nid)}
        for _, _, reads, _ in calls:
            for key in reads:
                if key is not None and (key[1] or key[0] not in computed) and key not in self._values:
                    self._values[key] = len(self._inputs)
                    self.entries.append(key)
                    self._inputs.append(self._input_shape(key[0]))
        members = []
        for op, params, reads, writes in calls:
            for entry in writes:
                if entry is not None:
                    self._values[entry, False] = len(self._values)
            members.append(
                Member(op, params, tuple(None if key is None else self._values[key] for key in reads),
                       tuple(None if entry is None else self._values[entry, False] for entry in writes))
            )  # fmt: skip
        for nid in nodes:
            for entry in around.computed(nid):
                readers = around.readers.get(entry, ())
                outside = any(reader not in self.inside for reader in readers)
                if (entry in around.heads or outside) and (entry, False) in self._values:
                    self.results.append(entry)
        self.key = (tuple((m.op.name, id(m.params), m.reads, m.writes) for m in members), tuple(self._inputs),
                    tuple(self._values[e, False] for e in self.results), self.shape,
                    network.dtypes[graph.row[self.nodes[-1]]].str)  # fmt: skip
        self.members = tuple(members)

    def _call(self, nid: int) -> tuple[Op, Params, list[tuple[int, bool] | None], list[int | None]]:
        """A member in entries: operator, parameters, reads and writes."""
        around, graph = self.around, self.around.graph
        node, kind = graph.nodes[nid], around.kinds[nid]
        assert node.op is not None
        inputs, main = graph.inputs[nid], around.main(nid)
        if kind == BIAS:
            return _BROADCAST_ADD, _NO_PARAMS, [(main, True), (inputs[2], False)], [main]
        if kind == NORM:
            fixed = bool(node.params["fix_gamma"])
            reads: list[tuple[int, bool] | None] = [(e, False) for e in (*inputs[:3], main + 1, main + 2)]
            if fixed:
                reads[1] = None
            return NORMALIZE, _NORM_PARAMS[fixed], reads, [main]
        ignored = graph.works[nid].ignored
        reads = [None if slot in ignored else (e, False) for slot, e in enumerate(inputs)]
        return node.op, node.params, reads, [e if around.is_read(e) else None for e in around.outputs(nid)]

    def _input_shape(self, entry: int) -> Shape:
        """The shape of an input with as many axes as the group's."""
        own, shape = self.around.network.shapes[entry], self.shape
        if own == shape:
            return shape
        for nid in self.nodes:
            node, kind = self.around.graph.nodes[nid], self.around.kinds[nid]
            if kind == PLAIN or entry not in (*self.around.graph.inputs[nid], *self.around.outputs(nid)):
                continue
            axis = _channel_axis(node, kind, len(shape))
            return tuple(size if k == axis else 1 for k, size in enumerate(shape))
        return (1,) * (len(shape) - len(own)) + own

    def group(self) -> Group:
        """The group."""
        dtype = self.around.network.dtypes[self.around.main(self.nodes[-1])]
        values = tuple(self._values[entry, False] for entry in self.results)
        return Group(self.members, tuple(self._inputs), values, self.shape, dtype)

    def replace(self, edit: Edit, params: SharedParams) -> None:
        """Let one node stand for the members."""
        around, graph, nodes = self.around, self.around.graph, self.nodes
        inputs = [self._product(edit, params, entry) if product else entry for entry, product in self.entries]
        last = graph.nodes[self.nodes[-1]]
        plain = [nid for nid in nodes if around.kinds[nid] == PLAIN]
        described = [(graph.nodes[nid].name, graph.nodes[nid].attrs, around.kinds[nid]) for nid in nodes]
        fused = edit.add(
            POINTWISE, last.name, inputs=inputs, main=self.nodes[-1], params=params.of(self),
            attrs={**shared(last), MEMBERS: json.dumps(described)},
            controls=[dep for nid in plain for dep in graph.controls[nid] if dep not in self.inside],
            like=self.results,
        )  # fmt: skip
        for k, entry in enumerate(self.results):
            edit.stand_for(entry, fused + k)
        for nid in plain:
            edit.node_stands_for(nid, edit.makers[fused])

    def _product(self, edit: Edit, params: SharedParams, entry: int) -> int:
        """Add the layer that makes an entry without its bias; return its entry."""
        graph = self.around.graph
        nid = graph.entry_node[entry]
        layer = graph.nodes[nid]
        product = edit.add(
            layer.op, f"{layer.name}_product", inputs=graph.inputs[nid][:2], main=nid,
            params=params.without_bias(layer.params), attrs=layer.attrs, controls=graph.controls[nid], like=[entry],
        )  # fmt: skip
        edit.node_stands_for(nid, edit.makers[product])
        return product


def _channel_axis(node: Node, kind: str, ndim: int) -> int:
    """Return the axis of the results along which the vectors of a layer or of a batch norm lie."""
    if kind == NORM:
        return int(node.params["axis"]) % ndim
    assert node.op is not None
    return ndim - 1 if node.op.name == "FullyConnected" else 1


def _described(node: Node) -> list[tuple[str, dict[str, str], str]]:
    return [(name, attrs, kind) for name, attrs, kind in json.loads(node.attrs[MEMBERS])]


def members(node: Node) -> list[str]:
    """Return the names of the nodes whose outputs a fused node does not make."""
    group: Group = node.params[GROUP]
    hidden = [not set(group.results).intersection(member.writes) for member in group.members]
    return [name for (name, _, _), one in zip(_described(node), hidden, strict=True) if one]


def unfuse(node: Node, inputs: Sequence[Entry]) -> list[Entry]:
    """Return the results of the nodes that a fused one stands for."""
    group: Group = node.params[GROUP]
    values: dict[int, Entry] = dict(enumerate(inputs))
    for member, (name, attrs, kind) in zip(group.members, _described(node), strict=True):
        reads = [values[one] for one in member.reads if one is not None]  # a batch norm ignores a fixed gamma
        if kind == NORM:
            values[_only(member)] = Entry(reads[-1].node)
            continue
        op: Op | None = member.op
        params = dict_of(member.params)
        if kind == BIAS:
            product = reads[0].node
            op, params = product.op, {**product.params, "no_bias": False}
            reads = [*product.inputs, reads[1]]
        whole = Node(op, name, attrs=attrs, params=params, inputs=reads, created_at=node.created_at)
        values.update({value: Entry(whole, k) for k, value in enumerate(member.writes) if value is not None})
    return [values[value] for value in group.results]


def _only(member: Member) -> int:
    (value,) = member.writes
    assert value is not None
    return value
