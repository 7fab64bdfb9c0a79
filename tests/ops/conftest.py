"""Fixtures of all operator tests."""

import pytest

from weftplan.ops.core.rule_cache import Settled


@pytest.fixture(autouse=True)
def asked_each_time(monkeypatch):
    """Disable the cache of rule answers, because operator tests change block sizes and numbers of parts."""
    monkeypatch.setattr(Settled, "answer", lambda self, op, params, facts, ask: ask())
