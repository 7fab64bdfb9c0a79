"""Measure the scratch bytes and the seconds of single operators on real tensors.

A trace does not see the scratch of a kernel. It depends on operator, arguments and machine, so each call is run once
per machine, on made-up tensors of the traced shapes. Results are stored in the user's cache folder.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from weftplan.support import user_cache
from weftplan.support.progress import Progress
from weftplan.support.quiet_stderr import without_stderr
from weftplan.torch.private import FakeTensor, memory_events, profiler_enabled, tensors_in, tree_map, without_modes
from weftplan.torch.seconds import least
from weftplan.torch.trace import KernelBytes

OPAQUE = ("miopen", "cudnn", "workspace", "reserve", "quantized", "sparse", "fbgemm", "nested")
"""Parts of names of operators that may crash on made-up values. These are not run, and their scratch is unseen."""
MOST_BYTES = 4 << 30
"""Maximum bytes of the arguments of a call that is run."""


@dataclass
class Probes:
    """Measurements of calls."""

    run: bool = True
    """Whether calls without a stored measurement are run."""
    unseen: dict[str, int] = field(default_factory=dict)
    """Number of calls of each operator whose scratch is unknown."""
    progress: Progress | None = None
    """Counts the measured calls on the terminal."""
    _known: dict[str, dict[str, Any]] = field(default_factory=dict)

    def kernel(self, target: Any, args: Any, kwargs: Any) -> KernelBytes:
        """Return the measured bytes of a call: nothing if they are unknown."""
        value = self._value(target, args, kwargs, "kernel", _kernel)
        if value is None:
            name = str(target)
            self.unseen[name] = self.unseen.get(name, 0) + 1
            return KernelBytes()
        return KernelBytes(*value)

    def seconds(self, target: Any, args: Any, kwargs: Any) -> float | None:
        """Return the seconds of a call; None if unknown."""
        value: float | None = self._value(target, args, kwargs, "seconds", _seconds)
        return value

    def _value(self, target: Any, args: Any, kwargs: Any, what: str, measure: Callable[[Any, Any, Any], Any]) -> Any:
        name = _cache_key(target, args, kwargs)
        if name not in self._known:
            stored = user_cache.load(user_cache.folder("torch"), name)
            self._known[name] = json.loads(stored) if stored else {}
        facts = self._known[name]
        # A nested profiler would end the outer profiler.
        able = self.run and not profiler_enabled() and _is_safe(target)
        if what not in facts and able and _bytes(args, kwargs) <= MOST_BYTES:
            try:
                with without_modes(), torch.random.fork_rng(enabled=True):
                    facts[what] = measure(target, *_real_arguments(target, args, kwargs))
                if self.progress is not None:
                    self.progress.step()
            except Exception:
                return None  # the operator cannot run on made-up values; its scratch is reported as unseen
            user_cache.keep(user_cache.folder("torch"), name, json.dumps(facts).encode())
        return facts.get(what)


def measuring() -> Progress:
    """Return the progress line of measurements, for the option of :class:`Probes` and a ``with`` block around them."""
    return Progress("measuring kernels of PyTorch, once on this machine", unit="kernels")


def _cache_key(target: Any, args: Any, kwargs: Any) -> str:
    def text(value: Any) -> str:
        if isinstance(value, torch.Tensor):
            extent, offset = value.untyped_storage().nbytes(), value.storage_offset()
            view = f"{offset}/{extent}" if offset or extent != _span(value) else ""
            return f"{tuple(value.shape)}{value.stride()}{value.dtype}{value.device}{value.is_conj() or ''}{view}"
        return repr(value)

    device = next((t.device for t in tensors_in((args, kwargs))), torch.device("cpu"))
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else str(torch.get_num_threads())
    return user_cache.key("kernel 3", torch.__version__, machine, str(target), str(tree_map(text, (args, kwargs))))


def _span(tensor: torch.Tensor) -> int:
    """Return the bytes of the smallest storage for a tensor at offset 0."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.itemsize * (1 + sum((size - 1) * stride for size, stride in steps)) if tensor.numel() else 0


def _is_safe(target: Any) -> bool:
    """Return whether an operator can run on made-up values: it is PyTorch's own and its name has no part in OPAQUE."""
    return getattr(target, "namespace", "") == "aten" and not any(word in str(target) for word in OPAQUE)


def _bytes(args: Any, kwargs: Any) -> int:
    return sum(t.untyped_storage().nbytes() for t in tensors_in((args, kwargs)))


def _with_workspace(*args: Any) -> tuple[Any, ...]:
    """Return the arguments of a recurrent layer's backward operator with the workspace of a forward call."""
    reverse, mode, hidden, layers, biases, train, both, sizes, first = args[13:22]
    options = (reverse, sizes, mode, hidden, layers, biases, both, first, train)
    with torch.enable_grad():  # without it the layer makes no workspace
        return *args[:22], torch.ops.aten.mkldnn_rnn_layer(*args[:7], *options)[3]


COMPLETED = {"aten.mkldnn_rnn_layer_backward.default": _with_workspace}
"""Operators with an argument that only another operator makes: functions that replace it in made-up arguments."""


def _real_arguments(target: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return the arguments with real tensors for fake ones: 0.5, 0 for integers, which may be indices, and True.

    A view lies in a storage as large as the traced one, because operators that keep strides, such as ``aten.copy`` and
    ``aten.slice_scatter``, copy the whole storage.
    """

    def made(value: Any) -> Any:
        if not isinstance(value, FakeTensor):
            # A real tensor is a constant of the caller, which an operator may write to.
            return value.detach().clone() if isinstance(value, torch.Tensor) else value
        nbytes = max(value.untyped_storage().nbytes(), value.storage_offset() * value.itemsize + _span(value))
        whole = torch.empty(nbytes // value.itemsize, dtype=value.dtype, device=value.device)
        whole.fill_(0.5 if whole.dtype.is_floating_point or whole.dtype.is_complex else whole.dtype is torch.bool)
        out = whole.as_strided(value.shape, value.stride(), value.storage_offset())
        return out.conj() if value.is_conj() else out

    positional, keywords = tree_map(made, (args, kwargs))
    complete: Callable[..., Any] = COMPLETED.get(str(target), lambda *given: given)
    return complete(*positional), keywords


def _kernel(target: Any, args: Any, kwargs: Any) -> KernelBytes:
    """Return the larger of two measurements, because the profiler sometimes loses an event."""
    return max(kernel_once(target, args, kwargs) for _ in range(2))


def kernel_once(target: Any, args: Any, kwargs: Any) -> KernelBytes:
    """Return the measured bytes of a call on real tensors."""
    device = next((t.device for t in tensors_in((args, kwargs))), torch.device("cpu"))
    before = {t.untyped_storage().data_ptr() for t in tensors_in((args, kwargs))}
    with torch.set_grad_enabled("rnn_layer" in str(target)):
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            start = torch.cuda.memory_allocated(device)
            out = target(*args, **kwargs)
            peak = torch.cuda.max_memory_allocated(device) - start
        else:
            profiling = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
            with without_stderr(), profiling as prof, record_function("call"):  # PyTorch 2.13 writes lines there
                out = target(*args, **kwargs)
            peak = peak_of(prof, "call")
    buffers = [t.untyped_storage() for t in tensors_in(out) if not t._is_zerotensor()]
    # A kernel may return a small result in a larger buffer, as the CPU's losses do; the buffer lives with the result.
    nbytes = [0 if buffer.data_ptr() in before else buffer.nbytes() for buffer in buffers]
    results = {buffer.data_ptr(): n for buffer, n in zip(buffers, nbytes, strict=True)}
    return KernelBytes(max(0, int(peak - sum(results.values()))), nbytes or [0] * len(tensors_in(out)))


def _seconds(target: Any, args: Any, kwargs: Any) -> float:
    with torch.no_grad():
        return least(lambda: target(*args, **kwargs), repeats=3)


def peak_of(prof: Any, label: str) -> int:
    """Return the peak bytes of the CPU allocations of a profile, during and after the range ``label``."""
    events = memory_events(prof)
    start = min(e.start_ns() for e in events if e.name() == label)
    total = most = 0
    for e in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        if e.start_ns() >= start:
            most = max(most, total)
        total += e.nbytes()
        if e.start_ns() >= start:
            most = max(most, total)
    return int(most)
