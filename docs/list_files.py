"""Write the table of files into the README of every folder, from the first lines of the modules' docstrings.

``python docs/list_files.py`` fills the part between the two marks of each ``weftplan/**/README.md`` that has them. Rows
keep their order, which is the reading order; a new file comes last, and a removed file loses its row. A folder that has
its own README is one row; any other folder is one row that also lists its files.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- files: python docs/list_files.py -->", "<!-- end of files -->"


def first_line(path: Path) -> str:
    """Return the first paragraph of a module's docstring as one line of Markdown, without its full stop."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return (
        re.sub(r":\w+:`~?(?:[\w.]+\.)?(\w+)`", r"`\1`", text.split("\n\n")[0].replace("\n", " "))
        .rstrip(".")
        .replace("``", "`")
    )


def entries(room: Path) -> dict[str, str]:
    """Return {name of a file or folder: its description} for the rows of a folder."""
    rows = {path.name: first_line(path) for path in sorted(room.glob("*.py")) if path.name != "__init__.py"}
    for init in sorted(room.glob("*/__init__.py")):
        inside = sorted(path.stem for path in init.parent.rglob("*.py") if path.name != "__init__.py")
        line = first_line(init)
        if not (init.parent / "README.md").exists():
            line += f" ({', '.join(inside)})"
        rows[f"{init.parent.name}/"] = line
    return rows


def table(room: Path, order: list[str]) -> str:
    """Return the Markdown table of a folder; names in ``order`` come first, in that order."""
    rows = entries(room)
    names = [name for name in order if name in rows]
    names += [name for name in rows if name not in names]
    lines = [f"| [{name}]({name}) | {rows[name]} |" for name in names]
    return "\n".join([BEGIN, "", "| file | what it holds |", "|---|---|", *lines, "", END])


def filled(readme: Path) -> str:
    """Return the text of a README with a fresh table; unchanged if it has no marks."""
    text = readme.read_text(encoding="utf-8")
    head, begin, rest = text.partition(BEGIN)
    old, end, tail = rest.partition(END)
    if not (begin and end):
        return text
    return head + table(readme.parent, re.findall(r"^\| \[([\w./]+)\]\(", old, re.MULTILINE)) + tail


def readmes() -> list[Path]:
    """Return every README of the package."""
    return sorted((ROOT / "weftplan").rglob("README.md"))


if __name__ == "__main__":
    for path in readmes():
        path.write_text(filled(path), encoding="utf-8")
