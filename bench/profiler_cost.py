"""Question: how much time does the profiler add to an operation?

The same no-op operations run on one worker with the profiler stopped and with it running, alternating; live bytes are
sampled as well. ``python bench/bench_engine.py --profiler`` runs this file.
"""

import statistics
import time

from weftplan import engine, profiler
from weftplan.profiler.recorder import recorder


def seconds(made: engine.Engine, count: int) -> float:
    """Return the seconds of ``count`` no-op operations, eight on each of ``count / 8`` variables, push to done."""
    variables = [made.new_variable() for _ in range(count // 8)]
    start = time.perf_counter()
    for _ in range(8):
        for var in variables:
            made.push(_nothing, (), (var,))
    made.wait_for_all()
    return time.perf_counter() - start


def _nothing() -> None:
    """Do nothing, as an operation without work."""


def main(count: int = 40_000, rounds: int = 7) -> dict[str, float]:
    """Return the median microseconds per operation, profiler off and on, and the median difference of the pairs."""
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
