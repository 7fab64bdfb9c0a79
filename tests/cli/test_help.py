"""Help texts are whole sentences and fit the terminal."""

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
"""Beginnings of a text that is no sentence: a noun without an article, a participle without a subject, no capital."""


def help_texts() -> list[tuple[str, str]]:
    """Return (command and option, help) of every option, and the first paragraph of every command's help."""
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
@pytest.mark.parametrize(("where", "text"), help_texts(), ids=lambda value: value if value.count(" ") < 2 else "")
def test_help_is_a_sentence(where: str, text: str) -> None:
    """A help text begins like a sentence and ends with a full stop or an ellipsis."""
    assert not NO_SENTENCE.match(text), f"{where}: {text!r} begins like no sentence"
    assert text.rstrip().endswith((".", "…")), f"{where}: {text!r} has no end"


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_help_fits_80_columns(name: str) -> None:
    """No line of a help page is wider than 80 columns."""
    done = CliRunner().invoke(main, [*([name] if name else []), "--help"], terminal_width=80, max_content_width=80)
    assert done.exit_code == 0
    assert max(map(len, done.output.splitlines())) <= 80, done.output


def test_help_fits_40_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """On 40 columns only verbatim blocks and lists of choices are wider."""
    monkeypatch.setenv("COLUMNS", "40")
    wide = []
    for name in ("", *COMMANDS):
        done = CliRunner().invoke(main, [*([name] if name else []), "--help"])
        assert done.exit_code == 0
        wide += [line for line in done.output.splitlines() if len(line) > 40]
    verbatim = re.compile(r"  x[.-]|      |  --[a-z]+ \[")
    assert [line for line in wide if not verbatim.match(line)] == []


@pytest.mark.parametrize("text", ["Of all offsets.", "Subtracted from the pixels.", "Number of processes.", "of it."])
def test_a_telegram_is_found(text: str) -> None:
    """The pattern matches texts that are no sentences."""
    assert NO_SENTENCE.match(text)
