"""Candidate members of fused elementwise nodes, and the construction of the fused nodes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import prod
from typing import Any

from weftplan.ops.core import registry
from weftplan.ops.core.formulas import DTYPES
from weftplan.ops.core.implementations import choose, provided
from weftplan.ops.core.schema import Op, Params, Shape, TensorSpec
from weftplan.ops.fusion.normalize import NORMALIZE
from weftplan.ops.fusion.pointwise import GROUP, POINTWISE, Group, Member
from weftplan.planner.symbolic.network import Edit, Network, dict_of, shared
from weftplan.planner.symbolic.passes.graph_pass import PassSettings
from weftplan.support import slots
from weftplan.symbol.node import Entry, Node

PLAIN, BIAS, NORM = "plain", "bias", "norm"
"""Kinds of members: a whole node; the bias of a layer; the last step of a batch norm."""
_BIASED = ("FullyConnected", "Convolution", "Deconvolution")
"""Layers whose GPU kernels all add the bias to the complete product in a separate launch."""
_FORWARD_BROADCASTS = frozenset(f"broadcast_{name}" for name in ("add", "sub", "mul", "div"))


class ElementwiseNodes:
    """Facts of a network's nodes for the fusion of elementwise nodes: kinds, costs, readers."""

    def __init__(self, network: Network, settings: PassSettings) -> None:
        graph = network.graph
        self.network, self.graph, self.settings = network, graph, settings
        self.num_forward = network.num_forward
        self.readers: dict[int, list[int]] = {}
        self.waiting: dict[int, list[int]] = {}
        mutated: set[int] = set()
        for nid, inputs in enumerate(graph.inputs):
            work = graph.works[nid]
            for slot, entry in enumerate(inputs):
                if slot not in work.ignored:
                    self.readers.setdefault(entry, []).append(nid)
                if slot in work.writes:
                    mutated.add(entry)
            for dep in graph.controls[nid]:
                self.waiting.setdefault(dep, []).append(nid)
        self.heads = frozenset(graph.outputs)
        self.work_until = [0, *accumulate(not variable for variable in graph.is_variable)]
        """Number of operator nodes before each node."""
        self.mutated = mutated
        self.costs: dict[int, int] = {}
        """Operations per element of each node of kind `PLAIN`."""
        self._costs: dict[tuple[object, ...], int] = {}
        # Equal groups share one dictionary of parameters, so they query operators once and share a kernel.
        self.group_params: dict[tuple[object, ...], dict[str, Any]] = {}
        self.unbiased_params: dict[int, dict[str, Any]] = {}
        self.kinds = [self._kind(nid) for nid in range(graph.num_nodes)]

    def outputs(self, nid: int) -> range:
        """Return the output entries of a node."""
        return range(self.graph.row[nid], self.graph.row[nid + 1])

    def is_read(self, entry: int) -> bool:
        """Return whether a node or the caller reads an entry."""
        return entry in self.heads or bool(self.readers.get(entry))

    def nbytes(self, entry: int) -> int:
        """Return the bytes of an entry."""
        return TensorSpec(self.network.shapes[entry], self.network.dtypes[entry]).nbytes

    def main(self, nid: int) -> int:
        """Return the first output entry of a node, which has the shape of its group."""
        return self.graph.row[nid]

    def _specs(self, entries: Iterable[int]) -> list[TensorSpec]:
        """Return the shape and dtype of each entry."""
        return [TensorSpec(self.network.shapes[e], self.network.dtypes[e]) for e in entries]

    def _kind(self, nid: int) -> str:
        """Return the kind of member that a node can be; empty if it can be none."""
        graph, network = self.graph, self.network
        node = graph.nodes[nid]
        op = node.op
        if op is None or network.devices[nid].device_type != "gpu" or op.loss or not graph.inputs[nid]:
            return ""
        if op.name in ("LeakyReLU", "_backward_LeakyReLU"):
            if node.params["act_type"] in ("prelu", "rrelu"):  # learned or random slopes
                return ""
        elif op.random:
            return ""
        main = self.main(nid)
        shape, dtype = network.shapes[main], network.dtypes[main]
        reads = [e for slot, e in enumerate(graph.inputs[nid]) if slot not in graph.works[nid].ignored]
        if dtype not in DTYPES or not prod(shape) or any(network.dtypes[e] != dtype for e in reads):
            return ""
        if not self.mutated.isdisjoint(graph.inputs[nid]) and op.name != "BatchNorm":
            return ""
        if op.name in _BIASED:
            return "" if node.params["no_bias"] else BIAS
        if op.name == "BatchNorm":
            return NORM if self._splits_norm(nid) else ""
        unknown = nid < self.num_forward and graph.works[nid].ignored  # unfuse could not restore an ignored input
        if op.aux or op.name in provided("gpu") or unknown:
            return ""
        if any(network.shapes[e] != shape for e in self.outputs(nid)):
            return ""
        equal = all(network.shapes[e] == shape for e in reads)
        elementwise = op.name == "_copy" or getattr(op.forward, "elementwise", False)
        if op.name in _FORWARD_BROADCASTS:
            padded = [(1,) * (len(shape) - len(network.shapes[e])) + network.shapes[e] for e in reads]
            if any(slots.CUDA_BROADCAST_INDEX.get()(shape, input_shape) is None for input_shape in padded):
                return ""
        elif not (equal and elementwise):
            return ""
        self.costs[nid] = self._cost(nid)
        return PLAIN if self.costs[nid] else ""

    def _cost(self, nid: int) -> int:
        """Return the operations per element of a node; 0 if no kernel can be generated from its formula."""
        graph = self.graph
        node, ignored = graph.nodes[nid], graph.works[nid].ignored
        is_read = tuple(self.is_read(e) for e in self.outputs(nid))
        key = (id(node.op), id(node.params), len(graph.inputs[nid]), is_read, self.network.dtypes[self.main(nid)])
        if key not in self._costs:
            assert node.op is not None
            reads = tuple(None if slot in ignored else slot for slot in range(len(graph.inputs[nid])))
            writes = tuple(len(reads) + k if is_written else None for k, is_written in enumerate(is_read))
            shapes = (self.network.shapes[self.main(nid)],) * len(reads)
            results = tuple(is_written for is_written in writes if is_written is not None)
            single = Group((Member(node.op, node.params, reads, writes),), shapes, results, shapes[0], key[-1])
            self._costs[key] = slots.CUDA_OPERATIONS.get()(single) if results else 0
        return self._costs[key]

    def _splits_norm(self, nid: int) -> bool:
        """Return whether the last step of a batch norm can be split off from its kernel."""
        node = self.graph.nodes[nid]
        assert node.op is not None
        data, mean = self.graph.inputs[nid][0], self.main(nid) + 1
        if self.network.shapes[data][node.params["axis"]] == 1 or not self.settings.options.drop_dead_outputs:
            return False
        ins, outs = self._specs(self.graph.inputs[nid]), self._specs(self.outputs(nid))
        chosen = choose(node.op, node.params, ins, outs, "native", on="gpu").implementation.name
        return chosen == "cuda" and self.network.dtypes[mean] == self.network.dtypes[data]

    def computed(self, nid: int) -> Sequence[int]:
        """Return the output entries of a node that its group computes."""
        return self.outputs(nid) if self.kinds[nid] == PLAIN else (self.main(nid),)

    def long_lived(self, nid: int) -> list[int]:
        """Return the entries that must stay alive until a member runs; for a bias, only the product of its layer."""
        graph = self.graph
        if self.kinds[nid] == BIAS:
            return [self.main(nid)]
        ignored = graph.works[nid].ignored
        return [entry for slot, entry in enumerate(graph.inputs[nid]) if slot not in ignored]


MEMBERS = "__members__"
"""Attribute of a fused node: name, attributes and kind of each member, as JSON."""
_BROADCAST_ADD = registry.get("broadcast_add")
_NO_PARAMS: Params = {}
_NORM_PARAMS = {fixed: {"fix_gamma": fixed, "relu": False} for fixed in (False, True)}


class FusedNode:
    """The values, members and results of one group, and the rewrite that fuses it."""

    def __init__(self, around: ElementwiseNodes, nodes: Sequence[int]) -> None:
        self.around, self.nodes, self.inside = around, nodes, frozenset(nodes)
        graph, network = around.graph, around.network
        self.shape = network.shapes[around.main(self.nodes[-1])]
        self.entries: list[tuple[int, bool]] = []
        """Inputs: (entry, whether it is the product of a layer whose bias the group adds)."""
        self.results: list[int] = []
        """Entries of the group that other nodes or the caller read."""
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
        """Return a member as (operator, parameters, entries that it reads, entries that it writes)."""
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
        """Return the shape of an input, padded with 1 to the number of axes of the group."""
        input_shape, shape = self.around.network.shapes[entry], self.shape
        if input_shape == shape:
            return shape
        for nid in self.nodes:
            node, kind = self.around.graph.nodes[nid], self.around.kinds[nid]
            if kind == PLAIN or entry not in (*self.around.graph.inputs[nid], *self.around.outputs(nid)):
                continue
            axis = _channel_axis(node, kind, len(shape))
            return tuple(size if k == axis else 1 for k, size in enumerate(shape))
        return (1,) * (len(shape) - len(input_shape)) + input_shape

    def group(self) -> Group:
        """Return the group as a parameter of the fused operator."""
        dtype = self.around.network.dtypes[self.around.main(self.nodes[-1])]
        values = tuple(self._values[entry, False] for entry in self.results)
        return Group(self.members, tuple(self._inputs), values, self.shape, dtype)

    def replace(self, edit: Edit) -> None:
        """Replace the members by one fused node."""
        around, graph, nodes = self.around, self.around.graph, self.nodes
        inputs = [self._product(edit, entry) if product else entry for entry, product in self.entries]
        params = around.group_params.setdefault(self.key, {GROUP: self.group()})
        final = graph.nodes[self.nodes[-1]]
        plain = [nid for nid in nodes if around.kinds[nid] == PLAIN]
        described = [(graph.nodes[nid].name, graph.nodes[nid].attrs, around.kinds[nid]) for nid in nodes]
        fused = edit.add(
            POINTWISE, final.name, inputs=inputs, main=self.nodes[-1], params=params,
            attrs={**shared(final), MEMBERS: json.dumps(described)},
            controls=[dep for nid in plain for dep in graph.controls[nid] if dep not in self.inside],
            like=self.results,
        )  # fmt: skip
        for k, entry in enumerate(self.results):
            edit.stand_for(entry, fused + k)
        for nid in plain:
            edit.node_stands_for(nid, edit.makers[fused])

    def _product(self, edit: Edit, entry: int) -> int:
        """Add a copy without bias of the layer that makes ``entry``; return its output entry."""
        graph = self.around.graph
        nid = graph.entry_node[entry]
        layer = graph.nodes[nid]
        params = self.around.unbiased_params.setdefault(id(layer.params), {**layer.params, "no_bias": True})
        product = edit.add(
            layer.op, f"{layer.name}_product", inputs=graph.inputs[nid][:2], main=nid,
            params=params, attrs=layer.attrs, controls=graph.controls[nid], like=[entry],
        )  # fmt: skip
        edit.node_stands_for(nid, edit.makers[product])
        return product


def _channel_axis(node: Node, kind: str, ndim: int) -> int:
    """Return the channel axis of a layer or a batch norm: the axis of its bias or statistics."""
    if kind == NORM:
        return int(node.params["axis"]) % ndim
    assert node.op is not None
    return ndim - 1 if node.op.name == "FullyConnected" else 1


def _described(node: Node) -> list[tuple[str, dict[str, str], str]]:
    """Return (name, attributes, kind) of each member of a fused node."""
    return [(name, attrs, kind) for name, attrs, kind in json.loads(node.attrs[MEMBERS])]


def members(node: Node) -> list[str]:
    """Return the names of the members whose outputs a fused node does not make."""
    group: Group = node.params[GROUP]
    hidden = [not set(group.results).intersection(member.writes) for member in group.members]
    return [name for (name, _, _), is_hidden in zip(_described(node), hidden, strict=True) if is_hidden]


def unfuse(node: Node, inputs: Sequence[Entry]) -> list[Entry]:
    """Return the results of a fused node, on new unfused nodes."""
    group: Group = node.params[GROUP]
    values: dict[int, Entry] = dict(enumerate(inputs))
    for member, (name, attrs, kind) in zip(group.members, _described(node), strict=True):
        reads = [values[one] for one in member.reads if one is not None]  # a batch norm ignores a fixed gamma
        if kind == NORM:
            values.update(dict.fromkeys([k for k in member.writes if k is not None], Entry(reads[-1].node)))
            continue
        op: Op | None = member.op
        params = dict_of(member.params)
        if kind == BIAS:
            product = reads[0].node
            op, params = product.op, {**product.params, "no_bias": False}
            reads = [*product.inputs, reads[1]]
        restored = Node(op, name, attrs=attrs, params=params, inputs=reads, created_at=node.created_at)
        values.update({value: Entry(restored, k) for k, value in enumerate(member.writes) if value is not None})
    return [values[value] for value in group.results]
