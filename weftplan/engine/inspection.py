"""Engine statistics, and pending operations with their dependencies, as text or a DOT graph.

:func:`snapshot` and :func:`holders` run inside the region. Text is made later, by any thread, from the copies in a
snapshot, because names may be user code.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from weftplan.device.context import Context
from weftplan.engine.operation import OprBlock, Waiter, label_of
from weftplan.engine.var import Var


@dataclass(frozen=True, slots=True)
class QueueStatistics:
    """One queue: its device and name, completed operations, queued operations, workers."""

    context: Context | None
    queue: str
    completed: int
    depth: int
    workers: int


@dataclass(frozen=True, slots=True)
class Statistics:
    """Counts of an engine since its creation: operations pushed, completed, failed, skipped, pending."""

    pushed: int
    completed: int
    failed: int
    skipped: int
    pending: int
    queues: tuple[QueueStatistics, ...]


class Pending(NamedTuple):
    """One pending operation at the time of a snapshot."""

    op: OprBlock
    fn: object
    waits: bool
    blockers: list[tuple[Var, Var, OprBlock, object]]
    """(var without a grant, copy of it, operation that holds it, function of that operation)."""

    def label(self) -> str:
        """Return its label."""
        return label_of(self.fn, self.op.name)


def users_pending() -> bool:
    """Return whether a user's operation is pending on any engine. For exit only."""
    # Scan all objects, a tenth of a second in a large process: a counter would cost every operation time. `isinstance`
    # would call user code: proxies are among them, even dead proxies.
    return any(
        issubclass(type(block), OprBlock) and type(block) is not Waiter and not block.internal
        for block in gc.get_objects()
    )


def snapshot(ops: Sequence[OprBlock]) -> list[Pending]:
    """Inside: return the state of ``ops``. Calls no user code."""
    return [
        Pending(op, op.fn, op.wait > 0, [(v, _copy(v), o, o.fn) for v, o in holders(op, ops)] if op.wait > 0 else [])
        for op in ops
    ]


def holders(op: OprBlock, ops: Sequence[OprBlock]) -> list[tuple[Var, OprBlock]]:
    """Return (var, operation that holds it) for every var that ``op`` has not been granted, if the holder is known."""
    holding = []
    for var in (*op.reads, *op.writes):
        # A write that came earlier holds the var. If the operation is itself the write, the granted readers hold it.
        writer = var.write
        if writer is not None and writer is not op:
            holding.append((var, writer))
        elif var in op.writes and var.readers:
            holding += [(var, other) for other in ops if other is not op and var in other.reads and other.seq < op.seq]
    return holding


def _copy(var: Var) -> Var:
    """Return a copy with everything that ``repr`` shows."""
    copy = Var(var.engine, var.name)
    copy.version, copy.readers, copy.write = var.version, var.readers, var.write
    copy.waiting, copy.head = list(var.waiting or ()), var.head
    copy.failure, copy.deleted = var.failure, var.deleted
    return copy


def dump_text(head: str, pending: Sequence[Pending], *, hidden: bool) -> str:
    """Return one line per pending operation, then the holders of its missing vars. ``hidden``: more are pending."""
    lines = [head]
    if not pending and hidden:
        lines.append("set WEFTPLAN_ENGINE_DEBUG=1 before the engine is made to see every pending operation")
    for entry in pending:
        op = entry.op
        state = "waits" if entry.waits else "runs or is queued"
        lines.append(f"  #{op.seq} {entry.label()!r} on {op.ctx or 'cpu(0)'}, pushed at {op.location()}: {state}")
        for _, var, other, fn in entry.blockers:
            lines.append(f"      for {var!r}, held by #{other.seq} {label_of(fn, other.name)!r} ({other.location()})")
    return "\n".join(lines) + "\n"


def dump_dot(pending: Sequence[Pending]) -> str:
    """Return a DOT graph with an arrow from the operation that holds a var to each that waits for it."""

    def text(value: str) -> str:
        return value.replace("\\", "\\\\").replace('"', '\\"')

    lines = ["digraph engine {", "  rankdir=LR; node [shape=box];"]
    for entry in pending:
        style = "" if entry.waits else ", style=filled, fillcolor=lightgreen"
        lines.append(f'  op{entry.op.seq} [label="#{entry.op.seq} {text(entry.label())}"{style}];')
    for entry in pending:
        for var, _, other, _ in entry.blockers:
            label = text(var.name or f"var {id(var):x}")
            lines.append(f'  op{other.seq} -> op{entry.op.seq} [label="{label}"];')
    return "\n".join([*lines, "}"]) + "\n"
