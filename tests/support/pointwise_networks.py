"""Networks with trees of elementwise nodes, for tests of their fusion on GPUs."""

from __future__ import annotations

from typing import Any

import weftplan as mx
from weftplan.planner import PlanOptions, plan_symbol

sym = mx.sym


def residual() -> Any:
    """Return a network of two residual blocks: convolutions, with and without a bias, and batch norms."""
    x = sym.Variable("data")
    for name in "ab":
        y = sym.Convolution(x, num_filter=4, kernel=(3, 3), pad=(1, 1), no_bias=True, name=f"{name}1")
        y = sym.Activation(sym.BatchNorm(y, fix_gamma=False, name=f"{name}norm1"), act_type="relu", name=f"{name}relu1")
        y = sym.Convolution(y, num_filter=4, kernel=(3, 3), pad=(1, 1), name=f"{name}2")
        y = sym.BatchNorm(y, name=f"{name}norm2") + x
        x = sym.Activation(y, act_type="relu", name=f"{name}relu2")
    return x


def feed_forward(*activations: str) -> Any:
    """Return a network of two matrix products per activation, with a sum after them, as in a transformer."""
    x = sym.Variable("data")
    for k, activation in enumerate(activations):
        hidden = sym.FullyConnected(x, num_hidden=12, flatten=False, name=f"up{k}")
        kind = sym.LeakyReLU if activation in ("gelu", "leaky", "elu", "selu") else sym.Activation
        hidden = kind(hidden, act_type=activation, name=f"{activation}{k}")
        x = x + sym.FullyConnected(hidden, num_hidden=7, flatten=False, name=f"down{k}")
    return x


def recurrent() -> Any:
    """Return a network of three steps of an LSTM cell."""
    outputs, _ = mx.rnn.LSTMCell(6, prefix="cell_").unroll(3, inputs=sym.Variable("data"), merge_outputs=True)
    return sym.FullyConnected(outputs, num_hidden=3, name="last")


def formulas() -> Any:
    """Return a network of many elementwise operators on arrays of several shapes."""
    x, row, column = sym.Variable("data"), sym.Variable("row", shape=(1, 6)), sym.Variable("column", shape=(5, 1))
    y = sym.broadcast_mul(sym.broadcast_add(x, row), column)
    y = sym.exp(-sym.abs(y)) + sym.sqrt(sym.square(x) + 1.0) * 0.25 - sym.clip(y, -0.5, 0.5)
    return sym.tanh(y) / (1.0 + sym.sigmoid(x)) + sym.broadcast_div(x, sym.Variable("number", shape=(1, 1)) + 3.0)


NETWORKS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "residual": (residual, (2, 4, 5, 6)),
    "gelu": (lambda: feed_forward("gelu"), (2, 3, 7)),
    "activations": (
        lambda: feed_forward("leaky", "elu", "selu", "relu", "sigmoid", "tanh", "softrelu", "softsign"), (2, 3, 7)),
    "recurrent": (recurrent, (2, 3, 5)),
    "formulas": (formulas, (5, 6)),
}  # fmt: skip
"""For each name the function that creates the symbol, and the shape of its data."""


def planned(symbol: Any, shape: tuple[int, ...], *, grad_req: str = "write", **options: Any) -> Any:
    """Return the plan of a network for a GPU; planning needs no GPU."""
    return plan_symbol(symbol, {"data": shape}, grad_req=grad_req, context=mx.gpu(0), options=PlanOptions(**options))


def groups(graph: Any) -> list[Any]:
    """Return the groups of the fused nodes of a planned graph."""
    return [node.params["group"] for node in graph.nodes if node.op is not None and node.op.name == "pointwise"]
