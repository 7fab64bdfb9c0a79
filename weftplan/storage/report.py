"""Text of an out-of-memory error: the request, the holders, the settings, and advice."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable
from typing import Protocol

from weftplan import config
from weftplan.device.context import Context
from weftplan.errors import ConfigError

_LISTED_HOLDERS = 10
"""Origins that an error names, the largest first."""


class Holder(Protocol):
    """Interface of an allocation towards reports."""

    nbytes: int
    name: object


def report(
    nbytes: int,
    *,
    context: Context,
    requested: int,
    allocated: int,
    reserved: int,
    largest_free: int,
    holders: Collection[Holder],
    cause: str,
) -> str:
    """Return the text of an OutOfMemoryError."""
    cached = reserved - allocated
    scattered = f", {1 - largest_free / cached:.0%} of them scattered" if cached > 0 else ""
    return (
        f"out of memory on {context}: {nbytes:,} bytes requested. {cause}\n"
        f"  live: {requested:,} bytes in {len(holders)} allocations ({allocated:,} after rounding)\n"
        f"  reserved from the system: {reserved:,} bytes, {cached:,} of them cached; largest free cached block: "
        f"{largest_free:,} bytes{scattered}\n"
        f"  largest holders: {largest_holders(holders)}\n"
        f"  settings: {settings_in_force()}\n"
        f"  to fit: {advice(context, nbytes, cached, largest_free)}"
    )


def by_origin(holders: Iterable[Holder]) -> dict[str, tuple[int, int]]:
    """Return (bytes, allocations) of each operator or function and line that holds memory."""
    totals: dict[str, tuple[int, int]] = {}
    for allocation in holders:
        origin = "unnamed" if allocation.name is None else str(allocation.name)
        nbytes, number = totals.get(origin, (0, 0))
        totals[origin] = (nbytes + allocation.nbytes, number + 1)
    return totals


def largest_holders(holders: Iterable[Holder], limit: int = _LISTED_HOLDERS) -> str:
    """Return the origins that hold most, as text."""
    origins = by_origin(holders)
    largest = heapq.nlargest(limit, origins.items(), key=lambda item: item[1][0])
    entries = [f"{origin}: {nbytes:,}" + (f" in {n}" if n > 1 else "") for origin, (nbytes, n) in largest]
    if len(origins) > limit:
        entries.append(f"{len(origins) - limit} more")
    return "; ".join(entries) or "nobody"


def settings_in_force() -> str:
    """Return every storage variable that is set, as text."""
    entries = []
    for variable in config.table():
        if variable.group != "storage":
            continue
        try:
            setting = config.lookup(variable.name)
        except ConfigError:
            continue
        if setting.text is not None:
            entries.append(f"{variable.name}={setting.text}")
    return ", ".join(entries) or "all at their defaults"


def advice(context: Context, nbytes: int, cached: int, largest_free: int) -> str:
    """Return suggested changes, the most likely first."""
    suggestions = []
    if cached >= nbytes > largest_free:
        suggestions.append(
            "the free bytes would do but lie apart: set FLAGS_allocator_strategy=naive_best_fit or auto_growth"
        )
    if context.device_type in ("gpu", "sim") and config.lookup("FLAGS_gpu_memory_limit_mb").text is not None:
        suggestions.append("raise FLAGS_gpu_memory_limit_mb")
    suggestions.append("use a smaller batch")
    suggestions.append("drop arrays that are no longer needed")
    suggestions.append("let the planner recompute (MXNET_BACKWARD_DO_MIRROR=1, or simple_bind with memory_budget=)")
    return ", ".join(suggestions)
