"""MXNet's pools: block sizes, reuse, the reserve, and their environment variables."""

import pytest

from tests.storage.small_devices import Room
from weftplan import config, device, storage
from weftplan.errors import ConfigError, OutOfMemoryError
from weftplan.storage import NaivePool, PoisonResource, RawResource, RoundPool, StatisticsResource
from weftplan.storage import registry as storage_registry

MIB = 1 << 20


def test_naive_sizes():
    """The Naive pool rounds to 4 KiB up to 2 MiB, and to multiples of 2 MiB above."""
    pool = NaivePool(device.get(device.cpu()))
    sizes = [pool.rounded(n) for n in (1, 4095, 4096, 4097, 2 * MIB, 2 * MIB + 1, 3 * MIB)]
    assert sizes == [4096, 4096, 4096, 8192, 2 * MIB, 4 * MIB, 4 * MIB]


def test_round_sizes():
    """The Round pool rounds to powers of two up to the cutoff, and to multiples of it above."""
    pool = RoundPool(device.get(device.cpu()), cutoff=20)
    sizes = [pool.rounded(n) for n in (1, 32, 4095, 4097, MIB, MIB + 1, 2097153, 3145728, 3145729)]
    assert sizes == [4096, 4096, 4096, 8192, MIB, 2 * MIB, 3 * MIB, 3 * MIB, 4 * MIB]


def test_the_last_block_freed_is_the_first_reused():
    """The block freed last is reused first, because its memory is most likely in the CPU caches."""
    pool = NaivePool(device.get(device.cpu()))
    first, second = pool.allocate(100), pool.allocate(200)
    address = second.raw.__array_interface__["data"][0]
    pool.free(first)
    pool.free(second)
    reused = pool.allocate(4096)
    assert reused.raw.__array_interface__["data"][0] == address
    assert pool.statistics().hits == 1
    assert pool.statistics().reserved_bytes == 8192


def test_other_sizes_do_not_hit():
    """A cached block does not serve a request of another rounded size."""
    pool = NaivePool(device.get(device.cpu()))
    pool.free(pool.allocate(100_000))
    pool.allocate(100)
    assert pool.statistics().hits == 0
    assert pool.statistics().cached_bytes == 102_400


def test_cached_blocks_are_released_before_the_reserve():
    """A new size releases cached blocks before it uses the reserve; without cached blocks it may use it."""
    place = Room(100 * 4096)
    pool = NaivePool(place, reserve=5)
    pool.free(pool.allocate(50 * 4096))
    pool.allocate(47 * 4096)
    assert sum(place.taken) == 47 * 4096
    pool.allocate(50 * 4096)
    assert sum(place.taken) == 97 * 4096


@pytest.mark.parametrize("kind", [NaivePool, RoundPool])
@pytest.mark.parametrize(("free", "emptied"), [(13, False), (12, True)])
def test_the_reserve_to_the_page(kind, free, emptied):
    """With the default reserve of 5 of 100 pages, 8 of 13 free pages can be allocated directly.

    Of 12 free pages 8 are allocated only after the cache is released.
    """
    place = Room(100 * 4096)
    pool = kind(place)
    pool.free(pool.allocate(4096))
    place.taken.append((100 - free) * 4096 - sum(place.taken))
    pool.allocate(8 * 4096)
    assert (pool.statistics().system_frees == 1) is emptied


def test_bounded_pool_stays_near_the_largest_array():
    """A bounded pool that serves ever new sizes reserves at most the largest size plus the slack."""
    place = Room(1 << 30)
    pool = NaivePool(place, slack=MIB)
    for count in (*range(1, 30), *range(30, 0, -1)):
        pool.free(pool.allocate(count * MIB))
        assert pool.statistics().reserved_bytes == sum(place.taken) <= 31 * MIB
    assert NaivePool(place).slack is None
    unbounded = NaivePool(place)
    for count in range(1, 30):
        unbounded.free(unbounded.allocate(count * MIB))
    assert unbounded.statistics().reserved_bytes > 200 * MIB


def test_bounded_pool_serves_loops_from_its_cache():
    """A bounded pool serves a loop over the same four sizes with four system allocations."""
    pool = NaivePool(Room(1 << 30), slack=0)
    for _ in range(10):
        held = [pool.allocate(n) for n in (3 * MIB, 100, 5 * MIB, 8 * MIB)]
        for allocation in held:
            pool.free(allocation)
    assert pool.statistics().system_allocations == 4


def test_bounded_pool_releases_least_recently_used_size():
    """A bounded pool releases the sizes that were used least recently: 4 and 6 MiB before the reused 2 MiB."""
    pool = NaivePool(Room(1 << 30), slack=0)
    for allocation in [pool.allocate(n * MIB) for n in (2, 4, 6)]:
        pool.free(allocation)
    pool.free(pool.allocate(2 * MIB))
    eight = pool.allocate(8 * MIB)
    assert pool.statistics().cached_bytes == 2 * MIB
    pool.free(eight)
    hits = pool.statistics().hits
    pool.free(pool.allocate(2 * MIB))
    assert pool.statistics().hits == hits + 1


def test_bounded_pool_releases_memory_of_past_phases():
    """A bounded pool shrinks to the present need after about two thousand further allocations."""
    pool = NaivePool(Room(1 << 30), slack=MIB)
    for allocation in [pool.allocate(8 * MIB) for _ in range(10)]:
        pool.free(allocation)
    for count in range(2100):
        pool.free(pool.allocate(count + 1))
        if count == 1000:
            assert pool.statistics().reserved_bytes >= 80 * MIB
    assert pool.statistics().reserved_bytes <= 8 * MIB + MIB


def test_only_pools_of_cpus_are_bounded(fresh_environment):
    """Only pools of CPUs are bounded, because other memory is expensive to allocate again."""
    assert storage_registry.build(device.cpu(3)).slack == 16 * MIB
    assert storage_registry.build(device.cpu_pinned(3)).slack is None
    assert storage_registry.build(device.sim(3)).upstream.slack is None


def test_size_cache_is_bounded():
    """The cache of rounded sizes has at most 4,096 entries and gives the right sizes."""
    pool = NaivePool(device.get(device.cpu()), page=32)
    for nbytes in (*range(1, 9000), 5, 4096, 8999):
        allocation = pool.allocate(nbytes)
        assert allocation.size == pool.rounded(nbytes)
        pool.free(allocation)
    assert 0 < len(pool._rounded) <= 4096


def test_refusal_empties_the_cache_and_retries():
    """If the device refuses a request, the pool releases its cached blocks and tries again."""
    place = Room(10 * 4096)
    pool = NaivePool(place, reserve=0)
    pool.free(pool.allocate(8 * 4096))
    place.memory_info = lambda: (1 << 40, 1 << 40)  # a driver that reports too much
    allocation = pool.allocate(5 * 4096)
    assert sum(place.taken) == 5 * 4096
    assert pool.statistics().failures == 0
    pool.free(allocation)


def test_the_report_of_a_full_device():
    """The error of a full device lists the request, the live bytes, the largest holders and advice."""
    place = Room(10 * 4096)
    pool = NaivePool(place, reserve=0)
    pool.allocate(4 * 4096, name="weights")
    pool.allocate(10, name="bias")
    with pytest.raises(OutOfMemoryError) as caught:
        pool.allocate(8 * 4096)
    text = str(caught.value)
    assert "32,768 bytes requested. device full" in text
    assert "live: 16,394 bytes in 2 allocations (20,480 after rounding)" in text
    assert "largest holders: weights: 16,384; bias: 10" in text
    assert "smaller batch" in text


def test_empty_cache_returns_only_cached_bytes():
    """``empty_cache()`` releases only cached blocks and returns their bytes."""
    pool = RoundPool(device.get(device.cpu()))
    kept, dropped = pool.allocate(5000), pool.allocate(9000)
    kept.raw.fill(7)
    pool.free(dropped)
    assert pool.empty_cache() == 16384
    assert pool.empty_cache() == 0
    assert (kept.raw == 7).all()
    assert pool.statistics().reserved_bytes == 8192


@pytest.mark.parametrize(
    "bad", [{"page": 16}, {"large": 0}, {"reserve": 101}, {"reserve": -1}], ids=["page", "large", "reserve", "negative"]
)
def test_naive_pool_refuses_bad_options(bad):
    """An option of the Naive pool out of range raises ConfigError with the legal range."""
    with pytest.raises(ConfigError, match=r"at least 32|above 0|0 to 100"):
        NaivePool(device.get(device.cpu()), **bad)


@pytest.mark.parametrize(
    "bad", [{"page": 16}, {"page": 48}, {"cutoff": 19}, {"cutoff": 35}, {"page": 1 << 21, "cutoff": 20}]
)
def test_round_pool_refuses_bad_options(bad):
    """A page size that is no power of two, or a cutoff outside 20 to 34 or below the page, raises ConfigError."""
    with pytest.raises(ConfigError, match=r"power of two|20 to 34"):
        RoundPool(device.get(device.cpu()), **bad)


@pytest.fixture
def fresh_environment(monkeypatch):
    config._reset_for_tests()
    yield monkeypatch
    config._reset_for_tests()


@pytest.mark.parametrize(("kind", "cls"), [("Naive", NaivePool), ("Round", RoundPool), ("Unpooled", RawResource)])
def test_the_environment_chooses_the_pool(fresh_environment, kind, cls):
    """MXNET_CPU_MEM_POOL_TYPE and the page size determine the resource of a context."""
    fresh_environment.setenv("MXNET_CPU_MEM_POOL_TYPE", kind)
    fresh_environment.setenv("MXNET_CPU_MEM_POOL_PAGE_SIZE", "8192")
    resource = storage_registry.build(device.cpu(5))
    assert type(resource) is cls
    assert kind == "Unpooled" or resource.rounded(1) == 8192


def test_an_unknown_pool_is_refused(fresh_environment):
    """An unknown pool type raises ConfigError with the variable's name."""
    fresh_environment.setenv("MXNET_CPU_MEM_POOL_TYPE", "Buddy")
    with pytest.raises(ConfigError, match="MXNET_CPU_MEM_POOL_TYPE"):
        storage_registry.build(device.cpu(5))


def test_each_context_has_one_resource():
    """``get()`` returns the same resource for the same context, and another for another context."""
    assert storage.get(device.cpu(0)) is storage.get(device.cpu(0))
    assert storage.get(device.cpu(0)) is not storage.get(device.cpu(1))


def test_using_replaces_and_restores():
    """``using()`` replaces the resource inside its block and restores it afterwards, even after an error."""
    before = storage.get(device.cpu(0))
    replacement = RawResource(device.get(device.cpu(0)))
    with storage.using(replacement):
        assert storage.get(device.cpu(0)) is replacement
    assert storage.get(device.cpu(0)) is before
    with pytest.raises(ZeroDivisionError), storage.using(replacement):
        1 // 0  # noqa: B018
    assert storage.get(device.cpu(0)) is before


def test_poison_fills_fresh_and_freed_memory():
    """PoisonResource fills memory with 0xFF at the allocation and after the free."""
    resource = PoisonResource(NaivePool(device.get(device.cpu())))
    allocation = resource.allocate(64)
    assert (allocation.raw == 0xFF).all()
    allocation.raw.fill(1)
    stale = allocation.raw
    resource.free(allocation)
    assert (stale == 0xFF).all()


def test_statistics_separate_users():
    """Two StatisticsResources on one pool each count only their own bytes."""
    pool = NaivePool(device.get(device.cpu()))
    ours, theirs = StatisticsResource(pool), StatisticsResource(pool)
    ours.allocate(100)
    theirs.allocate(5000)
    assert (ours.statistics().requested_bytes, theirs.statistics().requested_bytes) == (100, 5000)
    assert pool.statistics().requested_bytes == 5100


@pytest.mark.parametrize(
    ("kind", "options"), [(NaivePool, {"large": 1}), (RoundPool, {"cutoff": 20}), (RoundPool, {"cutoff": 34})]
)
def test_the_smallest_legal_options(kind, options):
    """The smallest and largest legal options are accepted."""
    pool = kind(device.get(device.cpu()), page=32, reserve=100, **options)
    assert pool.rounded(32) == pool.rounded(1) == 32
    assert pool.rounded(33) == 64


def test_cached_requests_leave_other_free_lists_filled():
    """A request served by the cache leaves the free lists of other sizes filled.

    Otherwise a training step with many sizes could not reuse each of them.
    """
    pool = NaivePool(device.get(device.cpu(9180)))
    sizes = (100, 5000, 70_000, 300_000)
    for nbytes in sizes * 3:
        pool.free(pool.allocate(nbytes))
    pool.empty_cache()
    for held in [pool.allocate(nbytes) for nbytes in sizes]:
        pool.free(held)
    pool.statistics()
    first = {nbytes: pool.allocate(nbytes) for nbytes in sizes}
    raws = {nbytes: id(held.raw) for nbytes, held in first.items()}
    for held in first.values():
        pool.free(held)
    pool.free(pool.allocate(4999))  # rounded to the size of a cached block
    reused = {nbytes: pool.allocate(nbytes) for nbytes in (100, 70_000, 300_000)}
    assert all(id(held.raw) == raws[nbytes] for nbytes, held in reused.items())
    assert pool.statistics().system_allocations == 2 * len(sizes)


def test_peaks_are_exact_with_filled_free_lists():
    """Memory in a free list counts in a peak only when it is allocated again."""
    pool = NaivePool(device.get(device.cpu(9181)))
    one, second = pool.allocate(10_000), pool.allocate(500_000)
    pool.free(one)
    pool.free(second)
    pool.empty_cache()
    pool.free(pool.allocate(500_000))
    spare = pool.allocate(10_000)
    pool.free(spare)
    pool.free(pool.allocate(10_001))  # the same block for another request, which takes nothing from the large one
    pool.reset_peaks()
    for held in [pool.allocate(500_000), pool.allocate(10_000)]:
        pool.free(held)
    pool.reset_peaks()
    assert pool.statistics().peak_requested_bytes == 0
    pool.free(pool.allocate(500_000))
    assert pool.statistics().peak_requested_bytes == 500_000
    held = pool.allocate(10_001)
    assert pool.statistics().peak_requested_bytes == 500_000
    assert pool.statistics().requested_bytes == 10_001
    more = pool.allocate(500_000)
    assert pool.statistics().peak_requested_bytes == 510_001
    assert pool.statistics().requested_bytes == 510_001
    pool.free(more)
    pool.free(held)
    assert pool.statistics().requested_bytes == pool.statistics().allocated_bytes == 0


def test_peaks_are_exact_with_alternating_sizes():
    """A small request after a large free does not add to the peak of the large block."""
    pool = NaivePool(device.get(device.cpu(9182)))
    for nbytes in (2_000_001, 1, 2_000_001, 1, 2_000_001):
        pool.free(pool.allocate(nbytes))
        assert pool.statistics().peak_requested_bytes == 2_000_001
