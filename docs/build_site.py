"""Build the documentation site from the Markdown of the repository and the docstrings of the package.

    pip install -e '.[docs]' && python docs/build_site.py [FOLDER]       # default: site/

The same Markdown is read on a code host and on the site. Pages are copied with their folders, so that links between
them work in both; a link to a source file becomes its name. The API reference is written from docstrings. A warning is
an error.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import weftplan as mx

ROOT = Path(__file__).parents[1]
GUIDES = {
    "Start here": "README.md",
    "Guides": {
        "Know and limit training memory": "docs/planning-memory.md",
        "Fit a PyTorch model into your card": "docs/pytorch.md",
        "Train a network": "docs/training.md",
        "Feed a network": "docs/data.md",
        "Leave it running": "docs/long-runs.md",
        "Open an MXNet model": "docs/mxnet-models.md",
        "Schedule NumPy functions": "docs/engine-in-ten-minutes.md",
        "Who owns the bytes": "docs/storage.md",
        "Train over several processes": "docs/distributed.md",
    },
    "Gallery": "docs/gallery.md",
    "Reference": {
        "Glossary": "docs/glossary.md",
        "Operators": "docs/operators.md",
        "Environment variables": "docs/environment.md",
        "Flags": "docs/flags.md",
        "Changelog": "CHANGELOG.md",
    },
    "How it works": {
        "How to read the code": "docs/index.md",
        "Architecture": "ARCHITECTURE.md",
        "Contributing": "CONTRIBUTING.md",
        "Measurements": "bench/RESULTS.md",
    },
}
REFERENCE = (
    "planner",
    "mod",
    "engine",
    "nd",
    "sym",
    "kv",
    "storage",
    "profiler",
    "optimizer",
    "metric",
    "io",
    "callback",
)
"""Namespaces of ``mx`` that the API reference describes."""
SHORT = {"nd", "sym"}
"""Namespaces with hundreds of functions: one line for each."""


def stage(folder: Path) -> None:
    """Copy every page and picture, and write the API reference."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "bench").glob("*.md")]
    pages += [*(ROOT / "tests").rglob("README.md"), *(ROOT / "weftplan").rglob("README.md")]
    names = {page.relative_to(ROOT).as_posix() for page in pages}
    for page in pages:
        target = folder / page.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(_for_the_site(page, names), encoding="utf-8")
    for kind in ("images", "plans"):
        shutil.copytree(ROOT / "docs" / kind, folder / "docs" / kind)
    for name in REFERENCE:
        target = folder / "api" / f"{name}.md"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(reference(name), encoding="utf-8")


def _for_the_site(page: Path, names: set[str]) -> str:
    """The text of a page, in which links to what is not on the site are names."""

    def link(found: re.Match[str]) -> str:
        text, target = found.groups()
        if re.match(r"[a-z]+:|#", target):
            return found.group()
        path = (page.parent / target.partition("#")[0]).resolve()
        inside = path.is_relative_to(ROOT) and (
            path.relative_to(ROOT).as_posix() in names or path.parent.name in ("images", "plans")
        )
        return found.group() if inside else text

    return re.sub(r"(?<!!)\[([^\]]*)\]\(([^)\s]+)\)", link, page.read_text(encoding="utf-8"))


def reference(name: str) -> str:
    """A page about one namespace of ``mx``: signatures and docstrings."""
    module = getattr(mx, name)
    about = inspect.getdoc(importlib.import_module(module.__name__)) or ""
    lines = [f"# mx.{name}", "", _text(about.split("\n\n")[0]), ""]
    for item in dir(module):
        value = getattr(module, item)
        if not (inspect.isclass(value) or inspect.isroutine(value)):
            continue
        doc = inspect.getdoc(value) or ""
        if name in SHORT:
            lines.append(f"* `{item}{_signature(value)}`: {_text(doc.split(chr(10))[0])}")
            continue
        lines += [f"## {item}", "", f"```text\n{item}{_signature(value)}\n```", "", _code(doc), ""]
        for method, function in sorted(vars(value).items()) if inspect.isclass(value) else ():
            if not method.startswith("_") and inspect.isroutine(function) and inspect.getdoc(function):
                found = inspect.getdoc(function) or ""
                lines += [f"**`{method}{_signature(function)}`**", "", _code(found), ""]
    return "\n".join(lines) + "\n"


def _signature(value: Any) -> str:
    try:
        return str(inspect.signature(value)).replace("'", "")
    except (TypeError, ValueError):
        return "(…)"


def _text(doc: str) -> str:
    """Inline marks of docstrings as Markdown."""
    return re.sub(r":\w+:`~?\.?([^`]+)`", r"`\1`", doc.replace("``", "`"))


def _code(doc: str) -> str:
    """A docstring as Markdown: its prose, then everything that is laid out by hand as it stands."""
    head, *rest = doc.split("\n\n")
    if not rest:
        return _text(head)
    body = "\n\n".join(rest).replace("```", "'''")
    return f"{_text(head)}\n\n```text\n{body}\n```"


def configuration(source: Path, site: Path) -> str:
    """The settings of mkdocs; JSON is YAML."""

    def nav(items: dict[str, Any]) -> list[Any]:
        return [{title: nav(page) if isinstance(page, dict) else page} for title, page in items.items()]

    api = {f"mx.{name}": f"api/{name}.md" for name in REFERENCE}
    plan = {
        "site_name": "weftplan",
        "docs_dir": str(source),
        "site_dir": str(site),
        "nav": nav({**GUIDES, "API": api}),
        "not_in_nav": "*",
        "validation": {"links": {"anchors": "ignore", "unrecognized_links": "ignore"}},
        "theme": {
            "name": "material",
            "font": False,
            "palette": [
                {"media": "(prefers-color-scheme: light)", "scheme": "default", "primary": "blue grey"},
                {"media": "(prefers-color-scheme: dark)", "scheme": "slate", "primary": "blue grey"},
            ],
        },
        "markdown_extensions": ["tables", "fenced_code", {"toc": {"permalink": True}}],
    }
    return json.dumps(plan, indent=1)


def build(site: Path) -> None:
    """Build the site; raises CalledProcessError for a warning."""
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "pages"
        stage(source)
        settings = Path(scratch) / "mkdocs.yml"
        settings.write_text(configuration(source, site), encoding="utf-8")
        command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--config-file", str(settings)]
        subprocess.run(command, check=True)
    print(f"built {site}")


if __name__ == "__main__":
    build(Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "site").resolve())
