"""Runs programs on several devices within one engine operation, on the runner's own streams.

The engine makes one stream current for the operation, the *main* stream. The steps of a program run on other streams,
after the earlier work of the main stream, and later work of the main stream waits for all steps. So the engine sees one
operation on one stream. Events order the steps among each other. Without a current stream, the call waits for the
steps.

Several engine threads may run programs of one store. Their steps may use the same stream, which changes no result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from weftplan import device
from weftplan.device.base import Device, Event, Stream
from weftplan.device.context import Context
from weftplan.device.links import HOST
from weftplan.kvstore.exchange.program import ExchangeProgram, Piece
from weftplan.kvstore.ways_of_summing import add_on_device
from weftplan.locks import Lock, free_in_children
from weftplan.support.array_types import RawArray

Lookup = Callable[[Piece], RawArray]
"""Function that returns the elements of a piece as a flat raw array."""
Passed = tuple[Stream, Event]
"""A stream, and an event recorded on it."""
Lane = tuple[int, int, int]
"""(position of a step's source, position of its target, index below :data:`SERIES` for additions, else 0)."""
SERIES = 4
"""Streams for the additions of a device. A bucket's keys alternate on them, so that short sums can overlap."""


class Runner:
    """The streams for programs on these devices: a stream for each main stream and lane."""

    def __init__(self, contexts: Sequence[Context]) -> None:
        self._contexts = list(contexts)
        self._devices = [device.get(context) for context in contexts]
        self._streams: dict[tuple[Stream | None, Lane], Stream] = {}
        # Held while an operation is enqueued, so that steps of two operations do not alternate on shared streams.
        self._lock = free_in_children(Lock())

    @contextmanager
    def lanes(self) -> Iterator[Lanes]:
        """Yield the lanes of one operation, whose work runs between the current stream's earlier and later work."""
        current = device.current_stream()
        with self._lock:
            main = self._devices[0].new_stream() if current is None else current
            lanes = Lanes(self, main, keep=current)
            yield lanes
            lanes.join()
        if current is None:
            main.synchronize()

    def position(self, context: Context) -> int:
        """Return the index of a device among the runner's contexts."""
        return self._contexts.index(context)

    def stream(self, main: Stream | None, lane: Lane) -> Stream:
        """Return the stream of a lane for operations on ``main``, created on first use."""
        stream = self._streams.get((main, lane))
        if stream is None:
            stream = self._streams[main, lane] = self.device(*lane[:2]).new_stream()
        return stream

    def device(self, source: int, target: int) -> Device:
        """Return the device whose streams a step uses: the target, or the source if the target is the host."""
        return self._devices[source if target == HOST else target]


class Lanes:
    """The streams of one operation, by lane."""

    def __init__(self, runner: Runner, main: Stream, *, keep: Stream | None) -> None:
        self._runner, self._main, self._keep = runner, main, keep
        self._begin = main.record()
        self._used: dict[Lane, Stream] = {}

    def program(
        self, program: ExchangeProgram, lookup: Lookup, predecessors: Sequence[Passed] = (), *, number: int = 0
    ) -> list[Passed]:
        """Enqueue all steps of a program and return the event after each step.

        Args:
            program: the steps.
            lookup: returns the elements of a piece.
            predecessors: events that steps without predecessors wait for.
            number: index of the program within its bucket, which selects the stream of its additions.
        """
        passed: list[Passed] = []
        for step in program.steps:
            source, goal = step.lane
            stream = self._stream((source, goal, number % SERIES if source == goal else 0))
            for other, event in [passed[number] for number in step.predecessors] or predecessors:
                if other is not stream:
                    stream.wait(event)
            target, sources = lookup(step.target), [lookup(source) for source in step.sources]
            device = self._runner.device(source, goal)
            with stream:
                if len(sources) == 1:
                    device.copy(target, sources[0])
                else:
                    device.launch(partial(add_on_device, sources, target))
            passed.append((stream, stream.record()))
        return passed

    def launch(self, context: Context, work: Callable[[], object], predecessors: Sequence[Passed]) -> Passed:
        """Enqueue ``work`` on a device after the events ``predecessors``; return the event after the work."""
        position = self._runner.position(context)
        stream = self._stream((position, position, 0))
        for other, event in predecessors:
            if other is not stream:
                stream.wait(event)
        with stream:
            work()
        return stream, stream.record()

    def join(self) -> None:
        """Make the main stream wait for all lanes used."""
        for stream in self._used.values():
            self._main.wait(stream.record())

    def _stream(self, lane: Lane) -> Stream:
        stream = self._used.get(lane)
        if stream is None:
            stream = self._used[lane] = self._runner.stream(self._keep, lane)
            stream.wait(self._begin)
        return stream
