"""Build the documentation site from the Markdown of the repository and the docstrings of the package.

    pip install -e '.[docs]' && python docs/build_site.py [FOLDER]       # default: site/

A code host and the site show the same Markdown. Pages keep their folders on the site, so links between pages
work on both; a file that a page links to is copied, too. Sphinx builds the site. A warning is an error.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import api_pages

ROOT = Path(__file__).resolve().parents[1]
SECTIONS = {
    "Guides": (
        "Learn to use a part of the package.",
        "docs/installing docs/planning-memory docs/compiler-memory docs/pytorch docs/training docs/data docs/long-runs "
        "docs/mxnet-models docs/engine-in-ten-minutes docs/storage docs/distributed docs/gpus",
    ),
    "API": ("", "api/index"),
    "Examples": (
        "Programs to run, and pages for a course.",
        "docs/gallery docs/teaching docs/course-module docs/notebooks/engine docs/notebooks/planner "
        "docs/notebooks/kvstore",
    ),
    "Reference": (
        "Every operator, variable and term.",
        "docs/comparison docs/limits docs/operators docs/environment docs/flags docs/mxnet-differences docs/glossary",
    ),
    "Project": (
        "How the code is built, measured and released.",
        "docs/index ARCHITECTURE CONTRIBUTING CHANGELOG bench/RESULTS docs/release SECURITY",
    ),
}
"""The navigation: each section's description and pages."""


def pages() -> list[Path]:
    """Return the Markdown files of the site."""
    found = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "bench").rglob("*.md")]
    return [*found, *(ROOT / "tests").rglob("README.md"), *(ROOT / "weftplan").rglob("README.md")]


def stage(folder: Path) -> None:
    """Copy every page with the files that it links to, and write the pages of the API reference."""
    for page in pages():
        target = folder / place(page)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(for_site(page, folder), encoding="utf-8")
    navigate(folder)
    api_pages.write(folder / "api")


def place(path: Path) -> Path:
    """Return the path of a repository file on the site; the README becomes the first page."""
    return Path("index.md") if path == ROOT / "README.md" else path.relative_to(ROOT)


def for_site(page: Path, folder: Path) -> str:
    """Return a page's text with links that work on the site, and copy the other files that it links to."""
    here = place(page).parent

    def link(match: re.Match[str]) -> str:
        mark, text, target = match.groups()
        name, _, anchor = target.partition("#")
        if not name or re.match(r"[a-z]+:", name):
            return match.group()
        path = (page.parent / name).resolve()
        path = path / "README.md" if (path / "README.md").is_file() else path
        if not path.is_file() or not path.is_relative_to(ROOT):
            return text
        if path.suffix != ".md":
            (folder / place(path)).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, folder / place(path))
        relative = os.path.relpath(place(path), here).replace(os.sep, "/")
        return f"{mark}[{text}]({relative}{'#' + anchor if anchor else ''})"

    return re.sub(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)", link, page.read_text(encoding="utf-8"))


def navigate(folder: Path) -> None:
    """Write a page for each section that has a description, and append the list of sections to ``index.md``.

    The page of the section ``Project`` also lists the pages that belong to no section, such as the README of a folder.
    """
    listed = {name for _, names in SECTIONS.values() for name in names.split()}
    others = sorted(str(place(page).with_suffix("")) for page in pages())
    rooms = [name for name in others if name not in listed and name != "index"]
    top = []
    for section, (about, names) in SECTIONS.items():
        if about:
            lists = toctree(names.split()) + (toctree(rooms, "Rooms") if section == "Project" else "")
            (folder / f"{section.lower()}.md").write_text(f"# {section}\n\n{about}\n\n{lists}", encoding="utf-8")
        top.append(section.lower() if about else f"{section} <{names}>")
    with (folder / "index.md").open("a", encoding="utf-8") as start:
        start.write("\n" + toctree(top, hidden=True))


def toctree(names: Iterable[str], caption: str = "", *, hidden: bool = False) -> str:
    """Return a fenced ``toctree`` block that lists pages."""
    options = [":maxdepth: 1", *([f":caption: {caption}"] if caption else []), *([":hidden:"] if hidden else [])]
    return "\n".join(["```{toctree}", *options, "", *names, "```", ""])


def build(site: Path) -> None:
    """Build the site into the folder ``site``.

    Raises:
        CalledProcessError: Sphinx fails or warns.
    """
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "pages"
        stage(source)
        command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-j", "auto", "-b", "html"]
        html = Path(scratch) / "html"  # notebooks are run in a folder next to it
        command += ["-c", str(ROOT / "docs" / "sphinx"), "-d", str(Path(scratch) / "trees"), str(source), str(html)]
        subprocess.run(command, check=True)
        shutil.copytree(html, site, dirs_exist_ok=True)
    print(f"built {site}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Build the documentation site.")
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "site", help="where the site is written")
    build(parser.parse_args().folder.resolve())
