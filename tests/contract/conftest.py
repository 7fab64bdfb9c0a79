"""Engines and stores for the contract."""

import pytest

import weftplan as mx
from tests.contract.engines import DRIVERS
from tests.contract.stores import STORES
from weftplan import engine


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


@pytest.fixture(params=[name for name in DRIVERS if name != "per_device_1"])
def kinds(request):
    """An engine of each kind as that of the process."""
    made = DRIVERS[request.param]()
    with engine.using(made):
        yield made
    made.stop()


@pytest.fixture(params=STORES)
def kv(request, kinds):
    """A fresh store of each kind, on an engine of each kind."""
    return mx.kv.create(request.param)
