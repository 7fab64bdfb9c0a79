"""Fixtures for tests of executors."""

from __future__ import annotations

from typing import Any

import pytest

from weftplan import planner


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """A list that grows by one element with each plan that is made."""
    result: list[None] = []
    true = planner.size_symbol

    def counting(*args: Any, **more: Any) -> Any:
        result.append(None)
        return true(*args, **more)

    monkeypatch.setattr(planner, "size_symbol", counting)
    return result


@pytest.fixture
def dynamic(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Make executors dynamic, and return the monkeypatch for further variables."""
    monkeypatch.setenv("WEFTPLAN_EXECUTOR_STRATEGY", "dynamic")
    return monkeypatch
