"""How many threads one BLAS call uses: a number that does not depend on the number of workers.

The rule: making the first engine of a process limits BLAS to WEFTPLAN_BLAS_NTHREADS threads, 1 by default; where a user
has set a variable of a BLAS (OPENBLAS_NUM_THREADS, …) and not ours, BLAS stays as it is. OMP_NUM_THREADS is none of
them: containers and scripts for MXNet set it for everything that counts by OpenMP, and who meant no BLAS would get the
contention of 2. below. Parallelism then comes from operations that run side by side. Why 1 and not "CPUs divided by
workers":

1. Bits. A BLAS may add in another order with another thread count, and results must not depend on the workers.
2. Time. Threads of BLAS that compete with workers spin: where all cores were busy, two BLAS threads made the layers of
   a LeNet 2 to 20 times slower than one, and no product of 1024 x 1024 faster.

The limit holds for the process, hence outside the engine too, since that is how OpenBLAS with its own threads (NumPy's
wheels) and MKL count. A BLAS that is loaded after the first engine is not limited. A BLAS on OpenMP counts per thread,
so each worker sets it again.
"""

from __future__ import annotations

import os
from typing import Any

from threadpoolctl import ThreadpoolController

from weftplan import config
from weftplan.locks import Lock, free_in_children

VARIABLE = "WEFTPLAN_BLAS_NTHREADS"
NATIVE = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
"""Variables that BLAS libraries read."""
DECIDING = tuple(name for name in NATIVE if name != "OMP_NUM_THREADS")
"""Those that speak of BLAS alone; a user who sets one has decided."""

_lock = free_in_children(Lock())
_applied = False
_per_thread: list[Any] = []
"""Libraries that count per thread, once limited."""
_limit = 0


def usable_cpus() -> int:
    """CPUs that this process may use (its affinity), which may be fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def planned() -> tuple[int | None, str]:
    """The limit that the first engine sets (None: BLAS stays as it is), and the variable that decides.

    Raises:
        ConfigError: WEFTPLAN_BLAS_NTHREADS is no thread count.
    """
    setting = config.lookup(VARIABLE)
    if setting.origin == "default":
        for name in DECIDING:
            if os.environ.get(name):
                return None, name
    return int(config.process(VARIABLE)), VARIABLE


def limit() -> None:
    """Apply the rule, once per process; later calls do nothing.

    Raises:
        ConfigError: WEFTPLAN_BLAS_NTHREADS is no thread count; nothing has been limited then.
    """
    global _applied, _limit
    if _applied:
        return
    with _lock:
        if _applied:
            return
        threads, _ = planned()
        if threads is not None:
            libraries = ThreadpoolController().select(user_api="blas").lib_controllers
            for library in libraries:
                library.set_num_threads(threads)
            _limit = threads
            _per_thread[:] = [one for one in libraries if getattr(one, "threading_layer", None) == "openmp"]
        _applied = True


def enter_worker() -> None:
    """Called once by each new worker thread: repeats the limit for libraries that count per thread."""
    for library in _per_thread:
        library.set_num_threads(_limit)
