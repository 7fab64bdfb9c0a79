"""The wait-for graph of threads that lack memory: which of them wait until runs of which others have been pushed.

Threads may wait for the memory of each other's runs. A run that is being prepared gives way then; in a circle of runs
that have begun somebody has to give up, and :func:`can_go_on` tells whether there is one. Any thread may call anything
here; ``idle.py`` notes its waits.
"""

from __future__ import annotations

import threading

from weftplan.errors import OutOfMemoryError
from weftplan.locks import Lock, free_in_children

looking = free_in_children(Lock())
"""Held by the one thread that looks whether anybody can go on, so that not all of a circle give up."""
waiting: dict[int, list[int]] = {}
"""Who waits until the runs of which threads have been pushed. Entries are made under ``looking``."""
preparing: set[int] = set()
"""Threads that prepare the calls of a run, which begin again, and let their memory go, where somebody waits for it."""


class PostponedError(OutOfMemoryError):
    """Raised in a run that is being prepared and lacks memory, where others wait for what the run has."""


def let_go_if_wanted(me: int) -> None:
    """Raise where this thread prepares a run for which others wait; under ``looking``."""
    if me in preparing and any(me in users for users in waiting.values()):
        raise PostponedError("others wait for the memory of a run that has not begun")


def can_go_on(thread: int) -> bool:
    """False where ``thread`` waits for memory that only those use who wait for memory, too, or this thread."""
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
