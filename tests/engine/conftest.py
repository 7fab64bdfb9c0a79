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


@pytest.fixture
def eng():
    """The default engine with one worker for each CPU context."""
    made = engine.create("ThreadedEnginePerDevice", cpu_workers=1)
    yield made
    made.stop()
