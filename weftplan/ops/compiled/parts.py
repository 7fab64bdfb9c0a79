"""A compiled function on ranges of what it works on, on the calling thread and on idle cores.

How many ranges there are follows from sizes alone, or there is one where no core is idle (``cores.py`` has the rule).
Every element is computed alike in any range, so neither the number of cores nor that of ranges is part of a result's
bits.
"""

from __future__ import annotations

from collections.abc import Mapping

from weftplan.cores import idle_cores, split_in_rooms
from weftplan.ops.compiled.jit import Entry
from weftplan.ops.compiled.replay import Call
from weftplan.ops.compiled.tables import KernelArguments
from weftplan.ops.products import MOST


def count(work: int, few: int, units: int) -> int:
    """Parts of ``work`` that consists of ``units``: none has less than ``few``, unless there is only one."""
    return max(1, min(MOST, work // few, units))


def in_parts(
    entry: Entry, arguments: KernelArguments, size: int, parts: int, *, unit: int = 1,
    moves: Mapping[str, int] | None = None, kind: str = "",
) -> Call:  # fmt: skip
    """What calls ``entry`` on ranges ``first`` to ``last`` of its words, which together are 0 to ``size``.

    Args:
        arguments: all words but ``first`` and ``last``.
        parts: the most ranges.
        unit: ranges begin at multiples of it.
        kind: what follows ``first`` and ``last`` in the words' names.
        moves: bytes by which pointers to scratch move from one room to the next.
    """
    units = -(-size // unit)
    step = -(-units // parts) * unit
    rooms = {name: (arguments[name], nbytes) for name, nbytes in (moves or {}).items()}

    made: dict[tuple[int, int], Call] = {}

    def part(number: int, room: int) -> None:
        call = made.get((number, room))
        if call is None:
            own = {name: begin + room * nbytes for name, (begin, nbytes) in rooms.items()}
            ends = {f"first{kind}": number * step, f"last{kind}": min((number + 1) * step, size)}
            here = arguments.filled(**ends, **own)
            call = made[number, room] = here.ready(entry)
        call()

    ranges = -(-size // step)
    whole = arguments.filled(**{f"first{kind}": 0, f"last{kind}": size}).ready(entry)

    def work() -> None:
        if idle_cores():
            split_in_rooms(part, ranges)
        else:  # what ranges share is made once
            whole()

    return work if ranges > 1 else whole
