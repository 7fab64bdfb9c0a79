"""The wait-for graph of starved threads: for each, the threads whose runs it waits for.

Threads may wait for the memory of each other's runs. A run that is still being prepared then releases its memory and
starts over. If the threads of a cycle have all begun their runs, one of them must give up; :func:`can_go_on` detects
this cycle. ``idle.py`` records the waits. Any thread may call these functions.
"""

from __future__ import annotations

import threading

from weftplan.errors import OutOfMemoryError
from weftplan.locks import Lock, free_in_children

looking = free_in_children(Lock())
"""Held while a thread checks for a cycle, so that only one thread of the cycle gives up."""
waiting: dict[int, list[int]] = {}
"""For each waiting thread, the threads whose runs it waits for. Entries are made under ``looking``."""
preparing: set[int] = set()
"""Threads that are preparing a run. They release their memory and start over if another thread waits for it."""


class PostponedError(OutOfMemoryError):
    """Raised if a run that is being prepared lacks memory while another thread waits for the memory of this run."""


def postpone_if_wanted(me: int) -> None:
    """Raise PostponedError if thread ``me`` prepares a run whose memory another thread waits for.

    The caller holds ``looking``.
    """
    if me in preparing and any(me in users for users in waiting.values()):
        raise PostponedError("others wait for the memory of a run that has not begun")


def can_go_on(thread: int) -> bool:
    """Return whether ``thread`` can go on before the calling thread does.

    It can if it does not wait, or if it waits, directly or through others, for a thread that does not wait. A thread
    that prepares a run counts as not waiting; the calling thread counts as waiting.
    """
    seen, ahead = {threading.get_ident()}, [thread]
    while ahead:
        thread = ahead.pop()
        if thread not in seen:
            seen.add(thread)
            if thread in preparing:  # it will raise PostponedError and release its memory
                return True
            users = waiting.get(thread)
            if users is None:
                return True
            ahead += users
    return False
