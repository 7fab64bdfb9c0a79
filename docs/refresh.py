"""Write every generated file: stubs, pages of operators, settings and plans, tables of files, figures in documents.

``python docs/refresh.py`` writes the files that have changed and prints their names. A test compares each file with the
text that this script would write.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import draw_plans
import list_files
import list_operator_modules
import list_operators
import list_reading
import list_settings
import write_stubs

import weftplan as mx
from weftplan.cli.doctor.command import environment_markdown
from weftplan.ops.core import registry

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "bench"))
import figures  # noqa: E402

LIMITS = ROOT / "docs/limits.md"
COMPARISON = ROOT / "docs/comparison.md"


def limits() -> str:
    """Return the page of limits with the current number of operators.

    Raises:
        ValueError: the page does not contain exactly one sentence for it.
    """
    public = {registry.get(name).name for name in dir(mx.sym) if registry.contains(name)}
    pattern = r" \d+ operators, listed by `dir\(mx\.sym\)`"
    text, count = re.subn(pattern, f" {len(public)} operators, listed by `dir(mx.sym)`", LIMITS.read_text("utf-8"))
    if count != 1:
        raise ValueError(f"expected one sentence like {pattern!r} in {LIMITS}, found {count}; mend one of the two")
    return text


def pages() -> dict[Path, str]:
    """Return {path: text} of every generated file."""
    return {
        LIMITS: limits(),
        COMPARISON: figures.filled(COMPARISON.read_text("utf-8")),
        ROOT / "docs/environment.md": environment_markdown(),
        list_operator_modules.PATH: list_operator_modules.text(),
        list_operators.PAGE: list_operators.page(),
        list_settings.PAGE: list_settings.page(),
        list_reading.PAGE: list_reading.page(),
        **draw_plans.pages(),
        **write_stubs.stubs(),
        **{path: list_files.filled(path) for path in list_files.readmes()},
    }


if __name__ == "__main__":
    table = list_operator_modules.text()
    if table != list_operator_modules.PATH.read_text(encoding="utf-8"):
        list_operator_modules.PATH.write_text(table, encoding="utf-8")
        print(f"wrote {list_operator_modules.PATH.relative_to(ROOT)}")
        sys.exit(subprocess.call([sys.executable, __file__]))  # this process has imported the old table
    for path, text in pages().items():
        if path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path.relative_to(ROOT)}")
