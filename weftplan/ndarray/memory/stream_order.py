"""Memory that has been given back while a stream still works on it: whoever takes it again is ordered behind that work.

A pool may hand memory out only when no stream uses it any more. Where results of a graph die one after the other, that
would keep all of them until the device has caught up. So what a dynamic executor gives back under
``FLAGS_fast_eager_deletion_mode`` waits here with an event: the next result of as many bytes on the same device gets it
at once, in stream order, and the rest goes to its pool when the event has passed. That is looked at whenever dead
arrays are given back and when memory runs out, which waits for the events.

Any thread may call anything here. The deque is the only state; appending to it and taking from it are atomic.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from typing import Any, NamedTuple

from weftplan.device.context import Context
from weftplan.device.stream import current_stream
from weftplan.storage import Allocation, Resource, relief


class _Waiting(NamedTuple):
    resource: Resource
    allocation: Allocation
    stream: Any
    event: Any


waiting: deque[_Waiting] = deque()
"""Memory behind events, the oldest first."""


def give(resource: Resource, allocation: Allocation) -> None:
    """Give memory back behind what the current stream has been given to do; without one at once."""
    stream = current_stream()
    if stream is None or not allocation.nbytes:
        resource.free(allocation)
        return
    waiting.append(_Waiting(resource, allocation, stream, stream.record()))


def take(resource: Resource, context: Context, nbytes: int) -> Allocation | None:
    """Memory of exactly ``nbytes`` that waits here for ``context``, for what is enqueued next; None: there is none."""
    for one in list(waiting):
        if one.allocation.nbytes != nbytes or one.allocation.context != context or one.resource is not resource:
            continue
        try:
            waiting.remove(one)
        except ValueError:  # another thread was quicker
            continue
        stream = current_stream()
        if stream is None:
            one.event.synchronize()
        elif stream is not one.stream:
            stream.wait(one.event)
        return one.allocation
    return None


def settle(*, block: bool = False, context: Context | None = None) -> int:
    """Give what waits here to its pools where the events have passed; ``block``: wait for those. Returns the bytes."""
    freed = 0
    for one in list(waiting):
        if context is not None and one.allocation.context != context:
            continue
        # What the device has failed in is told to those who wait for its results.
        with suppress(Exception):
            if block:
                one.event.synchronize()
            elif not one.event.query():
                continue
        try:
            waiting.remove(one)
        except ValueError:
            continue
        freed += one.allocation.nbytes
        one.resource.free(one.allocation)
    return freed


def _pass(context: Context, nbytes: int) -> bool:
    """A rung: what waits for streams of this device."""
    return bool(waiting) and settle(block=True, context=context) > 0


relief.add(15, _pass)
