"""A simulated device: host memory, in-order streams, events, a capacity and a virtual clock.

It exists to make ordering bugs show on a machine without a GPU, always and at the same place. Work enqueued on a stream
does *not* run at once; it runs when a thread waits, and in order ``"lazy"`` no more runs than that wait needs:

    stream a:  write x ---- record e          b without wait(e): synchronising b runs only b,
    stream b:  [wait e] --- read x            and the read sees what was in x before

so a missing event gives a wrong value deterministically. Order ``"random"`` picks the next stream with a seeded
generator instead, which finds the mistakes that being too early makes. Work that is enqueued while no stream is current
behaves like CUDA's legacy default stream: everything enqueued before runs first, then it, before the call returns.

All simulated devices share one lock, held while simulated work runs: it stands for hardware that does one thing at a
time. Work must therefore never wait for another thread. Times are virtual seconds of a cost model and never slept. They
are settled when work is enqueued: a copy begins when its stream and the wires that it takes (``links.py``) are free.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from weftplan.device.base import Event, Owner
from weftplan.device.context import Context
from weftplan.device.links import connected
from weftplan.device.numpy_device import ALIGNMENT, aligned_empty
from weftplan.device.simulated_hardware import Addresses, CostModel, Wires
from weftplan.device.simulated_work import Fault, SimWork
from weftplan.device.stream import current_stream, current_work, pop_stream, push_stream
from weftplan.errors import DeviceError, OutOfMemoryError
from weftplan.locks import ReentrantLock, whole_in_children
from weftplan.support.array_types import RawArray

POISON = 0xFF
"""Byte that fills memory given back: NaN in every float dtype, -1 in every signed integer."""

_world = whole_in_children(ReentrantLock())


_memory = Addresses()
_wires = Wires()


class SimEvent:
    """A point in a simulated stream; ``time`` is its virtual time."""

    __slots__ = ("done", "fault", "stream", "time", "work")

    def __init__(self, stream: SimStream, work: SimWork | None = None) -> None:
        self.stream = stream
        self.work = work
        self.done = False
        self.fault: Fault | None = None
        """After completion, the fault of its work or of the work's inputs."""
        self.time = stream._next

    def query(self) -> bool:
        """Return whether complete. If it is not, one piece of work runs, so that a polling loop ends."""
        with _world:
            if not self.done:
                self.stream.device._step(self.stream)
            return self.done

    def synchronize(self) -> None:
        """Run simulated work until the event is complete. An event without :meth:`SimStream.work` raises an unreported
        error of its stream."""
        with _world:
            self.stream.device._run_until(self)
            if self.work is None:
                self.stream._raise()

    def __repr__(self) -> str:
        return f"<SimEvent of {self.stream!r}: {'complete' if self.done else 'pending'}>"


class SimStream:
    """An in-order queue of simulated work."""

    def __init__(self, device: SimDevice, index: int) -> None:
        self.device = device
        self.context = device.context
        self.index = index
        self.time = 0.0
        """Virtual seconds at which the work run so far ends."""
        self._end = 0.0
        """The same for all that was enqueued; new work of a stream begins at :attr:`_next`."""
        self._queue: deque[tuple[str, Any, float, SimWork | None]] = deque()
        """Kind, function or event, the virtual time at which it is over, and whose it is."""
        self._untold: list[Fault] = []
        """Unreported errors."""
        self._nobodys: Fault | None = None
        """Faults of work without an owner: the next operation that ends here reports them."""

    @property
    def pending(self) -> int:
        """Pieces of work (records and waits included) that have not run."""
        return len(self._queue)

    @property
    def _next(self) -> float:
        """Virtual seconds at which the next work begins at the earliest."""
        return max(self._end, self.device._start)

    def enqueue(self, fn: Callable[[], object], *, seconds: float | None = None) -> None:
        """Add work, which takes ``seconds`` of virtual time (default: the cost model's launch)."""
        with _world:
            self._append("run", fn, self._next + (self.device.cost.launch if seconds is None else seconds))

    def copy(self, dst: RawArray, src: RawArray) -> None:
        """Add a copy, over the wires that :func:`weftplan.device.links.connect` has set, if any."""
        links = connected()
        with _world:
            if links is None:
                end = self._next + self.device.cost.copy(src.nbytes)
            else:
                end = _wires.copy(links, _memory.place(src), _memory.place(dst), src.nbytes, self._next)
            self._append("run", lambda: _copy(dst, src), end)

    def work(self, owner: Callable[[], Owner]) -> SimWork:
        """Return the work of one operation; its faults carry ``owner()``."""
        return SimWork(owner())

    def record(self, work: SimWork | None = None) -> SimEvent:
        """An event that completes when the work enqueued so far has run; that of ``work`` knows its fault."""
        with _world:
            event = SimEvent(self, work)
            self._append("record", event, self._next)
        return event

    def wait(self, event: Event) -> None:
        """Hold later work of this stream back until ``event`` is complete; does not block the host."""
        with _world:
            self._append("wait", event, max(self._next, event.time) if isinstance(event, SimEvent) else self._next)

    def synchronize(self) -> None:
        """Run all work of this stream, and of others as its waits need; raises what its work raised."""
        with _world:
            self.device._run_until(self.record())
            self._raise()

    def finish(self) -> list[Fault]:
        """Run all work of this stream; return its unreported faults, each once."""
        with _world:
            self.device._run_until(self.record())
            faults, self._untold = self._untold, []
            self._rest()
        return [fault for fault in faults if fault.untold]

    def _append(self, kind: str, item: Any, end: float) -> None:
        self._end = end
        self._queue.append((kind, item, end, current_work()))
        self.device._busy[self.index] = self

    def _raise(self) -> None:
        errors = [fault.error for fault in self._untold if fault.untold]
        self._untold, self._nobodys = [], None
        self._rest()
        try:
            if errors:
                raise errors[0]
        finally:
            del errors  # the traceback holds this frame: a cycle would keep the stream

    def _rest(self) -> None:
        """Nothing pending and no error: the device need not know this stream."""
        if not self._queue and not self._untold:
            self.device._busy.pop(self.index, None)

    def _ready(self) -> bool:
        """Return whether the first piece of work may run now."""
        if not self._queue:
            return False
        kind, item, _, _ = self._queue[0]
        return kind != "wait" or not isinstance(item, SimEvent) or item.done

    def _advance(self) -> None:
        """Run the first piece of work; an exception is kept for the next synchronisation, and skips nothing."""
        kind, item, self.time, work = self._queue.popleft()
        if kind == "run":
            try:
                with np.errstate(all="ignore"):  # hardware makes infinities and NaN silently
                    item()
            except BaseException as error:
                self._fail(error, work)
        elif kind == "record":
            if item.work is not None:
                item.fault = item.work.fault() or self._nobodys
                self._nobodys = None
            item.done = True
        elif not isinstance(item, SimEvent):
            item.synchronize()
        self.device._clock = max(self.device._clock, self.time)
        self._rest()

    def _fail(self, error: BaseException, work: SimWork | None) -> None:
        trace = error.__traceback__
        if trace is not None:  # without the caller's frame, which holds the work that is to keep the error
            BaseException.with_traceback(error, trace.tb_next)
        fault = Fault(error, None) if work is None else work.fail(error)
        self._untold.append(fault)
        if work is None:
            self._nobodys = self._nobodys or fault

    def __enter__(self) -> SimStream:
        push_stream(self)
        return self

    def __exit__(self, *exc: object) -> None:
        pop_stream(self)

    def __repr__(self) -> str:
        return f"<SimStream {self.index} of {self.context}: {len(self._queue)} pending, {self.time:.6f} s>"


class SimDevice:
    """Simulated hardware in host memory; the module's docstring describes the order of work."""

    alignment = ALIGNMENT
    asynchronous = True

    def __init__(self, context: Context, *, order: str = "lazy", seed: int = 0) -> None:
        self.context = context
        self.xp: ModuleType = np
        self.capacity = 4 << 30
        self.cost = CostModel()
        self.order = order
        self.used = 0
        """Bytes allocated and not freed."""
        self._random = random.Random(seed)
        self._made = 0
        """Streams made so far."""
        self._busy: dict[int, SimStream] = {}
        """Streams with pending work or an unreported error; other streams live as long as they are referenced."""
        self._clock = 0.0
        self._start = 0.0
        """No work that is enqueued from now on begins earlier; see :func:`begin_together`."""
        self._default = self.new_stream()

    def configure(
        self,
        *,
        capacity: int | None = None,
        cost: CostModel | None = None,
        order: str | None = None,
        seed: int | None = None,
    ) -> None:
        """Change what is not None; :func:`weftplan.device.simulated.configure` explains the arguments."""
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
        """``nbytes`` > 0 poisoned bytes; raises OutOfMemoryError beyond the capacity."""
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
        """Give memory back and poison it at once: work still pending that reads it will see poison."""
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
        """Return a new in-order stream; ``priority`` changes nothing."""
        with _world:
            stream = SimStream(self, self._made)
            self._made += 1
        return stream

    def launch(self, fn: Callable[[], object], modelled: float = 0.0) -> None:
        """Enqueue ``fn`` on the current stream; without one, run everything pending and then ``fn``.

        ``modelled``: seconds of work by the planner's model, which the cost model may count.
        """
        self._enqueue(lambda stream: stream.enqueue(fn, seconds=self.cost.kernel(modelled)))

    def launch_untimed(self, fn: Callable[[], object]) -> None:
        """Enqueue ``fn`` as :meth:`launch` does, in no virtual time: poison of freed memory stands for no kernel."""
        self._enqueue(lambda stream: stream.enqueue(fn, seconds=0.0))

    def copy(self, dst: RawArray, src: RawArray) -> None:
        """Enqueue a copy (equal shapes and dtypes), timed by the cost model or the wires that devices are joined by."""
        self._enqueue(lambda stream: stream.copy(dst, src))

    def _enqueue(self, put: Callable[[SimStream], None]) -> None:
        stream = current_stream()
        if isinstance(stream, SimStream):
            put(stream)
            return
        with _world:
            self.synchronize()
            put(self._default)
            self._default.synchronize()

    def synchronize(self) -> None:
        """Run everything pending on this device; raises the first error that work raised."""
        with _world:
            for event in [stream.record() for stream in self._in_order()]:
                self._run_until(event)
            for stream in self._in_order():
                stream._raise()

    @property
    def clock(self) -> float:
        """Virtual seconds at which everything run so far has ended."""
        with _world:
            return self._clock

    def _in_order(self) -> list[SimStream]:
        """Return the busy streams in order of creation."""
        return [self._busy[index] for index in sorted(self._busy)]

    def _run_until(self, event: SimEvent) -> None:
        while not event.done:
            self._step(event.stream)

    def _step(self, wanted: SimStream) -> None:
        """Run one piece of work: one that ``wanted`` needs (lazy) or any that may run (random)."""
        if self.order == "random":
            ready = [stream for stream in self._in_order() if stream._ready()]
            if ready:
                self._random.choice(ready)._advance()
                return
        seen: list[SimStream] = []
        stream = wanted
        while not stream._ready():
            if stream in seen or not stream._queue:
                raise DeviceError(
                    f"{stream!r} waits for an event that can never complete; streams waiting for one another: {seen}"
                )
            seen.append(stream)
            stream = stream._queue[0][1].stream
        stream._advance()

    def __repr__(self) -> str:
        return f"<SimDevice {self.context}: {self.used:,} of {self.capacity:,} bytes, {self._made} streams>"


def begin_together(devices: Sequence[SimDevice]) -> float:
    """Run everything pending on these devices; later work begins when the last of it ended. Returns that time.

    Without it the clocks of devices, and the streams of one, stand where their own last work ended.
    """
    with _world:
        for device in devices:
            device.synchronize()
        start = max(device._clock for device in devices)
        for device in devices:
            device._clock = device._start = start
    return start


def _copy(dst: RawArray, src: RawArray) -> None:
    """Copy within host memory, or to and from an array of CuPy's, and wait for that."""
    if not isinstance(dst, np.ndarray):
        with dst.device:
            dst.set(np.asarray(src, order="C"))
            dst.device.synchronize()
    elif not isinstance(src, np.ndarray):
        src.get(out=dst)
    else:
        np.copyto(dst, src)
