"""The page on MXNet's models shows commands with their output: the commands print that output today."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from weftplan.cli import main

PAGE = (Path(__file__).parents[2] / "docs" / "mxnet-models.md").read_text()
SHOWN = {
    block.split("\n")[0]: block.rstrip("\n").split("\n")[1:]
    for part in re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL)
    for block in re.findall(r"\$ weftplan (.*?(?:\n(?!\$ ).*)*)(?:\n|$)", part)
}
"""The output that the page shows for each command."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model and the images that the page makes."""
    made = tmp_path_factory.mktemp("page")
    first, run = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[:2]
    names: dict[str, object] = {}
    exec((first + run).replace("tempfile.mkdtemp()", repr(str(made))), names)
    np.save(made / "images.npy", names["images"][:2])  # type: ignore[index]
    return made


def words(line: str) -> list[str]:
    """The words of a line, without what depends on versions and rounding."""
    line = re.sub(r"onnxruntime [0-9.]+[0-9]", "onnxruntime", line)
    return re.sub(r"differ by \S+", "differ by", line).split()


def test_all_commands_are_shown():
    """Inspect, plan, run, and both ways of convert."""
    assert [command.split()[0] for command in SHOWN] == ["inspect", "plan", "run", "convert", "convert"]


@pytest.mark.parametrize("command", SHOWN)
def test_what_the_page_shows(folder: Path, monkeypatch: pytest.MonkeyPatch, command: str):
    """Each line is printed, in that order; dots on the page stand for any lines."""
    if "onnx" in command:
        pytest.importorskip("onnxruntime")
    if "safetensors" in command:
        pytest.importorskip("safetensors")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "120")
    done = CliRunner().invoke(main, command.split(), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    printed = [words(line) for line in done.output.split("\n") if line.strip()]
    shown = SHOWN[command]
    at = 0
    for line in shown:
        if line.strip() == "…":
            continue
        assert words(line) in printed[at:], (line, done.output)
        at = printed.index(words(line), at) + 1
    if not any(line.strip() == "…" for line in shown):
        assert len(shown) == len(printed)
