"""Streams: order of operations on devices whose functions only enqueue kernels.

An operation is over for the engine when its function has returned. Its dependants are dispatched while the device still
works; events keep the order:

    a var                      holds the event after its last write, and per stream the event after the last read
    an operation on a stream   makes the stream wait for the writers' events of its reads, and for the writers' and
                               readers' events of its writes, except those of the same stream
    an operation on the CPU,
    a wait                     block the host on the same events
    a delete                   is deferred until all events of the var have passed; only then is the memory free

A device has a few streams, shared by its workers. An operation continues the stream of one of its inputs if nothing was
enqueued there since; otherwise it takes the next stream. Independent chains therefore overlap, whichever worker runs
them. Copies to and from the device have one stream each. Exchanges between devices, which are prioritized work, have
four streams in turn: a computation that is enqueued later does not wait for an exchange.

Failures after enqueueing: if a device can attribute them (``Stream.work``), the mark's event carries the fault, and so
do the events of dependent work. The result equals that of an operation that fails immediately. If several operations
failed, the operation that is named depends on timing. CUDA cannot attribute a failure: it concerns the whole stream,
and all later work.

Only device locks are taken under ``_lock``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, cast

from weftplan import device as devices
from weftplan.device.base import Fault
from weftplan.engine.failure import Failure, Outcome
from weftplan.engine.operation import FnProperty, OprBlock
from weftplan.locks import Lock, free_in_children

if TYPE_CHECKING:
    from weftplan.device.base import Device, DeviceWork, Event, Stream
    from weftplan.device.context import Context
    from weftplan.engine.types import Runs
    from weftplan.engine.var import Var

# The operation that holds a var changes its marks, alone for a write. Concurrent readers of one var add theirs under
# `_lock`. Events are recorded under it, too. Otherwise two workers on one stream could interleave as
# (1) enqueue a read, (1) record, (2) enqueue a read, (2) record, (2) store its mark, (1) store its mark,
# and the stored mark would not cover the second read.
_lock = free_in_children(Lock())
_LANES = 4
"""Streams for exchanges per device: the number of buckets in flight."""
DEFERRED = cast("Outcome", object())
"""Returned by :meth:`StreamWorker.run` for a deferred delete; :meth:`StreamWorker.finish_deletes` completes it."""


class Mark:
    """The point in a stream after one operation."""

    __slots__ = ("event", "label", "seq", "site", "stream")

    def __init__(self, stream: Stream, event: Event, op: OprBlock) -> None:
        self.stream = stream
        self.event = event
        self.label = op.label
        self.site = op.site
        self.seq = op.seq


class VarEvents:
    """Marks of the stream work that still uses one var."""

    __slots__ = ("readers", "writer")

    def __init__(self, writer: Mark | None) -> None:
        self.writer = writer
        self.readers: dict[Stream, Mark] = {}

    def __repr__(self) -> str:
        return f"<VarEvents: {'written' if self.writer else 'not written'}, {len(self.readers)} readers>"


class Why(Enum):
    """Why an operation waits for a mark. It inherits the mark's failure only in the first two cases."""

    READS = 1
    """It reads the written value. If the write failed, it cannot run."""
    OVERWRITES = 2
    """It overwrites the written value. It may heal a failure that was raised before this push."""
    FOLLOWS_READER = 3
    """It writes a var that earlier stream work only reads."""


EarlierMarks = list[tuple["Var", Mark, Why]]


def marks_before(op: OprBlock) -> Iterator[tuple[Var, Mark, Why]]:
    """Yield (var, mark, why) for each mark that must pass before ``op`` may use its vars."""
    for var in op.reads:
        events = var.events
        if events is not None and events.writer is not None:
            yield var, events.writer, Why.READS
    for var in op.writes:
        events = var.events
        if events is not None:
            if events.writer is not None:
                yield var, events.writer, Why.OVERWRITES
            with _lock:
                readers = list(events.readers.values())
            for mark in readers:
                yield var, mark, Why.FOLLOWS_READER


def synchronize_host(core: Runs, op: OprBlock) -> Failure | None:
    """Block until ``op``, which runs on the host, may use its vars. Return a device error as a failure."""
    first_failure: Failure | None = None
    for var, mark, why in marks_before(op):
        failure = _pass_for(core, op, var, mark, why)
        first_failure = first_failure or failure
    for var in op.writes:
        var.events = None
    return first_failure


def synchronize_var(core: Runs, var: Var) -> None:
    """Block until the last write of ``var`` has passed. A device error becomes the var's failure."""
    events = var.events
    if events is not None and events.writer is not None:
        _pass(core, var, events.writer)


def _pass_for(core: Runs, op: OprBlock, var: Var, mark: Mark, why: Why) -> Failure | None:
    """Block until the mark has passed. Return the failure that makes ``op`` skip, if any."""
    if why is Why.FOLLOWS_READER:
        with suppress(Exception):  # a wait for the reader's own result raises the error
            mark.event.synchronize()
        return None
    failure = _pass(core, var, mark)
    return failure if failure is not None and (why is Why.READS or failure.blocks(op.seq, var, op.fn)) else None


def _pass(core: Runs, var: Var, mark: Mark) -> Failure | None:
    """Block until the mark of the last write of ``var`` has passed. Return the var's failure, if any."""
    failure: Failure | None = None
    try:
        mark.event.synchronize()
    except BaseException as error:
        if issubclass(type(error), (KeyboardInterrupt, SystemExit)):
            raise
        failure = Failure(error, f"{mark.label} (or earlier work of its stream)", mark.site, mark.seq)
        core._exclusively(partial(core._add_unobserved, failure))
    fault = getattr(mark.event, "fault", None)
    if fault is not None:
        failure = _failure_of(core, fault, mark.stream)
        if core._is_healed(failure):
            return None
    if failure is not None and var.failure is None:
        core._exclusively(partial(core._hold, var, failure))
    return failure


def _failure_of(core: Runs, fault: Fault, stream: Stream) -> Failure:
    """Return the failure that all dependants of ``fault`` share."""
    if fault.failure is None:
        name, site, seq = fault.owner or (f"work on {stream!r}", None, 0)
        failure = Failure(fault.error, name, site, seq)

        def note() -> None:
            if fault.failure is None:
                fault.failure = failure
                core._add_unobserved(failure)

        core._exclusively(note)
    shared: Failure = fault.failure
    return shared


class StreamPool:
    """Streams of one device on one engine, shared by all its workers."""

    def __init__(self, device: Device, count: int) -> None:
        self.device = device
        self.users = 0
        self.inward, self.outward = device.new_stream(), device.new_stream()
        self._compute = [device.new_stream() for _ in range(count)]
        self._last_seq: dict[Stream, int] = dict.fromkeys(self._compute, -1)
        """Number of the last operation per stream."""
        self._turn = 0
        self._exchange = [device.new_stream() for _ in range(_LANES)]
        self._lane = 0

    def choose(self, op: OprBlock) -> Stream:
        """Return the stream for ``op``."""
        if op.prop is FnProperty.COPY_TO_GPU:
            return self.inward
        if op.prop is FnProperty.COPY_FROM_GPU:
            return self.outward
        if op.prop is FnProperty.GPU_PRIORITIZED:
            self._lane += 1
            return self._exchange[self._lane % _LANES]
        with _lock:
            # Continue the stream of the newest input whose work is the last there: no event wait is needed.
            chosen, newest = None, -1
            for var in (*op.reads, *op.writes):
                mark = None if var.events is None else var.events.writer
                if mark is not None and mark.seq > newest and self._last_seq.get(mark.stream) == mark.seq:
                    chosen, newest = mark.stream, mark.seq
            if chosen is None:
                chosen = self._compute[self._turn % len(self._compute)]
                self._turn += 1
            self._last_seq[chosen] = op.seq
        return chosen

    def drain(self, core: Runs) -> None:
        """Block until all enqueued work has finished. An error becomes a failure that wait_for_all raises."""
        for stream in (self.inward, self.outward, *self._compute, *self._exchange):
            try:
                faults = stream.finish()
            except Exception as error:
                failure = Failure(error, f"work on {stream!r}", None, 0)
                core._exclusively(partial(core._add_unobserved, failure))
            else:
                for fault in faults:
                    _failure_of(core, fault, stream)


def pool_of(core: Runs, device: Device) -> StreamPool:
    """Return the streams of a device, created for its first worker. :meth:`StreamWorker.close` releases them."""
    with _lock:
        pool = next((pool for pool in core._streams if pool.device is device), None)
        if pool is None:
            pool = StreamPool(device, _count(core))
            core._streams.append(pool)
        pool.users += 1
        streams: StreamPool = pool
        return streams


def _count(core: object) -> int:
    """Return the number of compute streams per device, which is the number of workers."""
    return max(1, int(getattr(core, "_gpu_workers", 1)))


def compute_streams(core: object, contexts: Iterable[Context]) -> int:
    """Return the largest number of compute streams that an engine uses on one of these devices; 0 without streams."""
    return _count(core) if any(context.has_streams for context in contexts) else 0


class StreamWorker:
    """Runner of the operations of one worker thread of an asynchronous device."""

    def __init__(self, core: Runs, device: Device) -> None:
        self._deferred_deletes: list[tuple[EarlierMarks, OprBlock]] = []
        # Set before this worker can grant anything, so that every thread takes the careful path.
        core._streams_used = True
        core._careful = True
        self._pool = pool_of(core, device)

    def run(self, core: Runs, op: OprBlock) -> Outcome:
        """Run ``op`` as ``engine._execute`` does; return DEFERRED for a deferred delete."""
        if op.prop is FnProperty.DELETE_VAR:
            marks = list(marks_before(op))
            if marks:
                self._deferred_deletes.append((marks, op))
                return DEFERRED
            return core._execute_carefully(op, on_stream=True)
        try:
            stream = self._pool.choose(op)
            earlier_marks = list(marks_before(op))
            upstream = self._wait_for_streams(core, op, stream, earlier_marks)
            if upstream is not None and op.prop is not FnProperty.NO_SKIP:
                return upstream
            work = stream.work(lambda: (op.label, op.site, op.seq))
            with stream, work:
                failure = core._execute_carefully(op, on_stream=True)
            self._mark(op, stream, work, earlier_marks, failure)
        except BaseException as error:  # a device error: the device accepts no more work
            return Failure.of(op, error)
        return failure

    def start(self, core: Runs, op: OprBlock, on_outcome: Callable[[Outcome], None]) -> None:
        """Start ``op`` as ``engine._start_async`` does. Work enqueued until its completion counts as its own."""

        stream = self._pool.choose(op)
        earlier_marks = list(marks_before(op))
        work = stream.work(lambda: (op.label, op.site, op.seq))

        def complete(failure: Outcome) -> None:
            try:
                self._mark(op, stream, work, earlier_marks, failure)
            except BaseException as error:
                failure = failure or Failure.of(op, error)
            on_outcome(failure)

        try:
            upstream = self._wait_for_streams(core, op, stream, earlier_marks)
        except BaseException as error:
            upstream = Failure.of(op, error)
        if upstream is not None and op.prop is not FnProperty.NO_SKIP:
            on_outcome(upstream)
            return
        with stream, work:
            core._start_async(op, complete, on_stream=True)

    def _wait_for_streams(
        self, core: Runs, op: OprBlock, stream: Stream, earlier_marks: EarlierMarks
    ) -> Failure | None:
        """Make ``stream`` wait for the work of other streams on the vars of ``op``.

        Devices of different kinds do not share events. Then the host waits, and returns a failure of that work.
        """
        first_failure: Failure | None = None
        for var, mark, why in earlier_marks:
            if mark.stream is not stream:
                if type(mark.stream) is type(stream):
                    # The device waits; the worker continues with the next operation.
                    stream.wait(mark.event)
                else:
                    failure = _pass_for(core, op, var, mark, why)
                    first_failure = first_failure or failure
        return first_failure

    def _mark(
        self, op: OprBlock, stream: Stream, work: DeviceWork, earlier_marks: EarlierMarks, failure: Outcome
    ) -> None:
        """Record the end of the work of ``op`` on its stream.

        The event inherits the faults of its inputs, unless the operation is never skipped or has already failed.
        """
        read_events: list[Event] = []
        over: list[Event] = []
        if op.prop is not FnProperty.NO_SKIP and (failure is None or isinstance(failure, dict)):
            for _, earlier, why in earlier_marks:
                if why is not Why.FOLLOWS_READER and type(earlier.stream) is type(stream):
                    (read_events if why is Why.READS else over).append(earlier.event)
        with _lock:
            mark = Mark(stream, work.record(stream, op.seq, read_events, over), op)
            for var in op.reads:
                if var.events is None:
                    var.events = VarEvents(None)
                var.events.readers[stream] = mark
            for var in op.writes:
                var.events = VarEvents(mark)

    def has_deferred_deletes(self) -> bool:
        """Return whether deletes are waiting for events."""
        return bool(self._deferred_deletes)

    def finish_deletes(self, core: Runs, *, block: bool) -> Iterator[tuple[OprBlock, Outcome]]:
        """Yield (operation, failure) of deletes whose events have passed; with ``block``, wait for the oldest."""
        while self._deferred_deletes:
            marks, op = self._deferred_deletes[0]
            # In order: a later delete waits for an earlier one, even if its own events have passed.
            if not block and not all(mark.event.query() for _, mark, _ in marks):
                return
            self._deferred_deletes.pop(0)
            failure = None
            for var, mark, why in marks:
                failure = _pass_for(core, op, var, mark, why) or failure
            yield op, core._execute_carefully(op, on_stream=True) or failure
            block = False

    def close(self, core: Runs | None) -> None:
        """Close the worker. The last worker of a device releases its streams, except those that a var's mark holds."""
        with _lock:
            self._pool.users -= 1
            if core is not None and not self._pool.users:
                with suppress(ValueError):
                    core._streams.remove(self._pool)


class BrokenDevice:
    """Stand-in for an unusable device: every operation on it fails with the reason, but deletes run."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def run(self, core: Runs, op: OprBlock) -> Outcome:
        """Return the failure, or run a delete."""
        if op.prop is FnProperty.DELETE_VAR:
            return core._execute_carefully(op)
        return Failure.of(op, self._error)

    def start(self, core: Runs, op: OprBlock, on_outcome: Callable[[Outcome], None]) -> None:
        """Report the failure immediately."""
        on_outcome(Failure.of(op, self._error))

    def has_deferred_deletes(self) -> bool:
        """Return False: no delete waits for events."""
        return False

    def finish_deletes(self, core: Runs, *, block: bool) -> Iterator[tuple[OprBlock, Outcome]]:
        """Do nothing."""
        return iter(())

    def close(self, core: Runs | None) -> None:
        """Do nothing."""


def enter(core: Runs, context: Context | None) -> StreamWorker | BrokenDevice | None:
    """Return the object that runs operations for a new worker of ``context``; None for plain calls."""
    if context is None or not context.has_streams:
        return None
    try:
        device = devices.get(context)
        return StreamWorker(core, device) if device.asynchronous else None
    except Exception as error:
        return BrokenDevice(error)
