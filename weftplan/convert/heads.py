"""Changes at the end of a network: a last layer for other classes, and losses whose labels are not computed.

The module is stateless; it does not change the input symbol. Both functions return ordinary symbols, which share the
unchanged nodes with the input.
"""

from __future__ import annotations

from weftplan import symbol as sym
from weftplan.convert.rewired import followed, rewired
from weftplan.errors import MXNetError
from weftplan.symbol.compose import parse_interned
from weftplan.symbol.node import Entry, Node, topological_order
from weftplan.symbol.symbol import Symbol

_WIDTHS = {"FullyConnected": "num_hidden", "Convolution": "num_filter"}
"""Layers that can be the last one, and the parameter with the number of their outputs."""
_PROBABILITIES = ("SoftmaxOutput", "softmax", "SoftmaxActivation")
_KEEPING = frozenset(
    "Flatten Reshape Pooling Activation LeakyReLU Dropout _copy BlockGrad squeeze mean relu identity Cast".split()  # noqa: SIM905
)
"""Operators that may follow the last layer: they keep its channels and have no parameters."""


def classes_of(symbol: Symbol) -> int:
    """Return the number of outputs of the last layer of a network for classification.

    Raises:
        MXNetError: the first output does not come from a fully connected layer or a convolution.
    """
    layer = _tail(symbol)[-1]
    assert layer.op is not None
    return int(layer.params[_WIDTHS[layer.op.name]])


def with_classes(symbol: Symbol, count: int) -> Symbol:
    """Return a network whose last layer has ``count`` outputs and that ends in a SoftmaxOutput called ``softmax``.

    A last layer of another width is replaced by a new one, whose name and parameters end in the number of classes, so
    that stored values of the old layer do not fit it by name; the last layer stays if it has ``count`` outputs.

    Raises:
        MXNetError: the first output does not come from a fully connected layer or a convolution.

    >>> from weftplan import models
    >>> with_classes(models.get("mlp"), 3).list_arguments()[-3:]
    ['fc3_3_weight', 'fc3_3_bias', 'softmax_label']
    """
    tail = _tail(symbol)
    layer = tail[-1]
    assert layer.op is not None
    moved: dict[Node, Node] = {}
    if classes_of(symbol) != count:
        name = f"{layer.name}_{count}"
        attrs = {**layer.attrs, _WIDTHS[layer.op.name]: str(count)}
        words = layer.op.input_names(layer.params)[1:]
        moved[layer] = Node(
            layer.op,
            name,
            attrs=attrs,
            params=parse_interned(layer.op, attrs, node=name),
            inputs=[layer.inputs[0], *(Entry(Node(None, f"{name}_{word}")) for word in words)],
        )
        for node in reversed(tail[:-1]):
            moved[node] = rewired(node, [followed(entry, moved) for entry in node.inputs], moved)
    end = moved.get(tail[0], tail[0])
    if end.op is not None and end.op.name == "SoftmaxOutput":
        return Symbol([Entry(end)])
    scores = end.inputs[0] if end.op is not None and end.op.name in _PROBABILITIES else Entry(end)
    result: Symbol = sym.SoftmaxOutput(Symbol([scores]), name="softmax")
    return result


def without_computed_labels(symbol: Symbol) -> Symbol:
    """Return the network for inference: a label that passes other operators on its way is read by its loss directly.

    A loss ignores its label in inference, and its label's shape then follows from the shapes of its other inputs. The
    outputs have the same values.
    """
    moved: dict[Node, Node] = {}
    for node in topological_order(symbol.entries):
        inputs = [followed(entry, moved) for entry in node.inputs]
        if node.op is not None and node.op.loss:
            names = node.op.input_names(node.params)
            for position in node.op.ignored(node.params):
                if position and not inputs[position].node.is_variable:
                    inputs[position] = Entry(Node(None, f"{node.name}_{names[position]}"))
        copy = rewired(node, inputs, moved)
        if copy is not node:
            moved[node] = copy
    return Symbol([followed(entry, moved) for entry in symbol.entries]) if moved else symbol


def _tail(symbol: Symbol) -> list[Node]:
    """Return the nodes from the first output back to the last layer."""
    node, tail = symbol.entries[0].node, []
    while node.op is not None:
        tail.append(node)
        if node.op.name in _WIDTHS:
            return tail
        if not (node.op.name in _KEEPING or (node is tail[0] and node.op.name in _PROBABILITIES)):
            break
        node = node.inputs[0].node
    path = " <- ".join(layer.op.name for layer in tail if layer.op is not None) or node.name
    raise MXNetError(
        f"the output {symbol.list_outputs()[0]} comes from {path}, not from a fully connected layer or a convolution, "
        f"so there is no last layer for other classes"
    )
