"""MXNet's rule of sharing: an entry of similar size reuses a whole block.

A released block of ``b`` bytes may serve a request of ``s`` bytes if ``s // R <= b <= s * R`` (R: the match range). The
pool takes the smallest block that is large enough; failing that the largest that is too small, which then grows. With
more than one colour a block passes only between nodes of one colour (:func:`colors`), so reuse does not chain
independent branches.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

from weftplan.planner.program import Program

Free = tuple[int, int, int]
"""A free block: its bytes when it was released, which release that was, its number."""


class BlockPool:
    """The allocator of the match-range strategy.

    ``sizes`` are the bytes requested per entry; a range of 0 never reuses. ``color`` is per node; empty: one for all.
    """

    def __init__(self, sizes: Sequence[int], match_range: int, *, color: Sequence[int] = ()) -> None:
        self.sizes = sizes
        self.match_range = match_range
        self.color = color
        self.block_bytes: list[int] = []
        self._home: list[int] = []
        self._free: dict[tuple[int, int], list[Free]] = {}
        """Per (device, colour) the free blocks, ascending."""
        self._released = 0

    def allocate(self, entry: int, device: int, node: int) -> int:
        """The number of a free block within range, or the next new number."""
        size = self.sizes[entry]
        free = self._free.get((device, self.color[node] if self.color else 0))  # empty where nothing is used again
        if free:
            at = self.chosen(free, size)
            if at >= 0:
                block = free.pop(at)[2]
                if self.block_bytes[block] < size:
                    self.block_bytes[block] = size
                return block
        self.block_bytes.append(size)
        self._home.append(device)
        return len(self.block_bytes) - 1

    def chosen(self, free: Sequence[Free], size: int) -> int:
        """Which of these ascending blocks serves a request; -1: none."""
        at = bisect_left(free, (size,))
        if at == len(free) or free[at][0] > size * self.match_range:
            at -= 1
            if at >= 0 and free[at][0] < size // self.match_range:
                at = -1
        return at

    def release(self, block: int, node: int) -> None:
        """Every content of ``block`` is dead after ``node``: offer it to later nodes (of the same colour)."""
        if self.match_range:
            key = (self._home[block], self.color[node] if self.color else 0)
            insort(self._free.setdefault(key, []), (self.block_bytes[block], self._released, block))
            self._released += 1


def colors(program: Program, count: int) -> list[int]:
    """A colour below ``count`` for every node: the longest paths of operators one after the other, then the rest.

    Repeatedly the path with most uncoloured operators gets the next colour; the rest after ``count - 1`` paths gets
    the last colour.
    """
    graph = program.graph
    if count <= 1:
        return []
    nodes = graph.num_nodes
    weight = [not is_variable for is_variable in graph.is_variable]
    color = [count - 1] * nodes
    makers = [[graph.entry_node[e] for e in ins] for ins in graph.inputs]
    for shade in range(count - 1):
        best = [0] * nodes
        follow = [-1] * nodes
        start = -1
        for nid in range(nodes - 1, -1, -1):
            best[nid] += weight[nid]
            if best[nid] > (best[start] if start >= 0 else 0):
                start = nid
            for source in (*makers[nid], *graph.controls[nid]):
                if best[nid] > best[source]:
                    best[source], follow[source] = best[nid], nid
        if start < 0:
            break
        while start >= 0:
            if weight[start]:
                color[start], weight[start] = shade, False
            start = follow[start]
    return color
