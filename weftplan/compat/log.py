"""``mx.log``: loggers with MXNet's one-line format."""

from __future__ import annotations

import logging
import warnings
from logging import CRITICAL, DEBUG, ERROR, INFO, NOTSET, WARNING
from os import PathLike

__all__ = ["CRITICAL", "DEBUG", "ERROR", "INFO", "NOTSET", "WARNING", "getLogger", "get_logger"]

_LETTERS = {CRITICAL: "C", ERROR: "E", WARNING: "W", INFO: "I", DEBUG: "D"}


class _Formatter(logging.Formatter):
    """Formatter of ``W0505 00:29:47 3525 file.py:function:1] message``, coloured up to the bracket."""

    def __init__(self) -> None:
        super().__init__(datefmt="%m%d %H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        colour = 31 if record.levelno >= WARNING else 32 if record.levelno >= INFO else 34
        origin = f"{record.process} {record.pathname}:{record.funcName}:{record.lineno}"
        when = self.formatTime(record, self.datefmt)
        return f"\x1b[{colour}m{_LETTERS.get(record.levelno, 'U')}{when} {origin}]\x1b[0m {record.message}"


def get_logger(
    name: str | None = None,
    filename: str | PathLike[str] | None = None,
    filemode: str | None = None,
    level: int = WARNING,
) -> logging.Logger:
    """Return the logger of that name; only the first call for a name sets its handler and level.

    Args:
        name: None: the root logger, unchanged.
        filename: destination of messages, as plain text; None: stderr, in colour.
        filemode: mode that opens the file; by default messages are appended.
    """
    logger = logging.getLogger(name)
    if name is not None and not getattr(logger, "_is_configured", False):
        logger._is_configured = True  # type: ignore[attr-defined]
        if filename:
            handler: logging.Handler = logging.FileHandler(filename, filemode or "a")
        else:
            handler = logging.StreamHandler()
            handler.setFormatter(_Formatter())
        logger.addHandler(handler)
        logger.setLevel(level)
    return logger


def getLogger(
    name: str | None = None,
    filename: str | PathLike[str] | None = None,
    filemode: str | None = None,
    level: int = WARNING,
) -> logging.Logger:
    """Call :func:`get_logger` under its deprecated name.

    Args:
        name: name of the logger; None: the root logger.
        filename: file that takes the records; None: stderr.
        filemode: mode of the file; None: ``a``.
        level: lowest level that is logged.
    """
    warnings.warn("getLogger is deprecated, use get_logger instead", DeprecationWarning, stacklevel=2)
    return get_logger(name, filename, filemode, level)
