"""The log of the package: the logger ``weftplan``, which shows its messages also in a program that sets up no handler.

MXNet logs through ``logging.info``, which installs a handler on first use, so its scripts only set a level:
``logging.getLogger().setLevel(logging.INFO)``. A handler of the logger here does the same as ``logging.basicConfig``
when a level lets messages below a warning through and no other handler would get them.
"""

from __future__ import annotations

import logging

log = logging.getLogger("weftplan")
"""The one logger of the package."""


class _Setup(logging.Handler):
    """Set up logging for the first message that no other handler would get; the logger's parents are asked afterwards,
    so that message reaches the new handler, too."""

    def createLock(self) -> None:
        """Have no lock: :func:`logging.basicConfig` takes that of the module, under which others take a handler's."""
        self.lock = None

    def emit(self, record: logging.LogRecord) -> None:
        """Install a handler at the root, or show a warning as Python does when there is none."""
        if self._is_alone():
            if log.isEnabledFor(logging.INFO):
                logging.basicConfig()
            elif logging.lastResort is not None and record.levelno >= logging.lastResort.level:
                logging.lastResort.handle(record)

    def _is_alone(self) -> bool:
        logger: logging.Logger | None = log
        while logger is not None:
            if any(handler is not self for handler in logger.handlers):
                return False
            logger = logger.parent if logger.propagate else None
        return True


log.addHandler(_Setup())
