"""A packing problem: validated input, load over time, and division into independent parts."""

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

# Exclusive maximum of the sum of all sizes in bytes, so that no sum overflows int64.
MAX_TOTAL = 1 << 62

FAR = MAX_TOTAL
"""An offset beyond all buffers."""

MANY = 3000
"""Maximum number of buffers of a small part. Larger parts get fewer attempts, because first fit is quadratic."""


class PackingError(PlanError, ValueError):
    """Invalid lifetimes, sizes or options; the message names the first invalid buffer."""


@dataclass(frozen=True, slots=True)
class Packing:
    """Offsets in one slab.

    Attributes:
        offsets: read-only int64 array: the offset of each buffer in bytes, a multiple of the alignment.
        peak: bytes of the slab: the maximum end of a buffer, with sizes rounded up to the alignment.
        lower_bound: maximum of live bytes, with sizes rounded up to the alignment; no packing needs less.
        bank: read-only int64 array: the bank of each buffer; None if the problem has no banks.
        bank_peaks: the peak of each bank; `peak` is their sum. Empty without banks.
    """

    offsets: Int64
    peak: int
    lower_bound: int
    bank: Int64 | None = None
    bank_peaks: tuple[int, ...] = ()

    @property
    def is_optimal(self) -> bool:
        """Whether the peak equals the lower bound, so that no packing is lower; False: unknown."""
        return self.peak == self.lower_bound

    @property
    def ratio(self) -> float:
        """``peak / lower_bound``; 1.0 without buffers."""
        return self.peak / self.lower_bound if self.lower_bound else 1.0

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Packing):
            return NotImplemented
        return (
            self.peak == other.peak
            and self.lower_bound == other.lower_bound
            and np.array_equal(self.offsets, other.offsets)
            and self.bank_peaks == other.bank_peaks
            and (
                self.bank is None
                if other.bank is None
                else self.bank is not None and np.array_equal(self.bank, other.bank)
            )
        )

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class Side:
    """The buffers on one side of a moment, for a sweep away from it.

    Attributes:
        late: buffers that live on this side only, in the order of the sweep: by birth, then the largest first,
            then by number.
        born, died: birth and death of each buffer of the problem, in the direction of the sweep.
    """

    late: list[int]
    born: list[int]
    died: list[int]


@dataclass(frozen=True, slots=True)
class Peak:
    """A section of maximum load: the buffers alive in it, those after it and those before it."""

    moment: int
    alive: list[int]
    later: Side
    earlier: Side


@dataclass(frozen=True)
class Problem:
    """Buffers with lifetimes in *sections* (one section per distinct birth) and sizes in units of the alignment.

    A death counts at the next birth. This loses nothing, because no buffer is born between the two.

    Attributes:
        lo, hi: first section, and one past the last section, of each buffer.
        size: units of each buffer, positive.
        sections: number of sections.
        index: number of each buffer in the caller's problem.
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
        """:attr:`lo`, :attr:`hi` and :attr:`size` as lists, which Python reads faster than arrays."""
        return self.lo.tolist(), self.hi.tolist(), self.size.tolist()

    @cached_property
    def load(self) -> Int64:
        """Live units in each section."""
        change = np.zeros(self.sections + 1, np.int64)
        np.add.at(change, self.lo, self.size)
        np.subtract.at(change, self.hi, self.size)
        return change[:-1].cumsum()

    def lower_bound(self) -> int:
        """Return the maximum load in units."""
        return int(self.load.max(initial=0))

    @cached_property
    def first_peak(self) -> Peak:
        """The first section of maximum load."""
        return self._peak(int(self.load.argmax()))

    @cached_property
    def last_peak(self) -> Peak:
        """The last section of maximum load; it may equal :attr:`first_peak`."""
        moment = self.sections - 1 - int(self.load[::-1].argmax())
        return self.first_peak if moment == self.first_peak.moment else self._peak(moment)

    def _peak(self, moment: int) -> Peak:
        """Return the buffers alive at, after and before a section."""
        (lo, hi, size), end = self.lists, self.sections

        def side(late: list[int], *, born: list[int], died: list[int]) -> Side:
            late.sort(key=size.__getitem__, reverse=True)
            late.sort(key=born.__getitem__)
            return Side(late, born, died)

        alive = [i for i, begin in enumerate(lo) if begin <= moment < hi[i]]
        behind = side([i for i, begin in enumerate(lo) if begin > moment], born=lo, died=hi)
        earlier = side(
            [i for i, over in enumerate(hi) if over <= moment],
            born=[end - over for over in hi],
            died=[end - begin for begin in lo],
        )
        return Peak(moment, alive, behind, earlier)

    def reversed(self) -> Problem:
        """Return the problem backwards in time; its packings are packings of this problem."""
        return Problem(self.sections - self.hi, self.sections - self.lo, self.size, self.sections, self.index)

    def take(self, which: RawArray) -> Problem:
        """Return a problem of the buffers selected by a mask or by indices, with new sections."""
        return sectioned(self.lo[which], self.hi[which], self.size[which], self.index[which])


def sectioned(lower: Int64, upper: Int64, size: Int64, index: Int64) -> Problem:
    """Return a `Problem` for lifetimes on any time axis."""
    # np.unique would import NumPy's masked arrays on its first call, which takes longer than binding a small network.
    births = np.sort(lower)
    births = births[np.concatenate(([True], births[1:] != births[:-1]))] if len(births) else births
    return Problem(births.searchsorted(lower), births.searchsorted(upper), size, len(births), index)


def peak_of(problem: Problem, offsets: Int64) -> int:
    """Return the maximum end of a buffer, in units."""
    return int((offsets + problem.size).max(initial=0))


def leaf_parts(problem: Problem) -> tuple[Int64, list[tuple[int, Problem]]]:
    """Divide a problem into independent parts; return offsets, and (base offset in units, part) for each larger part.

    The offsets are those of parts of one buffer, of which a problem may have a million; other buffers have offset 0.

    A problem is cut at moments without live buffers. A buffer that lives as long as its part conflicts with all others
    of the part, so it is placed at the bottom, as a part of its own, and the rest is packed above it. Without that
    buffer there may be new moments to cut at, so the rest is divided again.

    One sort serves all levels. Sorted by birth, then the longest-lived first, every part is a range of buffers that
    begins with its bottom buffers. A part may be cut before a birth if the only earlier buffers alive at that birth are
    the bottom buffers removed below this part. The number of earlier buffers alive at each birth is counted once.
    """
    offsets = np.zeros(len(problem), np.int64)
    if not len(problem):
        return offsets, []
    order = np.lexsort((-problem.hi, problem.lo))
    lo, hi, size = problem.lo[order], problem.hi[order], problem.size[order]
    deaths = hi.copy()
    deaths.sort()
    over = np.arange(len(order)) - deaths.searchsorted(lo, side="right")
    over[1:][lo[1:] == lo[:-1]] = -1  # never cut between buffers of equal birth
    by_count = over.argsort(kind="stable")
    bounds = over[by_count].searchsorted(np.arange(-1, len(order) + 1)).tolist()
    begin, end, nbytes = lo.tolist(), hi.tolist(), size.tolist()
    leaves: list[tuple[int, Problem]] = []
    todo = [(0, 0, len(order), 0)]
    while todo:
        base, start_buffer, stop_buffer, below = todo.pop()
        cuttable = by_count[bounds[below + 1] : bounds[below + 2]]
        cuts = cuttable[cuttable.searchsorted(start_buffer, side="right") : cuttable.searchsorted(stop_buffer)].tolist()
        for start, stop in pairwise([start_buffer, *cuts, stop_buffer]):
            above, height = start, 0
            while above < stop and begin[above] == begin[start] and end[above] > begin[stop - 1]:
                height += nbytes[above]
                above += 1
            ground = stop if above == start else above
            if ground - start == 1:
                offsets[order[start]] = base
            else:
                is_problem = ground - start == len(order)
                leaves.append((base, problem if is_problem else problem.take(np.sort(order[start:ground]))))
            if ground < stop:
                todo.append((base + height, above, stop, below + above - start))
    return offsets, leaves


def integers(name: str, values: npt.ArrayLike) -> Int64:
    """Return ``values`` as a one-dimensional int64 array.

    Raises:
        PackingError: the values are no integers or do not fit int64, or there is more than one dimension.
    """
    try:
        array = np.asarray(values)
    except (OverflowError, TypeError, ValueError) as error:
        raise PackingError(f"{name}: expected a sequence of integers, got {type(values).__name__} ({error})") from None
    if array.ndim != 1:
        raise PackingError(f"{name}: expected one dimension, got shape {array.shape}")
    if array.size == 0:
        return np.zeros(0, np.int64)
    if array.dtype.kind not in "iu":
        raise PackingError(
            f"{name}: expected integers that fit 64 bits, got dtype {array.dtype}"
            + ("" if array.dtype.kind == "O" else "; convert with astype('int64')")
        )
    if array.dtype.kind == "u" and int(array.max()) > np.iinfo(np.int64).max:
        at = int(np.argmax(array))
        raise PackingError(f"{name}[{at}] = {array[at]} does not fit int64 (at most 2**63 - 1)")
    return array.astype(np.int64)


def check_input(
    lower: npt.ArrayLike, upper: npt.ArrayLike, size: npt.ArrayLike, alignment: int
) -> tuple[Int64, Int64, Int64]:
    """Check the three arrays and return them as int64.

    Raises:
        PackingError: lengths differ, a value is no 64-bit integer, a lifetime is empty, a size is not positive, the
            alignment is no integer from 1 to 2**62 - 1, or the sizes sum to 2**62 bytes or more.
    """
    if isinstance(alignment, bool) or not isinstance(alignment, (int, np.integer)) or not 0 < alignment < MAX_TOTAL:
        raise PackingError(f"alignment: expected a positive integer number of bytes below 2**62, got {alignment!r}")
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
    """Raised inside `pack` when the time limit has passed; `pack` catches it and returns the best packing so far."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """A time limit, which every long loop checks."""

    moment: float | None = None
    """Value of `time.perf_counter` at which time is over; None: never."""

    def over(self) -> bool:
        """Return whether the time limit has passed."""
        return self.moment is not None and time.perf_counter() >= self.moment

    def check(self) -> None:
        """Raise `OutOfTime` if the time limit has passed."""
        if self.over():
            raise OutOfTime

    def left(self) -> float:
        """Return the remaining seconds; :attr:`moment` must not be None."""
        assert self.moment is not None
        return self.moment - time.perf_counter()


ENDLESS = Deadline()


@dataclass(slots=True)
class Scans:
    """Free ranges that the sweeps of one call may still look at, so that their time stays bounded on large problems."""

    left: int
