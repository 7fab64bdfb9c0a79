"""Training of several keys on a store with every optimizer, with fused or separate updates."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

import weftplan as mx

SHAPES = [(3,), (40, 5), (1,), (700,), (33, 257)]
KEYS = ["a_weight", "b_bias", "c_weight", "d_gamma", "e_weight"]
OPTIMIZERS = [
    ("sgd", {}), ("sgd", {"momentum": 0.9}), ("nag", {}), ("nag", {"momentum": 0.9}), ("adam", {}), ("adamw", {}),
    ("adamw", {"correct_bias": False}), ("lamb", {}), ("lamb", {"lower_bound": 0.1, "upper_bound": 2.0}),
    ("rmsprop", {}), ("rmsprop", {"centered": True}), ("rmsprop", {"clip_weights": 0.5}), ("signum", {}), ("ftrl", {}),
    ("ftml", {}), ("adagrad", {}), ("adadelta", {}), ("dcasgd", {}), ("dcasgd", {"momentum": 0.9}), ("adamax", {}),
    ("nadam", {}), ("lars", {"momentum": 0.9}), ("lbsgd", {"momentum": 0.9}),
]  # fmt: skip
PLAIN, SET = {}, {"wd": 0.01, "clip_gradient": 0.3, "rescale_grad": 0.25}
FUSED = {"sgd", "nag", "adam", "adamw", "lamb", "rmsprop", "signum", "ftrl", "ftml", "adagrad", "adadelta", "dcasgd"}
"""Optimizers whose updates are fused.

A step of any other waits for values, draws random numbers or depends on the order of keys.
"""


def arrays(seed: int, contexts: Sequence[mx.Context], dtype: str) -> list[list[mx.nd.NDArray]]:
    """Return random arrays for all keys: per key a list with one array per context."""
    rng = np.random.default_rng(seed)
    return [[mx.nd.array(rng.standard_normal(shape), ctx=ctx, dtype=dtype) for ctx in contexts] for shape in SHAPES]


def trained(
    kv: mx.kv.KVStoreBase, contexts: Sequence[mx.Context], dtype: str, name: str, settings: dict[str, object]
) -> list[bytes]:
    """Return the bytes of all weights and optimizer states after three steps."""
    optimizer = mx.optimizer.create(
        name, learning_rate=None if name == "adadelta" else 0.05, param_idx2name={key: key for key in KEYS}, **settings
    )
    optimizer.set_lr_mult({KEYS[1]: 0.5, KEYS[2]: 2.0})
    kv.init(KEYS, [row[0] for row in arrays(0, contexts, dtype)])
    kv.set_optimizer(optimizer)
    outs = arrays(1, contexts, dtype)
    for step in range(3):
        kv.pushpull(KEYS, arrays(step + 2 + 10 * kv.rank, contexts, dtype), outs)
    states = [_flat(kv._updater.states[key]) for key in KEYS]
    return [array.asnumpy().tobytes() for row in (*outs, *states) for array in row]


def _flat(state: object) -> list[mx.nd.NDArray]:
    """Return the arrays of an optimizer state."""
    if isinstance(state, mx.nd.NDArray):
        return [state]
    return [array for one in state or () for array in _flat(one)]
