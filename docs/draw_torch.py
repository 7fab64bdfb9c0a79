"""Draw time over memory budget for four PyTorch models. Needs ``pip install 'weftplan[torch]'``.

python docs/draw_torch.py            # images/torch-*.svg
"""

from __future__ import annotations

import sys
import warnings
from dataclasses import replace
from pathlib import Path

import torch
from torch.nn import functional as F

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent / "bench"))

from torch_models import MODELS  # noqa: E402

from weftplan.torch import curve  # noqa: E402

TITLES = {"gpt": "GPT, 8 layers", "vit": "ViT, 8 layers", "resnet50": "ResNet-50", "unet": "U-Net"}


def draw() -> None:
    """Write every picture."""
    for name, title in TITLES.items():
        make, inputs = MODELS[name]
        module = make()
        found = curve(lambda x, y, module=module: F.cross_entropy(module(x), y), *inputs())
        replace(found, name=title).save(DOCS / "images" / f"torch-{name}.svg")
        print(name, found.points[0].budget, found.points[-1].budget, flush=True)


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    draw()
