"""The wait-for graph of starved threads: each waits until runs of other threads have been pushed.

Threads may wait for the memory of each other's runs. A run that is being prepared yields then; in a circle of runs
that have begun one thread has to give up, and :func:`can_go_on` tells whether there is such a circle. Any thread may
call anything here; ``idle.py`` notes its waits.
"""

from __future__ import annotations

import threading

from weftplan.errors import OutOfMemoryError
from weftplan.locks import Lock, free_in_children

looking = free_in_children(Lock())
"""Held by the thread that looks whether any thread can go on, so that not all of a circle give up."""
waiting: dict[int, list[int]] = {}
"""By waiting thread the threads whose runs it waits for. Entries are made under ``looking``."""
preparing: set[int] = set()
"""Threads that are preparing a run. They release their memory and start over if another thread waits for it."""


class PostponedError(OutOfMemoryError):
    """Raised in a run that is being prepared and lacks memory, if other threads wait for the run's memory."""


def let_go_if_wanted(me: int) -> None:
    """Raise if this thread prepares a run and other threads wait for its memory; call it under ``looking``."""
    if me in preparing and any(me in users for users in waiting.values()):
        raise PostponedError("others wait for the memory of a run that has not begun")


def can_go_on(thread: int) -> bool:
    """Return False if ``thread`` waits for memory that only starved threads use, or this thread."""
    seen, ahead = {threading.get_ident()}, [thread]
    while ahead:
        thread = ahead.pop()
        if thread not in seen:
            seen.add(thread)
            if thread in preparing:  # it lets others go first
                return True
            users = waiting.get(thread)
            if users is None:
                return True
            ahead += users
    return False
