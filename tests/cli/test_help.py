"""Help texts: whole sentences, at 80 columns."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner

from weftplan.cli import LazyGroup, main

COMMANDS = tuple(name for name in LazyGroup.list_commands(main, click.Context(main)))
OPENINGS = frozenset(
    """A An The How What Where Whether Convert Count Divide Draw Find Fit Keep Leave Look Make Place Plan Print Resize
    Run Save Show Start Stop Subtract Train Write""".split()  # noqa: SIM905
)
"""A sentence of help begins with what something is, with a question word, or tells what to do."""


def sentences() -> list[tuple[str, str]]:
    """Every option of every command with its help, and the first lines of commands."""
    found = []
    for name in COMMANDS:
        command = main.get_command(click.Context(main), name)
        assert command is not None
        found.append((name, (command.help or "").partition("\n\n")[0].replace("\n", " ")))
        found += [
            (f"{name} {option.opts[-1]}", option.help or "")
            for option in command.params
            if isinstance(option, click.Option)
        ]
    return found


@pytest.mark.parametrize(("where", "text"), sentences(), ids=lambda value: value if value.count(" ") < 2 else "")
def test_help_is_a_sentence(where: str, text: str) -> None:
    """It has a beginning that tells the subject, and an end."""
    assert text.split(" ")[0] in OPENINGS, f"{where}: {text!r} begins like no sentence of help; add its verb if it does"
    assert text.rstrip().endswith((".", "…")), f"{where}: {text!r} has no end"


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_help_fits_80_columns(name: str) -> None:
    """Nothing in it is wider, verbatim blocks included."""
    done = CliRunner().invoke(main, [*([name] if name else []), "--help"], terminal_width=80, max_content_width=80)
    assert done.exit_code == 0
    assert max(map(len, done.output.splitlines())) <= 80, done.output
