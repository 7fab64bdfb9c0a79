"""``os.fork`` support: the child gets idle engines without threads, in a consistent state.

Before a fork every engine finishes its work, and the forking thread takes its token, so nobody is inside the region.
Requests that other threads put down meanwhile are carried out by the parent and forgotten by the child.

Ctrl-C ends the waiting, not the fork, which nothing can call off any more: an engine that is still busy then refuses
every use in the child, and the interrupt reaches the parent when ``os.fork`` is over. From the moment at which the
tokens are held until they are given back interrupts are held, too (``shield.py``): the interpreter would report one
that a hook raises, and forget it.

Other modules prepare for a fork by hooks of their own: ``locks.py``, ``tasks/registry.py``, ``storage/relief.py``, and
the sequencer and the rendezvous of distributed stores.
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
in_child = False
"""This process was forked from one that had imported this."""
_numbers = count()


class _Fork(threading.local):
    """The fork that this thread is in the middle of."""

    def __init__(self) -> None:
        self.held: list[Core] = []
        """Engines whose pushes are held back, and in whose region this thread is where it has got so far."""
        self.error: BaseException | None = None
        """What has ended the wait for them."""
        self.shield: AbstractContextManager[object] | None = None


_fork = _Fork()
_interrupt = iter(_thread.interrupt_main, 1)
"""A loop calls it without looking for signals afterwards."""


class Fork:
    """What an engine keeps for forks."""

    __slots__ = ("gate", "number", "seizer", "threads")

    def __init__(self) -> None:
        self.number = next(_numbers)
        """Threads that fork at the same time take the engines in this order, so that none waits for the other."""
        self.gate: threading.Event | None = None
        """Where pushes of other threads wait while this process forks."""
        self.threads: set[int] = set()
        """Threads that fork."""
        self.seizer: int | None = None
        """The forking thread that is inside."""


def hold_pushes(engine: Core) -> None:
    """Before a fork: other threads' pushes wait, or a fork under load would wait for ever.

    Operations may push, since the fork waits for them; so may the forking thread. The rest waits a second at most: one
    of them may be what an asynchronous operation needs to end.
    """
    fork = engine._fork
    fork.threads.add(threading.get_ident())
    if fork.gate is not None:  # another thread forks, too
        return
    gate, forking = threading.Event(), fork.threads

    def held() -> None:
        if threading.get_ident() not in forking and not running.engines:
            gate.wait(_GATE_S)

    fork.gate = gate
    engine._region.gate = held


def let_pushes_go(engine: Core) -> None:
    """After a fork, in the parent."""
    fork = engine._fork
    fork.threads.discard(threading.get_ident())
    if not fork.threads and fork.gate is not None:
        engine._region.gate = None
        fork.gate.set()
        fork.gate = None


def stop_and_seize(engine: Core) -> None:
    """Before a fork: finish all work, and be inside."""
    engine._flush_bulk()  # or both sides would run it
    engine.stop()
    seize(engine)
    while engine._region.pending and not running.engines:
        # Another thread has pushed in between, and left it to the one inside, which was this.
        leave(engine)
        engine._region.apply(engine, past_gate=True)
        time.sleep(0.0001)
        engine.stop()
        seize(engine)


def seize(engine: Core) -> None:
    """Before a fork: be the thread inside, until :func:`leave`, so that the child sees no half-made change."""
    while not try_to_seize(engine):
        engine._region.refuse_inside()
        time.sleep(0.0001)


def try_to_seize(engine: Core) -> bool:
    """Be the thread inside, if none is."""
    me, fork = threading.get_ident(), engine._fork
    try:
        del engine._region.token[0]
    except KeyError:
        return False
    fork.seizer = me  # no call in between, hence no interrupt
    return True


def leave(engine: Core) -> None:
    """Let another thread be inside."""
    engine._fork.seizer = None
    engine._region.token[0] = 1


def forget_the_parent(engine: Core) -> None:
    """In a forked child: no thread but this one exists.

    What was pending (the fork came from inside an operation, or an interrupt ended the wait for it) will never end:
    every use is refused. Requests of other threads are the parent's.
    """
    fork = engine._fork
    # The gate is not set: a thread that was about to wait there may have held its lock, and does not exist here.
    engine._region.gate = None
    fork.gate = None
    fork.threads.clear()
    engine._region.requests.clear()
    engine._region.ready.clear()
    engine._here.clear()
    engine._region.idle_waiters.clear()
    whole = fork.seizer is not None or bool(engine._region.token)  # else a thread was in the middle of a change
    fork.seizer = None
    engine._region.token[0] = 1
    if engine._region.pending or not whole:
        when = "from inside one of its operations" if running.engines else "before it was idle"
        engine._refuse(
            f"{engine!r} was forked {when}: its threads are gone and their work with them; fork outside of "
            f"operations, or make a new engine and new arrays in the child"
        )
        engine._region.completed = engine._region.seq
    engine._forget_threads()


def engines() -> list[Core]:
    """All live engines, oldest first."""
    return sorted(members(live_engines), key=lambda engine: engine._fork.number)


def _enter_all(held: list[Core]) -> None:
    """Be inside every engine.

    The loop has a function of its own, since the interpreter (3.14) looks for signals at its end, which no ``try``
    around it would cover.
    """
    new = engines()
    while new:
        for engine in new:
            held.append(engine)
            hold_pushes(engine)
            stop_and_seize(engine)
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
    for engine in held:
        engine._region.apply(engine, past_gate=True)  # of another thread that forks, and waits for the rest of these
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

    def once(number: int, frame: object) -> None:
        signal.signal(signal.SIGINT, handler)
        raise error

    signal.signal(signal.SIGINT, once)


def _in_forked_child() -> None:
    """Put all engines right: their threads are gone, and so are all operations, for which the fork has waited.

    New engines of the child use the MP worker count.
    """
    global in_child
    in_child = True
    for engine in engines():
        forget_the_parent(engine)
    _fork.held.clear()
    guard = _fork.shield
    _fork.error = _fork.shield = None
    if guard is shield:
        shield.held = False  # the parent's
    if guard is not None:
        guard.__exit__(None, None, None)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_in_forked_child)
