"""Two small models of PyTorch with a loss, and the real peak of a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile, record_function

from weftplan.torch.probe import peak_of


class Block(nn.Module):
    """Attention and a perceptron."""

    def __init__(self, width: int, drop: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down, self.drop = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.Dropout(drop)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add both branches to ``x``."""
        n, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(n, t, 3, 4, d // 4).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(n, t, d)
        x = x + self.drop(self.out(y))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class Decoder(nn.Module):
    """A small decoder with a tied head."""

    def __init__(self, depth: int = 3, width: int = 32, drop: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, width)
        self.blocks = nn.ModuleList([Block(width, drop) for _ in range(depth)])
        self.head = nn.Linear(width, 64, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), target.flatten())

    @staticmethod
    def inputs() -> tuple[torch.Tensor, torch.Tensor]:
        """Return the words and their successors."""
        return torch.randint(0, 64, (4, 48)), torch.randint(0, 64, (4, 48))


class Convolutions(nn.Module):
    """Convolutions with batch norms, whose kernels allocate inside and change buffers."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for cin in (3, width, width, width):
            layers += [nn.Conv2d(cin, width, 3, 1, 1), nn.BatchNorm2d(width), nn.ReLU()]
        self.body, self.head = nn.Sequential(*layers), nn.Linear(width, 10)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        return F.cross_entropy(self.head(self.body(x).mean((2, 3))), target)

    @staticmethod
    def inputs() -> tuple[torch.Tensor, torch.Tensor]:
        """Return the images and classes."""
        return torch.randn(4, 3, 32, 32), torch.randint(0, 10, (4,))


def step_of(make: Callable[[], Any], wrap: Callable[[Any], Any], *, seed: int = 0) -> tuple[Any, Callable[[], None]]:
    """Return a module and a function that runs a forward and a backward pass of it."""
    torch.manual_seed(seed)
    module, args = make(), make().inputs()
    call = wrap(module)

    def run() -> None:
        module.zero_grad(set_to_none=True)
        torch.manual_seed(seed)
        call(*args).backward()

    return module, run


def real_peak(make: Callable[[], Any], wrap: Callable[[Any], Any], rounds: int = 3) -> tuple[int, list[torch.Tensor]]:
    """Return the peak of the second step, the most of ``rounds`` measurements, and its gradients.

    The profiler is on before the model is made, since the death of a block is counted only when its birth was; now and
    then it loses an event.
    """
    step_of(make, wrap)[1]()  # workspaces are measured here, not within the profile
    peaks = []
    for _ in range(rounds):
        torch._dynamo.reset()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
            module, run = step_of(make, wrap)
            run()
            module.zero_grad(set_to_none=True)
            with record_function("the step"):
                run()
        peaks.append(peak_of(prof, "the step"))
    return max(peaks), [p.grad.clone() for p in module.parameters()]
