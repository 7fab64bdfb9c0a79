"""Which nodes of a network may be members of a fused elementwise node, and what each reads and computes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import prod

from weftplan.ops.core.implementations import choose, provided
from weftplan.ops.core.schema import TensorSpec
from weftplan.ops.cuda import pointwise as generated
from weftplan.ops.elementwise.formulas import DTYPES
from weftplan.ops.fusion.pointwise import Group, Member
from weftplan.planner.symbolic.network import Network
from weftplan.planner.symbolic.passes.graph_pass import Settings

PLAIN, BIAS, NORM = "plain", "bias", "norm"
"""Kinds of members: a whole node; the bias of a layer; the last step of a batch norm."""
_BIASED = ("FullyConnected", "Convolution", "Deconvolution")
"""Layers whose kernels on GPUs all add the bias to the whole product, in a launch of its own."""
_FORMULAS = frozenset(
    ("add_n", "_copy", "LeakyReLU", "_backward_elemwise_sub", "_backward_elemwise_mul", "_backward_elemwise_div")
)
"""Operators that are elementwise for equal shapes although their kernels do not say so."""
_FORWARD_BROADCASTS = frozenset(f"broadcast_{name}" for name in ("add", "sub", "mul", "div"))


class ElementwiseNodes:
    """The nodes of a network, as the fusion of elementwise nodes sees them."""

    def __init__(self, network: Network, settings: Settings) -> None:
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
        """Before each node, how many nodes compute something."""
        self.mutated = mutated
        self.costs: dict[int, int] = {}
        """Of each whole node its operations for one element."""
        self._costs: dict[tuple[object, ...], int] = {}
        self.kinds = [self._kind(nid) for nid in range(graph.num_nodes)]

    def outputs(self, nid: int) -> range:
        """The entries of a node."""
        return range(self.graph.row[nid], self.graph.row[nid + 1])

    def is_read(self, entry: int) -> bool:
        """Return whether a node or the caller reads an entry."""
        return entry in self.heads or bool(self.readers.get(entry))

    def nbytes(self, entry: int) -> int:
        """Return the bytes of an entry."""
        return TensorSpec(self.network.shapes[entry], self.network.dtypes[entry]).nbytes

    def main(self, nid: int) -> int:
        """The first entry of a node, which has the shape of its group."""
        return self.graph.row[nid]

    def _specs(self, entries: Iterable[int]) -> list[TensorSpec]:
        return [TensorSpec(self.network.shapes[e], self.network.dtypes[e]) for e in entries]

    def _kind(self, nid: int) -> str:
        """Return how a node may be a member; empty if it may not."""
        graph, network = self.graph, self.network
        node = graph.nodes[nid]
        op = node.op
        if op is None or network.devices[nid].device_type != "gpu" or op.loss or not graph.inputs[nid]:
            return ""
        if op.name in ("LeakyReLU", "_backward_LeakyReLU"):
            if node.params["act_type"] in ("prelu", "rrelu"):  # slopes that are learned or drawn
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
        unknown = nid < self.num_forward and graph.works[nid].ignored  # what such a node ignores could not be unfused
        if op.aux or op.name in provided("gpu") or unknown:
            return ""
        if any(network.shapes[e] != shape for e in self.outputs(nid)):
            return ""
        equal = all(network.shapes[e] == shape for e in reads)
        elementwise = op.name in _FORMULAS or getattr(op.forward, "elementwise", False)
        if op.name in _FORWARD_BROADCASTS:
            padded = [(1,) * (len(shape) - len(network.shapes[e])) + network.shapes[e] for e in reads]
            if any(generated.index_of(shape, own) is None for own in padded):
                return ""
        elif not (equal and elementwise):
            return ""
        self.costs[nid] = self._cost(nid)
        return PLAIN if self.costs[nid] else ""

    def _cost(self, nid: int) -> int:
        """The operations of a node for one element; 0 if its formula cannot be generated."""
        graph = self.graph
        node, ignored = graph.nodes[nid], graph.works[nid].ignored
        wanted = tuple(self.is_read(e) for e in self.outputs(nid))
        key = (id(node.op), id(node.params), len(graph.inputs[nid]), wanted, self.network.dtypes[self.main(nid)])
        if key not in self._costs:
            assert node.op is not None
            reads = tuple(None if slot in ignored else slot for slot in range(len(graph.inputs[nid])))
            writes = tuple(len(reads) + k if one else None for k, one in enumerate(wanted))
            shapes = (self.network.shapes[self.main(nid)],) * len(reads)
            results = tuple(one for one in writes if one is not None)
            alone = Group((Member(node.op, node.params, reads, writes),), shapes, results, shapes[0], key[-1])
            self._costs[key] = generated.operations(alone) if results else 0
        return self._costs[key]

    def _splits_norm(self, nid: int) -> bool:
        """Return whether a batch norm may leave out its values, and has the kernel whose last step it is."""
        node = self.graph.nodes[nid]
        assert node.op is not None
        data, mean = self.graph.inputs[nid][0], self.main(nid) + 1
        if self.network.shapes[data][node.params["axis"]] == 1 or not self.settings.options.drop_dead_outputs:
            return False
        ins, outs = self._specs(self.graph.inputs[nid]), self._specs(self.outputs(nid))
        chosen = choose(node.op, node.params, ins, outs, "native", on="gpu").implementation.name
        return chosen == "cuda" and self.network.dtypes[mean] == self.network.dtypes[data]

    def computed(self, nid: int) -> Sequence[int]:
        """The entries of a node that its group computes."""
        return self.outputs(nid) if self.kinds[nid] == PLAIN else (self.main(nid),)

    def kept_alive(self, nid: int) -> list[int]:
        """The entries that stay alive for a member: of a layer its own product, which the group reads."""
        graph = self.graph
        if self.kinds[nid] == BIAS:
            return [self.main(nid)]
        ignored = graph.works[nid].ignored
        return [entry for slot, entry in enumerate(graph.inputs[nid]) if slot not in ignored]
