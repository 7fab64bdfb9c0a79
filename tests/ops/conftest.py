"""Fixtures for all tests of operators."""

import pytest

from weftplan.ops.core.rule_cache import Settled


@pytest.fixture(autouse=True)
def asked_each_time(monkeypatch):
    """Tests of operators change what rules answer by: sizes of blocks, numbers of parts."""
    monkeypatch.setattr(Settled, "answer", lambda self, op, params, facts, ask: ask())
