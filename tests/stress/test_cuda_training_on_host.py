"""The GPU tests of executors, stores and training, with kernels compiled to machine code of the host."""

import pytest

import weftplan as mx
from tests.contract.devices import place
from tests.contract.other_devices.test_executors import *  # noqa: F403
from tests.contract.other_devices.test_stores import *  # noqa: F403
from tests.contract.other_devices.test_training import *  # noqa: F403
from tests.cuda_on_host import build
from tests.cuda_on_host.kernels import on_host
from weftplan import device

pytestmark = [
    pytest.mark.stress,
    pytest.mark.skipif(bool(build.missing()), reason=build.missing() or "nothing is missing"),
]


@pytest.fixture(autouse=True)
def there(monkeypatch):
    """Replace ``mx.cpu`` by GPUs of the stand-in, as in tests/contract/other_devices."""
    with place("standin") as context, on_host((0, 1)):
        for module in (mx, device):
            monkeypatch.setattr(module, "cpu", lambda index=0: context(index % 4))
        with context(0):
            yield context
