"""Number of threads of a BLAS call, independent of the number of workers.

The first engine of a process limits BLAS to WEFTPLAN_BLAS_NTHREADS threads, 1 by default. If the user has set a
variable that concerns BLAS alone (OPENBLAS_NUM_THREADS, …) and has not set ours, BLAS stays unchanged. OMP_NUM_THREADS
does not count as such a variable: containers and MXNet scripts set it for all OpenMP code, often without BLAS in mind,
and would cause the contention of point 2. With the limit, parallelism comes from operations that run concurrently. The
limit is 1 rather than "CPUs divided by workers" for two reasons:

1. Bits. A BLAS may sum in a different order with another thread count, and results must not depend on the workers.
2. Time. BLAS threads spin and compete with workers. With all cores busy, two BLAS threads made the layers of a LeNet 2
   to 20 times slower than one thread, and made no product of 1024 x 1024 faster.

The limit holds for the whole process, also outside the engine, because OpenBLAS with its own threads (NumPy's wheels)
and MKL have one process-wide count. A BLAS that is loaded after the first engine is not limited. An OpenMP BLAS has one
count per thread, so each worker sets it again.
"""

from __future__ import annotations

import os
from typing import Any

from weftplan import config
from weftplan.locks import ReentrantLock, free_in_children
from weftplan.support import control_groups

VARIABLE = "WEFTPLAN_BLAS_NTHREADS"
NATIVE = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
"""Variables that BLAS libraries read."""
DECIDING = tuple(name for name in NATIVE if name != "OMP_NUM_THREADS")
"""Variables that concern BLAS alone; if one is set, the user has decided."""

_lock = free_in_children(ReentrantLock())
"""Guards the application of the rule. Reentrant: applying it again, in a finalizer's engine, changes nothing."""


class _Rule:
    """The limit, once the first engine has applied it."""

    def __init__(self) -> None:
        self.applied = False
        self.limit = 0
        self.per_thread: list[Any] = []
        """Limited libraries that keep one thread count per thread."""


_rule = _Rule()


def usable_cpus() -> int:
    """Return the number of CPUs in this process's affinity mask, or the quota of its control groups if it is lower."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cpus, control_groups.cpu_quota() or cpus)


def planned() -> tuple[int | None, str]:
    """Return the limit that the first engine sets (None: BLAS stays unchanged), and the variable that decides.

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
        ConfigError: WEFTPLAN_BLAS_NTHREADS is no thread count; no library has been limited then.
    """
    if _rule.applied:
        return
    with _lock:
        if _rule.applied:
            return
        threads, _ = planned()
        if threads is not None:
            from threadpoolctl import ThreadpoolController

            libraries = ThreadpoolController().select(user_api="blas").lib_controllers
            for library in libraries:
                library.set_num_threads(threads)
            _rule.limit = threads
            _rule.per_thread = [
                library for library in libraries if getattr(library, "threading_layer", None) == "openmp"
            ]
        _rule.applied = True


def enter_worker() -> None:
    """Repeat the limit for libraries that count per thread; each new worker thread calls this once."""
    for library in _rule.per_thread:
        library.set_num_threads(_rule.limit)
