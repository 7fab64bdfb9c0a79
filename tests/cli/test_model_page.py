"""docs/mxnet-models.md and README.md show the output of commands: each is run on the model that the page makes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from weftplan.cli import main

PAGE = Path(__file__).parents[2] / "docs" / "mxnet-models.md"


def page_commands(text: str) -> list[tuple[str, list[str]]]:
    """Return (arguments, output lines) of each command in the blocks marked ``console``."""
    blocks = re.findall(r"^```console\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    commands = [part for block in blocks for part in re.split(r"^\$ weftplan ", block, flags=re.MULTILINE)[1:]]
    return [(lines[0], lines[1:]) for lines in (part.splitlines() for part in commands)]


def normalized(line: str) -> str:
    """Return a line without differences between machines: spaces, versions and rounding."""
    line = re.sub(r"\d+\.\d+\.\d+", "VERSION", " ".join(line.split()))
    line = re.sub(r"\d\.\d+e-0[5-9]", "LITTLE", line)
    return re.sub(r"\d\.\d{4,}", lambda found: f"{float(found[0]):.4f}", line)


def first_difference(expected: list[str], printed: list[str]) -> str | None:
    """Return a description of the first page line that was not printed in its place, or None.

    The line ``…`` matches any number of lines.
    """
    left: Iterator[str] = iter([normalized(line) for line in printed if line.strip()])
    skips = False
    for line in expected:
        if line.strip() == "…":
            skips = True
            continue
        wanted = normalized(line)
        actual = next((one for one in left if not skips or one == wanted), None)
        if actual != wanted:
            return f"{wanted!r}, printed {actual!r}"
        skips = False
    return None


COMMANDS = page_commands(PAGE.read_text())
COMMANDS += [part for part in page_commands((PAGE.parents[1] / "README.md").read_text()) if " model" in part[0]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the page's first example and write two of its images; return the folder."""
    result = tmp_path_factory.mktemp("page")
    first = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert first is not None
    assert "tempfile.mkdtemp()" in first[1]
    exec(first[1].replace("tempfile.mkdtemp()", repr(str(result))), {})
    np.save(result / "images.npy", np.random.default_rng(1).random((4, 1, 8, 8), dtype=np.float32)[:2])
    return result


@pytest.mark.parametrize(("words", "lines"), COMMANDS, ids=[words for words, _ in COMMANDS])
def test_the_page_shows_what_is_printed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, words: str, lines: list[str]
) -> None:
    """A command prints the lines that the page shows, in their order."""
    if ".onnx" in words:
        pytest.importorskip("onnxruntime")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("WEFTPLAN_KERNELS", "numpy")  # so that scratch memory is the same on every machine
    result = CliRunner().invoke(main, words.split())
    assert result.exit_code == 0, result.output
    assert first_difference(lines, result.output.splitlines()) is None


def test_the_comparison_can_fail() -> None:
    """A changed, additional or missing line is found; versions, rounding and spaces are ignored."""
    assert {"inspect", "plan", "run", "convert"} <= {words.split()[0] for words, _ in COMMANDS}
    assert (
        first_difference(["a  1", "…", "checked 1.2.3: 1.2e-07"], ["a 1", "b", "c", "checked 1.9.0: 3.1e-06"]) is None
    )
    assert first_difference(["a 1"], ["a 2"]) == "'a 1', printed 'a 2'"
    assert first_difference(["a", "c"], ["a", "b", "c"]) == "'c', printed 'b'"
    assert first_difference(["…", "d"], ["a", "b"]) == "'d', printed None"
