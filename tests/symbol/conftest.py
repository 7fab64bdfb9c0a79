"""Fixtures of the symbol tests: an interpreter of graphs on NumPy, and fresh automatic names."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from weftplan import symbol as sym
from weftplan.ops.core.schema import OpContext, TensorSpec
from weftplan.symbol import Symbol
from weftplan.symbol.inference import solver as infer

GOLDEN = Path(__file__).parent.parent / "golden"


@pytest.fixture(autouse=True)
def fresh_names() -> Iterator[None]:
    """Start automatic names from 0 in every test."""
    with sym.NameManager():
        yield


@pytest.fixture(scope="session")
def interchange_cases() -> ModuleType:
    """The module ``tests/golden/interchange_cases.py``."""
    spec = importlib.util.spec_from_file_location("interchange_cases", GOLDEN / "interchange_cases.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def mx() -> Any:
    """The part of the package that the interchange cases need."""
    return SimpleNamespace(sym=sym, AttrScope=sym.AttrScope)


@pytest.fixture
def interpret() -> Callable[[Symbol, Mapping[str, np.ndarray]], list[np.ndarray]]:
    """The function :func:`run`, which runs the kernels of a symbol without planner, executor or engine."""
    return run


def run(symbol: Symbol, arrays: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """Return the outputs of ``symbol`` in inference mode for the values of its variables."""
    nodes = sym.topological_order(symbol.entries)
    shapes = infer.infer_shapes(nodes, {name: array.shape for name, array in arrays.items()})
    dtypes = infer.infer_dtypes(nodes, {name: array.dtype for name, array in arrays.items()})
    values: dict[tuple[Any, int], np.ndarray] = {}
    eid = 0
    for node in nodes:
        count = node.num_outputs
        if node.op is None:
            values[node, 0] = arrays[node.name].copy()
        else:
            inputs = [values[entry.node, entry.index] for entry in node.inputs]
            outputs = [np.full(shapes[eid + k], 77, dtypes[eid + k]) for k in range(count)]
            specs = [[TensorSpec(a.shape, a.dtype) for a in side] for side in (inputs, outputs)]
            workspace = np.empty(node.op.workspace_bytes(node.params, *specs), np.uint8)
            arguments = [None if i in node.op.ignored(node.params) else a for i, a in enumerate(inputs)]
            node.op.forward(OpContext(np, workspace=workspace), node.params, arguments, outputs)
            for k, output in enumerate(outputs):
                values[node, k] = output
        eid += count
    return [values[entry.node, entry.index] for entry in symbol.entries]
