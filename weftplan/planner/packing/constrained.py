"""Packing under constraints: first fit in several orders, improved by moving the buffers at the top to the front.

Pinned buffers and reserved ranges are placed first. Every other buffer takes the lowest free range that its conflicts
leave, in the first bank with room. Two buffers conflict if both need their bytes at one time, or must be kept apart.
The time of one packing is quadratic in the number of buffers, its memory linear. No function keeps state.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from weftplan.planner.packing.constrained_problem import ANY_BANK, PackingProblem, column
from weftplan.planner.packing.problem import Deadline, Int64, Packing, PackingError

ROUNDS = {"fast": 20, "normal": 400, "max": 4000}
"""Number of packings after the first ones, per effort, of a problem of at most `MANY_ROWS` buffers."""

MANY_ROWS = 1000
"""Larger problems get fewer packings in proportion, because the time of one is quadratic: 10,000 buffers take 0.4 s."""

Plain = Callable[[Int64, Int64, Int64], Packing]


def solve(problem: PackingProblem, plain: Plain, *, effort: str, deadline: Deadline) -> Packing:
    """Return a packing of ``problem``; banks without further constraints are packed by ``plain``.

    Raises:
        PackingError: no packing was found within the capacities; names a buffer that did not fit.
    """
    size, bank = column(problem.size), column(problem.bank)
    if not (problem.pins or problem.apart or problem.reserved or problem.holes) and (bank != ANY_BANK).all():
        offsets, peaks = np.zeros(len(size), np.int64), []
        bounds = []
        for k, capacity in enumerate(problem.banks):
            mine = np.flatnonzero(bank == k)
            packed = plain(column(problem.lower)[mine], column(problem.upper)[mine], size[mine])
            if capacity is not None and packed.peak > capacity:
                raise PackingError(
                    f"bank {k} has {capacity} bytes, but the best packing needs {packed.peak} and none less "
                    f"than {packed.lower_bound}; enlarge the bank or move buffers to another"
                )
            offsets[mine] = packed.offsets
            peaks.append(packed.peak)
            bounds.append(packed.lower_bound)
        return _result(offsets, bank, peaks, sum(bounds))
    return _Placer(problem, deadline).best(ROUNDS[effort] * MANY_ROWS // max(len(size), MANY_ROWS))


def _result(offsets: Int64, bank: Int64, peaks: list[int], bound: int) -> Packing:
    offsets.flags.writeable = bank.flags.writeable = False
    return Packing(offsets, sum(peaks), bound, bank=bank, bank_peaks=tuple(peaks))


class _NoRoomError(Exception):
    """No bank has room for a buffer in one order of placement."""

    def __init__(self, buffer: int, message: str) -> None:
        super().__init__(message)
        self.buffer = buffer


class _Placer:
    """First fit under the constraints of one problem. Sizes and offsets are in bytes."""

    def __init__(self, problem: PackingProblem, deadline: Deadline) -> None:
        self.problem, self._deadline = problem, deadline
        unit = problem.alignment
        self._size = -(-column(problem.size) // unit) * unit
        self._lower, self._upper = lower, upper = column(problem.lower), column(problem.upper)
        self._partners: dict[int, list[int]] = {}
        for a, b in problem.apart:
            self._partners.setdefault(a, []).append(b)
            self._partners.setdefault(b, []).append(a)
        self._with_holes = np.array(sorted(problem.holes), np.int64)
        life, every = upper - lower, np.arange(len(lower))
        self.orders = [
            np.lexsort((every, -life, -self._size)),
            np.lexsort((every, -(self._size.astype(np.float64) * life))),
            np.lexsort((every, -self._size, -life)),
            np.lexsort((every, -self._size, lower)),
        ]

    def _conflicts(self, k: int) -> NDArray[np.bool_]:
        """Return a mask of the buffers that may share no byte with buffer ``k``."""
        meets: NDArray[np.bool_] = (self._lower < self._upper[k]) & (self._lower[k] < self._upper)
        parts = self.problem.segments(k)
        for other in (np.flatnonzero(meets) if len(parts) > 1 else self._with_holes).tolist():
            meets[other] = any(a < d and c < b for a, b in parts for c, d in self.problem.segments(other))
        meets[self._partners.get(k, [])] = True
        meets[k] = False
        return meets

    def best(self, rounds: int) -> Packing:
        """Return the best packing of all orders, and of ``rounds`` changes of the best order."""
        bounds = [self._bound(k) for k in range(len(self.problem.banks))]
        bound = max(sum(bounds), self._load(np.ones(len(self._size), bool)))
        best: tuple[int, Int64, Int64, Int64] | None = None
        failure: _NoRoomError | None = None
        rng = np.random.default_rng(0)
        for attempt in range(len(self.orders) + rounds):
            if (best is not None and best[0] <= bound) or (attempt and self._deadline.over()):
                break
            if attempt < len(self.orders):
                order = self.orders[attempt]
            elif best is not None:
                order = self._changed(best, rng)
            else:
                assert failure is not None
                order = np.concatenate([[failure.buffer], order[order != failure.buffer]])
            try:
                offsets, bank = self._placed(order)
            except _NoRoomError as error:
                failure = error
                continue
            peak = sum(self._peaks(offsets, bank))
            if best is None or peak <= best[0]:
                best = peak, offsets, bank, order
        if best is None:
            assert failure is not None
            raise PackingError(str(failure))
        _, offsets, bank, _ = best
        return _result(offsets, bank, self._peaks(offsets, bank), bound)

    def _changed(self, best: tuple[int, Int64, Int64, Int64], rng: np.random.Generator) -> Int64:
        """Return the best order with a buffer of the top, or one that conflicts with it, moved forward."""
        _, offsets, _, order = best
        tops = offsets + self._size
        moved = int(rng.choice(np.flatnonzero(tops == tops.max())))
        rivals = np.flatnonzero(self._conflicts(moved))
        if len(rivals) and rng.random() < 0.5:
            moved = int(rng.choice(rivals))
        at = int(np.flatnonzero(order == moved)[0])
        return np.insert(np.delete(order, at), int(rng.integers(0, at + 1)), moved)

    def _peaks(self, offsets: Int64, bank: Int64) -> list[int]:
        """Return the maximum end of a buffer in each bank."""
        ends = offsets + self._size
        return [int(ends[bank == k].max(initial=0)) for k in range(len(self.problem.banks))]

    def _placed(self, order: Int64) -> tuple[Int64, Int64]:
        """Return (offset, bank) of each buffer, placed in ``order``.

        Raises:
            _NoRoomError: a buffer fits in no bank.
        """
        problem, size = self.problem, self._size
        offsets = np.full(len(size), -1, np.int64)
        bank = np.array(column(problem.bank))
        for k, offset in problem.pins.items():
            offsets[k] = offset
        for k in order.tolist():
            if offsets[k] >= 0:
                continue
            rivals = np.flatnonzero(self._conflicts(k) & (offsets >= 0))
            choices = range(len(problem.banks)) if bank[k] == ANY_BANK else [int(bank[k])]
            for number in choices:
                offset = self._lowest(k, number, rivals[bank[rivals] == number], offsets)
                capacity = problem.banks[number]
                if capacity is None or offset + size[k] <= capacity:
                    offsets[k], bank[k] = offset, number
                    break
            else:
                raise _NoRoomError(
                    k,
                    f"buffer {k} of {size[k]} bytes fits in no bank: of {[problem.banks[n] for n in choices]} bytes, "
                    f"the buffers alive with it, pins and reserved ranges leave too little; enlarge a bank",
                )
        return offsets, bank

    def _lowest(self, k: int, number: int, rivals: Int64, offsets: Int64) -> int:
        """Return the lowest aligned offset in a bank at which buffer ``k`` meets neither rivals nor reserved ranges."""
        unit, need = self.problem.alignment, int(self._size[k])
        reserved = [(low, high) for n, low, high in self.problem.reserved if n == number]
        lows = np.array([low for low, _ in reserved], np.int64)
        highs = np.array([-(-high // unit) * unit for _, high in reserved], np.int64)
        lows = np.concatenate((lows, offsets[rivals]))
        highs = np.concatenate((highs, offsets[rivals] + self._size[rivals]))
        by_start = lows.argsort(kind="stable")
        # The candidates are 0 and the end of each range and of all that begin before it.
        candidates = np.concatenate((np.zeros(1, np.int64), np.maximum.accumulate(highs[by_start])))
        fits = candidates[:-1] + need <= lows[by_start]
        return int(candidates[fits.argmax() if fits.any() else -1])

    def _load(self, mine: NDArray[np.bool_]) -> int:
        """Return the maximum of the bytes that the buffers ``mine`` need at one time."""
        events: list[tuple[int, int]] = []
        for k in np.flatnonzero(mine).tolist():
            for begin, end in self.problem.segments(k):
                events += [(begin, int(self._size[k])), (end, -int(self._size[k]))]
        live = highest = 0
        for _, change in sorted(events):
            live += change
            highest = max(highest, live)
        return highest

    def _bound(self, number: int) -> int:
        """Return a lower bound of a bank's peak: live bytes plus the reserved bytes below them, and the highest pin."""
        bank = column(self.problem.bank)
        bound = self._load(bank == number)
        end = 0
        for n, low, high in sorted(self.problem.reserved):
            if n == number and low < bound and high > end:
                bound += high - max(low, end)
                end = high
        pins = [offset + int(self._size[k]) for k, offset in self.problem.pins.items() if bank[k] == number]
        return max(bound, *pins, 0)
