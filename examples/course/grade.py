"""The grade of the exercise: ``python -m pytest examples/course/grade.py``."""

import importlib.util
import os
import random
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from memory_plan import Plan, Step, make_plan
from step_engine import Function, compute


def answer(plan: Plan) -> list[set[int]]:
    """Return the answer of the file under test; EXERCISE names another file beside it than exercise.py."""
    path = Path(__file__).parent / os.environ.get("EXERCISE", "exercise.py")
    spec = importlib.util.spec_from_file_location("answer", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    result: list[set[int]] = module.before(plan)
    return result


def program(seed: int) -> tuple[Plan, list[Function]]:
    """Return a random program of 12 steps with branches, and the function of each step."""
    draw = random.Random(seed)
    steps = [
        Step(tuple(sorted(draw.sample(range(k), min(k, draw.randint(1, 2))))), 8 * draw.randint(1, 6))
        for k in range(12)
    ]
    read = {i for step in steps for i in step.inputs}

    def function(k: int) -> Function:
        return lambda *arrays: np.full(steps[k].nbytes // 8, k + sum((n + 1.5) * x.sum() for n, x in enumerate(arrays)))

    return make_plan(steps, [k for k in range(12) if k not in read]), [function(k) for k in range(12)]


@pytest.mark.parametrize("seed", range(20))
def test_every_order_gives_the_serial_result(seed: int) -> None:
    """Fifty orders on one thread, and five runs on three threads, give the bits of the serial order."""
    plan, functions = program(seed)
    serial = compute(plan, functions, [set(range(k)) for k in range(12)], workers=1)
    for order in range(55):
        results = compute(plan, functions, answer(plan), workers=1 if order < 50 else 3, seed=order)
        for mine, expected in zip(results, serial, strict=True):
            np.testing.assert_array_equal(mine, expected)


@pytest.mark.parametrize("seed", range(20))
def test_no_needless_wait(seed: int) -> None:
    """A step waits only for its inputs, and for makers and readers of results on its bytes."""
    plan, _ = program(seed)
    for j, waits in enumerate(answer(plan)):
        for i in waits - set(plan.steps[j].inputs):
            touched = {i, *plan.steps[i].inputs}
            assert any(plan.share_bytes(k, j) for k in touched), f"step {j} need not wait for step {i}"
