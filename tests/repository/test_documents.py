"""The documents: their Python examples run, and their links lead to files and headings that exist."""

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
    """Return the Markdown files for readers: at the root, in docs, next to the code and the tests; no caches."""
    actual = [*ROOT.glob("*.md"), *(ROOT / "tests").glob("*.md")]
    for folder in ("docs", "weftplan", "examples", "bench"):
        actual += (ROOT / folder).rglob("*.md")
    return sorted(actual)


def examples(text: str) -> list[str]:
    """The fenced blocks marked exactly ``python``; one marked ``python skip`` is not meant to run."""
    return re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def anchors(text: str) -> set[str]:
    """Return the anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def dead_links(path: Path) -> list[str]:
    """Relative links of a document whose file or heading does not exist."""
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
    """Return the names of code in the answers of a treasure hunt that no file to which the same answer links has any
    more."""
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
"""All but the guide for extensions, whose examples register what they make: `test_contributing.py` runs each alone."""


@together()
@pytest.mark.parametrize("path", documents(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(path: Path):
    """Every relative link names an existing file, and an anchor an existing heading."""
    assert dead_links(path) == []


@pytest.mark.parametrize("path", WITH_EXAMPLES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_examples_run(path: Path, tmp_path: Path):
    """The examples of one document, top to bottom in one fresh process, run without error or warning."""
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


@pytest.mark.parametrize("room", sorted(path.parent for path in (ROOT / "weftplan").glob("*/__init__.py")))
def test_every_room_has_a_readme_with_its_files(room: Path):
    """Every file and folder of a room is named in the room's README."""
    text = (room / "README.md").read_text()
    names = [name.rstrip("/") for name in script("list_files").entries(room)]
    assert [name for name in names if name not in text] == []


def test_the_link_check_can_fail(tmp_path: Path):
    """A missing file and a missing heading are dead; a web address, a file and a heading that exist are not."""
    page = tmp_path / "page.md"
    page.write_text(
        "# One `two`\n[a](page.md#one-two) [b](#nowhere) [c](gone.md) [d](https://example.org/x) [e](page.md)\n"
    )
    assert dead_links(page) == ["#nowhere", "gone.md"]


def test_the_treasure_hunt_names_what_is_there():
    """Each class and function of the answers stands in a file or folder that the answer links."""
    assert lost_names(ROOT / "docs/index.md") == []


def test_the_check_of_the_treasure_hunt_can_fail(tmp_path: Path):
    """A class that is elsewhere, a method that has gone; words outside of the hunt do not count."""
    (tmp_path / "var.py").write_text("class Var:\n    def grant(self): ...\n")
    page = tmp_path / "page.md"
    page.write_text(
        "`nobody`\n## A treasure hunt\n\n| question | answer |\n|---|---|\n"
        "| Who? | `Var.grant` in [it](var.py), `Var.wait` |\n| What? | a `Region` ([here](var.py)) |\n\n"
        "## End\n`gone`\n"
    )
    assert lost_names(page) == ["Var.wait", "Region"]


def test_tests_that_a_document_names_exist():
    """The page of long runs names a test for each row of its table."""
    text = (ROOT / "docs" / "long-runs.md").read_text()
    named = re.findall(r"`(tests/[^`]+?)::(test_\w+)`", text)
    assert len(named) >= 12
    for file, test in named:
        assert f"def {test}(" in (ROOT / file).read_text(), f"{file}::{test}"
