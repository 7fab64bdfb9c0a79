"""When small work uses the inner loops of NumPy instead of its functions (``ops/core/inner_loops.py``).

What calls the loops is compiled, and to import the compiler takes longer than thousands of calls. So it begins when a
process has made that many, in a thread of its own, while calls go on as they are: the bits are the same, so it makes no
difference when that thread ends. A thread that does nothing but small calls would hardly ever let it have the
interpreter (it took 0.7 s instead of 0.05), so calls make short pauses for it meanwhile. Each kind of work is tried
once, on what NumPy has just computed, and leaves NumPy's functions only if it found the same.

With ``WEFTPLAN_KERNELS=numpy``, or where nothing can be compiled, nothing of that happens.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from weftplan import config
from weftplan.errors import MXNetError
from weftplan.locks import Lock, whole_in_children
from weftplan.ops.core.inner_loops import Loops

CALLS = 4096
"""Small calls of a process after which the compiler is worth its 50 ms: they have lost 10 to 20 ms."""
PAUSE_S, BETWEEN = 0.002, 256
"""Seconds of a pause, calls from one to the next."""
_left = CALLS
_loader: threading.Thread | None = None
_compiled: Callable[[Loops], Callable[..., object] | None] | None = None
"""What makes the functions, once it is there."""
_loading = whole_in_children(Lock())


def replacement(loops: Loops, inputs: Sequence[Any], result: Any) -> Callable[..., object] | Literal[False] | None:
    """What does the work of a call that NumPy has just made, as a function of raw inputs and the raw result.

    Returns:
        None: not yet known; False: there is none.
    """
    global _left, _loader
    if _compiled is None:
        left = _left = _left - 1  # two threads may see the same number, but none passes over 0
        if left == 0:
            # Not a daemon: the process must not end while the compiler works.
            loader = threading.Thread(target=load, name="weftplan loads small kernels")
            with contextlib.suppress(RuntimeError):  # the interpreter ends
                loader.start()
                _loader = loader
        elif left < 0 and not left % BETWEEN and _loader is not None:
            _loader.join(PAUSE_S)
            if not _loader.is_alive():
                _loader = None
        return None
    call = _compiled(loops)
    if call is None:
        return False
    found = np.empty_like(result)
    call(*inputs, found)
    return call if found.tobytes() == result.tobytes() else False


def load() -> None:
    """Import the compiler and make the function that calls loops, now; nothing where that is not wanted or possible."""
    global _compiled
    if config.get("WEFTPLAN_KERNELS") == "numpy":
        return
    with _loading:  # who forks meanwhile waits, so that a child finds nothing half imported
        from weftplan.ops.compiled import loops as compiled

        with contextlib.suppress(MXNetError, RuntimeError, OSError):
            if not compiled.refusal():
                compiled.prepare()
                _compiled = compiled.compiled
