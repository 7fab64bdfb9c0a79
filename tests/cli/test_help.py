"""Help texts: whole sentences, at 80 columns."""

from __future__ import annotations

import re

import click
import pytest
from click.testing import CliRunner

from tests.support.together import together
from weftplan.cli import LazyGroup, main

COMMANDS = tuple(name for name in LazyGroup.list_commands(main, click.Context(main)))
NO_SENTENCE = re.compile(
    r"""(Of|For|Default|Bytes|Classes|Number|Names?|Size|Shapes?|Files?|Prefix|Seconds|Seed|Passes|Images|Steps|\w+ed)\b
    |[^A-Z] | .*;\srepeat""",
    re.VERBOSE,
)
"""Beginnings of telegram style: a noun without an article, a participle without a subject, or no capital. A sentence of
help defines a thing, or states its effect on the command."""


def sentences() -> list[tuple[str, str]]:
    """Return every option of every command with its help, and the first lines of commands."""
    results = []
    for name in COMMANDS:
        command = main.get_command(click.Context(main), name)
        assert command is not None
        results.append((name, (command.help or "").partition("\n\n")[0].replace("\n", " ")))
        results += [
            (f"{name} {option.opts[-1]}", option.help or "")
            for option in command.params
            if isinstance(option, click.Option)
        ]
    return results


@together()
@pytest.mark.parametrize(("where", "text"), sentences(), ids=lambda value: value if value.count(" ") < 2 else "")
def test_help_is_a_sentence(where: str, text: str) -> None:
    """It has a beginning that tells the subject, and an end."""
    assert not NO_SENTENCE.match(text), f"{where}: {text!r} begins like no sentence"
    assert text.rstrip().endswith((".", "…")), f"{where}: {text!r} has no end"


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_help_fits_80_columns(name: str) -> None:
    """Nothing in it is wider, verbatim blocks included."""
    done = CliRunner().invoke(main, [*([name] if name else []), "--help"], terminal_width=80, max_content_width=80)
    assert done.exit_code == 0
    assert max(map(len, done.output.splitlines())) <= 80, done.output


@pytest.mark.parametrize("text", ["Of all offsets.", "Subtracted from the pixels.", "Number of processes.", "of it."])
def test_a_telegram_is_found(text: str) -> None:
    """Phrases of earlier help texts are refused."""
    assert NO_SENTENCE.match(text)
