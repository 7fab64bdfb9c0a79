"""Engines and ``os.fork``: the child gets idle engines without threads, and no half-made change.

Before a fork every engine finishes its work, and the forking thread takes its token, so nobody is inside the region.
Requests that other threads put down meanwhile are carried out by the parent and forgotten by the child.
"""

from __future__ import annotations

import os
import threading
import time
from typing import Any

from weftplan.engine.execution import live_engines, running
from weftplan.engine.waiting import Waiting
from weftplan.errors import EngineError
from weftplan.locks import ReentrantLock

_GATE_S = 1.0
in_child = False
"""This process was forked from one that had imported this."""


class Forking(Waiting):
    """What an engine does before and after a fork."""

    def __init__(self) -> None:
        super().__init__()
        self._gate: threading.Event | None = None
        """Where pushes of other threads wait while this process forks."""

    def stop(self) -> None:
        """Wait for everything, then end the threads; failures stay to be raised by the next wait. Idempotent.

        A later push starts threads again. Called inside an operation of this engine it does nothing.
        """

    def _hold_pushes(self) -> None:
        """Before a fork: other threads' pushes wait, or a fork under load would wait for ever.

        Operations may push, since the fork waits for them; so may the forking thread. The rest waits a second at most:
        one of them may be what an asynchronous operation needs to end.
        """
        gate, forking, apply = threading.Event(), threading.get_ident(), type(self)._apply

        def held() -> None:
            if threading.get_ident() != forking and running.engine is not self and not running.depth:
                gate.wait(_GATE_S)
            apply(self)

        self._gate = gate
        self._apply = held  # type: ignore[method-assign]

    def _let_pushes_go(self) -> None:
        """After a fork, in the parent."""
        if self._gate is not None:
            del self._apply
            self._gate.set()
            self._gate = None

    def _seize(self) -> None:
        """Before a fork: be the thread inside, until :meth:`_leave`, so that the child sees no half-made change."""
        while True:
            try:
                del self._token[0]
            except KeyError:
                self._refuse_inside()
                time.sleep(0.0001)
            else:
                return

    def _leave(self) -> None:
        self._token[0] = 1

    def _after_fork(self) -> None:
        """In a forked child: no thread but this one exists.

        What was pending here (only when the fork came from inside an operation) will never end: every use is refused.
        Requests of other threads are the parent's.
        """
        if self._gate is not None:
            # Not set: a thread that was about to wait there may have held its lock, and does not exist here.
            del self._apply
            self._gate = None
        self._requests.clear()
        self._ready.clear()
        self._here.clear()
        self._idle_waiters.clear()
        self._token[0] = 1
        self._halfway = None
        self._unusual_lock = ReentrantLock()
        if self._pending:
            message = (
                f"{self!r} was forked from inside one of its operations: its threads are gone and their work with "
                f"them; fork outside of operations, or make a new engine and new arrays in the child"
            )

            def refuse(*args: Any, **kwargs: Any) -> Any:
                raise EngineError(message)

            for verb in ("push", "push_async", "delete_variable", "wait_for_var", "wait_for_all", "future"):
                setattr(self, verb, refuse)
            self._completed = self._seq


def engines() -> list[Any]:
    """All live engines; a WeakSet that another thread changes meanwhile is read again."""
    while True:
        try:
            return list(live_engines)
        except RuntimeError:
            continue


_held: list[Forking] = []
"""Engines in whose region the forking thread is."""


def _before_fork() -> None:
    """Finish all work and be inside every engine's region, so that the child sees no half-made change."""
    for engine in engines():
        engine._hold_pushes()
        engine.stop()
        engine._seize()
        while engine._pending and running.engine is not engine and running.depth == 0:
            # Another thread has pushed in between.
            engine._leave()
            engine.stop()
            engine._seize()
        _held.append(engine)


def _after_fork_in_parent() -> None:
    while _held:
        engine = _held.pop()
        engine._leave()
        engine._let_pushes_go()
        engine._apply()


def _in_forked_child() -> None:
    """Threads are gone, and so are all operations: the fork waited.

    New engines of the child use the MP worker count.
    """
    global in_child
    in_child = True
    for engine in _held:
        engine._after_fork()
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_in_forked_child)
