"""NumPy calls without warnings of overflow, 1 / 0 and log(0), as in MXNet.

NumPy keeps its error state in a context variable. ``numpy.errstate`` sets and resets the variable, which takes longer
than the addition of two short arrays. Copying a context in which the variable is already set is cheap, since the copy
shares its contents. Each call gets its own copy, because a context cannot be entered twice: by two workers, or by a
kernel during which a destructor runs another kernel.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable

import numpy as np

QUIET = contextvars.Context()
"""A context in which NumPy ignores floating-point errors.

Invariant: after the next line only copies of it are entered, so any number of threads may use copies concurrently.
"""
QUIET.run(np.seterr, all="ignore")


def quietly(fn: Callable[..., object], *args: object, **out: object) -> None:
    """Call ``fn(*args, **out)`` as within ``numpy.errstate(all="ignore")``, whatever the thread has set.

    Context variables of the caller have their default values inside.
    """
    QUIET.copy().run(fn, *args, **out)
