"""The log of the package: the logger ``weftplan``, which shows its messages also in a program that sets up no handler.

MXNet logs through ``logging.info``, which installs a handler on first use, so its scripts only set a level:
``logging.getLogger().setLevel(logging.INFO)``. A handler of the logger here does the same as ``logging.basicConfig``
when a level lets messages below a warning through and no other handler would get them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

log = logging.getLogger("weftplan")
"""The one logger of the package."""


def handlers() -> Iterator[logging.Handler]:
    """The handlers that get the messages of the package, but for the one here."""
    logger: logging.Logger | None = log
    while logger is not None:
        yield from (handler for handler in logger.handlers if not isinstance(handler, _Setup))
        logger = logger.parent if logger.propagate else None


def is_on_screen() -> bool:
    """Whether messages that are no warnings are shown on a screen, or will be when the first one comes."""
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
    """Set up logging for the first message that no other handler would get; the logger's parents are asked afterwards,
    so that message reaches the new handler, too."""

    def createLock(self) -> None:
        """Have no lock: :func:`logging.basicConfig` takes that of the module, under which others take a handler's."""
        self.lock = None

    def emit(self, record: logging.LogRecord) -> None:
        """Install a handler at the root, or show a warning as Python does when there is none."""
        if next(handlers(), None) is None:
            if log.isEnabledFor(logging.INFO):
                logging.basicConfig()
            elif logging.lastResort is not None and record.levelno >= logging.lastResort.level:
                logging.lastResort.handle(record)


log.addHandler(_Setup())
