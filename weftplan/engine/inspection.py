"""Engine statistics, and pending operations with their dependencies, as text or a DOT graph.

:func:`snapshot` and :func:`holders` are for the thread inside the region. Texts are made of the copies that a snapshot
holds, by any thread, later: names may be user code.
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


class Pending(NamedTuple):
    """One operation at a moment; names and texts, which may be user code, are made from it later."""

    op: OprBlock
    fn: object
    waits: bool
    blockers: list[tuple[Var, Var, OprBlock, object]]
    """(var that it has not been granted, copy of it, operation that holds it, that one's function)."""

    def label(self) -> str:
        """Its name."""
        return label_of(self.fn, self.op.name)


def users_pending() -> bool:
    """True while something is pending, on any engine, that the package did not push for itself.

    Nobody counts that, since it would cost every operation something; the interpreter knows which operations there are,
    and one that is over is gone. For the end of the process only: looking takes a tenth of a second in a large one.
    """
    # Not `isinstance`, which asks the object: anybody's proxies are among them, dead ones too.
    return any(
        issubclass(type(thing), OprBlock) and type(thing) is not Waiter and not thing.own for thing in gc.get_objects()
    )


def snapshot(ops: Sequence[OprBlock]) -> list[Pending]:
    """Inside the region: ``ops`` as they are now. Calls nothing of the user's."""
    return [
        Pending(op, op.fn, op.wait > 0, [(v, _copy(v), o, o.fn) for v, o in holders(op, ops)] if op.wait > 0 else [])
        for op in ops
    ]


def holders(op: OprBlock, ops: Sequence[OprBlock]) -> list[tuple[Var, OprBlock]]:
    """(var, operation that holds it) for every var that ``op`` has not been granted, as far as they are known."""
    found = []
    for var in (*op.reads, *op.writes):
        writer = var.write
        if writer is not None and writer is not op:
            found.append((var, writer))
        elif var in op.writes and var.readers:
            found += [(var, other) for other in ops if other is not op and var in other.reads and other.seq < op.seq]
    return found


def _copy(var: Var) -> Var:
    """What its ``repr`` shows of ``var``."""
    copy = Var(var.engine, var.name)
    copy.version, copy.readers, copy.write = var.version, var.readers, var.write
    copy.waiting, copy.head = list(var.waiting or ()), var.head
    copy.failure, copy.deleted = var.failure, var.deleted
    return copy


def dump_text(head: str, pending: Sequence[Pending], *, hidden: bool) -> str:
    """One line per pending operation, then for each var that it waits for who holds it; ``hidden``: there are more."""
    lines = [head]
    if not pending and hidden:
        lines.append("set WEFTPLAN_ENGINE_DEBUG=1 before the engine is made to see every pending operation")
    for one in pending:
        op = one.op
        state = "waits" if one.waits else "runs or is queued"
        lines.append(f"  #{op.seq} {one.label()!r} on {op.ctx or 'cpu(0)'}, pushed at {op.where()}: {state}")
        for _, var, other, fn in one.blockers:
            lines.append(f"      for {var!r}, held by #{other.seq} {label_of(fn, other.name)!r} ({other.where()})")
    return "\n".join(lines) + "\n"


def dump_dot(pending: Sequence[Pending]) -> str:
    """The same as a DOT graph: an arrow goes from the operation that holds a var to the one that waits for it."""

    def text(value: str) -> str:
        return value.replace("\\", "\\\\").replace('"', '\\"')

    lines = ["digraph engine {", "  rankdir=LR; node [shape=box];"]
    for one in pending:
        style = "" if one.waits else ", style=filled, fillcolor=lightgreen"
        lines.append(f'  op{one.op.seq} [label="#{one.op.seq} {text(one.label())}"{style}];')
    for one in pending:
        for var, _, other, _ in one.blockers:
            label = text(var.name or f"var {id(var):x}")
            lines.append(f'  op{other.seq} -> op{one.op.seq} [label="{label}"];')
    return "\n".join([*lines, "}"]) + "\n"
