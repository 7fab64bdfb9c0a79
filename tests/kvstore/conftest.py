"""Fixtures for tests of stores."""

from __future__ import annotations

import pytest

from weftplan import engine


@pytest.fixture
def eng():
    """A threaded engine for the process."""
    made = engine.create("ThreadedEnginePerDevice")
    with engine.using(made):
        yield made
    made.stop()
