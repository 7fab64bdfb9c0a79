"""Bytes that wait elsewhere: the homes of ``WEFTPLAN_SPILL`` as places that take copies, in order, up to their limits.

A home is a context with a pool like any other: page-locked memory of the host, files, another device. :func:`keep`
copies bytes to the first home with room; what it returns copies them back and frees them there. The copies are over
when a call returns, on every device. Any thread may call anything here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from weftplan import device
from weftplan.device.context import Context
from weftplan.device.homes import HomeSpec
from weftplan.device.stream import no_stream
from weftplan.errors import DeviceError, OutOfMemoryError
from weftplan.locks import Lock, whole_in_children
from weftplan.storage import registry
from weftplan.storage.base import Allocation, Resource


@dataclass(slots=True)
class Traffic:
    """What has gone to homes and come back since the process started."""

    out_bytes: int = 0
    back_bytes: int = 0
    outs: int = 0
    backs: int = 0
    waiting_bytes: int = 0
    """Bytes that wait now."""


traffic = Traffic()
_lock = whole_in_children(Lock())
_taken: dict[HomeSpec, int] = {}
"""Bytes that wait in each home. Guarded by ``_lock``, as is ``traffic``."""


class Kept:
    """Bytes in a home."""

    __slots__ = ("_allocation", "_home", "_resource", "context")

    def __init__(self, home: HomeSpec, resource: Resource, allocation: Allocation) -> None:
        self._home, self._resource, self._allocation = home, resource, allocation
        self.context = resource.context

    def read(self, target: Any, context: Context) -> None:
        """Copy the bytes into ``target``, memory of ``context``."""
        _copy(target, context, self._allocation.raw, self.context)
        with _lock:
            traffic.backs += 1
            traffic.back_bytes += self._allocation.nbytes

    def free(self) -> None:
        """Give the room in the home back. Never waits for long, so finalizers may call it."""
        nbytes = self._allocation.nbytes
        self._resource.free(self._allocation)
        with _lock:
            _taken[self._home] -= nbytes
            traffic.waiting_bytes -= nbytes


def keep(raw: Any, context: Context, homes: tuple[HomeSpec, ...], name: object) -> Kept:
    """Copy ``raw``, memory of ``context`` that nobody uses, to the first of ``homes`` with room.

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
            for place in _places(home, context, number):
                try:
                    resource = registry.get(place)
                    kept = Kept(home, resource, resource.allocate(nbytes, name=f"waiting: {name}"))
                    break
                except (OutOfMemoryError, DeviceError) as error:
                    refusals.append(str(error).partition("\n")[0])
            if kept is not None:
                _copy(kept._allocation.raw, kept.context, raw, context)
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


def _reserve(home: HomeSpec, nbytes: int) -> bool:
    with _lock:
        taken = _taken.get(home, 0)
        if home.nbytes is not None and taken + nbytes > home.nbytes:
            return False
        _taken[home] = taken + nbytes
        traffic.waiting_bytes += nbytes
        return True


def _unreserve(home: HomeSpec, nbytes: int) -> None:
    with _lock:
        _taken[home] -= nbytes
        traffic.waiting_bytes -= nbytes


def _places(home: HomeSpec, context: Context, number: int) -> list[Context]:
    """Where a home of ``context`` is: memory of the host is no home for a host, and a device none for itself."""
    if home.kind == "file":
        return [Context("file", number)]
    if home.kind == "host":
        return [Context("cpu_pinned", context.device_id)] if context.has_streams else []
    return [peer for peer in registry.in_use() if peer.device_type == context.device_type and peer != context]


def _copy(target: Any, to: Context, source: Any, origin: Context) -> None:
    """Copy and wait for the copy, behind all work of the devices."""
    place = device.get(origin if origin.has_streams else to)
    with no_stream():
        if place.asynchronous:
            place.synchronize()
        place.copy(target, source)
        if place.asynchronous:
            place.synchronize()
