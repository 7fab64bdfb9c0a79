"""Fixtures of the compiled kernels' tests."""

from __future__ import annotations

import pytest


@pytest.fixture
def always_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work is cut into its ranges, although no core is idle for the thread of a test.

    Helpers whom another test has woken may still look for work: they get none, so that all of it passes through
    ``split_in_rooms``.
    """
    from weftplan.ops.compiled import parts

    monkeypatch.setattr(parts, "idle_cores", lambda: 1)
    monkeypatch.setattr(parts, "with_lookers", lambda run, most, *, all_or_none: False)
