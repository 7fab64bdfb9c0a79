"""Engines for the contract, and the error of failing operations."""

import threading
from functools import partial

import pytest

from weftplan import engine
from weftplan.engine.registry import registered

DRIVERS = {
    "naive": lambda: engine.create("NaiveEngine"),
    "threaded": lambda: engine.create("ThreadedEngine", cpu_workers=4),
    "per_device_1": lambda: engine.create("ThreadedEnginePerDevice", cpu_workers=1),
    "per_device_4": lambda: engine.create("ThreadedEnginePerDevice", cpu_workers=4),
    "simulator": lambda: engine.create("Simulator", seed=5),
}
for _kind in registered():
    if _kind not in ("NaiveEngine", "ThreadedEngine", "ThreadedEnginePerDevice", "Simulator"):
        DRIVERS[_kind] = partial(engine.create, _kind)


class Boom(Exception):
    """The error of failing operations."""


def boom():
    """Raise Boom; the function of failing operations."""
    raise Boom("boom")


def push_failing(eng, *args, **options):
    """Push an operation that fails or depends on a failure; on the naive engine, expect Boom from the push."""
    if eng.kind == "NaiveEngine":
        with pytest.raises(Boom):
            eng.push(*args, **options)
    else:
        eng.push(*args, **options)


def together(work, count):
    """Run ``work()`` on ``count`` threads at the same time; return when all have ended."""
    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
