"""Parallel runs of a compiled function over ranges, on the calling thread and on idle cores.

The number of ranges follows from sizes alone, or is 1 if no core is idle (:mod:`weftplan.support.core_sharing`). Awake
helpers take ranges without the interpreter (``exchange/polling.py``). An element's computation does not depend on its
range, so the bits of a result depend neither on the number of cores nor on the number of ranges.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from weftplan.kernels.compiled.exchange import polling
from weftplan.kernels.compiled.jit import Entry
from weftplan.kernels.compiled.offset_tables import KernelArguments
from weftplan.kernels.compiled.replay import Call
from weftplan.ops.core.products import MOST
from weftplan.support.addresses import address
from weftplan.support.core_sharing import call_looker, idle_cores, split_in_rooms, with_lookers


def count(work: int, few: int, units: int) -> int:
    """Return the number of parts for ``work``: at most ``units`` and :data:`MOST`, with at least ``few`` work each."""
    return max(1, min(MOST, work // few, units))


def in_parts(
    entry: Entry, arguments: KernelArguments, size: int, parts: int, *, unit: int = 1,
    moves: Mapping[str, int] | None = None, kind: str = "", light: bool = False,
) -> Call:  # fmt: skip
    """Return a call that runs ``entry`` on ranges ``first`` to ``last``, which together cover 0 to ``size``.

    Args:
        arguments: all words except ``first`` and ``last``.
        parts: maximum number of ranges.
        unit: ranges begin at its multiples.
        moves: by the name of a scratch pointer, the bytes between the scratch rooms of two parts.
        kind: suffix of the names of the words ``first`` and ``last``.
        light: whether a part takes less time than waking a helper; light parts go only to awake helpers.
    """
    units = -(-size // unit)
    step = -(-units // parts) * unit
    scratch = {name: (arguments[name], nbytes) for name, nbytes in (moves or {}).items()}

    words: dict[tuple[int, int], KernelArguments] = {}

    def words_of(number: int, room_number: int) -> KernelArguments:
        cached = words.get((number, room_number))
        if cached is None:
            moved = {name: begin + room_number * nbytes for name, (begin, nbytes) in scratch.items()}
            ends = {f"first{kind}": number * step, f"last{kind}": min((number + 1) * step, size)}
            cached = words[number, room_number] = arguments.filled(**ends, **moved)
        return cached

    def part(number: int, room_number: int) -> None:
        words_of(number, room_number).call(entry)

    ranges = -(-size // step)
    undivided = arguments.filled(**{f"first{kind}": 0, f"last{kind}": size}).ready(entry)
    shared: list[polling.SharedParts] = []

    def run(boxes: Sequence[int]) -> None:
        if not shared:
            every = [
                [address(words_of(number, room_number).words) for number in range(ranges)]
                for room_number in range(ranges)
            ]
            shared.append(polling.SharedParts(entry, every))
        shared[0].run(boxes)

    def work() -> None:
        idle = idle_cores()
        if not idle:  # in a single range, data that ranges share is computed only once
            undivided()
        elif with_lookers(run, min(idle, ranges - 1, polling.MAX_BOXES), all_or_none=not light):
            pass
        elif light:
            call_looker()
            undivided()
        else:
            split_in_rooms(part, ranges)

    return work if ranges > 1 else undivided
