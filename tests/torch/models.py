"""Small PyTorch models with a loss, and the measured peak of a training step."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.torch.allocator_hook import hook
from weftplan.torch import budget
from weftplan.torch.choice import Plan


class Block(nn.Module):
    """A transformer block of attention and a perceptron."""

    def __init__(self, width: int, drop: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down, self.drop = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.Dropout(drop)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` plus the results of both branches."""
        n, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(n, t, 3, 4, d // 4).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(n, t, d)
        x = x + self.drop(self.out(y))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class Decoder(nn.Module):
    """A small decoder whose head shares the weight of the embedding."""

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
        """Return random words and their successors."""
        return torch.randint(0, 64, (4, 48)), torch.randint(0, 64, (4, 48))


class Convolutions(nn.Module):
    """Convolutions with batch norms, whose kernels allocate scratch memory and change buffers."""

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
        """Return random images and classes."""
        return torch.randn(4, 3, 32, 32), torch.randint(0, 10, (4,))


class Branches(nn.Module):
    """Wide branches without parameters that are computed side by side, although one after the other needs less."""

    def __init__(self, width: int = 64, count: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(4)])
        self.count, self.drop = count, nn.Dropout(0.2)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        x = self.layers[0](x)
        wide = [x.repeat(1, 8).tanh() for _ in range(self.count)]
        for part in [self.drop(part.view(len(part), 8, -1).sum(1)) for part in wide]:
            x = x + part
        for layer in self.layers[1:]:
            x = F.relu(layer(x))
        return F.cross_entropy(x, target)

    @staticmethod
    def inputs() -> tuple[torch.Tensor, torch.Tensor]:
        """Return random rows and classes."""
        return torch.randn(256, 64), torch.randint(0, 10, (256,))


class Halves(nn.Module):
    """A layer whose one half is added to the other in place; a functional graph copies the whole for it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the mean of the second layer."""
        h = self.up(x).clone()
        h[:, 64:].add_(h[:, :64])
        return self.down(h).mean()

    @staticmethod
    def inputs() -> tuple[torch.Tensor]:
        """Return random rows."""
        return (torch.randn(64, 32),)


class Patches(nn.Module):
    """A mixer: a convolution over patches, then perceptrons over the tokens."""

    def __init__(self, width: int = 64, depth: int = 4) -> None:
        super().__init__()
        self.patches, self.head = nn.Conv2d(3, width, 16, 16), nn.Linear(width, 10)
        self.tokens = nn.ModuleList([nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))] * depth)
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(depth)])

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        x = self.patches(x).flatten(2).transpose(1, 2)
        for norm, tokens in zip(self.norms, self.tokens, strict=True):
            x = x + tokens(norm(x).transpose(1, 2)).transpose(1, 2)
        return F.cross_entropy(self.head(x.mean(1)), target)

    @staticmethod
    def inputs() -> tuple[torch.Tensor, torch.Tensor]:
        """Return random images and classes."""
        return torch.randn(4, 3, 128, 128), torch.randint(0, 10, (4,))


def step_of(make: Callable[[], Any], wrap: Callable[[Any], Any], *, seed: int = 0) -> tuple[Any, Callable[[], None]]:
    """Return a model and a function that runs a forward and a backward pass of the wrapped model."""
    torch.manual_seed(seed)
    module, args = make(), make().inputs()
    call = wrap(module)

    def run() -> None:
        module.zero_grad(set_to_none=True)
        torch.manual_seed(seed)
        call(*args).backward()

    return module, run


def real_peak(make: Callable[[], Any], wrap: Callable[[Any], Any]) -> tuple[int, list[torch.Tensor]]:
    """Return the peak of the second step in bytes, as the hook on the allocator counts it, and its gradients."""
    step_of(make, wrap)[1]()  # measures workspaces, whose results stay in caches of PyTorch
    torch._dynamo.reset()
    gc.collect()
    before = hook().live
    module, run = step_of(make, wrap)
    run()
    module.zero_grad(set_to_none=True)
    gc.collect()
    resident = hook().live - before
    return resident + hook().peak(run), [p.grad.clone() for p in module.parameters()]


def real_peak_within(make: Callable[[], Any], most: int | str) -> tuple[int, list[torch.Tensor], Plan]:
    """Return the real peak and the gradients of a step within a budget, as :func:`real_peak` does, and its plan."""
    kept: list[Any] = []

    def wrap(module: Any) -> Any:
        kept.append(budget(module, most))
        return kept[-1]

    peak, gradients = real_peak(make, wrap)
    return peak, gradients, kept[-1].plans[0]
