"""Copies between a store's arrays and the caller's.

All of them are pushed and return at once; the vars of the arrays order them. Nothing is kept; any thread that may
push may call them. Small ones that need not be pushed are in ``at_once.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from weftplan.device.context import HOST_MEMORY
from weftplan.engine import FnProperty
from weftplan.engine.var import Var
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


def copy_to_all(source: NDArray, targets: Sequence[NDArray], priority: int, spread: Spread, *, inline: int = 0) -> None:
    """``target[...] = source`` for every target.

    Those on the host share an operation, because to wake a thread for each takes longer than small copies do, and large
    ones then read the source once. They share its fate with it: should one of them have failed by the time it runs, and
    nobody have been told, all of them have.
    """
    together: list[NDArray] = []
    apart: list[NDArray] = []
    own = source.var
    writes: list[Var] = []  # parts of one chunk may overlap
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
        small = nbytes <= inline
        alone = len(together) == 1 and nbytes <= SMALL
        push_kernel(
            _fill_one if alone else partial(_fill, spread),
            [source, *together],
            (own,),
            tuple(writes),
            where.context,
            prop=FnProperty.ASYNC if small else FnProperty.NORMAL,
            priority=priority,
            name="KVStoreCopy",
        )
    for target in apart:
        copy(source, target, priority, inline=inline)


def together_fit(source: NDArray, targets: Sequence[NDArray], seen: set[Var]) -> bool:
    """Whether the copies of ``source`` to ``targets`` may share an operation with those whose vars were ``seen``.

    All of them are on the host, and none has failed: an operation has one fate. If so, their vars have been seen, too.
    """
    arrays = (source, *targets)
    found = {array.var for array in arrays}
    if len(found) < len(arrays) or not seen.isdisjoint(found):
        return False
    for array in arrays:
        if array.context.device_type not in HOST or array.var.failure is not None:
            return False
    seen |= found
    return True


def copy_each(
    pairs: Sequence[tuple[NDArray, Sequence[NDArray]]], priority: int, spread: Spread, *, inline: int = 0
) -> None:
    """``target[...] = source`` for every target of every source, which fit together, as one operation."""
    counts = [len(targets) for _, targets in pairs]
    sources = [source for source, _ in pairs]
    targets = [target for _, some in pairs for target in some]
    nbytes = sum(target.nbytes for target in targets)

    def fill(*raws: RawArray) -> None:
        rest = iter(raws[len(counts) :])
        for raw, count in zip(raws, counts, strict=False):
            spread(raw, [next(rest) for _ in range(count)], total=nbytes)

    push_kernel(
        fill,
        [*sources, *targets],
        [source.var for source in sources],
        [target.var for target in targets],
        targets[0].context,
        prop=FnProperty.ASYNC if nbytes <= inline else FnProperty.NORMAL,
        priority=priority,
        name="KVStoreCopy",
    )


def _fill(spread: Spread, source: RawArray, *targets: RawArray) -> None:
    spread(source, targets)


def _fill_one(source: RawArray, target: RawArray) -> None:
    target[...] = source
