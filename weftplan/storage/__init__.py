"""Storage: ownership of bytes. ``storage.get(ctx)`` is the process-wide resource of a context.

Importing the package fills the slots of ``device``. Any thread may call the public functions. ARCHITECTURE.md
describes how resources stack.
"""

from weftplan.storage.adaptors import LimitResource, PoisonResource, StatisticsResource
from weftplan.storage.auto_growth import AutoGrowth
from weftplan.storage.base import Allocation, Resource, Statistics
from weftplan.storage.guard import GuardResource
from weftplan.storage.mxnet_pools import NaivePool, RoundPool
from weftplan.storage.naive_best_fit import NaiveBestFit
from weftplan.storage.raw import RawResource
from weftplan.storage.recording import record, stop_recording
from weftplan.storage.registry import (
    check_guards,
    compact,
    empty_cache,
    get,
    in_use,
    memory_summary,
    reset_peaks,
    using,
)
from weftplan.storage.snapshot import Snapshot, snapshot
from weftplan.support import slots

slots.EMPTY_CACHE.fill(empty_cache)
slots.TEMPORARY_SOURCE.fill(get)

__all__ = [
    "Allocation",
    "AutoGrowth",
    "GuardResource",
    "LimitResource",
    "NaiveBestFit",
    "NaivePool",
    "PoisonResource",
    "RawResource",
    "Resource",
    "RoundPool",
    "Snapshot",
    "Statistics",
    "StatisticsResource",
    "check_guards",
    "compact",
    "empty_cache",
    "get",
    "in_use",
    "memory_summary",
    "record",
    "reset_peaks",
    "snapshot",
    "stop_recording",
    "using",
]


def __dir__() -> list[str]:
    return sorted(__all__)
