"""Engines and ``os.fork``: the child gets idle engines without threads, and no half-made change.

Before a fork every engine finishes its work, and the forking thread takes its token, so nobody is inside the region.
Requests that other threads put down meanwhile are carried out by the parent and forgotten by the child.

Ctrl-C ends the waiting, not the fork, which nothing can call off any more: an engine that is still busy then refuses
every use in the child, and the interrupt reaches the parent when ``os.fork`` is over. From the moment at which the
tokens are held until they are given back interrupts are held, too (``shield.py``): the interpreter would report one
that a hook raises, and forget it.
"""

from __future__ import annotations

import _thread
import os
import signal
import threading
import time
from contextlib import AbstractContextManager
from itertools import count
from typing import Any

from weftplan.engine.execution import live_engines, running
from weftplan.engine.shield import NEVER, clock, shield, shielded
from weftplan.engine.waiting import Waiting
from weftplan.errors import EngineError

_GATE_S = 1.0
in_child = False
"""This process was forked from one that had imported this."""
_numbers = count()


class _Fork(threading.local):
    """The fork that this thread is in the middle of."""

    def __init__(self) -> None:
        self.held: list[Forking] = []
        """Engines whose pushes are held back, and in whose region this thread is where it has got so far."""
        self.error: BaseException | None = None
        """What has ended the wait for them."""
        self.shield: AbstractContextManager[Any] | None = None


_fork = _Fork()
_interrupt = iter(_thread.interrupt_main, 1)
"""A loop calls it without looking for signals afterwards."""


class Forking(Waiting):
    """What an engine does before and after a fork."""

    def __init__(self) -> None:
        super().__init__()
        self._number = next(_numbers)
        """Threads that fork at the same time take the engines in this order, so that none waits for the other."""
        self._gate: threading.Event | None = None
        """Where pushes of other threads wait while this process forks."""
        self._forking: set[int] = set()
        """Threads that fork."""
        self._seizer: int | None = None
        """The forking thread that is inside."""

    def stop(self) -> None:
        """Wait for everything, then end the threads; failures stay to be raised by the next wait. Idempotent.

        A later push starts threads again. Called inside an operation of this engine it does nothing.
        """

    def _hold_pushes(self) -> None:
        """Before a fork: other threads' pushes wait, or a fork under load would wait for ever.

        Operations may push, since the fork waits for them; so may the forking thread. The rest waits a second at most:
        one of them may be what an asynchronous operation needs to end.
        """
        self._forking.add(threading.get_ident())
        if self._gate is not None:  # another thread forks, too
            return
        gate, forking, apply = threading.Event(), self._forking, type(self)._apply

        def held() -> None:
            if threading.get_ident() not in forking and not running.engines:
                gate.wait(_GATE_S)
            apply(self)

        self._gate = gate
        self._apply = held  # type: ignore[method-assign]

    def _let_pushes_go(self) -> None:
        """After a fork, in the parent."""
        self._forking.discard(threading.get_ident())
        if not self._forking and self._gate is not None:
            self.__dict__.pop("_apply", None)
            self._gate.set()
            self._gate = None

    def _quiet(self) -> None:
        """Before a fork: finish all work, and be inside."""
        self._flush_bulk()  # or both sides would run it
        self.stop()
        self._seize()
        while self._pending and not running.engines:
            # Another thread has pushed in between, and left it to the one inside, which was this.
            self._leave()
            type(self)._apply(self)
            time.sleep(0.0001)
            self.stop()
            self._seize()

    def _seize(self) -> None:
        """Before a fork: be the thread inside, until :meth:`_leave`, so that the child sees no half-made change."""
        while not self._try_to_seize():
            self._refuse_inside()
            time.sleep(0.0001)

    def _try_to_seize(self) -> bool:
        me = threading.get_ident()
        try:
            del self._token[0]
        except KeyError:
            return False
        self._seizer = me  # no call in between, hence no interrupt
        return True

    def _leave(self) -> None:
        self._seizer = None
        self._token[0] = 1

    def _after_fork(self) -> None:
        """In a forked child: no thread but this one exists.

        What was pending here (the fork came from inside an operation, or an interrupt ended the wait for it) will never
        end: every use is refused. Requests of other threads are the parent's.
        """
        # The gate is not set: a thread that was about to wait there may have held its lock, and does not exist here.
        self.__dict__.pop("_apply", None)
        self._gate = None
        self._forking.clear()
        self._requests.clear()
        self._ready.clear()
        self._here.clear()
        self._idle_waiters.clear()
        whole = self._seizer is not None or bool(self._token)  # else a thread was in the middle of a change
        self._seizer = None
        self._token[0] = 1
        if self._pending or not whole:
            inside = running.engines
            message = (
                f"{self!r} was forked {'from inside one of its operations' if inside else 'before it was idle'}: its "
                f"threads are gone and their work with them; fork outside of operations, or make a new engine and new "
                f"arrays in the child"
            )

            self._refuse(message)
            self._completed = self._seq


def engines() -> list[Any]:
    """All live engines, oldest first; a WeakSet that another thread changes meanwhile is read again."""
    while True:
        try:
            return sorted(live_engines, key=lambda engine: engine._number)
        except RuntimeError:
            continue


def _enter_all(held: list[Forking]) -> None:
    """A loop of its own: the interpreter (3.14) looks for signals at its end, which no ``try`` around it covers."""
    new = engines()
    while new:
        for engine in new:
            held.append(engine)
            engine._hold_pushes()
            engine._quiet()
        new = [engine for engine in engines() if engine not in held]  # another thread has made some meanwhile


def _before_fork() -> None:
    """Finish all work and be inside every engine's region, so that the child sees no half-made change."""
    held = _fork.held
    _fork.error = None
    try:
        _fork.shield = shielded()
        _fork.shield.__enter__()
        clock.since = 0  # while it waits, an interrupt comes at once
        _enter_all(held)
        clock.since = NEVER
    except BaseException as error:  # Ctrl-C; or this thread is inside, interrupted by a destructor that forks
        _fork.error = error
        if shielded() is shield:  # it came before the shield was up
            _fork.shield = shield
            shield.__enter__()
        clock.since = NEVER
        for engine in engines():
            if engine._seizer is None and engine._try_to_seize() and engine not in held:
                held.append(engine)


def _after_fork_in_parent() -> None:
    me = threading.get_ident()
    held = _fork.held[:]
    while _fork.held:
        engine = _fork.held.pop()
        if engine._seizer == me:
            engine._leave()
        engine._let_pushes_go()
    for engine in held:
        type(engine)._apply(engine)  # past the gate of another thread that forks, and waits for the rest of these
    error, guard = _fork.error, _fork.shield
    _fork.error = _fork.shield = None
    try:
        if guard is not None:
            guard.__exit__(None, None, None)
    except BaseException as held_back:
        error = held_back if error is None else error
    if error is None:  # no call before it: from the end of the shield to here no interrupt can come
        return
    if isinstance(error, EngineError):  # the child's engine says it
        return
    if threading.current_thread() is not threading.main_thread():
        raise error  # no signal has raised it; the interpreter reports it
    _raise_next(error)
    for _ in _interrupt:  # the last step: it is raised where the interpreter looks next, which is not in here
        break


def _raise_next(error: BaseException) -> None:
    """Have the next interrupt raise ``error``, which may be what the handler of another signal has raised."""
    handler = signal.getsignal(signal.SIGINT)

    def once(number: int, frame: Any) -> None:
        signal.signal(signal.SIGINT, handler)
        raise error

    signal.signal(signal.SIGINT, once)


def _in_forked_child() -> None:
    """Threads are gone, and so are all operations: the fork waited.

    New engines of the child use the MP worker count.
    """
    global in_child
    in_child = True
    for engine in engines():
        engine._after_fork()
    _fork.held.clear()
    guard = _fork.shield
    _fork.error = _fork.shield = None
    if guard is shield:
        shield.held = False  # the parent's
    if guard is not None:
        guard.__exit__(None, None, None)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_in_forked_child)
