"""Malformed graphs and programs are refused with an error that says which number is wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from weftplan.errors import PlanError
from weftplan.planner import plan_program
from weftplan.planner.program import VARIABLE, Graph, Program, Work
from weftplan.support.tensor_types import InplacePair

GRAPH: dict[str, Any] = {
    "names": ["x", "a", "b"],
    "works": [VARIABLE, Work(label="step"), Work(label="step")],
    "inputs": [[], [0], [1]],
    "heads": [2],
}
PROGRAM: dict[str, Any] = {"nbytes": [64, 64, 64]}


@pytest.mark.parametrize(
    ("graph", "program", "message"),
    [
        ({}, {"nbytes": [64, -1, 64]}, "bytes of entry 1: expected an integer from 0 to 2\\*\\*62 - 1, got -1"),
        ({}, {"nbytes": [64, 2**70, 64]}, "bytes of entry 1: .* got 1180591620717411303424"),
        ({}, {"nbytes": [64, 2**61, 2**61]}, "together; expected less than 2\\*\\*62"),
        ({}, {"nbytes": [64, float("nan"), 64]}, "bytes of entry 1: .* got nan"),
        ({}, {"nbytes": [64, 64]}, "nbytes: expected one item per entry, that is 3, got 2"),
        ({}, {"nbytes": [64] * 4}, "nbytes: expected one item per entry, that is 3, got 4"),
        ({}, {"num_forward": 99}, "num_forward: expected at most the 2 steps of the order, got 99"),
        ({}, {"workspaces": {9: 64}}, "node with a workspace: expected a number below the 3 nodes, from 0, got 9"),
        ({}, {"workspaces": {1: -64}}, "bytes of workspace 0: .* got -64"),
        ({}, {"held": {1: 9}}, "node that holds an entry: .* got 9"),
        ({}, {"held": {9: 1}}, "held entry: .* got 9"),
        ({}, {"gradients": frozenset([9])}, "gradient: .* got 9"),
        ({}, {"device": [0, 1, 0]}, "device: expected a number below the 1 contexts, from 0, got 1"),
        ({}, {"device": [0]}, "device: expected one item per node, that is 3, got 1"),
        ({}, {"order": [1, 1]}, "at most once and no variable; wrong: .*'a'"),
        ({}, {"order": [0, 1, 2]}, "at most once and no variable; wrong: .*'x'"),
        ({}, {"order": [1, 7]}, "step: expected a number below the 3 nodes, from 0, got 7"),
        ({"inputs": [[], [0], [9]]}, {}, "input of 'b': expected a number below the 3 entries, from 0, got 9"),
        ({"inputs": [[], [0], [-1]]}, {}, "input of 'b': .* got -1"),
        ({"inputs": [[], [0], ["a"]]}, {}, "input of 'b': .* got 'a'"),
        ({"inputs": [[], [0]]}, {}, "graph inputs: expected one item per node, that is 3, got 2"),
        ({"heads": [3]}, {}, "head: expected a number below the 3 entries, from 0, got 3"),
        ({"effects": [5]}, {}, "effect: .* got 5"),
        ({"controls": [[], [], [4]]}, {}, "control dependency of 'b': .* got 4"),
        ({"counts": [1, -1, 1]}, {}, "outputs of node 1: .* got -1"),
        (
            {"works": [VARIABLE, Work(label="s"), Work(label="s", inplace=(InplacePair(1, 0),))]},
            {},
            "input slot of the work of 'b': expected a number below the 1 inputs, from 0, got 1",
        ),
        (
            {"works": [VARIABLE, Work(label="s"), Work(label="s", inplace=(InplacePair(0, 1),))]},
            {},
            "output slot of the work of 'b': .* got 1",
        ),
    ],
)
def test_malformed_program_is_refused(graph: dict[str, Any], program: dict[str, Any], message: str) -> None:
    """Each wrong number is named, before any planning."""
    with pytest.raises(PlanError, match=message):
        plan_program(Program(graph=Graph(**GRAPH | graph), **PROGRAM | program))


def test_well_formed_program_is_planned() -> None:
    """The program from which the malformed ones differ is valid."""
    assert plan_program(Program(graph=Graph(**GRAPH), **PROGRAM)).memory.peak == 128


@pytest.mark.parametrize(
    ("graph", "program", "message"),
    [
        ({}, {"nbytes": np.array([64, 64, 64])}, "nbytes: expected Sequence, got ndarray .*; convert it with tolist"),
        ({}, {"nbytes": None}, "nbytes: expected Sequence, got NoneType"),
        ({}, {"order": np.array([1, 2])}, "order: expected Sequence, got ndarray"),
        ({}, {"order": [True, 2]}, "step: expected a number below the 3 nodes, from 0, got True"),
        ({}, {"num_forward": 1.5}, "num_forward: expected Integral, got float 1.5"),
        ({}, {"workspaces": [64]}, "workspaces: expected Mapping, got list"),
        ({}, {"gradients": [2]}, "gradients: expected Set, got list"),
        ({}, {"contexts": ["cpu"]}, "context 0: expected Context, got 'cpu'"),
        ({}, {"shapes": [(64,)] * 3}, "shapes and dtypes: expected both or neither"),
        ({}, {"held": {2: 1}}, "held entry 'b_output': expected a step that does not run before the maker .* got 'a'"),
        ({}, {"held": {1: 0}}, "held entry 'a_output': .* got 'x'"),
        ({"heads": 2}, {}, "heads: expected Iterable, got int 2"),
        ({"inputs": [[], [0], None]}, {}, "inputs of node 2: expected Sequence, got None"),
        ({"controls": [[], 0, []]}, {}, "control dependencies of node 1: expected Sequence, got 0"),
        ({"works": [VARIABLE, "s", Work(label="s")]}, {}, "work of node 1: expected Work, got 's'"),
        (
            {"works": [VARIABLE, Work(label="s"), Work(label="s", is_sum=True)]},
            {},
            "a sum has two inputs and one output, but 'b' has 1 and 1",
        ),
        (
            {"works": [VARIABLE, Work(label="s"), Work(label="s", over=(InplacePair(0, 0),))]},
            {"gradients": frozenset([2])},
            "gradient 'b_output' is written to an array of the caller, but must lie in the memory of a result",
        ),
    ],
)
def test_values_of_the_wrong_kind_are_refused(graph: dict[str, Any], program: dict[str, Any], message: str) -> None:
    """A value of another type, or a demand that no plan can meet, is named before any planning."""
    with pytest.raises(PlanError, match=message):
        plan_program(Program(graph=Graph(**GRAPH | graph), **PROGRAM | program))


@pytest.mark.parametrize(
    ("seconds", "message"),
    [
        ([1.0], "seconds: expected one number per node, that is 3, got 1"),
        ([0.0, 1.0, float("nan")], "seconds of node 2: expected a finite number from 0 on, got nan"),
        ([0.0, -1.0, 1.0], "seconds of node 1: .* got -1.0"),
        (1.0, "seconds: expected Sequence, got float"),
    ],
)
def test_malformed_seconds_are_refused(seconds: Any, message: str) -> None:
    """There is one finite, non-negative number of seconds per node."""
    with pytest.raises(PlanError, match=message):
        plan_program(Program(graph=Graph(**GRAPH), **PROGRAM), seconds=seconds)


@pytest.mark.parametrize(("reader", "heads"), [("'late' reads 'a_output'", [3]), ("the caller reads 'a_output'", [1])])
def test_reading_an_overwritten_result_is_refused(reader: str, heads: list[int]) -> None:
    """A step or an output that reads a result after a later step has overwritten it is named."""
    works = [VARIABLE, Work(label="s"), Work(label="add_", over=(InplacePair(0, 0),)), Work(label="s")]
    late = [1] if "late" in reader else [2]
    graph = Graph(names=["x", "a", "b", "late"], works=works, inputs=[[], [0], [1], late], heads=heads)
    with pytest.raises(PlanError, match=f"{reader}, but 'b' has overwritten it: read the output of that step"):
        plan_program(Program(graph=graph, nbytes=[64] * 4))
