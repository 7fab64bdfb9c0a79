"""Fixtures of the compiled kernels' tests."""

from __future__ import annotations

import pytest


@pytest.fixture
def always_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work is cut into its ranges, although no core is idle for the thread of a test."""
    from weftplan.ops.compiled import parts

    monkeypatch.setattr(parts, "idle_cores", lambda: 1)
