"""Order edges of a packing: which earlier buffers' bytes does each buffer take over?

Buffers are swept in the order in which they begin, over a map of who used each byte last. Only these last users become
edges: whoever used a byte before them is ordered already, because they had an edge to it in turn. So the edges are the
transitive reduction that matters, found without comparing all pairs.
"""

from __future__ import annotations

from bisect import bisect_right

import numpy as np

from weftplan.planner.graph import IntArray


def reuse_edges(lower: IntArray, upper: IntArray, size: IntArray, offsets: IntArray) -> tuple[IntArray, IntArray]:
    """(pointers, earlier): the buffers that buffer ``i`` directly follows are ``earlier[pointers[i]:pointers[i + 1]]``.

    The packing must be valid: buffers alive at the same time do not overlap.
    """
    count = len(lower)
    begins, sizes = offsets.tolist(), size.tolist()
    rows: list[list[int]] = [[] for _ in range(count)]
    # Invariant: ranges are disjoint and ascending; range k is [starts[k], ends[k]) and was used last by users[k].
    starts: list[int] = []
    ends: list[int] = []
    users: list[int] = []
    for i in np.lexsort((upper, lower)).tolist():
        begin = begins[i]
        end = begin + sizes[i]
        low = bisect_right(ends, begin)
        high = low
        limit = len(starts)
        row = rows[i]
        while high < limit and starts[high] < end:
            if users[high] not in row:
                row.append(users[high])
            high += 1
        new_starts, new_ends, new_users = [begin], [end], [i]
        if high > low:
            if starts[low] < begin:
                new_starts.insert(0, starts[low])
                new_ends.insert(0, begin)
                new_users.insert(0, users[low])
            if ends[high - 1] > end:
                new_starts.append(end)
                new_ends.append(ends[high - 1])
                new_users.append(users[high - 1])
        starts[low:high] = new_starts
        ends[low:high] = new_ends
        users[low:high] = new_users
    pointers = np.zeros(count + 1, dtype=np.int64)
    np.cumsum([len(row) for row in rows], out=pointers[1:])
    return pointers, np.array([j for row in rows for j in row], dtype=np.int64)
