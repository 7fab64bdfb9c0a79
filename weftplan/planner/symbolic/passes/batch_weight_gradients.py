"""Gradients of a weight that many FullyConnected layers share: a few layers at a time become one node.

The gradient of such a weight is a chain of sums with a term for each layer (an unrolled cell has one for each step).
Several terms that follow one another in a chain are made by one node of :data:`SHARED_GRADIENT`, right where the last
of them was made; where all gradients of these layers are computed one after the other, it makes those of the data, too.

Only nodes behind the forward part take part, all of which the same bind has made: they change where they are. Why no
cycle comes of it: number the nodes in the given order. A new node has the place of the last layer that it stands for,
all that it reads comes before the layers' own places, and whoever reads it comes behind the last of them. Nothing is
kept; any thread may call this.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from weftplan.ops.fusion.shared_gradient import SHARED_GRADIENT
from weftplan.symbol.node import Entry, Node
from weftplan.symbol.traversal import Key, followed

_LAYER = "_backward_FullyConnected"
_SUM = "_grad_add"
Most = Callable[[Node], int]
Together = Callable[[Node, Node], bool]


@dataclass(slots=True)
class _Chain:
    """``terms[0] + terms[1] + …``; ``sums[i]`` adds term ``i + 1``."""

    terms: list[Key]
    sums: list[Node] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    """Behind the last term of each group."""
    total: Entry | None = None
    """The sum of the groups made so far."""


@dataclass(frozen=True, slots=True)
class Gathered:
    """A graph in which some nodes stand for gradients of several layers."""

    entries: list[Entry]
    made: dict[Node, Node]
    """The gradient of the last layer for which each of those nodes stands."""
    layers: int
    """Layers whose gradients were gathered."""


def gathered(entries: Sequence[Entry], order: Sequence[Node], most: Most, together: Together) -> Gathered:
    """The graph with the shared gradients gathered.

    Args:
        order: the nodes behind the forward part, in the depth-first order of ``entries``.
        most: how many layers like this one, the backward node of a FullyConnected, may become one; less than 2: none.
        together: whether two such nodes may be one, and ``most`` says the same of them.
    """
    weights = _weights(entries, order, most, together)
    if not weights:
        return Gathered(list(entries), {}, 0)
    rebuilt = _Rebuilt(order)
    for layers, chains, limit in weights:
        rebuilt.add(layers, chains, limit)
    rebuilt.run()
    return Gathered([rebuilt.at(entry) for entry in entries], rebuilt.made, rebuilt.layers)


def _weights(
    entries: Sequence[Entry], order: Sequence[Node], most: Most, together: Together
) -> list[tuple[list[Node], list[_Chain], int]]:
    """Of each such weight the layers in the order of its sum, its chain, and that of the bias where it has one, and how
    many layers may become one."""
    sums = [node for node in order if node.op is not None and node.op.name == _SUM]
    if not sums:
        return []
    makers = {entry[0] for node in sums for entry in node.inputs}
    uses: Counter[Key] = Counter([(e[0], e[1]) for node in order for e in node.inputs if e[0] in makers])
    uses.update((entry[0], entry[1]) for entry in entries if entry[0] in makers)
    chains: dict[Node, _Chain] = {}  # by the last sum
    for node in sums:
        (left, index, _), right = node.inputs
        chain = chains.pop(left) if left in chains and uses[left, 0] == 1 else _Chain([(left, index)])
        chain.terms.append((right[0], right[1]))
        chain.sums.append(node)
        chains[node] = chain
    place = {node: number for number, node in enumerate(order)}
    by_layers: dict[tuple[Node, ...], dict[int, _Chain]] = {}
    for chain in chains.values():
        outputs = {index for _, index in chain.terms}
        layers = tuple(node for node, _ in chain.terms)
        fit = len(outputs) == 1 and all(node in place and _is_layer(node) for node in layers)
        if fit and all(uses[term] == 1 for term in chain.terms):
            by_layers.setdefault(layers, {})[outputs.pop()] = chain
    found = []
    for layers, by_output in by_layers.items():
        first, *rest = layers
        weight, bias = by_output.get(1), by_output.get(2)
        same = all(node.inputs[2] == first.inputs[2] and together(first, node) for node in rest)
        onwards = all(place[a] < place[b] for a, b in zip(layers, rest, strict=False))
        limit = most(first) if weight is not None and same and onwards else 0
        if weight is None or limit < 2:
            continue
        if bias is None and any(uses[node, 2] for node in layers):
            continue
        found.append((list(layers), [weight] if bias is None else [weight, bias], limit))
    return found


def _is_layer(node: Node) -> bool:
    return node.op is not None and node.op.name == _LAYER


class _Rebuilt:
    """The graph while its nodes are made again, in their order."""

    def __init__(self, order: Sequence[Node]) -> None:
        self.order = order
        self.made: dict[Node, Node] = {}
        self.layers = 0
        self._place = {node: number for number, node in enumerate(order)}
        self._entries: dict[Key, Entry] = {}
        self._groups: dict[Node, tuple[list[Node], bool]] = {}
        """By the last layer of a group: its layers, and whether their gradients of the data are made with it."""
        self._whole: set[Node] = set()
        """Layers of which only the new node is left."""
        self._moved: dict[Node, Node] = {}
        """Which node that is, once it is made."""
        self._sums: dict[Node, tuple[_Chain, int]] = {}
        """The sums of all chains, and the number of the term that each adds."""
        self._instead: dict[Node, Node | None] = {}
        """What to wait for instead of a sum."""
        self._touched: set[Node] = set()
        """The keys of these tables: only who reads or waits for one of them changes."""
        self._params: dict[object, dict[str, Any]] = {}  # equal groups have one dictionary

    def add(self, layers: list[Node], chains: list[_Chain], most: int) -> None:
        """Settle what becomes of one weight."""
        count = -(-len(layers) // most)
        ends = [len(layers) * (k + 1) // count for k in range(count)]
        for chain in chains:
            chain.ends = ends
            self._sums.update((node, (chain, number)) for number, node in enumerate(chain.sums, 1))
            if ends[0] == 1:
                chain.total = Entry(*chain.terms[0])
        sums = {node for chain in chains for node in chain.sums}
        for begin, end in zip([0, *ends], ends, strict=False):
            if end - begin > 1:
                group = layers[begin:end]
                self._groups[group[-1]] = group, self._is_run(group, sums)
                self.layers += len(group)
                if self._groups[group[-1]][1]:
                    self._whole.update(group)

    def _is_run(self, group: list[Node], sums: set[Node]) -> bool:
        """Whether these layers are computed one after the other, with nothing but their sums between them."""
        inside = {*group, *sums}
        run = self.order[self._place[group[0]] : self._place[group[-1]]]
        return inside.issuperset(run) and not any(entry[0] in inside for node in group for entry in node.inputs)

    def at(self, entry: Entry) -> Entry:
        """What stands for a given entry."""
        found = self._entries.get((entry[0], entry[1]))
        return followed(entry, self._moved) if found is None else found

    def run(self) -> None:
        """Make all nodes that change; those before the first sum or group read nothing that does."""
        touched = self._touched
        begin = min(self._place[node] for node in (*self._sums, *self._groups))
        for node in self.order[begin:]:
            if node in self._sums:
                self._sum(node, *self._sums[node])
                continue
            same = touched.isdisjoint([entry[0] for entry in node.inputs]) and touched.isdisjoint(node.control_deps)
            if not same and node not in self._whole:  # asked again, both give the same: what they lead to never moves
                node.inputs, node.control_deps = [self.at(entry) for entry in node.inputs], self._controls(node)
            if node in self._groups:
                self._group(*self._groups[node])

    def _controls(self, node: Node) -> list[Node]:
        found = [self._instead.get(dep, self._moved.get(dep, dep)) for dep in node.control_deps]
        return [dep for dep in found if dep is not None]

    def _sum(self, node: Node, chain: _Chain, number: int) -> None:
        """What becomes of the sum that adds this term."""
        if number + 1 in chain.ends:
            term = self.at(Entry(*chain.terms[number]))
            if chain.total is None:
                chain.total = self._entries[node, 0] = term
            else:
                node.inputs, node.control_deps = [self.at(chain.total), term], self._controls(node)
                chain.total = Entry(node)
        self._touched.add(node)
        self._instead[node] = None if chain.total is None else self.at(chain.total)[0]

    def _group(self, layers: list[Node], whole: bool) -> None:
        """Make the node that stands for these layers."""
        first, last, count = layers[0], layers[-1], len(layers)
        key = id(first.params), count, whole
        params = self._params.get(key)
        if params is None:
            params = self._params[key] = {**first.params, "count": count, "whole": whole}
        inputs = [self.at(layer.inputs[k]) for k in (0, 1) for layer in layers]
        if whole:
            inputs.append(self.at(first.inputs[2]))
        waits = {dep: None for layer in layers for dep in self._controls(layer) if dep not in layers}
        made = Node(
            SHARED_GRADIENT,
            f"{last.name}_shared",
            attrs={**last.attrs, "count": str(count)},
            params=params,
            inputs=inputs,
            control_deps=list(waits),
            created_at=last.created_at,
        )
        outputs = SHARED_GRADIENT.num_outputs(params) - count * whole
        self._touched.update(layers if whole else (last,))
        self.made[made] = last
        for k in range(outputs):
            self._entries[last, 1 + k] = Entry(made, k)
        if whole:
            for k, layer in enumerate(layers):
                self._entries[layer, 0] = Entry(made, outputs + k)
                self._moved[layer] = made
