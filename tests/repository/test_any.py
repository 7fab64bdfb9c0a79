"""In each folder of the package only a limited number of function signatures mention ``Any``."""

import ast
import gc
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "weftplan"
LIMITS = {
    "cli": 15,
    "compat": 30,
    "convert": 14,
    "data": 40,
    "device": 23,
    "engine": 1,
    "executor": 5,
    "kernels": 10,
    "ndarray": 48,
    "ops": 43,
    "planner": 2,
    "report": 6,
    "rnn": 2,
    "storage": 1,
    "support": 1,
    "symbol": 12,
    "tasks": 14,
    "torch": 95,
    "training": 143,
    "weftplan": 6,
}
"""Most functions whose signature mentions ``Any``, by folder; ``weftplan`` stands for the top-level modules.

Numbers may only fall: lower a number after a change that removes some.
"""
ALIASES = {"training": {"State"}, "convert": {"Value"}}
"""Existing aliases of ``Any``, which the count does not see. Add none: an alias of ``Any`` names no type."""


@cache
def folders() -> dict[str, tuple[int, set[str]]]:
    """Return {folder: (number of functions with ``Any``, aliases of ``Any``)}."""
    counts: dict[str, tuple[int, set[str]]] = {}
    gc.disable()  # garbage collections would scan every syntax tree
    try:
        for path in sorted(PACKAGE.rglob("*.py")):
            parts = path.relative_to(PACKAGE).parts
            folder = parts[0] if len(parts) > 1 else "weftplan"
            tree = ast.parse(path.read_text(encoding="utf-8"))
            count, names = counts.get(folder, (0, set()))
            counts[folder] = count + len([*functions_with_any(tree)]), names.union(aliases_of_any(tree))
    finally:
        gc.enable()
    return counts


def mentions_any(annotation: ast.expr) -> bool:
    """Return whether an annotation, or a quoted part of it, has the name ``Any``."""
    return any(
        (isinstance(node, ast.Name) and node.id == "Any")
        or (isinstance(node, ast.Attribute) and node.attr == "Any")
        or (isinstance(node, ast.Constant) and isinstance(node.value, str) and "Any" in node.value)
        for node in ast.walk(annotation)
    )


def functions_with_any(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield the functions of a module, nested functions and methods too, whose parameters or result mention ``Any``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            args = node.args
            parameters = (*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg)
            annotations = [node.returns, *(parameter.annotation for parameter in parameters if parameter)]
            if any(annotation and mentions_any(annotation) for annotation in annotations):
                yield node


def aliases_of_any(tree: ast.Module) -> Iterator[str]:
    """Yield the module-level names that are assigned ``Any`` itself."""
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value and ast.unparse(node.value).strip("'") == "Any":
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name))


@pytest.mark.parametrize("folder", folders())
def test_signatures_with_any_stay_few(folder: str) -> None:
    """A folder has at most as many signatures with ``Any`` as the table allows; others may have none."""
    count = folders()[folder][0]
    limit = LIMITS.get(folder, 0)
    assert count <= limit, (
        f"{count} signatures of {folder} mention Any, and at most {limit} may: "
        "name the type (weftplan/support/array_types.py has those of arrays), or write object"
    )


@pytest.mark.parametrize("folder", folders())
def test_any_has_no_new_alias(folder: str) -> None:
    """No module outside the table gives ``Any`` another name."""
    assert folders()[folder][1] <= ALIASES.get(folder, set())


def test_limits_name_existing_folders() -> None:
    """Each entry of the table is an existing folder."""
    assert LIMITS.keys() <= folders().keys()


def test_counter_sees_every_form() -> None:
    """The count includes quoted, nested, variadic and returned ``Any``, and methods, but not local variables."""
    tree = ast.parse(
        "def a(x: Any): ...\nasync def b(*x: 'list[Any]'): ...\ndef c(**x: typing.Any): ...\n"
        "def d() -> dict[str, Any]: ...\nclass E:\n    def f(self, *, x: Any = 0): ...\n"
        "def g(x: int) -> object:\n    y: Any = x\n    def h(x: Any, /): ...\n    return y\n"
        "First = Any\nSecond: TypeAlias = 'Any'\nThird = list[Any]\n"
    )
    assert sorted(node.name for node in functions_with_any(tree)) == ["a", "b", "c", "d", "f", "h"]
    assert list(aliases_of_any(tree)) == ["First", "Second"]
