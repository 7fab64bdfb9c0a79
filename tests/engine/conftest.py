"""Engines for the tests of this folder."""

import pytest

from weftplan import engine


@pytest.fixture(params=["NaiveEngine", "ThreadedEngine", "ThreadedEnginePerDevice", "Simulator"])
def driver(request: pytest.FixtureRequest):
    """Each kind of engine, as the process-wide engine of the test."""
    eng = engine.create(request.param)
    before = engine.set_engine(eng)
    yield eng
    engine.set_engine(before)
    eng.stop()


@pytest.fixture
def threaded():
    """A threaded engine with two workers, as the process-wide engine of the test."""
    eng = engine.create("ThreadedEngine", cpu_workers=2)
    before = engine.set_engine(eng)
    yield eng
    engine.set_engine(before)
    eng.stop()


@pytest.fixture
def eng():
    """An engine of the default type with one worker per CPU context; it is not the process-wide engine."""
    eng = engine.create("ThreadedEnginePerDevice", cpu_workers=1)
    yield eng
    eng.stop()
