"""Memory plans of ONNX files from sizes alone, for operators that this package does not implement.

Every node is a step of known sizes, in the file's order. Sizes are inferred by ``onnx``, declared in the file, or
passed by the caller. Nothing is computed, and no result shares memory with its input.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from types import ModuleType
from typing import Any

from weftplan.convert.onnx_in import OnnxFile
from weftplan.device.context import Context
from weftplan.errors import FormatError, ShapeError
from weftplan.planner.memory_plan import MemoryPlan
from weftplan.planner.options import PlanOptions
from weftplan.planner.program import VARIABLE, Graph, Program, Work
from weftplan.planner.strategies import plan_graph
from weftplan.support.post_order import post_order
from weftplan.support.tensor_types import DType, Shape


def plan_onnx(
    file: OnnxFile, shapes: Mapping[str, Shape] | None = None, *, options: PlanOptions | None = None
) -> MemoryPlan:
    """Return the plan of a model's inference; its notes name the unsupported operators.

    Args:
        shapes: shapes of inputs that the file leaves open, or of results that cannot be inferred.

    Raises:
        ShapeError: sizes are unknown; names the results.
        FormatError: the model's graph is damaged.
    """
    try:
        return _plan(file, shapes or {}, PlanOptions() if options is None else options)
    except (KeyError, IndexError, ValueError, RecursionError) as error:
        if isinstance(error, (FormatError, ShapeError)):
            raise
        raise FormatError(f"damaged, or beyond what is planned: {error}") from error


def _plan(file: OnnxFile, shapes: Mapping[str, Shape], options: PlanOptions) -> MemoryPlan:
    import onnx

    graph = _inferred(onnx, file.model, shapes)
    kinds: dict[str, tuple[Shape, DType]] = {}
    for value in (*graph.input, *graph.output, *graph.value_info):
        tensor = value.type.tensor_type
        dims = tuple(dim.dim_value if dim.HasField("dim_value") else -1 for dim in tensor.shape.dim)
        if tensor.elem_type and tensor.HasField("shape") and -1 not in dims:
            kinds[value.name] = dims, onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type)
    for tensor in graph.initializer:
        kinds[tensor.name] = tuple(tensor.dims), onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
    inputs = list(dict.fromkeys([value.name for value in graph.input] + [t.name for t in graph.initializer]))
    nodes = _needed(graph, set(inputs))
    results = [name for node in nodes for name in node.output]
    for name, shape in shapes.items():
        if name not in kinds and name in results:
            kinds[name] = tuple(shape), onnx.helper.tensor_dtype_to_np_dtype(1)
    unknown = [name for name in (*inputs, *results) if name and name not in kinds]
    if unknown:
        raise ShapeError(
            f"the sizes of {len(unknown)} results are not known: {', '.join(unknown[:8])}; give the shapes of the "
            f"inputs, or of these, as --shape NAME=DIMS"
        )
    sized = [kinds[name] if name else ((0,), onnx.helper.tensor_dtype_to_np_dtype(1)) for name in (*inputs, *results)]
    entry = {name: k for k, name in enumerate((*inputs, *results)) if name}
    sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in sized]
    count = len(inputs)
    program = Program(
        graph=Graph(
            names=inputs + [node.name or (node.output[0] if node.output else node.op_type) for node in nodes],
            works=[VARIABLE] * count + [Work(label=node.op_type) for node in nodes],
            inputs=[[] for _ in inputs] + [[entry[name] for name in node.input if name] for node in nodes],
            controls=[[] for _ in range(count + len(nodes))],
            counts=[1] * count + [len(node.output) for node in nodes],
            heads=[entry[value.name] for value in graph.output],
        ),
        order=list(range(count, count + len(nodes))),
        num_forward=len(nodes),
        nbytes=sizes,
        shapes=[shape for shape, _ in sized],
        dtypes=[dtype for _, dtype in sized],
        contexts=(Context("cpu", 0),),
        device=[0] * (count + len(nodes)),
        gradients=frozenset(),
        added=frozenset(),
        workspaces={},
        external_bytes={"arguments": sum(sizes[:count])},
    )
    lost = ", ".join(f"{name} ({times})" for name, times in sorted(file.unread().items()))
    memory = plan_graph(program, options).memory
    note = f"planned by sizes alone; operators that are not run: {lost or 'none'}; what they allocate inside is unknown"
    return replace(memory, notes=(*memory.notes, note))


def _inferred(onnx: ModuleType, model: Any, shapes: Mapping[str, Shape]) -> Any:
    """Set the shapes of inputs and return the graph with inferred shapes of results."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for value in copy.graph.input:
        dims = value.type.tensor_type.shape.dim
        if value.name in shapes and len(shapes[value.name]) == len(dims):
            for dim, size in zip(dims, shapes[value.name], strict=True):
                dim.dim_value = size
        elif dims and not dims[0].HasField("dim_value"):
            dims[0].dim_value = 1  # an open first dimension is 1, as in the import
    return onnx.shape_inference.infer_shapes(copy, data_prop=True).graph


def _needed(graph: Any, available: set[str]) -> list[Any]:
    """Return the nodes that the outputs need, each after its inputs."""
    maker = {name: k for k, node in enumerate(graph.node) for name in node.output if name}
    for node in graph.node:
        for name in node.input:
            if name and name not in maker and name not in available:
                raise FormatError(f"node {node.name!r} ({node.op_type}): its input {name!r} comes from nowhere")
    needs = [[maker[name] for name in node.input if name in maker] for node in graph.node]
    order = post_order([maker[value.name] for value in graph.output if value.name in maker], needs)
    return [graph.node[k] for k in sorted(order)]
