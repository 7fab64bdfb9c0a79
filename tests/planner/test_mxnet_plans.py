"""Plans of graphs that MXNet 1.9.1 executed have exactly MXNet's bytes.

The graphs are MXNet's own, with its forward and backward operators, so that only planners are compared: the in-place
rule, the match range, the search for a range, and colours. In-place pairs are those of MXNet's CPU build.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from weftplan.device.context import cpu
from weftplan.ops.core.schema import InplacePair, Op
from weftplan.planner import PlanOptions
from weftplan.planner.program import Program
from weftplan.planner.strategies import plan_graph
from weftplan.planner.symbolic.indexed_graph import indexed
from weftplan.symbol.node import Entry, Node

GRAPHS = Path(__file__).parent / "golden" / "mxnet_graphs.json.gz"
FIRST = (InplacePair(0, 0),)
EITHER = (InplacePair(0, 0), InplacePair(1, 0))
IDENTITY = (InplacePair(0, 0, identity=True),)
INPLACE = {
    "Activation": FIRST,
    "_backward_Activation": FIRST,
    "_backward_FullyConnected": (InplacePair(1, 0),),
    "SoftmaxOutput": FIRST,
    "_backward_SoftmaxOutput": FIRST,
    "Dropout": FIRST,
    "_backward_Dropout": FIRST,
    "add_n": FIRST,
    "elemwise_add": EITHER,
    "Flatten": IDENTITY,
    "_backward_copy": IDENTITY,
}
MEASURED = {
    # network: (live bytes at the peak, planned by default, without reuse, range 1, best range, four colours)
    "mlp": (84_480, 87_040, 103_424, 103_424, 87_040, 87_040),
    "lenet": (11_799_040, 12_784_640, 15_462_400, 15_462_400, 12_784_640, 13_649_920),
    "alexnet": (92_713_984, 113_657_856, 172_779_520, 167_241_728, 113_657_856, 124_307_456),
    "resnet18": (668_240_384, 790_396_416, 1_397_325_312, 861_044_224, 790_396_416, 828_931_584),
    "mobilenet": (1_297_828_352, 1_394_294_272, 2_582_461_952, 1_493_843_456, 1_394_294_272, 1_394_294_272),
    "inception_v3": (3_092_676_096, 3_330_519_552, 7_080_038_912, 4_316_168_704, 3_330_519_552, 3_678_159_360),
    "densenet121": (4_271_705_856, 4_368_241_408, 9_694_053_120, 6_331_257_600, 4_368_241_408, 4_393_931_520),
}
SETTINGS: list[dict[str, Any]] = [
    {},
    {"match_range": 0},
    {"match_range": 1},
    {"auto_search": True},
    {"num_temp": 4},
]


def _nothing(*args: Any) -> Any:
    """Raise an error, because these operators never run."""
    raise AssertionError("these operators are never run")


@pytest.fixture(scope="module")
def graphs() -> dict[str, Program]:
    """The program of every stored graph, by the name of its network."""
    stored = json.loads(gzip.decompress(GRAPHS.read_bytes()))
    return {name: _program(graph) for name, graph in stored.items()}


def _program(stored: dict[str, Any]) -> Program:
    """Return a stored graph as a program, with operators that cannot run."""
    nodes: list[Node] = []
    elements: list[int] = []
    for position, (op, inputs, controls, sizes) in enumerate(stored["nodes"]):
        operator = None
        if op is not None:
            operator = Op(
                name=op,
                forward=_nothing,
                infer_shape=_nothing,
                infer_dtype=_nothing,
                outputs=tuple(f"output{k}" for k in range(len(sizes))),
                inplace=INPLACE.get(op, ()),
            )
        nodes.append(
            Node(
                operator,
                f"n{position}",
                inputs=[Entry(nodes[n], k) for n, k in inputs],
                control_deps=[nodes[n] for n in controls],
            )
        )
        elements += sizes
    graph = indexed([Entry(nodes[n], k) for n, k in stored["heads"]])
    # The stored order is MXNet's numbering, and must be equal to ours for equal plans.
    assert graph.nodes == nodes
    return Program(
        graph=graph,
        order=[n for n, node in enumerate(nodes) if node.op is not None],
        num_forward=sum(node.op is not None for node in nodes),
        shapes=[(n,) for n in elements],
        dtypes=[np.dtype(np.float32)] * len(elements),
        nbytes=[4 * n for n in elements],
        contexts=(cpu(0),),
        device=[0] * len(nodes),
        gradients=frozenset(graph.outputs[1:]),
        added=frozenset(),
        workspaces={},
        external_bytes={},
    )


@pytest.mark.parametrize("name", MEASURED)
def test_planned_bytes_are_those_of_mxnet(graphs: dict[str, Program], name: str) -> None:
    """With each of MXNet's settings, live bytes and planned bytes are exactly MXNet's."""
    alive, *planned = MEASURED[name]
    for setting, expected in zip(SETTINGS, planned, strict=True):
        options = PlanOptions(
            **{"strategy": "match_range", "match_range": 16, "sizes": "mxnet", "compat": "mxnet", "workspaces": False}
            | setting
        )
        plan = plan_graph(graphs[name], options).memory
        assert plan.reported_bytes == expected, setting
        assert plan.lower_bound == alive


@pytest.mark.parametrize("name", MEASURED)
def test_ours_is_never_above_mxnet(graphs: dict[str, Program], name: str) -> None:
    """On MXNet's graph and order, our plans are no larger than MXNet's and within 0.5 % of the live bytes."""
    plan = plan_graph(graphs[name], PlanOptions()).memory
    assert plan.peak <= MEASURED[name][1]
    assert plan.peak <= 1.005 * plan.lower_bound
