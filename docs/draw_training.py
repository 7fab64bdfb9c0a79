"""Draw the report page of a training run that the documents show.

``python docs/draw_training.py`` trains the LSTM on the text of Python's help for two epochs, kills the process, resumes
it, and saves a picture of its report as ``images/training-page.png``; the picture needs Chromium.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from draw_plans import screenshot

from weftplan.training.fit.checkpoint_writer import Checkpoints


def draw() -> None:
    """Train, kill the process at a checkpoint, resume training, and save the picture."""
    with tempfile.TemporaryDirectory() as folder:
        prefix, report = Path(folder) / "text", Path(folder) / "report"
        command = [sys.executable, "-m", "weftplan", "train", "--network", "lstm", "--devices", "1", "--epochs", "2"]
        command += ["--checkpoint", str(prefix), "--every", "30", "--resume", "--report", str(report)]
        command += ["--patience", "2"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        while process.poll() is None and not Checkpoints(prefix).path(120).exists():
            time.sleep(0.01)
        process.kill()
        process.wait()
        subprocess.run(command, check=True, capture_output=True)
        screenshot(report / "index.html", "training-page.png", "1240,1348")


if __name__ == "__main__":
    draw()
