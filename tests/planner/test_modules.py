"""No function or class hides a module of its name, and modules of the planner have no state between calls."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import sys
from pathlib import Path

import pytest

PLANNER = Path(__file__).parents[2] / "weftplan" / "planner"
KEPT = {"stop_request.py: _asked", "options.py: _read"}
"""The exceptions: the handler that stops a search, and the cached options of an environment."""
CHANGING = {"append", "add", "update", "setdefault", "extend", "insert", "pop", "remove", "clear", "discard"}


@pytest.mark.parametrize("package", ["executor", "planner", "report", "symbol"])
def test_no_function_hides_a_module(package: str) -> None:
    """Each attribute of a package with the name of a module is the module."""
    root = importlib.import_module(f"weftplan.{package}")
    for info in pkgutil.walk_packages(root.__path__, f"{root.__name__}."):
        importlib.import_module(info.name)
    for name, module in list(sys.modules.items()):
        if name.startswith(f"{root.__name__}."):
            parent, _, leaf = name.rpartition(".")
            assert getattr(sys.modules[parent], leaf) is module, name


def changed_names(text: str) -> set[str]:
    """Return the module-level names that functions change: containers, caches and globals."""
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


def test_modules_of_the_planner_have_no_state() -> None:
    """Functions change no module-level name besides those in ``KEPT``, so any thread may call them."""
    state = {
        f"{path.relative_to(PLANNER).as_posix()}: {name}"
        for path in PLANNER.rglob("*.py")
        for name in changed_names(path.read_text())
    }
    assert state == KEPT


def test_changed_names_are_found() -> None:
    """``changed_names`` finds caches, globals and filled containers, but no local names and constants."""
    text = (
        "seen = {}\nROWS = []\nSIZES = {1: 2}\ncount = 0\n"
        "@cache\ndef kept(): ...\n"
        "def fill(a):\n    global count\n    seen[a] = 1\n    ROWS.append(a)\n"
        "def look(a):\n    mine = []\n    mine.append(SIZES[a])\n"
    )
    assert changed_names(text) == {"seen", "ROWS", "count", "kept"}
