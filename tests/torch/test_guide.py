"""The examples and commands of the PyTorch guide run, and their budgets are met."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'weftplan[torch]'")

import weftplan.torch  # noqa: E402
from tests.repository.test_figures import first_missing  # noqa: E402
from tests.torch.test_budget import fresh  # noqa: E402, F401
from weftplan.cli import main  # noqa: E402
from weftplan.torch import card_rules  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # PyTorch's own
GUIDE = Path(__file__).parents[2] / "docs" / "pytorch.md"
BLOCKS = re.findall(r"```python skip\n(.*?)```", GUIDE.read_text(), re.DOTALL)
STEPS = [block for block in BLOCKS if "def step()" in block]
"""The programs for the command line: of ``fits``, and of ``plan --torch``."""
FUSED = ("inductor",)
"""Words of the examples that inductor compiles."""


def test_examples_run_and_keep_their_budgets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All examples run in order in one session and meet their budgets; those for inductor need a C++ compiler."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "guide"}
    monkeypatch.setattr(card_rules, "FUNCTIONS", dict(card_rules.FUNCTIONS))
    monkeypatch.setattr(card_rules, "SCRATCH", dict(card_rules.SCRATCH))
    monkeypatch.setattr(card_rules, "ROWS", list(card_rules.ROWS))
    compiles = any(map(shutil.which, ("g++", "clang++")))
    for block in BLOCKS:
        if block in STEPS:
            continue
        if compiles or not any(word in block for word in FUSED):
            exec(block, names)
    assert names["step"].plans[0].repeated
    assert names["step"].plans[0].peak <= 14_000_000
    assert names["part"].plans[0].peak <= 14_000_000
    assert (tmp_path / "curve.html").exists()


def test_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command of the guide works on the guide's module."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "mystep", raising=False)
    (tmp_path / "mystep.py").write_text(STEPS[1])
    commands = re.findall(r"^weftplan (plan --torch mystep.*)$", GUIDE.read_text(), re.MULTILINE)
    assert len(commands) == 3
    for command in commands:
        done = CliRunner().invoke(main, command.split())
        assert done.exit_code == 0, done.output
    assert (tmp_path / "plan.html").exists()
    (tmp_path / "train.py").write_text(STEPS[0])
    done = CliRunner().invoke(main, ["fits", "train.py:step", "--card", "RTX 4090"])
    assert done.exit_code == 0, done.output
    quoted = [shown for page in (GUIDE, GUIDE.parents[1] / "README.md") for shown in forecasts(page.read_text())]
    assert len(quoted) == 2
    for lines in quoted:
        assert first_missing(lines, done.stdout) is None, done.stdout


def forecasts(text: str) -> list[list[str]]:
    """Return the lines of each quoted answer of ``weftplan fits``, from the verdict to the end of the block."""
    return [shown.splitlines() for shown in re.findall(r"^(fits: .*?)^```$", text, re.MULTILINE | re.DOTALL)]


def test_every_public_name_has_an_example() -> None:
    """Each public name of the package is called in an example."""
    for name in weftplan.torch.__all__:
        assert any(re.search(rf"\b{name}\(", block) for block in BLOCKS), name
