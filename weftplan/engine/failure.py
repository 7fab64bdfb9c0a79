"""Record of a failed operation, and its spread: which operations it skips, which vars hold it, what heals them.

The thread that ran the operation creates the record. Several waiting threads may raise it at the same time. A failure
on a var was set before the next operation was granted that var, so it can be read outside the region.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import MutableSet
from contextlib import suppress
from inspect import CO_ASYNC_GENERATOR, CO_COROUTINE, CO_GENERATOR
from operator import attrgetter
from types import FrameType
from typing import TypeAlias

from weftplan import config
from weftplan.engine.operation import FnProperty, OprBlock, label_of
from weftplan.engine.region import Driver
from weftplan.engine.sites import Site, site_text
from weftplan.engine.var import Order, Var
from weftplan.locks import ReentrantLock, free_in_children

_seq = attrgetter("seq")
_DELETE = FnProperty.DELETE_VAR
NEVER_SKIPPED = (FnProperty.NO_SKIP, FnProperty.DELETE_VAR)
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
MAX_UNOBSERVED = 100
"""Unobserved failures that an engine records; further failures are only counted."""
MAX_NOTES = 100
"""Limit of notes per exception object, which any number of operations may raise."""


def add_note(error: BaseException, note: str) -> None:
    """Call ``error.add_note(note)`` once per text, whatever the exception class does with notes."""
    try:
        with _note_lock:
            notes = getattr(error, "__notes__", ())
            if len(notes) < MAX_NOTES and note not in notes:
                error.add_note(note)
    except BaseException as broken:  # on a worker nothing would catch it, and the operation would never complete
        if issubclass(type(broken), KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
            raise


class FailureSpread(Driver):
    """Failures of an engine and the vars that hold them, as a base class. State changes only inside the region."""

    _debug: bool
    _shutdown: bool

    def __init__(self) -> None:
        self._unobserved: dict[Failure, None] = {}
        """The first failures that no wait has raised, in order."""
        self._unrecorded = 0
        """Number of further failures that no wait has raised."""
        self._failed_vars: MutableSet[Var] = weakref.WeakSet()
        """Vars that hold a failure."""
        self._any_failure = False
        self._careful = False
        """Whether operations need ``_execute_carefully``; set before an affected operation is granted."""
        self._failed = 0
        self._skipped = 0
        self._counted = 0
        """Sequence number of the last operation whose failures and skips were counted."""
        self._raise_once = config.get("WEFTPLAN_ERRORS") == "mxnet"

    def _blocking_failure(self, op: OprBlock) -> Failure | None:
        """Return the failure that makes ``op`` skip, if any. Outside the region: inputs failed before the grants."""
        if op.prop in NEVER_SKIPPED:
            return None
        failure: Failure | None
        for var in op.reads:
            failure = var.failure
            if failure is not None:
                return failure
        for var in op.writes:
            failure = var.failure
            if failure is not None and failure.blocks(op.seq, var, op.fn):
                return failure
        return None

    def _add_unobserved(self, failure: Failure) -> None:
        """Inside: record a failure that is on no var."""
        self._failed += 1
        self._unrecorded += not self._record_unobserved(failure)

    def _record_unobserved(self, failure: Failure) -> bool:
        """Inside: record an unobserved failure. Return False if the limit made it drop the last pushed failure."""
        self._unobserved[failure] = None
        if len(self._unobserved) <= MAX_UNOBSERVED:
            return True
        del self._unobserved[max(self._unobserved, key=_seq)]
        return False

    def _hold(self, var: Var, failure: Failure) -> None:
        """Inside: store ``failure`` on ``var``. Repeatable."""
        self._any_failure = self._careful = True
        var.failure = failure
        self._failed_vars.add(var)
        if self._raise_once:
            if failure.vars is None:
                failure.vars = []
            failure.vars.append(var)

    def _is_healed(self, failure: Failure) -> bool:
        """Return whether raising ``failure`` once has healed all its vars (WEFTPLAN_ERRORS=mxnet)."""
        return self._raise_once and failure.observed_seq is not None

    def _spread(self, op: OprBlock) -> list[Failure | None]:
        """Inside: set the failure of ``op`` on its outputs, or heal them; return the replaced failures. Repeatable."""
        failed = skipped = untold = 0
        failure = op.failure
        if isinstance(failure, BaseException):  # the running thread may have had no stack left for more
            failure = op.failure = Failure(failure, op.name, op.site, op.seq, op.fn)
        mapping = failure if isinstance(failure, dict) else None
        if isinstance(failure, Failure) and self._is_healed(failure):
            # It was skipped before the failure was raised and completes after it: the raise has healed it, too.
            skipped += 1
            failure = None
        if failure is not None:
            self._any_failure = self._careful = True
            # A failure with another number was inherited: the operation was skipped.
            if mapping is None and failure.seq != op.seq:
                skipped += 1
            fresh = op.fn.failures if mapping is not None else [failure]
            for fault in fresh:
                if (
                    fault is not None
                    and fault.observed_seq is None
                    and (fault.seq == op.seq or fault in self._unobserved)
                ):
                    untold += not self._record_unobserved(fault)
                if fault is not None and fault.seq == op.seq:
                    failed += 1
        # Dropped outside by the caller: an error may own any object.
        replaced = [var.failure for var in op.writes]
        for var in op.writes:
            if type(var) is Order:
                continue
            if mapping is not None:
                if var in mapping:
                    var.failure = mapping[var]
            elif failure is not None:
                var.failure = failure
            elif op.prop is not _DELETE:
                var.failure = None
            if var.failure is None or (op.prop is _DELETE and var.deleted):
                self._failed_vars.discard(var)
                continue
            self._hold(var, var.failure)
        if not self._failed_vars:
            self._clear_failures()
        if self._counted != op.seq:  # first pass only; no call in between, so no interrupt
            self._failed += failed
            self._unrecorded += untold
            self._skipped += skipped
            self._counted = op.seq
        return replaced

    def _clear_failures(self) -> None:
        """Inside: record that no var holds a failure."""
        self._any_failure = self._careful = False
        # Read after the store above: other threads set one of these flags first, then `_careful`.
        if self._debug or self._shutdown or self._streams_used:
            self._careful = True
