"""What is tried before memory is said to have run out: a ladder of rungs, from the cheapest to the dearest.

A pool first takes back what has been freed and gives its own idle blocks to the device. Then come the rungs, added by
whoever can make room: arrays that are dead but not yet given back, the caches of other pools of the same memory, arrays
in cycles, and last a wait for frees that pending operations are about to make. After each that may have freed something
the pool asks again.

Rungs run without the pool's lock, on the thread that asks. One that finds itself on the ladder already, because a rung
allocates, is refused at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

from weftplan.device.context import Context

Rung = Callable[[Context], bool]
"""Makes room on a context; True if there may be more than before."""

_rungs: dict[int, list[Rung]] = {}


class _Climbing(threading.local):
    now = False


_climbing = _Climbing()


def add(height: int, rung: Rung) -> None:
    """Add a rung; lower ones are tried first."""
    _rungs.setdefault(height, []).append(rung)


def climb(context: Context) -> Iterator[None]:
    """Yields after each rung that may have made room, and once at the end: other threads give memory back at any
    moment, so that what a rung looked for may have come back just before it looked."""
    if _climbing.now:
        return
    _climbing.now = True
    try:
        for height in sorted(_rungs):
            for rung in _rungs[height]:
                if rung(context):
                    yield
        yield
    finally:
        _climbing.now = False
