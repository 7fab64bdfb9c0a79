"""Pictures of networks: complete, without overlapping boxes, with arrows that lead down, and collapsed if large."""

from __future__ import annotations

import random
import re
import xml.etree.ElementTree as ElementTree
from itertools import combinations
from pathlib import Path

import pytest

import weftplan as mx
from weftplan.report.network_boxes import MAX_BOXES, boxes_of
from weftplan.report.network_svg import draw
from weftplan.symbol import topological_order

SVG = "{http://www.w3.org/2000/svg}"


def rectangles(svg: str) -> list[tuple[float, float, float, float]]:
    """Parse a picture as XML and return (left, top, right, bottom) of each box."""
    results = []
    for one in ElementTree.fromstring(svg).iter(f"{SVG}rect"):
        x, y, width, height = (float(one.attrib[key]) for key in ("x", "y", "width", "height"))
        results.append((x, y, x + width, y + height))
    return results


def random_network(seed: int, size: int) -> mx.sym.Symbol:
    """Return a random graph of ``size`` nodes; each node reads one to four earlier nodes."""
    draw_from = random.Random(seed)
    nodes = [mx.sym.Variable("data"), mx.sym.Variable("other")]
    for k in range(size):
        ends = [nodes[max(0, len(nodes) - draw_from.choice((1, 1, 2, 5, 40)))] for _ in range(draw_from.randint(1, 4))]
        nodes.append(mx.sym.add_n(*ends, name=f"n{k}") if len(ends) > 1 else mx.sym.relu(ends[0], name=f"n{k}"))
    return mx.sym.Group([nodes[-1], *draw_from.sample(nodes[2:], 2)])


NETWORKS = {
    **{name: lambda name=name: mx.models.get(name) for name in mx.models.names()},
    **{f"random {seed}": lambda seed=seed: random_network(seed, 15 * (seed + 1) ** 2) for seed in range(5)},
    "a variable": lambda: mx.sym.Variable("x"),
    "two outputs": lambda: mx.sym.Group([mx.sym.relu(mx.sym.Variable("x"), name="r"), mx.sym.Variable("y")]),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_boxes_hold_every_operator_once(name: str) -> None:
    """There are at most 60 boxes, each operator is in one box, and boxes read earlier boxes only."""
    net = NETWORKS[name]()
    boxes = boxes_of(net)
    assert 0 < len(boxes) <= MAX_BOXES
    place = {node: k for k, box in enumerate(boxes) for node in box.nodes}
    nodes = topological_order(net.entries)
    assert sum(len(box.nodes) for box in boxes) == len(place)
    assert {node for node in nodes if node.op is not None} <= place.keys()
    for node in nodes:
        for entry in node.inputs:
            if node in place and entry.node in place and place[node] != place[entry.node]:
                assert place[entry.node] in boxes[place[node]].inputs
    assert all(second < k for k, box in enumerate(boxes) for second in box.inputs)


@pytest.mark.parametrize("name", NETWORKS)
def test_boxes_do_not_overlap_and_arrows_lead_down(name: str) -> None:
    """All boxes are inside the picture and do not overlap, and each arrow ends below its start."""
    svg = draw(NETWORKS[name]()).svg
    boxes = rectangles(svg)
    left, top, width, height = map(float, ElementTree.fromstring(svg).attrib["viewBox"].split())
    assert all(a[0] >= left and a[1] >= top and a[2] <= left + width and a[3] <= top + height for a in boxes)
    for a, b in combinations(boxes, 2):
        assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1], (a, b)
    for path in re.findall(r'<path d="M([^"]*)" fill="none"', svg):
        numbers = [float(one) for one in re.findall(r"-?\d+\.\d+", path)]
        assert numbers[1] < numbers[-1]


def test_layers_are_collapsed_step_by_step() -> None:
    """Large networks are collapsed: first layers with the operators after them, then branches, then equal blocks."""
    assert len(boxes_of(mx.models.get("lenet"))) == 12  # not collapsed
    first = boxes_of(mx.models.get("resnet18"))[1]
    assert dict(first.kinds) == {"Convolution": 1, "BatchNorm": 1, "Activation": 1, "Pooling": 1}
    blocks = boxes_of(mx.models.get("resnet50"))
    assert dict(blocks[3].kinds) == {"Convolution": 3, "BatchNorm": 3, "Activation": 3, "elemwise_add": 1}
    deep = boxes_of(mx.models.get("resnet152"), max_boxes=30)
    assert max(box.repeats for box in deep) == 35
    assert "35 times" in draw(mx.models.get("resnet152"), max_boxes=30).svg


def test_shapes_and_names_are_shown_and_escaped() -> None:
    """Boxes show inferred shapes; names are escaped; shapes that do not fit are left out."""
    net = mx.sym.FullyConnected(mx.sym.Variable("<a&b>"), num_hidden=7, name="fc")
    svg = draw(net, {"<a&b>": (2, 3)}).svg
    assert "2 x 7" in svg
    assert "&lt;a&amp;b&gt;" in svg
    assert "fc_weight" not in svg
    rectangles(svg)
    assert " x " not in draw(mx.models.get("lenet"), {"data": (2, 3)}).svg  # shapes that do not fit are left out


def test_long_chains_are_drawn() -> None:
    """A chain of 20,000 nodes gives a picture below 100,000 characters, without recursion."""
    x = mx.sym.Variable("x")
    for _ in range(20_000):
        x = mx.sym.relu(x)
    assert len(draw(x).svg) < 100_000


def test_notebooks_show_symbols_networks_and_plans(tmp_path: Path) -> None:
    """Symbols and plot_network have ``_repr_svg_``, plan plots ``_repr_png_``; ``save`` writes the picture."""
    net = mx.models.get("lenet")
    assert net._repr_svg_() == draw(net).svg == mx.viz.plot_network(net)._repr_svg_()
    assert Path(draw(net).save(tmp_path / "net.svg")).read_text(encoding="utf-8") == draw(net).svg
    pytest.importorskip("matplotlib")
    assert net.plan(data=(2, 1, 28, 28)).plot()._repr_png_().startswith(b"\x89PNG")
