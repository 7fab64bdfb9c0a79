"""What the contract of engines is run on, and what failing operations raise."""

from weftplan import engine

DRIVERS = {
    "naive": lambda: engine.create("NaiveEngine"),
    "threaded": lambda: engine.create("ThreadedEngine", cpu_workers=4),
    "per_device_1": lambda: engine.create("ThreadedEnginePerDevice", cpu_workers=1),
    "per_device_4": lambda: engine.create("ThreadedEnginePerDevice", cpu_workers=4),
    "simulator": lambda: engine.create("Simulator", seed=5),
}


class Boom(Exception):
    """What failing operations raise here."""


def boom():
    """A failing operation."""
    raise Boom("boom")
