"""Sets of nodes to recompute that follow the repeated blocks of a network."""

from __future__ import annotations

import pytest

from tests.planner.plain_steps import Step, program_of_steps
from weftplan.planner import PlanOptions
from weftplan.planner.recompute import Tape, block_sets, curve
from weftplan.planner.strategies import assignment

OPTIONS = PlanOptions(enable_inplace=False)


def tape_of_blocks(blocks: int) -> Tape:
    """Return the tape of a chain of ``blocks`` blocks, each of four steps with wide results and a narrow output.

    The backward part reads all results.
    """
    steps, x = [], "x"
    for k in range(blocks):
        for name, nbytes in (("a", 4096), ("b", 8192), ("c", 4096), ("d", 256)):
            steps.append(Step(f"{name}{k}", (x,), nbytes))
            x = f"{name}{k}"
    forward, back = len(steps), x
    for step in reversed(steps[:forward]):
        steps.append(Step(f"g_{step.name}", (back, *step.reads), step.nbytes))
        back = f"g_{step.name}"
    program = program_of_steps({"x": 256}, steps, [x], gradients=[back], forward=forward)
    return Tape(program, assignment=assignment(program, OPTIONS), options=OPTIONS, seconds=[1.0] * 999)


@pytest.mark.parametrize("blocks", [8, 40])
def test_block_outputs_are_not_recomputed(blocks: int) -> None:
    """A set of ``block_sets`` has all results of every block but the last, except the narrow outputs."""
    tape = tape_of_blocks(blocks)
    names = tape.program.graph.names
    ones = [{names[nid] for nid in chosen} for chosen in block_sets(tape)]
    kept = {f"d{k}" for k in range(blocks)}
    assert {f"{n}{k}" for n in "abc" for k in range(blocks - 1)} in [
        one - {f"{n}{blocks - 1}" for n in "abc"} for one in ones
    ]
    assert any(not one & kept for one in ones)


def test_curves_with_block_sets_reach_less() -> None:
    """The smallest peak of a curve that starts with block sets is at most that of a plain curve or a block set."""
    tape = tape_of_blocks(40)
    sets = block_sets(tape)
    plain, seeded = curve(tape), curve(tape, seeds=sets)
    assert seeded[-1].peak <= min(plain[-1].peak, *(tape.price(chosen).peak for chosen in sets))


def test_networks_without_a_period_have_no_blocks() -> None:
    """A network whose results all have different sizes has no block sets."""
    steps = [Step(f"s{k}", ("x" if not k else f"s{k - 1}",), 64 * (k + 1)) for k in range(12)]
    program = program_of_steps({"x": 64}, steps, ["s11"])
    tape = Tape(program, assignment=assignment(program, OPTIONS), options=OPTIONS, seconds=[1.0] * 99)
    assert block_sets(tape) == []
