"""Waits for vars and for all operations, from any thread. A wait re-raises failures."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future

from weftplan.engine.execution import Execution, running
from weftplan.engine.failure import Failure, add_note
from weftplan.engine.operation import FnProperty, FutureBlock, Waiter, checked_vars, require_stack
from weftplan.engine.region import PATIENCE_S
from weftplan.engine.sites import push_site
from weftplan.engine.streams import synchronize_var
from weftplan.engine.var import Var
from weftplan.errors import EngineError, WaitInWorkerError


class Waiting(Execution):
    """Wait methods of the engine, as a base class."""

    def _before_wait(self, var: Var | None = None) -> None:
        """Hook before a wait for ``var`` (None: all) blocks. A driver may run operations here."""

    def _drive(self, var: Var) -> None:
        """Hook before a wait for ``var`` that blocks no thread. A driver without threads runs operations here."""

    def _forbid_wait(self, what: str, *, would_block: bool = False) -> None:
        """Raise if this thread runs an operation of this engine (inline engine: only if the wait would never end)."""
        if self in running.engines and (would_block or not self._inline):
            raise WaitInWorkerError(
                f"a task or operation waited for others ({what}, which result() and wait() call): the worker would "
                f"wait for work that may need this worker. Name what it waits for among its arguments or in reads (of "
                f"a task) or in const_vars (of a push) instead, or push the rest as its own operation."
            )

    def wait_for_var(self, var: Var) -> None:
        """Block until all writes of ``var`` pushed so far are done, and raise its failure if it has one.

        Running reads are not waited for; to wait for them, push an operation that writes the var.

        Raises:
            WaitInWorkerError: called inside an operation.
            BaseException: the error of the failed operation, with a note of its name and the line of its push.
        """
        self.wait_until_written(var)
        failure = var.failure
        if failure is not None:
            try:
                self._raise(failure)
            finally:
                del failure, var  # the traceback must not hold an object that holds the error

    def wait_until_written(self, var: Var, timeout: float | None = None) -> bool:
        """Wait like :meth:`wait_for_var`, but at most ``timeout`` seconds (None: no limit) and without raising the
        failure.

        Returns:
            False if the time was not enough.

        :meta private:
        """
        inside = running.engines
        if inside and not self._inline and running.in_user_code():
            inside = ()
        if inside:
            self._forbid_wait("wait_for_var")
        if self._bulking:
            self._flush_bulk()
        if getattr(var, "engine", None) is not self:
            checked_vars(self, (var,), (), "wait_for_var")
        if self._region.requests:
            require_stack(6)
            self._region.apply(self)
        # Check requests first: once there are none, those of this thread are admitted and visible in `var.write`.
        if self._region.requests or var.write is not None:
            if inside:
                self._forbid_wait("wait_for_var", would_block=True)
            self._before_wait(var)
            if (self._region.requests or var.write is not None) and not self._block(var, timeout):
                return False
        if var.events is not None:
            synchronize_var(self, var)
        return True

    def _block(self, var: Var, timeout: float | None) -> bool:
        """Wait as a reader of ``var`` whose grant wakes this thread. Return False after ``timeout`` seconds."""
        self._region.refuse_inside()
        wakeup = threading.Lock()  # a binary semaphore: a lock can be released by another thread
        wakeup.acquire()
        # A read is granted after all earlier writes, and its grant releases the lock.
        self._region.ask(self, Waiter(wakeup.release, (var,), ()))
        return self._acquired(wakeup, timeout)

    def wait_for_all(self) -> None:
        """Block until nothing is pending. Raise the first failure, in push order, that no wait has raised.

        Its notes describe the other failures. Unflushed bulks of other threads are not waited for.
        """
        self._forbid_wait("wait_for_all")
        # Even an inline engine would wait for the calling operation.
        self._forbid_wait("wait_for_all", would_block=True)
        require_stack()
        if self._bulking:
            self._flush_bulk()
        self._region.apply(self)
        self._wait_idle()
        for stream in list(self._streams):
            stream.drain(self)
        self._region.refuse_inside()
        # Completed operations have recorded their failures by now: without any, skip the request.
        if self._unobserved or self._unrecorded:
            failures, more = self._exclusively(self._observe_all)
            if failures:
                error = failures[0].exception()
                if more > 0:
                    add_note(error, f"{more} more operations failed than are named here")
                for other in failures[1:]:
                    add_note(error, f"another operation failed: {other.describe()}")
                try:
                    raise error
                finally:
                    del error, failures

    def settle(self, timeout: float) -> bool:
        """Wait at most ``timeout`` seconds until nothing is pending. Raise and report no failure.

        Returns:
            True if nothing is pending; False after ``timeout``, or immediately inside an operation.

        :meta private:
        """
        if running.engines or running.seated or running.short is not None:
            return False
        if self._bulking:
            self._flush_bulk()
        self._region.apply(self)
        idle = self._wait_idle(timeout)
        if idle:
            for stream in list(self._streams):
                stream.drain(self)
        return idle

    def _observe_all(self) -> tuple[list[Failure], int]:
        """Inside: mark all failures as observed; return the recorded ones in push order, and how many more."""
        recorded = {f for f in self._unobserved if f.observed_seq is None}
        # A failure beyond the record may still be on a var.
        on_vars = {var.failure for var in self._failed_vars if var.failure is not None}
        further = {f for f in on_vars if f.observed_seq is None} - recorded
        failures = sorted(recorded | further, key=lambda f: f.seq)
        more = self._unrecorded - len(further)
        self._unobserved = {}
        self._unrecorded = 0
        for failure in failures:
            self._observe(failure)
        return failures, more

    def _wait_idle(self, timeout: float = -1, few: int = 0) -> bool:
        """Wait until at most ``few`` operations are pending. Return False if ``timeout`` seconds were not enough."""
        self._before_wait()
        while True:
            require_stack(6)
            self._region.apply(self)
            if len(self._region.requests) + self._region.pending <= few:  # read in this order, as in wait_for_var
                return True
            self._region.refuse_inside()
            wakeup = threading.Lock()  # released inside the region when few operations are pending
            wakeup.acquire()
            self._region.idle_waiters.append(wakeup)
            # Completions before the append have not notified this waiter: check again.
            if len(self._region.requests) + self._region.pending <= few:
                continue
            if not self._acquired(wakeup, None if timeout < 0 else timeout):
                return False

    def _acquired(self, wakeup: threading.Lock, timeout: float | None) -> bool:
        """Wait until ``wakeup`` is released. Return False if ``timeout`` seconds were not enough.

        A worker that waits in user code lends its slot meanwhile: the awaited operation may need it.
        """
        queue = running.seated or (running.worker and running.worker[0]) if running.in_user_code() else None
        if queue is None or wakeup.acquire(blocking=False):
            return self._sleep_until(wakeup, timeout) if queue is None else True
        token = object()
        self._starved.append(token)  # for a thread that lacks memory this one is not at work
        queue.lend(self)
        try:
            return self._sleep_until(wakeup, timeout)
        finally:
            queue.reclaim()
            self._starved.remove(token)

    def _sleep_until(self, wakeup: threading.Lock, timeout: float | None) -> bool:
        """Sleep until ``wakeup`` is released. Return False if ``timeout`` seconds were not enough.

        The wait is split: Ctrl-C just before Python blocks in a lock does not wake it; the next piece notices it.
        """
        end = math.inf if timeout is None else time.monotonic() + timeout
        while True:
            remaining_s = end - time.monotonic()
            if wakeup.acquire(timeout=max(0.0, min(remaining_s, PATIENCE_S))):
                return True
            if remaining_s <= PATIENCE_S:
                return False
            self._look_after_workers()

    def _look_after_workers(self) -> None:
        """Serve pending requests; called now and then during a wait."""
        require_stack(6)
        self._region.apply(self)

    def throw(self, var: Var) -> None:
        """Raise the failure of ``var`` if it has one, without waiting.

        :meta private:
        """
        if not isinstance(var, Var):
            checked_vars(self, (var,), (), "throw")
        failure = var.failure
        if failure is not None:
            try:
                self._raise(failure)
            finally:
                del failure, var

    def future(self, var: Var) -> Future[Var]:
        """Return a ``concurrent.futures.Future`` that completes when ``var`` is readable; its exception is the var's
        failure.

        A StopIteration becomes the cause of a RuntimeError, as in a generator (PEP 479): a coroutine cannot be resumed
        with StopIteration, so a task that awaits the future would never end.
        """
        result: Future[Var] = Future()

        def settle() -> None:
            failure = var.failure
            if not result.set_running_or_notify_cancel():
                return
            if failure is None:
                result.set_result(var)
            else:
                self._note_observed(failure)
                result.set_exception(_for_coroutines(failure.exception()))

        reads, _ = checked_vars(self, (var,), (), "future")
        if self._bulking:
            self._flush_bulk()
        # A reader of the var: it runs after every earlier write. NO_SKIP, because it must also report a failure.
        self._submit(FutureBlock(settle, reads, (), "future", push_site(), prop=FnProperty.NO_SKIP))
        self._drive(var)
        return result

    def _await(self, var: Var) -> Generator[object, None, Var]:
        """Implement ``await var``: suspend the task, not the thread, until the var is readable; raise its failure."""
        import asyncio

        return (yield from asyncio.wrap_future(self.future(var)).__await__())

    def _raise(self, failure: Failure) -> None:
        self._note_observed(failure)
        try:
            raise failure.exception()
        finally:
            del failure  # the traceback would hold it, a reference cycle

    def _note_observed(self, failure: Failure) -> None:
        """Mark ``failure`` as observed by the user."""

        def note() -> None:
            if failure not in self._unobserved and failure.observed_seq is None and self._unrecorded:
                self._unrecorded -= 1
            self._observe(failure)
            self._unobserved.pop(failure, None)

        if failure.observed_seq is None or failure in self._unobserved or self._raise_once:
            self._exclusively(note)

    def _observe(self, failure: Failure) -> None:
        """Inside: mark as observed. Operations pushed from here on may heal the failed vars."""
        if failure.observed_seq is None:
            failure.observed_seq = self._region.seq
            if self._raise_once:
                failure.heal_everywhere(self._failed_vars)

    def _refuse(self, message: str) -> None:
        """Make every later push and wait raise EngineError, except those of user code inside a pending operation."""

        def guarded(verb: Callable[..., object]) -> Callable[..., object]:
            def refuse(*args: object, **kwargs: object) -> object:
                if running.in_user_code():  # it was pushed before, and the engine waits for it
                    return verb(*args, **kwargs)
                raise EngineError(message)

            return refuse

        verbs = ("wait_for_var", "wait_until_written", "wait_for_all", "future")
        for verb in ("push", "push_async", "run_inline", "write_inline", "begin", "delete_variable", *verbs):
            setattr(self, verb, guarded(getattr(self, verb)))


def _for_coroutines(error: BaseException) -> BaseException:
    """Return ``error``, or a substitute that a coroutine can raise."""
    if not issubclass(type(error), StopIteration):  # `isinstance` would call user code of an odd class
        return error
    instead = RuntimeError("an engine operation raised StopIteration")
    instead.__cause__ = error
    return instead
