"""Main loop of a worker process: read requested batches into shared memory until the owner exits.

A worker answers every request with a result or a traceback. It exits when its owner closes the connection or dies.
It ignores SIGINT, because the owner handles Ctrl-C.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing import connection, parent_process
from typing import Any, NamedTuple

from weftplan.data.input.layout import BatchLayout
from weftplan.data.input.sample_reader import Filled, Reader, ReadTask, trace_of
from weftplan.data.input.slots import Slots
from weftplan.data.input.sources import Dataset, source_of
from weftplan.errors import DataError
from weftplan.support import blas_threads

STACK_SIGNAL = getattr(signal, "SIGUSR1", None)
"""Signal that makes a worker dump the stacks of its threads."""


class Recipe(NamedTuple):
    """Everything a worker needs to read batches."""

    source: Any
    transform: Callable[[Any], Any] | None
    skip: bool
    layout: BatchLayout


class WorkerReady(NamedTuple):
    """Message: a worker has mapped the slots and is ready."""

    samples: int | None
    """Length of the dataset; None for a stream."""


class TaskDone(NamedTuple):
    """Message: a task has finished."""

    ticket: int
    filled: Filled


class Failed(NamedTuple):
    """Message: a task, or the start-up (ticket -1), has raised."""

    ticket: int
    text: str
    trace: str


class ReadRequest(NamedTuple):
    """Message: a task, and the slot to fill."""

    ticket: int
    slot: int
    task: ReadTask


def main(conn: Any, stacks: Any, recipe: Recipe | bytes, slots_name: str, slots: int) -> None:
    """Run a worker until its owner closes the connection or exits.

    Args:
        conn: connection for requests and answers.
        stacks: connection to which stack dumps are written.
        recipe: the recipe or its pickle.
        slots_name, slots: name of the shared memory, and number of its slots.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if STACK_SIGNAL is not None:
        faulthandler.register(STACK_SIGNAL, file=stacks.fileno(), all_threads=True)
    threading.Thread(target=_end_with_owner, name="weftplan-owner", daemon=True).start()
    memory: Slots | None = None
    try:
        try:
            threads = _bound_threads()
            loaded: Recipe = pickle.loads(recipe) if isinstance(recipe, bytes) else recipe
            _bound_torch(threads)
            source = source_of(loaded.source, batches=loaded.layout.batched)
            memory = Slots(loaded.layout, slots, slots_name)
            reader = Reader(source, loaded.transform, loaded.skip, loaded.layout)
            conn.send(WorkerReady(len(source) if isinstance(source, Dataset) else None))
        except BaseException as error:
            conn.send(_failed(-1, error))
            return
        while True:
            request: ReadRequest | None = conn.recv()
            if request is None:
                return
            conn.send(_answer(reader, memory, request))
    except (EOFError, ConnectionError):  # the owner has closed the connection or has exited
        return
    finally:
        if memory is not None:
            memory.close()


def _answer(reader: Reader, memory: Slots, request: ReadRequest) -> TaskDone | Failed:
    try:
        return TaskDone(request.ticket, reader.read(request.task, memory.views[request.slot]))
    except BaseException as error:  # includes sys.exit() in a dataset
        return _failed(request.ticket, error)


def _failed(ticket: int, error: BaseException) -> Failed:
    text = str(error) if isinstance(error, DataError) else f"{type(error).__name__}: {error}"
    return Failed(ticket, text, trace_of(error))


def _bound_threads() -> int | None:
    """Limit the threads of native libraries, loaded now or later, because several workers share the cores.

    Returns the limit (1, unless configured), or None if the user has set a BLAS environment variable.
    """
    blas_threads.limit()
    threads, _ = blas_threads.planned()
    if threads is not None:
        for name in blas_threads.NATIVE:
            os.environ[name] = str(threads)
    return threads


def _bound_torch(threads: int | None) -> None:
    torch = sys.modules.get("torch")
    if torch is not None and threads is not None and hasattr(torch, "set_num_threads"):
        torch.set_num_threads(threads)


def _end_with_owner() -> None:
    """Exit when the owner dies, even if the worker is busy or hangs."""
    owner = parent_process()
    if owner is not None:
        connection.wait([owner.sentinel])
        os._exit(1)
