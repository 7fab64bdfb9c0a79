"""ONNX models for tests, and their outputs from onnxruntime and from an executor.

Import this file only if onnx and onnxruntime are installed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as runtime

import weftplan as mx


def parameters(symbol: Any, **shapes: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return random (arguments, auxiliary states), the same at each call, without inputs and labels."""
    random = np.random.RandomState(7)
    of_arguments, _, of_states = symbol.infer_shape(**shapes)
    pairs = zip(symbol.list_arguments(), of_arguments, strict=True)
    args = {k: mx.nd.array(random.uniform(0.1, 0.9, s)) for k, s in pairs if k not in shapes and "label" not in k}
    pairs = zip(symbol.list_auxiliary_states(), of_states, strict=True)
    return args, {k: mx.nd.array(random.uniform(0.5, 1, s)) for k, s in pairs}


def executor_outputs(symbol: Any, args: Any, aux: Any, **fed: Any) -> list[Any]:
    """Return the outputs of an executor for the inputs ``fed``."""
    shapes = {key: value.shape for key, value in fed.items()}
    executor = symbol.simple_bind(mx.cpu(), grad_req="null", **shapes)
    executor.copy_params_from(args, aux, allow_missing=True)
    return [one.asnumpy() for one in executor.forward(**{k: mx.nd.array(v) for k, v in fed.items()})]


def onnxruntime_outputs(content: bytes, **fed: Any) -> list[Any]:
    """Return the outputs of onnxruntime for the inputs ``fed``."""
    session = runtime.InferenceSession(content, providers=["CPUExecutionProvider"])
    return list(session.run(None, {one.name: fed[one.name] for one in session.get_inputs()}))


def write_model(
    path: Path, nodes: list[Any], shape: Any, *, initializers: Any = (), outputs: int = 1, opset: int = 13
) -> Any:
    """Write a model of ``nodes`` from x to y, y1, … to ``path``; return (input, onnxruntime's outputs).

    ``initializers`` maps names to arrays.
    """
    helper = onnx.helper
    names = ["y", *(f"y{k}" for k in range(1, outputs))]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", 1, shape)],
        [helper.make_tensor_value_info(name, 1, None) for name in names],
        [onnx.numpy_helper.from_array(values, name) for name, values in dict(initializers).items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    onnx.save(model, path)
    data = (np.arange(np.prod(shape)).reshape(shape) / np.prod(shape) + 0.1).astype(np.float32)
    return data, onnxruntime_outputs(model.SerializeToString(), x=data)


def node(op: str, inputs: str, outputs: str, **attrs: Any) -> Any:
    """Return an ONNX node; ``inputs`` and ``outputs`` are names separated by spaces."""
    return onnx.helper.make_node(op, inputs.split(), outputs.split(), **attrs)
