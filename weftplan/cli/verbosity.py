"""Verbosity options of every command: ``-v``, ``-q`` and ``--log-file``.

Messages of the package go to stderr: by default warnings, with ``-v`` also progress messages, with ``-vv`` all
messages. With ``-q`` only errors appear, and no progress bar. A log file receives progress messages in any case.
"""

from __future__ import annotations

import logging
from pathlib import Path

import click

from weftplan.cli.file_errors import cause
from weftplan.support import progress
from weftplan.support.package_log import log

_LEVELS = (logging.WARNING, logging.INFO, logging.DEBUG)
_FILE_FORMAT = "%(asctime)s %(levelname)s %(message)s"


def verbosity_options() -> list[click.Option]:
    """Return the options, which take effect during parsing and pass no values to the command."""
    return [
        click.Option(
            ["-v", "--verbose", "verbose"], count=True, help="Show what happens; -vv: all of it.", callback=_note,
            expose_value=False,
        ),
        click.Option(
            ["-q", "--quiet", "quiet"], is_flag=True, help="Show no progress and no warnings.", callback=_note,
            expose_value=False,
        ),
        click.Option(
            ["--log-file", "log_file"], type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
            help="Append what happens to FILE.", callback=_note, expose_value=False,
        ),
    ]  # fmt: skip


class _Verbosity:
    """The logging configuration of a command, in force until the command ends."""

    def __init__(self) -> None:
        self.verbose, self.quiet = 0, False
        self.log_file: logging.Handler | None = None
        self._level = log.level
        self._handlers: list[logging.Handler] = []

    def apply(self) -> None:
        """Set handlers and level from the options parsed so far."""
        self._remove()
        screen = logging.StreamHandler()
        screen.setFormatter(logging.Formatter("%(message)s"))
        screen.setLevel(logging.ERROR if self.quiet else _LEVELS[min(self.verbose, 2)])
        self._handlers = [screen, *([] if self.log_file is None else [self.log_file])]
        for handler in self._handlers:
            log.addHandler(handler)
        log.setLevel(min(handler.level for handler in self._handlers))
        (progress.turn_off if self.quiet else progress.turn_on)()

    def end(self) -> None:
        """Restore logging and progress display, and close the log file."""
        self._remove()
        log.setLevel(self._level)
        progress.turn_on()
        if self.log_file is not None:
            self.log_file.close()

    def _remove(self) -> None:
        for handler in self._handlers:
            log.removeHandler(handler)


def _note(context: click.Context, parameter: click.Parameter, value: int | bool | Path | None) -> None:
    """Record an option."""
    if not value:
        return
    verbosity = context.meta.get(__name__)
    if verbosity is None:
        verbosity = context.meta[__name__] = _Verbosity()
        context.call_on_close(verbosity.end)
    if isinstance(value, Path):
        try:
            verbosity.log_file = logging.FileHandler(value, encoding="utf-8")
        except OSError as error:
            raise click.BadParameter(f"cannot write {value}: {cause(error, value)}") from error
        verbosity.log_file.setFormatter(logging.Formatter(_FILE_FORMAT))
        verbosity.log_file.setLevel(logging.INFO)
    elif parameter.name == "quiet":
        verbosity.quiet = True
    else:
        verbosity.verbose = int(value)
    verbosity.apply()
