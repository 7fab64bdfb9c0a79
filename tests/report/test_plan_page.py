"""The HTML page and the picture of a plan: self-contained, complete, escaped, and interactive in a browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import weftplan as mx
from weftplan import models
from weftplan.device.amounts import amount
from weftplan.planner import MemoryPlan
from weftplan.planner.memory_plan import USES
from weftplan.report import plan_figures
from weftplan.report import plan_html as module

CHROMIUM = shutil.which("chromium")


def page_data(page: str) -> dict[str, Any]:
    """Return the data that the page's script reads."""
    match = re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.DOTALL)
    assert match is not None
    data: dict[str, Any] = json.loads(match.group(1))
    return data


@pytest.fixture(scope="module")
def plan() -> MemoryPlan:
    """Return the training plan of LeNet for a batch of 8."""
    actual: MemoryPlan = models.get("lenet").plan(models.input_shapes("lenet", 8))
    return actual


class _PageParser(HTMLParser):
    """A parser that collects the addresses that a page would load, and checks that its elements are closed.

    Attributes ``loads`` and ``open`` are the addresses and the stack of open elements.
    """

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Record addresses and the open element."""
        self.loads += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data", "action")]
        if tag not in ("meta", "input", "br", "link"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        """Check that the innermost open element is closed."""
        assert self.open.pop() == tag


def test_the_page_is_self_contained(plan: MemoryPlan) -> None:
    """The page is well formed, loads nothing and has no address of another host."""
    page = plan.to_html(title="lenet")
    parser = _PageParser()
    parser.feed(page)
    assert parser.loads == []
    assert parser.open == []
    assert not re.search(r"https?:|url\(|@import|import\s", page)
    assert not re.search(r"@[A-Z_]+@", page), "a placeholder was left"


def test_the_page_holds_every_buffer(plan: MemoryPlan) -> None:
    """The page has each buffer's facts, and the live bytes and peak of each device."""
    data = page_data(plan.to_html())
    bars = plan.bars()
    rows = [dict(zip(data["columns"], row, strict=True)) for row in data["rows"]]
    assert sorted(row["name"] for row in rows) == sorted(bar.name for bar in bars)
    by_name = {bar.name: bar for bar in bars}
    for row in rows:
        bar = by_name[row["name"]]
        assert (row["nbytes"], row["maker"], row["last_reader"], row["op"]) == (
            bar.nbytes,
            bar.maker,
            bar.last_reader,
            bar.op,
        )
        assert tuple(row["shape"]) == bar.shape
        assert 0 <= row["first"] < row["last"] <= data["steps"]
    (device,) = data["devices"]
    assert device["peak"] == plan.peak
    assert max(device["alive"]) == plan.lower_bound


def test_last_readers_are_the_graphs(plan: MemoryPlan) -> None:
    """The last reader of an output is the caller, of scratch its own node, of other results a later node."""
    bars = {bar.name: bar for bar in plan.bars()}
    assert bars["softmax_output"].last_reader == "(caller)"
    assert bars["fc1_output"].last_reader == "tanh3"
    assert bars["pool1_output"].last_reader.endswith("backward")
    scratch = [bar for bar in bars.values() if bar.kind == "workspace"]
    assert scratch
    assert all(bar.last_reader == bar.maker and bar.last == bar.first + 1 for bar in scratch)


def test_the_last_node_reads_too() -> None:
    """A buffer that is live to the last step, but is no output, has the last node as its last reader."""
    x = mx.sym.Variable("x")
    plan = mx.sym.tanh(mx.sym.exp(x, name="inner"), name="outer").plan({"x": (4,)}, train=False, enable_inplace=False)
    readers = {bar.name: bar.last_reader for bar in plan.bars()}
    assert readers == {"inner_output": "outer", "outer_output": "(caller)"}


def test_names_cannot_break_out_of_the_page() -> None:
    """Names with markup or with a placeholder of the template are escaped."""
    evil = "</script><script>alert(1)</script>@TITLE@"
    net = mx.sym.exp(mx.sym.tanh(mx.sym.Variable("x"), name=evil), name="b")
    page = net.plan({"x": (2,)}).to_html(title="<b>&")
    assert "alert(1)</script>" not in page
    assert evil in {row[0].removesuffix("_output") for row in page_data(page)["rows"]}
    assert "<title>&lt;b&gt;&amp;</title>" in page


def test_large_plans_show_the_largest_buffers(plan: MemoryPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the limit only the largest buffers are shown, with the number of the others."""
    monkeypatch.setattr(module, "MAX_BARS", 5)
    page = plan.to_html()
    shown = [row[module.COLUMNS.index("nbytes")] for row in page_data(page)["rows"]]
    assert shown == sorted((bar.nbytes for bar in plan.bars()), reverse=True)[:5]
    assert f"the {len(plan.bars()) - 5:,} smallest buffers are left out" in page


def test_several_devices(tmp_path: Path) -> None:
    """Each device has its peak and its buffers on the page; the picture is written, too."""
    with mx.AttrScope(ctx_group="a"):
        net = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=8, name="fc1")
    with mx.AttrScope(ctx_group="b"):
        net = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(net, num_hidden=4, name="fc2"), name="softmax")
    plan = net.plan({"data": (16, 8)}, group2ctx={"a": mx.cpu(0), "b": mx.cpu(1)})
    data = page_data(plan.to_html())
    assert [device["name"] for device in data["devices"]] == ["cpu(0)", "cpu(1)"]
    assert sum(device["peak"] for device in data["devices"]) == plan.peak
    assert {bar.device for bar in plan.bars(1)} == {"cpu(1)"}
    assert len(plan.bars(0)) + len(plan.bars(1)) == len(plan.bars())
    plan.plot(tmp_path / "two.png")
    assert (tmp_path / "two.png").read_bytes()[:4] == b"\x89PNG"


def test_the_picture_is_the_same_every_time(plan: MemoryPlan, tmp_path: Path) -> None:
    """The picture has a bar per buffer and three named lines, and its file is the same each time."""
    figure = plan.plot(title="lenet")
    (axes,) = figure.axes
    assert len(axes.collections[0].get_paths()) == len(plan.bars(0))
    assert {line.get_label().split()[0] for line in axes.lines[:3]} == {"bytes", "planned", "lower"}
    for name in ("a.png", "b.png"):
        plan.plot(tmp_path / name)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_an_empty_plan_has_a_page() -> None:
    """A plan without buffers gives a page without rows, and a picture."""
    plan = mx.sym.Variable("x").plan({"x": (3,)}, train=False)
    assert plan.peak == 0
    assert page_data(plan.to_html())["rows"] == []
    plan.plot()


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_the_page_in_a_browser(plan: MemoryPlan, tmp_path: Path) -> None:
    """In a browser the table lists, sorts and filters buffers; hovering, selecting, zooming and dragging work."""
    page = plan.to_html().replace(
        "</body>",
        """<script>
        const seen = {listed: document.querySelectorAll("#table tbody tr").length, painted: boxes.length,
                      first: document.querySelector("#table tbody td").textContent};
        document.querySelectorAll("#table th")[0].click();
        seen.sorted = document.querySelector("#table tbody td").textContent;
        const [x, y, w, h, row] = boxes[0], place = canvas.getBoundingClientRect();
        const at = {clientX: place.left + x + 3, clientY: place.top + y + 3, pointerId: 7, bubbles: true};
        canvas.dispatchEvent(new PointerEvent("pointermove", at));
        seen.detail = element("detail").textContent;
        canvas.dispatchEvent(new MouseEvent("click", at));
        seen.pinned = document.querySelector('#table tr[aria-selected="true"]').row === row;
        document.querySelectorAll("#table tbody tr")[4].click();
        seen.shown = pinned === document.querySelectorAll("#table tbody tr")[4].row;
        const wheel = new WheelEvent("wheel", {deltaY: -1, cancelable: true, clientX: place.left + 200});
        canvas.dispatchEvent(wheel);
        seen.trapped = wheel.defaultPrevented || view.to < steps;
        canvas.dispatchEvent(new WheelEvent("wheel", {deltaY: -1, ctrlKey: true, clientX: place.left + 200}));
        seen.zoomed = view.to - view.from < steps;
        canvas.dispatchEvent(new KeyboardEvent("keydown", {key: "PageUp"}));
        seen.taller = view.high - view.low < highest();
        const before = view.from;
        canvas.dispatchEvent(new PointerEvent("pointerdown", {...at, pointerType: "touch"}));
        canvas.dispatchEvent(new PointerEvent("pointermove", {...at, clientX: at.clientX - 40, pointerType: "touch"}));
        seen.dragged = view.from > before;
        canvas.dispatchEvent(new KeyboardEvent("keydown", {key: "Home"})); seen.whole = view.to === steps;
        seen.wide = document.documentElement.scrollWidth <= innerWidth;
        element("filter").value = "Pooling"; element("filter").dispatchEvent(new Event("input"));
        seen.filtered = document.querySelectorAll("#table tbody tr").length;
        seen.message = element("message").textContent;
        document.body.dataset.seen = JSON.stringify(seen);
        </script></body>""",
    )
    path = tmp_path / "plan.html"
    path.write_text(page)
    switches = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    assert CHROMIUM is not None
    done = subprocess.run(
        [
            CHROMIUM,
            *switches.split(),
            "--disable-component-update",
            "--disable-sync",
            f"--user-data-dir={tmp_path / 'profile'}",
            "--window-size=1200,900",
            "--dump-dom",
            path.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )
    match = re.search(r'data-seen="(.*?)"', done.stdout)
    assert match is not None, done.stderr[-2000:]
    seen = json.loads(match.group(1).replace("&quot;", '"').replace("&amp;", "&"))
    bars = plan.bars()
    pooling = [bar for bar in bars if "pooling" in " ".join(map(str, bar.as_dict().values())).lower()]
    assert seen["listed"] == seen["painted"] == len(bars)
    largest = max(bar.nbytes for bar in bars)
    assert seen["first"] in {bar.name for bar in bars if bar.nbytes == largest}
    assert seen["sorted"] == min((bar.name for bar in bars), key=str.lower)
    top = next(bar for bar in bars if bar.name == seen["first"])
    assert seen["detail"].startswith(top.name)
    assert f"{top.nbytes:,} bytes), {top.dtype} (" in seen["detail"]
    assert f"Made by {top.maker} ({top.op}) at step {top.first}" in seen["detail"]
    assert f"read last by {top.last_reader}, free from step {top.last}" in seen["detail"]
    expected = {"pinned", "shown", "zoomed", "taller", "dragged", "whole", "wide"}
    assert {name for name in expected if seen[name] is True} == expected
    assert seen["trapped"] is False
    assert 0 < seen["filtered"] == len(pooling) < len(bars)
    assert seen["message"].startswith(
        f"{len(pooling)} buffers, whose sizes add up to {amount(sum(bar.nbytes for bar in pooling))}"
    )


def test_every_figure_has_a_definition(plan: MemoryPlan) -> None:
    """Each figure on the page has its definition there, also for several devices and an optimizer."""
    shapes = models.input_shapes("lenet", 8)
    several = models.get("lenet").plan(shapes, context=[mx.sim(0), mx.sim(1)], optimizer="adam")
    for actual in (plan, several):
        for name, _ in plan_figures.facts(actual):
            assert len(plan_figures.meaning(name)) > 20
            assert plan_figures.meaning(name) in actual.to_html().replace("&#x27;", "'")


def test_what_memory_is_for() -> None:
    """Buffers are activations, gradients or scratch; under a budget also recomputed or spilled."""
    net, shapes = models.digits("resnet"), {"data": (16, 1, 8, 8)}
    plain = net.plan(shapes)
    uses = {bar.name: bar.use for bar in plain.bars()}
    assert uses["convolution0_output"] == "activations"
    assert uses["convolution7_backward (workspace)"] == "scratch"
    assert set(uses.values()) == {"activations", "gradients", "scratch"}
    budget = plain.total - plain.peak // 4
    tight = net.plan(shapes, budget=budget)
    assert {bar.name for bar in tight.bars() if bar.use == "recomputed"}
    moved = net.plan(shapes, budget=budget, context=mx.sim(0))
    assert {bar.name for bar in moved.bars() if bar.use == "spilled"}
    data = page_data(moved.to_html())
    assert {use for use, _ in data["uses"]} >= {bar.use for bar in moved.bars()}
    assert set(USES) <= set(module.USES)


def test_a_notebook_shows_the_page(plan: MemoryPlan) -> None:
    """A notebook shows the same page in a frame."""
    import html

    frame = plan._repr_html_()
    text = re.search(r'srcdoc="(.*?)" style', frame, re.DOTALL)
    assert text is not None
    assert page_data(html.unescape(text.group(1)))["rows"] == page_data(plan.to_html())["rows"]


@pytest.mark.stress
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1400, 800, 390])
def test_screenshots(plan: MemoryPlan, width: int, scheme: str, tmp_path: Path) -> None:
    """At three widths, in light and dark, bars and background have the colours of the scheme."""
    image = pytest.importorskip("PIL.Image")
    page = plan.to_html()
    dark = page.replace("@media (prefers-color-scheme: dark)", "@media all")
    path, shot = tmp_path / "plan.html", tmp_path / "shot.png"
    path.write_text(page if scheme == "light" else dark)
    assert CHROMIUM is not None
    subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={tmp_path}/p",
         f"--window-size={width},1000", f"--screenshot={shot}", path.as_uri()],
        capture_output=True, timeout=60, check=True,
    )  # fmt: skip
    pixels = image.open(shot).convert("RGB")
    colours = {color: count for count, color in pixels.getcolors(1 << 24)}
    blue, page_colour = {"light": ((0, 114, 178), (255, 255, 255)), "dark": ((61, 155, 216), (18, 22, 28))}[scheme]
    assert colours.get(blue, 0) > 0.02 * pixels.width * pixels.height
    assert colours[page_colour] > 0.1 * pixels.width * pixels.height
