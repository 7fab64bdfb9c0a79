"""The cost of an operator for time models: arithmetic operations, and passes over its data.

Arithmetic is counted for operators with more than a few operations per element, which are matrix products,
convolutions and RNNs. A multiplication with its addition counts as two operations. The time of all other operators
follows from their memory traffic; :data:`SWEEPS` has those that read their data several times. On a host a formula
takes at least the time of its functions (:data:`FUNCTIONS`). No function keeps state but a cache of prices, so any
thread may call them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod, sqrt

import numpy as np

from weftplan.ops.core.schema import Params, Shape

SWEEPS: Mapping[str, float] = {
    # Mean, variance and normalisation each pass over the data once.
    "BatchNorm": 2.0,
    "BatchNorm_v1": 2.0,
    "_contrib_SyncBatchNorm": 2.0,
    "LayerNorm": 2.0,
    "InstanceNorm": 2.0,
    "GroupNorm": 2.0,
    "L2Normalization": 1.5,
    "LRN": 3.0,
    "softmax": 2.0,
    "log_softmax": 2.0,
    "SoftmaxActivation": 2.0,
    "SoftmaxOutput": 2.0,
    # Random bits cost more than the traffic of the mask.
    "Dropout": 4.0,
}
"""Memory traffic of an operator and of its backward node, relative to one read of every input and one write of every
output."""

FUNCTIONS: Mapping[str, float] = {
    **dict.fromkeys(("exp", "expm1", "log", "log1p", "log2", "log10", "tanh", "sqrt", "cbrt", "hypot"), 4.0e-10),
    **dict.fromkeys(("sin", "cos", "tan", "arcsin", "arccos", "arctan", "sinh", "cosh"), 5.0e-10),
    **dict.fromkeys(("arcsinh", "arccosh", "arctanh", "power", "remainder", "fmod", "floor_divide"), 7.0e-10),
}
"""Seconds per float32 element of one core under NumPy, for functions that take longer than :data:`PASS`. Smallest
processor time of nine calls, AVX-512, loaded."""

PASS = 1.3e-10
"""Seconds per float32 element of an addition of arrays in the cache. The 150 passes of erf take 19 ns, measured 20."""

_PRODUCTS = frozenset(("FullyConnected", "dot", "batch_dot", "_linalg_gemm", "_linalg_gemm2"))
COUNTED = _PRODUCTS | {"Convolution", "Deconvolution", "RNN"}
"""Operators whose arithmetic :func:`operations` counts."""


def operations(
    name: str, ins: Sequence[Shape], outs: Sequence[Shape], *, is_backward: bool, needed: Sequence[bool]
) -> float:
    """Return the arithmetic operations of a node of an operator in :data:`COUNTED`, or of its backward node.

    Args:
        name: the operator; for a backward node the forward operator.
        ins: shapes of the node's inputs; for a backward node of products: output gradient, left operand, right operand.
        outs: shapes of the node's outputs.
        is_backward: whether the node is the backward node.
        needed: for each output, whether another node reads it.
    """
    if name == "RNN":  # every step of every sample is multiplied by every parameter, twice as often for gradients
        data, vector = (outs if is_backward else ins)[:2]
        return (4.0 if is_backward else 2.0) * prod(data[:2]) * prod(vector)
    if len(ins) < (3 if is_backward else 2):
        return 0.0
    out, lhs, rhs = ins[:3] if is_backward else (outs[0], *ins[:2])
    times = 2.0 * sum(needed[:2]) if is_backward else 2.0
    if name == "Convolution":
        return times * prod(out) * prod(rhs[1:])
    if name == "Deconvolution":
        return times * prod(lhs) * prod(rhs[1:])
    # (m, k) by (k, n): the root of mk * kn * mn is mkn. In a batch of B products the root has a factor B too many.
    batch = lhs[0] if name == "batch_dot" else 1
    return times * sqrt(prod(out) * prod(lhs) * prod(rhs) / max(batch, 1))


def formula_seconds(kernel: object, params: Params, count: int, nbytes: int) -> float:
    """Return the seconds of the functions of an elementwise kernel on a host; 0 if the kernel is no formula.

    Args:
        kernel: the kernel of the operator.
        params: the parameters of the node.
        count: number of inputs.
        nbytes: bytes of the output; float64 takes twice as long as float32.
    """
    choose = getattr(kernel, "choose", None)
    if choose is not None:
        kernel, params = choose(params)
    chosen: Callable[[Params], dict[str, object]] | None = getattr(kernel, "chosen", None)
    if chosen is None:
        return 0.0
    key = (kernel, *chosen(params).values(), count)
    if key not in _prices:
        # A formula has loaded this module; a plan without formulas does without it.
        from weftplan.ops.core.expression import Expr, operations

        operands = [Expr("input", f"x{k}") for k in range(count)]
        passes = operations(kernel.expressions(params, np.dtype(np.float32), operands))  # type: ignore[attr-defined]
        names = [step.op if step.function is None else step.function.__name__ for step in passes]
        _prices[key] = sum(FUNCTIONS.get(name, PASS) for name in names)
    return _prices[key] * nbytes / 4


_prices: dict[tuple[object, ...], float] = {}
"""Seconds per float32 element by kernel, its choices and its number of inputs."""


def window(params: Mapping[str, object]) -> int:
    """Return the number of elements of a pooling window; 1 for a global pooling, which is one ordinary reduction."""
    kernel = params.get("kernel")
    if params.get("global_pool") or not isinstance(kernel, tuple):
        return 1
    return prod(int(side) for side in kernel)
