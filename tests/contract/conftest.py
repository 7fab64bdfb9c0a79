"""Engines and stores for the contract."""

import pytest

import weftplan as mx
from tests.contract.engines import DRIVERS
from tests.contract.stores import STORES
from weftplan import engine


@pytest.fixture(params=DRIVERS)
def eng(request):
    """An engine of each kind, stopped afterwards; no unobserved failure may remain."""
    eng = DRIVERS[request.param]()
    yield eng
    eng.stop()
    eng.wait_for_all()


@pytest.fixture(params=[name for name in DRIVERS if name != "naive"])
def deferred(request):
    """Engines whose pushes do not raise (all but the naive engine)."""
    eng = DRIVERS[request.param]()
    yield eng
    eng.stop()
    eng.wait_for_all()


@pytest.fixture(params=[name for name in DRIVERS if name != "per_device_1"])
def kinds(request):
    """An engine of each kind as the process-wide engine."""
    eng = DRIVERS[request.param]()
    with engine.using(eng):
        yield eng
    eng.stop()


@pytest.fixture(params=STORES)
def kv(request, kinds):
    """A new store of each kind, on an engine of each kind."""
    return mx.kv.create(request.param)
