"""A packing problem: checked input, its load over time, and the cuts into independent parts."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from weftplan.errors import PlanError
from weftplan.support.array_types import RawArray

Int64 = npt.NDArray[np.int64]

# Bytes of all buffers together must stay below this, so that no sum of sizes can leave int64.
MAX_TOTAL = 1 << 62

MANY = 3000
"""Parts of more buffers than this are packed with less care for each, since first fit looks at all placed before."""


class PackingError(PlanError, ValueError):
    """Lifetimes or sizes given to the packer are not acceptable; the message names the first buffer at fault."""


@dataclass(frozen=True, slots=True)
class Packing:
    """Offsets in one slab.

    Attributes:
        offsets: int64 array, one offset in bytes per buffer, each a multiple of the alignment. Read-only.
        peak: bytes that the slab needs: the highest end of any buffer, sizes rounded up to the alignment.
        lower_bound: most live bytes at once, sizes rounded up to the alignment; no packing needs less.
    """

    offsets: Int64
    peak: int
    lower_bound: int

    @property
    def ratio(self) -> float:
        """``peak / lower_bound``; 1.0 when there is nothing to pack."""
        return self.peak / self.lower_bound if self.lower_bound else 1.0

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Packing):
            return NotImplemented
        return (
            self.peak == other.peak
            and self.lower_bound == other.lower_bound
            and np.array_equal(self.offsets, other.offsets)
        )

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class Side:
    """The buffers on one side of a moment, for a sweep that leaves it.

    Attributes:
        late: the buffers that live on this side only, in the order of the sweep: of those that begin
            together the largest first, then by their numbers.
        born, died: when each buffer of the problem begins and ends on this way.
    """

    late: list[int]
    born: list[int]
    died: list[int]


@dataclass(frozen=True, slots=True)
class Peak:
    """One of the fullest moments: the buffers that are alive then, after it and before it."""

    moment: int
    alive: list[int]
    behind: Side
    before: Side


@dataclass(frozen=True)
class Problem:
    """Buffers with lifetimes in *sections* (one section per distinct birth) and sizes in units of the alignment.

    Deaths count at the next birth: between the two nothing new can come, so nothing is lost.

    Attributes:
        lo, hi: first section, and one past the last section, of every buffer.
        size: units per buffer, all positive.
        sections: number of sections.
        index: number of every buffer in the problem that the user gave.
    """

    lo: Int64
    hi: Int64
    size: Int64
    sections: int
    index: Int64 = field(repr=False)

    def __len__(self) -> int:
        return len(self.lo)

    @cached_property
    def lists(self) -> tuple[list[int], list[int], list[int]]:
        """:attr:`lo`, :attr:`hi` and :attr:`size` as lists, which sweeps read faster than arrays."""
        return self.lo.tolist(), self.hi.tolist(), self.size.tolist()

    @cached_property
    def load(self) -> Int64:
        """Live units in every section."""
        change = np.zeros(self.sections + 1, np.int64)
        np.add.at(change, self.lo, self.size)
        np.subtract.at(change, self.hi, self.size)
        return change[:-1].cumsum()

    def lower_bound(self) -> int:
        """Most live units at once."""
        return int(self.load.max(initial=0))

    @cached_property
    def first_peak(self) -> Peak:
        """The first of the fullest moments."""
        return self._peak(int(self.load.argmax()))

    @cached_property
    def last_peak(self) -> Peak:
        """The last of them, which may be the same."""
        moment = self.sections - 1 - int(self.load[::-1].argmax())
        return self.first_peak if moment == self.first_peak.moment else self._peak(moment)

    def _peak(self, moment: int) -> Peak:
        (lo, hi, size), end = self.lists, self.sections

        def side(late: list[int], *, born: list[int], died: list[int]) -> Side:
            late.sort(key=size.__getitem__, reverse=True)
            late.sort(key=born.__getitem__)
            return Side(late, born, died)

        alive = [i for i, begin in enumerate(lo) if begin <= moment < hi[i]]
        behind = side([i for i, begin in enumerate(lo) if begin > moment], born=lo, died=hi)
        before = side(
            [i for i, over in enumerate(hi) if over <= moment],
            born=[end - over for over in hi],
            died=[end - begin for begin in lo],
        )
        return Peak(moment, alive, behind, before)

    def take(self, which: RawArray) -> Problem:
        """The buffers selected by a mask or by indices, on sections of their own."""
        return sectioned(self.lo[which], self.hi[which], self.size[which], self.index[which])


def sectioned(lower: Int64, upper: Int64, size: Int64, index: Int64) -> Problem:
    """Make a `Problem` of lifetimes on any time axis."""
    # Not np.unique, whose first call imports NumPy's masked arrays: that takes longer than to bind a small network.
    births = np.array(sorted(set(lower.tolist())), np.int64)
    return Problem(births.searchsorted(lower), births.searchsorted(upper), size, len(births), index)


def peak_of(problem: Problem, offsets: Int64) -> int:
    """Highest end of any buffer, in units."""
    return int((offsets + problem.size).max(initial=0))


def leaf_parts(problem: Problem) -> list[tuple[int, Problem]]:
    """Cut a problem into (units below it, part): at moments where nothing lives, and by taking away what always lives.

    A buffer that lives as long as its part conflicts with everything in it, so it can lie at the bottom and the rest
    is packed above it; without it there may be new moments to cut at. The buffers taken away are parts of their own.

    All layers come from one sort. By birth, and of one birth the longest-lived first, every part is a range of
    buffers, and those that always live come first. A part may be cut before a birth that only what was taken
    away below it outlives; how many buffers outlive a birth is counted once.
    """
    if not len(problem):
        return []
    order = np.lexsort((-problem.hi, problem.lo))
    lo, hi, size = problem.lo[order], problem.hi[order], problem.size[order]
    deaths = hi.copy()
    deaths.sort()
    over = np.arange(len(order)) - deaths.searchsorted(lo, side="right")
    over[1:][lo[1:] == lo[:-1]] = -1  # nothing is cut between buffers of one birth
    by_count = over.argsort(kind="stable")
    bounds = over[by_count].searchsorted(np.arange(-1, len(order) + 1))
    begin, end, nbytes = lo.tolist(), hi.tolist(), size.tolist()
    leaves: list[tuple[int, Problem]] = []
    todo = [(0, 0, len(order), 0)]
    while todo:
        base, first, last, below = todo.pop()
        places = by_count[bounds[below + 1] : bounds[below + 2]]
        cuts = places[places.searchsorted(first, side="right") : places.searchsorted(last)].tolist()
        for start, stop in pairwise([first, *cuts, last]):
            above, height = start, 0
            while above < stop and begin[above] == begin[start] and end[above] > begin[stop - 1]:
                height += nbytes[above]
                above += 1
            ground = stop if above == start else above
            whole = ground - start == len(problem)
            leaves.append((base, problem if whole else problem.take(np.sort(order[start:ground]))))
            if ground < stop:
                todo.append((base + height, above, stop, below + above - start))
    return leaves


def integers(name: str, values: npt.ArrayLike) -> Int64:
    """``values`` as a one-dimensional int64 array; floats, booleans and numbers beyond int64 are refused."""
    try:
        array = np.asarray(values)
    except (OverflowError, ValueError) as error:
        raise PackingError(f"{name}: expected a sequence of integers, got {type(values).__name__} ({error})") from None
    if array.ndim != 1:
        raise PackingError(f"{name}: expected one dimension, got shape {array.shape}")
    if array.size == 0:
        return np.zeros(0, np.int64)
    if array.dtype.kind not in "iu":
        raise PackingError(
            f"{name}: expected integers that fit 64 bits, got dtype {array.dtype}; convert with astype('int64')"
        )
    if array.dtype.kind == "u" and int(array.max()) > np.iinfo(np.int64).max:
        at = int(np.argmax(array))
        raise PackingError(f"{name}[{at}] = {array[at]} does not fit int64 (at most 2**63 - 1)")
    return array.astype(np.int64)


def check_input(
    lower: npt.ArrayLike, upper: npt.ArrayLike, size: npt.ArrayLike, alignment: int
) -> tuple[Int64, Int64, Int64]:
    """Return the three arrays as int64 after checking them.

    Raises:
        PackingError: lengths differ, a value is no 64-bit integer, a lifetime is empty, a size is not positive, the
            alignment is not a positive integer, or all buffers together reach 2**62 bytes.
    """
    if isinstance(alignment, bool) or not isinstance(alignment, (int, np.integer)) or alignment < 1:
        raise PackingError(f"alignment: expected a positive integer number of bytes, got {alignment!r}")
    lo, up, sz = integers("lower", lower), integers("upper", upper), integers("size", size)
    if not len(lo) == len(up) == len(sz):
        raise PackingError(
            f"expected lower, upper and size of one length, got {len(lo)}, {len(up)} and {len(sz)} values"
        )
    for bad, text in ((lo >= up, "has an empty lifetime"), (sz <= 0, "has no positive size")):
        if bad.any():
            i = int(np.argmax(bad))
            raise PackingError(
                f"buffer {i} {text}: lower={lo[i]}, upper={up[i]}, size={sz[i]}; "
                "expected lower < upper (half-open) and size > 0; leave empty buffers out"
            )
    total = float(sz.astype(np.float64).sum()) + float(alignment) * len(sz)
    if total >= MAX_TOTAL:
        raise PackingError(f"all buffers together need about {total:.3g} bytes; expected less than 2**62")
    return lo, up, sz


class OutOfTime(Exception):
    """The time limit is over. Never leaves `pack`, which returns the best packing so far."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """Asked in every loop that can take long."""

    moment: float | None = None
    """Of `time.perf_counter`; None: never."""

    def over(self) -> bool:
        """Whether the moment has come."""
        return self.moment is not None and time.perf_counter() >= self.moment

    def check(self) -> None:
        """Raise `OutOfTime` once the moment has come."""
        if self.over():
            raise OutOfTime

    def left(self) -> float:
        """Return the seconds that are left; only if there is a moment."""
        assert self.moment is not None
        return self.moment - time.perf_counter()


ENDLESS = Deadline()
