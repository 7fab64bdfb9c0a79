"""Contracts on other devices: whole test suites in which ``mx.cpu(i)`` is another device.

Each module of this folder imports the tests of one suite by name. In them ``mx.cpu(i)`` is device ``i % 4`` of the kind
under test, and device 0 is the default context.
"""

import pytest

import weftplan as mx
from tests.contract.devices import PLACES, place
from weftplan import device


@pytest.fixture(autouse=True, params=PLACES[1:])
def there(request, monkeypatch):
    """Replace ``mx.cpu`` by the function that creates contexts of the kind under test; return that function."""
    with place(request.param) as context:
        for module in (mx, device):
            monkeypatch.setattr(module, "cpu", lambda index=0: context(index % 4))
        with context(0):
            yield context


@pytest.fixture
def each_engine(there):
    """The current engine, because one kind of engine suffices for these devices."""
    return mx.engine.get()
