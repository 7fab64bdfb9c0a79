"""Summary of the memory of all contexts, and reset of peaks."""

import re

import weftplan as mx
from weftplan import device, storage
from weftplan.storage import NaivePool


def test_summary_lists_figures_and_holders():
    """The summary shows the bytes, peaks and counts of the statistics, and the line of each holder."""
    ctx = mx.cpu(71)
    with storage.using(NaivePool(device.get(ctx))) as pool:
        array = mx.nd.zeros((10_000,), ctx=ctx)
        array.wait_to_read()
        pool.free(pool.allocate(50_000))
        text = storage.memory_summary(ctx)
        now = pool.statistics()
        assert "cpu(71): <NaivePool cpu(71): 1 live" in text
        assert f"  asked for        {40_000:>18,} bytes   peak {90_000:>18,}" in text
        assert f"  reserved         {now.reserved_bytes:>18,} bytes   peak {now.peak_reserved_bytes:>18,}" in text
        assert "1 live of 2 allocations, 0 of them from the cache; 2 from the system, 0 refused" in text
        assert f"held by: zeros at {__file__}:" in text
        assert "cpu(71)" in storage.memory_summary()
        assert re.search(r"process: [\d,]+ bytes; the machine or container has [\d,]+, [\d,]+ of them free", text)
        storage.reset_peaks(ctx)
        assert pool.statistics().peak_requested_bytes == 40_000
        del array
        mx.nd.waitall()


def test_summary_of_one_context():
    """A summary or a reset of one context does not include other contexts."""
    ctx, second = mx.cpu(72), mx.cpu(73)
    with storage.using(NaivePool(device.get(ctx))), storage.using(NaivePool(device.get(second))) as pool:
        pool.free(pool.allocate(100))
        storage.reset_peaks(ctx)
        assert pool.statistics().peak_requested_bytes == 100
        assert "cpu(73)" not in storage.memory_summary(ctx)
