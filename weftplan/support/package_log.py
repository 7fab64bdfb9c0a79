"""The package's logger ``weftplan``, whose messages appear even if the program sets up no handler.

MXNet logs through ``logging.info``, which installs a handler on first use, so its scripts only set a level:
``logging.getLogger().setLevel(logging.INFO)``. The handler installed here imitates this: it calls
``logging.basicConfig`` if the level admits messages below a warning and no other handler would get them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

log = logging.getLogger("weftplan")
"""The package's only logger."""


def handlers() -> Iterator[logging.Handler]:
    """Yield the handlers that get the package's messages, except the handler of this module."""
    logger: logging.Logger | None = log
    while logger is not None:
        yield from (handler for handler in logger.handlers if not isinstance(handler, _Setup))
        logger = logger.parent if logger.propagate else None


def is_on_screen() -> bool:
    """Return whether messages below a warning are shown on a screen, or will be when the first message comes."""
    if not log.isEnabledFor(logging.INFO):
        return False
    reached = list(handlers())
    return not reached or any(
        isinstance(handler, logging.StreamHandler)
        and not isinstance(handler, logging.FileHandler)
        and handler.level <= logging.INFO
        for handler in reached
    )


class _Setup(logging.Handler):
    """A handler that sets up logging at the first message that no other handler would get.

    The logger calls its parents' handlers afterwards, so this message reaches the new handler too.
    """

    def createLock(self) -> None:
        """Create no lock: other threads acquire a handler's lock while they hold the lock of the logging module, and
        :func:`logging.basicConfig`, which :meth:`emit` calls, acquires that lock."""
        self.lock = None

    def emit(self, record: logging.LogRecord) -> None:
        """Install a handler at the root, or show a warning as Python does when there is none."""
        if next(handlers(), None) is None:
            if log.isEnabledFor(logging.INFO):
                logging.basicConfig()
            elif logging.lastResort is not None and record.levelno >= logging.lastResort.level:
                logging.lastResort.handle(record)


log.addHandler(_Setup())
