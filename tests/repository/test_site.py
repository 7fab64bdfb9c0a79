"""The documentation site: argument descriptions, a build without warnings, search and links."""

from __future__ import annotations

import importlib.util
import inspect
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.scripts import script

ROOT = Path(__file__).parents[2]
UNTESTED = {"torch", "test_utils"}
"""Namespaces that are not checked: torch may not be installed, and test_utils has MXNet's helpers."""


def public_functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield (name, function) of each function and method in the API reference, once."""
    pages, seen = script("api_pages"), set()
    for name in (name for names in pages.SECTIONS.values() for name in names if name not in UNTESTED):
        functions, classes = pages.members(name)
        for item in (*functions, *classes):
            value = getattr(pages.module_of(name), item)
            actual = [(item, value)]
            if inspect.isclass(value):
                actual = [(f"{item}.{key}", one) for key, one in inspect.getmembers(value) if not key.startswith("_")]
            for label, one in actual:
                function = inspect.unwrap(getattr(one, "__func__", one))
                if inspect.isfunction(function) and function.__module__.startswith("weftplan") and function not in seen:
                    seen.add(function)
                    yield f"{name}.{label}", function


def test_functions_describe_their_arguments() -> None:
    """A public function of three or more parameters has ``Args:``, or inherits it from the overridden method."""
    objects, missing, described = script("api_objects"), [], 0
    for name, function in public_functions():
        doc = inspect.getdoc(function) or ""
        parameters = [one for one in inspect.signature(function).parameters if one not in ("self", "cls")]
        if len(parameters) < 3 or ":meta private:" in doc or function.__module__ == "weftplan.symbol.api.functions":
            continue
        owner = objects.owner_of(function)
        inherited = objects.inherited_arguments(owner, function.__name__, function) if owner else []
        if objects.arguments(doc) or inherited:
            described += 1
        else:
            missing.append(name)
    assert missing == []
    assert described > 150


def test_described_arguments_exist() -> None:
    """``Args:`` names only parameters of the function."""
    objects, wrong = script("api_objects"), []
    for name, function in public_functions():
        lines = objects.arguments(inspect.getdoc(function) or "")
        text = "\n".join(lines)
        named = re.findall(r"^ {4}((?:\*{0,2}\w+(?:, )?)+):", text, re.MULTILINE)
        taken = inspect.signature(function).parameters
        if any(one.kind is one.VAR_KEYWORD for one in taken.values()):
            continue
        wrong += [(name, one) for group in named for one in re.findall(r"\w+", group) if one not in taken]
    assert wrong == []


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site with warnings as errors, which takes about a minute, and return its folder."""
    if importlib.util.find_spec("pydata_sphinx_theme") is None or importlib.util.find_spec("myst_nb") is None:
        pytest.skip("the extra docs is not installed: pip install 'weftplan[docs]'")
    folder = tmp_path_factory.mktemp("build") / "site"
    command = [sys.executable, str(ROOT / "docs" / "build_site.py"), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in folder.parent.iterdir()] == ["site"], "something is left next to the site"
    return folder


@pytest.mark.site
@pytest.mark.timeout(600)
def test_the_site_is_built(site: Path) -> None:
    """Public functions come first, internals are absent, and sources are linked."""
    page = (site / "api" / "engine.html").read_text(encoding="utf-8")
    names = re.findall(r'<dt class="sig[^>]* id="weftplan\.engine\.(\w+)"', page)
    assert names[:4] == ["submit", "task", "map", "wait"]
    members = (site / "api" / "engine" / "Engine.html").read_text(encoding="utf-8")
    assert 'id="weftplan.engine.Engine.push"' in members
    assert "write_inline" not in members
    plan = (site / "api" / "planner" / "MemoryPlan.html").read_text(encoding="utf-8")
    for name in ("peak", "lower_bound", "unshared_bytes", "total", "notes"):
        assert f'id="weftplan.planner.MemoryPlan.{name}"' in plan
    assert "[source]" in plan
    assert "docs/gpus.html" in (site / "guides.html").read_text(encoding="utf-8")


@pytest.mark.site
@pytest.mark.parametrize(
    ("words", "page"),
    [
        ("logging", "docs/training"),
        ("uninstall", "docs/index"),
        ("fine-tune", "docs/mxnet-models"),
        ("Executor", "api/executor/Executor"),
    ],
)
def test_the_search_finds(site: Path, words: str, page: str) -> None:
    """The search index finds the page for words that readers look for."""
    index = json.loads((site / "searchindex.js").read_text(encoding="utf-8").removeprefix("Search.setIndex(")[:-1])
    stem = search_stemmer()
    actual: set[int] | None = None
    for word in map(stem, re.findall(r"\w+", words.lower())):
        entries = [index[kind].get(word, []) for kind in ("terms", "titleterms")]
        pages = {number for one in entries for number in (one if isinstance(one, list) else [one])}
        actual = pages if actual is None else actual & pages
    assert page in {index["docnames"][number] for number in actual or ()}


def search_stemmer() -> Callable[[str], str]:
    """Return the stemmer that Sphinx's search applies to English words."""
    from sphinx.search.en import SearchEnglish

    stem: Callable[[str], str] = SearchEnglish({}).stem
    return stem


@pytest.mark.site
def test_every_page_has_its_links(site: Path) -> None:
    """Each relative link and picture of each page leads to a file."""
    dead = []
    for page in (page for page in site.rglob("*.html") if "_static" not in page.parts):
        for target in re.findall(r'(?:href|src)="([^"#?]+)[^"]*"', page.read_text(encoding="utf-8")):
            if not re.match(r"[a-z]+:|//", target) and not (page.parent / target).exists():
                dead.append((page.relative_to(site).as_posix(), target))
    assert dead == []
