"""`PackingProblem`: buffers with pinned offsets, banks, keep-apart pairs, reserved ranges and lifetimes with holes.

A problem is frozen and validated when it is made, so that packers and checkers need no further checks of their input.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
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
        banks = tuple(None if c is None else _integer(f"capacity of bank {k}", c) for k, c in enumerate(self.banks))
        if not banks:
            raise PackingError("banks: expected at least one capacity, got none")
        only = 0 if len(banks) == 1 else ANY_BANK
        bank = integers("bank", [only] * count if self.bank is None else self.bank)
        if len(bank) != count or (count and not (bank.min() >= ANY_BANK and bank.max() < len(banks))):
            raise PackingError(f"bank: expected {count} numbers from -1 (any) to {len(banks) - 1}, got {bank.tolist()}")
        if len(banks) == 1:
            bank[:] = 0
        pins = {_buffer("pins", k, count): _integer(f"pin of buffer {k}", v) for k, v in self.pins.items()}
        apart = tuple((_buffer("apart", a, count), _buffer("apart", b, count)) for a, b in self.apart)
        reserved = tuple(
            (_integer("bank of a reserved range", k), _integer("reserved", low), _integer("reserved", high))
            for k, low, high in self.reserved
        )
        holes = {
            _buffer("holes", k, count): tuple(sorted((index(begin), index(end)) for begin, end in times))
            for k, times in self.holes.items()
        }
        for array in (lower, upper, size, bank):
            array.flags.writeable = False
        for name, value in (
            ("lower", lower),
            ("upper", upper),
            ("size", size),
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
        pinned = sorted(self.pins.items(), key=lambda pin: pin[1])
        for k, offset in pinned:
            if bank[k] == ANY_BANK:
                raise PackingError(f"buffer {k} is pinned at {offset}, but its bank is open; name its bank in bank=")
            end, capacity = offset + int(size[k]), self.banks[int(bank[k])]
            if offset % self.alignment or (capacity is not None and end > capacity):
                raise PackingError(
                    f"buffer {k} is pinned at bytes {offset}..{end}; expected a multiple of {self.alignment} inside "
                    f"bank {bank[k]} of {capacity} bytes"
                )
            for number, low, high in self.reserved:
                if number == bank[k] and low < end and offset < high:
                    raise PackingError(f"buffer {k} is pinned at bytes {offset}..{end}, but {low}..{high} is reserved")
        separate = {frozenset(pair) for pair in self.apart}
        for rank, (k, offset) in enumerate(pinned):
            for other, start in pinned[rank + 1 :]:
                if start >= offset + int(size[k]):
                    break
                meets = frozenset((k, other)) in separate or any(
                    begin < late and start_ < end
                    for begin, end in self.segments(k)
                    for start_, late in self.segments(other)
                )
                if meets and bank[k] == bank[other]:
                    raise PackingError(
                        f"buffers {k} and {other} are both pinned and overlap: {k} at bytes {offset}.."
                        f"{offset + int(size[k])}, {other} at {start}..{start + int(size[other])}; move one of the pins"
                    )

    def segments(self, buffer: int) -> list[tuple[int, int]]:
        """Return the half-open times in which a buffer needs its bytes: its lifetime without its holes."""
        lower, upper = column(self.lower)[buffer], column(self.upper)[buffer]
        moments = [int(lower), *(moment for hole in self.holes.get(buffer, ()) for moment in hole), int(upper)]
        return list(zip(moments[::2], moments[1::2], strict=True))


def column(values: npt.ArrayLike | None) -> Int64:
    """Return a field that construction has converted to an array."""
    array: Int64 = values  # type: ignore[assignment]
    return array


def _integer(what: str, value: object) -> int:
    """Return a non-negative integer below 2**62."""
    try:
        number = index(value)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if isinstance(value, bool) or not 0 <= number < 1 << 62:
        raise PackingError(f"{what}: expected an integer from 0 to 2**62 - 1, got {value!r}")
    return number


def _buffer(what: str, value: object, count: int) -> int:
    """Return the number of a buffer."""
    try:
        number = index(value)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if isinstance(value, bool) or not 0 <= number < count:
        raise PackingError(f"{what}: expected the number of one of the {count} buffers, got {value!r}")
    return number
