"""What is known of an input before anybody gives its shape: its axes, and a shape to begin with.

The first layer that reads an input tells it, and the weights of that layer, where they are at hand. Commands say it
where a shape is missing or does not fit.
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
"""Operators between an input and the first layer with weights that leave its shape alone, with those that end so."""
_SCALARS = "_scalar"
_SIZES = {"N": 1, "T": 35, "D": 16}
"""Sizes to begin with of axes that any size fits."""
_SIDES = (224, 299, 227, 256, 320, 112, 128, 192, 160, 100, 96, 64, 48, 40, 32, 28, 24, 16, 12, 8)
"""Sides of images, the usual ones first."""
_COLOURS = 3


@dataclass(frozen=True, slots=True)
class Form:
    """What the first layer behind an input tells of it."""

    axes: tuple[str, ...] = ()
    """Names of the axes, such as N, C, H and W; empty where nothing tells."""
    shape: Shape | None = None
    """With 0 for what is open; None where no weights tell a size."""
    words: str = ""
    """The same for people."""

    def sizes(self, side: int) -> Shape:
        """A shape to begin with, whose image has this side; empty where an axis may have one size alone, not known."""
        known = self.shape or (0,) * len(self.axes)
        image = {"H", "W"} <= set(self.axes) and "D" not in self.axes
        sizes = tuple(
            size or _SIZES.get(axis) or (side if axis in "HW" else _COLOURS if axis == "C" and image else 0)
            for axis, size in zip(self.axes, known, strict=True)
        )
        return sizes if all(sizes) else ()

    def advice(self, name: str, usual: Shape = ()) -> str:
        """What to type: ``--shape data=N,C,H,W, such as --shape data=1,3,224,224``."""
        option = f"--shape {name}="
        example = f", such as {option}{','.join(map(str, usual))}" if usual else ""
        return option + (",".join(self.axes) or "DIMS") + example


def form_of(nodes: Sequence[Node], name: str, stored: Mapping[str, Shape] | None = None) -> Form:
    """The form of the input ``name``, from the first layer behind it and the shapes of its stored parameters."""
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
            return Form(("N", "T"), None, f"indices below {node.params['input_dim']}")
        if op == "RNN":
            return Form(("T", "N", "FEATURES"), None, "steps first")
        if op in _ELEMENTWISE or op.endswith(_SCALARS):
            reach.add(node)
    return Form(words="a label" if is_label(nodes, name) else "")


def is_label(nodes: Sequence[Node], name: str) -> bool:
    """Whether an input is a label, which inference does without: by its name, or since losses alone read it."""
    if name.endswith("label"):
        return True
    readers = [
        node.op is not None and node.op.loss and place in node.op.ignored(node.params)
        for node in nodes
        for place, entry in enumerate(node.inputs)
        if entry.node.op is None and entry.node.name == name
    ]
    return bool(readers) and all(readers)


def usual_shape(nodes: Sequence[Node], name: str, form: Form, stored: Mapping[str, Shape] | None = None) -> Shape:
    """A shape of ``name`` to begin with, which agrees with stored parameters; empty where none is known."""
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
    given: Mapping[str, Shape],
    stored: Mapping[str, Shape] | None = None,
    usual: Mapping[str, Shape] | None = None,
) -> str:
    """What to type about the first input whose shape was not given, or was given with another number of axes.

    Args:
        given: shapes by name.
        stored: shapes of parameters that are at hand.
        usual: shapes that inputs have where nobody says otherwise.

    Returns:
        Words; empty where every input was given as many axes as it has.
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
        if name not in given or (axes and len(given[name]) != axes):
            return form.advice(name, usual.get(name) or usual_shape(nodes, name, form, stored))
    return ""
