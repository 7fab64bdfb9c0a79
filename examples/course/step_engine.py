"""Run a planned program on several threads: a step starts as soon as the steps that it must wait for are done.

    python examples/course/step_engine.py

The engine knows nothing of memory. It gets, for each step, a function and the set of steps that must finish before it.
If that set holds the inputs alone, results are right only while every result has bytes of its own.
"""

import random
import threading
from collections.abc import Callable, Sequence

import numpy as np
from memory_plan import Plan, Step, make_plan

Function = Callable[..., np.ndarray]


def run(
    functions: Sequence[Callable[[], None]], before: Sequence[set[int]], *, workers: int = 2, seed: int = 0
) -> None:
    """Call every function once, function k after all of ``before[k]``; the seed chooses among the ready functions."""
    choice = random.Random(seed)
    missing = [set(steps) for steps in before]
    waiting, done = set(range(len(functions))), 0
    changed = threading.Condition()  # guards missing, waiting and done; functions run outside it

    def work() -> None:
        nonlocal done
        while True:
            with changed:
                changed.wait_for(lambda: not waiting or any(not missing[k] for k in waiting))
                ready = sorted(k for k in waiting if not missing[k])
                if not ready:
                    return  # all steps have been started
                chosen = choice.choice(ready)
                waiting.remove(chosen)
            functions[chosen]()
            with changed:
                done += 1
                for steps in missing:
                    steps.discard(chosen)
                changed.notify_all()

    threads = [threading.Thread(target=work) for _ in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert done == len(functions)


def compute(plan: Plan, functions: Sequence[Function], before: Sequence[set[int]], **options: int) -> list[np.ndarray]:
    """Run the program in one slab of ``plan.peak`` bytes; return the results that live to the end.

    ``functions[k]`` gets the arrays of step k's inputs and returns an array of float64 with the planned bytes.
    """
    slab = np.full(plan.peak, 0xFF, np.uint8)  # a float64 that was never written is nan
    views = [slab[at : at + step.nbytes].view(np.float64) for at, step in zip(plan.offset, plan.steps, strict=True)]

    def bound(k: int) -> Callable[[], None]:
        def call() -> None:
            views[k][:] = functions[k](*(views[i] for i in plan.steps[k].inputs))

        return call

    run([bound(k) for k in range(len(functions))], before, **options)
    return [views[k].copy() for k in range(len(functions)) if plan.last[k] == len(functions)]


def inputs_alone(plan: Plan) -> list[set[int]]:
    """Return the obvious rule: a step waits for its inputs."""
    return [set(step.inputs) for step in plan.steps]


if __name__ == "__main__":
    # Two branches from one input: serially the left one is done, and its bytes are free, before the right one begins.
    program = [Step((), 800), Step((0,), 800), Step((1,), 8), Step((0,), 800), Step((3,), 8), Step((2, 4), 8)]
    work: list[Function] = [
        lambda: np.arange(100.0),
        lambda x: x + 1,
        lambda x: x.sum(keepdims=True),
        lambda x: x * 2,
        lambda x: x.sum(keepdims=True),
        lambda a, b: a + b,
    ]
    planned = make_plan(program, outputs=[5])
    print(f"{planned.peak} bytes, {planned.unshared} without sharing")
    for seed in range(8):
        (result,) = compute(planned, work, inputs_alone(planned), seed=seed, workers=1)
        print(
            f"order {seed}: {result[0]:8.1f}", "" if result[0] == 14950 else "wrong: two results met on the same bytes"
        )
