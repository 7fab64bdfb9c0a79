"""When dead results of a dynamic executor give their memory back: the rules of Paddle's garbage collector.

* ``FLAGS_eager_delete_tensor_gb`` below 0: nothing is collected within a run; 0: immediately; above: when that number
  of gigabytes is dead.
* ``FLAGS_memory_fraction_of_eager_deletion``: only the largest, until their bytes are that share of all; the chunk
  that crosses the line is collected whole.
* ``FLAGS_fast_eager_deletion_mode``: on devices with streams memory goes back when the kernels that use it have been
  enqueued, for operations that are enqueued later; else when they are over.
* ``FLAGS_eager_delete_scope``: all other chunks go back at the end of the run; else they stay for the next run.

Everything is decided on the pushing thread, from sizes that are known when the executor is bound.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from weftplan import config
from weftplan.executor.branches import ancestors, parents
from weftplan.executor.schedule import Step
from weftplan.executor.segments import Segment
from weftplan.ndarray.spill.dynamic import DynamicChunk

Local = dict[bool, dict[int, list[DynamicChunk]]]


class Collector:
    """Decides for one executor; the settings are those of the moment when it is made."""

    def __init__(self) -> None:
        self.threshold = float(config.get("FLAGS_eager_delete_tensor_gb")) * 2**30
        self.fraction = float(config.get("FLAGS_memory_fraction_of_eager_deletion"))
        self.fast = bool(config.get("FLAGS_fast_eager_deletion_mode"))
        self.scope = bool(config.get("FLAGS_eager_delete_scope"))
        self._ends: dict[bool, dict[int, list[DynamicChunk]]] = {}
        self._kept: dict[bool, list[DynamicChunk]] = {}
        self._queue: list[DynamicChunk] = []
        self._queued = 0

    def settle(
        self,
        forward: Sequence[Segment],
        backward: Sequence[Segment],
        chunks_of: Callable[[Step], list[DynamicChunk]],
        *,
        inside: bool,
    ) -> Local:
        """Find out where each chunk dies.

        Args:
            forward, backward: segments in the order of their pushes.
            chunks_of: the chunks that a step uses.
            inside: chunks may go back inside a segment, if that segment is ordered after all other users.

        Returns:
            By is_train and node, the chunks that go back when the step of that node is over.
        """
        local: Local = {}
        for is_train in (True, False):
            segments = (*forward, *backward) if is_train else forward
            users: dict[int, int] = defaultdict(int)
            last: dict[int, tuple[int, Step]] = {}
            known: dict[int, Any] = {}
            for number, segment in enumerate(segments):
                for step in segment.steps:
                    for chunk in chunks_of(step):
                        known[id(chunk)] = chunk
                        users[id(chunk)] |= 1 << number
                        last[id(chunk)] = number, step
            behind = _behind(segments)
            chosen = {id(chunk) for chunk in self._chosen(list(known.values()))}
            here: dict[int, list[DynamicChunk]] = defaultdict(list)
            ends: dict[int, list[DynamicChunk]] = defaultdict(list)
            for key, (number, step) in last.items():
                if key not in chosen:
                    continue
                alone = not users[key] & ~(behind[number] | 1 << number)
                # A step on a stream cannot give memory of a host back: hosts do not wait for its event.
                here_too = inside and (step.context == known[key].context or not step.context.has_streams)
                if here_too and self.threshold == 0 and alone and step.bind is not None:
                    here[step.nid].append(known[key])
                else:
                    ends[number].append(known[key])
            local[is_train], self._ends[is_train] = dict(here), dict(ends)
            self._kept[is_train] = [chunk for key, chunk in known.items() if key not in chosen]
        return local

    def _chosen(self, chunks: list[DynamicChunk]) -> list[DynamicChunk]:
        """The chunks that are collected at all, largest first."""
        if self.threshold < 0:
            return []
        most = self.fraction * sum(chunk.nbytes for chunk in chunks)
        largest, nbytes = [], 0
        for chunk in sorted(chunks, key=lambda chunk: -chunk.nbytes):
            if nbytes >= most:
                break
            largest.append(chunk)
            nbytes += chunk.nbytes
        return largest

    def passed(self, is_train: bool, number: int) -> list[DynamicChunk]:
        """Return the chunks that go back after segment ``number``, which has just been pushed."""
        dead = self._ends[is_train].get(number, ())
        self._queue += dead
        self._queued += sum(chunk.nbytes for chunk in dead)
        return self._emptied() if self._queued >= self.threshold else []

    def ended(self, is_train: bool) -> list[DynamicChunk]:
        """Return the chunks that go back at the end of a run."""
        return [*self._emptied(), *(self._kept[is_train] if self.scope else ())]

    def _emptied(self) -> list[DynamicChunk]:
        dead, self._queue, self._queued = self._queue, [], 0
        return dead


class _Idle:
    """A segment that is not pushed: it waits for no segment, and no segment waits for it."""

    reads = writes = ()


def _behind(segments: Sequence[Segment]) -> list[int]:
    """Return for each segment a mask of the segments that the engine always runs before it, by common vars."""
    return ancestors(parents([segment if segment.pushed else _Idle() for segment in segments]))
