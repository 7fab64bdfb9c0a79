"""Modules: re-exported names hide no module, and the planner's modules keep no state between calls."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import sys
from pathlib import Path

import pytest

PLANNER = Path(__file__).parents[2] / "weftplan" / "planner"
KEPT = {"stopping.py: _asked", "options.py: _read"}
"""State that modules keep: the handler that ends a search, and the options of an environment."""
CHANGING = {"append", "add", "update", "setdefault", "extend", "insert", "pop", "remove", "clear", "discard"}


@pytest.mark.parametrize("package", ["executor", "planner", "report", "symbol"])
def test_no_function_hides_a_module(package: str) -> None:
    """``import weftplan.planner.recompute.policies`` gives the module: no attribute of a package has its name."""
    root = importlib.import_module(f"weftplan.{package}")
    for info in pkgutil.walk_packages(root.__path__, f"{root.__name__}."):
        importlib.import_module(info.name)
    for name, module in list(sys.modules.items()):
        if name.startswith(f"{root.__name__}."):
            parent, _, leaf = name.rpartition(".")
            assert getattr(sys.modules[parent], leaf) is module, name


def kept_by(text: str) -> set[str]:
    """Return the module names that functions may change: containers, caches, and names declared global."""
    tree = ast.parse(text)
    names = {
        target.id
        for node in tree.body
        for target in (node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)])
        if isinstance(target, ast.Name)
    }
    seen: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            seen.update(node.names)
        elif isinstance(node, ast.FunctionDef):
            if any(
                "cache" in ast.unparse(mark) and "property" not in ast.unparse(mark) for mark in node.decorator_list
            ):
                seen.add(node.name)
            for part in ast.walk(node):
                changed: ast.AST | None = None
                if isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute) and part.func.attr in CHANGING:
                    changed = part.func.value
                elif isinstance(part, ast.Subscript) and not isinstance(part.ctx, ast.Load):
                    changed = part.value
                if isinstance(changed, ast.Name) and changed.id in names:
                    seen.add(changed.id)
    return seen


def test_modules_of_the_planner_keep_nothing() -> None:
    """Any thread may call any function: no module has state that passes from call to call."""
    state = {
        f"{path.relative_to(PLANNER).as_posix()}: {name}"
        for path in PLANNER.rglob("*.py")
        for name in kept_by(path.read_text())
    }
    assert state == KEPT


def test_what_is_kept_is_seen() -> None:
    """The check sees a cache, a global, and a container that a function fills; no local one and no constant."""
    text = (
        "seen = {}\nROWS = []\nSIZES = {1: 2}\ncount = 0\n"
        "@cache\ndef kept(): ...\n"
        "def fill(a):\n    global count\n    seen[a] = 1\n    ROWS.append(a)\n"
        "def look(a):\n    mine = []\n    mine.append(SIZES[a])\n"
    )
    assert kept_by(text) == {"seen", "ROWS", "count", "kept"}
