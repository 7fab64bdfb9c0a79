"""Contexts: names of devices, such as ``gpu(0)``, that store arrays and run operations.

A context is a hashable, comparable, picklable value. Creating a context touches no hardware, so ``gpu(3)`` is legal on
a machine without a GPU; :func:`weftplan.device.get` creates the device on first use. The current context is
thread-local.
"""

from __future__ import annotations

import operator
import re
import threading
from typing import ClassVar, SupportsIndex

from weftplan.errors import DeviceError
from weftplan.support import slots

_WRITTEN = re.compile(r"([a-z_]+)\(([0-9]+)\)")
_DEVICE_TYPES = {"cpu": 1, "gpu": 2, "cpu_pinned": 3, "sim": 6, "file": 7}

HOST_MEMORY = ("cpu", "cpu_pinned")
"""Device types whose memory is the host's own."""


class _Current:
    """Stand-in for MXNet's thread-local ``_default_ctx``: ``value`` reads and sets this thread's current context."""

    __slots__ = ()

    @property
    def value(self) -> Context:
        return Context.default_ctx

    @value.setter
    def value(self, ctx: Context) -> None:
        Context.default_ctx = ctx


class _Defaults(type):
    """Metaclass of :class:`Context` with MXNet's class property ``Context.default_ctx``."""

    _default_ctx = _Current()
    """``mx.test_utils.set_default_context`` of MXNet 1.9.1 sets ``value`` of this object."""

    @property
    def default_ctx(cls) -> Context:
        """The current context of this thread.

        Setting it replaces the context of the innermost ``with ctx:``, or this thread's default outside of any.
        """
        return current_context()

    @default_ctx.setter
    def default_ctx(cls, ctx: Context) -> None:
        if not isinstance(ctx, Context):
            raise DeviceError(f"Context.default_ctx must be a context such as mx.cpu(), got {ctx!r}")
        _stack()[-1] = ctx


class Context(metaclass=_Defaults):
    """A device type and an index, such as ``Context("cpu", 1)``; ``Context(ctx)`` equals the context ``ctx``.

    Inside ``with ctx:`` it is the current context of this thread:

    >>> with Context("cpu", 1):
    ...     current_context()
    cpu(1)
    """

    device_type: str
    device_id: int
    devtype2str: ClassVar[dict[int, str]] = {code: name for name, code in _DEVICE_TYPES.items()}
    devstr2type: ClassVar[dict[str, int]] = dict(_DEVICE_TYPES)

    def __init__(self, device_type: str | Context, device_id: SupportsIndex = 0) -> None:
        if isinstance(device_type, Context):
            device_id, device_type = device_type.device_id, device_type.device_type
        if not isinstance(device_type, str) or device_type not in _DEVICE_TYPES:
            raise DeviceError(f"unknown device type {device_type!r}: expected one of {', '.join(_DEVICE_TYPES)}")
        try:
            truth = isinstance(device_id, bool) or str(getattr(device_id, "dtype", "")) == "bool"
            index = -1 if truth else operator.index(device_id)
        except TypeError:
            index = -1
        if index < 0:
            raise DeviceError(f"device index of {device_type} must be an integer >= 0, got {device_id!r}")
        self.device_type = device_type
        self.device_id = index
        self._hash = hash((device_type, index))

    @classmethod
    def parse(cls, text: str) -> Context:
        """Return the context whose ``str`` is ``text``, ignoring surrounding spaces.

        >>> Context.parse("gpu(1)")
        gpu(1)

        Raises:
            DeviceError: the text does not name a context.
        """
        match = _WRITTEN.fullmatch(text.strip())
        if match is None:
            raise DeviceError(f"{text!r} is no context: expected one such as cpu(0) or gpu(1)")
        return cls(match[1], int(match[2]))

    @property
    def device_typeid(self) -> int:
        """MXNet's code of the device type: 1 cpu, 2 gpu, 3 cpu_pinned. Not in MXNet: 6 sim, 7 file."""
        return _DEVICE_TYPES[self.device_type]

    @property
    def is_host(self) -> bool:
        """True if NumPy can access memory of this context: every device type except ``gpu``."""
        return self.device_type != "gpu"

    @property
    def has_streams(self) -> bool:
        """True for the device types with asynchronous streams: ``gpu`` and ``sim``."""
        return self.device_type in ("gpu", "sim")

    def empty_cache(self) -> int:
        """Release the unused memory in this context's pool to the system; return the number of bytes."""
        empty = slots.EMPTY_CACHE.value
        return 0 if empty is None else empty(self)  # without storage there is no pool

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, Context) and self.device_id == other.device_id and self.device_type == other.device_type
        )

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return f"{self.device_type}({self.device_id})"

    def __reduce__(self) -> tuple[type[Context], tuple[str, int]]:
        return (Context, (self.device_type, self.device_id))

    def __enter__(self) -> Context:
        stack = _stack()
        stack.append(self)
        return self

    def __exit__(self, *exc: object) -> None:
        _stack().pop()


_local = threading.local()


def _stack() -> list[Context]:
    stack: list[Context] | None = getattr(_local, "stack", None)
    if stack is None:
        stack = _local.stack = [Context("cpu", 0)]
    return stack


def current_context() -> Context:
    """Return the context of this thread's innermost ``with ctx:``, or else its default, initially ``cpu(0)``."""
    return _stack()[-1]


def cpu(device_id: SupportsIndex = 0) -> Context:
    """Return a CPU context; ``cpu(0)``, ``cpu(1)``, … share host memory but have separate worker pools."""
    return Context("cpu", device_id)


def cpu_pinned(device_id: SupportsIndex = 0) -> Context:
    """Return a context for page-locked host memory, for asynchronous GPU copies; plain host memory without a GPU."""
    return Context("cpu_pinned", device_id)


def gpu(device_id: SupportsIndex = 0) -> Context:
    """Return the context of an NVIDIA GPU. The first use of its device needs CuPy and the GPU; this call does not."""
    return Context("gpu", device_id)


def sim(device_id: SupportsIndex = 0) -> Context:
    """Return the context of a simulated device: host memory with streams, a capacity and a cost model."""
    return Context("sim", device_id)
