"""Two bits for each element of a gradient, and the rest remembered: what ``set_gradient_compression`` switches on.

The rule is that of MXNet 1.9.1's ``2bit`` (after Seide et al., "1-bit stochastic gradient descent", 2014): what a
gradient adds to the *residual* of its place is sent as +threshold, -threshold or nothing, and taken off the residual.

    residual += gradient
    residual >=  threshold:  send code 11, meaning  threshold;  residual -= threshold
    residual <= -threshold:  send code 10, meaning -threshold;  residual += threshold
    else:                    send code 00, meaning 0

Four codes make a byte, the first in its two highest bits. Everything works in blocks that stay in a core's cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from weftplan.errors import KVStoreError

DTYPE = np.dtype(np.float32)
"""The only dtype that is compressed, as in MXNet."""

_BLOCK = 1 << 16
"""Elements of a block, a multiple of four."""


@dataclass(frozen=True)
class Compression:
    """How gradients travel.

    Attributes:
        threshold: what an element that is sent stands for, above 0; rounded to float32.
    """

    threshold: float = 0.5

    @classmethod
    def from_params(cls, params: Any) -> Compression:
        """From MXNet's dictionary: ``{"type": "2bit", "threshold": 0.5}``; the threshold may be left out.

        Raises:
            KVStoreError: not a dictionary, no type or another one, an unknown entry, or a threshold that is not a
                finite number above 0.
        """
        example = "such as {'type': '2bit', 'threshold': 0.5}"
        if not isinstance(params, Mapping):
            raise KVStoreError(f"compression_params must be a dictionary {example}, got {params!r}")
        unknown = sorted(set(map(str, params)) - {"type", "threshold"})
        if unknown:
            raise KVStoreError(f"compression_params has the unknown entries {unknown}: expected a dictionary {example}")
        if params.get("type") != "2bit":
            raise KVStoreError(f"compression_params must have the type '2bit', {example}; got {dict(params)!r}")
        try:
            threshold = float(np.float32(params.get("threshold", 0.5)))
        except (TypeError, ValueError):
            threshold = 0.0
        if not 0 < threshold < float("inf"):
            raise KVStoreError(
                f"the threshold of a compression must be a finite number above 0, got {params.get('threshold')!r}"
            )
        return cls(threshold)

    def packed_size(self, size: int) -> int:
        """Bytes that ``size`` elements become."""
        return -(-size // 4)

    def pack(self, gradient: Any, residual: Any, packed: Any) -> None:
        """Add a gradient to its residual and send what reaches the threshold.

        Args:
            gradient: float32 array, contiguous, any shape.
            residual: array like it; changed.
            packed: uint8 array of :meth:`packed_size` bytes; overwritten.
        """
        xp = _module(packed)
        gradient, residual = gradient.reshape(-1), residual.reshape(-1)
        up, down = DTYPE.type(self.threshold), DTYPE.type(-self.threshold)
        step = _BLOCK if xp is np else max(4, -(-gradient.size // 4) * 4)
        codes = xp.empty(min(step, packed.size * 4), np.uint8)
        for start in range(0, gradient.size, step):
            rest = residual[start : start + step]
            xp.add(rest, gradient[start : start + step], out=rest)
            above, below = rest >= up, rest <= down
            rest -= above * up
            rest -= below * down
            block = codes[: -(-rest.size // 4) * 4]
            block[rest.size :] = 0
            block[: rest.size] = above * np.uint8(3) + below * np.uint8(2)
            four = block.reshape(-1, 4)
            target = packed[start // 4 : start // 4 + len(four)]
            target[...] = four[:, 0] << 6 | four[:, 1] << 4 | four[:, 2] << 2 | four[:, 3]

    def unpack_sum(self, packed: Sequence[Any], out: Any) -> None:
        """``out[...]`` = the sum of what was sent, from left to right.

        Args:
            packed: at least one array of :meth:`pack`, each of ``out.size`` elements.
            out: float32 array, contiguous; overwritten.
        """
        xp = _module(out)
        flat = out.reshape(-1)
        table = xp.asarray(self._table())
        step = _BLOCK if xp is np else max(4, -(-flat.size // 4) * 4)
        for start in range(0, flat.size, step):
            block = flat[start : start + step]
            taken = slice(start // 4, start // 4 + -(-block.size // 4))
            block[...] = table[packed[0][taken]].reshape(-1)[: block.size]
            for source in packed[1:]:
                block += table[source[taken]].reshape(-1)[: block.size]

    def _table(self) -> Any:
        """The four elements that each byte stands for; code 01 is never sent."""
        shifts = np.array([6, 4, 2, 0], np.uint8)
        codes = np.arange(256, dtype=np.uint8)[:, None] >> shifts & 3
        return np.array([0, 0, -self.threshold, self.threshold], DTYPE)[codes]


def _module(array: Any) -> Any:
    """NumPy, or the module that the array is of."""
    if isinstance(array, np.ndarray):
        return np
    from weftplan import device

    return device.get(device.gpu(array.device.id)).xp
