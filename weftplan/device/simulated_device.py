"""A simulated device: host memory, in-order streams, events, a capacity and a virtual clock.

It reproduces ordering bugs deterministically on a machine without a GPU. Enqueued work does *not* run immediately. It
runs when a thread waits, and in order ``"lazy"`` only the work that this wait needs runs:

    stream a:  write x ---- record e          b without wait(e): synchronising b runs only b,
    stream b:  [wait e] --- read x            and the read sees what was in x before

so a missing event always gives a wrong value. Order ``"random"`` picks the next stream with a seeded generator instead,
which also finds bugs that appear when work runs too early. Work enqueued without a current stream behaves as on CUDA's
legacy default stream: the call runs all earlier work of the device, then this work, and returns.

All simulated devices share one lock, ``_world``, held while simulated work runs. Work must therefore never wait for
another thread. Times are virtual seconds of a cost model, computed when work is enqueued: a copy begins when its stream
and its wires (``links.py``) are free.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from weftplan.device.base import Device, Event, Owner
from weftplan.device.context import Context
from weftplan.device.cost_model import CostModel
from weftplan.device.links import connected
from weftplan.device.numpy_device import ALIGNMENT, aligned_empty
from weftplan.device.simulated_addresses import Addresses
from weftplan.device.simulated_faults import SimFault, SimWork
from weftplan.device.stream import current_stream, current_work, pop_stream, push_stream
from weftplan.device.wire_schedule import Wires
from weftplan.errors import DeviceError, OutOfMemoryError
from weftplan.locks import ReentrantLock, consistent_in_children
from weftplan.support.array_types import RawArray

POISON = 0xFF
"""Byte that fills fresh and freed memory: NaN in every float dtype, -1 in every signed integer dtype."""

# Guards all state of all simulated devices, streams, events and faults. Reentrant: work may enqueue work.
_world = consistent_in_children(ReentrantLock())
_memory = Addresses()
_wires = Wires()


class SimEvent:
    """A point in a simulated stream, at virtual second ``time``."""

    __slots__ = ("completed", "fault", "stream", "time", "work")

    def __init__(self, stream: SimStream, work: SimWork | None = None) -> None:
        self.stream = stream
        self.work = work
        self.completed = False
        self.fault: SimFault | None = None
        """Once complete: the fault of :attr:`work` or of work without an owner before the event; None without one."""
        self.time = stream._next

    def query(self) -> bool:
        """Return whether the event is complete; if it is not, first run one piece of work, so that polling ends."""
        with _world:
            if not self.completed:
                self.stream.device._step(self.stream)
            return self.completed

    def synchronize(self) -> None:
        """Run simulated work until the event is complete.

        An event without an operation's work then raises the stream's first unreported error, if any.
        """
        with _world:
            self.stream.device._run_until(self)
            if self.work is None:
                self.stream._raise()

    def __repr__(self) -> str:
        return f"<SimEvent of {self.stream!r}: {'complete' if self.completed else 'pending'}>"


class SimStream:
    """An in-order queue of simulated work."""

    def __init__(self, device: SimDevice, index: int) -> None:
        self.device = device
        self.context = device.context
        self.index = index
        self.time = 0.0
        """Virtual second at which the work that has run ends."""
        self._end = 0.0
        """Virtual second at which all enqueued work ends."""
        self._queue: deque[tuple[str, Any, float, SimWork | None]] = deque()
        """Pending (kind, function or event, virtual second at which it ends, the operation's work)."""
        self._unreported: list[SimFault] = []
        """Faults that no :meth:`finish` or synchronisation has taken yet."""
        self._unowned_fault: SimFault | None = None
        """First fault of work without an owner; the next event of an operation on this stream reports it."""

    @property
    def pending(self) -> int:
        """Number of entries (work, records and waits) that have not run."""
        return len(self._queue)

    @property
    def _next(self) -> float:
        """Earliest virtual second at which newly enqueued work begins."""
        return max(self._end, self.device._start)

    def enqueue(self, fn: Callable[[], object], *, seconds: float | None = None) -> None:
        """Enqueue work that takes ``seconds`` of virtual time (default: the cost model's ``launch``)."""
        with _world:
            self._append("run", fn, self._next + (self.device.cost.launch if seconds is None else seconds))

    def copy(self, dst: RawArray, src: RawArray) -> None:
        """Enqueue a copy, timed by the wires of :func:`weftplan.device.links.connect` or else by the cost model."""
        links = connected()
        with _world:
            if links is None:
                end = self._next + self.device.cost.copy(src.nbytes)
            else:
                end = _wires.copy(links, _memory.device_index(src), _memory.device_index(dst), src.nbytes, self._next)
            self._append("run", lambda: _copy(dst, src), end)

    def clock(self) -> float:
        """Return :attr:`time`."""
        return self.time

    def work(self, owner: Callable[[], Owner]) -> SimWork:
        """Return the (still empty) work of one operation; the owner of its faults is ``owner()``."""
        return SimWork(owner())

    def record(self, work: SimWork | None = None) -> SimEvent:
        """Return an event that completes when the work enqueued so far has run; it stores the fault of ``work``."""
        with _world:
            event = SimEvent(self, work)
            self._append("record", event, self._next)
        return event

    def wait(self, event: Event) -> None:
        """Make later work of this stream start after ``event``, without blocking the host."""
        with _world:
            self._append("wait", event, max(self._next, event.time) if isinstance(event, SimEvent) else self._next)

    def synchronize(self) -> None:
        """Run all work of this stream and the work of other streams that it waits for; raise the first error."""
        with _world:
            self.device._run_until(self.record())
            self._raise()

    def finish(self) -> list[SimFault]:
        """Run all work of this stream; return and forget its unreported faults."""
        with _world:
            self.device._run_until(self.record())
            faults, self._unreported = self._unreported, []
            self._forget_if_idle()
        return [fault for fault in faults if fault.is_unreported]

    def _append(self, kind: str, item: Any, end: float) -> None:
        self._end = end
        self._queue.append((kind, item, end, current_work()))
        self.device._busy[self.index] = self

    def _raise(self) -> None:
        errors = [fault.error for fault in self._unreported if fault.is_unreported]
        self._unreported, self._unowned_fault = [], None
        self._forget_if_idle()
        try:
            if errors:
                raise errors[0]
        finally:
            del errors  # the traceback holds this frame: a cycle would keep the stream

    def _forget_if_idle(self) -> None:
        """Remove this stream from the device's busy streams if it has no pending work and no unreported error."""
        if not self._queue and not self._unreported:
            self.device._busy.pop(self.index, None)

    def _ready(self) -> bool:
        """Return whether the first entry of the queue can run now."""
        if not self._queue:
            return False
        kind, item, _, _ = self._queue[0]
        return kind != "wait" or not isinstance(item, SimEvent) or item.completed

    def _advance(self) -> None:
        """Run the first entry of the queue; store an exception for the next synchronisation, and let later work run."""
        kind, item, self.time, work = self._queue.popleft()
        if kind == "run":
            try:
                with np.errstate(all="ignore"):  # hardware makes infinities and NaN silently
                    item()
            except BaseException as error:
                self._fail(error, work)
        elif kind == "record":
            if item.work is not None:
                item.fault = item.work.fault() or self._unowned_fault
                self._unowned_fault = None
            item.completed = True
        elif not isinstance(item, SimEvent):
            item.synchronize()
        self.device._clock = max(self.device._clock, self.time)
        self._forget_if_idle()

    def _fail(self, error: BaseException, work: SimWork | None) -> None:
        trace = error.__traceback__
        if trace is not None:  # drop the frame of _advance: its local `work` would form a cycle with the stored error
            BaseException.with_traceback(error, trace.tb_next)
        fault = SimFault(error, None) if work is None else work.fail(error)
        self._unreported.append(fault)
        if work is None:
            self._unowned_fault = self._unowned_fault or fault

    def __enter__(self) -> SimStream:
        push_stream(self)
        return self

    def __exit__(self, *exc: object) -> None:
        pop_stream(self)

    def __repr__(self) -> str:
        return f"<SimStream {self.index} of {self.context}: {len(self._queue)} pending, {self.time:.6f} s>"


class SimDevice:
    """Simulated hardware in host memory; the module docstring describes the order of its work."""

    alignment = ALIGNMENT
    asynchronous = True

    def __init__(self, context: Context, *, order: str = "lazy", seed: int = 0) -> None:
        self.context = context
        self.xp: ModuleType = np
        self.capacity = 4 << 30
        self.cost = CostModel()
        self.order = order
        self.used = 0
        """Bytes in use."""
        self._random = random.Random(seed)
        self._count = 0
        """Number of streams created."""
        self._busy: dict[int, SimStream] = {}
        """By index: streams with pending work or an unreported error, kept alive by this entry."""
        self._clock = 0.0
        self._start = 0.0
        """Earliest virtual second at which newly enqueued work begins; set by :func:`begin_together`."""
        self._default = self.new_stream()

    def configure(
        self,
        *,
        capacity: int | None = None,
        cost: CostModel | None = None,
        order: str | None = None,
        seed: int | None = None,
    ) -> None:
        """Change the settings that are not None, as :func:`weftplan.device.simulated.configure` explains."""
        if order not in (None, "lazy", "random"):
            raise DeviceError(f"order of a simulated device must be 'lazy' or 'random', got {order!r}")
        with _world:
            if capacity is not None:
                if capacity < self.used:
                    raise DeviceError(f"{self.context}: capacity {capacity:,} is below the {self.used:,} bytes in use")
                self.capacity = capacity
            if cost is not None:
                self.cost = cost
            if order is not None:
                self.order = order
            if seed is not None:
                self._random = random.Random(seed)

    # -- memory ---------------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> RawArray:
        """Return ``nbytes`` > 0 bytes, filled with :data:`POISON`; raises OutOfMemoryError beyond the capacity."""
        with _world:
            if self.used + nbytes > self.capacity:
                raise OutOfMemoryError(
                    f"{self.context}: {nbytes:,} bytes requested, "
                    f"{self.capacity - self.used:,} of {self.capacity:,} free"
                )
            self.used += nbytes
        try:
            raw = aligned_empty(nbytes, self.context)
        except OutOfMemoryError:
            with _world:
                self.used -= nbytes
            raise
        raw.fill(POISON)
        with _world:
            _memory.add(raw, self.context.device_id)
        return raw

    def free(self, raw: RawArray) -> None:
        """Free memory and fill it with :data:`POISON` immediately, so that pending work that reads it sees poison."""
        raw.fill(POISON)
        with _world:
            _memory.remove(raw)
            self.used -= raw.nbytes

    def memory_info(self) -> tuple[int, int]:
        """Return (free, total) bytes of the simulated capacity."""
        with _world:
            return self.capacity - self.used, self.capacity

    # -- work -----------------------------------------------------------------------------------------------------

    def new_stream(self, *, priority: int = 0) -> SimStream:
        """Return a new in-order stream; ``priority`` is ignored."""
        with _world:
            stream = SimStream(self, self._count)
            self._count += 1
        return stream

    def launch(self, fn: Callable[[], object], modelled: float | None = 0.0) -> None:
        """Enqueue ``fn`` on the current stream; without one, run all pending work and then ``fn``.

        ``modelled`` is the planner's estimate of the kernel's seconds, which the cost model scales by ``share``. None
        is for work that no hardware would do, such as writing poison over freed memory.
        """
        seconds = 0.0 if modelled is None else self.cost.kernel(modelled)
        self._enqueue(lambda stream: stream.enqueue(fn, seconds=seconds))

    def copy(self, dst: RawArray, src: RawArray) -> None:
        """Enqueue a copy of equal shapes and dtypes on the current stream; without one, run all work, then the copy."""
        self._enqueue(lambda stream: stream.copy(dst, src))

    def _enqueue(self, put: Callable[[SimStream], None]) -> None:
        stream = current_stream()
        if isinstance(stream, SimStream):
            put(stream)
            return
        # As on CUDA's legacy default stream: after all earlier work of the device, and finished when the call returns.
        with _world:
            self.synchronize()
            put(self._default)
            self._default.synchronize()

    def synchronize(self) -> None:
        """Run all pending work of this device; raise the first unreported error."""
        with _world:
            # Record on all streams first: running one stream may enqueue work on another, which need not run now.
            for event in [stream.record() for stream in self._in_order()]:
                self._run_until(event)
            for stream in self._in_order():
                stream._raise()

    @property
    def clock(self) -> float:
        """Virtual second at which all work that has run ends."""
        with _world:
            return self._clock

    def _in_order(self) -> list[SimStream]:
        """Return the busy streams in order of creation."""
        return [self._busy[index] for index in sorted(self._busy)]

    def _run_until(self, event: SimEvent) -> None:
        while not event.completed:
            self._step(event.stream)

    def _step(self, waiting: SimStream) -> None:
        """Run one queue entry: one that ``waiting`` needs first (lazy), or any that can run (random).

        Raises:
            DeviceError: ``waiting`` waits for an event that cannot complete.
        """
        if self.order == "random":
            ready = [stream for stream in self._in_order() if stream._ready()]
            if ready:
                self._random.choice(ready)._advance()
                return
        # Follow the chain of waits to a stream that can run; a stream met twice, or empty, means a deadlock.
        seen: list[SimStream] = []
        stream = waiting
        while not stream._ready():
            if stream in seen or not stream._queue:
                raise DeviceError(
                    f"{stream!r} waits for an event that can never complete; streams waiting for one another: {seen}"
                )
            seen.append(stream)
            stream = stream._queue[0][1].stream
        stream._advance()

    def __repr__(self) -> str:
        return f"<SimDevice {self.context}: {self.used:,} of {self.capacity:,} bytes, {self._count} streams>"


def begin_together(devices: Sequence[Device]) -> float:
    """Run all pending work of these devices, set the simulated clocks to the latest of them, and return that second.

    Without this call, a stream's new work begins when the last work of this stream ends.
    """
    with _world:
        for device in devices:
            device.synchronize()
        simulated = [device for device in devices if isinstance(device, SimDevice)]
        start = max((device._clock for device in simulated), default=0.0)
        for device in simulated:
            device._clock = device._start = start
    return start


def _copy(dst: RawArray, src: RawArray) -> None:
    """Copy within host memory, or to or from a CuPy array, and wait for the copy."""
    if not isinstance(dst, np.ndarray):
        with dst.device:
            dst.set(np.asarray(src, order="C"))
            dst.device.synchronize()
    elif not isinstance(src, np.ndarray):
        src.get(out=dst)
    else:
        np.copyto(dst, src)
