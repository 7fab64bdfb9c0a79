"""Streams: order on devices whose functions only enqueue their kernels.

A device has a few streams, whoever enqueues: an operation continues the stream of one whose result it takes, as long as
nothing has come after that there, else it takes the next; so independent chains go side by side whichever worker finds
them. Copies to and from the device have a stream each. Exchanges between devices, which are prioritized work, have a
few streams of their own in turn: a computation that is enqueued later does not wait for one. The stream is current
while the operation runs, which is over for the engine when its function has returned, so what depends on it is
dispatched while the device still works; the rest is events:

    a var remembers the event after its last write, and per stream the event after the last read since
    an operation on a stream      makes it wait for the writers' events of what it reads, and for the writer's and all
                                  readers' of what it writes, unless they are of the same stream
    an operation on a CPU, a wait block the host on the same events
    a delete                      is held back until all events of the var have passed: only then is memory free

Marks are changed by the operation that holds the var (alone for a write); several readers of one var may add theirs at
the same time, under ``_lock``. Events are recorded under it, too: of two workers on one stream

    1: enqueue a read    1: record    2: enqueue a read    2: record    2: store its mark    1: store its mark

would leave a mark that does not cover the second read.

Work that fails after it was enqueued: a device that can tell whose it was (``Stream.work``) gives the mark's event the
fault, also of what the work was made of, and all who wait for the event are told. What comes of it is what would have
come if the operation had failed at once: who reads it fails alike, who writes over it does unless it was pushed after
the user had been told. Where several have failed, which of them is named depends on what is known by then. CUDA cannot
tell: its error is of whatever the stream has done, and of all that comes later.

Below ``_lock`` there are only the device's own locks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from weftplan import device as devices
from weftplan.engine.failure import Failure, Outcome
from weftplan.engine.operation import FnProperty, OprBlock
from weftplan.locks import Lock, free_in_children

if TYPE_CHECKING:
    from weftplan.device.base import Device, Event, Stream, Work
    from weftplan.device.context import Context
    from weftplan.engine.types import Runs
    from weftplan.engine.var import Var

_lock = free_in_children(Lock())
_LANES = 4
"""Streams for exchanges: so many buckets are in flight on a device."""
LATER = cast("Outcome", object())
"""What :meth:`StreamWorker.run` returns for a delete that has been put off; :meth:`StreamWorker.bury` ends it."""


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
    """What the streams still do to one var."""

    __slots__ = ("readers", "writer")

    def __init__(self, writer: Mark | None) -> None:
        self.writer = writer
        self.readers: dict[Stream, Mark] = {}

    def __repr__(self) -> str:
        return f"<VarEvents: {'written' if self.writer else 'not written'}, {len(self.readers)} readers>"


class Why(Enum):
    """Why an operation comes after a mark: it takes over the mark's failure only in the first two cases."""

    READS = 1
    """What was written there; failed, it cannot be read."""
    OVERWRITES = 2
    """What was written there; failed, it may be written again by whoever was pushed after the user had been told."""
    FOLLOWS_READER = 3
    """What was only read there."""


Before = list[tuple["Var", Mark, Why]]


def marks_before(op: OprBlock) -> Iterator[tuple[Var, Mark, Why]]:
    """(var, mark, why) of everything on streams that must have passed before ``op`` may touch its vars."""
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
    """Block until ``op``, which runs on the host, may touch its vars; a device's error is its failure."""
    found: Failure | None = None
    for var, mark, why in marks_before(op):
        failure = _pass_for(core, op, var, mark, why)
        found = found or failure
    for var in op.writes:
        var.events = None
    return found


def synchronize_var(core: Runs, var: Var) -> None:
    """Block until the last write of ``var`` has passed; a device's error becomes the var's failure."""
    events = var.events
    if events is not None and events.writer is not None:
        _pass(core, var, events.writer)


def _pass_for(core: Runs, op: OprBlock, var: Var, mark: Mark, why: Why) -> Failure | None:
    """Block until the mark has passed; the failure because of which ``op`` must be skipped."""
    if why is Why.FOLLOWS_READER:
        with suppress(Exception):  # whoever wants what the reader wrote is told
            mark.event.synchronize()
        return None
    failure = _pass(core, var, mark)
    return failure if failure is not None and (why is Why.READS or failure.blocks(op.seq, var, op.fn)) else None


def _pass(core: Runs, var: Var, mark: Mark) -> Failure | None:
    """Block until the mark, which is of the last write of ``var``, has passed; the failure that the var has by it."""
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


def _failure_of(core: Runs, fault: Any, stream: Stream) -> Failure:
    """The one failure that all who meet ``fault`` are told."""
    if fault.kept is None:
        name, site, seq = fault.owner or (f"work on {stream!r}", None, 0)
        failure = Failure(fault.error, name, site, seq)

        def note() -> None:
            if fault.kept is None:
                fault.kept = failure
                core._add_unobserved(failure)

        core._exclusively(note)
    found: Failure = fault.kept
    return found


class StreamPool:
    """The streams of one device on one engine, used by all its workers."""

    def __init__(self, place: Device, count: int) -> None:
        self.place = place
        self.users = 0
        self.inward, self.outward = place.new_stream(), place.new_stream()
        self._compute = [place.new_stream() for _ in range(count)]
        self._last: dict[Stream, int] = dict.fromkeys(self._compute, -1)
        """By stream: the number of the operation that was put there last."""
        self._turn = 0
        self._exchange = [place.new_stream() for _ in range(_LANES)]
        self._lane = 0

    def choose(self, op: OprBlock) -> Stream:
        """The stream that ``op`` goes to."""
        if op.prop is FnProperty.COPY_TO_GPU:
            return self.inward
        if op.prop is FnProperty.COPY_FROM_GPU:
            return self.outward
        if op.prop is FnProperty.GPU_PRIORITIZED:
            self._lane += 1
            return self._exchange[self._lane % _LANES]
        with _lock:
            chosen, newest = None, -1
            for var in (*op.reads, *op.writes):
                mark = None if var.events is None else var.events.writer
                if mark is not None and mark.seq > newest and self._last.get(mark.stream) == mark.seq:
                    chosen, newest = mark.stream, mark.seq
            if chosen is None:
                chosen = self._compute[self._turn % len(self._compute)]
                self._turn += 1
            self._last[chosen] = op.seq
        return chosen

    def drain(self, core: Runs) -> None:
        """Block until everything enqueued has passed; an error becomes a failure that wait_for_all raises."""
        for stream in (self.inward, self.outward, *self._compute, *self._exchange):
            try:
                faults = stream.finish()
            except Exception as error:
                failure = Failure(error, f"work on {stream!r}", None, 0)
                core._exclusively(partial(core._add_unobserved, failure))
            else:
                for fault in faults:
                    _failure_of(core, fault, stream)


def pool_of(core: Runs, place: Device) -> StreamPool:
    """The streams of a device, made for its first worker; to be left with :meth:`StreamWorker.close`."""
    with _lock:
        pool = next((pool for pool in core._streams if pool.place is place), None)
        if pool is None:
            pool = StreamPool(place, _count(core))
            core._streams.append(pool)
        pool.users += 1
        found: StreamPool = pool
        return found


def _count(core: object) -> int:
    """Streams on which an engine computes on one device: as many as workers."""
    return max(1, int(getattr(core, "_gpu_workers", 1)))


def compute_streams(core: object, contexts: Iterable[Context]) -> int:
    """Most streams of one of these devices on which an engine computes at the same time; 0 where none has streams."""
    return _count(core) if any(context.has_streams for context in contexts) else 0


class StreamWorker:
    """What a worker thread of an asynchronous device runs operations with."""

    def __init__(self, core: Runs, place: Device) -> None:
        self._graveyard: list[tuple[Before, OprBlock]] = []
        # Before any operation of this worker can be granted to others, everybody is careful.
        core._streams_used = True
        core._careful = True
        self._pool = pool_of(core, place)

    def run(self, core: Runs, op: OprBlock) -> Outcome:
        """As ``engine._execute``, or LATER."""
        if op.prop is FnProperty.DELETE_VAR:
            marks = list(marks_before(op))
            if marks:
                self._graveyard.append((marks, op))
                return LATER
            return core._execute_carefully(op, on_stream=True)
        try:
            stream = self._pool.choose(op)
            before = list(marks_before(op))
            late = self._wait_for_others(core, op, stream, before)
            if late is not None and op.prop is not FnProperty.NO_SKIP:
                return late
            work = stream.work(lambda: (op.label, op.site, op.seq))
            with stream, work:
                failure = core._execute_carefully(op, on_stream=True)
            self._mark(op, stream, work, before, failure)
        except BaseException as error:  # of the device: it takes no more work
            return Failure.of(op, error)
        return failure

    def start(self, core: Runs, op: OprBlock, done: Callable[[Outcome], None]) -> None:
        """As ``engine._start_async``: what was enqueued when the operation says that it is done counts as its work."""

        stream = self._pool.choose(op)
        before = list(marks_before(op))
        work = stream.work(lambda: (op.label, op.site, op.seq))

        def complete(failure: Outcome) -> None:
            try:
                self._mark(op, stream, work, before, failure)
            except BaseException as error:
                failure = failure or Failure.of(op, error)
            done(failure)

        try:
            late = self._wait_for_others(core, op, stream, before)
        except BaseException as error:
            late = Failure.of(op, error)
        if late is not None and op.prop is not FnProperty.NO_SKIP:
            done(late)
            return
        with stream, work:
            core._start_async(op, complete, on_stream=True)

    def _wait_for_others(self, core: Runs, op: OprBlock, stream: Stream, before: Before) -> Failure | None:
        """Order ``stream``, where ``op`` goes, behind what other streams do to its vars. Without this call a stream
        would read what another has not written yet.

        Devices of different kinds do not know each other's events: the host waits, and is told what has failed there.
        """
        found: Failure | None = None
        for var, mark, why in before:
            if mark.stream is not stream:
                if type(mark.stream) is type(stream):
                    stream.wait(mark.event)
                else:
                    failure = _pass_for(core, op, var, mark, why)
                    found = found or failure
        return found

    def _mark(self, op: OprBlock, stream: Stream, work: Work, before: Before, failure: Outcome) -> None:
        """Note that the work of ``op`` ends here.

        On the device it takes over the faults of what it was made of, unless it is never skipped, or the engine knows
        already that it has failed, and so why.
        """
        after: list[Event] = []
        over: list[Event] = []
        if op.prop is not FnProperty.NO_SKIP and (failure is None or isinstance(failure, dict)):
            for _, earlier, why in before:
                if why is not Why.FOLLOWS_READER and type(earlier.stream) is type(stream):
                    (after if why is Why.READS else over).append(earlier.event)
        with _lock:
            mark = Mark(stream, work.record(stream, op.seq, after, over), op)
            for var in op.reads:
                if var.events is None:
                    var.events = VarEvents(None)
                var.events.readers[stream] = mark
            for var in op.writes:
                var.events = VarEvents(mark)

    def has_graves(self) -> bool:
        """True when deletes wait for events."""
        return bool(self._graveyard)

    def bury(self, core: Runs, *, block: bool) -> Iterator[tuple[OprBlock, Outcome]]:
        """End the deletes whose events have passed; ``block``: the oldest after waiting for it.

        Yields (operation, failure); the caller finishes it.
        """
        while self._graveyard:
            marks, op = self._graveyard[0]
            if not block and not all(mark.event.query() for _, mark, _ in marks):
                return
            self._graveyard.pop(0)
            failure = None
            for var, mark, why in marks:
                failure = _pass_for(core, op, var, mark, why) or failure
            yield op, core._execute_carefully(op, on_stream=True) or failure
            block = False

    def close(self, core: Runs | None) -> None:
        """End the worker. The streams of a device go with its last worker, except those of which a var has a mark."""
        with _lock:
            self._pool.users -= 1
            if core is not None and not self._pool.users:
                with suppress(ValueError):
                    core._streams.remove(self._pool)


class BrokenDevice:
    """Stands for a device that cannot be used: every operation on it fails with the reason, deletes still run."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def run(self, core: Runs, op: OprBlock) -> Outcome:
        """Return the failure."""
        if op.prop is FnProperty.DELETE_VAR:
            return core._execute_carefully(op)
        return Failure.of(op, self._error)

    def start(self, core: Runs, op: OprBlock, done: Callable[[Outcome], None]) -> None:
        """Tell the failure at once."""
        done(Failure.of(op, self._error))

    def has_graves(self) -> bool:
        """False: no delete ever waits for an event."""
        return False

    def bury(self, core: Runs, *, block: bool) -> Iterator[tuple[OprBlock, Outcome]]:
        """Do nothing."""
        return iter(())

    def close(self, core: Runs | None) -> None:
        """Do nothing."""


def enter(core: Runs, context: Context | None) -> StreamWorker | BrokenDevice | None:
    """What a new worker of a queue of ``context`` runs operations with; None: plain calls."""
    if context is None or not context.has_streams:
        return None
    try:
        place = devices.get(context)
        return StreamWorker(core, place) if place.asynchronous else None
    except Exception as error:
        return BrokenDevice(error)
