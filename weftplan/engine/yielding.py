"""Yielding of a starved thread: pending operations run first, because they may free memory.

Outside operations the thread waits. An operation must not wait, because the awaited operation may need its thread. It
runs other ready operations instead, nested; they are independent of it, or they would not be ready. If none is ready,
it waits for a busy worker. If every busy worker is starved, no memory will be freed: one of them, chosen by a lock,
gives up. Its failure may free the memory that the others need.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from weftplan.engine.execution import running
from weftplan.errors import EngineError
from weftplan.locks import Lock, free_in_children

if TYPE_CHECKING:
    from weftplan.engine.types import Core

_DEEPEST = 20
"""Maximum nesting of operations on one thread."""
_ROUNDS = 10
"""Number of waits that allow for operations pushed meanwhile: deletes of dead arrays, work of other threads."""
_GLANCE_S = 0.0005
"""Seconds between two looks at the number of completed operations; starved threads must not poll without a pause."""
_giving_up = free_in_children(Lock())
"""Guards the decision to give up: of several starved threads only one may conclude that no other thread can proceed."""


def retries_after_progress(engine: Core, patience_s: float) -> Iterator[None]:
    """Yield each time that memory may have become free, because other operations have completed.

    Outside operations it waits at most ``_ROUNDS`` times until nothing is pending, and yields after each wait. It ends
    if a wait takes longer than ``patience_s`` seconds, because a pending operation may wait for this thread. Inside an
    operation it yields first, then after each completion; the number of yields is bounded by the operations that are
    pending now plus ``_ROUNDS``.
    """
    if engine not in running.engines:
        for _ in range(_ROUNDS):
            try:
                if not engine._region.pending or not engine.settle(patience_s):
                    return
            except EngineError:  # called by a finalizer or signal handler, which must not wait
                return
            yield
        return
    # Bounded: every operation that can complete has then had its turn.
    for _ in range(engine._region.pending + _ROUNDS):
        ended = _ended(engine)
        yield  # before the next wait: memory may be free since the last attempt
        if not _another(engine, ended):
            return


def _ended(engine: Core) -> int:
    """Return the number of completed operations, without waiters: a request for the count is no progress."""
    return engine._region.completed - engine._region.waits


def _another(engine: Core, ended: int) -> bool:
    """Inside an operation: run another operation, or wait until more than ``ended`` operations have completed.

    Return False if every busy thread is starved, so that no operation will complete; this thread then gives up.
    """
    if _ended(engine) == ended and running.nested < _DEEPEST:
        running.nested += 1
        try:
            if engine._run_another():
                return True
        finally:
            running.nested -= 1
    token = object()
    engine._starved.append(token)
    try:
        while _ended(engine) == ended:
            with _giving_up:
                # A thread that gives up counts as busy until its operation has completed, so the next thread waits for
                # that. Read the number of busy workers first: a worker completes its operation before it becomes idle.
                if engine._at_work() <= len(engine._starved) and _ended(engine) == ended:
                    engine._starved.remove(token)
                    return False
            time.sleep(_GLANCE_S)
    finally:
        if token in engine._starved:
            engine._starved.remove(token)
    return True
