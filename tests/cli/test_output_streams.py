"""What a command's environment may do to it: a narrow encoding, a full disk, Ctrl-C at any time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from weftplan import cli
from weftplan.cli import LazyGroup, main

COMMANDS = tuple(name for name in LazyGroup.list_commands(main, click.Context(main)))
NETWORK = ["plan", "mlp"]
FULL = Path("/dev/full")


def weftplan(*arguments: str, stdout: int, **variables: str) -> subprocess.CompletedProcess[bytes]:
    """Run the command with its output in ``stdout``."""
    return subprocess.run(
        [sys.executable, "-m", "weftplan", *arguments],
        stdout=stdout,
        stderr=subprocess.PIPE,
        env={**os.environ, **variables},
        timeout=120,
        check=False,
    )


def test_characters_that_an_encoding_lacks() -> None:
    """Latin-1 has no ellipsis: the help is printed with question marks instead."""
    arguments = ["plan", "--help"]
    done = weftplan(*arguments, stdout=subprocess.PIPE, PYTHONIOENCODING="latin-1")
    assert (done.returncode, done.stderr) == (0, b"")
    utf8 = weftplan(*arguments, stdout=subprocess.PIPE, PYTHONIOENCODING="utf-8").stdout.decode()
    assert done.stdout.decode("latin-1") == utf8.encode("latin-1", "replace").decode("latin-1") != utf8


@pytest.mark.skipif(not FULL.exists(), reason="there is no /dev/full here")
@pytest.mark.parametrize("arguments", [["--help"], ["plan", "--help"], NETWORK], ids=" ".join)
def test_a_full_disk_is_one_line(arguments: list[str]) -> None:
    """Output that cannot be written is reported without a traceback, the help of the whole command included."""
    with FULL.open("wb") as file:
        done = weftplan(*arguments, stdout=file.fileno())
    assert done.returncode == 1
    assert done.stderr.decode() == "Error: cannot write the output: No space left on device\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_ctrl_c_while_a_command_is_loaded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exit code is that of a shell, and no traceback is printed."""

    def press(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.importlib, "import_module", press)
    done = CliRunner().invoke(main, [name])
    assert (done.exit_code, done.stderr) == (cli.INTERRUPTED, "interrupted\n")
