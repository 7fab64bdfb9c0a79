"""Pool of worker processes, seen from the owner: scheduling, deadlines, dead-worker detection.

A pool belongs to one process and is used by one thread at a time. :meth:`WorkerPool.submit` requests a batch; results
are taken in any order. The choice of worker affects only the timing. Every wait is bounded: it ends with an answer,
with the death of a worker (its sentinel becomes ready), or at the deadline.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import time
import weakref
from collections import deque
from collections.abc import Callable
from multiprocessing import connection
from typing import Any

from weftplan.data.input import worker_loop
from weftplan.data.input.layout import BatchLayout, Host
from weftplan.data.input.sample_reader import Filled, ReadTask
from weftplan.data.input.slots import Slots
from weftplan.data.input.worker_loop import Failed, ReadRequest, Recipe, TaskDone, WorkerReady
from weftplan.errors import DataError, DataWorkerError, ParameterError

START_METHODS = ("forkserver", "spawn", "fork")
_END_S = 2.0
"""Seconds that a worker may take to exit by itself."""
_STACKS_S, _MORE_S = 10.0, 0.3
"""Seconds to wait for the first bytes of a late worker's stack dump, and for each further part."""


class _Worker:
    """Worker process with its two connections: requests and answers, and stack dumps."""

    def __init__(self, context: Any, number: int, recipe: Recipe | bytes, name: str, slots: int) -> None:
        self.number = number
        self.conn, theirs = context.Pipe()
        self.stacks, their_stacks = context.Pipe(duplex=False)
        self.requests: deque[ReadRequest] = deque()
        """Unanswered requests, oldest first."""
        self.heard = time.monotonic()
        self.error: str | None = None
        """Reason why the worker is unusable; None while it works."""
        self.process = context.Process(
            target=worker_loop.main,
            args=(theirs, their_stacks, recipe, name, slots),
            name=f"weftplan-data-{number}",
            daemon=True,
        )
        try:
            self.process.start()
        finally:
            # Close our copies, so that later processes do not inherit them: the connection then ends with the worker.
            theirs.close()
            their_stacks.close()
        self.pid: int = self.process.pid or 0

    def __str__(self) -> str:
        return f"data worker {self.number} (process {self.pid})"

    def location(self) -> str:
        """Return the stacks of the worker's threads; empty if it does not respond in time."""
        if worker_loop.STACK_SIGNAL is None:
            return ""
        with contextlib.suppress(OSError):
            os.kill(self.pid, worker_loop.STACK_SIGNAL)
        parts: list[bytes] = []
        end = time.monotonic() + _STACKS_S
        while connection.wait([self.stacks], max(0.0, (_MORE_S if parts else end - time.monotonic()))):
            part = os.read(self.stacks.fileno(), 65536)
            if not part:
                break
            parts.append(part)
        return b"".join(parts).decode(errors="replace")


class WorkerPool:
    """Pool of workers, with the shared-memory slots that they fill.

    Args:
        recipe: recipe that each worker receives.
        workers: number of processes.
        slots: most batches in flight.
        start_method: how processes start.
        deadline: seconds that a worker may be silent while the owner waits for it.

    Raises:
        DataError: the source or the transform cannot be sent to another process.
        DataWorkerError: a worker could not start.
    """

    def __init__(self, recipe: Recipe, *, workers: int, slots: int, start_method: str, deadline: float) -> None:
        self.owner = os.getpid()
        self._deadline = deadline
        self._layout: BatchLayout = recipe.layout
        self._tickets = 0
        self._answers: dict[int, TaskDone | Failed] = {}
        self._holding: dict[int, tuple[int, _Worker]] = {}
        """Ticket -> (slot, worker), until the ticket is released."""
        self._free: list[int] = list(range(slots))
        self._forgotten: set[int] = set()
        context = multiprocessing.get_context(start_method)
        if start_method == "forkserver":
            _preload(context)
        sent = recipe if start_method == "fork" else _pickled(recipe)
        self.slots = Slots(recipe.layout, slots)
        self._workers: list[_Worker] = []
        self._end = weakref.finalize(self, _end, self.owner, self._workers, self.slots)
        try:
            for number in range(workers):
                self._workers.append(_Worker(context, number, sent, self.slots.name, slots))
            self._hear_all_ready()
        except BaseException:
            self.close(patience=0)
            raise
        self.slots.unname()

    @property
    def pids(self) -> list[int]:
        """Process IDs of the workers."""
        return [worker.pid for worker in self._workers]

    @property
    def has_free_slot(self) -> bool:
        """Whether a slot is free, so that a batch can be requested."""
        return bool(self._free)

    def submit(self, task: ReadTask) -> int:
        """Request a batch from the worker with the fewest requests; returns the ticket for :meth:`take`.

        If a worker has died, it is chosen, so that :meth:`take` reports its death even if it was idle.
        """
        self._tickets += 1
        chosen = min(self._workers, key=lambda worker: (worker.error is None, len(worker.requests)))
        request = ReadRequest(self._tickets, self._free.pop(), task)
        if not chosen.requests:
            chosen.heard = time.monotonic()
        chosen.requests.append(request)
        self._holding[request.ticket] = (request.slot, chosen)
        if chosen.error is None:
            try:
                chosen.conn.send(request)
            except (ConnectionError, OSError):
                self._lost(chosen)
        return request.ticket

    def take(self, ticket: int) -> tuple[Filled, list[Host]]:
        """Wait for a batch; returns its result and its memory, valid until :meth:`release`.

        Raises:
            DataError: the worker's exception, with its traceback; the slot is released.
            DataWorkerError: the worker has died or missed the deadline; the pool is closed.
        """
        slot, chosen = self._holding[ticket]
        self._wait(chosen, lambda: ticket in self._answers)
        answer = self._answers.pop(ticket)
        if isinstance(answer, Failed):
            self.release(ticket)
            raise DataError(f"{answer.text}\n\nin {chosen}:\n{answer.trace}".rstrip())
        return answer.filled, self.slots.views[slot]

    def release(self, ticket: int) -> None:
        """Return a batch's slot to the free list."""
        slot, _ = self._holding.pop(ticket)
        self._free.append(slot)

    def forget(self) -> None:
        """Abandon all outstanding batches; their slots become free when their answers arrive."""
        for ticket in [*self._holding]:
            if ticket in self._answers:
                del self._answers[ticket]
                self.release(ticket)
            else:
                self._forgotten.add(ticket)

    def wait_for_slot(self) -> None:
        """Wait until the slot of an abandoned batch is free.

        Raises:
            DataWorkerError: as :meth:`take`.
        """
        while not self._free:
            _, chosen = self._holding[min(self._forgotten)]
            self._wait(chosen, lambda: bool(self._free))

    def _wait(self, chosen: _Worker, is_complete: Callable[[], bool]) -> None:
        """Process messages until ``is_complete()``, which depends on the worker ``chosen``.

        Raises:
            DataWorkerError: the worker has died or is silent until the deadline; the pool is closed.
        """
        waiting = time.monotonic()
        while not is_complete():
            remaining_s = max(chosen.heard, waiting) + self._deadline - time.monotonic()
            if chosen.error is None and remaining_s <= 0:
                chosen.error = self._late(chosen)
            if chosen.error is not None:
                self.close(patience=0)
                raise DataWorkerError(chosen.error)
            self._listen(remaining_s)

    # -- hearing ----------------------------------------------------------------------------------------------------

    def _listen(self, seconds: float) -> None:
        """Wait at most ``seconds`` for a message or the death of any worker, then process all messages."""
        owners: dict[Any, _Worker] = {}
        for worker in self._workers:
            if worker.error is None:
                owners[worker.conn] = owners[worker.process.sentinel] = worker
        for worker in dict.fromkeys(owners[handle] for handle in connection.wait(list(owners), seconds)):
            try:
                while worker.conn.poll():
                    self._hear(worker, worker.conn.recv())
            except (EOFError, OSError, pickle.UnpicklingError):  # the connection has ended, perhaps within an answer
                self._lost(worker)
                continue
            if not worker.process.is_alive():
                self._lost(worker)

    def _hear(self, worker: _Worker, answer: WorkerReady | TaskDone | Failed) -> None:
        worker.heard = time.monotonic()
        if isinstance(answer, WorkerReady):
            self._ready[worker.number] = answer
            return
        if isinstance(answer, Failed) and answer.ticket < 0:
            worker.error = f"{worker} could not begin: {answer.text}\n\n{answer.trace}".rstrip()
            return
        worker.requests.popleft()
        if answer.ticket in self._forgotten:
            self._forgotten.discard(answer.ticket)
            self.release(answer.ticket)
        else:
            self._answers[answer.ticket] = answer

    def _hear_all_ready(self) -> None:
        self._ready: dict[int, WorkerReady] = {}
        end = time.monotonic() + self._deadline
        while len(self._ready) < len(self._workers):
            for worker in self._workers:
                if worker.error is not None:
                    raise DataWorkerError(worker.error)
            remaining_s = end - time.monotonic()
            if remaining_s <= 0:
                late = next(worker for worker in self._workers if worker.number not in self._ready)
                raise DataWorkerError(f"{late} has not begun within {self._deadline:g} s\n{late.location()}".rstrip())
            self._listen(remaining_s)

    @property
    def samples(self) -> set[int | None]:
        """Dataset lengths that the workers report."""
        return {answer.samples for answer in self._ready.values()}

    def _lost(self, worker: _Worker) -> None:
        """Record how a worker died and the batch it was reading."""
        if worker.error is not None:  # the worker has reported its own start-up error
            return
        worker.process.join(_END_S)
        code = worker.process.exitcode
        how = "has closed its connection" if code is None else f"ended with exit code {code}"
        if code is not None and code < 0:
            how = f"was killed by {_signal_name(-code)}"
            if code == -9:
                how += " (perhaps by the system, for want of memory)"
        if worker.number not in self._ready:
            worker.error = (
                f"{worker} {how} before it began; its own message, if any, is on stderr. A script that makes workers "
                f"must protect what it runs with: if __name__ == '__main__':"
            )
        else:
            worker.error = f"{worker} {how} while it {_doing(worker)}"

    def _late(self, worker: _Worker) -> str:
        stacks = worker.location()
        location = f"; it stands at\n{stacks}" if stacks else ""
        text = f"{worker} has given nothing for {self._deadline:g} s, the deadline, while it {_doing(worker)}{location}"
        return text.rstrip()

    # -- the end ----------------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether the workers are shut down or belong to another process."""
        return not self._end.alive or self.owner != os.getpid()

    def close(self, *, patience: float = _END_S) -> None:
        """Shut the workers down, kill any still alive after ``patience`` seconds, and release the memory."""
        if self._end.detach() is not None:
            _end(self.owner, self._workers, self.slots, patience)


def _end(owner: int, workers: list[_Worker], slots: Slots, patience: float = _END_S) -> None:
    if owner != os.getpid():  # a forked child inherits the objects, but the processes belong to its parent
        return
    for worker in workers:
        with contextlib.suppress(OSError, ValueError):
            worker.conn.send(None)
        worker.conn.close()
    end = time.monotonic() + patience
    for worker in workers:
        worker.process.join(max(0.0, end - time.monotonic()))
        if worker.process.is_alive():
            worker.process.kill()
            worker.process.join()
        worker.process.close()
        worker.stacks.close()
    slots.close()


def _doing(worker: _Worker) -> str:
    if not worker.requests:
        return "had nothing to do"
    return f"read batch {worker.requests[0].task.number}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _pickled(recipe: Recipe) -> bytes:
    # With multiprocessing's pickler, PyTorch would send tensors as file descriptors, which only one process can open.
    try:
        return pickle.dumps(recipe, pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        raise DataError(
            f"the source or the transform cannot be sent to workers: {type(error).__name__}: {error}. Define classes "
            f"and functions at the top of a module, give a function that makes the source, or use num_workers=0 or "
            f"start_method='fork'"
        ) from error


def _preload(context: Any) -> None:
    """Let the fork server import the workers' modules, unless the program has set its own preload list."""
    from multiprocessing import forkserver

    server = forkserver._forkserver
    if getattr(server, "_preload_modules", None) == ["__main__"]:
        context.set_forkserver_preload(["__main__", worker_loop.__name__, "weftplan.data.iterators"])


def check_start_method(method: str | None) -> str:
    """Validate a start method against this system; by default the first available of :data:`START_METHODS`.

    Raises:
        ParameterError: the system does not support it.
    """
    methods = multiprocessing.get_all_start_methods()
    if method is None:
        return next(name for name in START_METHODS if name in methods)
    if method not in methods:
        raise ParameterError(
            f"start_method must be one of {[n for n in START_METHODS if n in methods]}, got {method!r}"
        )
    return method
