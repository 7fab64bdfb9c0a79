"""Draw the plans that the README and the documents show, and take screenshots of pages.

python docs/draw_plans.py            # images/*.png, images/*.svg and plans/*.html; the screenshots need Chromium
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from weftplan import models

DOCS = Path(__file__).parent
WINDOW = "1240,900"


def draw() -> None:
    """Write every picture and page."""
    shapes = models.input_shapes("resnet50", 32)
    for name, recompute in (("resnet50-plan", "off"), ("resnet50-plan-mirror", "mxnet")):
        plan = models.get("resnet50").plan(shapes, recompute=recompute)
        title = "training resnet50, batch 32, float32" + (", with mirroring" if recompute != "off" else "")
        plan.plot(DOCS / "images" / f"{name}.png", title=title)
        page = DOCS / "plans" / f"{name.replace('-plan', '')}.html"
        page.write_text(plan.to_html(title=title), encoding="utf-8")
    small = models.digits("resnet").plan(data=(64, 1, 8, 8))
    small.plot(DOCS / "images" / "memory-plan-resnet.svg", title="training a small residual network")
    screenshot(DOCS / "plans" / "resnet50.html", DOCS / "images" / "plan-page.png")
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [sys.executable, "-m", "weftplan", "train", "--epochs", "2", "--report", folder],
            check=True,
            capture_output=True,
        )
        screenshot(Path(folder) / "lanes.html", DOCS / "images" / "lanes-page.png")


def screenshot(page: Path, image: Path, window: str = WINDOW) -> None:
    """Save a picture of a page to ``image`` if Chromium is installed."""
    browser = shutil.which("chromium")
    if browser is None:
        print(f"no Chromium: {image.name} stays as it is")
        return
    with tempfile.TemporaryDirectory() as profile:
        switches = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={profile}"]
        subprocess.run(
            [browser, *switches, f"--window-size={window}", f"--screenshot={image}", page.resolve().as_uri()],
            check=True,
            capture_output=True,
            timeout=60,
        )


if __name__ == "__main__":
    draw()
