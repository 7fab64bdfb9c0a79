"""Malformed graphs and programs are refused with an error that says which number is wrong."""

from __future__ import annotations

from typing import Any

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
