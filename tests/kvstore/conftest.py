"""Fixtures for tests of stores."""

from __future__ import annotations

import pytest

from weftplan import engine


@pytest.fixture
def eng():
    """Install a ThreadedEnginePerDevice as the current engine for a test, and stop it afterwards."""
    result = engine.create("ThreadedEnginePerDevice")
    with engine.using(result):
        yield result
    result.stop()
