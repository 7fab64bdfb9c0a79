"""ONNX import of exporters' shape arithmetic: computed padding and negative padding, against onnxruntime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from tests.convert.onnx_models import executor_outputs, node, write_model  # noqa: E402
from weftplan.convert.onnx_in import import_model  # noqa: E402

KERNEL = {"two": np.int64(2), "one": np.int64(1), "k": np.float32(5), "axis": np.int64([0]), "low": np.int64(0)}


def same_padding(clamp: str) -> list[Any]:
    """Return nodes that pad the last axis to a multiple of two plus three, computed from the shape with ``clamp``."""
    return [
        node("Shape", "x", "shape"),
        node("Gather", "shape three", "width", axis=0),
        node("Div", "width two", "half"),
        node("Mul", "half two", "even"),
        node("Sub", "even width", "odd"),
        node("Neg", "odd", "rest"),
        node("Add", "rest one", "wanted"),
        node("Clip", "wanted low", "pad") if clamp == "Clip" else node(clamp, "wanted low", "pad"),
        node("Unsqueeze", "pad axis", "after"),
        node("Unsqueeze", "low axis", "none"),
        node("Concat", "none none none none none none none after", "pads", axis=0),
        node("Pad", "x pads", "y"),
    ]


@pytest.mark.parametrize("clamp", ["Clip", "Max"])
def test_computed_padding_is_folded(tmp_path: Path, clamp: str) -> None:
    """Scalars from shapes stay scalars through arithmetic and clamping, so that their unsqueezed forms have rank 1."""
    initializers = {**KERNEL, "three": np.int64(3)}
    data, expected = write_model(tmp_path / "m.onnx", same_padding(clamp), (1, 2, 4, 5), initializers=initializers)
    symbol, args, aux = import_model(tmp_path / "m.onnx")
    np.testing.assert_array_equal(executor_outputs(symbol, args, aux, x=data)[0], expected[0])


@pytest.mark.parametrize(
    "pads", [[0, 0, -1, -1, 0, 0, 1, 1], [0, 0, -1, 2, 0, 0, 0, -3], [0, -1, 0, 0, 0, 0, -2, 0]], ids=str
)
def test_negative_padding_removes_elements(tmp_path: Path, pads: list[int]) -> None:
    """Negative padding crops before the other sides are padded."""
    initializers = {"pads": np.int64(pads)}
    data, expected = write_model(
        tmp_path / "m.onnx", [node("Pad", "x pads", "y")], (1, 2, 5, 6), initializers=initializers
    )
    symbol, args, aux = import_model(tmp_path / "m.onnx")
    np.testing.assert_array_equal(executor_outputs(symbol, args, aux, x=data)[0], expected[0])


@pytest.mark.parametrize("op", ["ReduceProd", "ReduceMax", "ReduceMin", "Abs", "Round", "Where", "Min", "Size", "Div"])
def test_scalar_operators_are_folded(tmp_path: Path, op: str) -> None:
    """A shape computed with each operator serves as the target of a Reshape."""
    chosen = {
        "Where": [node("Equal", "a a", "same"), node("Where", "same a b", "n")],
        "Min": [node("Min", "a b", "n")],
        "Size": [node("Size", "x", "n")],
        "Div": [node("Sub", "a b", "less"), node("Div", "less b", "none"), node("Add", "a none", "n")],
        "Abs": [node("Neg", "a", "minus"), node("Abs", "minus", "n")],
        "Round": [node("Cast", "a", "float", to=1), node("Round", "float", "whole"), node("Cast", "whole", "n", to=7)],
    }.get(op, [node(op, "dims", "n", keepdims=0)])
    last = {"ReduceProd": 12, "ReduceMax": 4, "ReduceMin": 3, "Size": 24}.get(op, 2)
    nodes = [*chosen, node("Reshape", "n rest", "m"), node("Concat", "m rest", "to", axis=0)]
    nodes.append(node("Reshape", "x to", "y"))
    initializers = {"a": np.int64(2), "b": np.int64(8), "dims": np.int64([3, 4]), "rest": np.int64([-1])}
    data, expected = write_model(tmp_path / "m.onnx", nodes, (2, 3, 4), initializers=initializers)
    symbol, args, aux = import_model(tmp_path / "m.onnx")
    assert expected[0].shape[0] == last
    np.testing.assert_array_equal(executor_outputs(symbol, args, aux, x=data)[0], expected[0])
