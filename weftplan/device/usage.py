"""Utilisation of the CPU by this process, and of its GPUs as reported by NVIDIA's management library (NVML).

GPUs are queried through ``pynvml`` (package ``nvidia-ml-py``) if it is installed and the driver answers. CUDA and NVML
may number GPUs differently, so GPUs are matched by PCI bus address. A :class:`Usage` may be used by one thread only.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from weftplan.device.context import Context
from weftplan.device.registry import get


class Usage:
    """Utilisation of the host and of the GPUs among ``contexts`` between two calls of :meth:`figures`."""

    def __init__(self, contexts: Sequence[Context]) -> None:
        self._at, self._busy = time.perf_counter(), _cpu_seconds()
        self._library: Any = None
        self._handles: dict[str, Any] = {}
        gpus = [context for context in dict.fromkeys(contexts) if context.device_type == "gpu"]
        if gpus:
            self._open(gpus)

    def _open(self, gpus: Sequence[Context]) -> None:
        """Get the NVML handle of each GPU; after any failure no GPU is watched."""
        try:
            library = importlib.import_module("pynvml")
            library.nvmlInit()
            for context in gpus:
                address = get(context).xp.cuda.runtime.deviceGetPCIBusId(context.device_id)
                self._handles[str(context)] = library.nvmlDeviceGetHandleByPciBusId(address)
        except Exception:  # ImportError, or the exception classes of pynvml or CuPy
            self._handles.clear()
            return
        self._library = library

    def figures(self) -> dict[str, object]:
        """Return ``cpu``, the average number of cores that this process used since the last call, and ``gpus``.

        ``gpus`` has for each watched GPU ``busy`` (recent percentage of time with a running kernel), ``bytes`` (in use
        by all processes) and ``watts``. Figures that a GPU does not support are absent, and so is an empty ``gpus``.
        """
        time_s, busy = time.perf_counter(), _cpu_seconds()
        usage: dict[str, Any] = {"cpu": round((busy - self._busy) / max(time_s - self._at, 1e-9), 3)}
        self._at, self._busy = time_s, busy
        gpus = {name: answer for name, handle in self._handles.items() if (answer := self._ask(handle))}
        return {**usage, "gpus": gpus} if gpus else usage

    def _ask(self, handle: Any) -> dict[str, float]:
        """Return the figures of one GPU, without those that it does not support."""
        library = self._library
        answers: dict[str, float] = {}
        questions: dict[str, Callable[[], float]] = {
            "busy": lambda: int(library.nvmlDeviceGetUtilizationRates(handle).gpu),
            "bytes": lambda: int(library.nvmlDeviceGetMemoryInfo(handle).used),
            "watts": lambda: round(library.nvmlDeviceGetPowerUsage(handle) / 1000, 1),
        }
        for name, question in questions.items():
            try:
                answers[name] = question()
            except library.NVMLError:
                continue
        return answers


def _cpu_seconds() -> float:
    """Return the CPU seconds used by this process and its terminated children."""
    return sum(os.times()[:4])
