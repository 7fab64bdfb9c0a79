"""Documents: Python examples run, links lead to existing files and headings, and named tests exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.scripts import script
from tests.support.together import together

ROOT = Path(__file__).parents[2]


def documents() -> list[Path]:
    """Return the Markdown files at the root, in tests, and below docs, weftplan, examples and bench."""
    actual = [*ROOT.glob("*.md"), *(ROOT / "tests").glob("*.md")]
    for folder in ("docs", "weftplan", "examples", "bench"):
        actual += (ROOT / folder).rglob("*.md")
    return sorted(actual)


def examples(text: str) -> list[str]:
    """Return the fenced blocks marked exactly ``python``; ``python skip`` marks a block that is not run."""
    return re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub makes for a document's headings."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def dead_links(path: Path) -> list[str]:
    """Return the relative links of a document whose file or heading does not exist."""
    dead = []
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        name, _, anchor = target.partition("#")
        if re.match(r"[a-z]+:", name):
            continue
        file = (path.parent / name) if name else path
        if not file.exists() or (anchor and anchor not in anchors(file.read_text())):
            dead.append(target)
    return dead


def lost_names(page: Path) -> list[str]:
    """Return names in the answers of the page's treasure hunt that the linked files do not contain."""
    hunt = page.read_text().partition("## A treasure hunt")[2].partition("\n## ")[0]
    lost = []
    for answer in re.findall(r"^\|[^|]*\|(.*)\|$", hunt, re.MULTILINE):
        linked = [page.parent / name for name in re.findall(r"\]\(([^)#\s]+)", answer)]
        files = [file for path in linked for file in (path.rglob("*.py") if path.is_dir() else [path])]
        words = set(re.findall(r"\w+", " ".join(file.read_text() for file in files)))
        names = re.findall(r"`([\w.]+)`", answer)
        lost += [name for name in names if not words.issuperset(name.removesuffix(".py").split("."))]
    return lost


WITH_EXAMPLES = [path for path in documents() if path.name != "CONTRIBUTING.md" and examples(path.read_text())]
"""Documents with examples, without CONTRIBUTING.md: `test_contributing.py` runs its examples one by one."""


@together()
@pytest.mark.parametrize("path", documents(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(path: Path):
    """Each relative link of a document names an existing file and heading."""
    assert dead_links(path) == []


@pytest.mark.parametrize("path", WITH_EXAMPLES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_examples_run(path: Path, tmp_path: Path):
    """The examples of a document, in order in one process, run without an error or warning."""
    script = tmp_path / "example.py"
    script.write_text("\n\n".join(examples(path.read_text())))
    environment = {"PYTHONPATH": str(ROOT), "PATH": "", "MPLBACKEND": "Agg"}
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("folder", sorted(path.parent for path in (ROOT / "weftplan").glob("*/__init__.py")))
def test_every_subpackage_readme_names_its_files(folder: Path):
    """The README of a subpackage names each of its files and folders."""
    text = (folder / "README.md").read_text()
    names = [name.rstrip("/") for name in script("list_files").entries(folder)]
    assert [name for name in names if name not in text] == []


def test_the_link_check_can_fail(tmp_path: Path):
    """A missing file and a missing heading are found; a web address and existing targets are not."""
    page = tmp_path / "page.md"
    page.write_text(
        "# One `two`\n[a](page.md#one-two) [b](#nowhere) [c](gone.md) [d](https://example.org/x) [e](page.md)\n"
    )
    assert dead_links(page) == ["#nowhere", "gone.md"]


def test_the_treasure_hunt_names_what_is_there():
    """Each name in the answers of docs/index.md is in a file that the answer links."""
    assert lost_names(ROOT / "docs/index.md") == []


def test_the_check_of_the_treasure_hunt_can_fail(tmp_path: Path):
    """A name that the linked files lack is found; names outside the treasure hunt are ignored."""
    (tmp_path / "var.py").write_text("class Var:\n    def grant(self): ...\n")
    page = tmp_path / "page.md"
    page.write_text(
        "`nobody`\n## A treasure hunt\n\n| question | answer |\n|---|---|\n"
        "| Who? | `Var.grant` in [it](var.py), `Var.wait` |\n| What? | a `Region` ([here](var.py)) |\n\n"
        "## End\n`gone`\n"
    )
    assert lost_names(page) == ["Var.wait", "Region"]


def test_tests_that_a_document_names_exist():
    """Each test that docs/long-runs.md names exists."""
    text = (ROOT / "docs" / "long-runs.md").read_text()
    named = re.findall(r"`(tests/[^`]+?)::(test_\w+)`", text)
    assert len(named) >= 12
    for file, test in named:
        assert f"def {test}(" in (ROOT / file).read_text(), f"{file}::{test}"
