"""Draw the plans that the README and the documents show, and take screenshots of pages.

python docs/draw_plans.py            # images/*.png and plans/*.html; the screenshots need Chromium

Plans are those with NumPy's kernels, whose scratch memory is the same on every machine.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

from picture_source import IMAGES, write_source

from weftplan import models
from weftplan.device.amounts import amount
from weftplan.planner.memory_plan import MemoryPlan
from weftplan.report import page

DOCS = Path(__file__).parent
WINDOW = "1240,900"
POLICIES = {"resnet50": "off", "resnet50-mirror": "mxnet"}
"""Name of a drawn plan -> its policy of recomputation."""


def plans() -> Iterator[tuple[str, str, MemoryPlan]]:
    """Yield (name, title, plan) of each drawn plan."""
    for name, recompute in POLICIES.items():
        title = "training resnet50, batch 32, float32" + (", with mirroring" if recompute != "off" else "")
        shapes = models.input_shapes("resnet50", 32)
        plan = models.get("resnet50").plan(shapes, recompute=recompute, kernels="numpy")
        yield name, title, replace(plan, pass_seconds={})


def pages() -> dict[Path, str]:
    """Return {path: text} of the pages of plans."""
    return {DOCS / "plans" / f"{name}.html": plan.to_html(title=title) for name, title, plan in plans()}


def source(title: str, plan: MemoryPlan) -> str:
    """Return the figures that a picture of a plan shows, as one line."""
    return (
        f"{title}: {len(plan.bars())} buffers, {amount(plan.unshared_bytes)} without sharing, planned peak "
        f"{amount(plan.peak)}, lower bound {amount(plan.lower_bound)}"
    )


def page_source(template: str) -> str:
    """Return the name and digest of a page's template, whose figures are measured."""
    return f"{template} {sha256(page.filled(template, {}, {}).encode()).hexdigest()[:16]}"


def sources() -> dict[str, str]:
    """Return {file name of a picture: what it would be drawn from now}, for the pictures of plans and pages."""
    (_, title, plan), (_, mirror_title, mirror) = plans()
    return {
        "resnet50-plan.png": source(title, plan),
        "resnet50-plan-mirror.png": source(mirror_title, mirror),
        "plan-page.png": f"{source(title, plan)}; {page_source('plan_page.html')}",
        "lanes-page.png": page_source("lanes_page.html"),
        "training-page.png": page_source("training_page.html"),
    }


def draw() -> None:
    """Write every picture and page."""
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
    for name, title, plan in plans():
        picture = IMAGES / f"{name.replace('resnet50', 'resnet50-plan')}.png"
        plan.plot(picture, title=title)
        write_source(picture, sources()[picture.name])
    screenshot(DOCS / "plans" / "resnet50.html", "plan-page.png")
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [sys.executable, "-m", "weftplan", "train", "--epochs", "2", "--report", folder],
            check=True,
            capture_output=True,
        )
        screenshot(Path(folder) / "lanes.html", "lanes-page.png")


def screenshot(page: Path, name: str, window: str = WINDOW) -> None:
    """Save a picture of a page as ``images/<name>`` if Chromium is installed."""
    browser, image = shutil.which("chromium"), IMAGES / name
    if browser is None:
        print(f"no Chromium: {name} stays as it is")
        return
    with tempfile.TemporaryDirectory() as profile:
        switches = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={profile}"]
        subprocess.run(
            [browser, *switches, f"--window-size={window}", f"--screenshot={image}", page.resolve().as_uri()],
            check=True,
            capture_output=True,
            timeout=60,
        )
    write_source(image, sources()[name])


if __name__ == "__main__":
    draw()
