"""Gradient compression to one or two bits per element, with residuals: ``set_gradient_compression``.

The rules are those of MXNet's ``2bit`` (1.9.1) and ``1bit`` (2.0), after Seide et al., "1-bit stochastic gradient
descent", 2014. Each pushed array has a *residual*: a gradient is added to it, and the sent value is subtracted.
``2bit`` sends +threshold, -threshold or 0:

    residual += gradient
    residual >=  threshold:  send code 11, meaning  threshold;  residual -= threshold
    residual <= -threshold:  send code 10, meaning -threshold;  residual += threshold
    else:                    send code 00, meaning 0

A byte has four codes, the first in the two highest bits. ``1bit`` sends 1 or -1:

    residual += gradient
    residual >  threshold:  send code 1, meaning  1;  residual -= 1
    else:                   send code 0, meaning -1;  residual += 1

A byte has eight codes, the first in the highest bit. If llvmlite is installed, large arrays on the host use compiled
loops on several threads (:mod:`weftplan.kernels.compiled.exchange.codec`); otherwise NumPy works in blocks that stay in
a core's cache. Both give the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType, ModuleType
from typing import Any

import numpy as np

from weftplan.errors import KVStoreError
from weftplan.kvstore.fixed_order_sums import BLOCK_BYTES
from weftplan.kvstore.keys import Key
from weftplan.ndarray import NDArray, empty, zeros
from weftplan.ops.core.implementations import PACK_STEP
from weftplan.support import slots
from weftplan.support.array_types import RawArray
from weftplan.support.core_sharing import share_out

DTYPE = np.dtype(np.float32)
"""The only dtype that can be compressed, as in MXNet."""

_BLOCK = 1 << 16
"""Elements per block: a multiple of eight, so that a block begins at a whole byte."""

_PER_BYTE = {"2bit": 4, "1bit": 8}
"""Elements per byte."""


@dataclass(frozen=True)
class Compression:
    """The settings of gradient compression, and the functions that encode and decode arrays.

    Attributes:
        threshold: number above 0, rounded to float32. ``2bit`` sends the threshold, its negative or 0; ``1bit`` sends 1
            for residuals above the threshold, else -1.
        kind: ``"2bit"`` or ``"1bit"``.
    """

    threshold: float = 0.5
    kind: str = "2bit"

    @classmethod
    def from_params(cls, params: object) -> Compression:
        """Return the compression set by a dictionary such as ``{"type": "2bit", "threshold": 0.5}``.

        The threshold is optional, with default 0.5.

        Raises:
            KVStoreError: ``params`` is not a dictionary, the type is missing or unknown, an entry is unknown, or the
                threshold is not a finite number above 0.
        """
        example = "such as {'type': '2bit', 'threshold': 0.5}"
        if not isinstance(params, Mapping):
            raise KVStoreError(f"compression_params must be a dictionary {example}, got {params!r}")
        unknown = sorted(set(map(str, params)) - {"type", "threshold"})
        if unknown:
            raise KVStoreError(f"compression_params has the unknown entries {unknown}: expected a dictionary {example}")
        kind = params.get("type")
        if not isinstance(kind, str) or kind not in _PER_BYTE:
            raise KVStoreError(
                f"compression_params must have the type '2bit' or '1bit', {example}; got {dict(params)!r}"
            )
        try:
            threshold = float(np.float32(params.get("threshold", 0.5)))
        except (TypeError, ValueError):
            threshold = 0.0
        if not 0 < threshold < float("inf"):
            raise KVStoreError(
                f"the threshold of a compression must be a finite number above 0, got {params.get('threshold')!r}"
            )
        return cls(threshold, kind)

    def packed_size(self, size: int) -> int:
        """Return the bytes of ``size`` compressed elements."""
        return -(-size // _PER_BYTE[self.kind])

    def pack(
        self,
        gradient: RawArray,
        residual: RawArray,
        packed: RawArray,
        *,
        threads: int = 1,
        bound: int = 1,
        compiled: bool = True,
    ) -> None:
        """Add ``gradient`` to ``residual``, write the codes to send to ``packed``, and subtract them from ``residual``.

        Args:
            gradient: contiguous float32 array of any shape.
            residual: array of the same shape and dtype; updated in place.
            packed: uint8 array of :meth:`packed_size` bytes; overwritten.
            threads: maximum number of threads, including the calling thread.
            bound: arrays of fewer elements are packed on the calling thread alone.
            compiled: whether a compiled loop may be used for large arrays.
        """
        gradient, residual = gradient.reshape(-1), residual.reshape(-1)
        work, size = None, gradient.size
        if compiled and isinstance(packed, np.ndarray) and gradient.nbytes > BLOCK_BYTES:
            work = slots.COMPILED_PACK.get()(gradient, residual, packed, self._bits, self.threshold)
        packed_count = self._share_out(work, size, threads, bound)
        self._pack_remainder(gradient[packed_count:], residual[packed_count:], packed[self.packed_size(packed_count) :])

    @property
    def _bits(self) -> int:
        return 8 // _PER_BYTE[self.kind]

    @staticmethod
    def _share_out(work: slots.Work | None, size: int, threads: int, bound: int) -> int:
        """Run ``work`` for all whole steps of :data:`PACK_STEP` elements; return the number of elements done.

        Without ``work``, return 0. ``threads`` and ``bound`` are as for :meth:`pack`.
        """
        count = 0 if work is None else size - size % PACK_STEP
        if work is not None:
            share_out(work, count, _BLOCK, threads if size >= bound else 1)
        return count

    def _pack_remainder(self, gradient: RawArray, residual: RawArray, packed: RawArray) -> None:
        xp, share = _array_module(packed), _PER_BYTE[self.kind]
        codes_of = self._encode_2bit if self.kind == "2bit" else self._encode_1bit
        step = _BLOCK if xp is np else max(share, -(-gradient.size // share) * share)
        codes = xp.empty(min(step, packed.size * share), np.uint8)
        for start in range(0, gradient.size, step):
            remainder = residual[start : start + step]
            xp.add(remainder, gradient[start : start + step], out=remainder)
            block = codes[: -(-remainder.size // share) * share]
            block[remainder.size :] = 0
            block[: remainder.size] = codes_of(remainder)
            rows = block.reshape(-1, share)
            target = packed[start // share : start // share + len(rows)]
            bits = 8 // share
            target[...] = rows[:, 0] << (8 - bits)
            for column in range(1, share):
                target |= rows[:, column] << (8 - bits * (column + 1))

    def _encode_2bit(self, residual: RawArray) -> RawArray:
        """Return the ``2bit`` code of each residual, one per byte; subtract the sent values from ``residual``."""
        up, down = DTYPE.type(self.threshold), DTYPE.type(-self.threshold)
        above, below = residual >= up, residual <= down
        residual -= above * up
        residual -= below * down
        codes: RawArray = above * np.uint8(3) + below * np.uint8(2)
        return codes

    def _encode_1bit(self, residual: RawArray) -> RawArray:
        """Return the ``1bit`` code of each residual, one per byte; subtract the sent values from ``residual``."""
        above = residual > DTYPE.type(self.threshold)
        residual += DTYPE.type(1) - above * DTYPE.type(2)
        return above.astype(np.uint8)

    def unpack_sum(
        self, packed: Sequence[RawArray], out: RawArray, *, threads: int = 1, bound: int = 1, compiled: bool = True
    ) -> None:
        """Write the sum of the decoded arrays, added from left to right, to ``out``.

        Args:
            packed: at least one array written by :meth:`pack`, each of ``out.size`` elements.
            out: contiguous float32 array; overwritten.
            threads: maximum number of threads, including the calling thread.
            bound: arrays of fewer elements are unpacked on the calling thread alone.
            compiled: whether a compiled loop may be used for large arrays.
        """
        flat, work = out.reshape(-1), None
        if compiled and isinstance(out, np.ndarray) and out.nbytes > BLOCK_BYTES:
            work = slots.COMPILED_UNPACK.get()(packed, flat, self._bits, self.threshold)
        unpacked_count = self._share_out(work, flat.size, threads, bound)
        self._unpack_remainder([source[self.packed_size(unpacked_count) :] for source in packed], flat[unpacked_count:])

    def _unpack_remainder(self, packed: Sequence[RawArray], flat: RawArray) -> None:
        xp, share = _array_module(flat), _PER_BYTE[self.kind]
        table: Any = xp.asarray(self._decoding_table()) if flat.size else None
        step = _BLOCK if xp is np else max(share, -(-flat.size // share) * share)
        for start in range(0, flat.size, step):
            block = flat[start : start + step]
            codes = slice(start // share, start // share + -(-block.size // share))
            block[...] = table[packed[0][codes]].reshape(-1)[: block.size]
            for source in packed[1:]:
                block += table[source[codes]].reshape(-1)[: block.size]

    def _decoding_table(self) -> RawArray:
        """Return the decoded elements of each byte value, of shape (256, elements per byte); code 01 is never sent."""
        share = _PER_BYTE[self.kind]
        shifts = np.arange(8 - 8 // share, -1, -(8 // share), dtype=np.uint8)
        codes = np.arange(256, dtype=np.uint8)[:, None] >> shifts & (2 ** (8 // share) - 1)
        meanings = [0, 0, -self.threshold, self.threshold] if self.kind == "2bit" else [-1, 1]
        elements: RawArray = np.array(meanings, DTYPE)[codes]
        return elements


class Residuals:
    """The residual of each gradient that a process compresses, on the gradient's device, and the array for its codes.

    Attributes:
        arrays: residuals by (key, index in the key's list of gradients).
        codes: arrays for codes, which a change of the settings invalidates.
    """

    def __init__(self, arrays: Mapping[tuple[Key, int], NDArray] = MappingProxyType({})) -> None:
        self.arrays = dict(arrays)
        self.codes: dict[tuple[Key, int], NDArray] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in [*list(self.arrays.values()), *list(self.codes.values())])

    def buffers(self, compression: Compression, key: Key, index: int, gradient: NDArray) -> tuple[NDArray, NDArray]:
        """Return (residual, array for the codes) of a gradient, created or moved to the gradient's device."""
        position, context = (key, index), gradient.context
        residual, codes = self.arrays.get(position), self.codes.get(position)
        if residual is None:
            residual, codes = zeros(gradient.shape, ctx=context, dtype=DTYPE), None
        elif residual.context != context:
            residual, codes = residual.as_in_context(context), None
        if codes is None:
            codes = empty((compression.packed_size(gradient.size),), ctx=context, dtype="uint8")
        self.arrays[position], self.codes[position] = residual, codes
        return residual, codes


def _array_module(array: RawArray) -> ModuleType:
    """Return NumPy, or CuPy for an array on a GPU."""
    if isinstance(array, np.ndarray):
        return np
    from weftplan import device

    on_gpu: Any = array
    return device.get(device.gpu(on_gpu.device.id)).xp
