"""Imports go down the layers, there are no import cycles, and the picture of the layers is current."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from types import ModuleType

import pytest

from tests.support import sources
from tests.support.scripts import script
from tests.support.together import together
from weftplan.support.slots import declared

Graph = Mapping[str, frozenset[str]]
"""{module: modules that it imports}."""

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "weftplan"

LAYERS = (
    {"cli"},
    {"compat"},
    {"rnn"},
    {"torch"},
    {"convert"},
    {"report"},
    {"training"},
    {"data"},
    {"kvstore"},
    {"models"},
    {"executor"},
    {"planner"},
    {"symbol"},
    {"profiler"},
    {"ndarray"},
    {"kernels"},
    {"ops"},
    {"tasks"},
    {"storage", "engine"},
    {"device"},
    {"support"},
    {"config"},
    {"default_settings"},
    {"errors", "locks"},
)
"""Layers from top to bottom, as in ARCHITECTURE.md: a module imports only from lower layers and its own part.

A part is a folder or a module directly in the package.
"""

NEVER = {
    "planner": {"ndarray", "engine", "storage"},
    "kvstore": {"planner"},
    "ops": {*chain(*LAYERS)} - {"config", "errors", "support", "locks"},
}
"""Forbidden imports from lower layers."""

LEVEL = {part: level for level, parts in enumerate(LAYERS) for part in parts}


def modules() -> list[Path]:
    """Return every module but the package's ``__init__``, which imports lazily, and ``__main__``."""
    return sorted(p for p in PACKAGE.rglob("*.py") if p not in (PACKAGE / "__init__.py", PACKAGE / "__main__.py"))


def part_of(path: Path) -> str:
    """Return the part of a module: its folder directly in the package, or its own name."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, part) for each import of weftplan in a module, also inside functions.

    The part of the package itself is empty.
    """
    for node in sources.found(path):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            names = [f"weftplan.{alias.name}" for alias in node.names] if module == "weftplan" else [module]
        else:
            continue
        for name in names:
            head, _, remaining = name.partition(".")
            part = remaining.split(".")[0]
            if head == "weftplan" and not part.startswith("__"):
                yield node.lineno, part


def violations(part: str, imported: Iterator[tuple[int, str]]) -> list[str]:
    """Return messages about forbidden imports of a module of ``part``."""
    wrong = []
    for line, second in imported:
        if second == part:
            continue
        if not second:
            wrong.append(f"line {line}: import the parts that are needed, not the whole of weftplan")
        elif second not in LEVEL:
            wrong.append(f"line {line}: weftplan.{second} has no place in LAYERS")
        elif LEVEL[second] <= LEVEL[part] or second in NEVER.get(part, set()):
            wrong.append(f"line {line}: {part} must not import {second}")
    return wrong


@together()
@pytest.mark.parametrize("path", modules(), ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_imports_go_down(path: Path):
    """No module imports a layer above or next to its own."""
    part = part_of(path)
    assert part in LEVEL, f"{part} has no place in LAYERS: add it there and to ARCHITECTURE.md"
    assert violations(part, imports(path)) == []


def test_the_layer_rule_can_fail(tmp_path: Path):
    """Forbidden imports are found in each form, in functions, of unknown parts, and of the whole package."""
    path = tmp_path / "module.py"
    path.write_text(
        "import weftplan.executor\nfrom weftplan import storage, __version__\nfrom weftplan.errors import MXNetError\n"
        "def f():\n    from weftplan.ndarray.array import NDArray\nimport weftplan.nonsense\nimport numpy\n"
        "import weftplan\n"
    )
    assert violations("engine", imports(path)) == [
        "line 1: engine must not import executor",
        "line 2: engine must not import storage",
        "line 6: weftplan.nonsense has no place in LAYERS",
        "line 8: import the parts that are needed, not the whole of weftplan",
        "line 5: engine must not import ndarray",
    ]
    assert violations("planner", imports(path))[1:3] == [
        "line 2: planner must not import storage",
        "line 6: weftplan.nonsense has no place in LAYERS",
    ]


def test_layers_are_those_of_the_architecture():
    """ARCHITECTURE.md lists the layers in the same order."""
    text = (ROOT / "ARCHITECTURE.md").read_text().split("```")[0]
    listed = re.findall(r"^    ([a-z]+)(?:[ |]+([a-z]+))?  ", text, re.MULTILINE)
    order = [part for row in listed for part in row if part in LEVEL]
    assert len(order) >= 15
    assert [LEVEL[part] for part in order] == sorted(LEVEL[part] for part in order)


def draw_layers_script() -> ModuleType:
    """Return the script that draws the layers; it can also read imports and find cycles."""
    return script("draw_layers")


@functools.cache
def current_imports() -> dict[str, frozenset[str]]:
    """Return {module: modules that it imports} of the package."""
    return dict(draw_layers_script().read_imports(PACKAGE, sources.found))


def test_no_import_cycles():
    """No modules import each other in a cycle, including imports for types and inside functions."""
    actual = draw_layers_script().circles(current_imports())
    assert not actual, "\n".join(" <-> ".join(circle) for circle in actual)


def condensed(graph: Graph, package: str) -> Graph:
    """Return the import graph of the modules and folders directly in ``package``, with each folder as one node."""
    nodes: dict[str, set[str]] = {}

    def node(module: str) -> str:
        """Return the name directly in ``package`` to which ``module`` belongs; empty if it is outside."""
        return module[len(package) + 1 :].split(".")[0] if module.startswith(f"{package}.") else ""

    for module, imported in graph.items():
        if node(module):
            nodes.setdefault(node(module), set()).update({*map(node, imported)} - {node(module), ""})
    return {name: frozenset(others) for name, others in nodes.items()}


PACKAGES = sorted({".".join(p.parent.relative_to(ROOT).parts) for p in PACKAGE.rglob("__init__.py")})


@pytest.mark.parametrize("package", PACKAGES)
def test_no_circles_between_folders(package: str):
    """The folders and modules directly in a package do not import each other in a cycle."""
    rings = draw_layers_script().circles(condensed(current_imports(), package))
    assert not rings, "\n".join(f"{package}: {' <-> '.join(ring)}" for ring in rings)


def test_a_circle_between_folders_is_found():
    """Two folders that import each other are a cycle, even if their modules form none."""
    graph = {
        "p.a.x": frozenset({"p.b.x"}),
        "p.a.y": frozenset(),
        "p.b.x": frozenset(),
        "p.b.y": frozenset({"p.a.y"}),
    }
    assert draw_layers_script().circles(graph) == []
    assert draw_layers_script().circles(condensed(graph, "p")) == [["a", "b"]]


def test_circles_are_found(tmp_path: Path):
    """A cycle through a type import and a cycle of three are found; a diamond has no cycle."""
    script = draw_layers_script()
    package = tmp_path / "sample"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "a.py").write_text("from sample import b\n")
    (package / "b.py").write_text("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from sample.a import A\n")
    assert script.circles(script.read_imports(package)) == [["sample.a", "sample.b"]]
    diamond = {"a": frozenset("bc"), "b": frozenset("d"), "c": frozenset("d"), "d": frozenset()}
    assert script.circles(diamond) == []
    assert script.circles({**diamond, "d": frozenset("b"), "c": frozenset()}) == [["b", "d"]]
    assert script.circles({"a": frozenset("b"), "b": frozenset("c"), "c": frozenset("a")}) == [["a", "b", "c"]]


def test_the_picture_of_the_layers_is_that_of_today():
    """The stored picture has exactly one arrow for each import between two layers, and each slot."""
    script = draw_layers_script()
    names = script.rooms((ROOT / "ARCHITECTURE.md").read_text())
    drawn = re.findall(r'data-from="(\w+)" data-to="(\w+)"', script.PICTURE.read_text())
    assert set(drawn) == set(script.arrows(current_imports(), names)), "make it again: python docs/draw_layers.py"
    assert len(drawn) > 40
    slots = re.findall(r'data-caller="(\w+)" data-provider="(\w+)"', script.PICTURE.read_text())
    assert set(slots) == set(script.calls_up(names)), "make it again: python docs/draw_layers.py"
    assert len(slots) > 8


def test_slots_are_declared_as_they_are_used():
    """Each slot declares the modules that fill it, and the parts above its provider that use it."""
    fills: dict[str, set[str]] = {}
    uses: dict[str, set[str]] = {}
    for path in modules():
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        text = path.read_text()
        for name in declared() if module != "weftplan.support.slots" else ():
            if not re.search(rf"\bslots\.{name}\b|support\.slots import .*\b{name}\b", text):
                continue
            filled = re.search(rf"\b{name}(\.fill\(|\.value = |\.get\(\)\.append\()", text)
            (fills if filled else uses).setdefault(name, set()).add(module)
    for name, slot in declared().items():
        callers = {part_name(module) for module in slot.caller}
        first = fills[name] - ({*slot.caller} if name == "ARRAY_CHUNK" else set())  # the caller sets the default value
        assert {*slot.provider} == first, name
        highest = max(LEVEL[part_name(module)] for module in slot.provider)
        assert {
            part_name(m) for m in uses.get(name, set()) | {*slot.caller} if LEVEL[part_name(m)] > highest
        } <= callers, name
        assert {*slot.caller} <= uses.get(name, set()) | fills[name], name


def part_name(module: str) -> str:
    """Return the part of the module with this dotted name."""
    return module.split(".")[1]
