"""Options and arguments that several commands share: each has its form and its words here, and only here.

What completion offers is looked for when a shell asks, not when a command is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from weftplan import models

Command = TypeVar("Command", bound=Callable[..., Any])
FILE = click.Path(dir_okay=False, path_type=Path)
"""A file to write."""


def _model_names(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[Any]:
    """Completions of MODEL: built-in networks, and files where no network fits.

    The item for files comes first, because in bash it drops what came before it.
    """
    from click.shell_completion import CompletionItem

    found = [CompletionItem(name) for name in models.names() if name.startswith(incomplete)]
    return [CompletionItem(incomplete, type="file"), *found]


def starting(names: Callable[[], list[str]]) -> Callable[..., list[str]]:
    """Completions among names."""
    return lambda context, parameter, incomplete: [name for name in names() if name.startswith(incomplete)]


def model_argument() -> Callable[[Command], Command]:
    """A built-in network, a symbol file or its prefix, or an ONNX file."""
    return click.argument("model", shell_complete=_model_names)


def shape_option(help: str = "The shape of an input.") -> Callable[[Command], Command]:
    """Shapes by name, as ``parse_shapes`` reads them."""
    return click.option(
        "--shape", "shape_texts", multiple=True, metavar="NAME=DIMS", help=f"{help} Repeat it for others."
    )


def json_option(help: str) -> Callable[[Command], Command]:
    """Machine-readable output."""
    return click.option("--json", "as_json", is_flag=True, help=help)


def number(
    *names: str, help: str, default: int | None = None, least: int = 1, most: int | None = None
) -> Callable[[Command], Command]:
    """A whole number, by default one of 1 or more."""
    kind = click.IntRange(min=least, max=most)
    return click.option(*names, type=kind, default=default, show_default=default is not None, help=help)


def positive(*names: str, help: str) -> Callable[[Command], Command]:
    """A number above 0, which may be left out."""
    return click.option(*names, type=click.FloatRange(min=0, min_open=True), help=help)


def budget_option(help: str) -> Callable[[Command], Command]:
    """Bytes, as ``bytes_of`` reads them."""
    return click.option("--budget", metavar="BYTES", help=help)


def writable_folder(context: click.Context, parameter: click.Parameter, value: Path | None) -> Path | None:
    """Checked before the work, not after: make the folder and see that a file can be made in it."""
    if value is None:
        return None
    try:
        value.mkdir(parents=True, exist_ok=True)
        probe = value / ".weftplan-probe"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise click.BadParameter(f"cannot write to {value}: {error.strerror or error}") from error
    return value


def writable_prefix(context: click.Context, parameter: click.Parameter, value: Path | None) -> Path | None:
    """The same for a prefix of files."""
    if value is not None:
        writable_folder(context, parameter, value.parent)
    return value
