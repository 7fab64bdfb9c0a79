"""Runs whole suites with other devices where they say CPU: what holds of ``cpu(i)`` holds of every device.

A module here imports the tests of one suite by their names. In them ``mx.cpu(i)`` is device ``i`` (of four) of the
place under test, and arrays are made there unless a context is named.
"""

import pytest

import weftplan as mx
from tests.contract.devices import PLACES, place
from weftplan import device


@pytest.fixture(autouse=True, params=PLACES[1:])
def there(request, monkeypatch):
    """The place under test."""
    with place(request.param) as context:
        for module in (mx, device):
            monkeypatch.setattr(module, "cpu", lambda index=0: context(index % 4))
        with context(0):
            yield context


@pytest.fixture
def each_engine(there):
    """Suites of arrays ask for every kind of engine; here one is enough."""
    return mx.engine.get()
