"""Colours and texts of nodes in pictures of networks."""

from __future__ import annotations

from weftplan.symbol import Node

_COLOURS = {
    "null": "#8dd3c7",
    "FullyConnected": "#fb8072",
    "Convolution": "#fb8072",
    "Deconvolution": "#fb8072",
    "BatchNorm": "#bebada",
    "Activation": "#ffffb3",
    "LeakyReLU": "#ffffb3",
    "Pooling": "#80b1d3",
    "Concat": "#fdb462",
    "Flatten": "#fdb462",
    "Reshape": "#fdb462",
    "SoftmaxOutput": "#b3de69",
    "softmax": "#b3de69",
}
_OTHER = "#fccde5"
_SHOWN = ("kernel", "stride", "pad", "num_filter", "num_group", "num_hidden", "act_type", "pool_type", "p", "scalar")


def colour_of(kind: str) -> str:
    """Return the colour of an operator by its name; the name ``null`` stands for a variable."""
    return _COLOURS.get(kind, _OTHER)


def label_of(node: Node) -> str:
    """Return the label of a node: lines with its operator, its name, and its main parameters."""
    if node.op is None:
        return node.name
    facts = [f"{key}={node.attrs[key]}" for key in _SHOWN if key in node.attrs]
    return "\n".join([node.op.name, node.name, *([", ".join(facts)] if facts else [])])
