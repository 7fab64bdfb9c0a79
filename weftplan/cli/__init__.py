"""The command line: a click group that imports its subcommands lazily.

A subcommand ``name`` lives in ``weftplan.cli.<name>``, or in ``weftplan.cli.<name>.command``, as a click command called
``command`` (or ``name``). If the module does not exist, the subcommand is absent. If its import fails because an
optional package is missing, the subcommand reports that and the others still work.
"""

from __future__ import annotations

import errno
import importlib
import importlib.util
import io
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from textwrap import wrap

import click

from weftplan import __version__
from weftplan.cli.file_errors import in_words
from weftplan.cli.verbosity import verbosity_options
from weftplan.errors import MXNetError, did_you_mean
from weftplan.support.command_start import INTERRUPTED
from weftplan.support.progress import width_of

_COMMANDS = {
    "train": "Train a network on handwritten digits, through every layer.",
    "plan": "Plan the memory of a network without running it.",
    "fits": "Say whether a PyTorch training step fits a card.",
    "inspect": "Look into a model file: layers, parameters, sizes, what is missing.",
    "run": "Run a model on arrays or an image.",
    "convert": "Convert models to and from ONNX, and parameters to safetensors.",
    "launch": "Start the processes of a distributed kvstore.",
    "pack": "Place buffers with lifetimes at offsets in one slab.",
    "doctor": "Show what is installed and which settings are in force.",
    "cache": "Show, or remove, what is kept for later processes.",
}


class NarrowFormatter(click.HelpFormatter):
    """Click's formatter of help texts, fitted to terminals of fewer than 52 columns, where click itself writes 50."""

    def __init__(self, indent_increment: int = 2, width: int | None = None, max_width: int | None = None) -> None:
        columns = shutil.get_terminal_size().columns
        if width is None and columns < 52:
            width = max(columns - 2, 20)
        super().__init__(indent_increment, width, max_width)

    def write_dl(self, rows: Iterable[tuple[str, str]], col_max: int = 30, col_spacing: int = 2) -> None:
        """Write a table of names and texts; the names take half of a narrow terminal at most."""
        super().write_dl(list(rows), min(col_max, self.width // 2 - col_spacing), col_spacing)


class HelpContext(click.Context):
    """A context whose help texts fit narrow terminals."""

    formatter_class = NarrowFormatter


class LazyGroup(click.Group):
    """A group that imports a subcommand on first use.

    Errors of weftplan and of the system end a command with exit code 1, Ctrl-C with 130.
    """

    context_class = HelpContext

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the subcommands whose module exists, in the order of use."""
        return [name for name in _COMMANDS if importlib.util.find_spec(f"weftplan.cli.{name}") is not None]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return a subcommand; return None if there is none of this name."""
        if cmd_name not in self.list_commands(ctx):
            return None
        try:
            module = importlib.import_module(f"weftplan.cli.{cmd_name}")
            if hasattr(module, "__path__"):  # a folder of modules
                module = importlib.import_module(f"weftplan.cli.{cmd_name}.command")
        except ImportError as error:
            return _unavailable(cmd_name, error)
        command: click.Command = getattr(module, "command", None) or getattr(module, cmd_name)
        command.context_class = HelpContext
        if not any(option.name == "quiet" for option in command.params):  # imported once, requested often
            command.params += verbosity_options()
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Resolve as click does, and suggest the nearest name for a misspelt subcommand."""
        name = args[0]
        if name not in self.list_commands(ctx) and not name.startswith("-"):
            names = self.list_commands(ctx)
            hint = did_you_mean(name, names).rstrip() or f"expected one of {', '.join(names)}"
            ctx.fail(f"no command {name!r}: {hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the subcommands without importing any."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, _COMMANDS[name]) for name in self.list_commands(ctx)])

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: object
    ) -> click.Context:
        """Parse the arguments, which also prints help and version.

        From then on characters that the output's encoding lacks become question marks.
        """
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
                stream.reconfigure(errors="replace")
        with _reported():
            return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: click.Context) -> object:
        """Run the subcommand."""
        with _reported():
            return super().invoke(ctx)


@contextmanager
def _reported() -> Iterator[None]:
    """Turn errors of weftplan and of the system into messages without a traceback, and Ctrl-C into an exit code."""
    try:
        yield
    except click.ClickException as error:
        raise _fitted(error) from error.__cause__
    except MXNetError as error:
        raise _fitted(click.ClickException(str(error))) from error
    except KeyboardInterrupt:
        click.echo("interrupted", err=True)
        raise click.exceptions.Exit(INTERRUPTED) from None
    except OSError as error:
        if error.errno == errno.EPIPE:
            raise  # the reader has closed the pipe: click exits quietly
        text = in_words(error)
        if error.filename is None:
            _drop_unwritten()
            text = f"cannot write the output: {text}"
        elif error.errno in _WRITING:
            text = f"cannot write {text}"
        raise _fitted(click.ClickException(text)) from error


def _drop_unwritten() -> None:
    """Discard output that cannot be written; Python would try again at its exit, and exit with 120."""
    try:
        sys.stdout.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


_UNIT = re.compile(r"unexpected extra argument \(([kmgt]?i?b|%)\)", re.IGNORECASE)
_FEW_BYTES = re.compile(r"the budget is (\d{1,4}) bytes")
_LIKELY_OPTIONS = {
    "--batch-size": ("--batch", "--batch-size"),
    "--bs": ("--batch", "--batch-size"),
    "--context": ("--device", "--devices"),
    "--ctx": ("--device", "--devices"),
    "--gpu": ("--device", "--devices"),
    "--gpus": ("--device", "--devices"),
    "--mem": ("--budget",),
    "--memory": ("--budget",),
    "--memory-budget": ("--budget",),
    "--num-epoch": ("--epochs",),
    "--optim": ("--optimizer",),
    "--output": ("--html",),
    "--training": ("--train",),
}
"""Option names of other programs, and of weftplan's Python functions, with ours."""


def _fitted(error: click.ClickException) -> click.ClickException:
    """Wrap the error's message to the terminal between words, and add a suggestion."""
    text = error.format_message().removeprefix("Error in ")  # MXNet's prefix; the line says "Error:" already
    unit = _UNIT.search(text)
    if unit is not None:
        text += f". Write a number and its unit without a space, such as {80 if unit[1] == '%' else 2}{unit[1]}"
    few = _FEW_BYTES.search(text)
    if few is not None:
        text += f". A number without a unit is in bytes: did you mean {few[1]}GB?"
    if isinstance(error, click.NoSuchOption) and error.ctx is not None and not error.possibilities:
        option_names = {name for option in error.ctx.command.params for name in option.opts}
        for name in option_names.intersection(_LIKELY_OPTIONS.get(error.option_name, ())):
            text += f" Did you mean {name}?"
    width = width_of(sys.stderr)
    if width is not None:
        lines = [wrap(f"{PREFIX if not i else ''}{line}", width, break_long_words=False, break_on_hyphens=False)
                 for i, line in enumerate(text.split("\n"))]  # fmt: skip
        text = "\n".join("\n".join(part) for part in lines).removeprefix(PREFIX)
    vars(error)["format_message"] = lambda: text
    return error


_WRITING = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""System errors that only writing a file can cause."""
PREFIX = "Error: "
"""Click's prefix of error messages."""


def _unavailable(name: str, error: ImportError) -> click.Command:
    """Return a substitute for a subcommand whose import fails: with any arguments, it reports the reason."""

    @click.command(name, context_settings={"ignore_unknown_options": True, "help_option_names": []})
    @click.argument("args", nargs=-1, type=click.UNPROCESSED)
    def command(args: tuple[str, ...]) -> None:
        raise click.ClickException(
            f"`weftplan {name}` cannot be loaded: {error}. `weftplan doctor` shows what is installed"
        )

    return command


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="weftplan")
def main() -> None:
    """MXNet's execution core for today's Python: a dependency engine, a memory planner and a kvstore."""
