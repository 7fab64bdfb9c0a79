"""Many threads with random allocations: blocks do not overlap, and all memory is freed."""

import random
import threading

import pytest

from weftplan import device
from weftplan.storage import AutoGrowth, GuardResource, NaiveBestFit, NaivePool

THREADS, EACH = 64, 10_000
POOLS = {
    "naive": lambda place: NaivePool(place, slack=16 << 20),
    "auto growth": lambda place: AutoGrowth(place, spare=1 / 16),
    "best fit": lambda place: NaiveBestFit(place, first=64 << 20),
    "guarded": lambda place: GuardResource(AutoGrowth(place)),
}


@pytest.mark.stress
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", POOLS)
def test_many_threads_and_random_sizes(name):
    """64 threads make 10,000 allocations each, mark both ends, and find the marks at the free; no memory stays live."""
    pool, wrong = POOLS[name](device.get(device.cpu(0))), []

    def work(number):
        rng, held = random.Random(number), []
        mark = number + 1
        for _ in range(EACH):
            allocation = pool.allocate(rng.choice((0, 1, 64, 640, rng.randint(1, 20_000))), name=number)
            allocation.raw[:8] = allocation.raw[-8:] = mark
            held.append(allocation)
            if len(held) > rng.randint(0, 12):
                back = held.pop(rng.randrange(len(held)))
                if not ((back.raw[:8] == mark).all() and (back.raw[-8:] == mark).all()):
                    wrong.append((number, back.nbytes))
                pool.free(back)
        for back in held:
            pool.free(back)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    now = pool.statistics()
    assert (now.live, now.requested_bytes, now.allocated_bytes) == (0, 0, 0)
    assert now.allocations == THREADS * EACH
    pool.empty_cache()
    assert pool.statistics().reserved_bytes == 0
