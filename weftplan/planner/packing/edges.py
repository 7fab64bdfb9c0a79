"""Which earlier buffers each buffer overwrites: the write-after-read order that sharing memory creates.

It is computed once for finished offsets, from sizes and lifetimes alone. The result becomes ``MemoryPlan.after``.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from weftplan.planner.packing.holders import LastHolders
from weftplan.planner.packing.problem import Int64, PackingError, check_input, integers


def reuse_edges(
    lower: npt.ArrayLike, upper: npt.ArrayLike, size: npt.ArrayLike, offsets: npt.ArrayLike
) -> tuple[Int64, Int64]:
    """For each buffer, the earlier buffers that were the last to hold some of its bytes.

    Earlier holders of the same bytes are reached through those, so waiting for the listed ones is enough. The work is
    one sweep over the births with a sorted list of address ranges: O((n + edges) log n) comparisons.

    The buffers are as for `pack`; that the ``offsets`` are valid is not checked here (see `check_packing`).

    Returns:
        ``(pointers, earlier)``, int64: buffer ``i`` overwrites ``earlier[pointers[i]:pointers[i + 1]]``, ascending.

    >>> pointers, earlier = reuse_edges([0, 1, 2], [1, 2, 3], [8, 4, 8], [0, 0, 0])
    >>> pointers.tolist(), earlier.tolist()
    ([0, 0, 1, 3], [0, 0, 1])
    """
    lo, _, sz = check_input(lower, upper, size, 1)
    off = integers("offsets", offsets)
    if len(off) != len(lo):
        raise PackingError(f"expected one offset per buffer, got {len(off)} for {len(lo)} buffers")
    first, last = off.tolist(), (off + sz).tolist()
    hold = LastHolders().hold
    later: list[int] = []
    earlier: list[int] = []
    for i in np.argsort(lo, kind="stable").tolist():
        before = set(hold(i, first[i], last[i]))
        before.discard(-1)
        later.extend([i] * len(before))
        earlier.extend(before)
    return compressed_rows(np.array(later, np.int64), np.array(earlier, np.int64), len(lo))


def compressed_rows(row: Int64, value: Int64, count: int) -> tuple[Int64, Int64]:
    """The pairs (row, value) as (where each of ``count`` rows begins, values row by row, ascending)."""
    pointers = np.zeros(count + 1, np.int64)
    np.cumsum(np.bincount(row, minlength=count), out=pointers[1:])
    return pointers, value[np.lexsort((value, row))]
