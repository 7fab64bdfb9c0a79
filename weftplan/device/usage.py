"""How busy the processors are: cores that this process keeps busy, and its GPUs by NVIDIA's management library.

GPUs are asked through ``pynvml`` (package ``nvidia-ml-py``), if it is installed and the driver answers. CUDA and that
library may number GPUs differently, so each is found by its address on the bus. A :class:`Usage` is used by one thread.
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
    """The use of the host and of these devices, from one question to the next."""

    def __init__(self, contexts: Sequence[Context]) -> None:
        self._at, self._busy = time.perf_counter(), _cpu_seconds()
        self._library: Any = None
        self._handles: dict[str, Any] = {}
        gpus = [context for context in dict.fromkeys(contexts) if context.device_type == "gpu"]
        if gpus:
            self._open(gpus)

    def _open(self, gpus: Sequence[Context]) -> None:
        """Find the GPUs; without the library, or if it knows none of them, none is watched."""
        try:
            library = importlib.import_module("pynvml")
            library.nvmlInit()
            for context in gpus:
                address = get(context).xp.cuda.runtime.deviceGetPCIBusId(context.device_id)
                self._handles[str(context)] = library.nvmlDeviceGetHandleByPciBusId(address)
        except Exception:  # ImportError, the library's own classes, those of CuPy
            self._handles.clear()
            return
        self._library = library

    def figures(self) -> dict[str, object]:
        """Return ``cpu``, the average cores that this process kept busy since the last call, and ``gpus``: for each
        watched GPU the recent percentage of kernel time, bytes in use by all processes, and watts."""
        now, busy = time.perf_counter(), _cpu_seconds()
        usage: dict[str, Any] = {"cpu": round((busy - self._busy) / max(now - self._at, 1e-9), 3)}
        self._at, self._busy = now, busy
        gpus = {name: answer for name, handle in self._handles.items() if (answer := self._ask(handle))}
        return {**usage, "gpus": gpus} if gpus else usage

    def _ask(self, handle: Any) -> dict[str, float]:
        """Return the library's figures of one GPU; cards do not support every figure."""
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
    """Processor time of this process, and of its children that have ended."""
    return sum(os.times()[:4])
