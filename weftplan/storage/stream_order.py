"""Stream-ordered memory: reuse of memory that a stream still uses, ordered after its work.

A pool that waited for the device before it took memory back would hold all results of a graph that die one after the
other. So memory may come back with an event (:meth:`Resource.free_behind`): the pool cuts and merges it like any other,
and remembers which bytes the event is about. Who gets such bytes next is ordered behind the event: not at all on the
stream that recorded it, by an event wait on another stream, and by a wait of the host without one.
Among free blocks that serve a request equally well, a pool takes one that the stream of the caller need not wait for
(:meth:`StreamOrder.choose`).

Host memory from or to which a device copies is not handed on that way: copies in both directions would wait for each
other, where a little more memory lets them overlap. It stays in :data:`late` until its copy is over.

Invariant: bytes that are listed here are free, or on a free list. Any thread may call anything here; below its lock
there is nothing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import islice
from typing import NamedTuple

from weftplan.device.base import Event, Stream
from weftplan.device.context import Context
from weftplan.device.stream import current_stream
from weftplan.locks import Lock, whole_in_children
from weftplan.storage import relief

_LOOKED_AT = 8
"""Free blocks of one size that are looked at for one that the current stream need not wait for."""
_SWEEP = 256
"""Ranges from which those are forgotten whose events have passed."""


class _Range(NamedTuple):
    start: int
    stop: int
    stream: Stream
    event: Event


class StreamOrder:
    """Which bytes of a pool streams still work on, by address. Ranges do not overlap."""

    def __init__(self) -> None:
        self._lock = whole_in_children(Lock())
        self._ranges: list[_Range] = []
        self._sweep_at = _SWEEP

    def __bool__(self) -> bool:
        return bool(self._ranges)

    def add(self, start: int, nbytes: int, stream: Stream, event: Event) -> None:
        """From now on ``nbytes`` bytes at ``start`` are used by ``stream`` until ``event``."""
        self._cut(start, start + nbytes)
        one = _Range(start, start + nbytes, stream, event)
        with self._lock:
            self._ranges.insert(bisect_right(self._ranges, start, key=_start), one)
        if len(self._ranges) > self._sweep_at:
            self._sweep()

    def order(self, start: int, nbytes: int) -> None:
        """Order what uses these bytes from now on behind what streams still do with them.

        An error of that work is told to those who wait for its results.
        """
        events = {one.event: one.stream for one in self._cut(start, start + nbytes)}
        stream = current_stream()
        for event, other in events.items():
            if other is stream:
                continue
            with suppress(Exception):
                if stream is None or type(stream) is not type(other):
                    event.synchronize()
                else:
                    stream.wait(event)

    def waits(self, start: int, nbytes: int) -> bool:
        """Return whether what uses these bytes from now on would wait for work of another stream than the current."""
        stream, stop = current_stream(), start + nbytes
        with self._lock:
            at = bisect_right(self._ranges, start, key=_start)
            if at and self._ranges[at - 1].stop > start:
                at -= 1
            while at < len(self._ranges) and self._ranges[at].start < stop:
                if self._ranges[at].stream is not stream:
                    return True
                at += 1
        return False

    def choose(self, places: Iterable[tuple[int, int]]) -> int:
        """Return the number of the first of some ranges that the current stream need not wait for; 0 without one.

        Each is an address and a number of bytes; only the first :data:`_LOOKED_AT` are looked at.
        """
        for number, (start, nbytes) in enumerate(islice(places, _LOOKED_AT)):
            if not self.waits(start, nbytes):
                return number
        return 0

    def settle(self, start: int, nbytes: int) -> None:
        """Block the host until no stream uses these bytes: they go back to the system."""
        for event in dict.fromkeys(one.event for one in self._cut(start, start + nbytes)):
            with suppress(Exception):
                event.synchronize()

    def _cut(self, start: int, stop: int) -> list[_Range]:
        """Take all ranges out that overlap; what lies outside stays in."""
        with self._lock:
            ranges = self._ranges
            first = bisect_right(ranges, start, key=_start)
            if first and ranges[first - 1].stop > start:
                first -= 1
            last = first
            while last < len(ranges) and ranges[last].start < stop:
                last += 1
            found = ranges[first:last]
            if found:
                rest = [found[0]._replace(stop=start)] if found[0].start < start else []
                rest += [found[-1]._replace(start=stop)] if found[-1].stop > stop else []
                ranges[first:last] = rest
            return found

    def _sweep(self) -> None:
        """Forget ranges whose events have passed."""
        passed: set[Event] = set()
        for event in dict.fromkeys(one.event for one in list(self._ranges)):
            with suppress(Exception):
                if event.query():
                    passed.add(event)
        with self._lock:
            self._ranges[:] = [one for one in self._ranges if one.event not in passed]
            self._sweep_at = max(_SWEEP, 2 * len(self._ranges))


def _start(one: _Range) -> int:
    return one.start


class _Late(NamedTuple):
    context: Context
    event: Event
    free: Callable[[], None]


late: deque[_Late] = deque()
"""Memory to be freed when an event has passed, the oldest first. Appending and taking are atomic."""


def free_after(event: Event, context: Context, free: Callable[[], None]) -> None:
    """Call ``free`` when ``event`` has passed: at a later call of this, when memory runs out, or in :func:`settle`."""
    if late:
        settle()
    late.append(_Late(context, event, free))


def settle(*, block: bool = False, context: Context | None = None) -> bool:
    """Free what is in :data:`late` where the events have passed; ``block``: wait for those. True if there was any."""
    freed = False
    for one in list(late):
        if context is not None and one.context != context:
            continue
        with suppress(Exception):  # an error is told to those who wait for the results
            if block:
                one.event.synchronize()
            elif not one.event.query():
                continue
        try:
            late.remove(one)
        except ValueError:  # another thread was quicker
            continue
        one.free()
        freed = True
    return freed


def _settle_for(context: Context, nbytes: int) -> bool:
    """A rung: host memory whose copies are under way."""
    return bool(late) and settle(block=True, context=context)


relief.add(15, _settle_for)
