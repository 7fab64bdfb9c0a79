"""Offload targets of ``WEFTPLAN_SPILL``: an ordered list of contexts, each with a limit.

A home is a context with a pool like any other: page-locked memory of the host, files, another device. :func:`keep`
copies bytes to the first home with room; what it returns copies them back and frees them there. The copies are over
when a call returns, on every device, unless they are made beside other work. Any thread may call anything here.

A home has one limit for all who use it: arrays, slabs of executors that are not running, and what plans have there,
which :class:`Room` stands for. A plan is made for what is left (:func:`taken`).
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
    """What has gone to homes and come back since the process started."""

    out_bytes: int = 0
    back_bytes: int = 0
    outs: int = 0
    backs: int = 0


traffic = Traffic()
_lock = whole_in_children(Lock())
_taken: dict[tuple[str, str], int] = {}
"""Bytes that each home has promised, by kind and folder. Guarded by ``_lock``, as is ``traffic``."""
_waiting_bytes = 0
"""Guarded by ``_lock``."""
_given_back: deque[tuple[tuple[str, str], int, int]] = deque()
"""Home, bytes of it and bytes that waited there, which count no more. Finalizers may only append: they run wherever
Python collects garbage, on a thread that has the lock, too."""


class Kept:
    """Bytes in a home."""

    __slots__ = ("_allocation", "_home", "_resource", "context")

    def __init__(self, home: HomeSpec, resource: Resource, allocation: Allocation) -> None:
        self._home, self._resource, self._allocation = home, resource, allocation
        self.context = resource.context

    def read(self, target: RawArray, context: Context, *, beside: bool = False) -> None:
        """Copy the bytes into ``target``, memory of ``context``; ``beside``: as :func:`keep`."""
        _copy(target, context, self._allocation.raw, self.context, beside)
        with _lock:
            traffic.backs += 1
            traffic.back_bytes += self._allocation.nbytes

    def free(self) -> None:
        """Give the room in the home back. Never waits for long, so finalizers may call it."""
        resource, allocation = self.given_up()
        resource.free(allocation)

    def given_up(self) -> tuple[Resource, Allocation]:
        """The room in the home does not count any more: it is the caller's, with the duty to give it back."""
        nbytes = self._allocation.nbytes
        _unreserve(self._home, nbytes, waited=nbytes)
        return self._resource, self._allocation


class Room:
    """Bytes of homes that a plan has for itself, as long as its memory exists."""

    def __init__(self) -> None:
        self._held: dict[Context, tuple[HomeSpec, int]] = {}

    def hold(self, context: Context, home: HomeSpec, nbytes: int) -> None:
        """From now on hold ``nbytes`` of a home, in its memory ``context``, if it held less before.

        Raises:
            OutOfMemoryError: others have taken them. What was held before still is.
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
        """Give everything back. Never waits for long, so finalizers may call it."""
        while self._held:
            _unreserve(*self._held.popitem()[1])


def keep(raw: RawArray, context: Context, homes: tuple[HomeSpec, ...], name: object, *, beside: bool = False) -> Kept:
    """Copy ``raw``, memory of ``context`` that nobody uses, to the first of ``homes`` with room.

    Args:
        raw, context: what, and where it is.
        homes: in order.
        name: of the memory, for reports.
        beside: copy in the order of the current stream, if there is one: the copy may not be over on return.

    Raises:
        OutOfMemoryError: no home has room; says why each has none. ``raw`` is as it was.
    """
    nbytes, refusals, files = int(raw.nbytes), [], 0
    for home in homes:
        number = files
        files += home.kind == "file"
        if not _reserve(home, nbytes):
            refusals.append(f"{home.kind} has {home.nbytes:,} bytes, too few are left")
            continue
        kept = None
        try:
            for place in home.contexts(context, files=number, peers=peers(context)):
                try:
                    resource = registry.get(place)
                    kept = Kept(home, resource, resource.allocate(nbytes, name=f"waiting: {name}"))
                    _count_waiting(nbytes)
                    break
                except (OutOfMemoryError, DeviceError) as error:
                    refusals.append(str(error).partition("\n")[0])
            if kept is not None:
                _copy(kept._allocation.raw, kept.context, raw, context, beside)
                with _lock:
                    traffic.outs += 1
                    traffic.out_bytes += nbytes
                return kept
        except BaseException:
            if kept is not None:
                kept.free()
            raise
        finally:
            if kept is None:
                _unreserve(home, nbytes)
    raise OutOfMemoryError("; ".join(refusals) or f"no home takes bytes of {context}")


def peers(context: Context) -> list[Context]:
    """Devices of the same type, those with most free memory first."""
    return sorted(devices.peers(context), key=lambda peer: -device.get(peer).memory_info()[0])


def taken(home: HomeSpec) -> int:
    """Bytes of a home that somebody has."""
    key = _identity(home)
    with _lock:
        _settle()
        return _taken.get(key, 0)


def waiting_bytes() -> int:
    """Bytes that wait in homes now."""
    with _lock:
        _settle()
        return _waiting_bytes


def _identity(home: HomeSpec) -> tuple[str, str]:
    """What makes two specifications one home, whatever limits they give it."""
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
    """Count what was given back; under the lock. What comes meanwhile is counted here or the next time."""
    global _waiting_bytes
    while _given_back:
        key, nbytes, waited = _given_back[0]
        _taken[key] -= nbytes
        _waiting_bytes -= waited
        _given_back.popleft()  # Ctrl-C comes after a call: an entry is counted once, whether it comes or not


def _copy(target: RawArray, to: Context, source: RawArray, origin: Context, beside: bool) -> None:
    """Copy, and wait for the copy, behind all work of the devices, or ``beside`` it in the order of a stream."""
    place = device.get(origin if origin.has_streams else to)
    if beside and current_stream() is not None:
        place.copy(target, source)
        return
    with no_stream():
        for end in {origin, to}:  # either may have been given copies that are not over
            if device.get(end).asynchronous:
                device.get(end).synchronize()
        place.copy(target, source)
        if place.asynchronous:
            place.synchronize()
