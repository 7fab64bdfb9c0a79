"""MXNet's allocator: an entry reuses a whole free block of similar size.

A free block of ``b`` bytes may serve an allocation of ``s`` bytes if ``s // R <= b <= s * R`` (R: the match range). The
pool takes the smallest block that is large enough, or else the largest block that is too small, which then grows. With
several colours a block is reused only by nodes of its colour (:func:`colors`), so that reuse does not serialize
independent branches.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

from weftplan.planner.program import Program

Free = tuple[int, int, int]
"""A free block: (bytes when it was released, serial number of the release, number of the block)."""


class BlockPool:
    """The allocator of the match-range strategy.

    Args:
        sizes: bytes to allocate for each entry.
        match_range: the ratio R; 0 disables reuse.
        color: colour of each node; empty: all nodes have one colour.
    """

    def __init__(self, sizes: Sequence[int], match_range: int, *, color: Sequence[int] = ()) -> None:
        self.sizes = sizes
        self.match_range = match_range
        self.color = color
        self.block_bytes: list[int] = []
        self._home: list[int] = []
        self._free: dict[tuple[int, int], list[Free]] = {}
        """Free blocks per (device, colour), in ascending order."""
        self._released = 0

    def allocate(self, entry: int, device: int, node: int) -> int:
        """Return the number of a free block within range, or of a new block."""
        size = self.sizes[entry]
        free = self._free.get((device, self.color[node] if self.color else 0))  # None if no block was released
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
        """Return the index of the block in ``free`` that serves ``size`` bytes; -1 if none does."""
        at = bisect_left(free, (size,))
        if at == len(free) or free[at][0] > size * self.match_range:
            at -= 1
            if at >= 0 and free[at][0] < size // self.match_range:
                at = -1
        return at

    def release(self, block: int, node: int) -> None:
        """Put ``block`` on the free list of its device and of the colour of ``node``, the last reader."""
        if self.match_range:
            key = (self._home[block], self.color[node] if self.color else 0)
            insort(self._free.setdefault(key, []), (self.block_bytes[block], self._released, block))
            self._released += 1


def colors(program: Program, count: int) -> list[int]:
    """Return a colour below ``count`` for each node, or an empty list if ``count`` is 1.

    Repeatedly, the path with the most uncoloured operators gets the next colour. After ``count - 1`` paths, all other
    nodes get the last colour.
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
