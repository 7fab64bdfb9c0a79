"""Ways of summing a bucket over the devices of this process, and of copying the result to these devices.

:class:`Near` sums on one device. ``exchange/between.py`` sums over links between devices, ``nccl.py`` with NVIDIA's
NCCL. A way turns the keys of a bucket into stages: the sum, the optimizer's steps that the store passes in, and the
copies to the caller. A way has no state except buffers; its caller holds the store's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from weftplan.device.context import Context
from weftplan.kvstore.fixed_order_sums import BlockSum, Sharing, reduce_each, spread_array, sum_sequential_block
from weftplan.kvstore.gpu_sum import sum_in_single_launch
from weftplan.kvstore.keys import Key
from weftplan.kvstore.stages import HOST, Stage, on_device
from weftplan.ndarray import NDArray
from weftplan.ndarray.errstate import quietly
from weftplan.support.array_types import RawArray


class Item(NamedTuple):
    """The arrays of a key in a call.

    Attributes:
        key: the key.
        arrays: the pushed gradients; empty if the call only pulls.
        total: the array that receives the sum; may be ``stored``.
        stored: the stored value.
        outs: the arrays that receive the stored value.
    """

    key: Key
    arrays: Sequence[NDArray]
    total: NDArray
    stored: NDArray
    outs: Sequence[NDArray]


class SumMethod(Protocol):
    """A way of summing the keys of a bucket and copying their stored values out."""

    def reaches(self, stored: NDArray, out: NDArray) -> bool:
        """Return whether :meth:`stages` can copy ``stored`` to ``out``."""

    def stages(self, items: Sequence[Item], steps: Sequence[Stage], priority: int) -> list[Stage]:
        """Return the stages that sum, update and copy these keys.

        Args:
            items: keys of a bucket with their arrays.
            steps: the optimizer's stages; if empty, the sum replaces the stored value.
            priority: engine priority of operations that must be pushed first, such as copies to the summing device.
        """


class SumBatch:
    """The keys of a bucket that are summed in the same way, which run as one operation.

    Attributes:
        keys: the keys.
        later: keys to be copied out by later operations: all pulled keys if the way cannot reach an array, else none.
        stored: the stored value of each key.
        totals: the array for the sum of each key.
    """

    __slots__ = ("_fixed", "_items", "_method", "keys", "later", "stored", "totals")

    def __init__(self, method: SumMethod, items: Sequence[Item], *, updates: bool) -> None:
        self.later: list[Item] = []
        if not all(method.reaches(item.stored, out) for item in items for out in item.outs):
            self.later = [Item(item.key, (), item.stored, item.stored, item.outs) for item in items if item.outs]
            items = [item._replace(outs=()) for item in items]
        self._method, self._items = method, items
        self.keys = [item.key for item in items]
        self.totals, self.stored = [item.total for item in items], [item.stored for item in items]
        self._fixed = method.fixed(items, updates=updates) if isinstance(method, Near) else None

    @property
    def fixed(self) -> tuple[Sequence[Stage], Sequence[Stage]] | None:
        """Stages (before, after) the optimizer's steps if they are the same for every call, else None."""
        return None if self.later else self._fixed

    def stages(self, steps: Sequence[Stage], priority: int) -> Sequence[Stage]:
        """Return the stages of these keys, with the optimizer's stages ``steps`` after the sum."""
        if self._fixed is None:
            return self._method.stages(self._items, steps, priority)
        first_stages, last_stages = self._fixed
        return [*first_stages, *steps, *last_stages]


class Near:
    """A way that sums on the host or on one device; arrays that it cannot read are first copied there.

    Args:
        context: context of the host or device.
        block_sum: the function that sums a block on the host, which sets the order of additions.
        sharing: arguments of :func:`~weftplan.kvstore.fixed_order_sums.reduce_arrays`.
        bring: function of a key, an index in its list of arrays, the array, ``where`` and a priority; it pushes a copy
            of the array to ``where`` and returns the copy.
    """

    def __init__(
        self,
        context: Context,
        block_sum: BlockSum,
        sharing: Sharing,
        bring: Callable[[Key, int, NDArray, Context, int], NDArray],
    ) -> None:
        self.context, self._host = context, context.device_type in HOST
        self.block_sum, self.sharing, self.bring = block_sum, sharing, bring

    def reaches(self, stored: NDArray, out: NDArray) -> bool:
        """Return whether one operation can copy ``stored`` to ``out``."""
        return reads(self.context, out.context) and reads(self.context, stored.context)

    def stages(self, items: Sequence[Item], steps: Sequence[Stage], priority: int) -> list[Stage]:
        """Return a stage that sums all keys, the optimizer's ``steps``, and a stage that does all copies."""
        pushed = [item for item in items if item.arrays]
        stages = self.sums(pushed, priority) if pushed else []
        return [*stages, *steps, *self._copies(items, updates=bool(steps))]

    def fixed(self, items: Sequence[Item], *, updates: bool) -> tuple[list[Stage], list[Stage]] | None:
        """Return the stages (before, after) the optimizer's steps; None if each call must first copy pushed arrays."""
        if not all(reads(self.context, array.chunk.context) for item in items for array in item.arrays):
            return None
        pushed = [item for item in items if item.arrays]
        return (self.sums(pushed, 0) if pushed else []), self._copies(items, updates=updates)

    def sums(self, items: Sequence[Item], priority: int) -> list[Stage]:
        """Return the stages that compute the totals; push copies of arrays that cannot be read from ``where``."""
        terms = []
        for item in items:
            terms.append(list(item.arrays))
            for index, array in enumerate(item.arrays):
                if not reads(self.context, array.chunk.context):
                    terms[-1][index] = self.bring(item.key, index, array, self.context, priority)
        return [self.sum_stage("KVStoreReduce", terms, [item.total for item in items], self._add)]

    def sum_stage(
        self,
        name: str,
        terms: Sequence[Sequence[NDArray]],
        totals: Sequence[NDArray],
        add: Callable[[Sequence[tuple[Sequence[RawArray], RawArray]]], None],
    ) -> Stage:
        """Return a stage that calls ``add`` with (terms, total), as raw arrays, for each key."""
        counts = [len(sources) for sources in terms]

        def kernel(raws: Sequence[RawArray]) -> None:
            begin, sums = 0, []
            for count, total in zip(counts, raws[sum(counts) :], strict=True):
                sums.append((raws[begin : begin + count], total))
                begin += count
            add(sums)

        return Stage(
            name, on_device(self.context, kernel), [term for sources in terms for term in sources], totals, self.context
        )

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
        targets = [target for _, arrays in copies for target in arrays]
        nbytes = sum([target.nbytes for target in targets]) if host else 0

        def kernel(raws: Sequence[RawArray]) -> None:
            begin = len(counts)
            for source, count in zip(raws, counts, strict=False):
                arrays = raws[begin : begin + count]
                begin += count
                if host:
                    spread_array(source, arrays, total=nbytes, **sharing)
                else:
                    for target in arrays:
                        target[...] = source

        return [Stage("KVStoreCopy", on_device(self.context, kernel), sources, targets, self.context, urgent=False)]


def reads(reader: Context, context: Context) -> bool:
    """Return whether code that runs on ``reader`` can read arrays of ``context`` without a copy."""
    return context == reader or (context.device_type in HOST and reader.device_type in HOST)


def add_on_device(terms: Sequence[RawArray], total: RawArray) -> None:
    """Write the sum of ``terms``, from left to right, to ``total``; add half precision in float32 and round once."""
    if isinstance(total, np.ndarray):  # a simulated device
        quietly(sum_sequential_block, terms, total, total)
    else:
        sum_in_single_launch(terms, total)
