"""Eight PyTorch models for the benches, each with random inputs and its blocks that can be checkpointed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.project, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        batch, length, width = x.shape
        packed = self.project(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = packed.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Layer(nn.Module):
    """A transformer layer. Norms precede the branches; if ``after`` is true they follow them, as in BERT."""

    def __init__(self, width: int, heads: int, *, causal: bool, drop: float = 0.0, after: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.attention = (
            nn.LayerNorm(width),
            nn.LayerNorm(width),
            Attention(width, heads, causal),
        )
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.drop, self.after = nn.Dropout(drop), after

    def forward(self, x):
        if self.after:
            x = self.first(x + self.drop(self.attention(x)))
            return self.second(x + self.drop(self.mlp(x)))
        x = x + self.drop(self.attention(self.first(x)))
        return x + self.drop(self.mlp(self.second(x)))


class Text(nn.Module):
    """A language model with a tied head: GPT (causal, norms before branches) or BERT (dropout, norms after them)."""

    def __init__(self, *, width=256, layers=8, heads=4, words=1000, length=256, bert=False) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        kind = {"causal": not bert, "drop": 0.1 if bert else 0.0, "after": bert}
        self.blocks = nn.ModuleList([Layer(width, heads, **kind) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids):
        x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).flatten(0, 1)


class LlamaLayer(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads, self.first, self.second = heads, nn.RMSNorm(width), nn.RMSNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up, self.down = (
            nn.Linear(a, b, bias=False) for a, b in ((width, hidden), (width, hidden), (hidden, width))
        )

    def forward(self, x, cos, sin):
        batch, length, width = x.shape
        y = self.first(x)
        q, k, v = (p(y).view(batch, length, self.heads, -1).transpose(1, 2) for p in (self.query, self.key, self.value))
        q, k = (z * cos + torch.cat((-z.chunk(2, -1)[1], z.chunk(2, -1)[0]), -1) * sin for z in (q, k))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        y = self.second(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    def __init__(self, *, width=256, layers=8, heads=4, hidden=704, words=1000, length=256) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(words, width), nn.Linear(width, words, bias=False)
        self.blocks = nn.ModuleList([LlamaLayer(width, heads, hidden) for _ in range(layers)])
        self.norm = nn.RMSNorm(width)
        angles = torch.outer(torch.arange(length), 1e4 ** (-torch.arange(0, width // heads, 2) / (width // heads)))
        self.register_buffer("cos", torch.cat((angles, angles), -1).cos())
        self.register_buffer("sin", torch.cat((angles, angles), -1).sin())

    def forward(self, ids):
        x, length = self.words(ids), ids.shape[1]
        for block in self.blocks:
            x = block(x, self.cos[:length], self.sin[:length])
        return self.head(self.norm(x)).flatten(0, 1)


class ViT(nn.Module):
    def __init__(self, *, width=384, layers=8, heads=6) -> None:
        super().__init__()
        self.patches, self.places = nn.Conv2d(3, width, 16, 16), nn.Parameter(torch.zeros(1, 197, width))
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        self.blocks = nn.ModuleList([Layer(width, heads, causal=False) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1000)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(x), -1, -1), x], 1) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


class MixerLayer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens = nn.Sequential(nn.Linear(196, 256), nn.GELU(), nn.Linear(256, 196))
        self.channels = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        x = x + self.tokens(self.first(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.second(x))


class Mixer(nn.Module):
    def __init__(self, *, width=384, layers=8) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.blocks = nn.ModuleList([MixerLayer(width) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1000)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


def convolution(cin: int, cout: int, size: int = 3, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(cin, cout, size, stride, size // 2, bias=False), nn.BatchNorm2d(cout))


class Pair(nn.Sequential):
    def __init__(self, cin: int, cout: int) -> None:
        super().__init__(convolution(cin, cout), nn.ReLU(True), convolution(cout, cout), nn.ReLU(True))


class UNet(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        w = [width << k for k in range(5)]
        downs = [Pair(a, b) for a, b in zip([3, *w], w, strict=False)]
        ups = [Pair(2 * a, a) for a in w[-2::-1]]
        self.blocks = nn.ModuleList([*downs, *ups])
        self.widen = nn.ModuleList([nn.ConvTranspose2d(2 * a, a, 2, 2) for a in w[-2::-1]])
        self.last = nn.Conv2d(width, 2, 1)

    def forward(self, x):
        skips = []
        for k, block in enumerate(self.blocks[:5]):
            x = block(F.max_pool2d(x, 2) if k else x)
            skips.append(x)
        for widen, block, skip in zip(self.widen, self.blocks[5:], skips[-2::-1], strict=True):
            x = block(torch.cat((skip, widen(x)), 1))
        return self.last(x)


class Bottleneck(nn.Module):
    def __init__(self, cin: int, middle: int, stride: int) -> None:
        super().__init__()
        self.a, self.b = convolution(cin, middle, 1), convolution(middle, middle, 3, stride)
        self.c, self.relu = convolution(middle, 4 * middle, 1), nn.ReLU(True)
        same = stride == 1 and cin == 4 * middle
        self.across = nn.Identity() if same else convolution(cin, 4 * middle, 1, stride)

    def forward(self, x):
        return self.relu(self.c(self.relu(self.b(self.relu(self.a(x))))) + self.across(x))


class ResNet50(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        blocks, cin = [], 64
        for middle, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
            for k in range(count):
                blocks.append(Bottleneck(cin, middle, 1 if k else stride))
                cin = 4 * middle
        self.stem = nn.Sequential(convolution(3, 64, 7, 2), nn.ReLU(True), nn.MaxPool2d(3, 2, 1))
        self.blocks, self.head = nn.ModuleList(blocks), nn.Linear(2048, 1000)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


class Cells(nn.Module):
    """An LSTM of two layers, unrolled step by step in Python; it has no blocks to checkpoint."""

    def __init__(self, *, words=2000, width=256) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(words, width), nn.Linear(width, words)
        self.cells, self.blocks = nn.ModuleList([nn.LSTMCell(width, width) for _ in range(2)]), ()

    def forward(self, ids):
        xs = self.words(ids).unbind(0)
        for cell in self.cells:
            state, out = None, []
            for x in xs:
                state = cell(x, state)
                out.append(state[0])
            xs = out
        return self.head(torch.stack(xs)).flatten(0, 1)


class Layers(Cells):
    """``Cells`` with one two-layer ``nn.LSTM`` instead of unrolled cells."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(256, 256, 2)

    def forward(self, ids):
        return self.head(self.cells(self.words(ids))[0]).flatten(0, 1)


Made = tuple[Callable[[], nn.Module], Callable[[], tuple[Any, Any]]]


def ids(count: int, length: int, words: int) -> Callable[[], tuple[Any, Any]]:
    return lambda: (torch.randint(0, words, (count, length)), torch.randint(0, words, (count * length,)))


def images(count: int, side: int) -> Callable[[], tuple[Any, Any]]:
    return lambda: (torch.randn(count, 3, side, side), torch.randint(0, 1000, (count,)))


MODELS: dict[str, Made] = {
    "gpt": (Text, ids(4, 256, 1000)),
    "llama": (Llama, ids(4, 256, 1000)),
    "bert": (lambda: Text(bert=True), ids(4, 256, 1000)),
    "vit": (ViT, images(4, 224)),
    "mixer": (Mixer, images(4, 224)),
    "unet": (UNet, lambda: (torch.randn(2, 3, 128, 128), torch.randint(0, 2, (2, 128, 128)))),
    "resnet50": (ResNet50, images(8, 128)),
    "lstm": (Cells, ids(35, 20, 2000)),
}
