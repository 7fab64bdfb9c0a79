"""Pictures of networks as SVG: boxes in layers from top to bottom, an arrow for each array between them.

The layout is deterministic, and the SVG has neither scripts nor links. The module is stateless.
"""

from __future__ import annotations

import html
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from textwrap import wrap

from weftplan.ops.core.schema import Shape
from weftplan.report.network_boxes import MAX_BOXES, Box, boxes_of, known_shapes
from weftplan.report.node_labels import colour_of, label_of
from weftplan.support import slots
from weftplan.support.atomic_files import write_text
from weftplan.symbol import Entry, Node, Symbol

_CHARACTERS = 30
"""Maximum number of characters of a line in a box."""
_CHARACTER, _LINE, _PADDING = 7.0, 15, 7
_GAP_X, _GAP_Y = 26, 34
_LANE = 14
"""Width that an arrow takes in a layer which it passes."""
_SWEEPS = 6
_TEXT, _EDGE = "#1c2430", "#7a8694"


class NetworkPicture:
    """A picture of a network. Jupyter shows it; :meth:`save` writes it."""

    def __init__(self, svg: str) -> None:
        self.svg = svg

    def save(self, path: str | os.PathLike[str]) -> str:
        """Write the picture as SVG; return the path."""
        write_text(path, self.svg)
        return os.fspath(path)

    def _repr_svg_(self) -> str:
        return self.svg


@dataclass(slots=True)
class _Cell:
    """A box, or an arrow on its way through a layer."""

    lines: list[str]
    width: float
    height: float
    box: int | None = None
    above: list[_Cell] = field(default_factory=list)
    below: list[_Cell] = field(default_factory=list)
    x: float = 0.0
    """Centre."""
    y: float = 0.0
    """Upper edge."""


def draw(symbol: Symbol, shapes: Mapping[str, Shape] | None = None, *, max_boxes: int = MAX_BOXES) -> NetworkPicture:
    """Return a picture of a network; layers are collapsed if there are more than ``max_boxes`` boxes.

    Args:
        shapes: shapes of inputs by name, from which the shapes in the picture follow.

    >>> from weftplan import symbol as sym
    >>> picture = draw(sym.exp(sym.Variable("a"), name="e"), {"a": (2, 3)})
    >>> picture.svg.startswith("<svg"), "2 x 3" in picture.svg
    (True, True)
    """
    boxes, entry_shapes = boxes_of(symbol, max_boxes=max_boxes), known_shapes(symbol, shapes)
    cells, layers = _layered(boxes, [_lines(box, entry_shapes) for box in boxes])
    _order(layers)
    _set_coordinates(layers)
    return NetworkPicture(_svg(boxes, cells, layers, entry_shapes))


def _lines(box: Box, shapes: Mapping[Entry, Shape]) -> list[str]:
    """Return the text of a box."""
    final = box.nodes[-1]
    if len(box.nodes) == 1:
        lines = label_of(final).split("\n")
    else:
        kinds = [f"{count // box.repeats} {kind}" if count > box.repeats else kind for kind, count in box.kinds.items()]
        lines = [] if box.repeats == 1 else [f"{box.repeats} times"]
        lines += wrap(", ".join(kinds), _CHARACTERS, max_lines=4, placeholder=" …")
        lines.append(f"{box.nodes[0].name} … {final.name}")
    if (shape := shapes.get(Entry(final))) is not None:
        lines.append(" x ".join(map(str, shape)) or "scalar")
    return [line if len(line) <= _CHARACTERS else f"{line[: _CHARACTERS - 2]} …" for line in lines]


def _layered(boxes: Sequence[Box], texts: Sequence[list[str]]) -> tuple[list[_Cell], list[list[_Cell]]]:
    """Return a cell for each box, and all cells by layer: each box lies below the boxes that it reads."""
    depth = [0] * len(boxes)
    for k, box in enumerate(boxes):
        depth[k] = max((depth[source] + 1 for source in box.inputs), default=0)
    first_reader: dict[int, int] = {}
    for k, box in enumerate(boxes):
        for source in box.inputs:
            first_reader[source] = min(first_reader.get(source, depth[k]), depth[k])
    for k, box in enumerate(boxes):  # an input lies directly above its first reader
        if not box.inputs and k in first_reader:
            depth[k] = first_reader[k] - 1
    cells = [
        _Cell(text, max(map(len, text)) * _CHARACTER + 2 * _PADDING, len(text) * _LINE + 2 * _PADDING, k)
        for k, text in enumerate(texts)
    ]
    layers: list[list[_Cell]] = [[] for _ in range(max(depth, default=0) + 1)]
    for k, cell in enumerate(cells):
        layers[depth[k]].append(cell)
    for k, box in enumerate(boxes):
        for source in box.inputs:
            upper = cells[source]
            for layer in layers[depth[source] + 1 : depth[k]]:
                lane = _Cell([], _LANE, 0, None)
                layer.append(lane)
                _join(upper, lane)
                upper = lane
            _join(upper, cells[k])
    return cells, layers


def _join(upper: _Cell, lower: _Cell) -> None:
    upper.below.append(lower)
    lower.above.append(upper)


def _order(layers: Sequence[list[_Cell]]) -> None:
    """Sort each layer by the mean place of neighbours, so that few arrows cross."""
    for sweep in range(_SWEEPS):
        down = sweep % 2 == 0
        index = {id(cell): k for layer in layers for k, cell in enumerate(layer)}
        for layer in layers if down else reversed(layers):
            keys = {}
            for cell in layer:
                near = cell.above if down else cell.below
                keys[id(cell)] = (
                    sum(index[id(neighbour)] for neighbour in near) / len(near) if near else index[id(cell)]
                )
            layer.sort(key=lambda cell: keys[id(cell)])
            index.update((id(cell), k) for k, cell in enumerate(layer))


def _set_coordinates(layers: Sequence[list[_Cell]]) -> None:
    """Give each cell its coordinates: near its neighbours, without overlap."""
    y = 0.0
    for layer in layers:
        x = 0.0
        for cell in layer:
            cell.x, cell.y = x + cell.width / 2, y
            x += cell.width + _GAP_X
        tallest = max((cell.height for cell in layer), default=0)
        for cell in layer:
            cell.x -= x / 2
            if cell.box is None:
                cell.height = tallest
        y += tallest + _GAP_Y
    for sweep in range(_SWEEPS):
        for layer in layers if sweep % 2 == 0 else reversed(layers):
            _near_neighbours(layer, above=sweep % 2 == 0)


def _near_neighbours(layer: Sequence[_Cell], *, above: bool) -> None:
    """Move the cells of a layer towards the mean of their neighbours, in their order."""
    centres = []
    for cell in layer:
        near = cell.above if above else cell.below
        centres.append(sum(neighbour.x for neighbour in near) / len(near) if near else cell.x)
    edge = float("-inf")
    for cell, x in zip(layer, centres, strict=True):
        cell.x = max(x, edge + cell.width / 2)
        edge = cell.x + cell.width / 2 + _GAP_X
    shift = sum(x - cell.x for cell, x in zip(layer, centres, strict=True)) / max(len(layer), 1)
    for cell in layer:
        cell.x += shift


def _svg(
    boxes: Sequence[Box], cells: Sequence[_Cell], layers: Sequence[list[_Cell]], shapes: Mapping[Entry, Shape]
) -> str:
    everything = [cell for layer in layers for cell in layer]
    min_x = min(cell.x - cell.width / 2 for cell in everything) - _PADDING
    width = max(cell.x + cell.width / 2 for cell in everything) + _PADDING - min_x
    height = max(cell.y + cell.height for cell in everything) + 2 * _PADDING
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="{min_x:.1f} {-_PADDING} {width:.1f} {height:.1f}" style="max-width:100%;height:auto" '
        f'font-family="system-ui,sans-serif" font-size="11.5">'
    ]
    for cell in cells:
        parts += [f'<path d="{path}" fill="none" stroke="{_EDGE}"/>' for path in _arrows(cell)]
    for cell in cells:
        if cell.above:
            parts.append(
                f'<path d="M{cell.x - 3.5:.1f} {cell.y - 7:.1f}h7L{cell.x:.1f} {cell.y:.1f}z" fill="{_EDGE}"/>'
            )
    for cell in cells:
        assert cell.box is not None
        box = boxes[cell.box]
        x, radius = cell.x - cell.width / 2, cell.height / 2 if box.kind == "null" else 4
        details = "\n".join(_detail(node, shapes) for node in box.nodes[:40])
        more = f"\n… and {len(box.nodes) - 40} more" if len(box.nodes) > 40 else ""
        parts.append(
            f"<g><title>{html.escape(details + more)}</title>"
            f'<rect x="{x:.1f}" y="{cell.y:.1f}" width="{cell.width:.1f}" height="{cell.height:.1f}" rx="{radius:.1f}" '
            f'fill="{colour_of(box.kind)}" stroke="{_EDGE}"/>'
        )
        for k, line in enumerate(cell.lines):
            weight = ' font-weight="600"' if k == 0 else ""
            baseline = cell.y + _PADDING + (k + 0.75) * _LINE
            parts.append(
                f'<text x="{cell.x:.1f}" y="{baseline:.1f}" text-anchor="middle" fill="{_TEXT}"{weight}>'
                f"{html.escape(line)}</text>"
            )
        parts.append("</g>")
    return "\n".join([*parts, "</svg>"]) + "\n"


def _arrows(cell: _Cell) -> list[str]:
    """Return the paths from a box to the boxes that read it."""
    paths = []
    for lower in cell.below:
        x, y = cell.x, cell.y + cell.height
        path = f"M{x:.1f} {y:.1f}"
        while True:
            middle = (y + lower.y) / 2
            path += f"C{x:.1f} {middle:.1f} {lower.x:.1f} {middle:.1f} {lower.x:.1f} {lower.y:.1f}"
            x, y = lower.x, lower.y + lower.height
            if lower.box is not None:
                break
            path += f"V{y:.1f}"
            lower = lower.below[0]
        paths.append(path)
    return paths


def _detail(node: Node, shapes: Mapping[Entry, Shape]) -> str:
    """Return a line about a node, for the box's tooltip."""
    shape = shapes.get(Entry(node))
    kind = "input" if node.op is None else node.op.name
    return f"{kind} {node.name}" + ("" if shape is None else f": {' x '.join(map(str, shape)) or 'scalar'}")


slots.DRAW_SYMBOL.fill(draw)
