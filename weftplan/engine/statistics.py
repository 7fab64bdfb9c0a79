"""Counts of what an engine did."""

from __future__ import annotations

from dataclasses import dataclass

from weftplan.device.context import Context


@dataclass(frozen=True, slots=True)
class QueueStatistics:
    """One queue: where it belongs, how many operations its workers finished, how many wait in it, how many workers."""

    context: Context | None
    queue: str
    completed: int
    depth: int
    workers: int


@dataclass(frozen=True, slots=True)
class Statistics:
    """An engine since it was made: operations pushed, finished, failed, skipped because others failed, pending."""

    pushed: int
    completed: int
    failed: int
    skipped: int
    pending: int
    queues: tuple[QueueStatistics, ...]
