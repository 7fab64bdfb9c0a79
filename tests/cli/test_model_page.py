"""The page about MXNet's models shows what the commands print: each is run on the model that the page makes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from weftplan.cli import main

PAGE = Path(__file__).parents[2] / "docs" / "mxnet-models.md"


def shown(text: str) -> list[tuple[str, list[str]]]:
    """Return (arguments, lines) of each command in the blocks marked ``console``."""
    blocks = re.findall(r"^```console\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    commands = [part for block in blocks for part in re.split(r"^\$ weftplan ", block, flags=re.MULTILINE)[1:]]
    return [(lines[0], lines[1:]) for lines in (part.splitlines() for part in commands)]


def plain(line: str) -> str:
    """A line without what differs between machines: spaces, versions, rounding."""
    line = re.sub(r"\d+\.\d+\.\d+", "VERSION", " ".join(line.split()))
    line = re.sub(r"\d\.\d+e-0[5-9]", "LITTLE", line)
    return re.sub(r"\d\.\d{4,}", lambda found: f"{float(found[0]):.4f}", line)


def unlike(expected: list[str], printed: list[str]) -> str | None:
    """Return the first line of the page that was not printed in its place; ``…`` stands for any lines."""
    left: Iterator[str] = iter([plain(line) for line in printed if line.strip()])
    skips = False
    for line in expected:
        if line.strip() == "…":
            skips = True
            continue
        wanted = plain(line)
        actual = next((one for one in left if not skips or one == wanted), None)
        if actual != wanted:
            return f"{wanted!r}, printed {actual!r}"
        skips = False
    return None


COMMANDS = shown(PAGE.read_text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the page's first example, and two of the images of its second one."""
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
    """Every line of the page is printed, in its place."""
    if ".onnx" in words:
        pytest.importorskip("onnxruntime")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("WEFTPLAN_KERNELS", "numpy")  # the same scratch on every machine
    result = CliRunner().invoke(main, words.split())
    assert result.exit_code == 0, result.output
    assert unlike(lines, result.output.splitlines()) is None


def test_the_comparison_can_fail() -> None:
    """A number, a line too many and a line that is not there are noticed; versions, rounding and spaces are not."""
    assert {"inspect", "plan", "run", "convert"} <= {words.split()[0] for words, _ in COMMANDS}
    assert unlike(["a  1", "…", "checked 1.2.3: 1.2e-07"], ["a 1", "b", "c", "checked 1.9.0: 3.1e-06"]) is None
    assert unlike(["a 1"], ["a 2"]) == "'a 1', printed 'a 2'"
    assert unlike(["a", "c"], ["a", "b", "c"]) == "'c', printed 'b'"
    assert unlike(["…", "d"], ["a", "b"]) == "'d', printed None"
