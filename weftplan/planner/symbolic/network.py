"""A symbol's graph on its way to a plan, in numbers, and the one way in which passes change it.

A :class:`Network` is a numbered graph with what the caller wants of it. Passes read it and make another one through an
:class:`Edit`: they add nodes, say which values stand for others, and the rest follows. No given network is changed, and
no node of a symbol: those are read for what they compute, never for what they are connected to.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from weftplan.device.context import Context
from weftplan.errors import PlanError
from weftplan.ops.core.schema import DType, Op, Params, Req, Shape
from weftplan.planner.graph import Work
from weftplan.planner.labels import Pass
from weftplan.planner.symbolic.indexed_graph import IndexedGraph, work_of
from weftplan.symbol.node import Node

ALIKE = ("__ctx_group__", "ctx_group", "__force_mirroring__", "force_mirroring")
"""Attributes in which two nodes must agree to become one: device and recomputation."""
_ALIKE = frozenset(ALIKE)


@dataclass(frozen=True, kw_only=True)
class Network:
    """A graph between a symbol and a plan."""

    graph: IndexedGraph
    """Heads: the outputs of the symbol, then the gradients of :attr:`wanted`."""
    devices: Sequence[Context]
    """Per node."""
    num_outputs: int
    arguments: dict[str, int]
    """Argument name -> its node; -1 when the graph does not use it."""
    states: dict[str, int]
    """Auxiliary state name -> its node, likewise."""
    requests: dict[str, Req]
    """What the caller wants of the gradient of each argument."""
    wanted: tuple[str, ...] = ()
    """Arguments that have a gradient."""
    head_grads: tuple[int, ...] = ()
    """Per output the variable ``_head_grad_<i>``, -1 when no gradient reads it."""
    shapes: Sequence[Shape] = ()
    """Of the entries as far as they are known: none, those of the forward part, which come first, or all."""
    dtypes: Sequence[DType] = ()
    facts: frozenset[str] = frozenset()
    """What passes have found out: see :mod:`weftplan.planner.symbolic.passes`."""
    reports: tuple[Pass, ...] = ()
    """The passes that ran."""

    @property
    def outputs(self) -> list[int]:
        """Entries of the symbol's outputs."""
        return self.graph.outputs[: self.num_outputs]

    @property
    def gradients(self) -> list[int]:
        """Entries of the gradients of :attr:`wanted`."""
        return self.graph.outputs[self.num_outputs :]

    @property
    def num_forward(self) -> int:
        """How many nodes are the forward part; they come first."""
        return max(self.graph.entry_node[e] for e in self.outputs) + 1

    def after(self, facts: frozenset[str], report: Pass | None) -> Network:
        """Return the same after a pass that has found these facts out."""
        if report is None and facts <= self.facts:
            return self
        reports = self.reports if report is None else (*self.reports, report)
        return replace(self, facts=self.facts | facts, reports=reports)

    def check(self) -> None:
        """Raise PlanError unless the numbers agree with one another: what debug mode asks after each pass."""
        graph, made = self.graph, 0
        for nid, (inputs, controls) in enumerate(zip(graph.inputs, graph.controls, strict=True)):
            if any(not 0 <= e < graph.row[nid] for e in inputs) or any(not 0 <= dep < nid for dep in controls):
                raise PlanError(f"node {nid} ({graph.names[nid]!r}) needs something that comes after it")
            made += graph.row[nid + 1] - graph.row[nid]
        if len(self.devices) != graph.num_nodes or made != graph.num_entries:
            raise PlanError(f"{graph.num_nodes} nodes have {len(self.devices)} devices and {made} entries")
        if len(self.shapes) not in (0, graph.row[self.num_forward], graph.num_entries):
            raise PlanError(f"{graph.num_entries} entries have {len(self.shapes)} shapes")
        if len(self.shapes) != len(self.dtypes) or len(self.gradients) != len(self.wanted):
            raise PlanError(f"{len(self.shapes)} shapes, {len(self.dtypes)} dtypes, {len(self.gradients)} gradients")


class Edit:
    """A network in the making. Nodes and entries keep the numbers that they have in the given one; new ones follow.

    Every entry that a caller names is one of the given network or a new one; whatever :meth:`stand_for` says of it is
    applied in the end, to new nodes as to given ones. So nodes can be added in any order.
    """

    def __init__(self, network: Network) -> None:
        graph = network.graph
        self.network = network
        self.nodes: list[Node] = list(graph.nodes)
        self.works = list(graph.works)
        self.inputs: list[list[int]] = list(graph.inputs)
        """Entries that each node reads, to be replaced (not changed) where a node is to read others."""
        self.controls: list[list[int]] = list(graph.controls)
        """Nodes that each node waits for besides."""
        self.row = graph.row[:-1]
        self.makers = list(graph.entry_node)
        self.devices = list(network.devices)
        self.heads = list(graph.outputs)
        self._like: dict[int, int] = {}
        self._entries: dict[int, int] = {}
        self._nodes: dict[int, int | None] = {}

    def add(
        self,
        op: Op | None,
        name: str,
        *,
        inputs: Sequence[int] = (),
        main: int = -1,
        params: Params | None = None,
        attrs: dict[str, str] | None = None,
        controls: Iterable[int] = (),
        like: Sequence[int] | None = None,
    ) -> int:
        """Add a node; return its first entry.

        Args:
            op: the operator; None for a variable.
            name: the node's name.
            inputs: the entries that it reads.
            main: the node in whose place it is: its device and its line of the user's code.
            params: parsed parameters; nodes with equal ones should share one dictionary.
            attrs: attributes as text.
            controls: nodes that it waits for.
            like: given entries with the shapes and dtypes of its outputs, when those are known.
        """
        created_at = self.nodes[main].created_at if main >= 0 else None
        node = Node(op, name, attrs=attrs, params={} if params is None else dict_of(params), created_at=created_at)
        work, count = work_of(node)
        device = self.devices[max(main, 0)]
        waits = dict.fromkeys(controls)
        return self.append(node, work, inputs=inputs, controls=waits, count=count, device=device, like=like)

    def append(
        self,
        node: Node,
        work: Work,
        *,
        inputs: Sequence[int],
        controls: Iterable[int],
        count: int,
        device: Context,
        like: Sequence[int] | None = None,
    ) -> int:
        """Add a node of which everything is known."""
        first, nid = len(self.makers), len(self.nodes)
        self.nodes.append(node)
        self.works.append(work)
        self.inputs.append(list(inputs))
        self.controls.append(list(controls))
        self.row.append(first)
        self.makers += [nid] * count
        if like is not None:
            self._like.update(zip(range(first, first + count), like, strict=True))
        self.devices.append(device)
        return first

    def stand_for(self, entry: int, new: int) -> None:
        """Let everything that reads ``entry`` read ``new``."""
        self._entries[entry] = new

    def node_stands_for(self, nid: int, new: int | None) -> None:
        """Let everything that waits for a node wait for another one, or for none."""
        self._nodes[nid] = new

    def at(self, entry: int) -> int:
        """Return what stands for an entry so far."""
        while entry in self._entries:
            entry = self._entries[entry]
        return entry

    def fuse(self, nids: Iterable[int], outputs: Mapping[int, int]) -> None:
        """Let a new node take the place of others; ``outputs``: given entry -> the entry that the new node makes."""
        for entry, other in outputs.items():
            self.stand_for(entry, other)
        new = self.makers[next(iter(outputs.values()))]
        for nid in nids:
            self.node_stands_for(nid, new)

    def _resolved(self) -> tuple[list[list[int]], list[list[int]]]:
        """Inputs and controls with all that stands for others."""
        entries, nodes, at = self._entries, self._nodes, self.at
        inputs, controls = self.inputs, self.controls
        if entries:
            keys = entries.keys()
            inputs = [ins if keys.isdisjoint(ins) else [at(e) for e in ins] for ins in inputs]
        if nodes:
            waited = nodes.keys()
            controls = [deps if waited.isdisjoint(deps) else self._waits(deps) for deps in controls]
        return inputs, controls

    def _waits(self, deps: Iterable[int]) -> list[int]:
        found: dict[int, None] = {}
        for dep in deps:
            now: int | None = dep
            while now is not None and now in self._nodes:
                now = self._nodes[now]
            if now is not None:
                found[now] = None
        return list(found)

    def _begun(self, inputs: Sequence[list[int]], controls: Sequence[list[int]]) -> int:
        """How many nodes keep their numbers: those of the forward part, if nothing in it changes, else none."""
        given = self.network
        graph, count = given.graph, given.num_forward
        same = inputs[:count] == graph.inputs[:count] and controls[:count] == graph.controls[:count]
        heads = [self.at(head) for head in self.heads[: given.num_outputs]]
        return count if same and heads == given.outputs else 0

    def _order(self, inputs: Sequence[list[int]], controls: Sequence[list[int]], begun: int) -> list[int]:
        """The nodes that are needed, depth first from the heads; the first ``begun`` are known."""
        makers = self.makers
        order = list(range(begun))
        state = bytearray(begun) + bytearray(len(self.nodes) - begun)
        state[:begun] = b"\2" * begun  # 0: not met, 1: on the way, 2: in the order
        for head in self.heads:
            stack = [makers[self.at(head)]]
            while stack:
                nid = stack[-1]
                if state[nid]:
                    stack.pop()
                    if state[nid] == 1:
                        state[nid] = 2
                        order.append(nid)
                    continue
                state[nid] = 1
                if controls[nid]:
                    stack += [dep for dep in reversed(controls[nid]) if not state[dep]]
                stack += [maker for e in reversed(inputs[nid]) if not state[maker := makers[e]]]
        return order

    def done(self, **changes: Any) -> Network:
        """Return the network without what nothing needs any more, numbered depth first from its heads.

        ``changes`` are fields of the network; nodes in them have the numbers of this edit.
        """
        given = self.network
        inputs, controls = self._resolved()
        begun = self._begun(inputs, controls)
        kept = self._order(inputs, controls, begun)
        row, nodes = self.row, self.nodes
        ends = [*row[1:], len(self.makers)]
        rest = kept[begun:]
        count = ends[begun - 1] if begun else 0
        number = [*range(begun), *[-1] * (len(nodes) - begun)]
        entry = [*range(count), *[-1] * (len(self.makers) - count)]
        source = list(range(count))
        for nid, was in enumerate(rest, begun):
            number[was] = nid
            first, end = row[was], ends[was]
            if end - first == 1:
                entry[first] = count
            else:
                entry[first:end] = range(count, count + end - first)
            source += range(first, end)
            count += end - first
        graph = IndexedGraph(
            [nodes[was] for was in kept],
            works=[self.works[was] for was in kept],
            inputs=inputs[:begun] + [[entry[e] for e in inputs[was]] for was in rest],
            controls=controls[:begun]
            + [[number[dep] for dep in controls[was]] if controls[was] else [] for was in rest],
            counts=[ends[was] - row[was] for was in kept],
            heads=[entry[self.at(e)] for e in self.heads],
        )
        network = replace(given, **changes)
        if len(given.shapes) == given.graph.num_entries:
            like = [self._like.get(e, e) for e in source]
            shapes, dtypes = [given.shapes[e] for e in like], [given.dtypes[e] for e in like]
            network = replace(network, shapes=shapes, dtypes=dtypes)
        return replace(
            network,
            graph=graph,
            devices=[self.devices[was] for was in kept],
            arguments={name: number[nid] if nid >= 0 else -1 for name, nid in network.arguments.items()},
            states={name: number[nid] if nid >= 0 else -1 for name, nid in network.states.items()},
            head_grads=tuple(number[nid] if nid >= 0 else -1 for nid in network.head_grads),
        )


def dict_of(params: Params) -> dict[str, Any]:
    """Return parameters as the dictionary that they are: nodes with equal ones share it."""
    return params if isinstance(params, dict) else dict(params)


def alike(a: Node, b: Node) -> bool:
    """Return whether two nodes have the attributes of one."""
    plain = _ALIKE.isdisjoint(a.attrs) and _ALIKE.isdisjoint(b.attrs)  # most are
    return plain or all(a.attrs.get(key) == b.attrs.get(key) for key in ALIKE)


def shared(node: Node) -> dict[str, str]:
    """Return the attributes that a node shares with those that it is fused with."""
    return {key: node.attrs[key] for key in ALIKE if key in node.attrs}
