"""What is pending and why, for people: as text, or as a graph in the DOT language."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weftplan.engine.core import Engine
    from weftplan.engine.operation import OprBlock
    from weftplan.engine.var import Var


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


def dump_text(engine: Engine, ops: Sequence[OprBlock]) -> str:
    """One line per pending operation, then for each var that it waits for who holds it."""
    lines = [repr(engine)]
    if not ops and engine._pending:
        lines.append("set WEFTPLAN_ENGINE_DEBUG=1 before the engine is made to see every pending operation")
    for op in ops:
        state = "waits" if op.wait else "runs or is queued"
        lines.append(f"  #{op.seq} {op.label!r} on {op.ctx or 'cpu(0)'}, pushed at {op.where()}: {state}")
        if op.wait:
            lines += [f"      for {var!r}, held by #{o.seq} {o.label!r} ({o.where()})" for var, o in holders(op, ops)]
    return "\n".join(lines) + "\n"


def dump_dot(engine: Engine, ops: Sequence[OprBlock]) -> str:
    """The same as a DOT graph: an arrow goes from the operation that holds a var to the one that waits for it."""

    def text(value: str) -> str:
        return value.replace("\\", "\\\\").replace('"', '\\"')

    lines = ["digraph engine {", "  rankdir=LR; node [shape=box];"]
    for op in ops:
        style = "" if op.wait else ", style=filled, fillcolor=lightgreen"
        lines.append(f'  op{op.seq} [label="#{op.seq} {text(op.label)}"{style}];')
    for op in ops:
        if op.wait:
            for var, other in holders(op, ops):
                label = text(var.name or f"var {id(var):x}")
                lines.append(f'  op{other.seq} -> op{op.seq} [label="{label}"];')
    return "\n".join([*lines, "}"]) + "\n"
