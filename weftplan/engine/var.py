"""Var: a schedulable resource and its queue of operations in push order, without threads or clocks.

States, derived from ``readers`` and ``write``:

    IDLE      no reader, no write           a read or a write is granted immediately
    READING   n readers, no write           reads are granted; a write becomes ``write`` and waits for the readers
    DRAINING  n readers, a write            later operations queue; the last reader to finish grants the write
    WRITING   no reader, a granted write    later operations queue; its end increments ``version``, then grants all
                                            reads up to the next write, or that write if it comes first

Invariant: a var never has both a reader and a granted write, and never two granted writes.
Invariant: ``waiting`` is non-empty only while ``write`` is set, so "ready to read" is exactly ``write is None``.
Invariant: an operation is granted exactly once per var, in push order (consecutive reads together).

Only the thread inside the engine's region (``region.py``) calls these methods; the region inlines the hot paths. Grants
decrement ``op.wait``; an operation whose count reaches 0 is appended to ``ready``. Nothing here blocks or calls user
code. An interrupt can arrive only at loop ends, at method entry and after a call. An append is therefore the last step.
"""

from __future__ import annotations

from collections.abc import Collection, Generator
from typing import Any, NoReturn, Protocol

from weftplan.errors import EngineError

_COMPACT = 32
"""Granted operations at the front of ``waiting`` before it is cut. At least half is cut then, so each costs O(1)."""


class VarOperation(Protocol):
    """Interface of an operation towards its vars."""

    wait: int
    """Number of missing grants."""

    @property
    def writes(self) -> Collection[Var]:
        """The vars that it writes."""
        ...


class Ready(Protocol):
    """Queue of operations with all grants. A protocol, because ``operation.py`` imports this file."""

    def append(self, op: Any, /) -> None: ...


class Var:
    """A resource of one engine. Create it with :meth:`Engine.new_variable`; ``version`` counts completed writes."""

    __slots__ = (
        "__weakref__",
        "deleted",
        "engine",
        "events",
        "failure",
        "head",
        "name",
        "readers",
        "version",
        "waiting",
        "write",
    )

    def __init__(self, engine: object, name: str | None = None) -> None:
        self.engine: Any = engine
        """None once the var is deleted."""
        self.name = name
        self.version = 0
        self.readers = 0
        """Number of granted, unfinished reads."""
        self.write: Any = None
        """The oldest unfinished write, or None; granted exactly when ``readers`` is 0. No type: a circular import."""
        self.waiting: list[Any] | None = None
        """Operations after ``write``, from ``head`` on, or None; a deque would be ten times larger."""
        self.head = 0
        self.failure: Any = None
        """A ``Failure`` or None."""
        self.deleted = False
        self.events: Any = None
        """Stream events of the last write and of later reads (asynchronous devices only)."""

    def add_read(self, op: VarOperation) -> None:
        """Register a read. It is granted immediately or queues after the write."""
        if self.write is None:
            self.readers += 1
        else:
            self.append(op)

    def add_write(self, op: VarOperation) -> None:
        """Register a write. It becomes ``write``, granted if there are no readers, or queues after another write."""
        if self.write is None:
            self.write = op
        else:
            self.append(op)

    def append(self, op: VarOperation) -> None:
        """Queue ``op`` after ``write``."""
        if self.waiting is None:
            self.waiting = [op]
        else:
            self.waiting.append(op)

    def finish_read(self, ready: Ready) -> None:
        """Release a granted read."""
        self.readers -= 1
        if not self.readers and self.write is not None:
            op = self.write
            op.wait -= 1
            if not op.wait:
                ready.append(op)

    def finish_write(self, ready: Ready) -> None:
        """Release the granted write, and grant the next operations."""
        self.version += 1
        self.write = None
        if self.waiting:
            self.grant(ready)

    def grant(self, ready: Ready) -> None:
        """Grant from ``waiting``; nothing holds the var. A repeated call after an interrupt resumes."""
        waiting: list[Any] = self.waiting  # type: ignore[assignment]
        head, count = self.head, len(waiting)
        while head < count:
            op = waiting[head]
            waiting[head] = None  # its objects must not live until the list is cut
            self.head = head = head + 1
            if self in op.writes:
                self.write = op
                if not self.readers:
                    op.wait -= 1
                    if not op.wait:
                        ready.append(op)
                break
            self.readers += 1
            op.wait -= 1
            if not op.wait:
                ready.append(op)
        # If an interrupt skips this, `head` stays at the end, and the next call gets here again.
        if head == count:
            self.head = 0
            del waiting[:]
        elif head >= _COMPACT and head * 2 >= count:
            self.head = 0
            del waiting[:head]

    def __await__(self) -> Generator[object, None, Var]:
        """Implement ``await var``: wait until it is readable, and raise its failure. The event loop keeps running."""
        if self.deleted:
            raise EngineError(f"await: {self!r} has been deleted; nothing will ever write it")
        readable: Var = yield from self.engine._await(self)
        return readable

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse copies and pickles: operations on a copy would not wait for those on the original.

        Raises:
            EngineError: always.
        """
        raise EngineError(f"{self!r} stands for one resource and cannot be copied; make another with new_variable()")

    @property
    def state(self) -> str:
        """The state: IDLE, READING, DRAINING or WRITING."""
        if self.write is None:
            return "READING" if self.readers else "IDLE"
        return "DRAINING" if self.readers else "WRITING"

    def __repr__(self) -> str:
        name = f" {self.name!r}" if self.name else ""
        queued = len(self.waiting or ()) - self.head
        more = f", {queued} waiting" if queued else ""
        failed = f", failed: {self.failure.describe()}" if self.failure is not None else ""
        suffix = ", deleted" if self.deleted else ""
        readers = f" by {self.readers}" if self.readers else ""
        return f"<{type(self).__name__}{name} version {self.version}: {self.state}{readers}{more}{suffix}{failed}>"


class Order(Var):
    """A var that only orders operations: it carries no failure from a writer to a reader."""

    __slots__ = ()
