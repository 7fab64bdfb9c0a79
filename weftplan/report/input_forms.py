"""Expected input shapes, inferred from a network's layers: axes, and an example shape.

The first layer that reads an input determines its axes; stored weights of that layer determine some sizes. Commands
print the result if a shape is missing or does not fit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from weftplan.errors import ShapeError
from weftplan.ops.core.schema import Shape
from weftplan.ops.nn.batch_norm import BATCH_NORMS
from weftplan.symbol import Symbol, topological_order
from weftplan.symbol.inference import solver as infer
from weftplan.symbol.node import Node

_ELEMENTWISE = (*BATCH_NORMS, "Cast", "_copy", "Dropout", "identity")
"""Operators that keep the shape between an input and its first layer with weights, by name or by suffix."""
_SCALARS = "_scalar"
_SIZES = {"N": 1, "T": 35, "D": 16}
"""Default sizes of axes that accept any size."""
_SIDES = (224, 299, 227, 256, 320, 112, 128, 192, 160, 100, 96, 64, 48, 40, 32, 28, 24, 16, 12, 8)
"""Common side lengths of images, the most usual first."""
_COLOURS = 3


@dataclass(frozen=True, slots=True)
class Form:
    """The form of an input, inferred from the first layer that reads it."""

    axes: tuple[str, ...] = ()
    """Names of the axes, such as N, C, H and W; empty if unknown."""
    shape: Shape | None = None
    """The shape, with 0 for an open size; None if no weights determine a size."""
    words: str = ""
    """The form in words."""
    indices: int | None = None
    """Number of rows of the table that the input's values index; None if they are no indices."""

    def sizes(self, side: int) -> Shape:
        """Return an example shape with this image side; empty if an axis needs an unknown size."""
        shape = self.shape or (0,) * len(self.axes)
        image = {"H", "W"} <= set(self.axes) and "D" not in self.axes
        sizes = tuple(
            size or _SIZES.get(axis) or (side if axis in "HW" else _COLOURS if axis == "C" and image else 0)
            for axis, size in zip(self.axes, shape, strict=True)
        )
        return sizes if all(sizes) else ()

    def advice(self, name: str, usual: Shape = ()) -> str:
        """Return the text to type: ``--shape data=N,C,H,W, such as --shape data=1,3,224,224``."""
        option = f"--shape {name}="
        example = f", such as {option}{','.join(map(str, usual))}" if usual else ""
        return option + (",".join(self.axes) or "DIMS") + example


def form_of(nodes: Sequence[Node], name: str, stored: Mapping[str, Shape] | None = None) -> Form:
    """Return the form of the input ``name``, from its first layer and the shapes of stored parameters."""
    stored = stored or {}
    reach = {node for node in nodes if node.op is None and node.name == name}
    for node in nodes:
        if node.op is None or not node.inputs or node.inputs[0].node not in reach:
            continue
        op = node.op.name
        weight = stored.get(node.inputs[1].node.name) if len(node.inputs) > 1 else None
        if op == "Convolution":
            layout = node.params["layout"] or "NC" + "DHW"[-len(node.params["kernel"]) :]
            if weight is None:
                return Form(tuple(layout), None, f"{layout}, convolution {node.name}")
            channels = weight[layout.index("C")] * node.params["num_group"]
            shape = tuple(channels if axis == "C" else 0 for axis in layout)
            return Form(tuple(layout), shape, f"{layout} with {channels} channel{'s' * (channels != 1)}")
        if op == "Pooling":
            layout = "NC" + "DHW"[-len(node.params["kernel"]) :]
            return Form(tuple(layout), None, f"{layout}, pooling {node.name}")
        if op == "FullyConnected":
            flat = "a sample" if node.params["flatten"] else "the last axis"
            words = f"{weight[-1]} features in {flat}" if weight is not None else ""
            features = (0, weight[1]) if weight is not None and len(weight) == 2 else None
            return Form(("N", "FEATURES"), features, words)
        if op == "Embedding":
            limit = node.params["input_dim"]
            return Form(("N", "T"), None, f"indices below {limit}", indices=limit)
        if op == "RNN":
            return Form(("T", "N", "FEATURES"), None, "steps first")
        if op in _ELEMENTWISE or op.endswith(_SCALARS):
            reach.add(node)
    return Form(words="a label" if is_label(nodes, name) else "")


def is_label(nodes: Sequence[Node], name: str) -> bool:
    """Return whether an input is a label, judged by its name or because only losses read it."""
    if name.endswith("label"):
        return True
    readers = [
        node.op is not None and node.op.loss and position in node.op.ignored(node.params)
        for node in nodes
        for position, entry in enumerate(node.inputs)
        if entry.node.op is None and entry.node.name == name
    ]
    return bool(readers) and all(readers)


def usual_shape(nodes: Sequence[Node], name: str, form: Form, stored: Mapping[str, Shape] | None = None) -> Shape:
    """Return an example shape of ``name`` that agrees with stored parameters; empty if there is none."""
    for side in _SIDES:
        shape = form.sizes(side)
        if not shape:
            return ()
        try:
            infer.infer_shapes(nodes, {**(stored or {}), name: shape})
        except ShapeError:
            continue
        return shape
    return ()


def advice(
    symbol: Symbol,
    explicit: Mapping[str, Shape],
    stored: Mapping[str, Shape] | None = None,
    usual: Mapping[str, Shape] | None = None,
) -> str:
    """Return advice about the first input whose shape is missing or has the wrong number of axes.

    Args:
        explicit: shapes by name.
        stored: shapes of available parameters.
        usual: default shapes of inputs.

    Returns:
        Words; empty if every input has the right number of axes.
    """
    nodes = topological_order(symbol.entries)
    stored, usual = stored or {}, usual or {}
    flowing = [
        entry.node.name
        for node in nodes
        if node.op is not None
        for entry in node.inputs[:1]
        if entry.node.op is None and entry.node.name not in stored
    ]
    for name in dict.fromkeys(flowing):
        form = form_of(nodes, name, stored)
        axes = len(usual.get(name, form.axes))
        if name not in explicit or (axes and len(explicit[name]) != axes):
            return form.advice(name, usual.get(name) or usual_shape(nodes, name, form, stored))
    return ""
