"""Devices for tests of pools: little memory, reported exactly, on any kind of context."""

from weftplan import device
from weftplan.errors import OutOfMemoryError

MIB = 1 << 20


class Room:
    """A device of ``total`` bytes; ``taken`` lists the sizes of its live allocations in order."""

    asynchronous = False

    def __init__(self, total=1 << 40, context=None, alignment=64):
        self._host = device.get(device.cpu())
        self.context = context or device.cpu()
        self.xp = self._host.xp
        self.alignment = alignment
        self.total = total
        self.taken = []

    def allocate(self, nbytes):
        if sum(self.taken) + nbytes > self.total:
            raise OutOfMemoryError("device full")
        raw = self._host.allocate(nbytes)
        self.taken.append(nbytes)
        return raw

    def free(self, raw):
        self.taken.remove(raw.nbytes)

    def launch(self, fn, modelled=0.0):
        fn()

    def memory_info(self):
        return self.total - sum(self.taken), self.total


def address(allocation):
    """Return the address of the allocation's first byte."""
    return allocation.raw.__array_interface__["data"][0]


def layout(pool):
    """Return per chunk the (offset, bytes, free) of its blocks in address order, without direct allocations."""
    chunks = {id(chunk.raw) for chunk in pool._chunks.values()}
    segments = [segment for segment in pool.segments() if id(segment.raw) in chunks]
    return [[(at, nbytes, held is None) for at, nbytes, held in segment.parts] for segment in segments]
