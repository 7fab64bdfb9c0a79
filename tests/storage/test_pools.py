"""MXNet's pools: sizes, reuse, the reserve, and their environment variables."""

import pytest

from tests.storage.rooms import Room
from weftplan import config, device, storage
from weftplan.errors import ConfigError, OutOfMemoryError
from weftplan.storage import NaivePool, PoisonResource, RawResource, RoundPool, StatisticsResource
from weftplan.storage import registry as storage_registry

MIB = 1 << 20


def test_naive_sizes():
    """4095 and 4096 bytes share a block size; 2 MiB + 1 and 3 MiB both take 4 MiB."""
    pool = NaivePool(device.get(device.cpu()))
    sizes = [pool.rounded(n) for n in (1, 4095, 4096, 4097, 2 * MIB, 2 * MIB + 1, 3 * MIB)]
    assert sizes == [4096, 4096, 4096, 8192, 2 * MIB, 4 * MIB, 4 * MIB]


def test_round_sizes():
    """Powers of two up to the cutoff, multiples of it above."""
    pool = RoundPool(device.get(device.cpu()), cutoff=20)
    sizes = [pool.rounded(n) for n in (1, 32, 4095, 4097, MIB, MIB + 1, 2097153, 3145728, 3145729)]
    assert sizes == [4096, 4096, 4096, 8192, MIB, 2 * MIB, 3 * MIB, 3 * MIB, 4 * MIB]


def test_the_last_block_freed_is_the_first_reused():
    """Last in, first out, per size: the warmest memory is reused first."""
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
    """A cached block serves only its own rounded size."""
    pool = NaivePool(device.get(device.cpu()))
    pool.free(pool.allocate(100_000))
    pool.allocate(100)
    assert pool.statistics().hits == 0
    assert pool.statistics().cached_bytes == 102_400


def test_cached_blocks_are_released_before_the_reserve():
    """With a reserve of 5 %, a new size empties the cache first; without cached blocks it may use the reserve."""
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
    """5 of 100 pages stay free by default: of 13 free pages 8 may be taken; of 12 only after the cache is released."""
    place = Room(100 * 4096)
    pool = kind(place)
    pool.free(pool.allocate(4096))
    place.taken.append((100 - free) * 4096 - sum(place.taken))
    pool.allocate(8 * 4096)
    assert (pool.statistics().system_frees == 1) is emptied


def test_bounded_pool_stays_near_the_largest_array():
    """Arrays of ever new sizes, one at a time: the pool holds at most the largest plus the slack."""
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
    """Repeated sizes, with no more live than before, are requested from the system once."""
    pool = NaivePool(Room(1 << 30), slack=0)
    for _ in range(10):
        held = [pool.allocate(n) for n in (3 * MIB, 100, 5 * MIB, 8 * MIB)]
        for allocation in held:
            pool.free(allocation)
    assert pool.statistics().system_allocations == 4


def test_bounded_pool_releases_least_recently_used_size():
    """Of 2, 4 and 6 MiB in the cache, 2 was reused since: the others make room for 8."""
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
    """Peaks count for one to two thousand allocations; then the cache shrinks to the present need."""
    pool = NaivePool(Room(1 << 30), slack=MIB)
    for allocation in [pool.allocate(8 * MIB) for _ in range(10)]:
        pool.free(allocation)
    for count in range(2100):
        pool.free(pool.allocate(count + 1))
        if count == 1000:
            assert pool.statistics().reserved_bytes >= 80 * MIB
    assert pool.statistics().reserved_bytes <= 8 * MIB + MIB


def test_only_pools_of_cpus_are_bounded(fresh_environment):
    """Host memory is shared by all programs; GPU and page-locked memory is too expensive to allocate again."""
    assert storage_registry.build(device.cpu(3)).slack == 16 * MIB
    assert storage_registry.build(device.cpu_pinned(3)).slack is None
    assert storage_registry.build(device.sim(3)).upstream.slack is None


def test_size_cache_is_bounded():
    """The cache of rounded sizes is bounded and correct."""
    pool = NaivePool(device.get(device.cpu()), page=32)
    for nbytes in (*range(1, 9000), 5, 4096, 8999):
        allocation = pool.allocate(nbytes)
        assert allocation.size == pool.rounded(nbytes)
        pool.free(allocation)
    assert 0 < len(pool._rounded) <= 4096


def test_refusal_empties_the_cache_and_retries():
    """The device is full of cached blocks of another size: they are released, and the request succeeds."""
    place = Room(10 * 4096)
    pool = NaivePool(place, reserve=0)
    pool.free(pool.allocate(8 * 4096))
    place.memory_info = lambda: (1 << 40, 1 << 40)  # a driver that reports too much
    allocation = pool.allocate(5 * 4096)
    assert sum(place.taken) == 5 * 4096
    assert pool.statistics().failures == 0
    pool.free(allocation)


def test_the_report_of_a_full_device():
    """The error lists the request, live memory, the largest free block, the holders and advice."""
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
    """Only cached blocks are released."""
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
    """Each message names the option's legal range."""
    with pytest.raises(ConfigError, match=r"at least 32|above 0|0 to 100"):
        NaivePool(device.get(device.cpu()), **bad)


@pytest.mark.parametrize(
    "bad", [{"page": 16}, {"page": 48}, {"cutoff": 19}, {"cutoff": 35}, {"page": 1 << 21, "cutoff": 20}]
)
def test_round_pool_refuses_bad_options(bad):
    """The page is a power of two, the cutoff 20 to 34 and not below the page."""
    with pytest.raises(ConfigError, match=r"power of two|20 to 34"):
        RoundPool(device.get(device.cpu()), **bad)


@pytest.fixture
def fresh_environment(monkeypatch):
    config._reset_for_tests()
    yield monkeypatch
    config._reset_for_tests()


@pytest.mark.parametrize(("kind", "cls"), [("Naive", NaivePool), ("Round", RoundPool), ("Unpooled", RawResource)])
def test_the_environment_chooses_the_pool(fresh_environment, kind, cls):
    """MXNET_CPU_MEM_POOL_TYPE and its page size reach the resource of a context."""
    fresh_environment.setenv("MXNET_CPU_MEM_POOL_TYPE", kind)
    fresh_environment.setenv("MXNET_CPU_MEM_POOL_PAGE_SIZE", "8192")
    resource = storage_registry.build(device.cpu(5))
    assert type(resource) is cls
    assert kind == "Unpooled" or resource.rounded(1) == 8192


def test_an_unknown_pool_is_refused(fresh_environment):
    """The message names the variable and the legal values."""
    fresh_environment.setenv("MXNET_CPU_MEM_POOL_TYPE", "Buddy")
    with pytest.raises(ConfigError, match="MXNET_CPU_MEM_POOL_TYPE"):
        storage_registry.build(device.cpu(5))


def test_each_context_has_one_resource():
    """get() returns the same object for a context, another for another context."""
    assert storage.get(device.cpu(0)) is storage.get(device.cpu(0))
    assert storage.get(device.cpu(0)) is not storage.get(device.cpu(1))


def test_using_replaces_and_restores():
    """Inside the block get() returns the replacement, afterwards the old resource, even after an error."""
    before = storage.get(device.cpu(0))
    replacement = RawResource(device.get(device.cpu(0)))
    with storage.using(replacement):
        assert storage.get(device.cpu(0)) is replacement
    assert storage.get(device.cpu(0)) is before
    with pytest.raises(ZeroDivisionError), storage.using(replacement):
        1 // 0  # noqa: B018
    assert storage.get(device.cpu(0)) is before


def test_poison_fills_fresh_and_freed_memory():
    """A read before the first write gives the poison, and so does a view after the free."""
    resource = PoisonResource(NaivePool(device.get(device.cpu())))
    allocation = resource.allocate(64)
    assert (allocation.raw == 0xFF).all()
    allocation.raw.fill(1)
    stale = allocation.raw
    resource.free(allocation)
    assert (stale == 0xFF).all()


def test_statistics_separate_users():
    """Two users of one pool see their own bytes."""
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
    """The bounds themselves are legal."""
    pool = kind(device.get(device.cpu()), page=32, reserve=100, **options)
    assert pool.rounded(32) == pool.rounded(1) == 32
    assert pool.rounded(33) == 64


def test_cached_requests_leave_other_free_lists_filled():
    """A request that the cache serves leaves free lists of other sizes filled, so a step with many sizes reuses each.

    A request that nothing serves may drain all of them.
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
    pool.free(pool.allocate(4999))  # of the size of a cached block
    reused = {nbytes: pool.allocate(nbytes) for nbytes in (100, 70_000, 300_000)}
    assert all(id(held.raw) == raws[nbytes] for nbytes, held in reused.items())
    assert pool.statistics().system_allocations == 2 * len(sizes)


def test_peaks_are_exact_with_filled_free_lists():
    """Listed memory is not live: it counts in a peak only when it is allocated."""
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
    """A small request that takes written-off memory does not count in addition to a large block freed before."""
    pool = NaivePool(device.get(device.cpu(9182)))
    for nbytes in (2_000_001, 1, 2_000_001, 1, 2_000_001):
        pool.free(pool.allocate(nbytes))
        assert pool.statistics().peak_requested_bytes == 2_000_001
