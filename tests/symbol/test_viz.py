"""Summaries and pictures of networks, and the namespaces of operators."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from weftplan import symbol as sym
from weftplan.errors import DTypeError, MXNetError, ShapeError, UnknownOperatorError
from weftplan.report.viz import plot_network, print_summary


def net() -> sym.Symbol:
    """Return data -> fc1(8) -> relu -> fc2(2) -> softmax."""
    x = sym.FullyConnected(sym.Variable("data"), num_hidden=8, name="fc1")
    x = sym.FullyConnected(sym.Activation(x, act_type="relu", name="relu"), num_hidden=2, name="fc2")
    return sym.SoftmaxOutput(x, name="softmax")


def test_summary_counts_parameters() -> None:
    """``print_summary`` counts weights and biases, but not data and label: 8*3+8 + 2*8+2 = 50."""
    lines: list[str] = []
    assert print_summary(net(), {"data": (4, 3)}, echo=lines.append) == 50
    text = "\n".join(lines)
    assert "fc1 (FullyConnected)" in text
    assert next(line for line in lines if line.startswith("fc1")).split() == [
        "fc1",
        "(FullyConnected)",
        "8",
        "32",
        "data",
    ]
    assert "Total params: 50" in text
    assert "label" not in text


def test_shared_weights_count_once() -> None:
    """A weight that two layers share is counted once."""
    w, x = sym.Variable("w"), sym.Variable("x")
    for i in range(2):
        x = sym.FullyConnected(x, w, num_hidden=3, no_bias=True, name=f"fc{i}")
    assert print_summary(x, {"x": (1, 3)}, echo=lambda line: None) == 9


def test_previous_layers() -> None:
    """The summary lists the data and previous layers as sources of a layer, but no shared weight."""
    w, x = sym.Variable("w"), sym.Variable("x")
    for i in range(2):
        x = sym.FullyConnected(x, w, num_hidden=3, no_bias=True, name=f"fc{i}")
    for shape in (None, {"x": (1, 3)}):
        lines: list[str] = []
        print_summary(x, shape, echo=lines.append)
        assert [line.split()[-1] for line in lines if line.startswith("fc")] == ["x", "fc0"]


def test_picture(tmp_path: Path) -> None:
    """A picture has a box for each operator and shapes on its arrows, hides weights by default, and can be saved."""
    dot = plot_network(net(), title="mine", shape={"data": (4, 3)})
    assert "fc1_weight" not in dot.source
    assert 'label="4x3"' in dot.source
    assert "num_hidden=8" in dot.source
    assert "fc1_weight" in plot_network(net(), hide_weights=False).source
    assert Path(dot.save(str(tmp_path / "x.gv"))).read_text() == str(dot)


def test_picture_with_dtypes() -> None:
    """Arrows show dtypes, with or without shapes; an unknown name and an unknown dtype raise errors."""
    narrow = sym.Cast(net(), dtype="float16")
    assert 'label="float32"' in plot_network(sym.exp(narrow), dtype={"data": np.float32}).source
    both = plot_network(sym.exp(narrow), shape={"data": (4, 3)}, dtype={"data": "float32"}).source
    assert 'label="4x3 float32"' in both
    assert 'label="4x2 float16"' in both
    with pytest.raises(DTypeError, match="no variable is called dta"):
        plot_network(net(), dtype={"dta": "float32"})
    with pytest.raises(DTypeError, match="cannot be inferred"):
        plot_network(sym.identity(sym.Variable("a")), dtype={})


def test_picture_of_nodes_with_equal_names() -> None:
    """Nodes with equal names give one warning at the caller's line, and have separate boxes."""
    twice = sym.FullyConnected(
        sym.FullyConnected(sym.Variable("data"), num_hidden=3, name="fc"), num_hidden=2, name="fc"
    )
    with pytest.warns(RuntimeWarning, match="same name in your graph: fc_weight, fc_bias, fc;") as caught:
        dot = plot_network(twice)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert dot.source.count("fillcolor") == 3


def test_bad_shapes() -> None:
    """An unknown name and shapes that are not sufficient raise a ShapeError."""
    with pytest.raises(ShapeError, match="no variable is called dta"):
        print_summary(net(), {"dta": (1, 2)})
    with pytest.raises(ShapeError, match="cannot be inferred"):
        plot_network(net(), shape={"softmax_label": (4,)})


def test_namespaces() -> None:
    """``sym._internal`` has every operator, and other namespaces raise an error for unknown operators."""
    a = sym.Variable("a")
    assert sym._internal._plus(a, a).entries[0].node.op is sym.elemwise_add(a, a).entries[0].node.op
    with pytest.raises(UnknownOperatorError, match=r"mx\.sym\.linalg has no operator 'nope'"):
        sym.linalg.nope  # noqa: B018


def test_plot_network_has_the_arguments_of_mxnet():
    """``plot_network`` takes positional arguments in MXNet's order: symbol, title, save_format, shape."""
    dot = plot_network(net(), "mine", "svg", {"data": (4, 3)})
    assert (dot.title, dot.format) == ("mine", "svg")
    assert 'label="4x3"' in dot.source


def test_render_writes_the_text_and_a_picture(tmp_path, monkeypatch):
    """Without Graphviz ``render`` writes SVG, and warns if another format was requested.

    ``view`` also opens the picture, and ``cleanup`` removes the text.
    """
    monkeypatch.setenv("PATH", "")
    opened = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    dot = plot_network(net(), "mine", save_format="svg")
    path = Path(dot.render(directory=tmp_path / "out"))
    assert path == tmp_path / "out" / "mine.gv.svg"
    assert path.read_text(encoding="utf-8") == dot._repr_svg_()
    assert (tmp_path / "out" / "mine.gv").read_text() == dot.source
    with pytest.warns(UserWarning, match="Graphviz is not installed, so the picture is an SVG file and not pdf"):
        assert dot.render("x", tmp_path, cleanup=True, format="pdf") == str(tmp_path / "x.svg")
    assert not (tmp_path / "x").exists()
    assert dot.view("y", tmp_path) == str(tmp_path / "y.svg")
    assert opened == [(tmp_path / "y.svg").as_uri()]


def test_render_calls_graphviz(tmp_path, monkeypatch):
    """``render`` runs Graphviz if it is installed, and raises an error with Graphviz's message if Graphviz fails."""
    program = tmp_path / "dot"
    program.write_text('#!/bin/sh\ntest "$1" = -Tbad && { echo "no format bad" >&2; exit 1; }\necho "$@" > "$3"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    name = plot_network(net(), "mine").render(directory=tmp_path)
    assert name == str(tmp_path / "mine.gv.pdf")
    assert Path(name).read_text().split() == ["-Tpdf", "-o", name, str(tmp_path / "mine.gv")]
    with pytest.raises(MXNetError, match=r"cannot draw .* as bad: no format bad"):
        plot_network(net(), "mine").render(directory=tmp_path, format="bad")
