"""Order added to a block without loss: parallel chains are merged into one optimal chain, over and over.

Liu's generalised pebbling (1987) for trees, and its extension to series-parallel graphs (Kayaaslan, Lambert, Marchal
and Ucar, 2018). A *chain* is a list of nodes in their final order. Chains with the same needs and the same followers
are parallel; their bytes alive add up when no value dies in one of them by the choice of another. Such chains are
merged: each is cut at its state of least memory, the parts after the cuts run by segments from valley to valley, the
segment with the largest drop from its hill to its valley first, and the parts before the cuts likewise in reversed
time. A chain whose only follower needs only it is joined to it. A series-parallel block of private values becomes one
chain this way; in any other block what is series-parallel becomes chains, and the search has less to decide.

The exact class. A value is *decided* when one of its readers comes after all the others, so that it dies there in every
order. Chains that read an undecided value (several branches that read the result of one fork, for instance) are left
apart: for them the search over down-sets decides, exactly as long as it is not stopped by its limit.
"""

from __future__ import annotations

from dataclasses import dataclass

from weftplan.planner.passes.order_model import Block, saved

LARGEST = 1000
"""Nodes of a block for which sets of ancestors are worth their time (quadratic at worst)."""


@dataclass(slots=True)
class _Chain:
    nodes: list[int]
    needs: set[int]
    """Chains that must be over before this one starts."""
    followers: set[int]


def add_order(block: Block) -> None:
    """Add to ``block.needs`` what optimal chains demand."""
    count = len(block.nodes)
    if count > LARGEST:
        return
    ancestors = [0] * count
    for i, mask in enumerate(block.needs):
        ancestors[i] = mask
        for j in _bits(mask):
            ancestors[i] |= ancestors[j]
    # Without edges that others imply, parallel chains are seen as such.
    chains: dict[int, _Chain] = {i: _Chain([i], set(), set()) for i in range(count)}
    for i, mask in enumerate(block.needs):
        implied = 0
        for j in _bits(mask):
            implied |= ancestors[j]
        for j in _bits(mask & ~implied):
            chains[i].needs.add(j)
            chains[j].followers.add(i)
    prices = _Prices(block, ancestors)
    changed = True
    while changed:
        _join_series(chains)
        changed = _merge_parallel(chains, prices)
    for chain in chains.values():
        for before, after in zip(chain.nodes, chain.nodes[1:], strict=False):
            block.needs[after] |= 1 << before


def _join_series(chains: dict[int, _Chain]) -> None:
    for key in list(chains):
        while key in chains:
            chain = chains[key]
            if len(chain.followers) != 1:
                break
            (nxt,) = chain.followers
            if chains[nxt].needs != {key}:
                break
            chain.nodes += chains[nxt].nodes
            chain.followers = chains[nxt].followers
            for follower in chain.followers:
                chains[follower].needs.remove(nxt)
                chains[follower].needs.add(key)
            del chains[nxt]


def _merge_parallel(chains: dict[int, _Chain], prices: _Prices) -> bool:
    groups: dict[tuple[frozenset[int], frozenset[int]], list[int]] = {}
    for key, chain in chains.items():
        groups.setdefault((frozenset(chain.needs), frozenset(chain.followers)), []).append(key)
    prices.decide(chains)
    changed = False
    for keys in groups.values():
        if len(keys) < 2:
            continue
        mine = [key for key in keys if prices.is_private(chains[key].nodes)]
        if len(mine) < 2:
            continue
        first, *others = mine
        chains[first].nodes = _merge([prices.states(chains[key].nodes) for key in mine])
        for key in others:
            for other in chains[first].needs:
                chains[other].followers.discard(key)
            for other in chains[first].followers:
                chains[other].needs.discard(key)
            del chains[key]
        changed = True
    return changed


class _Prices:
    """Who frees which value, as far as that is decided."""

    def __init__(self, block: Block, ancestors: list[int]) -> None:
        self.block = block
        self.ancestors = ancestors
        self.readers = {v: mask for reads in block.reads for v, mask, _ in reads}
        self.last: dict[int, int] = {}

    def decide(self, chains: dict[int, _Chain]) -> None:
        """Find the reader of each value that comes after all its other readers, by needs or within a chain."""
        place = {i: (key, at) for key, chain in chains.items() for at, i in enumerate(chain.nodes)}
        for v, mask in self.readers.items():
            if v in self.last:
                continue
            readers = list(_bits(mask))
            for i in readers:
                if all(
                    j == i or self.ancestors[i] >> j & 1 or (place[j][0] == place[i][0] and place[j][1] < place[i][1])
                    for j in readers
                ):
                    self.last[v] = i
                    break

    def is_private(self, nodes: list[int]) -> bool:
        """Whether every value that these nodes read dies at a decided node."""
        return all(v in self.last for i in nodes for v, _, _ in self.block.reads[i])

    def states(self, nodes: list[int]) -> list[tuple[int, int, int]]:
        """Per node of a chain: (node, bytes while it runs, bytes after it), counted from 0 before the chain."""
        alive, found = 0, []
        for i in nodes:
            dying = {v: nbytes for v, _, nbytes in self.block.reads[i] if self.last[v] == i}
            grown = alive + self.block.news[i]
            during = grown - saved(self.block.merges[i], set(dying)) + self.block.workspace[i]
            alive = grown - sum(dying.values())
            found.append((i, during, alive))
        return found


def _merge(profiles: list[list[tuple[int, int, int]]]) -> list[int]:
    """One optimal order of parallel chains whose bytes add up."""
    left: list[tuple[int, int, int, list[int]]] = []
    right: list[tuple[int, int, int, list[int]]] = []
    for k, profile in enumerate(profiles):
        levels = [0, *(after for _, _, after in profile)]
        cut = levels.index(min(levels))
        steps = [(i, during, levels[s], levels[s + 1]) for s, (i, during, _) in enumerate(profile)]
        for at, (drop, nodes) in enumerate(_segments([(i, hill, end) for i, hill, _, end in steps[cut:]])):
            right.append((-drop, k, at, nodes))
        reverse = [(i, hill, start) for i, hill, start, _ in reversed(steps[:cut])]
        for at, (drop, nodes) in enumerate(_segments(reverse)):
            left.append((-drop, k, at, nodes))
    left.sort(key=lambda item: item[:3])
    right.sort(key=lambda item: item[:3])
    before = [i for *_, nodes in left for i in nodes]
    before.reverse()
    return before + [i for *_, nodes in right for i in nodes]


def _segments(steps: list[tuple[int, int, int]]) -> list[tuple[int, list[int]]]:
    """(hill minus valley, nodes) per segment: up to the highest hill, on to the lowest valley after it, and so on.

    Hills fall and valleys rise from segment to segment, so drops fall too and sorting by drop keeps a chain's order.
    """
    stack: list[tuple[int, int, list[int]]] = []
    for i, hill, valley in steps:
        nodes = [i]
        # The next part belongs to the last one if its hill is no lower, or its valley no higher.
        while stack and (hill >= stack[-1][0] or valley <= stack[-1][1]):
            last_hill, _, earlier = stack.pop()
            hill, nodes = max(hill, last_hill), earlier + nodes
        stack.append((hill, valley, nodes))
    return [(hill - valley, nodes) for hill, valley, nodes in stack]


def _bits(mask: int) -> list[int]:
    found = []
    while mask:
        low = mask & -mask
        found.append(low.bit_length() - 1)
        mask ^= low
    return found
