"""Model the seconds of operators by floating-point operations, bytes moved, elements of functions, and a constant.

The rates of a device are measured once per machine, number of threads and dtype, and stored in the user's cache folder.
The model is good enough to choose which results to recompute, not to predict the time of a whole step.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from weftplan.support import user_cache
from weftplan.torch.private import tensors_in, without_modes

FUNCTIONS = ("gelu", "silu", "mish", "tanh", "sigmoid", "softmax", "softplus", "elu", "exp", "log", "erf", "pow")
"""Parts of names of operators that compute an elementary function of each element."""
SIDE, COPIED = 512, 32 << 20
"""Rows of the square matrices and bytes of the copy that are timed."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Measured speeds of a device."""

    flops: float
    bandwidth: float
    """Bytes read or written per second."""
    call: float
    """Seconds of the smallest operator."""
    function: float
    """Seconds of an elementary function of one element, beyond those of the bytes that it moves."""

    def seconds(self, flops: float, moved: float, functions: int = 0) -> float:
        """Return the seconds of a call with ``flops`` operations that reads and writes ``moved`` bytes.

        ``functions`` is the number of elements of which it computes an elementary function.
        """
        return flops / self.flops + moved / self.bandwidth + functions * self.function + self.call


def rates(device: torch.device, dtype: torch.dtype = torch.float32) -> Rates:
    """Return the rates of a device for a dtype, measured once per machine."""
    threads = torch.get_num_threads() if device.type == "cpu" else 0
    return _rates(device.type, device.index or 0, threads, dtype)


@lru_cache(maxsize=64)
def _rates(kind: str, index: int, threads: int, dtype: torch.dtype) -> Rates:
    device = torch.device(kind, index) if kind != "cpu" else torch.device("cpu")
    machine = torch.cuda.get_device_name(device) if kind == "cuda" else f"{threads} threads"
    name = user_cache.key("rates 3", torch.__version__, kind, machine, str(dtype))
    stored = user_cache.load(user_cache.folder("torch"), name)
    if stored:
        return Rates(**json.loads(stored))
    measured = _measured(device, dtype)
    user_cache.keep(user_cache.folder("torch"), name, json.dumps(asdict(measured)).encode())
    return measured


def _measured(device: torch.device, dtype: torch.dtype) -> Rates:
    with torch.no_grad(), without_modes():
        a = torch.ones(SIDE, SIDE, dtype=dtype, device=device)
        big = torch.ones(COPIED // dtype.itemsize, dtype=dtype, device=device)
        out, small = torch.empty_like(big), torch.ones(1, device=device)
        product, copy = least(lambda: a @ a), least(lambda: out.copy_(big))
        function = max(0.0, least(lambda: torch.nn.functional.gelu(big)) - copy) / big.numel()
        return Rates(2.0 * SIDE**3 / product, 2.0 * COPIED / copy, least(lambda: small + small), function)


def least(work: Callable[[], object], repeats: int = 7) -> float:
    """Return the seconds of the fastest of ``repeats`` calls."""
    best, card = float("inf"), torch.cuda.is_available()
    for _ in range(repeats):
        began, used = time.perf_counter(), time.process_time()
        work()
        if card:
            torch.cuda.synchronize()
        wall, used = time.perf_counter() - began, time.process_time() - used
        # On a busy machine a call of one thread waits for its core, which its processor time leaves out.
        best = min(best, wall if card else min(wall, used))
    return best


def modelled(target: Any, args: Any, kwargs: Any, out: Any) -> float:
    """Return the modelled seconds of a call, given its arguments and its result as real or fake tensors."""
    tensors = tensors_in((args, kwargs, out))
    if not tensors:
        return 0.0
    moved = sum(t.numel() * t.element_size() for t in tensors)
    packet = getattr(target, "overloadpacket", None)
    name = getattr(packet, "__name__", "")
    # PyTorch counts operations of attention only for the kernels of cards, whose arguments are the same.
    formula = flop_registry.get(getattr(torch.ops.aten, name.replace("_for_cpu", ""), packet))
    flops = 0.0
    with suppress(TypeError, ValueError, AssertionError, NotImplementedError):  # a formula for other arguments
        flops = float(formula(*args, **kwargs, out_val=out)) if formula else 0.0
    functions = tensors[-1].numel() if any(part in name for part in FUNCTIONS) else 0
    floating = [t.dtype for t in tensors if t.dtype.is_floating_point]
    return rates(tensors[0].device, floating[0] if floating else torch.float32).seconds(flops, moved, functions)
