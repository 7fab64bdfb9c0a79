"""Draw time over memory budget for four PyTorch models. Needs ``pip install 'weftplan[torch]'``.

python docs/draw_torch.py            # images/torch-*.svg
"""

from __future__ import annotations

import sys
import warnings
from dataclasses import replace
from pathlib import Path

import torch
from picture_source import IMAGES, write_source
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))

from torch_models import MODELS

from weftplan.torch import curve

TITLES = {"gpt": "GPT, 8 layers", "vit": "ViT, 8 layers", "resnet50": "ResNet-50", "unet": "U-Net"}


def draw() -> None:
    """Write every picture."""
    for name, title in TITLES.items():
        make, inputs = MODELS[name]
        module = make()
        found = curve(lambda x, y, module=module: F.cross_entropy(module(x), y), *inputs())
        picture, first, last = IMAGES / f"torch-{name}.svg", found.points[0], found.points[-1]
        replace(found, name=title).save(picture)
        more = f"{100 * (last.time - 1):.1f} % more time"
        write_source(picture, f"{first.budget / 2**20:.1f} MiB, smallest {last.budget / 2**20:.1f} MiB for {more}")
        print(name, first.budget, last.budget, more, flush=True)


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    draw()
