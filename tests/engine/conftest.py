"""Engines that are the process-wide one for a test."""

import pytest

from weftplan import engine


@pytest.fixture(params=["NaiveEngine", "ThreadedEngine", "ThreadedEnginePerDevice", "Simulator"])
def driver(request: pytest.FixtureRequest):
    """Each kind of engine, as the process-wide one."""
    made = engine.create(request.param)
    before = engine.set_engine(made)
    yield made
    engine.set_engine(before)
    made.stop()


@pytest.fixture
def threaded():
    """Two worker threads."""
    made = engine.create("ThreadedEngine", cpu_workers=2)
    before = engine.set_engine(made)
    yield made
    engine.set_engine(before)
    made.stop()
