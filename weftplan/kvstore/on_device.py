"""The store ``device``: it sums on the gradients' devices, and can compress gradients.

Several GPUs, or several simulated devices, exchange arrays over the fastest routes of their links (``exchange/``). In
all other cases, arrays that the summing device cannot read are copied to it directly.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial

from weftplan.device.context import Context
from weftplan.errors import KVStoreError
from weftplan.kvstore.compression import DTYPE, Compression, Residuals
from weftplan.kvstore.exchange.between import Between
from weftplan.kvstore.fixed_order_sums import BlockSum, sum_sequential_block
from weftplan.kvstore.keys import Key
from weftplan.kvstore.layout import BucketLayout, Groups
from weftplan.kvstore.local import KVStoreLocal
from weftplan.kvstore.stages import HOST, Stage, launch, on_device
from weftplan.kvstore.ways_of_summing import Item, Near, SumMethod, reads
from weftplan.ndarray import NDArray
from weftplan.ndarray.errstate import quietly
from weftplan.support.array_types import RawArray


class KVStoreDevice(KVStoreLocal):
    """A store that sums each key on one of the devices of its gradients: the device with the fewest bytes so far."""

    _block_sum: BlockSum = staticmethod(sum_sequential_block)

    def __init__(self, name: str = "device") -> None:
        super().__init__(name)
        self._compression: Compression | None = None
        self.residuals = Residuals()
        self._between = Between()

    def set_gradient_compression(self, compression_params: Mapping[str, object]) -> None:
        """Compress each pushed float32 gradient to two bits per element (+threshold, -threshold or 0), or to one bit.

        The difference to the gradient is stored in a residual for each key and index in the list of values, and added
        to the next gradient. Pulls are not compressed. Compression cannot be turned off, but its settings may be
        changed. Later pushes of another dtype raise an error.

        Args:
            compression_params: ``{"type": "2bit", "threshold": 0.5}``; the threshold is above 0, default 0.5. The
                type ``"1bit"`` sends 1 if the residual is above the threshold, else -1.

        Raises:
            KVStoreError: ``compression_params`` is not legal.

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
            self._staging.clear()  # its arrays have the size of uncompressed gradients
            self.residuals.codes.clear()  # another type of compression needs arrays of another size
            self._methods.clear()
            self._version += 1
            self._between.forget()

    def statistics(self) -> dict[str, int]:
        """Return the statistics of ``local``, and with compression the bytes of residuals and compressed gradients."""
        figures = super().statistics()
        figures["staging_bytes"] += self._between.nbytes
        if self._compression is not None:
            figures["compression_bytes"] = self.residuals.nbytes
        return figures

    def buffer_bytes(
        self, arrays: Sequence[tuple[int, int]], contexts: Sequence[Context], *, updates: bool
    ) -> dict[str, int]:
        """Return the bytes of ``stored``, ``merged`` and ``staging`` arrays.

        With compression, staging copies are compressed, and ``compression`` counts residuals and compressed gradients.

        :meta private:
        """
        compression = self._compression
        if compression is None:
            by_purpose = super().buffer_bytes(arrays, contexts, updates=updates)
            planned = self._receive_bytes(arrays, contexts)
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
            target = self._least_loaded(contexts, load, nbytes)
            by_purpose["staging"] += sent * sum(not reads(target, context) for context in contexts)
        return {
            **by_purpose,
            "staging": by_purpose["staging"] + (self._receive_bytes(arrays, contexts, pulls_only=True) or 0),
        }

    def _receive_bytes(
        self, arrays: Sequence[tuple[int, int]], contexts: Sequence[Context], *, pulls_only: bool = False
    ) -> int | None:
        """Return the bytes of the exchange's buffers; None if arrays are copied to the summing device directly.

        If ``pulls_only``, count only the host memory that pulls need.
        """
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
        """Replace the residuals, as loaded from a checkpoint, by (key, index in the key's list of gradients)."""
        with self._turn:
            self.residuals = Residuals(residuals)
            self._methods.clear()
            self._version += 1

    # -- how ------------------------------------------------------------------------------------------------------

    def _home(self, value: NDArray) -> Context:
        return value.context

    def _least_loaded(self, contexts: Sequence[Context], load: dict[Context, int], nbytes: int) -> Context:
        context = min(dict.fromkeys(contexts), key=lambda context: load.get(context, 0))
        load[context] = load.get(context, 0) + nbytes
        return context

    def _lay(self, pushed: Groups, pulled: Groups, priority: int, ready: Sequence[Key] | None = None) -> BucketLayout:
        if self._compression is not None:
            for k, arrays in pushed:
                if arrays[0].np_dtype != DTYPE:
                    raise KVStoreError(
                        f"push: key {k!r} holds {arrays[0].np_dtype}; a store with gradient compression takes {DTYPE} "
                        f"only"
                    )
        return super()._lay(pushed, pulled, priority, ready)

    def _sums_straight(self, arrays: Collection[NDArray], stored: NDArray) -> bool:
        return self._compression is None and super()._sums_straight(arrays, stored)

    def _method(self, item: Item) -> SumMethod:
        compressed = self._compression is not None and item.arrays
        if item.total.chunk.context.device_type not in HOST and not compressed and self._between.takes(item):
            return self._between
        return super()._method(item)

    def _make_method(self, context: Context) -> Near:
        method = super()._make_method(context)
        compression = self._compression
        return method if compression is None else Packed(method, compression, self.residuals)


class Packed(Near):
    """A way that compresses each gradient on its own device and sums the decoded gradients on one device.

    Args:
        near: the way without compression.
        compression: the settings of compression.
        residuals: the residual of each gradient.
    """

    def __init__(self, near: Near, compression: Compression, residuals: Residuals) -> None:
        super().__init__(near.context, near.block_sum, near.sharing, near.bring)
        self._compression, self._residuals = compression, residuals

    def sums(self, items: Sequence[Item], priority: int) -> list[Stage]:
        """Return stages that compress gradients that ``where`` can read, and a stage that sums all decoded gradients.

        The compression of other gradients and the copies of their codes to ``where`` are pushed as operations.
        """
        terms: list[list[NDArray]] = []
        stages: list[Stage] = []
        for item in items:
            row = []
            for index, array in enumerate(item.arrays):
                residual, packed = self._residuals.buffers(self._compression, item.key, index, array)
                stage = self._pack(array, residual, packed)
                if reads(self.context, array.context):
                    stages.append(stage)
                else:
                    launch([stage], priority)
                    packed = self.bring(item.key, index, packed, self.context, priority)
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
