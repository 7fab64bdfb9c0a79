"""`PackingProblem`: buffers with pinned offsets, banks, keep-apart pairs, reserved ranges and lifetimes with holes.

A problem is frozen and validated when it is made, so that packers and checkers need no further checks of their input.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from operator import index

import numpy.typing as npt

from weftplan.planner.packing.problem import Int64, PackingError, check_input, integers

ANY_BANK = -1
"""Value of `PackingProblem.bank`: the packer chooses the bank."""


@dataclass(frozen=True, eq=False, kw_only=True)
class PackingProblem:
    """Buffers with lifetimes and sizes, and the constraints on their offsets.

    Raises:
        PackingError: a value is malformed, a pin lies outside its bank, or two pins, or a pin and a reserved range,
            overlap; names the buffers.

    >>> problem = PackingProblem(lower=[0, 0], upper=[2, 1], size=[8, 8], pins={0: 8}, reserved=[(0, 16, 24)])
    >>> problem.pins, problem.banks
    ({0: 8}, (None,))
    """

    lower: npt.ArrayLike
    """First time at which each buffer is alive; int64 array after construction."""
    upper: npt.ArrayLike
    """First time at which each buffer is dead."""
    size: npt.ArrayLike
    """Bytes of each buffer, positive."""
    alignment: int = 1
    """Every offset is a multiple of it, and sizes are rounded up to it."""
    pins: Mapping[int, int] = field(default_factory=dict)
    """Fixed offsets: buffer -> bytes from the start of its bank."""
    banks: Sequence[int | None] = (None,)
    """Capacity of each bank in bytes; None: unlimited. The packer prefers earlier banks."""
    bank: npt.ArrayLike | None = None
    """Bank of each buffer, `ANY_BANK` if the packer may choose; None: any bank for all buffers."""
    apart: Iterable[tuple[int, int]] = ()
    """Pairs of buffers that never share a byte, although they may be alive at different times."""
    reserved: Iterable[tuple[int, int, int]] = ()
    """Byte ranges that no buffer may use: (bank, first byte, end)."""
    holes: Mapping[int, Iterable[tuple[int, int]]] = field(default_factory=dict)
    """Half-open times within a buffer's lifetime in which other buffers may use its bytes."""

    def __post_init__(self) -> None:
        """Validate all fields and convert them to arrays, tuples and plain integers."""
        put = object.__setattr__
        lower, upper, size = check_input(self.lower, self.upper, self.size, self.alignment)
        count = len(lower)
        capacities = [row[0] for row in _rows("banks", self.banks)]
        banks = tuple(None if c is None else _integer(f"capacity of bank {k}", c) for k, c in enumerate(capacities))
        if not banks:
            raise PackingError("banks: expected at least one capacity, got none")
        only = 0 if len(banks) == 1 else ANY_BANK
        bank = integers("bank", [only] * count if self.bank is None else self.bank)
        wrong = (bank < ANY_BANK) | (bank >= len(banks))
        if len(bank) != count or wrong.any():
            got = f"{len(bank)} numbers" if len(bank) != count else f"bank[{wrong.argmax()}] = {bank[wrong.argmax()]}"
            raise PackingError(f"bank: expected {count} numbers from -1 (any) to {len(banks) - 1}, got {got}")
        if len(banks) == 1:
            bank[:] = 0
        pins = {_buffer("pins", k, count): _integer(f"pin of buffer {k}", v) for k, v in _items("pins", self.pins)}
        apart = tuple(
            (_buffer("apart", a, count), _buffer("apart", b, count)) for a, b in _rows("apart", self.apart, 2)
        )
        reserved = tuple(
            (_integer("bank of a reserved range", k), _integer("reserved", low), _integer("reserved", high))
            for k, low, high in _rows("reserved", self.reserved, 3)
        )
        holes = {
            _buffer("holes", k, count): tuple(
                sorted((_time(k, begin), _time(k, end)) for begin, end in _rows(f"holes of buffer {k}", times, 2))
            )
            for k, times in _items("holes", self.holes)
        }
        for array in (lower, upper, size, bank):
            array.flags.writeable = False
        for name, value in (
            ("lower", lower),
            ("upper", upper),
            ("size", size),
            ("alignment", int(self.alignment)),
            ("bank", bank),
            ("banks", banks),
            ("pins", pins),
            ("apart", apart),
            ("reserved", reserved),
            ("holes", holes),
        ):
            put(self, name, value)
        self._check(lower, upper, size, bank)

    def _check(self, lower: Int64, upper: Int64, size: Int64, bank: Int64) -> None:
        """Check the constraints against each other.

        Raises:
            PackingError: they contradict each other; names the buffers.
        """
        for a, b in self.apart:
            if a == b:
                raise PackingError(f"apart: buffer {a} cannot be kept apart from itself")
        for k, low, high in self.reserved:
            if not (k < len(self.banks) and low < high):
                raise PackingError(f"reserved: expected (bank, first byte, end > first byte), got {(k, low, high)}")
        for k, times in self.holes.items():
            moments = [moment for hole in times for moment in hole]
            inside = not moments or (moments[0] > lower[k] and moments[-1] < upper[k])
            if not inside or any(begin >= end for begin, end in times) or moments != sorted(moments):
                raise PackingError(
                    f"holes of buffer {k}: expected disjoint half-open times inside {lower[k]}..{upper[k]}, after its "
                    f"birth and before its death, got {list(times)}"
                )
        need = -(-size // self.alignment) * self.alignment
        for k, offset in self.pins.items():
            if bank[k] == ANY_BANK:
                raise PackingError(f"buffer {k} is pinned at {offset}, but its bank is open; name its bank in bank=")
            end, capacity = offset + int(need[k]), self.banks[int(bank[k])]
            if offset % self.alignment or (capacity is not None and end > capacity):
                raise PackingError(
                    f"buffer {k} is pinned at bytes {offset}..{end}; expected a multiple of {self.alignment} inside "
                    f"bank {bank[k]} of {capacity} bytes"
                )
            for number, low, high in self.reserved:
                if number == bank[k] and low < end and offset < high:
                    raise PackingError(f"buffer {k} is pinned at bytes {offset}..{end}, but {low}..{high} is reserved")
        separate = [(a, b) for a, b in self.apart if a in self.pins and b in self.pins]
        for k, other in (*separate, *self._neighbours()):
            first, second = sorted((k, other), key=lambda pin: (self.pins[pin], pin))
            offset, start = self.pins[first], self.pins[second]
            if bank[k] == bank[other] and start < offset + int(need[first]):
                raise PackingError(
                    f"buffers {first} and {second} are both pinned and overlap: {first} at bytes {offset}.."
                    f"{offset + int(size[first])}, {second} at {start}..{start + int(size[second])}; move one of them"
                )

    def _neighbours(self) -> Iterator[tuple[int, int]]:
        """Yield all pairs of pinned buffers that are alive in a bank at one time with no pinned buffer between them.

        If no pair that is yielded overlaps, no two pinned buffers do.
        """
        bank = column(self.bank)
        spans = [(int(bank[k]), begin, end, k) for k in self.pins for begin, end in self.segments(k)]
        deaths: list[tuple[int, int, int]] = []
        live: list[tuple[int, int, int]] = []
        for number, begin, end, k in sorted(spans):
            while deaths and deaths[0][:2] <= (number, begin):
                dead = heappop(deaths)[2]
                del live[bisect_left(live, (int(bank[dead]), self.pins[dead], dead))]
            place = (number, self.pins[k], k)
            at = bisect_left(live, place)
            yield from ((k, other[2]) for other in live[max(at - 1, 0) : at + 1])
            live.insert(at, place)
            heappush(deaths, (number, end, k))

    def segments(self, buffer: int) -> list[tuple[int, int]]:
        """Return the half-open times in which a buffer needs its bytes: its lifetime without its holes."""
        lower, upper = column(self.lower)[buffer], column(self.upper)[buffer]
        moments = [int(lower), *(moment for hole in self.holes.get(buffer, ()) for moment in hole), int(upper)]
        return [(begin, end) for begin, end in zip(moments[::2], moments[1::2], strict=True) if begin < end]


def column(values: npt.ArrayLike | None) -> Int64:
    """Return a field that construction has converted to an array."""
    array: Int64 = values  # type: ignore[assignment]
    return array


def _items(what: str, table: object) -> Iterable[tuple[object, object]]:
    """Return the items of a mapping."""
    if not isinstance(table, Mapping):
        raise PackingError(f"{what}: expected a mapping from buffers, got {table!r}")
    return table.items()


def _rows(what: str, rows: object, width: int = 0) -> list[tuple[object, ...]]:
    """Return the rows of ``width`` values of an iterable; without a width each value is a row."""
    try:
        result = [tuple(row) if width else (row,) for row in rows]  # type: ignore[attr-defined]
    except TypeError:
        result = [()]
    if any(len(row) != (width or 1) for row in result):
        raise PackingError(f"{what}: expected {f'rows of {width} integers' if width else 'a sequence'}, got {rows!r}")
    return result


def _integer(
    what: str, value: object, *, low: int = 0, high: int = 1 << 62, expected: str = "an integer from 0 to 2**62 - 1"
) -> int:
    """Return an integer from ``low`` to ``high - 1``."""
    try:
        number = low - 1 if isinstance(value, bool) else index(value)  # type: ignore[arg-type]
    except TypeError:
        number = low - 1
    if not low <= number < high:
        raise PackingError(f"{what}: expected {expected}, got {value!r}")
    return number


def _time(buffer: object, value: object) -> int:
    """Return a time of a hole."""
    what, end = f"holes of buffer {buffer}", 1 << 63
    return _integer(what, value, low=-end, high=end, expected="integers that fit 64 bits")


def _buffer(what: str, value: object, count: int) -> int:
    """Return the number of a buffer."""
    return _integer(what, value, high=count, expected=f"the number of one of the {count} buffers")
