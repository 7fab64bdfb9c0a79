"""Options and arguments that several commands share, with their types and help texts.

Completions are computed when a shell asks for them, not when a command is imported.
"""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from weftplan import models
from weftplan.cli.file_errors import cause

Command = TypeVar("Command", bound=Callable[..., Any])


class OutputFile(click.Path):
    """A file to write. Its folder is checked before the command begins its work, not after it."""

    def __init__(self, *suffixes: str) -> None:
        super().__init__(dir_okay=False, writable=True, path_type=Path)
        self.suffixes = suffixes
        """Ends of names that are allowed; empty: all."""

    def convert(self, value: str | os.PathLike[str], param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """Return the path; raise click's error if it is a folder, its folder is missing or protected, or its end is not
        allowed."""
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        if self.suffixes and path.suffix not in self.suffixes:
            self.fail(f"expected a name that ends in {', '.join(self.suffixes)}, got {path}", param, ctx)
        try:
            os.stat(os.path.join(path.parent, "."))  # the dot makes a file in place of the folder an error
            if not os.access(path.parent, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        except OSError as error:
            raise click.ClickException(f"cannot write {path}: {cause(error, path)}") from error
        return path


FILE = OutputFile()
"""A file to write."""


def _model_names(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[Any]:
    """Return completions of MODEL: built-in networks, and files if no network matches.

    The item for files comes first, because bash drops the items before it.
    """
    from click.shell_completion import CompletionItem

    items = [CompletionItem(name) for name in models.names() if name.startswith(incomplete)]
    return [CompletionItem(incomplete, type="file"), *items]


def starting(names: Callable[[], list[str]]) -> Callable[..., list[str]]:
    """Return completions among names."""
    return lambda context, parameter, incomplete: [name for name in names() if name.startswith(incomplete)]


def model_argument() -> Callable[[Command], Command]:
    """Add the argument MODEL: a built-in network, a symbol file or its prefix, or an ONNX file."""
    return click.argument("model", shell_complete=_model_names)


def shape_option(help: str = "The shape of an input.") -> Callable[[Command], Command]:
    """Add an option for shapes by name, in the syntax of ``parse_shapes``."""
    return click.option(
        "--shape", "shape_texts", multiple=True, metavar="NAME=DIMS", help=f"{help} Repeat it for others."
    )


def json_option(help: str) -> Callable[[Command], Command]:
    """Add an option for machine-readable output."""
    return click.option("--json", "as_json", is_flag=True, help=help)


class WholeNumber(click.IntRange):
    """A whole number from ``min`` on, or to ``max``; its error says so."""

    name = "integer"

    def convert(self, value: int, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the number; raise click's error if the text is none, or is out of range."""
        try:
            return int(super().convert(value, param, ctx))
        except click.BadParameter:
            until = "" if self.max is None else f" to {self.max}"
            self.fail(f"expected a whole number from {self.min}{until or ' on'}, got {value!r}", param, ctx)


class PositiveNumber(click.FloatRange):
    """A number above 0; its error says so."""

    name = "float"

    def convert(self, value: float, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number; raise click's error if the text is none, or is not above 0."""
        try:
            return float(super().convert(value, param, ctx))
        except click.BadParameter:
            self.fail(f"expected a number above 0, got {value!r}", param, ctx)


def number(
    *names: str, help: str, default: int | None = None, least: int = 1, greatest: int | None = None
) -> Callable[[Command], Command]:
    """Add an option for an integer, by default at least 1."""
    kind = WholeNumber(min=least, max=greatest)
    return click.option(*names, type=kind, default=default, show_default=default is not None, help=help)


def positive(*names: str, help: str) -> Callable[[Command], Command]:
    """Add an optional number above 0."""
    return click.option(*names, type=PositiveNumber(min=0, min_open=True), help=help)


def budget_option(help: str) -> Callable[[Command], Command]:
    """Add an option for bytes, in the syntax of ``bytes_of``."""
    return click.option("--budget", metavar="BYTES", help=help)


def _numbers(context: click.Context, parameter: click.Parameter, value: str | None) -> list[float] | None:
    """Parse numbers separated by commas: one for all channels, or one for each."""
    if value is None:
        return None
    try:
        numbers = [float(part) for part in value.split(",")]
    except ValueError:
        raise click.BadParameter(f"expected numbers with commas between, got {value!r}") from None
    if len(numbers) not in (1, 3):
        raise click.BadParameter(f"takes 1 or 3 numbers, got {len(numbers)}")
    if not all(map(math.isfinite, numbers)):
        raise click.BadParameter(f"expected finite numbers, got {value!r}")
    if parameter.name == "std" and 0 in numbers:
        raise click.BadParameter(f"divides the pixels, so no number may be 0; got {value!r}")
    return numbers


def _size(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, int] | None:
    """Parse (height, width) from ``224`` or ``224x320``."""
    if value is None:
        return None
    parts = value.split("x")
    if len(parts) > 2 or not all(part.isdigit() and int(part) > 0 for part in parts):
        raise click.BadParameter(f"expected a side or HEIGHTxWIDTH in pixels, got {value!r}")
    return int(parts[0]), int(parts[-1])


def pixel_options(resize: str) -> Callable[[Command], Command]:
    """Add ``--mean``, ``--std`` and ``--resize``, whose help text is ``resize``."""
    mean = "Subtract these numbers from the pixels, which go from 0 to 255."
    std = "Divide the pixels by these numbers, after the mean is subtracted."
    options = (
        click.option("--mean", callback=_numbers, metavar="NUMBERS", help=mean),
        click.option("--std", callback=_numbers, metavar="NUMBERS", help=std),
        click.option("--resize", callback=_size, metavar="SIDE|HxW", help=resize),
    )

    def add(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def writable_folder(context: click.Context, parameter: click.Parameter, value: Path | None) -> Path | None:
    """Create the folder and check that a file can be created in it, before any work."""
    if value is None:
        return None
    try:
        value.mkdir(parents=True, exist_ok=True)
        probe = value / ".weftplan-probe"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise click.BadParameter(f"cannot write to {value}: {cause(error, value)}") from error
    return value


def writable_prefix(context: click.Context, parameter: click.Parameter, value: Path | None) -> Path | None:
    """Check a prefix of files as :func:`writable_folder` checks a folder."""
    if value is not None:
        writable_folder(context, parameter, value.parent)
    return value
