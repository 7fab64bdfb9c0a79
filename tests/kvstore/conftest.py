"""Fixtures for tests of stores."""

from __future__ import annotations

import pytest

from weftplan import engine


@pytest.fixture
def eng():
    """A threaded engine for the process."""
    result = engine.create("ThreadedEnginePerDevice")
    with engine.using(result):
        yield result
    result.stop()
