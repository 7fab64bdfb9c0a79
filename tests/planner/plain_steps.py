"""A second front end of the planner: a list of steps with named results, without symbols and operators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from weftplan.device.context import Context
from weftplan.ops.core.schema import InplacePair
from weftplan.planner.drafts import PlannedSteps, plan_program
from weftplan.planner.options import PlanOptions
from weftplan.planner.program import VARIABLE, Graph, Program, Work


@dataclass(frozen=True)
class Step:
    """One computation: it reads named results and writes a result of ``nbytes`` bytes with its own name."""

    name: str
    reads: tuple[str, ...]
    nbytes: int
    over: int | None = None
    """Position in ``reads`` of the result that this step may overwrite; None for none."""
    adds: bool = False
    """Whether the step adds its second input to its first."""
    scratch: int = 0
    seconds: float = 1.0
    repeats: bool = True
    device: Context = field(default_factory=lambda: Context("cpu", 0))


def program_of_steps(
    given: Mapping[str, int],
    steps: Sequence[Step],
    outputs: Sequence[str],
    *,
    gradients: Sequence[str] = (),
    forward: int | None = None,
) -> Program:
    """Return the steps as a program; the entry and the node of a result have the same number.

    Numbers follow the order of ``given`` and then of ``steps``. For the arguments see :func:`plan_steps`.
    """
    names = [*given, *(step.name for step in steps)]
    number = {name: nid for nid, name in enumerate(names)}
    sizes = [*given.values(), *(step.nbytes for step in steps)]
    works = [
        Work(
            label="step",
            inplace=() if step.over is None else (InplacePair(step.over, 0),),
            is_sum=step.adds,
            may_repeat=step.repeats,
        )
        for step in steps
    ]
    graph = Graph(
        names=names,
        works=[VARIABLE] * len(given) + works,
        inputs=[[] for _ in given] + [[number[name] for name in step.reads] for step in steps],
        heads=[number[name] for name in (*outputs, *gradients)],
    )
    contexts = tuple(dict.fromkeys(step.device for step in steps))
    return Program(
        graph=graph,
        num_forward=len(steps) if forward is None else forward,
        nbytes=sizes,
        contexts=contexts,
        device=[0] * len(given) + [contexts.index(step.device) for step in steps],
        gradients=frozenset(number[name] for name in gradients),
        workspaces={number[step.name]: step.scratch for step in steps if step.scratch},
    )


def plan_steps(
    given: Mapping[str, int],
    steps: Sequence[Step],
    outputs: Sequence[str],
    *,
    gradients: Sequence[str] = (),
    forward: int | None = None,
    options: PlanOptions | None = None,
) -> PlannedSteps:
    """Plan ``steps``, which run in their order.

    Args:
        given: results that exist before the first step, with their bytes.
        outputs: results that the caller reads.
        gradients: results that are written to the caller's arrays.
        forward: how many steps are the forward part, whose results may be recomputed or offloaded; None for all steps.
        options: options of the plan; None for the defaults.
    """
    program = program_of_steps(given, steps, outputs, gradients=gradients, forward=forward)
    seconds = [0.0] * len(given) + [step.seconds for step in steps]
    return plan_program(program, options, seconds=seconds)
