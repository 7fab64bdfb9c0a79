"""The interface of a device: raw memory, copies, streams and events.

Raw memory is a flat, contiguous ``uint8`` array of the device's array module (``xp``: NumPy or CuPy); a typed view of
it is ``raw[offset:offset + nbytes].view(dtype).reshape(shape)``. Any thread may call these methods.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import CodeType, ModuleType
from typing import Any, Protocol, TypeAlias, runtime_checkable

from weftplan.device.context import Context
from weftplan.device.cost_model import CostModel
from weftplan.support.array_types import RawArray


@runtime_checkable
class Event(Protocol):
    """A point in a stream's order of work, returned by :meth:`Stream.record`."""

    def query(self) -> bool:
        """Return whether all work enqueued on the stream before the event has run."""
        ...

    def synchronize(self) -> None:
        """Block the calling host thread until :meth:`query` is true."""
        ...


Owner: TypeAlias = tuple[str, tuple[CodeType, int] | None, int]
"""An operation as error reports identify it: label, (code, line) that pushed it if known, and push number."""


class Fault(Protocol):
    """An error that enqueued work raised, stored by the stream until the engine reports it."""

    error: BaseException
    owner: Owner | None
    """The operation whose work failed; None for work that belongs to no operation."""
    failure: Any
    """The engine's ``Failure`` for this error, None until the error is reported."""


class DeviceWork(Protocol):
    """The work of one operation, created by :meth:`Stream.work`.

    Work that the same thread enqueues inside ``with work:`` belongs to the operation.
    """

    def record(self, stream: Any, number: int, predecessors: Iterable[Event], over: Iterable[Event]) -> Event:
        """Return an event at the end of this work.

        Args:
            stream: the last stream of the work.
            number: the operation's push number.
            predecessors: events of operations whose results this operation reads.
            over: events of operations whose results this operation overwrites.
        """
        ...

    def __enter__(self) -> DeviceWork: ...

    def __exit__(self, *exc: object) -> None: ...


@runtime_checkable
class Stream(Protocol):
    """An in-order queue of device work. ``with stream:`` makes the stream current in this thread."""

    context: Context

    def record(self) -> Event:
        """Return an event that completes when the work enqueued so far has run."""
        ...

    def wait(self, event: Event) -> None:
        """Make later work of this stream start after ``event``, without blocking the host."""
        ...

    def synchronize(self) -> None:
        """Block the host until the stream is empty."""
        ...

    def finish(self) -> Sequence[Fault]:
        """Block the host until the stream is empty; return the unreported faults of its work.

        A stream that cannot attribute errors to operations returns no faults; its errors are raised as by
        :meth:`synchronize`.
        """
        ...

    def clock(self) -> float:
        """Return the second at which the work that has finished ended: the host's clock, or a simulated stream's."""
        ...

    def work(self, owner: Callable[[], Owner]) -> DeviceWork:
        """Return the (still empty) work of one operation; if this work fails, the owner of the fault is ``owner()``."""
        ...

    def __enter__(self) -> Stream: ...

    def __exit__(self, *exc: object) -> None: ...


@runtime_checkable
class Device(Protocol):
    """One piece of hardware (or its simulation). Get it with :func:`weftplan.device.get`."""

    context: Context
    xp: ModuleType
    alignment: int
    """Bytes to which addresses from :meth:`allocate` are aligned (64 on a CPU, 256 on a GPU)."""
    asynchronous: bool
    """True if work is enqueued on streams and finishes later (gpu, sim); False if each call finishes its work (cpu)."""

    cost: CostModel
    """Seconds of kernels and copies, for plans; a simulated device's clock follows it."""

    def allocate(self, nbytes: int) -> RawArray:
        """Return newly allocated memory of ``nbytes`` > 0 bytes with undefined contents; raises OutOfMemoryError."""
        ...

    def free(self, raw: RawArray) -> None:
        """Return memory from :meth:`allocate` to the system."""
        ...

    def memory_info(self) -> tuple[int, int]:
        """Return (free bytes, total bytes) of the device."""
        ...

    def new_stream(self, *, priority: int = 0) -> Stream:
        """Return a new stream; a CPU's stream runs work inline. Devices may ignore ``priority`` (higher runs first)."""
        ...

    def launch(self, fn: Callable[[], object], modelled: float | None = 0.0) -> None:
        """Do the work of ``fn`` on the current stream.

        ``modelled`` is the planner's estimate of the kernel's seconds; None: the work counts as taking no time. Only a
        simulated device's clock uses it.

        A CPU and a GPU call ``fn`` inline; on a GPU its CuPy calls enqueue kernels. A simulated device enqueues ``fn``
        itself. Without a current stream of this kind of device, the work has finished when the call returns.
        """
        ...

    def copy(self, dst: RawArray, src: RawArray) -> None:
        """Copy ``src`` into ``dst`` on the current stream, or before returning if there is none.

        Shapes and dtypes must be equal; either array may be in host memory.
        """
        ...

    def synchronize(self) -> None:
        """Block the host until every stream of the device is empty."""
        ...
