"""Completion in bash with the line that docs/installing.md gives for ``~/.bashrc``."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.shell_completion import BashComplete

from weftplan.cli import main
from weftplan.device.cards import CARDS

ROOT = Path(__file__).parents[2]
ASKED = {
    "weftplan plan resnet1": ["resnet18", "resnet101", "resnet152"],
    "weftplan inspect le": ["lenet"],
    "weftplan plan lenet --optimizer ada": ["adadelta", "adagrad", "adam", "adamax", "adamw"],
    "weftplan plan lenet --dtype float1": ["float16"],
    "weftplan plan lenet --card A1": [name for name in CARDS if name.startswith("A1")],
    "weftplan plan nothing-of-this-na": [],
}
IN_BASH = ("weftplan plan resnet1", "weftplan plan nothing-of-this-na")
"""Lines for bash, which starts a process for each: the first completes to networks, the second to files."""
SCRIPT = """
compopt() { printf "%s %s\\n" "$1" "$2" >&2; }  # a shell outside of completion has no compopt
while read -r -a COMP_WORDS; do
    COMP_CWORD=$((${#COMP_WORDS[@]} - 1)) COMPREPLY=()
    _weftplan_completion weftplan
    echo "${COMPREPLY[@]}"
done
"""


@pytest.mark.parametrize("asked", ASKED)
def test_each_line_is_completed_to_what_fits(asked: str) -> None:
    """The command answers with the matching values or, for a MODEL that is no network, a request for files."""
    command, *words = asked.split()
    answers = BashComplete(main, {}, command, "_WEFTPLAN_COMPLETE").get_completions(words[:-1], words[-1])
    assert [answer.value for answer in answers if answer.type == "plain"] == ASKED[asked]
    assert all(answer.type in ("plain", "file") for answer in answers)


def test_bash_completes_networks_and_files(tmp_path: Path) -> None:
    """bash completes a line to the matching networks, and a MODEL that is no network to files."""
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("there is no bash")
    (line,) = [one for one in (ROOT / "docs/installing.md").read_text().splitlines() if one.startswith("eval ")]
    command = tmp_path / "weftplan"
    command.write_text(f"#!{sys.executable}\nfrom weftplan.cli import main\n\nmain(prog_name='weftplan')\n")
    command.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    typed = "".join(f"{asked}\n" for asked in IN_BASH)
    ended = subprocess.run(
        [bash, "-c", line + SCRIPT], input=typed, env=environment, capture_output=True, text=True, check=True
    )
    assert [answer.split() for answer in ended.stdout.splitlines()] == [ASKED[asked] for asked in IN_BASH]
    assert ended.stderr.splitlines() == ["-o default"] * len(IN_BASH)
