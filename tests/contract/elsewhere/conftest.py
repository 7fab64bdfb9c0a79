"""Contracts on other devices: whole suites in which ``mx.cpu(i)`` means another device.

A module here imports the tests of one suite by name. In them ``mx.cpu(i)`` is device ``i`` (of four) of the kind under
test, which is also the default context.
"""

import pytest

import weftplan as mx
from tests.contract.devices import PLACES, place
from weftplan import device


@pytest.fixture(autouse=True, params=PLACES[1:])
def there(request, monkeypatch):
    """The kind of device under test."""
    with place(request.param) as context:
        for module in (mx, device):
            monkeypatch.setattr(module, "cpu", lambda index=0: context(index % 4))
        with context(0):
            yield context


@pytest.fixture
def each_engine(there):
    """Array suites request every kind of engine; here a single kind suffices."""
    return mx.engine.get()
