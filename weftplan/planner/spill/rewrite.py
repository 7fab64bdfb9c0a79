"""The rewrite behind spilling: a forward result goes to the host, and the backward part reads what comes back.

    forward      x = op(...)  ...  x_spill = copy of x, on the host
    backward     x_fetch = copy of x_spill, on the device  ...  readers of x read x_fetch

Both copies are ``_CrossDeviceCopy`` nodes with the attribute ``__spill__``. Where they stand in the order decides how
long the memory of the result is taken: up to the copy out, and from the copy back. Slots of which only the shape
matters go on naming the first node. Forward nodes are shared with the given graph, backward nodes are copied where
something they need has changed; the given graph stays as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weftplan.device.context import Context
from weftplan.ops import registry
from weftplan.planner.graph import IndexedGraph
from weftplan.planner.liveness import PlacedGraph
from weftplan.planner.rewiring import carried_over, followed, moved_heads, rewired
from weftplan.symbol.node import Entry, Node

OUT, BACK = "_spill", "_fetch"
MARK = "__spill__"
"""Attribute of both copies: ``out`` or ``back``."""


@dataclass(frozen=True, slots=True)
class Spill:
    """One result that goes to the host.

    Attributes:
        entry: its id.
        out: the copy out stands before this step, at most the number of forward steps.
        back: the copy back stands before this step.
    """

    entry: int
    out: int
    back: int


def can_spill(context: Context) -> bool:
    """True for devices with memory of their own and streams that copy while they compute."""
    return context.device_type in ("gpu", "sim")


def host_of(context: Context) -> Context:
    """Where results of a device wait."""
    return Context("cpu_pinned", context.device_id)


def spilled(facts: PlacedGraph, num_forward: int, spills: Sequence[Spill]) -> tuple[PlacedGraph, int]:
    """The graph in which ``spills`` go to the host, and the number of its forward steps."""
    graph, order = facts.graph, facts.order
    copy_op = registry.get("_CrossDeviceCopy")
    params = registry.parse_params(copy_op, {})
    origin: dict[Node, int] = {node: nid for nid, node in enumerate(graph.nodes)}
    copied: dict[Node, int] = {}
    outs: dict[int, list[Node]] = {}
    backs: dict[int, list[Node]] = {}
    fetched: dict[int, Node] = {}
    for spill in sorted(spills, key=lambda spill: spill.entry):
        node, index, version = graph.entry(spill.entry)
        name = graph.entry_name(spill.entry)
        out = Node(copy_op, name + OUT, attrs={MARK: "out"}, params=params, inputs=[Entry(node, index, version)])
        back = Node(copy_op, name + BACK, attrs={MARK: "back"}, params=params, inputs=[Entry(out)])
        copied[out] = copied[back] = spill.entry
        outs.setdefault(spill.out, []).append(out)
        backs.setdefault(spill.back, []).append(back)
        fetched[spill.entry] = back

    moved: dict[Node, Node] = {}
    for nid in order[num_forward:]:
        node = graph.nodes[nid]
        assert node.op is not None
        ignored = node.op.ignored(node.params)
        inputs = [
            Entry(fetched[e]) if e in fetched and slot not in ignored else followed(entry, moved)
            for slot, (e, entry) in enumerate(zip(graph.inputs[nid], node.inputs, strict=True))
        ]
        copy = rewired(node, inputs, moved)
        if copy is not node:
            moved[node] = copy
            origin[copy] = nid

    steps: list[Node] = []
    for step, nid in enumerate(order):
        if step <= num_forward:
            steps.extend(outs.get(step, ()))
        steps.extend(backs.get(step, ()))
        steps.append(moved.get(graph.nodes[nid], graph.nodes[nid]))
    return _numbered(facts, steps, moved, origin, copied), num_forward + len(spills)


def _numbered(
    facts: PlacedGraph, steps: Sequence[Node], moved: dict[Node, Node], origin: dict[Node, int], copied: dict[Node, int]
) -> PlacedGraph:
    """Number the new graph, and carry sizes and places over."""
    old = facts.graph
    graph = IndexedGraph(moved_heads(old, moved))
    contexts = list(facts.contexts)
    source: list[int] = []
    stands_for: list[int | None] = []
    device: list[int] = []
    for node in graph.nodes:
        entry = copied.get(node)
        if entry is None:
            was = origin[node]
            stands_for.append(was)
            source.extend(range(old.row[was], old.row[was + 1]))
            device.append(facts.device[was])
        else:
            stands_for.append(None)
            source.append(entry)
            home = facts.device[int(old.entry_node[entry])]
            if node.attrs[MARK] == "out":
                host = host_of(facts.contexts[home])
                if host not in contexts:
                    contexts.append(host)
                home = contexts.index(host)
            device.append(home)
    return carried_over(
        facts,
        graph,
        source,
        stands_for,
        order=[graph.nid[node] for node in steps],
        contexts=contexts,
        device=device,
    )
