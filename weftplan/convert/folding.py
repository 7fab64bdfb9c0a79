"""Folding of batch normalisation into the preceding layer: fewer nodes, same outputs, for inference.

Outside training ``BatchNorm`` multiplies each channel by a number and adds another. After a convolution or a fully
connected layer, both numbers can be merged into its weight and bias, and the node disappears. The rewritten symbol is
an ordinary symbol: print it with ``debug_str``, plan it, save it. It is for inference only, because folded parameters
no longer learn and ignore batch statistics.

The module is stateless; it does not change the input symbol and arrays. Values are computed in float64 and rounded
once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from weftplan.convert.rewired import followed, rewired
from weftplan.ndarray import NDArray, array
from weftplan.ops.nn.batch_norm import BATCH_NORMS
from weftplan.support.array_types import RawArray
from weftplan.symbol.compose import parse_interned
from weftplan.symbol.node import FOLDED, Entry, Node, topological_order
from weftplan.symbol.symbol import Symbol
from weftplan.training.fit.parameter_files import Params

LINEAR = ("Convolution", "FullyConnected")
"""Operators whose weight has a row for each output channel."""


def fold_batch_norm(
    symbol: Symbol, arg_params: Mapping[str, NDArray], aux_params: Mapping[str, NDArray]
) -> tuple[Symbol, Params, Params]:
    """Fold each ``BatchNorm`` into the layer before it if possible; return the new symbol and its parameters.

    Such a layer is a ``Convolution`` or a ``FullyConnected`` whose output has no other reader, with its own weight and
    bias; all values must be available. Every other node stays. The layer gets the name of the ``BatchNorm``, so that
    outputs keep their names.

    Args:
        symbol: the network.
        arg_params: parameters by name.
        aux_params: auxiliary states by name.

    Returns:
        (symbol, arg_params, aux_params): unchanged arrays are the input arrays.
    """
    values = {**arg_params, **aux_params}
    order = topological_order(symbol.entries)
    uses = Counter((entry[0], entry[1]) for node in order for entry in node.inputs)
    uses.update((entry.node, entry.index) for entry in symbol.entries)
    moved: dict[Node, Node] = {}
    changed: dict[str, np.ndarray[Any, Any]] = {}
    names_in_use = {node.name for node in order}
    for node in order:
        if node.is_variable:
            continue
        layer = node.inputs[0].node if node.op is not None and node.op.name in BATCH_NORMS else None
        if layer is None or not _can_be_folded(node, layer, uses, values):
            copy = rewired(node, [followed(entry, moved) for entry in node.inputs], moved)
            if copy is not node:
                moved[node] = copy
            continue
        weight, shift = layer.inputs[1].node, node.inputs[2].node
        bias = layer.inputs[2].node if len(layer.inputs) > 2 else _variable(f"{layer.name}_bias", names_in_use, shift)
        changed[weight.name], changed[bias.name] = _folded(node, layer, values)
        attrs = {**layer.attrs, "no_bias": "False"}
        assert layer.op is not None
        params = parse_interned(layer.op, attrs, node=node.name)
        moved[node] = Node(
            layer.op,
            node.name,
            attrs={**attrs, FOLDED: node.name},
            params=params,
            inputs=[followed(layer.inputs[0], moved), Entry(weight), Entry(bias)],
            created_at=layer.created_at,
        )
    folded = Symbol([followed(entry, moved) for entry in symbol.entries])
    names = {node.name for node in topological_order(folded.entries) if node.is_variable}
    arguments = {name: value for name, value in arg_params.items() if name in names}
    for name, new_value in changed.items():
        near = arg_params[name] if name in arg_params else next(iter(arg_params.values()))
        arguments[name] = array(new_value, ctx=near.context, dtype=new_value.dtype)
    return folded, arguments, {name: value for name, value in aux_params.items() if name in names}


def _can_be_folded(
    node: Node, layer: Node, uses: Mapping[tuple[Node, int], int], values: Mapping[str, NDArray]
) -> bool:
    if layer.op is None or layer.op.name not in LINEAR or node.control_deps or layer.control_deps:
        return False
    if uses[layer, 0] != 1 or uses[node, 1] or uses[node, 2] or node.params.get("axis", 1) != 1:
        return False
    if layer.op.name == "FullyConnected" and not layer.params["flatten"]:
        return False
    if "__ctx_group__" in layer.attrs and layer.attrs["__ctx_group__"] != node.attrs.get("__ctx_group__"):
        return False
    parameters = [entry.node for entry in layer.inputs[1:]]
    nodes = [*parameters, *(entry.node for entry in node.inputs[1:])]
    if not all(variable.is_variable and variable.name in values for variable in nodes):
        return False
    return all(uses[variable, 0] == 1 for variable in parameters)


def _variable(name: str, names_in_use: set[str], like: Node) -> Node:
    """Return a new variable with an unused name and the device group of ``like``."""
    while name in names_in_use:
        name += "_folded"
    names_in_use.add(name)
    return Node(None, name, attrs={key: text for key, text in like.attrs.items() if key == "__ctx_group__"})


def _folded(node: Node, layer: Node, values: Mapping[str, NDArray]) -> tuple[RawArray, RawArray]:
    """Return the weight and bias of ``layer`` after folding ``node`` into them."""
    weight = values[layer.inputs[1].node.name].asnumpy()
    gamma, beta, mean, var = (values[entry.node.name].asnumpy().astype(np.float64) for entry in node.inputs[1:])
    scale = 1.0 / np.sqrt(var + node.params["eps"])
    if not node.params["fix_gamma"]:
        scale = scale * gamma
    old_bias = values[layer.inputs[2].node.name].asnumpy().astype(np.float64) if len(layer.inputs) > 2 else 0.0
    spread = scale.reshape(-1, *[1] * (weight.ndim - 1))
    bias = beta + (old_bias - mean) * scale
    return (weight.astype(np.float64) * spread).astype(weight.dtype), bias.astype(weight.dtype)
