"""The search kernel compiled by numba, when the ``fast`` extra is installed.

The same source as :mod:`weftplan.planner.packing.hard.kernel`; only ``search`` is called from Python. numba is imported
at the first request, because importing and compiling it costs seconds.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache
from inspect import isfunction

from weftplan.planner.packing.hard import kernel
from weftplan.planner.packing.hard.kernel import Ints, Tables

Search = Callable[[Tables, Tables, Tables, Ints, Ints, int, int, int], tuple[int, int]]


def available() -> bool:
    """Whether numba can be imported (without importing it)."""
    return importlib.util.find_spec("numba") is not None


@cache
def search() -> Search:
    """The compiled `kernel.search`; it takes int64 arrays where the plain one takes lists.

    Raises:
        ImportError: numba is missing; install ``weftplan[fast]``.
    """
    import numba
    from numba.extending import register_jitable

    for helper in vars(kernel).values():
        if isfunction(helper) and helper is not kernel.search:
            register_jitable(helper)
    # The helpers stay plain Python functions for every other caller: register_jitable only tells numba about them.
    compiled: Search = numba.njit(cache=True)(kernel.search)
    return compiled
