"""``os.fork`` support: the child gets idle engines without threads, in a consistent state.

Before a fork every engine finishes its work, and the forking thread takes its token, so no thread is inside the region.
Requests that other threads append meanwhile are served in the parent and dropped in the child.

Ctrl-C ends the wait but cannot cancel the fork. An engine that is still busy then refuses every use in the child, and
the parent receives the interrupt after ``os.fork``. While the tokens are held, interrupts are deferred (``shield.py``):
the interpreter would only print an interrupt raised inside a hook.

Other modules have hooks of their own: ``locks.py``, ``tasks/array_vars.py``, ``storage/relief.py``, and the sequencer
and rendezvous of distributed stores.
"""

from __future__ import annotations

import _thread
import os
import signal
import threading
import time
from contextlib import AbstractContextManager
from itertools import count

from weftplan.engine.execution import live_engines, running
from weftplan.engine.shield import NEVER, clock, shield, shielded
from weftplan.engine.types import Core
from weftplan.errors import EngineError
from weftplan.locks import members

_GATE_S = 1.0
"""Seconds after which a thread passes the gate, even if the fork has not ended."""


class _Process:
    """This process."""

    in_child = False
    """Whether this process was forked from a process that had imported this module."""


process = _Process()
_numbers = count()


class _Fork(threading.local):
    """Fork in progress on this thread."""

    def __init__(self) -> None:
        self.held: list[Core] = []
        """Engines whose pushes are blocked; this thread is inside the region of those it has reached."""
        self.error: BaseException | None = None
        """The error that ended the wait for them."""
        self.shield: AbstractContextManager[object] | None = None


_fork = _Fork()
_interrupt = iter(_thread.interrupt_main, 1)
"""Iterator whose next step interrupts the main thread, without a signal check afterwards."""


class Fork:
    """Fork state of one engine."""

    __slots__ = ("gate", "number", "seizer", "threads")

    def __init__(self) -> None:
        self.number = next(_numbers)
        """Position in the lock order: threads that fork at the same time seize engines in it, to avoid a deadlock."""
        self.gate: threading.Event | None = None
        """Event that blocks pushes of other threads while this process forks."""
        self.threads: set[int] = set()
        """Threads that are forking."""
        self.seizer: int | None = None
        """The forking thread that is inside the region."""


def hold_pushes(engine: Core) -> None:
    """Before a fork: block pushes of other threads, or a fork under load would never start.

    Operations may push, because the fork waits for them; so may the forking thread. Other threads block for at most one
    second: an asynchronous operation may need one of their pushes to complete.
    """
    fork = engine._fork
    fork.threads.add(threading.get_ident())
    if fork.gate is not None:  # another thread is forking
        return
    gate, forking = threading.Event(), fork.threads

    def held() -> None:
        if threading.get_ident() not in forking and not running.engines:
            gate.wait(_GATE_S)

    fork.gate = gate
    engine._region.gate = held


def let_pushes_go(engine: Core) -> None:
    """After a fork, in the parent: unblock pushes."""
    fork = engine._fork
    fork.threads.discard(threading.get_ident())
    if not fork.threads and fork.gate is not None:
        engine._region.gate = None
        fork.gate.set()
        fork.gate = None


def stop_and_seize(engine: Core) -> None:
    """Before a fork: finish all work, and enter the region."""
    engine._flush_bulk()  # or both processes would run it
    # Finish first: while this thread is inside the region, no operation completes.
    engine.stop()
    seize(engine)
    while engine._region.pending and not running.engines:
        # Another thread has pushed in between and left its request to this thread, which was inside.
        leave(engine)
        engine._region.apply(engine, past_gate=True)
        time.sleep(0.0001)
        engine.stop()
        seize(engine)


def seize(engine: Core) -> None:
    """Before a fork: enter the region until :func:`leave`, so that the child sees no half-made change."""
    while not try_to_seize(engine):
        engine._region.refuse_inside()
        time.sleep(0.0001)


def try_to_seize(engine: Core) -> bool:
    """Enter the region unless another thread is inside."""
    me, fork = threading.get_ident(), engine._fork
    try:
        del engine._region.token[0]
    except KeyError:
        return False
    fork.seizer = me  # no call in between, so no interrupt
    return True


def leave(engine: Core) -> None:
    """Leave the region."""
    engine._fork.seizer = None
    engine._region.token[0] = 1


def forget_the_parent(engine: Core) -> None:
    """In a forked child: drop all state of the parent's threads.

    Pending operations (the fork came from inside one, or an interrupt ended the wait) can never complete. The engine
    then refuses every use. Requests of other threads belong to the parent.
    """
    fork = engine._fork
    # Do not set the gate: a vanished thread may hold the lock of the event.
    engine._region.gate = None
    fork.gate = None
    fork.threads.clear()
    engine._region.requests.clear()
    engine._region.ready.clear()
    engine._outside.clear()
    engine._region.idle_waiters.clear()
    consistent = fork.seizer is not None or bool(engine._region.token)  # otherwise a thread was inside the region
    fork.seizer = None
    engine._region.token[0] = 1
    if engine._region.pending or not consistent:
        when = "from inside one of its operations" if running.engines else "before it was idle"
        engine._refuse(
            f"{engine!r} was forked {when}: its threads are gone and their work with them; fork outside of "
            f"operations, or make a new engine and new arrays in the child"
        )
        engine._region.completed = engine._region.seq
    engine._forget_threads()


def engines() -> list[Core]:
    """Return all live engines, oldest first."""
    return sorted(members(live_engines), key=lambda engine: engine._fork.number)


def _enter_all(held: list[Core]) -> None:
    """Enter every region. A function of its own: the interpreter (3.14) checks for signals at the loop's end."""
    new = engines()
    while new:
        for engine in new:
            # Recorded first: an interrupt must not leave an engine blocked.
            held.append(engine)
            hold_pushes(engine)
            stop_and_seize(engine)
        new = [engine for engine in engines() if engine not in held]  # created by another thread meanwhile


def _before_fork() -> None:
    """Finish all work and enter every engine's region, so that the child sees no half-made change."""
    held = _fork.held
    _fork.error = None
    try:
        _fork.shield = shielded()
        _fork.shield.__enter__()
        clock.since = 0  # during the wait an interrupt is raised immediately
        _enter_all(held)
        clock.since = NEVER
    except BaseException as error:  # Ctrl-C, or a destructor that forks has interrupted this thread inside a region
        _fork.error = error
        if shielded() is shield:  # it arrived before the shield was up
            _fork.shield = shield
            shield.__enter__()
        clock.since = NEVER
        for engine in engines():
            if engine._fork.seizer is None and try_to_seize(engine) and engine not in held:
                held.append(engine)


def _after_fork_in_parent() -> None:
    me = threading.get_ident()
    held = _fork.held[:]
    while _fork.held:
        engine = _fork.held.pop()
        if engine._fork.seizer == me:
            leave(engine)
        let_pushes_go(engine)
    # Serve requests that arrived while this thread was inside.
    for engine in held:
        engine._region.apply(engine, past_gate=True)  # another forking thread waits for these
    error, guard = _fork.error, _fork.shield
    _fork.error = _fork.shield = None
    try:
        if guard is not None:
            guard.__exit__(None, None, None)
    except BaseException as held_back:
        error = held_back if error is None else error
    if error is None:  # no call before this line, so no interrupt can arrive after the shield has ended
        return
    if isinstance(error, EngineError):  # the child's engine reports it
        return
    if threading.current_thread() is not threading.main_thread():
        raise error  # not raised by a signal; the interpreter prints it
    _raise_next(error)
    for _ in _interrupt:  # the last step: the interpreter raises it at its next check, outside this function
        break


def _raise_next(error: BaseException) -> None:
    """Make the next interrupt raise ``error``, which another signal's handler may have raised."""
    handler = signal.getsignal(signal.SIGINT)

    def once(number: int, frame: object) -> None:
        signal.signal(signal.SIGINT, handler)
        raise error

    signal.signal(signal.SIGINT, once)


def _in_forked_child() -> None:
    """Reset all engines, whose threads do not exist in the child. New engines use the MP worker count."""
    process.in_child = True
    for engine in engines():
        forget_the_parent(engine)
    _fork.held.clear()
    guard = _fork.shield
    _fork.error = _fork.shield = None
    if guard is shield:
        shield.held = False  # belongs to the parent
    if guard is not None:
        guard.__exit__(None, None, None)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_in_forked_child)
