"""Offload targets of ``WEFTPLAN_SPILL``: an ordered list of contexts, each with a limit.

An offload target is a context with a pool: page-locked host memory, files, or another device. :func:`offload` copies
bytes to the first target with room; the returned :class:`Offloaded` copies them back. Copies are complete when a call
returns, unless the caller asks for stream order. Any thread may call these functions.

All users share the limit of a target: arrays, slabs of paused executors, and plans (:class:`Reservation`). Plans are
made for the remaining bytes (:func:`reserved_bytes`).
"""

from __future__ import annotations

import os
from collections import deque
from dataclasses import dataclass

from weftplan import device
from weftplan.device import registry as devices
from weftplan.device.context import Context
from weftplan.device.offload_targets import OffloadTarget
from weftplan.device.stream import current_stream, no_stream
from weftplan.errors import DeviceError, OutOfMemoryError
from weftplan.locks import Lock, consistent_in_children
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
_lock = consistent_in_children(Lock())
"""Guards ``traffic`` and ``_books``."""


class _Books:
    """The bytes in offload targets. Guarded by ``_lock``, as is ``traffic``."""

    def __init__(self) -> None:
        self.taken: dict[tuple[str, str], int] = {}
        """Reserved bytes per offload target, by kind and folder."""
        self.waiting = 0
        """Bytes that are offloaded now."""
        self.given_back: deque[tuple[tuple[str, str], int, int]] = deque()
        """Released (target, reserved bytes, offloaded bytes), not yet subtracted. Finalizers append, even while the
        lock is held."""


_books = _Books()


class Offloaded:
    """Offloaded bytes in a target."""

    __slots__ = ("_allocation", "_resource", "_target", "context")

    def __init__(self, target: OffloadTarget, resource: Resource, allocation: Allocation) -> None:
        self._target, self._resource, self._allocation = target, resource, allocation
        self.context = resource.context

    def read(self, target: RawArray, context: Context, *, stream_ordered: bool = False) -> None:
        """Copy the bytes into ``target``, memory of ``context``; ``stream_ordered`` as in :func:`offload`."""
        _copy(target, context, self._allocation.raw, self.context, stream_ordered)
        with _lock:
            traffic.backs += 1
            traffic.back_bytes += self._allocation.nbytes

    def free(self) -> None:
        """Release the room in the target. Does not block, so finalizers may call it."""
        resource, allocation = self.given_up()
        resource.free(allocation)

    def given_up(self) -> tuple[Resource, Allocation]:
        """Release the reservation and return the allocation, which the caller must free."""
        nbytes = self._allocation.nbytes
        _unreserve(self._target, nbytes, waited=nbytes)
        return self._resource, self._allocation


class Reservation:
    """Bytes of offload targets reserved by a plan for the lifetime of its memory."""

    def __init__(self) -> None:
        self._held: dict[Context, tuple[OffloadTarget, int]] = {}

    def hold(self, context: Context, target: OffloadTarget, nbytes: int) -> None:
        """Reserve ``nbytes`` of an offload target, in its memory ``context``, in place of a smaller reservation.

        Raises:
            OutOfMemoryError: others have taken them. The earlier reservation remains.
        """
        more = nbytes - self._held.get(context, (target, 0))[1]
        if more > 0:
            if not _reserve(target, more):
                raise OutOfMemoryError(
                    f"{target.kind} has {target.nbytes:,} bytes (WEFTPLAN_SPILL), of which others have "
                    f"{reserved_bytes(target):,}; a plan needs {more:,}"
                )
            self._held[context] = target, nbytes

    def free(self) -> None:
        """Release everything. Does not block, so finalizers may call it."""
        while self._held:
            _unreserve(*self._held.popitem()[1])


def offload(
    raw: RawArray, context: Context, targets: tuple[OffloadTarget, ...], name: object, *, stream_ordered: bool = False
) -> Offloaded:
    """Copy ``raw``, idle memory of ``context``, to the first of ``targets`` with room.

    Args:
        raw, context: the bytes and their device.
        targets: in order of preference.
        name: name of the memory, for reports.
        stream_ordered: copy in the order of the current stream, if any; the copy may not be complete on return.

    Raises:
        OutOfMemoryError: no offload target has room; the message gives each reason. ``raw`` is unchanged.
    """
    nbytes, refusals, files = int(raw.nbytes), [], 0
    for target in targets:
        number = files
        files += target.kind == "file"
        # Reserve before allocating: the limit holds across threads.
        if not _reserve(target, nbytes):
            refusals.append(f"{target.kind} has {target.nbytes:,} bytes, too few are left")
            continue
        stored = None
        try:
            for target_context in target.contexts(context, files=number, peers=peers(context)):
                try:
                    resource = registry.get(target_context)
                    stored = Offloaded(target, resource, resource.allocate(nbytes, name=f"waiting: {name}"))
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
                _unreserve(target, nbytes)
    raise OutOfMemoryError("; ".join(refusals) or f"no offload target takes bytes of {context}")


def peers(context: Context) -> list[Context]:
    """Return devices of the same type, most free memory first."""
    return sorted(devices.peers(context), key=lambda peer: -device.get(peer).memory_info()[0])


def reserved_bytes(target: OffloadTarget) -> int:
    """Return the reserved bytes of a target."""
    key = _identity(target)
    with _lock:
        _settle()
        return _books.taken.get(key, 0)


def waiting_bytes() -> int:
    """Return the bytes offloaded now."""
    with _lock:
        _settle()
        return _books.waiting


def _identity(target: OffloadTarget) -> tuple[str, str]:
    """Return a key that is equal for two specifications of one offload target, whatever their limits."""
    return target.kind, os.path.realpath(target.folder) if target.folder else ""


def _reserve(target: OffloadTarget, nbytes: int) -> bool:
    key = _identity(target)
    with _lock:
        _settle()
        total = _books.taken.get(key, 0) + nbytes
        if target.nbytes is not None and total > target.nbytes:
            return False
        _books.taken[key] = total
        return True


def _unreserve(target: OffloadTarget, nbytes: int, *, waited: int = 0) -> None:
    _books.given_back.append((_identity(target), nbytes, waited))


def _count_waiting(nbytes: int) -> None:
    with _lock:
        _books.waiting += nbytes


def _settle() -> None:
    """Subtract released bytes, under the lock. Concurrent releases are subtracted now or next time."""
    while _books.given_back:
        key, nbytes, waited = _books.given_back[0]
        _books.taken[key] -= nbytes
        _books.waiting -= waited
        # Last step: Ctrl-C can only follow a call, so each entry is subtracted exactly once.
        _books.given_back.popleft()


def _copy(target: RawArray, to: Context, source: RawArray, origin: Context, stream_ordered: bool) -> None:
    """Copy and wait for completion, after all work of the devices; ``stream_ordered``: only the stream's."""
    copier = device.get(origin if origin.has_streams else to)
    if stream_ordered and current_stream() is not None:
        copier.copy(target, source)
        return
    with no_stream():
        for end in {origin, to}:  # either may have incomplete copies
            if device.get(end).asynchronous:
                device.get(end).synchronize()
        copier.copy(target, source)
        if copier.asynchronous:
            copier.synchronize()
