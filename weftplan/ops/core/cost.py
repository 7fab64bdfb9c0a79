"""The cost of an operator: arithmetic operations and passes over its data, for time models.

Arithmetic is counted for the operators that do more than a few operations for each element: matrix products and
convolutions (two for a multiplication with its addition, twice that for their backward nodes, which make two products).
Everything else takes as long as its traffic; operators that sweep their data several times say how often. Pure
functions of names, parameters and shapes; any thread may call them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod, sqrt

from weftplan.ops.core.schema import Shape

SWEEPS: Mapping[str, float] = {
    # Mean, variance and normalisation each pass over the data once.
    "BatchNorm": 2.0,
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
"""Factor of an operator's memory traffic, relative to one read of every input and one write of every output. It applies
to backward nodes, too."""

_PRODUCTS = frozenset(("FullyConnected", "dot", "batch_dot", "_linalg_gemm", "_linalg_gemm2"))
COUNTED = _PRODUCTS | {"Convolution", "Deconvolution", "RNN"}
"""Operators whose arithmetic :func:`operations` counts."""


def operations(
    name: str, ins: Sequence[Shape], outs: Sequence[Shape], *, is_backward: bool, wanted: Sequence[bool]
) -> float:
    """Arithmetic operations of one node of an operator in :data:`COUNTED`, or of its backward node.

    Args:
        name: the operator; for a backward node the forward one.
        ins: shapes of its inputs; of a backward node of products: outgoing gradient, left, right, and so on.
        outs: shapes of its outputs.
        is_backward: whether it is the backward node.
        wanted: of each output, whether anybody reads it.
    """
    if name == "RNN":  # every parameter meets every step of every sample, twice more for the gradients
        data, vector = (outs if is_backward else ins)[:2]
        return (4.0 if is_backward else 2.0) * prod(data[:2]) * prod(vector)
    if len(ins) < (3 if is_backward else 2):
        return 0.0
    out, left, right = ins[:3] if is_backward else (outs[0], *ins[:2])
    times = 2.0 * sum(wanted[:2]) if is_backward else 2.0
    if name == "Convolution":
        return times * prod(out) * prod(right[1:])
    if name == "Deconvolution":
        return times * prod(left) * prod(right[1:])
    # (m, k) by (k, n): the root of mk * kn * mn is mkn; a batch of B products counts B too often under the root.
    batch = left[0] if name == "batch_dot" else 1
    return times * sqrt(prod(out) * prod(left) * prod(right) / max(batch, 1))


def window(params: Mapping[str, object]) -> int:
    """Return the elements that a pooling window covers; the whole image counts once, because it is one ordinary
    reduction."""
    kernel = params.get("kernel")
    if params.get("global_pool") or not isinstance(kernel, tuple):
        return 1
    return prod(int(side) for side in kernel)
