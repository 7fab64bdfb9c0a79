"""Ratio of reserved to live bytes of each pool, on traces of allocations; ``bench_storage.py traces`` prints it.

A trace is a sequence of (name, bytes) for an allocation and (name, None) for its free.
"""

import random
from pathlib import Path

import numpy as np
import packing_instances
from peers.published_rules import Cupy, Rmm, Torch

from weftplan import device
from weftplan.cli.pack_csv import read_csv
from weftplan.storage import AutoGrowth, NaiveBestFit, NaivePool, RawResource, RoundPool

DATA = Path(__file__).parent / "data"
HOST = device.get(device.cpu())
POOLS = {
    "Naive": NaivePool,
    "Naive, slack 16 MiB": lambda place: NaivePool(place, slack=16 << 20),
    "Round": RoundPool,
    "auto_growth": lambda place: AutoGrowth(place, spare=1 / 16),
    "auto_growth, Paddle's rule": AutoGrowth,
    "auto_growth, chunks of 16 MiB": lambda place: AutoGrowth(place, chunk=16 << 20),
    "auto_growth, idle chunks go": lambda place: AutoGrowth(place, release_idle=True),
    "naive_best_fit, 500 MiB": NaiveBestFit,
    "naive_best_fit, 64 MiB": lambda place: NaiveBestFit(place, first=64 << 20),
    "Unpooled": RawResource,
}

RULES = {"PyTorch's published rule": Torch, "RMM's published rule": Rmm, "CuPy's published rule": Cupy}


class Counting:
    """A device that returns arrays without memory, so that only the pool's own rules are measured."""

    asynchronous, alignment = False, 64

    def __init__(self):
        self.context, self.xp, self.asked = HOST.context, np, 0
        self._bytes = np.empty(0, np.uint8)

    def allocate(self, nbytes):
        self.asked += 1
        return np.lib.stride_tricks.as_strided(np.zeros(1, np.uint8), (nbytes,), (0,))

    def free(self, raw):
        pass

    def memory_info(self):
        return 1 << 50, 1 << 50


def batches():
    """Yield the trace of 1,000 training steps of four layers, forward and backward, with random batch sizes."""
    rng, name = random.Random(0), 0
    widths = (3072, 4096, 1024, 256, 10)
    for _ in range(1000):
        batch, held = rng.randint(1, 128), []
        for width in widths:
            name += 1
            held.append(name)
            yield name, 4 * batch * width
        for width in reversed(widths):
            name += 1
            yield name, 4 * batch * width
            yield held.pop(), None
            yield name, None


def lstm():
    """Yield the trace of an imperative LSTM: gates, cells and states of 20 sequences of random lengths and batches."""
    rng, name = random.Random(1), 0
    for _ in range(20):
        batch, hidden, kept = rng.choice((16, 24, 32, 40)), 512, []
        for _ in range(rng.randint(20, 60)):
            short = []
            for nbytes in (4 * batch * 4 * hidden, *(4 * batch * hidden,) * 6):
                name += 1
                short.append(name)
                yield name, nbytes
            kept += short[:3]
            for one in short[3:]:
                yield one, None
        for one in reversed(kept):
            yield one, None


def planned(lower, upper, sizes):
    """Yield the trace of a plan's buffers: each is allocated at its lower end and freed at its upper end."""
    events = [(int(at), 1, k, int(n)) for k, (at, n) in enumerate(zip(lower, sizes, strict=True))]
    events += [(int(at), 0, k, None) for k, at in enumerate(upper)]
    for _, _, name, nbytes in sorted(events, key=lambda event: event[:3]):
        yield name, nbytes


def traces(rounds):
    """Print each pool's peak of reserved bytes divided by the peak of live bytes, for every trace."""
    del rounds
    print("\n### Bytes reserved over bytes live, at their peaks\n")
    every = {"1,000 batch sizes": list(batches()), "imperative LSTM": list(lstm())}
    for name, lower, upper, sizes in packing_traces():
        every[name] = list(planned(lower, upper, sizes))
    print("| strategy | " + " | ".join(every) + " |\n|---|" + "---|" * len(every))
    for label, make in {**POOLS, **RULES}.items():
        cells = []
        for events in every.values():
            pool, held = make(Counting()), {}
            live = peak = 0
            for name, nbytes in events:
                if nbytes is None:
                    live -= held[name].nbytes
                    pool.free(held.pop(name))
                else:
                    held[name] = pool.allocate(nbytes)
                    live += nbytes
                    peak = max(peak, live)
            reserved = pool.reserved() if isinstance(pool, Torch) else pool.statistics().peak_reserved_bytes
            cells.append(f"{reserved / peak:.3f}")
        print(f"| {label} | " + " | ".join(cells) + " |")


def packing_traces():
    """Return (name, lower, upper, bytes) of three packing instances; sizes are read as KiB if all are below 2**20."""
    results = []
    for name, buffers in (
        ("ResNet-50 (SOMAS)", read_csv(DATA / "somas_resnet50.csv")[1:]),
        ("plan of 60 layers", packing_instances.training_trace(100, 60, 1)),
        ("plan of 200 layers", packing_instances.training_trace(100, 200, 3)),
    ):
        lower, upper, sizes = buffers
        scale = 1024 if int(np.max(sizes)) < 1 << 20 else 1
        results.append((name, lower, upper, np.asarray(sizes) * scale))
    return results
