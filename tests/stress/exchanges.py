"""Random exchanges of a store over random links between simulated devices.

Values are whole numbers, so that a sum does not depend on the order of its additions.
"""

from __future__ import annotations

import os
import random
from typing import Any

import numpy as np

import weftplan as mx
from weftplan import engine
from weftplan.device.interconnect import Interconnect
from weftplan.device.links import connect, matrix, nvlink_mesh, pcie_tree, ports
from weftplan.device.simulated import configure

SETTINGS = {
    "MXNET_ENABLE_GPU_P2P": ("1", "1", "0"),
    "MXNET_KVSTORE_USETREE": ("0", "0", "1"),
    "MXNET_KVSTORE_TREE_ARRAY_BOUND": ("10000000", "1000"),
    "MXNET_KVSTORE_TREE_LINK_USAGE_PENALTY": ("0.7", "1.0"),
    "MXNET_KVSTORE_TREE_BACKTRACK": ("0", "1"),
    "MXNET_KVSTORE_BIGARRAY_BOUND": ("1000000", "500"),
}
DTYPES = ("float32", "float32", "float64", "float16", "int32")
SHAPES = ((1,), (7,), (3, 5), (1000,), (33, 77), (300, 401))
ENGINES = ("NaiveEngine", "ThreadedEngine", "ThreadedEnginePerDevice", "Simulator")


def links(rng: random.Random) -> Interconnect | None:
    """Return random links between eight devices, or None."""
    kind = rng.randrange(6)
    if kind == 0:
        return None
    if kind == 1:
        return nvlink_mesh(rng.choice((22e9, 1e9)), rng.choice((3e-6, 1e-4)))
    if kind == 2:
        return pcie_tree(8, rng.choice((1, 2, 3, 4, 8)))
    if kind == 3:
        return ports(8, rng.choice((450e9, 1e8)), rng.choice((3e-6, 0.0)))
    speeds = (0.0, 0.0, 1e8, 5e9, 50e9) if kind == 4 else (1e9, 50e9)
    rows = [[0.0 if a == b else rng.choice(speeds) for b in range(8)] for a in range(8)]
    if rng.random() < 0.7:  # like real wires
        rows = [[rows[min(a, b)][max(a, b)] for b in range(8)] for a in range(8)]
    return matrix(rows, rng.choice((0.0, 2e-6, 1e-3)), host_bandwidth=rng.choice((12e9, 1e8)))


def trial(seed: str) -> bool:
    """Check that pulls after pushes of several keys, singly or in lists, return NumPy's sums; return True."""
    rng = random.Random(seed)
    draw = np.random.default_rng(rng.randrange(1 << 30))
    before = {name: os.environ.get(name) for name in SETTINGS}
    os.environ.update({name: rng.choice(values) for name, values in SETTINGS.items()})
    driver = rng.choice(ENGINES)
    chosen = engine.create(driver, **({} if driver in ("NaiveEngine", "Simulator") else {"cpu_workers": 3}))
    try:
        for index in range(8):
            configure(index, order=rng.choice(("lazy", "random")), seed=rng.randrange(1000))
        connect(links(rng))
        with engine.using(chosen):
            _rounds(rng, draw)
            chosen.wait_for_all()
        return True
    finally:
        connect(None)
        for index in range(8):
            configure(index, order="lazy", seed=0)
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        chosen.stop()


def _rounds(rng: random.Random, draw: Any) -> None:
    count = rng.randrange(1, 9)
    contexts = [mx.sim(index) for index in rng.sample(range(8), count)]
    if rng.random() < 0.2:
        contexts += [mx.cpu()]
    kv = mx.kv.create(rng.choice(("device", "device", "device", "local")))
    keys = {f"k{k}": (rng.choice(SHAPES), rng.choice(DTYPES)) for k in range(rng.randrange(1, 5))}
    stored = {}
    for key, (shape, dtype) in keys.items():
        stored[key] = draw.integers(-9, 9, shape).astype(dtype)
        kv.init(key, mx.nd.array(stored[key], ctx=rng.choice(contexts), dtype=dtype))
    updates = rng.random() < 0.3
    if updates:

        def update(key: Any, pushed: Any, weight: Any) -> None:
            weight += pushed

        kv._set_updater(update)
    for _ in range(rng.randrange(1, 5)):
        names = rng.sample(list(keys), rng.randrange(1, len(keys) + 1))
        values = {n: [draw.integers(-9, 9, keys[n][0]).astype(keys[n][1]) for _ in contexts] for n in names}
        pushed = [
            [mx.nd.array(v, ctx=c, dtype=v.dtype) for v, c in zip(values[n], contexts, strict=True)] for n in names
        ]
        outs = [[mx.nd.empty(keys[n][0], ctx=c, dtype=keys[n][1]) for c in contexts] for n in names]
        priority = rng.randrange(-3, 3)
        how = rng.randrange(4)
        if how == 0:
            kv.push(names, pushed, priority=priority)
            kv.pull(names, outs, priority=priority)
        elif how == 1:
            for name, some, out in zip(names, pushed, outs, strict=True):
                kv.push(name, some, priority=priority)
                kv.pull(name, out, priority=-priority)
        elif how == 2:
            kv.pushpull(names, pushed, outs, priority=priority)
        else:  # some devices pull in another order, from a single push
            kv.push(names, pushed)
            for name, out in sorted(zip(names, outs, strict=True), key=lambda one: rng.random()):
                kv.pull(name, out)
        if rng.random() < 0.5:  # pushed values may change immediately
            for some in pushed:
                for array in some:
                    array[:] = 77
        for name, out in zip(names, outs, strict=True):
            total = np.sum(np.array(values[name]), axis=0, dtype=keys[name][1])
            stored[name] = stored[name] + total if updates else total
            for array in out:
                np.testing.assert_array_equal(array.asnumpy(), stored[name], err_msg=f"{name} on {array.context}")
    for name in keys:
        out = mx.nd.empty(keys[name][0], dtype=keys[name][1])
        kv.pull(name, out)
        np.testing.assert_array_equal(out.asnumpy(), stored[name], err_msg=f"{name} at the end")
