"""A step in the searched order of execution has the bits of a step in the order given."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

import weftplan as mx
from weftplan.planner import PlanOptions

SHAPE = (4, 16)


def wide_network(seed: int, kind: str) -> Any:
    """Return branches that widen the data, use it, and shrink it; the order given computes all wide results first."""
    rng = random.Random(seed)
    data = mx.sym.Variable("data")
    wide, narrow = [], []
    for k in range(4):
        with mx.AttrScope(ctx_group=f"group{k % 2 if kind == 'devices' else 0}"):
            net = mx.sym.FullyConnected(data, num_hidden=rng.choice([64, 128, 256]), name=f"wide{k}")
            if kind == "draws":
                net = mx.sym.Dropout(net, p=0.4, name=f"drop{k}")
            elif kind == "states":
                net = mx.sym.BatchNorm(net, name=f"norm{k}", momentum=0.5, fix_gamma=False)
            wide.append(mx.sym.Activation(net, act_type=rng.choice(["relu", "tanh"]), name=f"act{k}"))
    for k in rng.sample(range(4), 4):  # as inputs of zeros_like, whose values are ignored, they come first in the order
        narrow.append(mx.sym.sum(mx.sym.zeros_like(wide[k]), axis=1, keepdims=True))
    for k in range(4):
        with mx.AttrScope(ctx_group=f"group{k % 2 if kind == 'devices' else 0}"):
            narrow.append(mx.sym.FullyConnected(wide[k], num_hidden=4, name=f"narrow{k}"))
    return mx.sym.MakeLoss(mx.sym.square(mx.sym.Concat(*narrow, dim=1)).sum(), name="loss")


def step(net: Any, kind: str, *, reorder: bool) -> tuple[list[bytes], list[str]]:
    """Run two steps with equal values and seeds; return all bits, and the names of the nodes in their order."""
    options = PlanOptions(
        reorder=reorder,
        strategy="match_range",  # its plans take no search
        recompute="mxnet" if kind == "mirror" else "off",
        eliminate_common_expr=False,
    )
    groups = {"group0": mx.cpu(0), "group1": mx.cpu(1)} if kind == "devices" else None
    executor = net.simple_bind(
        mx.cpu(0), grad_req="add" if kind == "states" else "write", group2ctx=groups, plan_options=options, data=SHAPE
    )
    draws = np.random.default_rng(3)
    for name in sorted(executor.arg_dict):
        array = executor.arg_dict[name]
        array[:] = draws.uniform(-1, 1, array.shape).astype("float32")
    bits = []
    mx.random.seed(11)
    for _ in range(2):
        bits += [output.asnumpy().tobytes() for output in executor.forward(is_train=True)]
        executor.backward()
        arrays = {**executor.grad_dict, **executor.aux_dict}
        bits += [arrays[name].asnumpy().tobytes() for name in sorted(arrays) if arrays[name] is not None]
        for name, gradient in executor.grad_dict.items():  # an update in place, between the steps
            mx.nd.sgd_update(executor.arg_dict[name], gradient, lr=0.01, out=executor.arg_dict[name])
    planned = executor.planned
    return bits, [planned.graph.nodes[nid].name for nid in planned.order]


@pytest.mark.parametrize("kind", ["plain", "draws", "states", "devices", "mirror"])
def test_searched_order_has_the_bits_of_the_order_given(kind: str) -> None:
    """Outputs, gradients, states and updated weights are equal bit by bit, and some order differs."""
    changed = 0
    for seed in range(4):
        net = wide_network(seed, kind)
        (bits, order), (searched_bits, searched) = (step(net, kind, reorder=reorder) for reorder in (False, True))
        assert bits == searched_bits
        assert sorted(order) == sorted(searched)
        changed += order != searched
    assert changed
