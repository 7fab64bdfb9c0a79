"""Tile sizes of kernels: blocks of elements, tiles of convolutions.

A tile on a CPU stays in a core's cache. On a GPU each tile is a launch, which costs as much as many elements, so tiles
are as large as the scratch allows. Plans are made without the device, so the sizes depend only on its type, and every
sum has one fixed order on each type of device.

The sizes are thread-local, by default those of a CPU. Code that asks an operator for its workspace bytes, or runs its
kernel, must first select the sizes of the device type, the same for both.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple


class Grain(NamedTuple):
    """Sizes of blocks and tiles on a type of device.

    Attributes:
        block: maximum elements of a block of an elementwise formula, a reduction or a row-wise operator.
        tile_bytes: bytes of the columns of a convolution's tile; larger tiles are not faster.
        least: minimum elements of a block of a small array; smaller blocks would cost more in calls than they save.
    """

    block: int
    tile_bytes: int
    least: int = 1 << 12


HOST = Grain(block=1 << 16, tile_bytes=2 << 20)
"""Sizes on a CPU: a few arrays of a block, and the columns of a tile, fit a second-level cache."""

GPU = Grain(block=1 << 27, tile_bytes=1 << 30, least=1 << 27)
"""Sizes on a GPU: a tile only has to fit into memory together with the network. Tiles larger than ``Convolution``'s
default ``workspace`` of 1024 MiB do not occur."""

_BY_TYPE = {"gpu": GPU}


class _Thread(threading.local):
    grain = HOST


_thread = _Thread()


def of(device_type: str) -> Grain:
    """Return the sizes for a type of device, such as ``"gpu"``; a simulated device computes on the host.

    >>> of("cpu") == of("sim") == HOST, of("gpu").block > HOST.block
    (True, True)
    """
    return _BY_TYPE.get(device_type, HOST)


def block() -> int:
    """Return the maximum elements of a block, for the device type that this thread has selected."""
    return _thread.grain.block


def share(size: int) -> int:
    """Return the elements of a block for an array of ``size`` elements, if scratch could raise a small network's peak.

    The number is a quarter of the array, but at least ``Grain.least`` and at most ``Grain.block``.

    >>> share(10_000), share(100_000), share(10**9) == block()
    (4096, 25000, True)
    """
    return min(_thread.grain.block, max(_thread.grain.least, size // 4))


def tile_bytes() -> int:
    """Return the bytes of a tile's columns, for the device type that this thread has selected."""
    return _thread.grain.tile_bytes


class using:  # read as a word of a ``with`` statement
    """A context in which this thread uses the sizes ``grain``; a class, because a bind enters it hundreds of times."""

    __slots__ = ("_grain", "_outer")

    def __init__(self, grain: Grain) -> None:
        self._grain = grain

    def __enter__(self) -> None:
        self._outer = _thread.grain
        _thread.grain = self._grain

    def __exit__(self, *_: object) -> None:
        _thread.grain = self._outer


def bound(grain: Grain, call: Callable[[], object]) -> Callable[[], object]:
    """Return a function that runs ``call`` with the sizes ``grain``; ``call`` itself if ``grain`` is the default."""
    if grain is HOST:
        return call

    def run() -> None:
        with using(grain):
            call()

    return run
