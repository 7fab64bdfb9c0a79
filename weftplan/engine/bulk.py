"""Bulk: several pushes of one thread run as one operation, but fail or succeed separately.

A failed member spreads its failure to the vars it writes. Members that use those vars are skipped; all others run. In
MXNet unrelated members of a failed bulk are lost.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from weftplan.engine.failure import Failure, release_frames
from weftplan.engine.operation import OprBlock, dedupe, label_of
from weftplan.engine.sites import Site
from weftplan.engine.types import Core
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
    own: bool


class PushesBulk(Core, Protocol):
    """Interface of an engine towards the bulks of threads."""

    def _push_bulk(self, shared: list[BulkMember]) -> None: ...


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

    def __init__(self, engine: PushesBulk, members: list[BulkMember]) -> None:
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
        engine._note_unusual()

    def __del__(self) -> None:
        engine = self._engine()
        if engine is None:
            return
        self.set_active(False)
        if self._members:
            engine._push_bulk(self._members)


class BulkRun:
    """Function of a flushed bulk. Returns a failure or None per written var, or None if all members succeeded."""

    __slots__ = ("engine", "failures", "members", "op", "reads", "writes", "writes_of")

    def __init__(self, engine: Core, members: list[BulkMember]) -> None:
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
                    told = undeclared_write(label, error) if self.engine._debug else error
                    if not self.engine._debug:
                        release_frames(error, sys._getframe())
                    blocked = Failure(told, member.name, member.site, seq, member.fn)
                    self.failures.append(blocked)
            if blocked is not None:
                failed = True
            for var in member.writes:
                fate[var] = blocked
        # Versions count writes, in one operation or in many. The completion of the bulk counts the last.
        for var, count in self.writes_of.items():
            var.version += count - 1
        return fate if failed or careful else None
