"""The sum of several arrays of one GPU, in one launch on the current stream."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from weftplan import device
from weftplan.support.array_types import RawArray


def sum_in_one_launch(sources: Sequence[RawArray], out: RawArray) -> None:
    """Write the sum from left to right to ``out``; half precision is added in float32 and rounded once.

    Args:
        sources: arrays of CuPy of one shape and dtype, on the device of ``out``.
        out: another array, or ``sources[0]`` itself.
    """
    on_gpu: Any = out  # of CuPy
    xp = device.get(device.gpu(on_gpu.device.id)).xp
    halves = out.dtype.itemsize == 2 and out.dtype.kind not in "iu"
    _kernel(xp, len(sources), halves)(*sources, out)


@functools.lru_cache(maxsize=64)
def _kernel(xp: ModuleType, count: int, halves: bool) -> Callable[..., object]:
    """Each element is read once and written once; ``y`` is assigned the last, so it may be ``x0``."""
    names = [f"x{i}" for i in range(count)]
    terms = [f"float({name})" if halves else name for name in names]
    kernel: Callable[..., object] = xp.ElementwiseKernel(
        ", ".join(f"T {name}" for name in names), "T y", f"y = {' + '.join(terms)}", f"weftplan_sum_{count}"
    )
    return kernel
