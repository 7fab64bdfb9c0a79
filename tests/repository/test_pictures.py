"""Pictures of the documents show what their scripts would draw now, and each is shown by a document.

A picture stores what it was drawn from (``docs/picture_source.py``); figures that a clock measures are not compared.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.repository.test_documents import documents
from tests.support.scripts import script

IMAGES = Path(__file__).parents[2] / "docs" / "images"
TESTED = {
    "engine-pipeline.svg": "tests/engine/test_pipeline_example.py",
    "layers.svg": "tests/repository/test_imports.py",
    "var-states.svg": "tests/engine/test_states_picture.py",
}
"""Pictures that another test compares."""
TORCH = {"torch-gpt.svg": "GPT", "torch-vit.svg": "ViT", "torch-unet.svg": "U-Net", "torch-resnet50.svg": "ResNet-50"}
"""Pictures of PyTorch steps, whose figures are measured, and the rows of the table next to them."""


def source_of(name: str) -> str:
    """Return what a picture was drawn from."""
    text: str = script("picture_source").read_source(IMAGES / name)
    return text


def test_pictures_of_plans_and_pages_are_fresh() -> None:
    """Figures of plans, and templates of pages, are those from which the pictures were drawn."""
    now = script("draw_plans").sources()
    assert {name: source_of(name) for name in now} == now, "run python docs/draw_plans.py and docs/draw_training.py"


def test_the_picture_of_overlap_is_fresh() -> None:
    """Two steps on the simulated clock take the time, and run the work, that the picture shows."""
    drawing = script("draw_overlap")
    assert source_of("overlap.svg") == drawing.source(drawing.two_steps()), "run python docs/draw_overlap.py"


@pytest.mark.parametrize("name", TORCH)
def test_a_pytorch_picture_has_the_figures_of_its_table(name: str) -> None:
    """A curve ends at the table's peak without a budget, and at its smallest budget and time."""
    table = (IMAGES.parent / "pytorch.md").read_text(encoding="utf-8")
    pattern = rf"^\| {TORCH[name]}\b[^|]*\| ([\d.]+) \|.*\n(?:\| \|.*\n)*?\| \| \| ([\d.]+), .*\| ([\d.]+) % \|$"
    rows = re.search(pattern, table, re.MULTILINE)
    assert rows is not None
    plain, smallest, more = rows.groups()
    drawn, ends = source_of(name).split(" MiB, ")
    assert float(drawn) == pytest.approx(float(plain), rel=1e-3)  # the plan has another order than the plain step
    assert ends == f"smallest {smallest} MiB for {more} % more time", "draw it again: python docs/draw_torch.py"


def test_the_roofline_has_the_words_of_its_script(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stored picture has the legend and notes that ``bench/roofline.py`` draws; its points are measured."""
    monkeypatch.syspath_prepend(IMAGES.parents[1] / "bench")
    import roofline

    monkeypatch.delitem(sys.modules, "roofline")
    stored = (IMAGES / "roofline.svg").read_text(encoding="utf-8")
    networks = set(re.findall(r"<title>(\w+) [^<]*: \d+ GFLOP/s", stored))
    drawn = roofline.draw([roofline.Pass(one, "a", "data", 10.0, 1.0, 1.0) for one in networks], 2.0, 1.0, "")
    words = {re.sub(r"[\d.]+", "", text) for text in re.findall(r"<text[^>]*>([A-Za-z][^<]*)</text>", drawn)}
    assert len(networks) >= 4
    assert words <= {re.sub(r"[\d.]+", "", text) for text in re.findall(r"<text[^>]*>([^<]*)</text>", stored)}


def test_every_picture_is_shown_and_compared() -> None:
    """Each file of docs/images is in a document, and a test of this file or of :data:`TESTED` compares it."""
    pages = "".join(page.read_text(encoding="utf-8") for page in documents())
    names = {path.name for path in IMAGES.iterdir()}
    assert {name for name in names if f"images/{name})" not in pages} == set()
    assert names == {*TESTED, *TORCH, *script("draw_plans").sources(), "overlap.svg", "roofline.svg"}
    assert all((IMAGES.parents[1] / test).exists() for test in TESTED.values())


def test_a_stored_source_is_read_again(tmp_path: Path) -> None:
    """A text is read from a PNG and an SVG as it was stored; a picture without one gives no text."""
    sources = script("picture_source")
    for name in ("plan-page.png", "var-states.svg"):
        copy = tmp_path / name
        copy.write_bytes((IMAGES / name).read_bytes())
        before = sources.read_source(copy)
        sources.write_source(copy, "a <new> text, 1")
        assert sources.read_source(copy) == "a <new> text, 1"
        assert before == source_of(name)
