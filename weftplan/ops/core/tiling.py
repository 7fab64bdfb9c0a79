"""Tile sizes of kernels: blocks of elements, tiles of convolutions.

A CPU works in tiles that stay in a core's cache. On a GPU each tile is a launch, which costs as much as many elements,
so its tiles are as large as the scratch allows. Plans are made without the device, so the sizes depend on its type
alone, and every sum has one fixed order on each type of device.

A caller that asks an operator for its workspace, and a caller that runs its kernel, set the device type first: both
must see the same sizes. The sizes are thread-local; the default is those of a CPU.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple


class Grain(NamedTuple):
    """Sizes of blocks and tiles on a type of device.

    Attributes:
        block: elements of one block of an elementwise formula, a reduction or a row-wise operator.
        tile_bytes: bytes of the columns of one tile of a convolution, beyond which a larger tile gains nothing.
        least: elements below which cutting a small array costs more in calls than it saves in scratch.
    """

    block: int
    tile_bytes: int
    least: int = 1 << 12


HOST = Grain(block=1 << 16, tile_bytes=2 << 20)
"""A few arrays of a block, and the columns of a tile, fit a second-level cache."""

GPU = Grain(block=1 << 27, tile_bytes=1 << 30, least=1 << 27)
"""The tile of a launch only has to fit into memory next to the network. Tiles larger than ``Convolution``'s default
``workspace`` of 1024 MiB do not occur."""

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
    """Return the number of elements of one block for the device that this thread works for."""
    return _thread.grain.block


def share(size: int) -> int:
    """Return the elements per block of an array of ``size`` elements if its scratch could raise a small network's peak.

    This is a quarter of the array, between ``Grain.least`` and ``Grain.block``.

    >>> share(10_000), share(100_000), share(10**9) == block()
    (4096, 25000, True)
    """
    return min(_thread.grain.block, max(_thread.grain.least, size // 4))


def tile_bytes() -> int:
    """Return the bytes of one tile's columns for the device that this thread works for."""
    return _thread.grain.tile_bytes


class using:  # read as a word of a ``with`` statement
    """Within a ``with`` block this thread works in pieces of ``grain``. A bind enters hundreds."""

    __slots__ = ("_before", "_grain")

    def __init__(self, grain: Grain) -> None:
        self._grain = grain

    def __enter__(self) -> None:
        self._before = _thread.grain
        _thread.grain = self._grain

    def __exit__(self, *_: object) -> None:
        _thread.grain = self._before


def bound(grain: Grain, call: Callable[[], object]) -> Callable[[], object]:
    """Return ``call`` run with the tile sizes ``grain``; ``call`` itself if those are the default."""
    if grain is HOST:
        return call

    def run() -> None:
        with using(grain):
            call()

    return run
