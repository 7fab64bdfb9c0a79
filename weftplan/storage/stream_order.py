"""Stream-ordered memory: reuse of memory that a stream still uses, ordered after its work.

If frees waited for the device, all results of a graph that die one after another would be held. Memory therefore comes
back with an event (:meth:`Resource.free_behind`). The pool cuts and merges it as usual and remembers the byte ranges of
the event. The next user is ordered after the event: on the same stream for free, on another stream by an event wait,
without a stream by a host wait. Among free blocks that serve a request equally well, a pool takes a block that the
caller's stream need not wait for (:meth:`StreamOrder.choose`).

Host memory of a pending copy is not reused this way: copies in both directions would wait for each other, although a
little more memory lets them overlap. It stays in :data:`late` until its copy has finished.

Invariant: listed bytes are free or on a free list. Any thread may call these functions; the lock is a leaf.
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
from weftplan.locks import Lock, consistent_in_children
from weftplan.storage import relief

_LOOKED_AT = 8
"""Maximum number of free blocks of one size that :meth:`StreamOrder.choose` examines."""
_SWEEP = 256
"""Minimum number of ranges at which ranges with passed events are removed."""


class _Range(NamedTuple):
    start: int
    stop: int
    stream: Stream
    event: Event


# Guarantees of a stream order:
# * Ranges are disjoint and sorted by address.
# * A range leaves the list only if its event has passed, or if ``order``, ``settle`` or ``add`` takes its bytes over.
# Fixed: ``_lock``. Changing: ``_ranges``, and ``_sweep_at`` with each sweep.
class StreamOrder:
    """Byte ranges of a pool with pending stream work, by address. Ranges do not overlap."""

    def __init__(self) -> None:
        # Guards `_ranges`. Events are queried and waited for outside it.
        self._lock = consistent_in_children(Lock())
        self._ranges: list[_Range] = []
        self._sweep_at = _SWEEP

    def __bool__(self) -> bool:
        return bool(self._ranges)

    def add(self, start: int, nbytes: int, stream: Stream, event: Event) -> None:
        """Record that ``stream`` uses ``nbytes`` bytes at ``start`` until ``event``."""
        self._cut(start, start + nbytes)
        entry = _Range(start, start + nbytes, stream, event)
        with self._lock:
            self._ranges.insert(bisect_right(self._ranges, start, key=_start), entry)
        if len(self._ranges) > self._sweep_at:
            self._sweep()

    def order(self, start: int, nbytes: int) -> None:
        """Order later use of these bytes after pending stream work on them.

        A wait for the results of that work raises its error.
        """
        events = {entry.event: entry.stream for entry in self._cut(start, start + nbytes)}
        stream = current_stream()
        for event, event_stream in events.items():
            if event_stream is stream:
                continue
            with suppress(Exception):
                if stream is None or type(stream) is not type(event_stream):
                    event.synchronize()
                else:
                    stream.wait(event)

    def waits(self, start: int, nbytes: int) -> bool:
        """Return whether a new use of these bytes on the current stream would wait for work of another stream."""
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

    def choose(self, candidates: Iterable[tuple[int, int]]) -> int:
        """Return the index of the first range that the current stream need not wait for; 0 if there is none.

        Each range is (address, number of bytes). Only the first :data:`_LOOKED_AT` ranges are examined.
        """
        for number, (start, nbytes) in enumerate(islice(candidates, _LOOKED_AT)):
            if not self.waits(start, nbytes):
                return number
        return 0

    def settle(self, start: int, nbytes: int) -> None:
        """Block the host until no stream uses these bytes, before they return to the system."""
        for event in dict.fromkeys(entry.event for entry in self._cut(start, start + nbytes)):
            with suppress(Exception):
                event.synchronize()

    def _cut(self, start: int, stop: int) -> list[_Range]:
        """Remove all overlapping ranges and return them; their parts outside stay listed."""
        with self._lock:
            ranges = self._ranges
            begin = bisect_right(ranges, start, key=_start)
            if begin and ranges[begin - 1].stop > start:
                begin -= 1
            end = begin
            while end < len(ranges) and ranges[end].start < stop:
                end += 1
            # Only the first and the last range can extend beyond the bytes.
            overlapping = ranges[begin:end]
            if overlapping:
                outside = [overlapping[0]._replace(stop=start)] if overlapping[0].start < start else []
                outside += [overlapping[-1]._replace(start=stop)] if overlapping[-1].stop > stop else []
                ranges[begin:end] = outside
            return overlapping

    def _sweep(self) -> None:
        """Remove ranges whose events have passed."""
        passed: set[Event] = set()
        for event in dict.fromkeys(entry.event for entry in list(self._ranges)):
            with suppress(Exception):
                if event.query():
                    passed.add(event)
        with self._lock:
            self._ranges[:] = [entry for entry in self._ranges if entry.event not in passed]
            self._sweep_at = max(_SWEEP, 2 * len(self._ranges))


def _start(entry: _Range) -> int:
    return entry.start


class _Late(NamedTuple):
    context: Context
    event: Event
    free: Callable[[], None]


late: deque[_Late] = deque()
"""Memory to free when an event has passed, oldest first. Appending and removing are atomic."""


def free_after(event: Event, context: Context, free: Callable[[], None]) -> None:
    """Call ``free`` when ``event`` has passed: in a later call, when memory runs out, or in :func:`settle`."""
    if late:
        settle()
    late.append(_Late(context, event, free))


def settle(*, block: bool = False, context: Context | None = None) -> bool:
    """Free memory in :data:`late` whose events have passed; ``block``: wait for them. Return whether there was any."""
    freed = False
    for entry in list(late):
        if context is not None and entry.context != context:
            continue
        with suppress(Exception):  # a wait for the results raises the error
            if block:
                entry.event.synchronize()
            elif not entry.event.query():
                continue
        try:
            late.remove(entry)
        except ValueError:  # another thread was faster
            continue
        entry.free()
        freed = True
    return freed


def _settle_for(context: Context, nbytes: int) -> bool:
    """Rung: free host memory whose copies are under way."""
    return bool(late) and settle(block=True, context=context)


relief.add(15, _settle_for)
