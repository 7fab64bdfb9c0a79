"""The runner of a program on devices: inside one engine operation, on the runner's own streams.

The engine orders the operation among others and makes one stream current. Everything here waits for the work before it
on that stream, and that stream waits for everything here, so to the engine it is one piece of work, however many
devices take part. Within, events order the steps. Where no stream is current the work has ended when the call returns.

Several engine threads may run programs of one store: their steps may meet on a stream, which changes no result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from weftplan import device
from weftplan.device.base import Event, Stream
from weftplan.device.context import Context
from weftplan.device.links import HOST
from weftplan.kvstore.exchange.program import Piece, Program, Step
from weftplan.kvstore.gpu_sum import sum_in_one_launch
from weftplan.kvstore.reduce import sum_sequential_block
from weftplan.locks import Lock, free_in_children
from weftplan.ndarray.errstate import quietly
from weftplan.support.array_types import RawArray

Lookup = Callable[[Piece], RawArray]
"""The elements of a piece, as a flat raw array."""


class Runner:
    """Streams of these devices, one for each lane that programs have."""

    def __init__(self, contexts: Sequence[Context]) -> None:
        self._devices = [device.get(context) for context in contexts]
        self._streams: dict[tuple[int, int], Stream] = {}
        self._lock = free_in_children(Lock())
        """Held while steps are enqueued."""

    def run(self, program: Program, home: int, lookup: Lookup) -> None:
        """Do all steps; ``home`` is where the engine's operation runs."""
        pieces = [(lookup(step.target), [lookup(source) for source in step.sources]) for step in program.steps]
        current = device.current_stream()
        main = self._devices[home].new_stream() if current is None else current
        with self._lock:
            begin = main.record()
            used: dict[tuple[int, int], Stream] = {}
            passed: list[tuple[Stream, Event]] = []
            for step, (target, sources) in zip(program.steps, pieces, strict=True):
                stream = self._stream(step.lane)
                if step.lane not in used:
                    used[step.lane] = stream
                    stream.wait(begin)
                for before in step.after:
                    other, event = passed[before]
                    if other is not stream:
                        stream.wait(event)
                with stream:
                    self._do(step, target, sources)
                passed.append((stream, stream.record()))
            for stream in used.values():
                main.wait(stream.record())
        if current is None:
            main.synchronize()

    def _do(self, step: Step, target: RawArray, sources: list[RawArray]) -> None:
        place = self._devices[_owner(step.lane)]
        if len(sources) == 1:
            place.copy(target, sources[0])
        else:
            place.launch(partial(_add, sources, target))

    def _stream(self, lane: tuple[int, int]) -> Stream:
        found = self._streams.get(lane)
        if found is None:
            found = self._streams[lane] = self._devices[_owner(lane)].new_stream()
        return found


def _owner(lane: tuple[int, int]) -> int:
    """Whose stream a lane is: the target's, unless that is the host."""
    return lane[0] if lane[1] == HOST else lane[1]


def _add(sources: Sequence[RawArray], target: RawArray) -> None:
    if isinstance(target, np.ndarray):  # of a simulated device
        quietly(sum_sequential_block, sources, target, target)
    else:
        sum_in_one_launch(sources, target)
