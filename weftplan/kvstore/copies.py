"""Copies between a store's arrays and the caller's.

All of them are pushed and return at once; the vars of the arrays order them. Nothing is kept; any thread that may
push may call them. Small ones that need not be pushed are in ``at_once.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from weftplan.device.context import HOST_MEMORY
from weftplan.engine import FnProperty
from weftplan.ndarray import NDArray
from weftplan.ndarray.pushing import push_kernel
from weftplan.support.array_types import RawArray

HOST = HOST_MEMORY
"""Device types whose memory every CPU thread can read and write."""

SMALL = 1 << 19
"""Bytes that may be copied by whoever finds the copy ready, where processes share the cores: to hand such a copy to a
worker takes longer."""

Spread = Callable[..., None]
"""Called with a raw array of the host and those that are to become like it; ``total``: bytes that are copied in all."""


def copy(source: NDArray, target: NDArray, priority: int, *, inline: int = 0) -> None:
    """``target[...] = source``, asynchronously; a copy onto itself is nothing.

    ``inline``: of at most so many bytes, whoever finds it ready makes it, in no queue.
    """
    if source.var is target.var:
        return
    if source.context.device_type not in HOST or target.context.device_type not in HOST:
        source.copyto(target, priority=priority)
        return
    push_kernel(
        _fill_one,
        [source, target],
        (source.var,),
        (target.var,),
        target.context,
        prop=FnProperty.ASYNC if target.nbytes <= inline else FnProperty.NORMAL,
        priority=priority,
        name="KVStoreCopy",
    )


def copy_to_all(source: NDArray, targets: Sequence[NDArray], priority: int) -> None:
    """``target[...] = source`` for every target, each in an operation of its own."""
    for target in targets:
        copy(source, target, priority)


def _fill_one(source: RawArray, target: RawArray) -> None:
    target[...] = source
