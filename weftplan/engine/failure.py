"""Record of a failed operation, and its re-raising at a wait.

The thread that ran the operation creates it. Several waiting threads may raise it at the same time.
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
"""Outcome of an operation: None, its failure, an unwrapped error, or for a bulk a failure or None per written var."""


class Failure:
    """One failed operation, stored on every var it should have written and on those of skipped dependants.

    ``observed_seq`` is None until a wait has raised the error; then it is the number of the last operation pushed
    before that. Operations with a larger number may write the var and heal it. Healing therefore depends on program
    order, never on timing.
    """

    __slots__ = ("error", "fn", "name", "observed_seq", "seq", "site", "traceback", "vars")

    def __init__(self, error: BaseException, name: str | None, site: Site, seq: int, fn: object = None) -> None:
        # Calls no user code and hardly anything else: it may run inside the region and deep in a stack.
        self.error = error
        self.traceback = traceback_of(error)  # bypasses a `__traceback__` of the user's class
        """Traceback at the failure. Every raise starts from it, so that it does not grow."""
        self.name = name
        self.fn = fn
        """Function that provides the label if ``name`` is None."""
        self.site = site
        self.seq = seq
        self.observed_seq: int | None = None
        self.vars: list[Var] | None = None
        """Vars that hold it, if raising must heal them all (WEFTPLAN_ERRORS=mxnet)."""

    @classmethod
    def of(cls, op: OprBlock, error: BaseException, *, keep_locals: bool = False) -> Failure:
        """Return the failure of ``op`` with ``error``. Call it in the frame that caught the error, outside the region.

        Args:
            keep_locals: keep the frames' locals, for a debugger.
        """
        if not keep_locals:
            release_frames(error, sys._getframe(1))
        return cls(error, label_of(op.fn, op.name), op.site, op.seq)

    @property
    def label(self) -> str:
        """The operation's name or that of its function."""
        return label_of(self.fn, self.name)

    def describe(self) -> str:
        """Return one line: error, operation, line of the push."""
        kind = type(self.error).__name__
        try:
            text = str(self.error)
        except BaseException as broken:
            text = f"(its __str__ raised {type(broken).__name__})"
        return f"{kind}: {text} (operation {self.label!r}, pushed at {site_text(self.site)})"

    def exception(self) -> BaseException:
        """Return the error with a note of its origin, ready to be raised again."""
        add_note(self.error, f"raised in engine operation {self.label!r}, pushed at {site_text(self.site)}")
        return BaseException.with_traceback(self.error, self.traceback)  # bypasses an override of the user's class

    def blocks(self, seq: int, var: Var | None = None, fn: object = None) -> bool:
        """Return whether operation ``seq``, which writes ``var`` by ``fn``, must be skipped because of this failure.

        Otherwise it runs and heals the var. ``fn`` may have ``inherits``: vars whose old value it reads or only partly
        overwrites, so that it cannot heal them.
        """
        return self.observed_seq is None or seq <= self.observed_seq or var in getattr(fn, "inherits", ())

    def heal_everywhere(self, failed_vars: MutableSet[Var]) -> None:
        """Heal every var that holds this failure (MXNet's raise-once rule) and remove it from ``failed_vars``."""
        for var in self.vars or ():
            if var.failure is self:
                var.failure = None
                failed_vars.discard(var)
        self.vars = None


traceback_of = BaseException.__dict__["__traceback__"].__get__


def release_frames(error: BaseException, catcher: FrameType) -> None:
    """Clear the locals of finished frames in the traceback of ``error``: the error is stored, but must not hold arrays.

    Args:
        catcher: the frame that caught the error. It is removed from the traceback, because it holds the operation.
    """
    trace = traceback_of(error)
    if trace is not None and trace.tb_frame is catcher:
        BaseException.with_traceback(error, trace.tb_next)
    errors: list[BaseException | None] = [error]
    seen: set[int] = set()
    while errors:
        exception = errors.pop()
        if exception is None or id(exception) in seen:
            continue
        seen.add(id(exception))
        trace = traceback_of(exception)
        while trace is not None:
            frame = trace.tb_frame
            if not frame.f_code.co_flags & _SUSPENDS:  # clearing one of these would close it
                with suppress(RuntimeError):  # still running
                    frame.clear()
            trace = trace.tb_next
        # A cause or context has frames of its own.
        errors += (_cause_of(exception), _context_of(exception))
        if issubclass(type(exception), BaseExceptionGroup):
            errors += _members_of(exception)


_SUSPENDS = CO_GENERATOR | CO_COROUTINE | CO_ASYNC_GENERATOR
_cause_of = BaseException.__dict__["__cause__"].__get__
_context_of = BaseException.__dict__["__context__"].__get__
_members_of = BaseExceptionGroup.__dict__["exceptions"].__get__
_note_lock = free_in_children(ReentrantLock())
"""Lock for notes: two operations may fail with one exception object. Re-entrant: ``add_note`` may be user code."""
MOST_UNOBSERVED = 100
"""Unobserved failures that an engine records; further failures are only counted."""
MOST_NOTES = 100
"""Limit of notes per exception object, which any number of operations may raise."""


def add_note(error: BaseException, note: str) -> None:
    """Call ``error.add_note(note)`` once per text, whatever the exception class does with notes."""
    try:
        with _note_lock:
            notes = getattr(error, "__notes__", ())
            if len(notes) < MOST_NOTES and note not in notes:
                error.add_note(note)
    except BaseException as broken:  # on a worker nothing would catch it, and the operation would never complete
        if issubclass(type(broken), KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
            raise
