"""A memory snapshot: the blocks of every pool, their contents and allocation sites, recent events.

It can be written as the file that PyTorch's memory viewer (https://docs.pytorch.org/memory_viz) opens, and as a page of
its own that loads nothing from anywhere. Device numbers in the file are places in :attr:`Snapshot.contexts`.
"""

from __future__ import annotations

import os
import pickle
import re
from dataclasses import dataclass
from typing import Any

from weftplan.device.context import Context
from weftplan.storage import registry
from weftplan.storage.base import Segment, Statistics
from weftplan.storage.recording import Event, Record, address_of, events_of, records
from weftplan.storage.report import settings_in_force
from weftplan.support import slots
from weftplan.support.atomic_files import replacing, write_text

_ORIGIN = re.compile(r"(?P<name>.*) at (?P<filename>.*):(?P<line>\d+)")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Memory at one moment.

    Attributes:
        contexts: every context whose memory has been asked for.
        statistics, segments: of each of them.
        records: what was recorded before, as :attr:`events` shows it.
        settings: variables in force, in words.
    """

    contexts: tuple[Context, ...]
    statistics: tuple[Statistics, ...]
    segments: tuple[tuple[Segment, ...], ...]
    records: tuple[Record, ...]
    settings: str

    @property
    def events(self) -> tuple[Event, ...]:
        """What was recorded before, oldest first; empty unless ``storage.record()`` was called."""
        return tuple(events_of(self.records))

    def as_dict(self) -> dict[str, object]:
        """The form that PyTorch's memory viewer reads, which is that of ``torch.cuda.memory._snapshot()``."""
        index = {context: place for place, context in enumerate(self.contexts)}
        traces: list[list[dict[str, object]]] = [[] for _ in self.contexts]
        for event in self.events:
            if event.context in index:
                traces[index[event.context]] += _entries(event)
        return {
            "segments": [_segment(segment, place) for place, found in enumerate(self.segments) for segment in found],
            "device_traces": traces,
            "allocator_settings": {"weftplan": self.settings},
            "external_annotations": [],
            "weftplan_contexts": [str(context) for context in self.contexts],
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write :meth:`as_dict` as the pickle that PyTorch's viewer opens.

        Raises:
            OSError: the file cannot be written; what was there is still there.
        """
        with replacing(path) as file:
            pickle.dump(self.as_dict(), file, protocol=4)

    def to_html(self, path: str | os.PathLike[str] | None = None) -> str:
        """A page with bytes over time, the blocks and the largest holders; written to ``path`` if one is given.

        Raises:
            OSError: the file cannot be written; what was there is still there.
        """
        text = slots.MEMORY_PAGE.get()(self)
        if path is not None:
            write_text(path, text)
        return text


def snapshot() -> Snapshot:
    """Memory of all contexts now; with the events before it where :func:`weftplan.storage.record` was called."""
    resources = registry.in_use()
    return Snapshot(
        tuple(resources),
        tuple(resource.statistics() for resource in resources.values()),
        tuple(tuple(resource.segments()) for resource in resources.values()),
        tuple(records()),
        settings_in_force(),
    )


def frames_of(name: object) -> list[dict[str, object]]:
    """Who asked for memory, as a stack of at most one frame.

    >>> frames_of("zeros at train.py:12"), frames_of(None)
    ([{'name': 'zeros', 'filename': 'train.py', 'line': 12}], [])
    """
    if name is None:
        return []
    found = _ORIGIN.fullmatch(str(name))
    if found is None:
        return [{"name": str(name), "filename": "", "line": 0}]
    return [{"name": found["name"], "filename": found["filename"], "line": int(found["line"])}]


def _segment(segment: Segment, place: int) -> dict[str, object]:
    """One block of the system, as the viewer wants it."""
    begin = address_of(segment.raw)
    blocks: list[dict[str, Any]] = []
    for offset, nbytes, held in segment.parts:
        blocks.append(
            {
                "address": begin + offset,
                "size": nbytes,
                "requested_size": nbytes if held is None else held.nbytes,
                "state": "inactive" if held is None else "active_allocated",
                "frames": [] if held is None else frames_of(held.name),
            }
        )
    active = [block for block in blocks if block["state"] == "active_allocated"]
    return {
        "device": place,
        "address": begin,
        "total_size": int(segment.raw.nbytes),
        "allocated_size": sum(block["size"] for block in active),
        "active_size": sum(block["size"] for block in active),
        "requested_size": sum(block["requested_size"] for block in active),
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": blocks,
    }


def _entries(event: Event) -> list[dict[str, object]]:
    """What the viewer shows of one event: a free is asked for and done in one."""
    entry: dict[str, object] = {
        "action": event.action,
        "addr": event.address,
        "size": event.nbytes,
        "stream": 0,
        "time_us": event.time_ns // 1000,
        "frames": frames_of(event.name),
    }
    if event.action == "oom":
        return [{**entry, "addr": 0, "device_free": event.address}]
    if event.action == "free":
        return [{**entry, "action": "free_requested"}, {**entry, "action": "free_completed"}]
    return [entry]
