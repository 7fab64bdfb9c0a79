"""Sums of several arrays on one GPU with a single kernel launch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from weftplan import device
from weftplan.support.array_types import RawArray


def sum_in_single_launch(sources: Sequence[RawArray], out: RawArray) -> None:
    """Enqueue on the current stream: write the sum of ``sources``, from left to right, to ``out``.

    Half precision is added in float32 and rounded once.

    Args:
        sources: CuPy arrays of one shape and dtype, on the device of ``out``.
        out: CuPy array; may be one of ``sources``.
    """
    on_gpu: Any = out
    xp = device.get(device.gpu(on_gpu.device.id)).xp
    halves = out.dtype.itemsize == 2 and out.dtype.kind not in "iu"
    _kernel(xp, len(sources), halves)(*sources, out)


@functools.lru_cache(maxsize=64)
def _kernel(xp: ModuleType, count: int, halves: bool) -> Callable[..., object]:
    """Return the kernel that sums ``count`` arrays; if ``halves``, it adds in float32.

    Each thread reads all terms of its element before it writes ``y``, so ``y`` may be one of the terms.
    """
    names = [f"x{i}" for i in range(count)]
    terms = [f"float({name})" if halves else name for name in names]
    kernel: Callable[..., object] = xp.ElementwiseKernel(
        ", ".join(f"T {name}" for name in names), "T y", f"y = {' + '.join(terms)}", f"weftplan_sum_{count}"
    )
    return kernel
