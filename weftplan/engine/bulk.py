"""Bulk: several pushes of one thread run as one operation, but fail or succeed separately.

A failed member spreads its failure to the vars it writes. Members that use those vars are skipped; all others run. In
MXNet unrelated members of a failed bulk are lost.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import index
from typing import TYPE_CHECKING, Any, SupportsIndex

from weftplan.engine.failure import Failure, release_frames
from weftplan.engine.operation import DetailedBlock, FnProperty, OprBlock, dedupe, label_of, searchable
from weftplan.engine.region import Driver
from weftplan.engine.sites import Site
from weftplan.errors import EngineError
from weftplan.support.read_only_views import undeclared_write

if TYPE_CHECKING:
    from weftplan.device.context import Context
    from weftplan.engine.var import Var


@dataclass(slots=True)
class BulkMember:
    """One push in a bulk."""

    fn: Any
    reads: Sequence[Var]
    writes: Collection[Var]
    ctx: Context
    name: str | None
    site: Site
    internal: bool


class BulkState(threading.local):
    """Bulk of one thread: its size (0: off) and the members since the last flush."""

    def __init__(self) -> None:
        self.size = 0
        self.members: list[BulkMember] = []
        """Members since the last flush: the same list object for the thread's life, which the guard shares."""
        self.guard: BulkGuard | None = None
        """Guard that flushes the bulk when the thread ends."""


class BulkGuard:
    """A guard that pushes the members and unregisters the thread when the bulk state of a thread is dropped."""

    def __init__(self, engine: Bulks, members: list[BulkMember]) -> None:
        self._engine = weakref.ref(engine)
        self._members = members
        self._mark = object()
        """Object that represents this thread in the engine's list."""

    def set_active(self, active: bool) -> None:
        """Register or unregister this thread as a thread that collects pushes."""
        engine = self._engine()
        if engine is None:
            return
        if active and self._mark not in engine._bulking:
            engine._bulking.append(self._mark)
        elif not active and self._mark in engine._bulking:
            engine._bulking.remove(self._mark)
        engine._update_detours()

    def __del__(self) -> None:
        engine = self._engine()
        if engine is None:
            return
        self.set_active(False)
        if self._members:
            engine._push_bulk(self._members)


class BulkRun:
    """Function that runs the members of a flushed bulk in order.

    Returns {written var: its failure or None}, or None if all members succeeded.
    """

    __slots__ = ("engine", "failures", "members", "op", "reads", "writes", "writes_of")

    def __init__(self, engine: Bulks, members: list[BulkMember]) -> None:
        self.engine = engine
        self.members = members
        self.reads, self.writes = dedupe(
            [var for m in members for var in m.reads], [var for m in members for var in m.writes]
        )
        self.op: OprBlock | None = None
        self.failures: list[Failure] = []
        """Failures of members in push order; a member that writes nothing is recorded only here."""
        self.writes_of: dict[Var, int] = {}
        """Number of members that write a var."""
        for member in members:
            for var in member.writes:
                self.writes_of[var] = self.writes_of.get(var, 0) + 1

    def __call__(self) -> dict[Var, Failure | None] | None:
        assert self.op is not None
        # One pass in push order: a member is skipped if a var it reads has failed, or a var it writes that it cannot
        # heal.
        seq = self.op.seq
        self.op = None  # it holds this object
        fate: dict[Var, Failure | None] = {var: var.failure for var in self.writes}
        careful = self.engine._any_failure
        failed = False
        for member in self.members:
            blocked: Failure | None = None
            # Blocked by a failed input, or by a failed output that this write may not heal.
            if careful or failed:
                blocked = next((f for v in member.reads if (f := fate.get(v, v.failure)) is not None), None)
                if blocked is None:
                    fates = [(fate[v], v) for v in member.writes]
                    blocked = next((f for f, v in fates if f is not None and f.blocks(seq, v, member.fn)), None)
            if blocked is None:
                try:
                    member.fn()
                except BaseException as error:
                    label = label_of(member.fn, member.name)
                    explained = undeclared_write(label, error) if self.engine._debug else error
                    if not self.engine._debug:
                        release_frames(error, sys._getframe())
                    blocked = Failure(explained, member.name, member.site, seq, member.fn)
                    self.failures.append(blocked)
            if blocked is not None:
                failed = True
            for var in member.writes:
                fate[var] = blocked
        # Versions count writes, in one operation or in many. The completion of the bulk counts the last.
        for var, count in self.writes_of.items():
            var.version += count - 1
        return fate if failed or careful else None


class Bulks(Driver):
    """Bulks of an engine, as a base class: which push joins one, when it is cut, and its push as one operation."""

    _debug: bool

    def __init__(self) -> None:
        self._bulk = BulkState()
        self._bulking: list[object] = []
        """One guard per thread whose bulk size is not 0."""

    def _submit(self, op: DetailedBlock) -> None:
        """Push an operation that the fast path does not handle."""

    def _update_detours(self) -> None:
        """Recompute why pushes leave the fast path."""

    def set_bulk_size(self, size: int) -> int:
        """Collect up to ``size`` plain pushes of this thread into one operation (0: off) and return the old size.

        With a tracer installed nothing is collected, so the tracer sees every operation. Members that a thread has not
        flushed when it exits are pushed then.
        """
        if isinstance(size, bool) or not isinstance(size, SupportsIndex) or (size := index(size)) < 0:
            raise EngineError(f"bulk size must be an integer >= 0, got {size!r}")
        state = self._bulk
        old = state.size
        if state.guard is None:
            state.guard = BulkGuard(self, state.members)
        state.guard.set_active(size > 0)
        state.size = size
        if len(state.members) >= size:
            self._flush_bulk()
        return old

    @contextmanager
    def bulk(self, size: int) -> Iterator[None]:
        """Set the bulk size to ``size`` for the body of a ``with`` block."""
        old = self.set_bulk_size(size)
        try:
            yield
        finally:
            self.set_bulk_size(old)

    def _absorb(self, member: BulkMember) -> None:
        """Add ``member`` to the bulk of this thread. A change of device or a full bulk cuts it."""
        state = self._bulk
        if state.members and state.members[0].ctx != member.ctx:
            self._flush_bulk()
        state.members.append(member)
        if len(state.members) >= state.size:
            self._flush_bulk()

    def _flush_bulk(self) -> None:
        """Push the operations in this thread's bulk."""
        if self._bulk.members:
            self._push_bulk(self._bulk.members)

    def _push_bulk(self, shared: list[BulkMember]) -> None:
        """Push ``shared`` as one operation and empty it."""
        # Copied, and cleared only after the run exists: an error in between loses no member.
        members = shared[:]
        run = BulkRun(self, members)
        head = members[0]
        writes = searchable(run.writes)
        op = DetailedBlock(run, run.reads, writes, "ImperativeBulk", head.site, head.ctx, FnProperty.NO_SKIP)
        op.internal = all(member.internal for member in members)
        run.op = op
        del shared[: len(members)]
        self._submit(op)
