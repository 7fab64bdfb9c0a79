"""Copies between a store's arrays and its users'.

All of them are pushed and return at once; the vars of the arrays order them. Nothing is kept; any thread that may
push may call them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from weftplan.engine import FnProperty
from weftplan.engine import get as get_engine
from weftplan.ndarray import NDArray

HOST = ("cpu", "cpu_pinned")
"""Device types whose memory every CPU thread can read and write."""

SMALL = 1 << 19
"""Bytes that may be copied by whoever finds the copy ready, where processes share the cores: to hand such a copy to a
worker takes longer."""

AT_ONCE = 1 << 18
"""Bytes, read and written, of work that is done on the calling thread where nobody else uses the arrays: some
microseconds, which is less than it takes to wake a worker."""

Spread = Callable[[Any, Sequence[Any]], None]
"""Called with a raw array of the host and those that are to become like it."""


def copy(source: NDArray, target: NDArray, priority: int, *, inline: bool = False) -> None:
    """``target[...] = source``, asynchronously; a copy onto itself is nothing.

    ``inline``: whoever finds a small one ready makes it, in no queue.
    """
    if source.var is target.var:
        return
    if source.context.device_type not in HOST or target.context.device_type not in HOST:
        source.copyto(target, priority=priority)
        return
    get_engine().push(
        partial(_fill_one, source, target),
        (source.var,),
        (target.var,),
        target.context,
        prop=FnProperty.ASYNC if inline and target.nbytes <= SMALL else FnProperty.NORMAL,
        priority=priority,
        name="KVStoreCopy",
    )


def copy_to_all(
    source: NDArray, targets: Sequence[NDArray], priority: int, spread: Spread, *, inline: bool = False
) -> None:
    """``target[...] = source`` for every target.

    Those on the host share an operation, because to wake a thread for each takes longer than small copies do, and large
    ones then read the source once. They share its fate with it: should one of them have failed by the time it runs, and
    nobody have been told, all of them have.
    """
    if not priority and _copied_at_once(source, targets):
        return
    together: list[NDArray] = []
    apart: list[NDArray] = []
    own = source.var
    writes: list[Any] = []  # parts of one chunk may overlap
    on_host = source.context.device_type in HOST
    for target in targets:
        chunk = target.chunk
        var = chunk.var
        here = on_host and chunk.context.device_type in HOST
        if here and var.failure is None and var is not own and var not in writes:
            together.append(target)
            writes.append(var)
        else:
            apart.append(target)
    if together:
        where = source if len(together) > 1 else together[0]
        nbytes = len(together) * source.nbytes
        small = inline and nbytes <= SMALL
        if len(together) == 1 and nbytes <= SMALL:
            fill = partial(_fill_one, source, where)
        else:
            fill = partial(_fill, source, together, spread)
        get_engine().push(
            fill,
            (own,),
            tuple(writes),
            where.context,
            prop=FnProperty.ASYNC if small else FnProperty.NORMAL,
            priority=priority,
            name="KVStoreCopy",
        )
    for target in apart:
        copy(source, target, priority, inline=inline)


def _copied_at_once(source: NDArray, targets: Sequence[NDArray]) -> bool:
    values = ready_on_host(source)
    if values is None or (1 + len(targets)) * values.nbytes > AT_ONCE:
        return False
    own = source.chunk.var
    writes: list[Any] = []
    views: list[Any] = []
    for target in targets:
        view, chunk = target.ready, target.chunk
        var = chunk.var
        if view is None or chunk.context.device_type not in HOST or var is own or var in writes:
            return False
        writes.append(var)
        views.append(view)

    def fill() -> None:
        for view in views:
            view[...] = values

    return get_engine().write_at_once(fill, (own,), writes)


def ready_on_host(array: NDArray) -> Any:
    """What ``array.raw()`` gives without doing anything for it, or None where something is to be done first, or it is
    not on the host."""
    return array.ready if array.chunk.context.device_type in HOST else None


def _fill(source: NDArray, targets: Sequence[NDArray], spread: Spread) -> None:
    spread(source.raw(), [target.raw() for target in targets])


def _fill_one(source: NDArray, target: NDArray) -> None:
    target.raw()[...] = source.raw()
