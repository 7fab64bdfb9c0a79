"""Yielding of a starved thread: pending operations run first, because they may free memory.

Outside of operations that is a wait. An operation cannot wait: what it waits for may need its thread. So its thread
runs operations that are ready meanwhile, one within the other; they are independent of it, or they would not be ready.
Where there are none it waits for a worker that is at work. When every worker that is at work lacks memory nobody will
free any: one of them, chosen by a lock, gives up, and its failure may free what the others lack.
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
"""Operations that one thread runs one within the other."""
_ROUNDS = 10
"""How often more is waited for that was pushed meanwhile: deletes of what has died, work of other threads."""
_GLANCE_S = 0.0005
_giving_up = free_in_children(Lock())


def others_first(engine: Core, patience_s: float) -> Iterator[None]:
    """Yields whenever another operation has ended, at most as often as operations are pending now.

    Outside of operations it ends when ``patience_s`` were not enough: what is pending may wait for this very thread.
    """
    if engine not in running.engines:
        for _ in range(_ROUNDS):
            try:
                if not engine._region.pending or not engine.settle(patience_s):
                    return
            except EngineError:  # a finalizer or signal handler, which must not wait
                return
            yield
        return
    for _ in range(engine._region.pending + _ROUNDS):
        ended = _ended(engine)
        yield  # before the next wait: something may have ended since the last try
        if not _another(engine, ended):
            return


def _ended(engine: Core) -> int:
    """How many operations have ended. Not those that only wait or look: whoever asks whether anything is pending would
    take itself for one that has ended, and run none."""
    return engine._region.completed - engine._region.waits


def _another(engine: Core, ended: int) -> bool:
    """Inside an operation: run or await another, until more than ``ended`` have; False when none will end."""
    if _ended(engine) == ended and running.nested < _DEEPEST:
        running.nested += 1
        try:
            if engine._run_another():
                return True
        finally:
            running.nested -= 1
    mark = object()
    engine._lacking.append(mark)
    try:
        while _ended(engine) == ended:
            with _giving_up:
                # Who gives up counts as at work again until its operation has ended, so the next one waits for that.
                # In this order: a worker first completes its operation, then is idle.
                if engine._at_work() <= len(engine._lacking) and _ended(engine) == ended:
                    engine._lacking.remove(mark)
                    return False
            time.sleep(_GLANCE_S)
    finally:
        if mark in engine._lacking:
            engine._lacking.remove(mark)
    return True
