"""Draws how pushes and pulls run during the rest of backward.

``python docs/draw_overlap.py`` trains a network of fully connected layers on two CPU contexts for a few steps with the
store ``device``, records one step with the profiler, and draws what each of the two ran when, from the trace, to
``docs/images/overlap.svg``. It prints how much of the store's time lies within backward.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np

import weftplan as mx

PICTURE = Path(__file__).resolve().parents[1] / "docs/images/overlap.svg"
LAYERS, WIDTH, BATCH = 6, 1500, 48
COLOURS = {"forward": "#8fb8de", "backward": "#3f6ea5", "store": "#d9822b", "update": "#7a9e5a"}


def one_step() -> list[dict[str, Any]]:
    """The operations of one training step, from a trace: those with a beginning and a duration."""
    net = mx.sym.Variable("data")
    for _ in range(LAYERS):
        net = mx.sym.Activation(mx.sym.FullyConnected(net, num_hidden=WIDTH), act_type="relu")
    net = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(net, num_hidden=10), name="softmax")
    rng = np.random.default_rng(0)
    images, labels = rng.random((BATCH, WIDTH), dtype=np.float32), rng.integers(0, 10, BATCH)
    batches = mx.io.NDArrayIter(images, labels.astype(np.float32), batch_size=BATCH)
    module = mx.mod.Module(net, context=[mx.cpu(0), mx.cpu(1)])
    module.bind(data_shapes=batches.provide_data, label_shapes=batches.provide_label)
    module.init_params()
    module.init_optimizer(kvstore=mx.kv.create("device"), optimizer_params={"learning_rate": 0.01, "momentum": 0.9})
    batch = next(iter(batches))
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        for step in range(6):
            mx.nd.waitall()
            if step == 5:
                mx.profiler.set_config(filename=str(trace))
                mx.profiler.set_state("run")
            module.forward_backward(batch)
            module.update()
        mx.profiler.set_state("stop")
        mx.profiler.dump()
        events: list[dict[str, Any]] = json.loads(trace.read_text())["traceEvents"]
    return [event for event in events if event.get("ph") == "X" and event.get("cat") != "push"]


def kind(name: str) -> str:
    """The part of the step that an operation belongs to."""
    if name.startswith("KVStore"):
        return "store"
    if "backward" in name.lower():
        return "backward"
    return "update" if "sgd" in name.lower() or "update" in name.lower() else "forward"


def draw() -> None:
    """Run, and draw."""
    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "weftplan"
    from matplotlib import pyplot

    events = one_step()
    begin = min(event["ts"] for event in events)
    lanes = sorted({(event["pid"], event["tid"]) for event in events})
    figure, axes = pyplot.subplots(figsize=(9, 0.6 + 0.45 * len(lanes)))
    for event in events:
        lane = lanes.index((event["pid"], event["tid"]))
        left, width = (event["ts"] - begin) / 1e3, event["dur"] / 1e3
        axes.barh(lane, width, 0.8, left, color=COLOURS[kind(event["name"])], edgecolor="white", linewidth=0.3)
    contexts = sorted({process for process, _ in lanes})
    axes.set_yticks(range(len(lanes)), [f"cpu({contexts.index(process)}), worker" for process, _ in lanes])
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds of one step")
    handles = [mpl.patches.Patch(color=colour, label=label) for label, colour in COLOURS.items()]
    axes.legend(handles=handles, ncols=len(handles), loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(PICTURE, metadata={"Date": None})
    ends = [event["ts"] + event["dur"] for event in events if kind(event["name"]) == "backward"]
    stores = [event for event in events if kind(event["name"]) == "store"]
    within = sum(event["dur"] for event in stores if event["ts"] < max(ends))
    print(f"{within / sum(event['dur'] for event in stores):.0%} of the store's time lies within backward")


if __name__ == "__main__":
    draw()
