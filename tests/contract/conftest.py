"""Engines for the contract."""

import pytest

from tests.contract.engines import DRIVERS


@pytest.fixture(params=DRIVERS)
def eng(request):
    """An engine of each kind, stopped afterwards; no failure may be left unseen."""
    made = DRIVERS[request.param]()
    yield made
    made.stop()
    made.wait_for_all()


@pytest.fixture(params=[name for name in DRIVERS if name != "naive"])
def deferred(request):
    """Engines on which a push does not raise (all but the naive one)."""
    made = DRIVERS[request.param]()
    yield made
    made.stop()
    made.wait_for_all()
