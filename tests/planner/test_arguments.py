"""Functions of the planner take at most two positional arguments; all others are passed by name."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.support.together import together

PLANNER = Path(__file__).parents[2] / "weftplan" / "planner"
POSITIONAL = 2
EXEMPT = {
    "packing/hard/kernel.py": "calls with names are slower in its inner loops",
    "check_packing": "the columns of one table, as `pack` takes them",
    "judged": "the columns of one table, as `pack` takes them",
    "reuse_edges": "the columns of one table, as `pack` takes them",
    "check_input": "the columns of one table, as `pack` takes them",
    "sectioned": "the columns of one table, as `pack` takes them",
    "pack": "the columns of one table",
    "compressed_rows": "the columns of one table",
    "insert": "a row of one table",
    "gap": "a row of one table",
    "release": "a buffer and its range of bytes",
    "cut": "a range and the bytes that it loses, for each of a million buffers",
    "hold": "a buffer and its range of bytes",
    "write": "a range of bytes and what it holds",
    "allocate": "asked for every entry of a graph",
    "plan_symbol": "shapes and dtypes, as every function takes them that infers",
    "size_symbol": "the same",
    "match_blocks": "a program, the options, and the one of them that strategies set",
    "symbolic/passes/gradients.py": "what gradient rules call, and how",
}
"""Modules and functions that take more positional arguments, and the reasons."""


def unnamed(path: Path) -> list[str]:
    """Return the public functions and constructors of a module that take more than two positional arguments."""
    results = []
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.FunctionDef) or (node.name.startswith("_") and node.name != "__init__"):
            continue
        taken = [a.arg for a in (*node.args.posonlyargs, *node.args.args) if a.arg not in ("self", "cls")]
        if len(taken) > POSITIONAL and node.name not in EXEMPT:
            results.append(f"{node.name}({', '.join(taken)})")
    return results


@together()
@pytest.mark.parametrize("path", sorted(PLANNER.rglob("*.py")), ids=lambda path: path.relative_to(PLANNER).as_posix())
def test_arguments_have_names(path: Path) -> None:
    """No public function of a module takes more than two positional arguments, unless it is in ``EXEMPT``."""
    assert path.relative_to(PLANNER).as_posix() in EXEMPT or unnamed(path) == []


def test_the_rule_can_fail(tmp_path: Path) -> None:
    """``unnamed`` finds functions and constructors, and ignores private functions and keyword-only arguments."""
    path = tmp_path / "module.py"
    path.write_text(
        "def much(a, b, c): ...\ndef fine(a, b, *, c, d): ...\ndef _own(a, b, c, d): ...\n"
        "class Thing:\n    def __init__(self, a, b, c, d): ...\n    def verb(self, a, b): ...\n"
    )
    assert unnamed(path) == ["much(a, b, c)", "__init__(a, b, c, d)"]
