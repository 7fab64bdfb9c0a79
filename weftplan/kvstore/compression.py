"""Gradient compression to one or two bits an element, with residuals: ``set_gradient_compression``.

The rule is that of MXNet's ``2bit`` (1.9.1) and ``1bit`` (2.0), after Seide et al., "1-bit stochastic gradient
descent", 2014: a gradient is added to the *residual* of its place, and the sent value is subtracted from the residual.
``2bit`` sends +threshold, -threshold or 0:

    residual += gradient
    residual >=  threshold:  send code 11, meaning  threshold;  residual -= threshold
    residual <= -threshold:  send code 10, meaning -threshold;  residual += threshold
    else:                    send code 00, meaning 0

Four codes make a byte, the first in its two highest bits. With ``1bit`` it is always 1 or -1:

    residual += gradient
    residual >  threshold:  send code 1, meaning  1;  residual -= 1
    else:                   send code 0, meaning -1;  residual += 1

Eight codes make a byte, the first in its highest bit. Large arrays on the host use compiled loops if llvmlite is
installed (:mod:`weftplan.ops.compiled.exchange.codec`), which several threads share; else NumPy works in blocks that
stay in a core's cache. The bits are the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from weftplan.errors import KVStoreError
from weftplan.kvstore.reduce import BLOCK_BYTES
from weftplan.ops.compiled.exchange import codec
from weftplan.support.array_types import RawArray
from weftplan.support.core_sharing import share_out

DTYPE = np.dtype(np.float32)
"""The only dtype that is compressed, as in MXNet."""

_BLOCK = 1 << 16
"""Elements of a block, a multiple of eight."""

_PER_BYTE = {"2bit": 4, "1bit": 8}
"""Elements that share a byte."""


@dataclass(frozen=True)
class Compression:
    """How gradients travel.

    Attributes:
        threshold: above 0, rounded to float32. With ``2bit`` what an element that is sent stands for; with ``1bit``
            the least residual that is sent as 1.
        kind: ``"2bit"`` or ``"1bit"``.
    """

    threshold: float = 0.5
    kind: str = "2bit"

    @classmethod
    def from_params(cls, params: object) -> Compression:
        """Read MXNet's dictionary: ``{"type": "2bit", "threshold": 0.5}``; the threshold is optional.

        Raises:
            KVStoreError: not a dictionary, a missing or unknown type, an unknown entry, or a threshold that is not a
                finite number above 0.
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
        """Return the bytes that ``size`` elements become."""
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
        """Add a gradient to its residual and write the codes to send.

        Args:
            gradient: float32 array, contiguous, any shape.
            residual: array like it; changed.
            packed: uint8 array of :meth:`packed_size` bytes; overwritten.
            threads, bound, compiled: as for :func:`~weftplan.kvstore.reduce.reduce_arrays`.
        """
        gradient, residual = gradient.reshape(-1), residual.reshape(-1)
        work, size = None, gradient.size
        if compiled and isinstance(packed, np.ndarray) and gradient.nbytes > BLOCK_BYTES:
            work = codec.compiled_pack(gradient, residual, packed, self._bits, self.threshold)
        done = self._share_out(work, size, threads, bound)
        self._pack_slowly(gradient[done:], residual[done:], packed[self.packed_size(done) :])

    @property
    def _bits(self) -> int:
        return 8 // _PER_BYTE[self.kind]

    @staticmethod
    def _share_out(work: codec.Work | None, size: int, threads: int, bound: int) -> int:
        """Let threads do the whole steps of a compiled loop; how many elements they did."""
        done = 0 if work is None else size - size % codec.STEP
        if work is not None:
            share_out(work, done, _BLOCK, threads if size >= bound else 1)
        return done

    def _pack_slowly(self, gradient: RawArray, residual: RawArray, packed: RawArray) -> None:
        xp, share = _module(packed), _PER_BYTE[self.kind]
        codes_of = self._two_bits if self.kind == "2bit" else self._one_bit
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

    def _two_bits(self, rest: RawArray) -> RawArray:
        """Codes of residuals, which lose what is sent."""
        up, down = DTYPE.type(self.threshold), DTYPE.type(-self.threshold)
        above, below = rest >= up, rest <= down
        rest -= above * up
        rest -= below * down
        codes: RawArray = above * np.uint8(3) + below * np.uint8(2)
        return codes

    def _one_bit(self, rest: RawArray) -> RawArray:
        """As :meth:`_two_bits`: 1 above the threshold, 0 elsewhere."""
        above = rest > DTYPE.type(self.threshold)
        rest += DTYPE.type(1) - above * DTYPE.type(2)
        return above.astype(np.uint8)

    def unpack_sum(
        self, packed: Sequence[RawArray], out: RawArray, *, threads: int = 1, bound: int = 1, compiled: bool = True
    ) -> None:
        """Write the sum of the decoded arrays, from left to right, to ``out``.

        Args:
            packed: at least one array of :meth:`pack`, each of ``out.size`` elements.
            out: float32 array, contiguous; overwritten.
            threads, bound, compiled: as for :func:`~weftplan.kvstore.reduce.reduce_arrays`.
        """
        flat, work = out.reshape(-1), None
        if compiled and isinstance(out, np.ndarray) and out.nbytes > BLOCK_BYTES:
            work = codec.compiled_unpack(packed, flat, self._bits, self.threshold)
        done = self._share_out(work, flat.size, threads, bound)
        self._unpack_slowly([source[self.packed_size(done) :] for source in packed], flat[done:])

    def _unpack_slowly(self, packed: Sequence[RawArray], flat: RawArray) -> None:
        xp, share = _module(flat), _PER_BYTE[self.kind]
        table: Any = xp.asarray(self._table()) if flat.size else None
        step = _BLOCK if xp is np else max(share, -(-flat.size // share) * share)
        for start in range(0, flat.size, step):
            block = flat[start : start + step]
            taken = slice(start // share, start // share + -(-block.size // share))
            block[...] = table[packed[0][taken]].reshape(-1)[: block.size]
            for source in packed[1:]:
                block += table[source[taken]].reshape(-1)[: block.size]

    def _table(self) -> RawArray:
        """The elements that each byte stands for; code 01 of two bits is never sent."""
        share = _PER_BYTE[self.kind]
        shifts = np.arange(8 - 8 // share, -1, -(8 // share), dtype=np.uint8)
        codes = np.arange(256, dtype=np.uint8)[:, None] >> shifts & (2 ** (8 // share) - 1)
        meanings = [0, 0, -self.threshold, self.threshold] if self.kind == "2bit" else [-1, 1]
        elements: RawArray = np.array(meanings, DTYPE)[codes]
        return elements


def _module(array: RawArray) -> ModuleType:
    """NumPy, or the module that the array is of."""
    if isinstance(array, np.ndarray):
        return np
    from weftplan import device

    on_gpu: Any = array
    return device.get(device.gpu(on_gpu.device.id)).xp
