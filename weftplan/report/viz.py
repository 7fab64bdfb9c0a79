"""``mx.viz``: a network as a table of layers, and as DOT text with the picture of ``network_svg``."""

from __future__ import annotations

import os
import shutil
import subprocess
import warnings
import webbrowser
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from weftplan.errors import DTypeError, MXNetError, ShapeError
from weftplan.ops.core.params import p_dtype
from weftplan.ops.core.rules import is_known
from weftplan.ops.core.schema import Shape
from weftplan.report.network_boxes import by_entry, data_of, shown_nodes
from weftplan.report.network_svg import NetworkPicture, draw
from weftplan.report.node_labels import colour_of, label_of
from weftplan.support.array_types import DType, DTypeLike
from weftplan.support.atomic_files import write_text
from weftplan.symbol import Entry, Node, Symbol, topological_order
from weftplan.symbol.inference import solver as infer
from weftplan.symbol.node import warn

T = TypeVar("T")
Fact = TypeVar("Fact")


def print_summary(
    symbol: Symbol,
    shape: Mapping[str, Shape] | None = None,
    line_length: int = 120,
    positions: tuple[float, ...] = (0.44, 0.64, 0.74, 1.0),
    *,
    echo: Callable[[str], None] = print,
) -> int:
    """Print one line per layer: name and operator, output shape, parameters, previous layers. Return the parameters.

    Auxiliary states, such as moving statistics, are no parameters.

    Args:
        shape: shapes of the inputs, by name; without shapes, the columns that need them are empty.
        positions: the end of each column, as a fraction of ``line_length``.
        echo: called with every line.

    Raises:
        ShapeError: ``shape`` is given but some shape cannot be inferred from it.
    """
    nodes = topological_order(symbol.entries)
    shapes = _output_shapes(symbol, shape)
    inputs, data = set(shape or ()), data_of(nodes)
    stops = [int(line_length * p) for p in positions]
    _row(("Layer (type)", "Output Shape", "Param #", "Previous Layer"), stops, "=" * line_length, echo)
    total = 0
    counted: set[Node] = set()
    for node in nodes:
        if node.op is None and node.name not in inputs and node not in data:
            continue
        parameters = [
            e.node for e in node.inputs if e.node.op is None and e.node.name not in inputs and e.node not in data
        ]
        states = [node.inputs[k].node for k in (node.op.mutated(node.params) if node.op is not None else ())]
        fresh = [n for n in dict.fromkeys(parameters) if n not in counted and not _is_label(node, n)]
        fresh = [n for n in fresh if n not in states]
        counted.update(fresh)
        count = sum(_size(shapes.get(Entry(n))) for n in fresh)
        total += count
        previous = [e.node.name for e in node.inputs if e.node not in parameters and not _is_label(node, e.node)]
        kind = "null" if node.op is None else node.op.name
        output = shapes.get(Entry(node))
        _row(
            (f"{node.name} ({kind})", "" if output is None else "x".join(map(str, output[1:])), str(count), *previous),
            stops,
            "_" * line_length,
            echo,
        )
    echo(f"Total params: {total}")
    echo("_" * line_length)
    return total


class Dot:
    """A picture of a network, and its text in the DOT language. Jupyter shows the picture.

    Graphviz is needed only by :meth:`render` for other formats than SVG.

    Attributes:
        source: the text.
        title: the name of files.
        format: the format of :meth:`render`.
    """

    def __init__(self, source: str, title: str, picture: NetworkPicture, format: str = "pdf") -> None:
        self.source, self.title, self.format = source, title, format
        self._picture = picture

    def save(self, filename: str | None = None) -> str:
        """Write the text to ``<title>.gv`` or to ``filename``; return the name."""
        name = filename or f"{self.title}.gv"
        write_text(name, self.source)
        return name

    def render(
        self,
        filename: str | None = None,
        directory: str | None = None,
        view: bool = False,
        cleanup: bool = False,
        format: str | None = None,
    ) -> str:
        """Write the text to ``filename`` and a picture next to it, as Graphviz's objects do; return the picture's name.

        Args:
            filename: the name of the text; the picture's name has the format as an additional suffix.
            directory: the folder of both.
            view: open the picture.
            cleanup: remove the text.
            format: of the picture, such as ``svg``, ``pdf`` or ``png``; by default :attr:`format`. Without Graphviz
                the picture is an SVG file.

        Raises:
            MXNetError: Graphviz cannot draw the picture.
        """
        text = os.path.join(directory or "", filename or f"{self.title}.gv")
        os.makedirs(os.path.dirname(text) or ".", exist_ok=True)
        self.save(text)
        kind, program = format or self.format, shutil.which("dot")
        if program is None:
            if kind != "svg":
                warn(f"Graphviz is not installed, so the picture is an SVG file and not {kind}")
            name = self._picture.save(f"{text}.svg")
        else:
            name = f"{text}.{kind}"
            process = subprocess.run(
                [program, f"-T{kind}", "-o", name, text], capture_output=True, text=True, check=False
            )
            if process.returncode:
                raise MXNetError(f"{program} cannot draw {text} as {kind}: {process.stderr.strip()}")
        if cleanup:
            os.unlink(text)
        if view:
            webbrowser.open(Path(name).resolve().as_uri())
        return name

    def view(self, filename: str | None = None, directory: str | None = None, cleanup: bool = False) -> str:
        """Write the picture as :meth:`render` does, and open it; return its name.

        Args:
            filename: name of the picture; None: that of the graph.
            directory: folder of the picture; None: that of the file name.
            cleanup: as for :meth:`render`.
        """
        return self.render(filename, directory, view=True, cleanup=cleanup)

    def __str__(self) -> str:
        return self.source

    def _repr_svg_(self) -> str:
        return self._picture.svg


def plot_network(
    symbol: Symbol,
    title: str = "plot",
    save_format: str = "pdf",
    shape: Mapping[str, Shape] | None = None,
    dtype: Mapping[str, DTypeLike] | None = None,
    node_attrs: Mapping[str, str] | None = None,
    hide_weights: bool = True,
) -> Dot:
    """Return a picture of the graph, with its DOT text: a box per operator, an arrow per entry.

    Nodes that share a name cause a warning, because a reader that goes by names sees cycles that do not exist.

    Args:
        save_format: the format of :meth:`Dot.render`.
        shape, dtype: of the inputs, by name; arrows then have shapes and dtypes.
        node_attrs: more Graphviz attributes for every box.
        hide_weights: leave out variables that are parameters of a layer. The picture of a notebook always does.

    Raises:
        ShapeError: ``shape`` is given but a shape cannot be inferred from it.
        DTypeError: ``dtype`` is given but a dtype cannot be inferred from it.

    >>> from weftplan import symbol as sym
    >>> print(plot_network(sym.exp(sym.Variable("a"), name="e"), shape={"a": (2, 3)}))
    digraph "plot" {
      node [fixedsize="false", shape="box", style="filled"];
      n0 [label="a", fillcolor="#8dd3c7", shape="oval"];
      n1 [label="exp\\ne", fillcolor="#fccde5"];
      n1 -> n0 [dir="back", arrowtail="open", label="2x3"];
    }
    """
    nodes = topological_order(symbol.entries)
    shapes, dtypes = _output_shapes(symbol, shape), _output_dtypes(symbol, dtype)
    repeated = [name for name, count in Counter(node.name for node in nodes).items() if count > 1]
    if repeated:
        names = ", ".join(repeated)
        # The first words are those that existing scripts expect.
        text = (
            f"There are multiple variables with the same name in your graph: {names}; give each layer a name of its own"
        )
        warnings.warn(text, RuntimeWarning, stacklevel=2)
    number = {node: i for i, node in enumerate(nodes)}
    style = {"shape": "box", "fixedsize": "false", "style": "filled", **(node_attrs or {})}
    lines = [f'digraph "{_escape(title)}" {{', f"  node [{_attributes(dict(sorted(style.items())))}];"]
    shown = dict.fromkeys(shown_nodes(symbol) if hide_weights else nodes)
    for node in shown:
        kind = "null" if node.op is None else node.op.name
        look = {"label": label_of(node), "fillcolor": colour_of(kind)}
        if node.op is None:
            look["shape"] = "oval"
        lines.append(f"  n{number[node]} [{_attributes(look)}];")
    for node in shown:
        for entry in node.inputs:
            if entry.node not in shown:
                continue
            arrow = {"dir": "back", "arrowtail": "open"}
            key = Entry(entry.node, entry.index)
            parts = [
                *(["x".join(map(str, shapes[key]))] if key in shapes else []),
                *([str(dtypes[key])] if key in dtypes else []),
            ]
            if parts:
                arrow["label"] = " ".join(parts)
            lines.append(f"  n{number[node]} -> n{number[entry.node]} [{_attributes(arrow)}];")
    return Dot("\n".join([*lines, "}"]), title, draw(symbol, shape), save_format)


def _inferred(
    symbol: Symbol,
    name: str,
    inputs: Mapping[str, Fact] | None,
    infer_values: Callable[[list[Node], Mapping[str, Fact]], Sequence[T | None]],
    error: type[MXNetError],
) -> dict[Entry, T]:
    """Return the shape or dtype, called ``name``, of every entry; empty if ``inputs`` is None.

    Raises:
        MXNetError: of the class ``error``: no variable has a name in ``inputs``, or a value cannot be inferred.
    """
    if inputs is None:
        return {}
    nodes = topological_order(symbol.entries)
    unknown = sorted(set(inputs) - {node.name for node in nodes if node.op is None})
    if unknown:
        raise error(f"no variable is called {', '.join(unknown)}")
    known: dict[Entry, T] = {}
    for entry, value in by_entry(symbol, infer_values(nodes, inputs)).items():
        if value is None or (isinstance(value, tuple) and not is_known(value)):
            raise error(f"the {name} of {entry.node.name!r} cannot be inferred from {dict(inputs)}; give more {name}s")
        known[entry] = value
    return known


def _output_shapes(symbol: Symbol, shapes: Mapping[str, Shape] | None) -> dict[Entry, Shape]:
    return _inferred(symbol, "shape", shapes, infer.infer_shapes, ShapeError)


def _output_dtypes(symbol: Symbol, dtypes: Mapping[str, DTypeLike] | None) -> dict[Entry, DType]:
    def infer_dtypes(nodes: list[Node], inputs: Mapping[str, DTypeLike]) -> Sequence[DType | None]:
        return infer.infer_dtypes(nodes, {name: p_dtype(dtype) for name, dtype in inputs.items()})

    return _inferred(symbol, "dtype", dtypes, infer_dtypes, DTypeError)


def _is_label(node: Node, variable: Node) -> bool:
    """Return whether a variable is the label of a loss."""
    return (
        node.op is not None
        and node.op.loss
        and any(e.node is variable for e in node.inputs[1:])
        and variable.op is None
    )


def _size(shape: Shape | None) -> int:
    size = 1
    for dim in shape or (0,):
        size *= dim
    return size


def _row(cells: tuple[str, ...], stops: list[int], rule: str, echo: Callable[[str], None]) -> None:
    """Return one table row; extra cells go under the last column, one per line."""
    front, remaining = cells[:4], cells[4:]
    line = ""
    for cell, stop in zip(front, stops, strict=False):
        line = (line + cell)[: stop - 1].ljust(stop)
    echo(line.rstrip())
    for cell in remaining:
        echo(" " * stops[2] + cell)
    echo(rule)


def _escape(text: object) -> str:
    return str(text).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _attributes(items: Mapping[str, str]) -> str:
    return ", ".join(f'{key}="{_escape(value)}"' for key, value in items.items())
