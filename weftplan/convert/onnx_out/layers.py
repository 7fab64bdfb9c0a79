"""ONNX export of layers with parameters, pooling and products.

Each rule adds the ONNX nodes of one operator to the graph of its :class:`.NodeWriter`. Importing the module registers
the rules; only one thread may build a graph.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from weftplan.convert.kinds import POOLS
from weftplan.convert.onnx_out.writing import NodeWriter, rule
from weftplan.ops.nn.batch_norm import BATCH_NORMS


def _window(call: NodeWriter, axes: int) -> dict[str, list[int]]:
    """Return the attributes of a window; missing strides are 1, missing pads 0."""
    pad = list(call.params["pad"] or (0,) * axes)
    return {"strides": list(call.params["stride"] or (1,) * axes), "pads": pad + pad}


@rule("Convolution")
def _convolution(call: NodeWriter) -> None:
    kernel = call.params["kernel"]
    dilate = list(call.params["dilate"] or (1,) * len(kernel))
    facts = {"kernel_shape": list(kernel), "dilations": dilate, "group": call.params["num_group"]}
    call.end("Conv", call.inputs, **_window(call, len(kernel)), **facts)


@rule("Deconvolution")
def _deconvolution(call: NodeWriter) -> None:
    if call.params["target_shape"]:
        raise call.refuse("target_shape has no counterpart; write pad and adj")
    kernel = call.params["kernel"]
    axes = len(kernel)
    facts = {
        "kernel_shape": list(kernel),
        "dilations": list(call.params["dilate"] or (1,) * axes),
        "group": call.params["num_group"],
        "output_padding": list(call.params["adj"] or (0,) * axes),
    }
    call.end("ConvTranspose", call.inputs, **_window(call, axes), **facts)


@rule(*BATCH_NORMS)
def _batch_norm(call: NodeWriter) -> None:
    if call.params.get("axis", 1) % len(call.shape()) != 1:
        raise call.refuse("the channels must be axis 1")
    inputs = list(call.inputs)
    if call.params["fix_gamma"]:
        inputs[1] = call.constant(np.ones(call.shape(1)), call.dtype(1))
    call.emit(
        "BatchNormalization", inputs, call.outputs[0], epsilon=call.params["eps"], momentum=call.params["momentum"]
    )


@rule("InstanceNorm")
def _instance_norm(call: NodeWriter) -> None:
    call.end("InstanceNormalization", call.inputs, epsilon=call.params["eps"])


@rule("LayerNorm")
def _layer_norm(call: NodeWriter) -> None:
    if call.params["axis"] % len(call.shape()) != len(call.shape()) - 1:
        raise call.refuse("the axis must be the last one")
    call.end("LayerNormalization", call.inputs, epsilon=call.params["eps"], axis=-1)


@rule("LRN")
def _lrn(call: NodeWriter) -> None:
    channels = call.params["nsize"]
    window = channels - (channels % 2 == 0)  # of an even number MXNet sums one channel less, ONNX does not
    alpha = call.params["alpha"] * window / channels
    facts = {"alpha": alpha, "beta": call.params["beta"], "bias": call.params["knorm"]}
    call.emit("LRN", call.inputs, call.outputs[0], size=window, **facts)


@rule("FullyConnected")
def _fully_connected(call: NodeWriter) -> None:
    data = call.inputs[0]
    if call.params["flatten"] or len(call.shape()) == 2:
        flat = data if len(call.shape()) == 2 else call.emit("Flatten", [data], axis=1)
        call.end("Gemm", [flat, *call.inputs[1:]], transB=1)
        return
    product = call.emit("MatMul", [data, call.emit("Transpose", [call.inputs[1]], perm=[1, 0])],
                        call.outputs[0] if call.params["no_bias"] else None)  # fmt: skip
    if not call.params["no_bias"]:
        call.end("Add", [product, call.inputs[2]])


@rule("Pooling")
def _pooling(call: NodeWriter) -> None:
    p, kind, axes = call.params, call.params["pool_type"], len(call.shape()) - 2
    if p["pooling_convention"] == "same":
        raise call.refuse("pooling_convention=same has no counterpart")
    theirs = POOLS["avg" if kind == "sum" else kind]
    facts: dict[str, Any] = {"p": p["p_value"] or 2} if kind == "lp" else {}
    sizes = call.shape()[2:] if p["global_pool"] else p["kernel"]
    pooled = call.fresh() if kind == "sum" else call.outputs[0]
    if p["global_pool"]:
        call.emit(f"Global{theirs}", call.inputs, pooled, **facts)
    else:
        if p["pooling_convention"] == "full" and kind != "lp":
            facts["ceil_mode"] = 1
        elif p["pooling_convention"] == "full":
            raise call.refuse("pooling_convention=full of lp pooling has no counterpart")
        if kind in ("avg", "sum"):
            facts["count_include_pad"] = int(kind == "sum" or p["count_include_pad"] is not False)
        call.emit(theirs, call.inputs, pooled, kernel_shape=list(sizes), **_window(call, axes), **facts)
    if kind == "sum":
        call.end("Mul", [pooled, call.constant(math.prod(sizes), call.dtype())])


@rule("Embedding")
def _embedding(call: NodeWriter) -> None:
    call.end("Gather", [call.inputs[1], call.emit("Cast", [call.inputs[0]], to=7)], axis=0)


@rule("dot", "batch_dot")
def _dot(call: NodeWriter) -> None:
    left, right = call.inputs
    for k, flag in enumerate(("transpose_a", "transpose_b")):
        rank = len(call.shape(k))
        if call.node.op is not None and call.node.op.name == "dot" and rank > 2:
            raise call.refuse("more than two dimensions have no counterpart")
        if call.params[flag] and rank > 1:
            perm = [*range(rank - 2), rank - 1, rank - 2]
            swapped = call.emit("Transpose", [call.inputs[k]], perm=perm)
            left, right = (swapped, right) if k == 0 else (left, swapped)
    product = call.emit("MatMul", [left, right])
    call.end("Reshape", [product, call.constant(call.out_shape(), np.int64)])


@rule("L2Normalization")
def _l2(call: NodeWriter) -> None:
    rank = len(call.shape())
    axes = {"instance": list(range(1, rank)), "channel": [1], "spatial": list(range(2, rank))}[call.params["mode"]]
    squares = call.emit(
        "ReduceSum", [call.emit("Mul", [call.inputs[0]] * 2), call.constant(axes, np.int64)], keepdims=1
    )
    norm = call.emit("Sqrt", [call.emit("Add", [squares, call.constant(call.params["eps"], call.dtype())])])
    call.end("Div", [call.inputs[0], norm])
