"""Engines and stores for the contract."""

import pytest

import weftplan as mx
from tests.contract.engines import DRIVERS
from tests.contract.stores import STORES
from weftplan import engine


@pytest.fixture(params=DRIVERS)
def eng(request):
    """An engine of each kind, stopped after the test; the test must leave no unraised failure."""
    eng = DRIVERS[request.param]()
    yield eng
    eng.stop()
    eng.wait_for_all()


@pytest.fixture(params=[name for name in DRIVERS if name != "naive"])
def deferred(request):
    """Each engine whose pushes do not raise, which excludes the naive engine."""
    eng = DRIVERS[request.param]()
    yield eng
    eng.stop()
    eng.wait_for_all()


@pytest.fixture(params=[name for name in DRIVERS if name != "per_device_1"])
def kinds(request):
    """An engine of each kind, as the process-wide engine of the test."""
    eng = DRIVERS[request.param]()
    with engine.using(eng):
        yield eng
    eng.stop()


@pytest.fixture(params=STORES)
def kv(request, kinds):
    """A new store of each kind, on an engine of each kind."""
    return mx.kv.create(request.param)
