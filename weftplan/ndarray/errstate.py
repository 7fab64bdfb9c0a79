"""Calling NumPy without warnings of overflow, 1 / 0 and log(0), which MXNet does not give either.

NumPy keeps how it treats them in a context variable. ``numpy.errstate`` sets the variable and sets it back, which takes
longer than the addition of two short arrays; a context in which it is set already is only copied, which shares all that
is in it. Each call gets a copy, because one context cannot be entered twice: by two workers, or by a kernel during
which a destructor runs another.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from typing import Any

import numpy as np

QUIET = contextvars.Context()
"""Invariant: only its copies are entered from here on, so that any number of threads may copy it."""
QUIET.run(np.seterr, all="ignore")


def quietly(fn: Callable[..., object], *args: Any, **out: Any) -> None:
    """``fn(*args, **out)`` as within ``numpy.errstate(all="ignore")``, whatever the thread has set.

    Context variables of the caller have their defaults in it.
    """
    QUIET.copy().run(fn, *args, **out)
