"""Pictures of plans as files: reproducible, and with a complete legend."""

from __future__ import annotations

from pathlib import Path

import pytest

import weftplan as mx

pytest.importorskip("matplotlib")


@pytest.mark.parametrize("ending", ["svg", "SVG", "png", "pdf"])
def test_the_same_plan_gives_the_same_file(ending: str, tmp_path: Path) -> None:
    """Equal plans give equal files; as SVG another plan gives another file."""
    files = []
    for number in range(2):
        plan = mx.models.get("mlp").plan({"data": (8, 784)})
        path = tmp_path / f"{number}.{ending}"
        plan.plot(path)
        files.append(path.read_bytes())
    assert files[0] == files[1]
    if ending != "svg":
        return
    second = tmp_path / f"other.{ending}"
    mx.models.get("mlp").plan({"data": (9, 784)}).plot(second)
    assert second.read_bytes() != files[0]


def test_every_line_is_named() -> None:
    """Each line has its own look and is named in the legend, which is narrower than the picture."""
    plan = mx.models.get("lenet").plan(mx.models.input_shapes("lenet", 4))
    figure = plan.plot()
    (axes,) = figure.axes
    looks = {(line.get_color(), line.get_linestyle()) for line in axes.lines}
    assert len(looks) == len(axes.lines) == 4
    named = {text.get_text() for text in figure.legends[0].get_texts()}
    assert {line.get_label() for line in axes.lines} <= named
    assert figure.legends[0].get_window_extent().width < figure.bbox.width
