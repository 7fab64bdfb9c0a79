"""The store ``device``: sums on the gradients' devices, with optional compression between devices.

Between several GPUs, or several simulated devices, sums and values take the fastest route on their links
(``exchange``). Everything else takes one step: arrays that the place of the sum cannot read are copied there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

from weftplan.device.context import Context
from weftplan.errors import KVStoreError
from weftplan.kvstore.compression import DTYPE, Compression
from weftplan.kvstore.exchange.between import Between
from weftplan.kvstore.keys import Key
from weftplan.kvstore.layout import Groups, Layout
from weftplan.kvstore.local import KVStoreLocal
from weftplan.kvstore.reduce import BlockSum, sum_sequential_block
from weftplan.kvstore.stages import HOST, Stage, launch, on_device
from weftplan.kvstore.summing import Item, Near, Way, reads
from weftplan.ndarray import NDArray, empty, zeros
from weftplan.ndarray.errstate import quietly
from weftplan.support.array_types import RawArray


class KVStoreDevice(KVStoreLocal):
    """Sums each key on that device of the pushed arrays with the fewest bytes to sum so far."""

    _block_sum: BlockSum = staticmethod(sum_sequential_block)

    def __init__(self, name: str = "device") -> None:
        super().__init__(name)
        self._compression: Compression | None = None
        self._residuals: dict[tuple[Key, int], NDArray] = {}
        self._packed: dict[tuple[Key, int], NDArray] = {}
        self._between = Between()

    def set_gradient_compression(self, compression_params: Mapping[str, object]) -> None:
        """Send two bits for each element of a pushed float32 gradient (+threshold, -threshold or nothing), or one.

        The unsent remainder is kept in a residual per key and place in the list of values, and added to the next
        gradient. Pulls are not compressed. It cannot be switched off again; another threshold may be set.

        Args:
            compression_params: ``{"type": "2bit", "threshold": 0.5}``; the threshold is above 0, default 0.5. The
                type ``"1bit"`` sends 1 if the residual is above the threshold, else -1.

        Raises:
            KVStoreError: anything else in ``compression_params``; afterwards also pushes of another dtype.

        >>> import weftplan as mx
        >>> kv = mx.kv.create("device")
        >>> kv.set_gradient_compression({"type": "2bit", "threshold": 0.5})
        >>> kv.init("w", mx.nd.zeros((3,)))
        >>> for _ in range(2):
        ...     kv.push("w", mx.nd.array([0.3, -0.6, 0.1]))
        ...     out = mx.nd.empty((3,))
        ...     kv.pull("w", out=out)
        ...     out.tolist()
        [0.0, -0.5, 0.0]
        [0.5, -0.5, 0.0]
        """
        chosen = Compression.from_params(compression_params)
        with self._turn:
            self._compression = chosen
            self._staging.clear()  # copies of unpacked gradients
            self._packed.clear()  # with another kind they have another size
            self._ways.clear()
            self._version += 1
            self._between.forget()

    def statistics(self) -> dict[str, int]:
        """As of every store; with compression also the bytes of residuals and packed gradients."""
        figures = super().statistics()
        figures["staging_bytes"] += self._between.nbytes
        if self._compression is not None:
            held = [*list(self._residuals.values()), *list(self._packed.values())]
            figures["compression_bytes"] = sum(array.nbytes for array in held)
        return figures

    def buffer_bytes(
        self, arrays: Sequence[tuple[int, int]], contexts: Sequence[Context], *, updates: bool
    ) -> dict[str, int]:
        """As of every store; with compression also residuals and packed gradients, and staging copies are packed.

        :meta private:
        """
        compression = self._compression
        if compression is None:
            by_purpose = super().buffer_bytes(arrays, contexts, updates=updates)
            planned = self._planned(arrays, contexts)
            return by_purpose if planned is None else {**by_purpose, "staging": planned}
        packed = [(elements, compression.packed_size(elements)) for elements, _ in arrays]
        load: dict[Context, int] = {}
        by_purpose = {
            "stored": sum(nbytes for _, nbytes in arrays),
            "merged": sum(nbytes for _, nbytes in arrays),
            "staging": 0,
            "compression": len(contexts)
            * sum(nbytes + sent for (_, nbytes), (_, sent) in zip(arrays, packed, strict=True)),
        }
        for (_, nbytes), (_, sent) in zip(arrays, packed, strict=True):
            where = self._least_loaded(contexts, load, nbytes)
            by_purpose["staging"] += sent * sum(not reads(where, context) for context in contexts)
        return {
            **by_purpose,
            "staging": by_purpose["staging"] + (self._planned(arrays, contexts, pulls_only=True) or 0),
        }

    def _planned(
        self, arrays: Sequence[tuple[int, int]], contexts: Sequence[Context], *, pulls_only: bool = False
    ) -> int | None:
        """Return the bytes of receive buffers for other devices' gradients; None if each is copied whole."""
        load: dict[Context, int] = {}
        total = 0
        for elements, nbytes in arrays:
            itemsize = nbytes // max(1, elements)
            plan = self._between.plan(contexts, self._least_loaded(contexts, load, nbytes), elements, itemsize)
            if plan is None and elements:
                return None
            total += 0 if plan is None else self._between.bytes_of(plan, itemsize, pulls_only=pulls_only)
        return total

    def set_residuals(self, residuals: Mapping[tuple[Key, int], NDArray]) -> None:
        """Go on from residuals of an earlier run: for each key and place the array, as a checkpoint has kept it."""
        with self._turn:
            self._residuals = dict(residuals)
            self._packed.clear()
            self._version += 1

    # -- how ------------------------------------------------------------------------------------------------------

    def _home(self, value: NDArray) -> Context:
        return value.context

    def _least_loaded(self, contexts: Sequence[Context], load: dict[Context, int], nbytes: int) -> Context:
        where = min(dict.fromkeys(contexts), key=lambda context: load.get(context, 0))
        load[where] = load.get(where, 0) + nbytes
        return where

    def _lay(self, pushed: Groups, pulled: Groups, priority: int, ready: Sequence[Key] | None = None) -> Layout:
        if self._compression is not None:
            for k, arrays in pushed:
                if arrays[0].dtype != DTYPE:
                    raise KVStoreError(
                        f"push: key {k!r} holds {arrays[0].dtype}; a store with gradient compression takes {DTYPE} only"
                    )
        return super()._lay(pushed, pulled, priority, ready)

    def _sums_straight(self, arrays: Collection[NDArray], stored: NDArray) -> bool:
        return self._compression is None and super()._sums_straight(arrays, stored)

    def _way(self, item: Item) -> Way:
        compressed = self._compression is not None and item.arrays
        if item.total.chunk.context.device_type not in HOST and not compressed and self._between.takes(item):
            return self._between
        return super()._way(item)

    def _code(self, key: Key, index: int, array: NDArray) -> tuple[NDArray, NDArray]:
        """Return the residual of a gradient, and the array for its codes, on its device."""
        assert self._compression is not None
        place, where = (key, index), array.context
        residual, packed = self._residuals.get(place), self._packed.get(place)
        if residual is None:
            residual, packed = zeros(array.shape, ctx=where, dtype=DTYPE), None
        elif residual.context != where:
            residual, packed = residual.as_in_context(where), None
        if packed is None:
            packed = empty((self._compression.packed_size(array.size),), ctx=where, dtype="uint8")
        self._residuals[place], self._packed[place] = residual, packed
        return residual, packed

    def _make_way(self, where: Context) -> Near:
        way = super()._make_way(where)
        compression = self._compression
        return way if compression is None else Packed(way, compression, self._code)


class Packed(Near):
    """Sums of compressed gradients; each gradient is compressed on its own device.

    Args:
        way: the way without compression.
        room: called with a key, the place in its list and a gradient; returns its residual and the array for its codes.
    """

    def __init__(
        self, way: Near, compression: Compression, room: Callable[[Key, int, NDArray], tuple[NDArray, NDArray]]
    ) -> None:
        super().__init__(way.where, way.block_sum, way.sharing, way.bring)
        self._compression, self._room = compression, room

    def sums(self, items: Sequence[Item], priority: int) -> list[Stage]:
        """Return stages that pack gradients at the place of the sum, and the stage that adds up all codes."""
        terms: list[list[NDArray]] = []
        stages: list[Stage] = []
        for item in items:
            row = []
            for index, array in enumerate(item.arrays):
                residual, packed = self._room(item.key, index, array)
                stage = self._pack(array, residual, packed)
                if reads(self.where, array.context):
                    stages.append(stage)
                else:
                    launch([stage], priority)
                    packed = self.bring(item.key, index, packed, self.where, priority)
                row.append(packed)
            terms.append(row)
        return [*stages, self.sum_stage("KVStoreUnpack", terms, [item.total for item in items], self._unpack)]

    def _pack(self, array: NDArray, residual: NDArray, packed: NDArray) -> Stage:
        pack = partial(self._compression.pack, **self.sharing)
        work = on_device(array.context, lambda raws: quietly(pack, *raws))
        return Stage("KVStorePack", work, [array], [residual, packed], array.context, repeatable=False)

    def _unpack(self, sums: Sequence[tuple[Sequence[RawArray], RawArray]]) -> None:
        for terms, total in sums:
            quietly(partial(self._compression.unpack_sum, **self.sharing), terms, total)
