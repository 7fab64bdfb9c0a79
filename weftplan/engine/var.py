"""A var: a schedulable resource and its queue of operations in push order, without threads or clocks.

States, derived from ``readers`` and ``write``:

    IDLE      no reader, no write           a read or a write is granted at once
    READING   n readers, no write           reads are granted; a write becomes ``write`` and waits for the readers
    DRAINING  n readers, a write            everything later queues; the last reader to finish grants the write
    WRITING   no reader, a write (granted)  everything later queues; finishing it counts ``version`` up, then grants all
                                            reads up to the next write, or that write when it comes first

Invariant: never a reader and a granted write at once, and never two granted writes.
Invariant: ``waiting`` is non-empty only while ``write`` is set, so "ready to read" is exactly ``write is None``.
Invariant: an operation is granted exactly once per var, in push order (consecutive reads together).

Everything here is done by the one thread that is inside the engine's region (``region.py``), which has the hot paths
of these methods written out. Grants lower ``op.wait``; an operation whose count reaches 0 goes to ``ready``. Nothing
here blocks or calls user code. An interrupt (Ctrl-C on the main thread) can come at the ends of the loops, when a
method begins and after a call, nowhere else: hence an operation is appended last, when all else about its var is done.
"""

from __future__ import annotations

from collections.abc import Collection, Generator
from typing import Any, NoReturn, Protocol

from weftplan.errors import EngineError

_COMPACT = 32
"""Granted operations at the front of ``waiting`` before it is cut; then at least half of it is, so each costs O(1)."""


class Operation(Protocol):
    """An operation, as its vars see it."""

    wait: int
    """Grants that are missing."""

    @property
    def writes(self) -> Collection[Var]:
        """The vars that it writes."""
        ...


class Ready(Protocol):
    """A queue of operations with all their grants; ``operation.py``, which has their class, imports this file."""

    def append(self, op: Any, /) -> None: ...


class Var:
    """A resource of one engine. Make it with :meth:`Engine.new_variable`; ``version`` counts completed writes."""

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
        """Granted, unfinished reads."""
        self.write: Any = None
        """The operation that is the oldest write not finished, or None; granted exactly when ``readers`` is 0. No type:
        users need the whole ``OprBlock``, and ``operation.py`` imports this file."""
        self.waiting: list[Any] | None = None
        """Operations behind ``write``, from ``head`` on. A list and an index: most vars have one or two, for which a
        deque is ten times larger. Made when first needed, then kept."""
        self.head = 0
        self.failure: Any = None
        """A ``Failure``, or None."""
        self.deleted = False
        self.events: Any = None
        """Stream events of the last write and of the reads since, on asynchronous devices only."""

    def add_read(self, op: Operation) -> None:
        """Register a read, which is granted at once or waits behind the write."""
        if self.write is None:
            self.readers += 1
        else:
            self.append(op)

    def add_write(self, op: Operation) -> None:
        """Register a write. It becomes ``write``, granted if there are no readers, or waits behind another one."""
        if self.write is None:
            self.write = op
        else:
            self.append(op)

    def append(self, op: Operation) -> None:
        """Put ``op`` behind ``write``."""
        if self.waiting is None:
            self.waiting = [op]
        else:
            self.waiting.append(op)

    def finish_read(self, ready: Ready) -> None:
        """End a granted read."""
        self.readers -= 1
        if not self.readers and self.write is not None:
            op = self.write
            op.wait -= 1
            if not op.wait:
                ready.append(op)

    def finish_write(self, ready: Ready) -> None:
        """End the granted write, and grant what comes next."""
        self.version += 1
        self.write = None
        if self.waiting:
            self.grant(ready)

    def grant(self, ready: Ready) -> None:
        """Grant from ``waiting``: nothing holds the var. Called again after an interrupt, it goes on where it was."""
        waiting: list[Any] = self.waiting  # type: ignore[assignment]
        head, count = self.head, len(waiting)
        while head < count:
            op = waiting[head]
            waiting[head] = None  # what it holds must not live until the list is cut
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
        # Where an interrupt leaves this undone, the head stands at the end: the next call gets here again.
        if head == count:
            self.head = 0
            del waiting[:]
        elif head >= _COMPACT and head * 2 >= count:
            self.head = 0
            del waiting[:head]

    def __await__(self) -> Generator[object, None, Var]:
        """``await var``, in a coroutine: wait until it is readable, and raise its failure. The event loop goes on."""
        if self.deleted:
            raise EngineError(f"await: {self!r} has been deleted; nothing will ever write it")
        readable: Var = yield from self.engine._await(self)
        return readable

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """A var is neither copied nor pickled: a twin would let operations past the ones that wait here.

        Raises:
            EngineError: always.
        """
        raise EngineError(f"{self!r} stands for one resource and cannot be copied; make another with new_variable()")

    @property
    def state(self) -> str:
        """IDLE, READING, DRAINING or WRITING."""
        if self.write is None:
            return "READING" if self.readers else "IDLE"
        return "DRAINING" if self.readers else "WRITING"

    def __repr__(self) -> str:
        name = f" {self.name!r}" if self.name else ""
        behind = len(self.waiting or ()) - self.head
        more = f", {behind} waiting" if behind else ""
        failed = f", failed: {self.failure.describe()}" if self.failure is not None else ""
        gone = ", deleted" if self.deleted else ""
        readers = f" by {self.readers}" if self.readers else ""
        return f"<{type(self).__name__}{name} version {self.version}: {self.state}{readers}{more}{gone}{failed}>"


class Order(Var):
    """A var for which operations only wait: whoever writes it may fail, and whoever reads it runs all the same."""

    __slots__ = ()
