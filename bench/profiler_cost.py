"""Question: how much time does the profiler add to an operation, off and on?

The same no-op operations through one worker, in turn with the profiler stopped and running (live bytes sampled, too),
and the median of the pairs' differences. ``python bench/bench_engine.py --profiler`` runs it.
"""

import statistics
import time

from weftplan import engine, profiler
from weftplan.profiler.recorder import recorder


def seconds(made: engine.Engine, count: int) -> float:
    """Push to done of ``count`` operations on vars of their own, by eights in a chain."""
    variables = [made.new_variable() for _ in range(count // 8)]
    start = time.perf_counter()
    for _ in range(8):
        for var in variables:
            made.push(_nothing, (), (var,))
    made.wait_for_all()
    return time.perf_counter() - start


def _nothing() -> None:
    """An operation without work."""


def main(count: int = 40_000, rounds: int = 7) -> dict[str, float]:
    """Microseconds an operation: with the profiler off, with it on, and the median difference of pairs."""
    result = engine.create("ThreadedEngine", cpu_workers=1)
    off, on = [], []
    with engine.using(result):
        seconds(result, count)
        for _ in range(rounds):
            off.append(seconds(result, count) / count * 1e6)
            profiler.set_state("run")
            on.append(seconds(result, count) / count * 1e6)
            profiler.set_state("stop")
            assert len(recorder.operations) == count
            recorder.clear()
    result.stop()
    difference = statistics.median(b - a for a, b in zip(off, on, strict=True))
    return {"off": statistics.median(off), "on": statistics.median(on), "difference": difference}


if __name__ == "__main__":
    result = main()
    print(
        f"Profiler: {result['off']:.2f} µs an operation off, {result['on']:.2f} on; the pairs differ by "
        f"{result['difference']:.2f} µs (median)."
    )
