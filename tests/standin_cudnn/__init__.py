"""A strict stand-in for ``cudnn`` of nvidia-cudnn-frontend 1.32, based on the stand-in for CuPy.

README.md has its rules.
"""

from __future__ import annotations

import contextlib
import enum
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

from tests.standin_cudnn.graph import Graph, NotSupported, Plan, recommended
from tests.standin_cupy.machine import ids, machine, thread
from weftplan.kernels.cuda import cudnn_algorithms

__all__ = ["Plan", "cudnn", "recommended"]

NUMERICAL = ("TENSOR_CORE", "DOWN_CONVERT_INPUTS", "REDUCED_PRECISION_REDUCTION", "FFT", "NONDETERMINISTIC", "WINOGRAD")
DATA = ("FLOAT", "DOUBLE", "HALF", "BFLOAT16")


class Handle:
    """``cudnn.Handle`` of the thread that creates it and of its current device."""

    def __init__(self) -> None:
        machine.check()
        self.device, self.stream, self.thread = thread.device, 0, threading.get_ident()
        self.backend_handle = next(ids)


def _set_stream(handle: Handle, stream: int) -> None:
    if not isinstance(handle, Handle):
        raise TypeError(f"cudnn.set_stream expects a cudnn.Handle (from cudnn.create_handle()), got {type(handle)}")
    if type(stream) is not int:
        raise TypeError(f"a stream is an address, got {stream!r}")
    handle.stream = stream


@contextlib.contextmanager
def cudnn() -> Iterator[types.ModuleType]:
    """Install the stand-in as ``cudnn``; clear cached algorithm choices before and after."""
    module: Any = types.ModuleType("cudnn")
    module.data_type = enum.Enum("data_type", list(DATA))
    module.numerical_note = enum.Enum("numerical_note", list(NUMERICAL))
    module.heur_mode = enum.Enum("heur_mode", ["A", "B", "FALLBACK"])
    module.build_plan_policy = enum.Enum("build_plan_policy", ["HEURISTICS_CHOICE", "ALL"])
    module.cudnnGraphNotSupportedError = NotSupported
    module.backend_version = lambda: machine.library("cuDNN") or 92800
    module.create_handle = Handle
    module.set_stream = _set_stream
    module.pygraph = type("pygraph", (Graph,), {"cudnn": module})
    before = sys.modules.get("cudnn")
    sys.modules["cudnn"] = module
    cudnn_algorithms.forget()
    try:
        yield module
    finally:
        cudnn_algorithms.forget()
        if before is None:
            del sys.modules["cudnn"]
        else:
            sys.modules["cudnn"] = before
