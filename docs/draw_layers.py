"""Draw the layers of the package from its imports.

``python docs/draw_layers.py`` writes ``docs/images/layers.svg``. The order of the folders and their descriptions come
from the list in ``ARCHITECTURE.md``. The dots come from the import statements of every module, including those for
types. A test compares the stored picture's dots with the current imports.
"""

from __future__ import annotations

import ast
import html
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs/images/layers.svg"

Graph = Mapping[str, frozenset[str]]
"""{dotted name of a module: modules of the package that it imports}."""


def syntax(path: Path) -> Iterable[ast.AST]:
    """Return every node of a file's syntax tree."""
    return ast.walk(ast.parse(path.read_text(encoding="utf-8")))


def read_imports(package: Path, nodes: Callable[[Path], Iterable[ast.AST]] = syntax) -> Graph:
    """Return the imports between the modules of ``package``, including those inside functions and for types."""
    files = {}
    for path in package.rglob("*.py"):
        name = ".".join(path.relative_to(package.parent).with_suffix("").parts)
        files[name.removesuffix(".__init__")] = path
    return {name: frozenset(_imported(nodes(path), files) - {name}) for name, path in files.items()}


def _imported(nodes: Iterable[ast.AST], files: Mapping[str, Path]) -> set[str]:
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in files else node.module)
    return found & files.keys()


def circles(graph: Graph) -> list[list[str]]:
    """Return the groups of modules that import each other, directly or through others; [] without such cycles.

    This is Tarjan's algorithm for strongly connected components, without recursion.
    """
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    path: list[str] = []
    on_path: set[str] = set()
    found = []
    for root in sorted(graph):
        if root in order:
            continue
        work: list[tuple[str, Iterator[str]]] = [(root, iter(sorted(graph[root])))]
        order[root] = lowest[root] = len(order)
        path.append(root)
        on_path.add(root)
        while work:
            name, rest = work[-1]
            for other in rest:
                if other not in order:
                    order[other] = lowest[other] = len(order)
                    path.append(other)
                    on_path.add(other)
                    work.append((other, iter(sorted(graph[other]))))
                    break
                if other in on_path:
                    lowest[name] = min(lowest[name], order[other])
            else:
                work.pop()
                if work:
                    lowest[work[-1][0]] = min(lowest[work[-1][0]], lowest[name])
                if lowest[name] == order[name]:
                    start = path.index(name)
                    group, path[start:] = path[start:], []
                    on_path -= set(group)
                    if len(group) > 1:
                        found.append(sorted(group))
    return found


def rooms(text: str) -> dict[str, str]:
    """Return {folder: its purpose}, from top to bottom, from the list at the head of ``ARCHITECTURE.md``."""
    found = {}
    for line in text.split("```")[0].splitlines():
        match = re.fullmatch(r" {4}(\w+(?: +\| +\w+)*)  +(\S.*)", line)
        if match:
            names = re.split(r" +\| +", match[1])
            purposes = re.split(r" +\| +", match[2])
            found.update(zip(names, purposes, strict=False))
    return found


def arrows(graph: Graph, names: Mapping[str, str]) -> Counter[tuple[str, str]]:
    """Return {(importing folder, imported folder): number of modules of the first that import from the second}."""
    found: Counter[tuple[str, str]] = Counter()
    for name, imported in graph.items():
        room = _room(name)
        targets = {_room(other) for other in imported} - {room}
        found.update((room, other) for other in targets if room in names and other in names)
    return found


def calls_up(names: Mapping[str, str]) -> Counter[tuple[str, str]]:
    """Return {(calling folder, providing folder): number of slots between them}."""
    from weftplan.support.slots import declared

    return Counter(
        pair
        for slot in declared().values()
        for pair in {(_room(caller), _room(provider)) for caller in slot.caller for provider in slot.provider}
        if pair[0] != pair[1] and names.keys() >= {*pair}
    )


def _room(module: str) -> str:
    parts = module.split(".")
    return parts[1].removeprefix("_") if len(parts) > 1 else ""


def draw(names: Mapping[str, str], edges: Mapping[tuple[str, str], int], slots: Mapping[tuple[str, str], int]) -> str:
    """Return an SVG: a matrix of layers, with a dot if the row's layer imports the column's.

    Rows and columns have the same order. Imports only go down, so dots fill one triangle. Calls that go up, through
    slots, are squares of another colour in the other triangle.
    """
    step, left, top = 30, 590, 124
    place = {name: (row + 0.5) * step for row, name in enumerate(names)}
    side = step * len(names)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left + side + 50} {top + side + 12}" '
        'font-family="system-ui, sans-serif">',
        "<title>The layers of weftplan and their imports; every import goes down</title>",
        "<style>.n{font-weight:600;fill:#1b3a4b}.p{fill:#555}.a{fill:#1f77b4}.u{fill:#d62728}.s{fill:#e08214}.b{fill:#eef3f7}"
        ".g{stroke:#c9d3da;stroke-width:.5}@media(prefers-color-scheme:dark){.n{fill:#d6e6f2}.p{fill:#aaa}"
        ".b{fill:#22303a}.a{fill:#6cb4ee}.g{stroke:#44525c}}</style>",
        '<text class="p" x="14" y="26" font-size="14">A dot: some module of the layer on the left imports</text>',
        '<text class="p" x="14" y="46" font-size="14">the layer above. The larger the dot, the more modules do.</text>',
        '<text class="p" x="14" y="66" font-size="14">Imports only go down, so all dots lie above the diagonal.</text>',
        '<text class="p" x="14" y="86" font-size="14">An orange square: the layer on the left calls code</text>',
        '<text class="p" x="14" y="104" font-size="14">that the layer above provides through a slot.</text>',
    ]
    for row, (name, at) in enumerate(place.items()):
        if row % 2 == 0:
            lines.append(f'<rect class="b" x="8" y="{top + at - step / 2}" width="{left + side}" height="{step}"/>')
        lines += [
            f'<text class="n" x="14" y="{top + at + 5}" font-size="14">{name}</text>',
            f'<text class="p" x="118" y="{top + at + 5}" font-size="11.5">{html.escape(names[name])}</text>',
            f'<text class="n" font-size="13" transform="translate({left + at + 4} {top - 8}) rotate(-60)">'
            f"{name}</text>",
        ]
    lines.append(f'<path class="g" d="M{left} {top}L{left + side} {top + side}"/>')
    for (importer, imported), count in sorted(edges.items()):
        kind = "a" if place[importer] < place[imported] else "u"
        radius = min(2.5 + count**0.5, step / 2 - 1)
        lines.append(
            f'<circle class="{kind}" data-from="{importer}" data-to="{imported}" cx="{left + place[imported]}" '
            f'cy="{top + place[importer]}" r="{radius:.1f}"/>'
        )
    for (caller, provider), count in sorted(slots.items()):
        half = 2 + count**0.5
        lines.append(
            f'<rect class="s" data-caller="{caller}" data-provider="{provider}" '
            f'x="{left + place[provider] - half:.1f}" '
            f'y="{top + place[caller] - half:.1f}" width="{2 * half:.1f}" height="{2 * half:.1f}"/>'
        )
    return "\n".join([*lines, "</svg>", ""])


def main() -> None:
    """Write the picture."""
    names = rooms((ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8"))
    picture = draw(names, arrows(read_imports(ROOT / "weftplan"), names), calls_up(names))
    PICTURE.write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    main()
