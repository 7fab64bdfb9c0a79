"""Calls in the middle of others, on the same thread, as a finalizer makes them.

CPython runs a garbage collection, hence any finalizer, at an allocation (3.11), or at the start of a Python function
and after a call of a C function (3.12 and later). A call from a profile function there stands for all of them.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Collection
from types import FrameType


def run_with(
    files: Collection[str | None], step: int, nested: Callable[[], object], outer: Callable[[], object]
) -> bool:
    """Run ``outer``, and ``nested`` at its point ``step``, from 1, within ``files``; False if it has fewer points."""
    left = [step]

    def profile(frame: FrameType, event: str, _: object) -> None:
        if frame.f_code.co_filename in files and event != "c_call":
            left[0] -= 1
            if not left[0]:
                sys.setprofile(None)
                nested()

    gc.disable()
    sys.setprofile(profile)
    try:
        outer()
    finally:
        sys.setprofile(None)
        gc.enable()
    return left[0] <= 0
