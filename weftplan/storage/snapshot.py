"""Memory snapshot: the blocks of every pool, their contents and allocation sites, recent events.

It can be saved for PyTorch's memory viewer (https://docs.pytorch.org/memory_viz) or as a self-contained page. Device
numbers in the file are indices into :attr:`Snapshot.contexts`.
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
from weftplan.storage.recording import Record, StorageEvent, address_of, events_of, records
from weftplan.storage.report import settings_in_force
from weftplan.support import slots
from weftplan.support.atomic_files import replacing, write_text

_ORIGIN = re.compile(r"(?P<name>.*) at (?P<filename>.*):(?P<line>\d+)")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Memory at one moment.

    Attributes:
        contexts: every context in use.
        statistics, segments: per context.
        records: earlier records; :attr:`events` converts them.
        settings: variables in force, as text.
    """

    contexts: tuple[Context, ...]
    statistics: tuple[Statistics, ...]
    segments: tuple[tuple[Segment, ...], ...]
    records: tuple[Record, ...]
    settings: str

    @property
    def events(self) -> tuple[StorageEvent, ...]:
        """Earlier events, oldest first; empty unless ``storage.record()`` was called."""
        return tuple(events_of(self.records))

    def as_dict(self) -> dict[str, object]:
        """Return the format of PyTorch's memory viewer, that of ``torch.cuda.memory._snapshot()``."""
        index = {context: number for number, context in enumerate(self.contexts)}
        traces: list[list[dict[str, object]]] = [[] for _ in self.contexts]
        for event in self.events:
            if event.context in index:
                traces[index[event.context]] += _entries(event)
        return {
            "segments": [
                _segment(segment, number) for number, segments in enumerate(self.segments) for segment in segments
            ],
            "device_traces": traces,
            "allocator_settings": {"weftplan": self.settings},
            "external_annotations": [],
            "weftplan_contexts": [str(context) for context in self.contexts],
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save :meth:`as_dict` as a pickle for PyTorch's viewer.

        Raises:
            OSError: the file cannot be written; an existing file is unchanged.
        """
        with replacing(path) as file:
            pickle.dump(self.as_dict(), file, protocol=4)

    def to_html(self, path: str | os.PathLike[str] | None = None) -> str:
        """Return a page with bytes over time, the blocks and the largest holders; also write it to ``path``.

        Raises:
            OSError: the file cannot be written; an existing file is unchanged.
        """
        text = slots.MEMORY_PAGE.get()(self)
        if path is not None:
            write_text(path, text)
        return text


def snapshot() -> Snapshot:
    """Return the present memory of all contexts, with earlier events if :func:`weftplan.storage.record` was called."""
    resources = registry.in_use()
    return Snapshot(
        tuple(resources),
        tuple(resource.statistics() for resource in resources.values()),
        tuple(tuple(resource.segments()) for resource in resources.values()),
        tuple(records()),
        settings_in_force(),
    )


def frames_of(name: object) -> list[dict[str, object]]:
    """Return the allocation site as a stack of at most one frame.

    >>> frames_of("zeros at train.py:12"), frames_of(None)
    ([{'name': 'zeros', 'filename': 'train.py', 'line': 12}], [])
    """
    if name is None:
        return []
    site = _ORIGIN.fullmatch(str(name))
    if site is None:
        return [{"name": str(name), "filename": "", "line": 0}]
    return [{"name": site["name"], "filename": site["filename"], "line": int(site["line"])}]


def _segment(segment: Segment, number: int) -> dict[str, object]:
    """Return one system block in the viewer's format."""
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
        "device": number,
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


def _entries(event: StorageEvent) -> list[dict[str, object]]:
    """Return the viewer's entries for one event; a free has two."""
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
