"""Recording and offloading that another thread switches off during a call: the value is looked up once."""

from __future__ import annotations

import sys
import types

import numpy as np
import pytest

import weftplan as mx
from weftplan.device import cpu, get
from weftplan.ndarray import small_calls
from weftplan.storage import AutoGrowth, NaivePool, ledger, mergeable_chunks, recording
from weftplan.support.slots import MAKE_ROOM


class Ending:
    """A module whose attribute ``name`` is None at every second lookup, as if another thread had cleared it."""

    def __init__(self, name: str, value: object, module: types.ModuleType) -> None:
        self.name, self.value, self.module, self.looks = name, value, module, 0

    def __getattr__(self, name: str) -> object:
        if name != self.name:
            return getattr(self.module, name)
        self.looks += 1
        return self.value if self.looks % 2 else None


@pytest.mark.parametrize("make", [lambda: NaivePool(get(cpu()), page=4096, large=1 << 20, reserve=5), AutoGrowth])
def test_pool_survives_the_end_of_recording(make, monkeypatch):
    """A pool allocates, frees and empties its cache although recording ends during each call."""
    pool = make() if make is not AutoGrowth else AutoGrowth(get(cpu()))
    lying = Ending("recorder", recording.StorageRecorder(100), recording)
    monkeypatch.setattr(ledger, "recording", lying)
    monkeypatch.setattr(mergeable_chunks, "recording", lying)
    for _ in range(6):
        held = [pool.allocate(nbytes) for nbytes in (100, 100, 5000, 3 << 20)]
        for allocation in held:
            pool.free(allocation)
    assert lying.looks > 24
    assert pool.statistics().live == 0
    pool.empty_cache()
    assert pool.statistics().reserved_bytes == 0


def test_pushes_survive_the_end_of_recording(monkeypatch):
    """Arithmetic, calls by name and copies succeed although recording or offloading ends during each push."""
    lying = Ending("value", lambda context, operands: (), MAKE_ROOM)
    for module in ("arithmetic", "copying", "calls.invoke"):
        monkeypatch.setattr(sys.modules[f"weftplan.ndarray.{module}"], "MAKE_ROOM", lying)
    monkeypatch.setattr(small_calls, "recording", Ending("recorder", recording.StorageRecorder(100), recording))
    for size in (3, 100_000):
        ones = mx.nd.array(np.ones(size, np.float32))
        for _ in range(8):
            there = (mx.nd.relu(ones + ones) * 2).copyto(mx.cpu(1))
            assert there.asnumpy().sum() == 4 * size
