"""The runner of a program on devices: inside one engine operation, on the runner's own streams.

The engine orders the operation among others and makes one stream current. Everything here waits for the work before it
on that stream, and that stream waits for everything here, so to the engine it is one piece of work, however many
devices take part. Within, events order the steps. Where no stream is current the work has ended when the call returns.

Several engine threads may run programs of one store: their steps may meet on a stream, which changes no result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from weftplan import device
from weftplan.device.base import Device, Event, Stream
from weftplan.device.context import Context
from weftplan.device.links import HOST
from weftplan.kvstore.exchange.program import Piece, Program
from weftplan.kvstore.summing import add_on_device
from weftplan.locks import Lock, free_in_children
from weftplan.support.array_types import RawArray

Lookup = Callable[[Piece], RawArray]
"""The elements of a piece, as a flat raw array."""
Passed = tuple[Stream, Event]
"""A point in a stream."""
Lane = tuple[int, int, int]
"""The places of a step's source and target, and one of :data:`SERIES` for additions."""
SERIES = 4
"""Streams for the additions of one place, which the keys of a bucket share: a short sum waits for no long one."""


class Runner:
    """Streams of these devices: for each stream of operations, a stream for each lane of the programs."""

    def __init__(self, contexts: Sequence[Context]) -> None:
        self._contexts = list(contexts)
        self._devices = [device.get(context) for context in contexts]
        self._streams: dict[tuple[Stream | None, Lane], Stream] = {}
        self._lock = free_in_children(Lock())
        """Held while an operation is enqueued."""

    @contextmanager
    def lanes(self) -> Iterator[Lanes]:
        """Enqueue work on lanes, after what the current stream has and before what it gets later."""
        current = device.current_stream()
        with self._lock:
            main = self._devices[0].new_stream() if current is None else current
            lanes = Lanes(self, main, keep=current)
            yield lanes
            lanes.join()
        if current is None:
            main.synchronize()

    def place(self, context: Context) -> int:
        """Return the place of a device."""
        return self._contexts.index(context)

    def stream(self, main: Stream | None, lane: Lane) -> Stream:
        """Return the stream of a lane for operations on ``main``."""
        stream = self._streams.get((main, lane))
        if stream is None:
            stream = self._streams[main, lane] = self.device(*lane[:2]).new_stream()
        return stream

    def device(self, source: int, target: int) -> Device:
        """Return the device whose streams a step uses: the target, unless that is the host."""
        return self._devices[source if target == HOST else target]


class Lanes:
    """The streams of one operation."""

    def __init__(self, runner: Runner, main: Stream, *, keep: Stream | None) -> None:
        self._runner, self._main, self._keep = runner, main, keep
        self._begin = main.record()
        self._used: dict[Lane, Stream] = {}

    def program(
        self, program: Program, lookup: Lookup, before: Sequence[Passed] = (), *, number: int = 0
    ) -> list[Passed]:
        """Enqueue all steps after the events ``before``; return the event after each step.

        Args:
            number: of the program within its bucket.
        """
        passed: list[Passed] = []
        for step in program.steps:
            source, goal = step.lane
            stream = self._stream((source, goal, number % SERIES if source == goal else 0))
            for other, event in [passed[number] for number in step.after] or before:
                if other is not stream:
                    stream.wait(event)
            target, sources = lookup(step.target), [lookup(source) for source in step.sources]
            place = self._runner.device(source, goal)
            with stream:
                if len(sources) == 1:
                    place.copy(target, sources[0])
                else:
                    place.launch(partial(add_on_device, sources, target))
            passed.append((stream, stream.record()))
        return passed

    def launch(self, context: Context, work: Callable[[], object], before: Sequence[Passed]) -> Passed:
        """Enqueue work on a device after the events ``before``; return the event after it."""
        place = self._runner.place(context)
        stream = self._stream((place, place, 0))
        for other, event in before:
            if other is not stream:
                stream.wait(event)
        with stream:
            work()
        return stream, stream.record()

    def join(self) -> None:
        """Let the main stream wait for all lanes."""
        for stream in self._used.values():
            self._main.wait(stream.record())

    def _stream(self, lane: Lane) -> Stream:
        stream = self._used.get(lane)
        if stream is None:
            stream = self._used[lane] = self._runner.stream(self._keep, lane)
            stream.wait(self._begin)
        return stream
