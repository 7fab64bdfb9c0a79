"""A record of a failed operation, and its re-raising at a wait.

The thread that ran the operation makes it, and any thread that waits may raise it, several at the same time.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import MutableSet
from contextlib import suppress
from inspect import CO_ASYNC_GENERATOR, CO_COROUTINE, CO_GENERATOR
from types import FrameType
from typing import TYPE_CHECKING, TypeAlias

from weftplan.engine.operation import label_of
from weftplan.engine.sites import Site, site_text
from weftplan.locks import ReentrantLock, free_in_children

if TYPE_CHECKING:
    from weftplan.engine.operation import OprBlock
    from weftplan.engine.var import Var

Outcome: TypeAlias = "Failure | BaseException | dict[Var, Failure | None] | None"
"""How an operation ended: well (None), with its failure, with an error that is no failure yet, or, for a bulk, with a
failure or None for each var that it writes."""


class Failure:
    """One failed operation. Stored on every var that it should have written and on those of skipped dependants.

    ``observed_seq`` is None until a wait has raised the error; then it is the number of the last operation pushed
    before that. Operations with a larger number may write the var again and heal it: so what heals depends on the
    order of the program, never on timing.
    """

    __slots__ = ("error", "fn", "name", "observed_seq", "seq", "site", "traceback", "vars")

    def __init__(self, error: BaseException, name: str | None, site: Site, seq: int, fn: object = None) -> None:
        # Calls nothing of the user's, and hardly anything else: it may be made inside the region and deep in a stack.
        self.error = error
        self.traceback = traceback_of(error)  # not what the user's class makes of the name
        """As it was when the operation failed: every raise starts from it, so that it does not grow."""
        self.name = name
        self.fn = fn
        """What names it, unless it has a name."""
        self.site = site
        self.seq = seq
        self.observed_seq: int | None = None
        self.vars: list[Var] | None = None
        """Vars that hold it; kept only where raising must heal them all (WEFTPLAN_ERRORS=mxnet)."""

    @classmethod
    def of(cls, op: OprBlock, error: BaseException, *, keep_locals: bool = False) -> Failure:
        """The failure of ``op`` with ``error``; for the function that has caught it, outside the region.

        Args:
            keep_locals: for a debugger, leave the frames of the error as they are.
        """
        if not keep_locals:
            release_frames(error, sys._getframe(1))
        return cls(error, label_of(op.fn, op.name), op.site, op.seq)

    @property
    def label(self) -> str:
        """The operation's name, or its function's."""
        return label_of(self.fn, self.name)

    def describe(self) -> str:
        """One line: error, operation, line of the push."""
        kind = type(self.error).__name__
        try:
            text = str(self.error)
        except BaseException as broken:
            text = f"(its __str__ raised {type(broken).__name__})"
        return f"{kind}: {text} (operation {self.label!r}, pushed at {site_text(self.site)})"

    def exception(self) -> BaseException:
        """The error with a note of where it comes from, ready to be raised once more."""
        add_note(self.error, f"raised in engine operation {self.label!r}, pushed at {site_text(self.site)}")
        return BaseException.with_traceback(self.error, self.traceback)  # not one of the user's

    def blocks(self, seq: int, var: Var | None = None, fn: object = None) -> bool:
        """True when the operation numbered ``seq``, which writes ``var`` by ``fn``, may not heal it.

        A function may have ``inherits``: the vars whose old value it reads, or overwrites in part only.
        """
        return self.observed_seq is None or seq <= self.observed_seq or var in getattr(fn, "inherits", ())

    def heal_everywhere(self, failed_vars: MutableSet[Var]) -> None:
        """MXNet's raise-once rule: every var that holds this failure is readable again, and leaves ``failed_vars``."""
        for var in self.vars or ():
            if var.failure is self:
                var.failure = None
                failed_vars.discard(var)
        self.vars = None


traceback_of = BaseException.__dict__["__traceback__"].__get__


def release_frames(error: BaseException, catcher: FrameType) -> None:
    """Let the finished calls that ``error`` went through drop their locals: an error is kept, arrays are not to be.

    Args:
        catcher: the frame that caught the error; it is taken out of the traceback, since it holds the operation.
    """
    trace = traceback_of(error)
    if trace is not None and trace.tb_frame is catcher:
        BaseException.with_traceback(error, trace.tb_next)
    errors: list[BaseException | None] = [error]
    seen: set[int] = set()
    while errors:
        one = errors.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        trace = traceback_of(one)
        while trace is not None:
            frame = trace.tb_frame
            if not frame.f_code.co_flags & _SUSPENDS:  # to clear one of these would close it
                with suppress(RuntimeError):  # still running
                    frame.clear()
            trace = trace.tb_next
        errors += (_cause_of(one), _context_of(one))
        if issubclass(type(one), BaseExceptionGroup):
            errors += _members_of(one)


_SUSPENDS = CO_GENERATOR | CO_COROUTINE | CO_ASYNC_GENERATOR
_cause_of = BaseException.__dict__["__cause__"].__get__
_context_of = BaseException.__dict__["__context__"].__get__
_members_of = BaseExceptionGroup.__dict__["exceptions"].__get__
_note_lock = free_in_children(ReentrantLock())
"""Two operations may fail with one exception object; re-entrant, since ``add_note`` may be the user's."""
MOST_UNTOLD = 100
"""Failures, which no wait has raised, that an engine keeps; it counts the others."""
MOST_NOTES = 100
"""One exception object may be raised by any number of operations; it does not grow for ever."""


def add_note(error: BaseException, note: str) -> None:
    """``error.add_note(note)``, once per text, whatever a user's exception class makes of notes."""
    try:
        with _note_lock:
            notes = getattr(error, "__notes__", ())
            if len(notes) < MOST_NOTES and note not in notes:
                error.add_note(note)
    except BaseException as broken:  # nobody on a worker would catch it, and the operation would never end
        if issubclass(type(broken), KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
            raise
