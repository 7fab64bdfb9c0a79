"""Ways of summing a bucket over the devices of this process, and of copying the result to them.

:class:`Near` sums on one device that can read every gradient, or a copy of it; ``exchange/between.py`` has the way over
links between devices, ``nccl.py`` NVIDIA's. A way turns the keys of a bucket into stages: the sum, the steps of the
optimizer that the store adds, and the copies to the caller. A way has no state but buffers; its caller holds the
store's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from weftplan.device.context import Context
from weftplan.kvstore.gpu_sum import sum_in_one_launch
from weftplan.kvstore.keys import Key
from weftplan.kvstore.reduce import BlockSum, Sharing, reduce_each, spread_array, sum_sequential_block
from weftplan.kvstore.stages import HOST, Stage, on_device
from weftplan.ndarray import NDArray
from weftplan.ndarray.errstate import quietly
from weftplan.support.array_types import RawArray


class Item(NamedTuple):
    """A key of a bucket.

    Attributes:
        arrays: the pushed gradients; empty if nothing is pushed.
        total: receives the sum; may be ``stored``.
        outs: receive the stored value.
    """

    key: Key
    arrays: Sequence[NDArray]
    total: NDArray
    stored: NDArray
    outs: Sequence[NDArray]


class Way(Protocol):
    """A way of reducing a bucket."""

    def reaches(self, stored: NDArray, out: NDArray) -> bool:
        """Return whether :meth:`stages` can copy ``stored`` to ``out``."""

    def stages(self, items: Sequence[Item], steps: Sequence[Stage], priority: int) -> list[Stage]:
        """Return the stages that sum, update and copy these keys.

        Args:
            steps: the optimizer's; without any a sum replaces the stored value.
            priority: of operations that come before, such as copies to the place of the sum.
        """


class Lot:
    """Keys of a bucket that share a way of summing.

    Attributes:
        later: keys whose arrays the way cannot reach; they are copied out afterwards.
    """

    __slots__ = ("_fixed", "_items", "_way", "keys", "later", "stored", "totals")

    def __init__(self, way: Way, items: Sequence[Item], *, updates: bool) -> None:
        self.later: list[Item] = []
        if not all(way.reaches(item.stored, out) for item in items for out in item.outs):
            self.later = [Item(item.key, (), item.stored, item.stored, item.outs) for item in items if item.outs]
            items = [item._replace(outs=()) for item in items]
        self._way, self._items = way, items
        self.keys = [item.key for item in items]
        self.totals, self.stored = [item.total for item in items], [item.stored for item in items]
        self._fixed = way.fixed(items, updates=updates) if isinstance(way, Near) else None

    @property
    def fixed(self) -> tuple[Sequence[Stage], Sequence[Stage]] | None:
        """The stages before and after the optimizer's if they are the same for every call; else None."""
        return None if self.later else self._fixed

    def stages(self, steps: Sequence[Stage], priority: int) -> Sequence[Stage]:
        """Return the stages of these keys; ``steps``: the optimizer's."""
        if self._fixed is None:
            return self._way.stages(self._items, steps, priority)
        before, after = self._fixed
        return [*before, *steps, *after]


class Near:
    """Sums on the host, or on one device, from arrays that it can read or from copies of them.

    Args:
        where: the device.
        block_sum: order of additions.
        sharing: threads and sizes, as for :func:`~weftplan.kvstore.reduce.reduce_arrays`.
        bring: called with a key, the place in its list, an array, ``where`` and a priority; returns a copy of the array
            that ``where`` can read.
    """

    def __init__(
        self,
        where: Context,
        block_sum: BlockSum,
        sharing: Sharing,
        bring: Callable[[Key, int, NDArray, Context, int], NDArray],
    ) -> None:
        self.where, self._host = where, where.device_type in HOST
        self.block_sum, self.sharing, self.bring = block_sum, sharing, bring

    def reaches(self, stored: NDArray, out: NDArray) -> bool:
        """Return whether one operation can copy ``stored`` to ``out``."""
        return reads(self.where, out.context) and reads(self.where, stored.context)

    def stages(self, items: Sequence[Item], steps: Sequence[Stage], priority: int) -> list[Stage]:
        """Return the sum of all keys as one stage, the steps, and all copies as one stage."""
        pushed = [item for item in items if item.arrays]
        stages = self.sums(pushed, priority) if pushed else []
        return [*stages, *steps, *self._copies(items, updates=bool(steps))]

    def fixed(self, items: Sequence[Item], *, updates: bool) -> tuple[list[Stage], list[Stage]] | None:
        """Return the stages before and after the steps, if they are the same for every call; else None."""
        if not all(reads(self.where, array.chunk.context) for item in items for array in item.arrays):
            return None
        pushed = [item for item in items if item.arrays]
        return (self.sums(pushed, 0) if pushed else []), self._copies(items, updates=updates)

    def sums(self, items: Sequence[Item], priority: int) -> list[Stage]:
        """Return the stages that make the totals of these keys."""
        terms = []
        for item in items:
            terms.append(list(item.arrays))
            for place, array in enumerate(item.arrays):
                if not reads(self.where, array.chunk.context):
                    terms[-1][place] = self.bring(item.key, place, array, self.where, priority)
        return [self.sum_stage("KVStoreReduce", terms, [item.total for item in items], self._add)]

    def sum_stage(
        self,
        name: str,
        terms: Sequence[Sequence[NDArray]],
        totals: Sequence[NDArray],
        add: Callable[[Sequence[tuple[Sequence[RawArray], RawArray]]], None],
    ) -> Stage:
        """Return the stage that calls ``add`` with (terms, total) of each key."""
        counts = [len(some) for some in terms]

        def kernel(raws: Sequence[RawArray]) -> None:
            begin, sums = 0, []
            for count, total in zip(counts, raws[sum(counts) :], strict=True):
                sums.append((raws[begin : begin + count], total))
                begin += count
            add(sums)

        return Stage(name, on_device(self.where, kernel), [term for some in terms for term in some], totals, self.where)

    def _add(self, sums: Sequence[tuple[Sequence[RawArray], RawArray]]) -> None:
        if self._host:
            reduce_each(sums, block_sum=self.block_sum, **self.sharing)
            return
        for terms, total in sums:
            add_on_device(terms, total)

    def _copies(self, items: Sequence[Item], *, updates: bool) -> list[Stage]:
        copies = []
        for item in items:
            targets, source = list(item.outs), item.stored
            if not updates and item.total is not item.stored:
                source = item.total
                targets.append(item.stored)
            targets = [target for target in targets if target.chunk.var is not source.chunk.var]
            if targets:
                copies.append((source, targets))
        if not copies:
            return []
        counts, sharing, host = [len(targets) for _, targets in copies], self.sharing, self._host
        sources = [source for source, _ in copies]
        targets = [target for _, some in copies for target in some]
        nbytes = sum([target.nbytes for target in targets]) if host else 0

        def kernel(raws: Sequence[RawArray]) -> None:
            begin = len(counts)
            for source, count in zip(raws, counts, strict=False):
                some = raws[begin : begin + count]
                begin += count
                if host:
                    spread_array(source, some, total=nbytes, **sharing)
                else:
                    for target in some:
                        target[...] = source

        return [Stage("KVStoreCopy", on_device(self.where, kernel), sources, targets, self.where, urgent=False)]


def reads(where: Context, context: Context) -> bool:
    """Return whether a sum at ``where`` can read arrays at ``context``."""
    return context == where or (context.device_type in HOST and where.device_type in HOST)


def add_on_device(terms: Sequence[RawArray], total: RawArray) -> None:
    """Compute ``total[...]`` = the sum from left to right, half precision in float32 and rounded once."""
    if isinstance(total, np.ndarray):  # a simulated device
        quietly(sum_sequential_block, terms, total, total)
    else:
        sum_in_one_launch(terms, total)
