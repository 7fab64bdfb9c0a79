"""Pool of worker processes, seen from the owner: scheduling, deadlines, dead-worker detection.

A pool belongs to one process and is used by one thread at a time. :meth:`Pool.submit` requests a batch; results are
taken in any order. The choice of worker affects only the timing. Every wait is bounded: it ends with an answer, with
the death of a worker (its sentinel becomes ready), or at the deadline.
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

from weftplan.errors import DataError, DataWorkerError, ParameterError
from weftplan.training.data.input import worker
from weftplan.training.data.input.layout import Host, Layout
from weftplan.training.data.input.reading import Filled, Task
from weftplan.training.data.input.slots import Slots
from weftplan.training.data.input.worker import Done, Failed, ReadRequest, Ready, Recipe

START_METHODS = ("forkserver", "spawn", "fork")
_END_S = 2.0
"""How long a worker may take to end by itself."""
_STACKS_S, _MORE_S = 10.0, 0.3
"""How long a worker that is late may take to write where it stands, and to go on writing."""


class _Worker:
    """One process, and its two connections: requests and answers, and stacks."""

    def __init__(self, context: Any, number: int, recipe: Recipe | bytes, name: str, slots: int) -> None:
        self.number = number
        self.conn, theirs = context.Pipe()
        self.stacks, their_stacks = context.Pipe(duplex=False)
        self.requests: deque[ReadRequest] = deque()
        """What it has not answered, oldest first."""
        self.heard = time.monotonic()
        self.error: str | None = None
        """Why it does no more."""
        self.process = context.Process(
            target=worker.main,
            args=(theirs, their_stacks, recipe, name, slots),
            name=f"weftplan-data-{number}",
            daemon=True,
        )
        try:
            self.process.start()
        finally:
            # No later process inherits them, so a connection ends when the worker does.
            theirs.close()
            their_stacks.close()
        self.pid: int = self.process.pid or 0

    def __str__(self) -> str:
        return f"data worker {self.number} (process {self.pid})"

    def where(self) -> str:
        """Where its threads stand, if it says so in time."""
        if worker.STACK_SIGNAL is None:
            return ""
        with contextlib.suppress(OSError):
            os.kill(self.pid, worker.STACK_SIGNAL)
        parts: list[bytes] = []
        end = time.monotonic() + _STACKS_S
        while connection.wait([self.stacks], max(0.0, (_MORE_S if parts else end - time.monotonic()))):
            part = os.read(self.stacks.fileno(), 65536)
            if not part:
                break
            parts.append(part)
        return b"".join(parts).decode(errors="replace")


class Pool:
    """Workers, and slots of shared memory that they fill.

    Args:
        recipe: what each worker gets.
        workers: how many processes.
        slots: batches that may be under way.
        start_method: how processes begin.
        deadline: seconds that a worker may be silent while somebody waits for it.

    Raises:
        DataError: the source or the transform cannot be sent to another process.
        DataWorkerError: a worker could not begin.
    """

    def __init__(self, recipe: Recipe, *, workers: int, slots: int, start_method: str, deadline: float) -> None:
        self.owner = os.getpid()
        self._deadline = deadline
        self._layout: Layout = recipe.layout
        self._tickets = 0
        self._answers: dict[int, Done | Failed] = {}
        self._holding: dict[int, tuple[int, _Worker]] = {}
        """Ticket -> its slot and its worker, until it is released."""
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
        """Numbers of the processes."""
        return [one.pid for one in self._workers]

    @property
    def room(self) -> bool:
        """Whether a batch can be asked for now."""
        return bool(self._free)

    def submit(self, task: Task) -> int:
        """Let the worker with the least to do read a batch; returns the ticket for :meth:`take`.

        The batch is a dead worker's where there is one, so that its death is told, whatever it was doing.
        """
        self._tickets += 1
        chosen = min(self._workers, key=lambda one: (one.error is None, len(one.requests)))
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
        """What came of a batch, and its memory until :meth:`release`.

        Raises:
            DataError: what the worker raised, with its traceback; the slot is free again.
            DataWorkerError: the worker has died or is late. The pool is closed then.
        """
        slot, chosen = self._holding[ticket]
        self._wait(chosen, lambda: ticket in self._answers)
        answer = self._answers.pop(ticket)
        if isinstance(answer, Failed):
            self.release(ticket)
            raise DataError(f"{answer.text}\n\nin {chosen}:\n{answer.trace}".rstrip())
        return answer.filled, self.slots.views[slot]

    def release(self, ticket: int) -> None:
        """The memory of a batch may be used again."""
        slot, _ = self._holding.pop(ticket)
        self._free.append(slot)

    def forget(self) -> None:
        """Nobody takes what is under way any more."""
        for ticket in [*self._holding]:
            if ticket in self._answers:
                del self._answers[ticket]
                self.release(ticket)
            else:
                self._forgotten.add(ticket)

    def wait_for_room(self) -> None:
        """Until a slot is free that held something forgotten.

        Raises:
            DataWorkerError: as :meth:`take`.
        """
        while not self._free:
            _, chosen = self._holding[min(self._forgotten)]
            self._wait(chosen, lambda: bool(self._free))

    def _wait(self, chosen: _Worker, done: Callable[[], bool]) -> None:
        """Listen until ``done``, to which ``chosen`` has to do something.

        Raises:
            DataWorkerError: it has died, or says nothing until the deadline. The pool is closed then.
        """
        waiting = time.monotonic()
        while not done():
            left = max(chosen.heard, waiting) + self._deadline - time.monotonic()
            if chosen.error is None and left <= 0:
                chosen.error = self._late(chosen)
            if chosen.error is not None:
                self.close(patience=0)
                raise DataWorkerError(chosen.error)
            self._listen(left)

    # -- hearing ----------------------------------------------------------------------------------------------------

    def _listen(self, seconds: float) -> None:
        """Wait for news of any worker, so long at most, and take in all there are."""
        owners: dict[Any, _Worker] = {}
        for one in self._workers:
            if one.error is None:
                owners[one.conn] = owners[one.process.sentinel] = one
        for one in dict.fromkeys(owners[found] for found in connection.wait(list(owners), seconds)):
            try:
                while one.conn.poll():
                    self._hear(one, one.conn.recv())
            except (EOFError, OSError, pickle.UnpicklingError):  # the end, or half of an answer
                self._lost(one)
                continue
            if not one.process.is_alive():
                self._lost(one)

    def _hear(self, one: _Worker, answer: Ready | Done | Failed) -> None:
        one.heard = time.monotonic()
        if isinstance(answer, Ready):
            self._ready[one.number] = answer
            return
        if isinstance(answer, Failed) and answer.ticket < 0:
            one.error = f"{one} could not begin: {answer.text}\n\n{answer.trace}".rstrip()
            return
        one.requests.popleft()
        if answer.ticket in self._forgotten:
            self._forgotten.discard(answer.ticket)
            self.release(answer.ticket)
        else:
            self._answers[answer.ticket] = answer

    def _hear_all_ready(self) -> None:
        self._ready: dict[int, Ready] = {}
        end = time.monotonic() + self._deadline
        while len(self._ready) < len(self._workers):
            for one in self._workers:
                if one.error is not None:
                    raise DataWorkerError(one.error)
            left = end - time.monotonic()
            if left <= 0:
                late = next(one for one in self._workers if one.number not in self._ready)
                raise DataWorkerError(f"{late} has not begun within {self._deadline:g} s\n{late.where()}".rstrip())
            self._listen(left)

    @property
    def samples(self) -> set[int | None]:
        """How many samples the datasets of the workers have."""
        return {answer.samples for answer in self._ready.values()}

    def _lost(self, one: _Worker) -> None:
        """A worker has died: say how, and what it was doing."""
        if one.error is not None:  # it has said itself why it could not begin
            return
        one.process.join(_END_S)
        code = one.process.exitcode
        how = "has closed its connection" if code is None else f"ended with exit code {code}"
        if code is not None and code < 0:
            how = f"was killed by {_signal_name(-code)}"
            if code == -9:
                how += " (perhaps by the system, for want of memory)"
        if one.number not in self._ready:
            one.error = (
                f"{one} {how} before it began; its own message, if any, is on stderr. A script that makes workers must "
                f"protect what it runs with: if __name__ == '__main__':"
            )
        else:
            one.error = f"{one} {how} while it {_doing(one)}"

    def _late(self, one: _Worker) -> str:
        stacks = one.where()
        where = f"; it stands at\n{stacks}" if stacks else ""
        return f"{one} has given nothing for {self._deadline:g} s, the deadline, while it {_doing(one)}{where}".rstrip()

    # -- the end ----------------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether there are workers no more, or they are another process's."""
        return not self._end.alive or self.owner != os.getpid()

    def close(self, *, patience: float = _END_S) -> None:
        """End the workers, those that do not do so within ``patience`` seconds by force, and let the memory go."""
        if self._end.detach() is not None:
            _end(self.owner, self._workers, self.slots, patience)


def _end(owner: int, workers: list[_Worker], slots: Slots, patience: float = _END_S) -> None:
    if owner != os.getpid():  # a child that was forked has the objects, but the processes are its parent's
        return
    for one in workers:
        with contextlib.suppress(OSError, ValueError):
            one.conn.send(None)
        one.conn.close()
    end = time.monotonic() + patience
    for one in workers:
        one.process.join(max(0.0, end - time.monotonic()))
        if one.process.is_alive():
            one.process.kill()
            one.process.join()
        one.process.close()
        one.stacks.close()
    slots.close()


def _doing(one: _Worker) -> str:
    if not one.requests:
        return "had nothing to do"
    return f"read batch {one.requests[0].task.number}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _pickled(recipe: Recipe) -> bytes:
    # Not multiprocessing's pickler, into which PyTorch puts tensors as descriptors that one process alone can fetch.
    try:
        return pickle.dumps(recipe, pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        raise DataError(
            f"the source or the transform cannot be sent to workers: {type(error).__name__}: {error}. Define classes "
            f"and functions at the top of a module, give a function that makes the source, or use num_workers=0 or "
            f"start_method='fork'"
        ) from error


def _preload(context: Any) -> None:
    """Let the server import what every worker needs, unless somebody else has chosen or it runs already."""
    from multiprocessing import forkserver

    server = forkserver._forkserver
    if getattr(server, "_preload_modules", None) == ["__main__"]:
        context.set_forkserver_preload(["__main__", worker.__name__, "weftplan.training.data.iterators"])


def check_start_method(method: str | None) -> str:
    """A start method that this system has; by default the first of ours.

    Raises:
        ParameterError: it has not.
    """
    there = multiprocessing.get_all_start_methods()
    if method is None:
        return next(name for name in START_METHODS if name in there)
    if method not in there:
        raise ParameterError(f"start_method must be one of {[n for n in START_METHODS if n in there]}, got {method!r}")
    return method
