"""Copies between a store's arrays and its users'.

All of them are pushed and return at once; the vars of the arrays order them. Nothing is kept; any thread that may
push may call them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from weftplan.engine import get as get_engine
from weftplan.ndarray import NDArray

HOST = ("cpu", "cpu_pinned")
"""Device types whose memory every CPU thread can read and write."""

TOGETHER = 1 << 18
"""Bytes: host arrays of at most that many are filled one after the other by one operation. To wake a thread for each
takes longer than the copies do."""


def copy(source: NDArray, target: NDArray, priority: int) -> None:
    """``target[...] = source``, asynchronously; a copy onto itself is nothing."""
    if source.var is target.var:
        return
    if source.context.device_type not in HOST or target.context.device_type not in HOST:
        source.copyto(target, priority=priority)
        return
    _push(source, (target,), target, priority)


def copy_to_all(source: NDArray, targets: Sequence[NDArray], priority: int) -> None:
    """``target[...] = source`` for every target.

    Small ones on the host share an operation, and with it their fate: should one of them have failed by the time it
    runs, and nobody have been told, all of them have.
    """
    together: list[NDArray] = []
    apart: list[NDArray] = []
    small = source.nbytes <= TOGETHER and source.context.device_type in HOST
    for target in targets:
        joins = small and target.context.device_type in HOST and target.var.failure is None
        (together if joins and target.var is not source.var else apart).append(target)
    if together:
        _push(source, together, source if len(together) > 1 else together[0], priority)
    for target in apart:
        copy(source, target, priority)


def _push(source: NDArray, targets: Sequence[NDArray], where: NDArray, priority: int) -> None:
    writes = tuple(dict.fromkeys(target.var for target in targets))
    fill = partial(_fill, source, targets)
    get_engine().push(fill, (source.var,), writes, where.context, priority=priority, name="KVStoreCopy")


def _fill(source: Any, targets: Sequence[Any]) -> None:
    values = source.raw()
    for target in targets:
        target.raw()[...] = values
