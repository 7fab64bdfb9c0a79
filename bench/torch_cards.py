"""Question: how near are forecasts for cards to published runs?

    python bench/torch_cards.py mlp               # perceptrons on an A100, bytes shown by nvidia-smi
    python bench/torch_cards.py convolutional     # torchvision on an RTX 3060, bytes reserved; needs torchvision
    python bench/torch_cards.py billion           # time and memory of a forecast for a Llama that is built on meta

The records in ``data/gpu_runs_*.csv`` are measurements of others; each file's first line names its source. For the A100
one constant, the bytes outside the allocator, is the median difference of the first ten rows; the others are predicted.
"""

from __future__ import annotations

import csv
import re
import resource
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch_models import Llama

from weftplan.torch import fits

DATA = Path(__file__).parent / "data"
FITTED = 10
"""Rows from which the constant is taken."""
MIB = 1 << 20


def rows(name: str) -> Iterator[dict[str, str]]:
    """Yield the rows of a file of records."""
    with (DATA / name).open() as file:
        yield from csv.DictReader(line for line in file if not line.startswith("#"))


def widths(first: int, last: int, depth: int, shape: str) -> list[int]:
    """Return the widths of a perceptron's layers, from the input's to that of the last hidden layer."""
    out = [first]
    fall = (first - last) // depth
    for _ in range(depth + (shape == "bottleneck")):
        out.append({"uniform": out[-1], "gradual": max(out[-1] - fall, last)}.get(shape, max(out[-1] // 2, last)))
    return out


def perceptron(name: str) -> tuple[Callable[..., Any], tuple[Any, ...], Any]:
    """Return loss, arguments and optimizer of a record's perceptron."""
    first, last, depth, batch = map(int, re.findall(r":(\d+)", name))
    sizes = widths(first, last, depth, re.findall(r"arch:([a-z]+)", name)[0])
    layers: list[nn.Module] = []
    with torch.device("meta"):
        for a, b in pairwise(sizes):
            layers += [nn.Linear(a, b), nn.ReLU()]
        model = nn.Sequential(*layers, nn.Linear(sizes[-1], last), nn.Softmax(dim=1))
        x, y = torch.empty(batch, first), torch.empty(batch, dtype=torch.long)
    return lambda x, y: F.cross_entropy(model(x), y), (x, y), torch.optim.Adam(model.parameters())


def network(row: dict[str, str]) -> tuple[Callable[..., Any], tuple[Any, ...], Any]:
    """Return loss, arguments and optimizer of a record's torchvision network."""
    from torchvision import models

    name = {"MnasNet": "mnasnet1_0"}.get(
        row["network"], re.sub(r"(?<=t)(?=Tiny|Base)|(?<=3)(?=Large)", "_", row["network"])
    )
    with torch.device("meta"):
        model = getattr(models, name.lower().replace("mobilenetv3", "mobilenet_v3"))(num_classes=10)
        x, y = torch.empty(int(row["batch"]), 3, 86, 86), torch.empty(int(row["batch"]), dtype=torch.long)

    def loss(x: Any, y: Any) -> Any:
        return F.cross_entropy(model(x), y)

    return loss, (x, y), getattr(torch.optim, row["optimizer"])(model.parameters(), lr=1e-3)


def bench_mlp() -> None:
    """Print the errors of the forecast of bytes at nvidia-smi, with one fitted constant."""
    pairs = []
    for row in rows("gpu_runs_mlp.csv"):
        loss, args, optimizer = perceptron(row["name"])
        answer = fits(loss, *args, card="A100 40GB", optimizer=optimizer, advise=False)
        pairs.append((answer.reserved[0] / MIB, float(row["mib"])))
    constant = statistics.median(real - ours for ours, real in pairs[:FITTED])
    errors = [100 * (ours + constant - real) / real for ours, real in pairs[FITTED:]]
    absolute = sorted(map(abs, errors))
    text = (
        f"{len(pairs)} perceptrons, constant {constant:.0f} MiB from {FITTED}: median error of the other {len(errors)}"
    )
    print(
        f"{text} {statistics.median(absolute):.2f} %, worst {min(errors):+.2f} to {max(errors):+.2f} % (goals 0.3, 2)"
    )


def bench_convolutional() -> None:
    """Print forecast and measured bytes reserved of each network, with and without workspaces of convolutions."""
    errors, outside = [], 0
    for row in rows("gpu_runs_xmem.csv"):
        loss, args, optimizer = network(row)
        answer = fits(loss, *args, card="RTX 3060", optimizer=optimizer, advise=False)
        real = int(row["bytes"])
        low, high = answer.reserved
        errors.append(100 * (low - real) / real)
        outside += errors[-1] < -5 and real > high
        print(
            f"{row['network']:17} {row['optimizer']:8} {row['batch']:>4} forecast {low / MIB:8.0f} to "
            f"{high / MIB:8.0f}, measured {real / MIB:8.0f} MiB, {errors[-1]:+6.1f} %, survives at "
            f"{answer.survives[0] / MIB:8.0f} MiB",
            flush=True,
        )
    middle = statistics.median(map(abs, errors))
    print(
        f"median error {middle:.2f} % (goal 3), {min(errors):+.1f} to {max(errors):+.1f} %; more than 5 % below and "
        f"above the range of workspaces: {outside} (goal 0)"
    )


def bench_billion() -> None:
    """Print the forecast for a Llama of a billion parameters, and the processor time and memory that it takes."""
    with torch.device("meta"):
        model = Llama(width=2048, layers=22, heads=32, hidden=4096, words=32000, length=1024)
        ids = torch.empty(4, 1024, dtype=torch.long)

    def loss(ids: Any) -> Any:
        with torch.autocast("cuda", torch.bfloat16):
            return F.cross_entropy(model(ids), ids.flatten())

    began = time.process_time()
    answer = fits(loss, ids, card="A100 80GB", optimizer=torch.optim.AdamW(model.parameters()))
    spent = time.process_time() - began
    print(answer)
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"{sum(p.numel() for p in model.parameters()) / 1e9:.2f} billion parameters: {spent:.1f} s, {resident:.0f} MiB "
        f"(goals 10, 1024)"
    )


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    for part in sys.argv[1:] or ["mlp"]:
        {"mlp": bench_mlp, "convolutional": bench_convolutional, "billion": bench_billion}[part]()
