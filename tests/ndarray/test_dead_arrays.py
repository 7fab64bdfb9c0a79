"""Dead arrays and ``FLAGS_eager_delete_tensor_gb``: freed immediately, in batches, or when memory runs out."""

import gc

import pytest

import weftplan as mx
from weftplan import config, device, storage
from weftplan.ndarray.memory import release
from weftplan.storage import LimitResource, NaivePool

SIZE = 1 << 16


@pytest.fixture
def pool(monkeypatch):
    """Yield a pool with room for eight arrays, after clearing the cached setting."""
    release.drain(everything=True)
    config._reset_for_tests()
    monkeypatch.setattr(release.dead, "_threshold", None)
    place = device.get(mx.cpu(48))
    with storage.using(LimitResource(NaivePool(place), 8 * SIZE)) as actual:
        yield actual
        gc.collect()
        mx.nd.waitall()
        release.drain(everything=True)
        mx.nd.waitall()
    config._reset_for_tests()


def create_and_drop():
    """Create and drop an array of ``SIZE`` bytes."""
    x = mx.nd.zeros((SIZE // 4,), ctx=mx.cpu(48))
    x.wait_to_read()
    del x


@pytest.mark.parametrize(
    ("gib", "live"),
    [("0", [0, 0, 0, 0, 0]), (str(2.5 * SIZE / 2**30), [1, 2, 0, 1, 2]), ("-1", [1, 2, 3, 4, 5])],
    ids=["at once", "together", "never"],
)
@pytest.mark.shows("FLAGS_eager_delete_tensor_gb")
def test_when_dead_arrays_go_back(pool, monkeypatch, gib, live):
    """The flag decides how many of five dead arrays are still live after each death and another push."""
    monkeypatch.setenv("FLAGS_eager_delete_tensor_gb", gib)
    counts = []
    for _ in range(5):
        create_and_drop()
        mx.nd.waitall()
        counts.append(pool.statistics().live)
    assert counts == live


def test_deferred_frees_run_when_memory_runs_out(pool, monkeypatch):
    """With a negative value, dead arrays are freed when a new array does not fit."""
    monkeypatch.setenv("FLAGS_eager_delete_tensor_gb", "-1")
    for _ in range(20):
        create_and_drop()
    assert pool.statistics().failures == 0
