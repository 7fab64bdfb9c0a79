"""Draw the bytes in use during one training step, under each strategy.

``python docs/draw_memory.py`` writes ``docs/images/memory-over-time.svg``. Each line is measured: a ResNet-18 is
trained for two steps on an engine that runs operations one after the other, and the pool's bytes in use are recorded
after each operation of the second step. The line of a plan is flat, since an executor holds the memory of its plan.
Parameters, gradients and data are included.
"""

from __future__ import annotations

import gc
import os
import tempfile
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np

import weftplan as mx
from weftplan import device, engine, storage
from weftplan.storage import AutoGrowth, LimitResource

PICTURE = Path(__file__).resolve().parents[1] / "docs/images/memory-over-time.svg"
NETWORK, BATCH = "resnet18", 8
PLANS = {
    "each result its own memory": {"MXNET_EXEC_MATCH_RANGE": "0", "MXNET_EXEC_ENABLE_INPLACE": "0"},
    "match_range, MXNet's rule": {"WEFTPLAN_PLANNER_STRATEGY": "match_range"},
    "the default plan": {},
}
DYNAMIC = {
    "no plan, results kept until the end": {"FLAGS_eager_delete_tensor_gb": "-1"},
    "no plan, results given back at once": {},
}
SPILLED = "no plan, half of that memory, the rest in a file"


def measured(number: int, settings: dict[str, str], limit: int = 1 << 50) -> list[int]:
    """Return the bytes in use after each operation of the second training step.

    ``number`` chooses a CPU context, ``settings`` are environment variables, and ``limit`` is the pool's, in bytes.
    """
    ctx, found = mx.cpu(number), []
    settings = {**settings, "MXNET_EXEC_BULK_EXEC_TRAIN": "0"}
    os.environ.update(settings)
    try:
        with storage.using(LimitResource(AutoGrowth(device.get(ctx)), limit)) as pool:
            executor = mx.models.get(NETWORK).simple_bind(ctx, **mx.models.input_shapes(NETWORK, BATCH))
            rng = np.random.RandomState(0)
            for name, array in executor.arg_dict.items():
                array[:] = 0 if "label" in name else rng.rand(*array.shape).astype("float32") * 0.1

            def look(*_: Any) -> None:
                found.append(pool.statistics().requested_bytes)

            for _ in range(2):
                found.clear()
                engine.get().tracer = look
                executor.forward(is_train=True)
                executor.backward()
                mx.nd.waitall()
                engine.get().tracer = None
            del executor
            gc.collect()
            mx.nd.waitall()
    finally:
        for name in settings:
            del os.environ[name]
    return found


def lines() -> dict[str, list[int]]:
    """Return {label of a strategy: bytes in use after each operation}."""
    found = {}
    with engine.using(engine.create("NaiveEngine")), tempfile.TemporaryDirectory() as folder:
        for number, (label, settings) in enumerate(PLANS.items()):
            found[label] = measured(100 + number, settings)
        dynamic = {"WEFTPLAN_EXECUTOR_STRATEGY": "dynamic"}
        for number, (label, settings) in enumerate(DYNAMIC.items()):
            found[label] = measured(110 + number, {**settings, **dynamic})
        with mx.nd.spilling.using(f"file:{folder}"):
            found[SPILLED] = measured(120, dynamic, max(found["no plan, results given back at once"]) // 2)
    return found


def main() -> None:
    """Measure all strategies and draw the picture."""
    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "weftplan"
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 4.5))
    for label, values in lines().items():
        share = np.linspace(0, 100, len(values))
        peak = max(values) / 2**20
        axes.step(share, np.asarray(values) / 2**20, where="post", label=f"{label}: {peak:,.0f} MiB")
        print(f"{label}: {max(values):,} bytes, {len(values)} operations")
    axes.set_xlabel("operations of one training step, %")
    axes.set_ylabel("MiB in use, parameters and gradients included")
    axes.set_title(f"{NETWORK}, batch {BATCH}: memory over one training step")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, 0.9), ncols=2)
    figure.tight_layout()
    figure.savefig(PICTURE, metadata={"Date": None})


if __name__ == "__main__":
    main()
