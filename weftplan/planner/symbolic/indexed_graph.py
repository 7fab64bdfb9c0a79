"""The numbered graph of a symbol, with the memory effects that operators declare for each node.

This module translates a symbol to the planner core's graph. Nodes are numbered in depth-first post-order from the
outputs (MXNet's order: the inputs of a node come first, then its control dependencies). Hidden outputs have ids too.

No function recurses, because chains of 10^6 nodes are ordinary input.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

from weftplan.errors import PlanError
from weftplan.ops.core.rule_cache import Settled
from weftplan.ops.core.schema import Op, Params
from weftplan.ops.fusion import depthwise_block
from weftplan.ops.fusion.relu import layer_of
from weftplan.planner.program import VARIABLE, Graph, Work
from weftplan.symbol.node import Entry, Node, Order, depth_first_order

FORCE, OLD_FORCE = "__force_mirroring__", "force_mirroring"
NEVER_V1 = frozenset(("Convolution", "FullyConnected", "Concat", "SoftmaxOutput", depthwise_block.NAME))
NEVER_ECHO = NEVER_V1 | {"Embedding"}
TRUE, FALSE = frozenset(("1", "true")), frozenset(("0", "false", ""))
_settled = Settled[tuple[Work, int]]()
Kinds = dict[tuple[int, int, bool | None], tuple[Work, int]]
"""Map from (operator, parameters, forced recomputation) to (memory effects, number of outputs)."""


@dataclass(eq=False, repr=False, kw_only=True)
class IndexedGraph(Graph):
    """A numbered graph whose nodes have operators and parameters.

    The graph refers to the symbol's own node objects, but its edges are only those of this graph.
    """

    nodes: list[Node]
    """Node object of each node."""
    names: Sequence[str] = ()
    """Name of each node; by default that of the node object."""

    def __post_init__(self, counts: Sequence[int], heads: Iterable[int]) -> None:
        """Number the entries."""
        self.names = self.names or [node.name for node in self.nodes]
        super().__post_init__(counts, heads)

    def output_name(self, nid: int, index: int) -> str:
        """Return the operator's name of an output, as ``list_outputs`` shows it."""
        node = self.nodes[nid]
        assert node.op is not None
        return node.op.output_names(node.params)[index]

    def version(self, nid: int, slot: int) -> int:
        """Return the number of writes to a variable that precede its read by input ``slot``; 0 for an added node."""
        inputs = self.nodes[nid].inputs
        return inputs[slot].version if len(inputs) == len(self.inputs[nid]) else 0


def indexed(entries: Iterable[Entry], order: Order | None = None) -> IndexedGraph:
    """Return the graph of the nodes that ``entries`` need.

    ``order`` is their depth-first order, if the caller has computed it.

    Raises:
        PlanError: the graph has a cycle, an entry names an output that its node lacks, a variable has inputs, or the
            attribute that forces recomputation has an illegal value.
    """
    heads = list(entries)
    nodes, nid = depth_first_order((entry[0] for entry in heads), PlanError) if order is None else order
    works, counts = works_of(nodes)
    row = dict(zip(nodes, accumulate(counts, initial=0), strict=False))
    inputs = [[row[maker] + index for maker, index, _ in node.inputs] if node.inputs else [] for node in nodes]
    least = min(counts, default=0)
    for reader, entry in [(node, e) for node in nodes for e in node.inputs if not 0 <= e[1] < least]:
        if not 0 <= entry.index < counts[nid[entry.node]]:
            raise PlanError(_no_such_output(entry, f"node {reader.name!r}"))
    for entry in heads:
        if not 0 <= entry.index < counts[nid[entry.node]]:
            raise PlanError(_no_such_output(entry, "the list of outputs"))
    none: list[int] = []
    return IndexedGraph(
        nodes=nodes,
        works=works,
        inputs=inputs,
        controls=[[nid[dep] for dep in node.control_deps] if node.control_deps else none for node in nodes],
        counts=counts,
        heads=[row[entry.node] + entry.index for entry in heads],
    )


def works_of(nodes: Sequence[Node], kinds: Kinds | None = None) -> tuple[list[Work], list[int]]:
    """Return the memory effects and the number of outputs of each node.

    Nodes with the same operator and parameters share one object. The parser gives equal parameters one dictionary, so
    repeated layers query their operator once; later graphs reuse the cached answers.
    """
    cached: Kinds = {} if kinds is None else kinds
    works: list[Work] = []
    counts: list[int] = []
    for node in nodes:
        op = node.op
        if op is None:
            if node.inputs:
                raise PlanError(f"variable {node.name!r} has inputs: a variable holds data, computes nothing")
            works.append(VARIABLE)
            counts.append(1)
            continue
        attrs = node.attrs
        force = _forced(node) if FORCE in attrs or OLD_FORCE in attrs else None
        key = (id(op), id(node.params), force)
        kind = cached.get(key)
        if kind is None:
            kind = cached[key] = _settled.answer(op, node.params, (force,), partial(_work, op, node.params, force))
        works.append(kind[0])
        counts.append(kind[1])
    return works, counts


def work_of(node: Node, kinds: Kinds | None = None) -> tuple[Work, int]:
    """Return the memory effects and the number of outputs of one node.

    ``kinds`` caches them by object identity, so the caller must keep the parameters alive.
    """
    (work,), (count,) = works_of([node], kinds)
    return work, count


def _work(op: Op, params: Params, force: bool | None) -> tuple[Work, int]:
    """Return the memory effects that an operator declares, and its number of outputs."""
    work = Work(
        label=op.name,
        ignored=op.ignored(params),
        inplace=op.inplace_pairs(params),
        writes=op.mutated(params),
        is_sum=op.name == "_grad_add",
        only_overwrites=op.name == "_CrossDeviceCopy",
        may_repeat=not op.loss,
        asked_twice=bool(force),
        rules=rules_of(op.name, force),
    )
    return work, op.num_outputs(params)


def _no_such_output(entry: Entry, reader: str) -> str:
    """Return the message of the error for an entry whose node lacks that output."""
    node = entry.node
    return f"{reader} refers to output {entry.index} of {node.name!r}, which has {node.num_outputs} output(s)"


def _forced(node: Node) -> bool | None:
    """Return the value of the attribute ``__force_mirroring__`` (or the older ``force_mirroring``), None without it.

    Raises:
        PlanError: the value is no boolean.
    """
    text = node.attrs.get(FORCE, node.attrs.get(OLD_FORCE))
    if text is None:
        return None
    word = str(text).strip().lower()
    if word in TRUE or word in FALSE:
        return word in TRUE
    raise PlanError(f"attribute {FORCE} of {node.name!r} must be one of 0, 1, true, false; got {text!r}")


def rules_of(name: str, force: bool | None) -> frozenset[str]:
    """Return the rules that recompute a node of operator ``name`` whose attribute is ``force``.

    ``mxnet`` is the rule of MXNet 1.x, in which the attribute can only add nodes. ``echo`` is the rule of its echo
    pass, in which the attribute decides either way. Neither recomputes Dropout.

    >>> sorted(rules_of("Activation", None)), sorted(rules_of("Activation", False))
    (['echo', 'mxnet'], ['mxnet'])
    >>> sorted(rules_of("Convolution", True))
    ['echo', 'mxnet']
    """
    if name == "Dropout":
        return frozenset()
    names = {name, layer_of(name)}
    mxnet, echo = force or names.isdisjoint(NEVER_V1), names.isdisjoint(NEVER_ECHO) if force is None else force
    return frozenset(rule for rule, holds in (("mxnet", mxnet), ("echo", echo)) if holds)
