"""State of an ONNX export: the graph so far, the current node, and the table of rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from weftplan.convert.library import onnx_module
from weftplan.errors import MXNetError, ShapeError
from weftplan.ops.core.schema import Shape
from weftplan.support.array_types import DType, DTypeLike
from weftplan.symbol import Symbol, topological_order
from weftplan.symbol.inference import solver as infer
from weftplan.symbol.node import Entry, Node


class NodeWriter:
    """The node under export, with the queries and outputs that its rule may use."""

    def __init__(self, graph: OnnxGraph, node: Node) -> None:
        self.graph = graph
        self.node = node
        self.params = node.params
        self.inputs = [graph.name(entry) for entry in node.inputs]
        self.outputs = [graph.name(Entry(node, k)) for k in range(node.num_outputs)]
        self.count = 0

    def shape(self, k: int = 0) -> Shape:
        """Return the shape of input ``k``."""
        return self.graph.shape(self.node.inputs[k])

    def out_shape(self, k: int = 0) -> Shape:
        """Return the shape of output ``k``."""
        return self.graph.shape(Entry(self.node, k))

    def dtype(self, k: int = 0) -> DType:
        """Return the dtype of input ``k``."""
        return self.graph.dtype(self.node.inputs[k])

    def fresh(self) -> str:
        """Return a name for an intermediate value."""
        self.count += 1
        return f"{self.node.name}__{self.count}"

    def constant(self, values: ArrayLike, dtype: DTypeLike | None = None) -> str:
        """Add a constant array; return its name."""
        name = self.fresh()
        self.graph.initializers[name] = np.asarray(values, dtype)
        return name

    def emit(self, op: str, inputs: Sequence[str], output: str | Sequence[str] | None = None, **attrs: object) -> str:
        """Add an ONNX node; return its (first) output. Without ``output`` the name is new."""
        outputs = [output or self.fresh()] if output is None or isinstance(output, str) else list(output)
        self.graph.emit(op, inputs, outputs, f"{self.node.name}__{op}_{len(self.graph.nodes)}", attrs)
        return outputs[0]

    def end(self, op: str, inputs: Sequence[str], **attrs: object) -> None:
        """Add an ONNX node whose output is the node's output."""
        self.emit(op, inputs, self.outputs[0], **attrs)

    def refuse(self, why: str) -> MXNetError:
        """Return the error for an operator that ONNX or the export rules cannot express."""
        assert self.node.op is not None
        return MXNetError(f"convert: operator {self.node.op.name} ({self.node.name!r}): {why}")


class OnnxGraph:
    def __init__(self, symbol: Symbol, shapes: Mapping[str, Shape], dtypes: Mapping[str, DTypeLike]) -> None:
        self.all = topological_order(symbol.entries)
        self.rows = dict(zip(self.all, infer.entry_rows(self.all), strict=False))
        self.shapes = infer.infer_shapes(self.all, shapes)
        variable_dtypes = {node: np.dtype(dtypes.get(node.name, np.float32)) for node in self.all if node.op is None}
        self.dtypes = infer.infer_dtypes(self.all, variable_dtypes)
        self.nodes: list[Any] = []
        self.initializers: dict[str, Any] = {}
        self.used_names = {node.name for node in self.all if node.op is None}

    def name(self, entry: Entry) -> str:
        node = entry.node
        if node.op is None:
            return node.name
        name = f"{node.name}_{node.op.output_names(node.params)[entry.index]}"
        return f"{name}_" if name in self.used_names else name

    def shape(self, entry: Entry) -> Shape:
        shape: Shape | None = self.shapes[self.rows[entry.node] + entry.index]
        if shape is None or 0 in shape:
            raise ShapeError(f"convert: the shape of {self.name(entry)!r} is not known; give the shapes of all inputs")
        return shape

    def dtype(self, entry: Entry) -> DType:
        dtype = self.dtypes[self.rows[entry.node] + entry.index]
        return np.dtype(np.float32 if dtype is None else dtype)

    def emit(self, op: str, inputs: Sequence[str], outputs: list[str], name: str, attrs: Mapping[str, object]) -> None:
        onnx = onnx_module()
        self.nodes.append(onnx.helper.make_node(op, list(inputs), outputs, name=name, **attrs))


Rule = Callable[[NodeWriter], None]
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Return a decorator that registers a rule for these operators."""

    def note(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return note
