"""Commands on pseudo-terminals of several widths and in a pipe: narrow output drops columns and never cuts numbers.

One child process prints for every width, since starting a process takes a second.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest

from weftplan import models

WIDTHS = (80, 100, 160)
CHILD = """
import fcntl, struct, sys, termios
from weftplan.cli import main

for width in map(int, sys.argv[1:]):
    fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))
    print(f"@{width}")
    main(["plan", "resnet18", "--batch", "2", "--kernels"], standalone_mode=False)
    main(["plan", "mlp", "--compare", "--curve"], standalone_mode=False)
    sys.stdout.flush()
"""


def on_a_terminal(script: str, *arguments: object, width: int = 80) -> str:
    """Run ``script`` in a subprocess on a pseudo-terminal of ``width`` columns, and return its output."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))
    environment = {**os.environ, "TERM": "xterm", "WEFTPLAN_KERNELS": "numpy"}
    environment.pop("COLUMNS", None)
    child = subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=slave,
        stderr=subprocess.PIPE,
        env=environment,
    )
    os.close(slave)
    actual = b""
    while True:
        try:
            piece = os.read(master, 1 << 16)
        except OSError:  # the child has closed its end
            break
        if not piece:
            break
        actual += piece
    os.close(master)
    assert child.stderr is not None
    error = child.stderr.read()
    child.stderr.close()
    assert child.wait() == 0, error.decode()
    return actual.decode().replace("\r\n", "\n")


@pytest.fixture(scope="module")
def screens() -> dict[int, list[str]]:
    """Return {width: output lines}."""
    text = on_a_terminal(CHILD, *WIDTHS)
    parts = re.split(r"@(\d+)\n", text)[1:]
    return {int(width): body.splitlines() for width, body in zip(parts[::2], parts[1::2], strict=True)}


@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_is_wider_than_the_terminal(screens: dict[int, list[str]], width: int) -> None:
    """No line is wider than the terminal, and only 160 columns show the column "last read by"."""
    lines = screens[width]
    assert max(map(len, lines)) <= width
    heading = next(line for line in lines if line.lstrip().startswith("bytes  buffer"))
    assert ("last read by" in heading) == (width == 160)
    assert "\x1b" not in "".join(lines)


@pytest.mark.parametrize("width", WIDTHS)
def test_numbers_are_whole(screens: dict[int, list[str]], width: int) -> None:
    """Numbers are printed to the last digit and equal those of the plan."""
    text = "\n".join(screens[width])
    assert not re.search(r"[\d,]…|…[\d,]+\b(?!\w)", text)
    plan = models.get("resnet18").plan(models.input_shapes("resnet18", 2), options=None, kernels="numpy")
    for number in (plan.peak, plan.total, plan.unshared_bytes, *(item.nbytes for item in plan.alive_at_peak(12))):
        assert f"{number:,}" in text
    # The first paragraph has the total at any width.
    answer = " ".join(text.split("\n\n")[0].split())
    assert answer.startswith("training resnet18, batch 2, float32: ")
    assert answer.endswith("optimizer not counted: --optimizer adam)")


def test_a_pipe_has_no_width() -> None:
    """In a pipe no column is dropped and no sentence is wrapped."""
    done = subprocess.run(
        [sys.executable, "-m", "weftplan", "plan", "mlp"],
        env={**os.environ, "COLUMNS": "60"},
        capture_output=True,
        text=True,
        check=True,
    )
    lines = done.stdout.splitlines()
    assert lines[0].endswith("optimizer not counted: --optimizer adam)")
    assert any("last read by" in line for line in lines)
    assert any(len(line) > 120 for line in lines)
    assert done.stderr == ""


NARROW = """
from weftplan.cli import main

main(["inspect", "lenet"], standalone_mode=False)
print("@")
main(["train", "--network", "mlp", "--epochs", "1", "--devices", "1", "-q"], standalone_mode=False)
"""


def test_forty_columns_cut_no_word_and_no_number() -> None:
    """On 40 columns ``inspect`` and ``train`` drop columns and wrap text between words."""
    inspected, _, trained = on_a_terminal(NARROW, width=40).partition("@")
    lines = [line.rstrip("\r") for line in inspected.splitlines()]
    assert max(map(len, lines)) <= 40
    assert lines[1].split() == ["layer", "output", "parameters"]
    for layer in ("conv1    1 x 20 x 24 x 24         520", "fc1      1 x 500              400,500"):
        assert layer in lines
    assert "operations of a forward run: 4,631,980" in lines
    assert re.search(r"planned peak: 82\.50 KiB \(84,480 bytes\)\r?\n", trained)
    assert "lower bound: 82.50 KiB" in trained
