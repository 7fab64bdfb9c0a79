"""The interface of a device: raw memory, copies, streams and events.

Raw memory is a flat, contiguous ``uint8`` array of the device's array module (``xp``: NumPy or CuPy); a typed view of
it is ``raw[offset:offset + n].view(dtype).reshape(shape)``. Everything here may be called from any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import CodeType, ModuleType
from typing import Any, Protocol, TypeAlias, runtime_checkable

from weftplan.device.context import Context
from weftplan.support.array_types import RawArray


@runtime_checkable
class Event(Protocol):
    """A point in a stream's work, made by :meth:`Stream.record`."""

    def query(self) -> bool:
        """True once everything enqueued on the stream before the event has run."""
        ...

    def synchronize(self) -> None:
        """Block the calling host thread until :meth:`query` is true."""
        ...


Owner: TypeAlias = tuple[str, tuple[CodeType, int] | None, int]
"""Label, code and line that pushed it, and push number of the operation whose work it is."""


class Fault(Protocol):
    """An error of enqueued work, which its stream has kept for a report."""

    error: BaseException
    owner: Owner | None
    """None for work of no operation."""
    kept: Any
    """The engine's failure for it, once it is reported."""


class Work(Protocol):
    """Work of an operation, created by :meth:`Stream.work`. The same thread enqueues it inside ``with work:``."""

    def record(self, stream: Any, number: int, after: Iterable[Event], over: Iterable[Event]) -> Event:
        """Mark the end of the work, on the stream that it ends on.

        Args:
            stream: the stream that it ends on.
            number: of the operation, in push order.
            after: events of the work whose results it reads.
            over: events of the work whose results it overwrites.
        """
        ...

    def __enter__(self) -> Work: ...

    def __exit__(self, *exc: object) -> None: ...


@runtime_checkable
class Stream(Protocol):
    """An in-order queue of device work. ``with stream:`` makes it current in this thread."""

    context: Context

    def record(self) -> Event:
        """Mark the work enqueued so far."""
        ...

    def wait(self, event: Event) -> None:
        """Make later work of this stream start after ``event``, without blocking the host."""
        ...

    def synchronize(self) -> None:
        """Block the host until the stream is empty."""
        ...

    def finish(self) -> Sequence[Fault]:
        """Block the host until the stream is empty; return the unreported faults of its work. A stream that cannot
        attribute faults returns none, and raises an error as :meth:`synchronize` does."""
        ...

    def work(self, owner: Callable[[], Owner]) -> Work:
        """Return the work of one operation, to be enqueued on this stream; a recorded fault of it carries
        ``owner()``."""
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
    """True when work is enqueued on streams and finishes later (gpu, sim); False when a call returns finished (cpu)."""

    def allocate(self, nbytes: int) -> RawArray:
        """Fresh raw memory of exactly ``nbytes`` > 0 bytes, contents undefined; raises OutOfMemoryError."""
        ...

    def free(self, raw: RawArray) -> None:
        """Give raw memory back to the system."""
        ...

    def memory_info(self) -> tuple[int, int]:
        """Return (free bytes, total bytes) of the device."""
        ...

    def new_stream(self, *, priority: int = 0) -> Stream:
        """Return a new stream; on a CPU one that runs everything at once."""
        ...

    def launch(self, fn: Callable[[], object]) -> None:
        """Do the work of ``fn`` on the current stream.

        A CPU calls it now; a GPU calls it now too, because CuPy enqueues what it does; a simulated device keeps it for
        later. Without a current stream the work has finished when the call returns, on every device.
        """
        ...

    def copy(self, dst: RawArray, src: RawArray) -> None:
        """Copy ``src`` into ``dst`` (equal shapes and dtypes; either may be on the host) on the current stream, as
        :meth:`launch`."""
        ...

    def synchronize(self) -> None:
        """Block the host until every stream of the device is empty."""
        ...
