"""Offload targets ("homes") of ``WEFTPLAN_SPILL``: an ordered list of contexts, each with a limit.

A home is a context with a pool: page-locked host memory, files, or another device. :func:`keep` copies bytes to the
first home with room; the returned :class:`Kept` copies them back. Copies are complete when a call returns, unless the
caller asks for stream order. Any thread may call these functions.

All users share the limit of a home: arrays, slabs of paused executors, and plans (:class:`Room`). Plans are made for
the remaining bytes (:func:`taken`).
"""

from __future__ import annotations

import os
from collections import deque
from dataclasses import dataclass

from weftplan import device
from weftplan.device import registry as devices
from weftplan.device.context import Context
from weftplan.device.homes import HomeSpec
from weftplan.device.stream import current_stream, no_stream
from weftplan.errors import DeviceError, OutOfMemoryError
from weftplan.locks import Lock, whole_in_children
from weftplan.storage import registry
from weftplan.storage.base import Allocation, Resource
from weftplan.support.array_types import RawArray


@dataclass(slots=True)
class Traffic:
    """Offloaded and restored bytes since the process started."""

    out_bytes: int = 0
    back_bytes: int = 0
    outs: int = 0
    backs: int = 0


traffic = Traffic()
_lock = whole_in_children(Lock())
_taken: dict[tuple[str, str], int] = {}
"""Reserved bytes per home, by kind and folder. Guarded by ``_lock``, as is ``traffic``."""
_waiting_bytes = 0
"""Guarded by ``_lock``."""
_given_back: deque[tuple[tuple[str, str], int, int]] = deque()
"""Released (home, reserved bytes, offloaded bytes), not yet subtracted. Finalizers append even under the lock."""


class Kept:
    """Offloaded bytes in a home."""

    __slots__ = ("_allocation", "_home", "_resource", "context")

    def __init__(self, home: HomeSpec, resource: Resource, allocation: Allocation) -> None:
        self._home, self._resource, self._allocation = home, resource, allocation
        self.context = resource.context

    def read(self, target: RawArray, context: Context, *, stream_ordered: bool = False) -> None:
        """Copy the bytes into ``target``, memory of ``context``; ``stream_ordered`` as in :func:`keep`."""
        _copy(target, context, self._allocation.raw, self.context, stream_ordered)
        with _lock:
            traffic.backs += 1
            traffic.back_bytes += self._allocation.nbytes

    def free(self) -> None:
        """Release the room in the home. Does not block, so finalizers may call it."""
        resource, allocation = self.given_up()
        resource.free(allocation)

    def given_up(self) -> tuple[Resource, Allocation]:
        """Release the reservation and return the allocation, which the caller must free."""
        nbytes = self._allocation.nbytes
        _unreserve(self._home, nbytes, waited=nbytes)
        return self._resource, self._allocation


class Room:
    """Bytes of homes that a plan reserves for as long as its memory exists."""

    def __init__(self) -> None:
        self._held: dict[Context, tuple[HomeSpec, int]] = {}

    def hold(self, context: Context, home: HomeSpec, nbytes: int) -> None:
        """Reserve ``nbytes`` of a home, in its memory ``context``, in place of a smaller reservation.

        Raises:
            OutOfMemoryError: others have taken them. The earlier reservation remains.
        """
        more = nbytes - self._held.get(context, (home, 0))[1]
        if more > 0:
            if not _reserve(home, more):
                raise OutOfMemoryError(
                    f"{home.kind} has {home.nbytes:,} bytes (WEFTPLAN_SPILL), of which others have {taken(home):,}; a "
                    f"plan needs {more:,}"
                )
            self._held[context] = home, nbytes

    def free(self) -> None:
        """Release everything. Does not block, so finalizers may call it."""
        while self._held:
            _unreserve(*self._held.popitem()[1])


def keep(
    raw: RawArray, context: Context, homes: tuple[HomeSpec, ...], name: object, *, stream_ordered: bool = False
) -> Kept:
    """Copy ``raw``, idle memory of ``context``, to the first of ``homes`` with room.

    Args:
        raw, context: the bytes and their device.
        homes: in order of preference.
        name: name of the memory, for reports.
        stream_ordered: copy in the order of the current stream, if any; the copy may not be complete on return.

    Raises:
        OutOfMemoryError: no home has room; the message gives each reason. ``raw`` is unchanged.
    """
    nbytes, refusals, files = int(raw.nbytes), [], 0
    for home in homes:
        number = files
        files += home.kind == "file"
        # Reserve before allocating: the limit holds across threads.
        if not _reserve(home, nbytes):
            refusals.append(f"{home.kind} has {home.nbytes:,} bytes, too few are left")
            continue
        stored = None
        try:
            for place in home.contexts(context, files=number, peers=peers(context)):
                try:
                    resource = registry.get(place)
                    stored = Kept(home, resource, resource.allocate(nbytes, name=f"waiting: {name}"))
                    _count_waiting(nbytes)
                    break
                except (OutOfMemoryError, DeviceError) as error:
                    refusals.append(str(error).partition("\n")[0])
            if stored is not None:
                _copy(stored._allocation.raw, stored.context, raw, context, stream_ordered)
                with _lock:
                    traffic.outs += 1
                    traffic.out_bytes += nbytes
                return stored
        except BaseException:
            if stored is not None:
                stored.free()
            raise
        finally:
            if stored is None:
                _unreserve(home, nbytes)
    raise OutOfMemoryError("; ".join(refusals) or f"no home takes bytes of {context}")


def peers(context: Context) -> list[Context]:
    """Return devices of the same type, most free memory first."""
    return sorted(devices.peers(context), key=lambda peer: -device.get(peer).memory_info()[0])


def taken(home: HomeSpec) -> int:
    """Return the reserved bytes of a home."""
    key = _identity(home)
    with _lock:
        _settle()
        return _taken.get(key, 0)


def waiting_bytes() -> int:
    """Return the bytes offloaded now."""
    with _lock:
        _settle()
        return _waiting_bytes


def _identity(home: HomeSpec) -> tuple[str, str]:
    """Return a key that is equal for two specifications of one home, whatever their limits."""
    return home.kind, os.path.realpath(home.folder) if home.folder else ""


def _reserve(home: HomeSpec, nbytes: int) -> bool:
    key = _identity(home)
    with _lock:
        _settle()
        total = _taken.get(key, 0) + nbytes
        if home.nbytes is not None and total > home.nbytes:
            return False
        _taken[key] = total
        return True


def _unreserve(home: HomeSpec, nbytes: int, *, waited: int = 0) -> None:
    _given_back.append((_identity(home), nbytes, waited))


def _count_waiting(nbytes: int) -> None:
    global _waiting_bytes
    with _lock:
        _waiting_bytes += nbytes


def _settle() -> None:
    """Subtract released bytes, under the lock. Concurrent releases are subtracted now or next time."""
    global _waiting_bytes
    while _given_back:
        key, nbytes, waited = _given_back[0]
        _taken[key] -= nbytes
        _waiting_bytes -= waited
        _given_back.popleft()  # last step: Ctrl-C can only follow a call, so each entry is subtracted exactly once


def _copy(target: RawArray, to: Context, source: RawArray, origin: Context, stream_ordered: bool) -> None:
    """Copy and wait for completion, after all work of the devices; ``stream_ordered``: only the stream's."""
    place = device.get(origin if origin.has_streams else to)
    if stream_ordered and current_stream() is not None:
        place.copy(target, source)
        return
    with no_stream():
        for end in {origin, to}:  # either may have incomplete copies
            if device.get(end).asynchronous:
                device.get(end).synchronize()
        place.copy(target, source)
        if place.asynchronous:
            place.synchronize()
