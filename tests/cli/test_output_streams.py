"""Commands under a narrow output encoding, a full disk, and Ctrl-C while loading."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from tests.stress.programs import HANDLER
from weftplan import cli
from weftplan.cli import LazyGroup, main
from weftplan.support.command_start import INTERRUPTED

COMMANDS = tuple(name for name in LazyGroup.list_commands(main, click.Context(main)))
NETWORK = ["plan", "mlp"]
FULL = Path("/dev/full")
ROOT = Path(__file__).resolve().parents[2]


def run_weftplan(*arguments: str, stdout: int, **variables: str) -> subprocess.CompletedProcess[bytes]:
    """Run a command in a subprocess with its output in the descriptor ``stdout`` and extra environment variables."""
    return subprocess.run(
        [sys.executable, "-m", "weftplan", *arguments],
        stdout=stdout,
        stderr=subprocess.PIPE,
        env={**os.environ, **variables},
        timeout=120,
        check=False,
    )


def test_characters_that_an_encoding_lacks() -> None:
    """Characters that the output encoding lacks, such as the ellipsis in Latin-1, are printed as question marks."""
    arguments = ["plan", "--help"]
    done = run_weftplan(*arguments, stdout=subprocess.PIPE, PYTHONIOENCODING="latin-1")
    assert (done.returncode, done.stderr) == (0, b"")
    utf8 = run_weftplan(*arguments, stdout=subprocess.PIPE, PYTHONIOENCODING="utf-8").stdout.decode()
    assert done.stdout.decode("latin-1") == utf8.encode("latin-1", "replace").decode("latin-1") != utf8


@pytest.mark.skipif(not FULL.exists(), reason="there is no /dev/full here")
@pytest.mark.parametrize("arguments", [["--help"], ["plan", "--help"], NETWORK], ids=" ".join)
def test_a_full_disk_is_one_line(arguments: list[str]) -> None:
    """If the output cannot be written, the command exits with 1 and one line of error."""
    with FULL.open("wb") as file:
        done = run_weftplan(*arguments, stdout=file.fileno())
    assert done.returncode == 1
    assert done.stderr.decode() == "Error: cannot write the output: No space left on device\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_ctrl_c_while_a_command_is_loaded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while a subcommand is imported exits with the code for interrupts, without a traceback."""

    def press(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.importlib, "import_module", press)
    done = CliRunner().invoke(main, [name])
    assert (done.exit_code, done.stderr) == (INTERRUPTED, "interrupted\n")


@pytest.mark.parametrize("start", ["module", "script"])
@pytest.mark.parametrize("name", ["numpy", "click"])
def test_ctrl_c_during_the_imports(tmp_path: Path, start: str, name: str) -> None:
    """Ctrl-C while a command imports ends it as later: 130, one word, no traceback."""
    press = "os.kill(os.getpid(), signal.SIGINT)\ntime.sleep(9)"
    (tmp_path / f"{name}.py").write_text(f"import os, time\n{HANDLER}{press}")
    script = tmp_path / "weftplan"
    script.write_text("import sys\nfrom weftplan.cli import main\nsys.exit(main())")
    done = subprocess.run(
        [sys.executable, *(["-X", "utf8", "-m", "weftplan"] if start == "module" else [script]), "doctor"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (INTERRUPTED, b"", b"interrupted\n")


def test_other_programs_show_their_traceback(tmp_path: Path) -> None:
    """A program that imports weftplan keeps Python's traceback of Ctrl-C."""
    script = tmp_path / "train.py"
    script.write_text("import weftplan\nraise KeyboardInterrupt")
    done = subprocess.run(
        [sys.executable, script, "-m", "weftplan"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert b"Traceback" in done.stderr
