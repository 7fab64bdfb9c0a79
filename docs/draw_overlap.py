"""Draw how exchanges of gradients run during backward and during the next forward, on simulated GPUs.

``python docs/draw_overlap.py`` trains a network of fully connected layers on four simulated GPUs that are connected by
NVLink, with the store ``device``. It draws the computation and the exchange of each GPU during two steps, by the
simulated clock, to ``docs/images/overlap.svg``. ``python docs/draw_overlap.py table`` also prints the hidden part of an
exchange for links of several kinds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from typing import NamedTuple

import matplotlib as mpl
import numpy as np
from picture_source import IMAGES, write_source

import weftplan as mx
from weftplan.device import simulated
from weftplan.device.base import CostModel
from weftplan.device.links import Interconnect, connect, nvlink_mesh, pcie_tree
from weftplan.device.simulated_device import SimStream
from weftplan.device.stream import current_work

PICTURE = IMAGES / "overlap.svg"
LAYERS, WIDTH, COUNT = 8, 1024, 4
COLOURS = {"forward": "#8fb8de", "backward": "#3f6ea5", "copy": "#d9822b", "sum and update": "#7a9e5a"}
LINKS = {"nvlink_mesh": nvlink_mesh(), "pcie_tree": pcie_tree()}


class Span(NamedTuple):
    """One piece of work of a stream: its device, its kind, and its begin and end in simulated seconds."""

    device: int
    kind: str
    begin: float
    end: float


def module_on(
    links: Interconnect, kernel: float, store: str, layers: int = LAYERS
) -> tuple[mx.mod.Module, mx.io.DataBatch]:
    """Return (module on simulated GPUs with these links, a batch), after three training steps.

    ``kernel`` is the seconds of each kernel.
    """
    connect(links)
    contexts = [mx.sim(index) for index in range(COUNT)]
    for context in contexts:
        simulated.configure(context.device_id, cost=CostModel(launch=kernel, share=0.0))
    net = mx.sym.Variable("data")
    for _ in range(layers):
        net = mx.sym.Activation(mx.sym.FullyConnected(net, num_hidden=WIDTH), act_type="relu")
    net = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(net, num_hidden=10), name="softmax")
    shape = (4 * COUNT, WIDTH)
    module = mx.mod.Module(net, context=contexts)
    module.bind([("data", shape)], [("softmax_label", shape[:1])])
    module.init_params(mx.init.Xavier())
    module.init_optimizer(kvstore=mx.kv.create(store), optimizer_params={"learning_rate": 0.01, "momentum": 0.9})
    data = np.random.default_rng(0).random(shape, np.float32)
    batch = mx.io.DataBatch([mx.nd.array(data)], [mx.nd.zeros(shape[:1])])
    for _ in range(3):
        module.forward_backward(batch)
        module.update()
    mx.nd.waitall()
    return module, batch


def seconds(module: mx.mod.Module, work: Callable[[], object]) -> float:
    """Return the simulated seconds of calling ``work`` and waiting for all operations."""

    def run() -> None:
        work()
        mx.nd.waitall()

    return simulated.seconds_of(run, module.contexts)


@contextmanager
def one_worker_per_gpu() -> Iterator[None]:
    """Use an engine with one thread for each queue of a GPU in the ``with`` block.

    Several threads may enqueue exchanges in another order than that of the pushes, which changes the simulated times.
    """
    with mx.engine.using(mx.engine.create("ThreadedEnginePerDevice", gpu_workers=1)) as engine:
        yield
    engine.stop()


@one_worker_per_gpu()
def hidden(links: Interconnect, kernel: float = 5e-4, store: str = "device", steps: int = 4) -> tuple[float, ...]:
    """Return simulated seconds and shares: (computation alone, exchange alone, one step, hidden share, possible share).

    The hidden share is the time saved by overlap divided by the shorter of computation and exchange. The possible share
    divides it by the time that overlap can save: an exchange begins when the first large gradient is ready, and the
    exchange of the first layer cannot be hidden, since backward computes its gradient last and the next forward needs
    its weight first.
    """
    only, _ = module_on(links, kernel, store, layers=1)
    last = seconds(only, only.update)
    module, batch = module_on(links, kernel, store)
    compute, exchange = seconds(module, lambda: module.forward_backward(batch)), seconds(module, module.update)

    def run() -> None:
        for _ in range(steps):
            module.forward_backward(batch)
            module.update()

    step = seconds(module, run) / steps
    connect(None)
    first = compute - (2 * LAYERS - 2) * kernel  # first large gradient: 2 kernels per other layer
    least = max(compute + last, first + exchange)
    saved = compute + exchange - step
    possible = min(1.0, saved / (compute + exchange - least))  # `last` counts the small output layer, too
    return compute, exchange, step, saved / min(compute, exchange), possible


@contextmanager
def recorded(spans: list[Span]) -> Iterator[None]:
    """In the ``with`` block, append a span to ``spans`` for each kernel of a stream, and for each copy of a store."""
    append = SimStream._append

    def noting(self: SimStream, kind: str, item: object, end: float) -> None:
        if kind == "run" and (work := current_work()) is not None:
            label = str(work.owner[0])
            cost = self.device.cost
            is_copy = abs(end - self._next - cost.launch) > 1e-9 or "copy" in label
            what = "copy" if is_copy else "sum and update"
            if not label.startswith("KVStore"):
                what = "" if is_copy else "backward" if "backward" in label.lower() else "forward"
            if what:
                spans.append(Span(self.device.context.device_id, what, self._next, end))
        append(self, kind, item, end)

    SimStream._append = noting  # type: ignore[method-assign]
    try:
        yield
    finally:
        SimStream._append = append  # type: ignore[method-assign]


@one_worker_per_gpu()
def two_steps() -> list[Span]:
    """Run two steps over NVLink, and return their work; the first begins at 0."""
    module, batch = module_on(LINKS["nvlink_mesh"], 5e-4, "device")
    spans: list[Span] = []

    def two() -> None:
        for _ in range(2):
            module.forward_backward(batch)
            module.update()

    with recorded(spans):
        seconds(module, two)
    connect(None)
    first = min(span.begin for span in spans)
    return [span._replace(begin=span.begin - first, end=span.end - first) for span in spans]


def source(spans: list[Span]) -> str:
    """Return the length of the steps and a digest of their work in whole microseconds."""
    rows = sorted((span.device, span.kind, round(span.begin * 1e6), round(span.end * 1e6)) for span in spans)
    length = max(span.end for span in spans)
    return f"two steps in {length * 1e3:.2f} simulated ms, {sha256(repr(rows).encode()).hexdigest()[:16]}"


def draw() -> None:
    """Run two steps, and draw them."""
    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "weftplan"
    from matplotlib import pyplot

    spans = two_steps()
    figure, axes = pyplot.subplots(figsize=(9, 3.6))
    for span in spans:
        row = 2.4 * span.device + (span.kind in ("copy", "sum and update"))
        left, width = span.begin * 1e3, (span.end - span.begin) * 1e3
        axes.barh(row, width, 0.8, left, color=COLOURS[span.kind], edgecolor="white", linewidth=0.2)
    rows = [2.4 * device + half for device in range(COUNT) for half in range(2)]
    axes.set_yticks(rows, [f"sim({device}) {what}" for device in range(COUNT) for what in ("computes", "exchanges")])
    axes.invert_yaxis()
    axes.set_xlabel("simulated milliseconds of two steps")
    handles = [mpl.patches.Patch(color=colour, label=label) for label, colour in COLOURS.items()]
    axes.legend(handles=handles, ncols=len(handles), loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(PICTURE, metadata={"Date": None})
    write_source(PICTURE, source(spans))


def table() -> None:
    """Print the hidden part of an exchange, by store, links and seconds of a kernel."""
    print("| store | links | kernel | forward + backward | exchange | step | hidden | of what can be hidden |")
    print("|---|---|---|---|---|---|---|---|")
    for store in ("device", "dist_device_sync"):
        for name, links in LINKS.items():
            for kernel in (5e-4, 2e-4):
                *times, part, possible = hidden(links, kernel, store)
                cells = [f"{1e3 * one:.2f} ms" for one in (kernel, *times)]
                print(f"| {store} | {name} | {' | '.join(cells)} | {part:.0%} | {possible:.0%} |", flush=True)


if __name__ == "__main__":
    draw()
    if "table" in sys.argv:
        table()
