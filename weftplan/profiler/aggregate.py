"""The aggregate table: count, total, minimum, maximum and average time per operation name."""

from __future__ import annotations

import json
from dataclasses import dataclass

from weftplan.errors import ParameterError
from weftplan.profiler.recorder import EventRecorder, OperationRecord


@dataclass(slots=True)
class AggregateRow:
    """Durations of one name in milliseconds; ``domain`` is empty for operations of the engine."""

    domain: str
    name: str
    count: int = 0
    total: float = 0.0
    min_ms: float = float("inf")
    max_ms: float = 0.0

    @property
    def average(self) -> float:
        """Return the mean duration in milliseconds."""
        return self.total / self.count if self.count else 0.0

    @property
    def title(self) -> str:
        """Return domain and name as the table shows them."""
        return f"{self.domain}:{self.name}" if self.domain else self.name


_SORT = {"total": "total", "avg": "average", "min": "min_ms", "max": "max_ms", "count": "count"}


def rows(recorder: EventRecorder, *, sort_by: str = "total", ascending: bool = False) -> list[AggregateRow]:
    """Return rows for all records: engine operations and user spans.

    Raises:
        ParameterError: ``sort_by`` is none of total, avg, min, max, count.
    """
    if sort_by not in _SORT:
        raise ParameterError(f"sort_by must be one of {', '.join(_SORT)}, got {sort_by!r}")
    table: dict[tuple[str, str], AggregateRow] = {}
    operations = map(OperationRecord._make, recorder.operations)
    spans = [("", r.name or "operation", r.end_ns - r.start_ns) for r in operations]
    spans += [(u.domain, u.name, u.end_ns - u.start_ns) for u in recorder.user if u.kind == "span"]
    for domain, name, ns in spans:
        row = table.setdefault((domain, name), AggregateRow(domain, name))
        ms = ns / 1e6
        row.count += 1
        row.total += ms
        row.min_ms = min(row.min_ms, ms)
        row.max_ms = max(row.max_ms, ms)
    return sorted(table.values(), key=lambda row: (getattr(row, _SORT[sort_by]), row.title), reverse=not ascending)


def as_text(table: list[AggregateRow]) -> str:
    """Return the table as aligned text."""
    width = max([len(row.title) for row in table] + [len("Name")])
    lines = [f"{'Name':<{width}}  {'Count':>9} {'Total (ms)':>12} {'Min (ms)':>10} {'Max (ms)':>10} {'Avg (ms)':>10}"]
    lines += [
        f"{r.title:<{width}}  {r.count:>9} {r.total:>12.4f} {r.min_ms:>10.4f} {r.max_ms:>10.4f} {r.average:>10.4f}"
        for r in table
    ]
    return "\n".join(lines) + "\n"


def as_json(table: list[AggregateRow]) -> str:
    """Return the table in MXNet's form: ``Time`` -> domain -> name -> Count, Total, Min, Max, Avg (milliseconds).

    Operations of the engine have the domain ``operator``; spans, frames and events have their creator's domain.
    Memory is sampled into the trace and not aggregated: ``Memory`` is empty.
    """
    times: dict[str, dict[str, dict[str, float]]] = {}
    for row in table:
        times.setdefault(row.domain or "operator", {})[row.name] = {
            "Count": row.count,
            "Total": row.total,
            "Min": row.min_ms,
            "Max": row.max_ms,
            "Avg": row.average,
        }
    return json.dumps({"Time": times, "Memory": {}, "Unit": {"Time": "ms", "Memory": "kB"}})
