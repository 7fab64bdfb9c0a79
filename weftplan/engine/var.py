"""A var: one schedulable resource and the operations that wait for it, in push order. Pure: no threads, no clocks.

States, derived from ``readers`` and ``write``:

    IDLE      no reader, no write           a read or a write is granted at once
    READING   n readers, no write           reads are granted; a write becomes ``write`` and waits for the readers
    DRAINING  n readers, a write            everything later queues; the last reader to finish grants the write
    WRITING   no reader, a write (granted)  everything later queues; finishing it counts ``version`` up, then grants all
                                            reads up to the next write, or that write when it comes first

Invariant: never a reader and a granted write at once, and never two granted writes.
Invariant: ``waiting`` is non-empty only while ``write`` is set, so "ready to read" is exactly ``write is None``.
Invariant: an operation is granted exactly once per var, in push order (consecutive reads together).

Every method mutates under the engine's lock (the caller holds it) and reports grants by lowering ``op.wait``; an
operation whose count reaches 0 goes to ``ready``. Nothing here blocks or calls user code.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weftplan.engine.core import Engine
    from weftplan.engine.failure import Failure
    from weftplan.engine.operation import OprBlock


class Var:
    """A resource of one engine. Make it with :meth:`Engine.new_variable`; ``version`` counts completed writes."""

    __slots__ = (
        "__weakref__",
        "deleted",
        "engine",
        "events",
        "failure",
        "name",
        "readers",
        "version",
        "waiting",
        "write",
    )

    def __init__(self, engine: Engine, name: str | None = None) -> None:
        self.engine = engine
        self.name = name
        self.version = 0
        self.readers = 0
        """Granted, unfinished reads."""
        self.write: OprBlock | None = None
        """The oldest write that is not finished; granted exactly when ``readers`` is 0."""
        self.waiting: deque[Any] | None = None
        """Operations behind ``write``: a write as itself, a read in a 1-tuple."""
        self.failure: Failure | None = None
        self.deleted = False
        self.events: Any = None
        """Stream events of the last write and of the reads since, on asynchronous devices only."""

    def add_read(self, op: OprBlock) -> int:
        """Register a read; 0 if granted at once, else 1 (a grant to wait for)."""
        if self.write is None:
            self.readers += 1
            return 0
        if self.waiting is None:
            self.waiting = deque()
        self.waiting.append((op,))
        return 1

    def add_write(self, op: OprBlock) -> int:
        """Register a write; 0 if granted at once, else 1."""
        if self.write is None:
            self.write = op
            return 1 if self.readers else 0
        if self.waiting is None:
            self.waiting = deque()
        self.waiting.append(op)
        return 1

    def finish_read(self, ready: list[OprBlock]) -> None:
        """A granted read is over."""
        self.readers -= 1
        if self.readers == 0 and self.write is not None:
            op = self.write
            op.wait -= 1
            if op.wait == 0:
                ready.append(op)

    def finish_write(self, ready: list[OprBlock]) -> None:
        """The granted write is over: grant what comes next."""
        self.version += 1
        self.write = None
        waiting = self.waiting
        while waiting:
            item = waiting.popleft()
            if type(item) is tuple:
                op = item[0]
                self.readers += 1
            else:
                op = self.write = item
                if self.readers:
                    return
            op.wait -= 1
            if op.wait == 0:
                ready.append(op)
            if self.write is not None:
                return
        self.waiting = None

    def __await__(self) -> Generator[Any, None, Var]:
        """``await var`` in a coroutine: until it is readable; raises its failure. The event loop goes on meanwhile."""
        from weftplan.engine.waiting import await_var

        return await_var(self)

    @property
    def state(self) -> str:
        """IDLE, READING, DRAINING or WRITING."""
        if self.write is None:
            return "READING" if self.readers else "IDLE"
        return "DRAINING" if self.readers else "WRITING"

    def __repr__(self) -> str:
        name = f" {self.name!r}" if self.name else ""
        behind = len(self.waiting or ())
        more = f", {behind} waiting" if behind else ""
        failed = f", failed: {self.failure.describe()}" if self.failure is not None else ""
        gone = ", deleted" if self.deleted else ""
        readers = f" by {self.readers}" if self.readers else ""
        return f"<Var{name} version {self.version}: {self.state}{readers}{more}{gone}{failed}>"
