"""Fixtures of the compiled kernels' tests."""

from __future__ import annotations

import pytest


@pytest.fixture
def always_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Report one idle core, so that all work is cut into its ranges.

    Threads that another test has woken may still poll for work. They get none, so that all of it passes through
    ``split_in_rooms``.
    """
    from weftplan.kernels.compiled import parts

    monkeypatch.setattr(parts, "idle_cores", lambda: 1)
    monkeypatch.setattr(parts, "with_lookers", lambda run, most, *, all_or_none: False)
