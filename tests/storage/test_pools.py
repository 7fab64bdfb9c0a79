"""MXNet's pools: sizes, reuse, the reserve, and the environment that configures them."""

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
    """Powers of two up to the cutoff, multiples of it beyond."""
    pool = RoundPool(device.get(device.cpu()), cutoff=20)
    sizes = [pool.rounded(n) for n in (1, 32, 4095, 4097, MIB, MIB + 1, 2097153, 3145728, 3145729)]
    assert sizes == [4096, 4096, 4096, 8192, MIB, 2 * MIB, 3 * MIB, 3 * MIB, 4 * MIB]


def test_the_last_block_freed_is_the_first_reused():
    """Last in, first out, per size: the warmest memory comes back first."""
    pool = NaivePool(device.get(device.cpu()))
    first, second = pool.allocate(100), pool.allocate(200)
    address = second.raw.__array_interface__["data"][0]
    pool.free(first)
    pool.free(second)
    again = pool.allocate(4096)
    assert again.raw.__array_interface__["data"][0] == address
    assert pool.statistics().hits == 1
    assert pool.statistics().reserved_bytes == 8192


def test_other_sizes_do_not_hit():
    """A cached block serves its own rounded size only."""
    pool = NaivePool(device.get(device.cpu()))
    pool.free(pool.allocate(100_000))
    pool.allocate(100)
    assert pool.statistics().hits == 0
    assert pool.statistics().cached_bytes == 102_400


def test_cached_blocks_go_back_before_the_reserve_is_touched():
    """With 5 % to keep free, a new size empties the cache first; without cached blocks it may use the reserve."""
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
    """5 of 100 pages stay free by default: 8 more may be taken while 13 are free, with 12 the cache goes first."""
    place = Room(100 * 4096)
    pool = kind(place)
    pool.free(pool.allocate(4096))
    place.taken.append((100 - free) * 4096 - sum(place.taken))
    pool.allocate(8 * 4096)
    assert (pool.statistics().system_frees == 1) is emptied


def test_a_bounded_pool_never_holds_more_than_live_bytes_ever_were():
    """Arrays of ever other sizes, one at a time: what the pool holds is at most the largest, and the slack."""
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


def test_a_bounded_pool_serves_a_loop_from_its_cache():
    """Sizes that repeat, as many at a time as before, are asked of the system once."""
    pool = NaivePool(Room(1 << 30), slack=0)
    for _ in range(10):
        held = [pool.allocate(n) for n in (3 * MIB, 100, 5 * MIB, 8 * MIB)]
        for allocation in held:
            pool.free(allocation)
    assert pool.statistics().system_allocations == 4


def test_a_bounded_pool_gives_the_longest_unused_size_back_first():
    """Of 2, 4 and 6 MiB in the cache, 2 was used again since: the others make room for 8."""
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


def test_a_bounded_pool_gives_back_what_a_past_phase_needed():
    """Peaks count for one to two thousand allocations; then the cache shrinks to what is needed now."""
    pool = NaivePool(Room(1 << 30), slack=MIB)
    for allocation in [pool.allocate(8 * MIB) for _ in range(10)]:
        pool.free(allocation)
    for count in range(2100):
        pool.free(pool.allocate(count + 1))
        if count == 1000:
            assert pool.statistics().reserved_bytes >= 80 * MIB
    assert pool.statistics().reserved_bytes <= 8 * MIB + MIB


def test_only_pools_of_cpus_are_bounded(fresh_environment):
    """The host's memory belongs to everybody; a GPU's, and page-locked memory, is too dear to be asked for again."""
    assert storage_registry.build(device.cpu(3)).slack == 16 * MIB
    assert storage_registry.build(device.cpu_pinned(3)).slack is None
    assert storage_registry.build(device.sim(3)).upstream.slack is None


def test_a_pool_does_not_grow_with_the_sizes_it_has_seen():
    """What it remembers of sizes is bounded, and what it remembers is true."""
    pool = NaivePool(device.get(device.cpu()), page=32)
    for nbytes in (*range(1, 9000), 5, 4096, 8999):
        allocation = pool.allocate(nbytes)
        assert allocation.size == pool.rounded(nbytes)
        pool.free(allocation)
    assert 0 < len(pool._rounded) <= 4096


def test_a_refusal_empties_the_cache_and_tries_once_more():
    """The device is full of cached blocks of another size: they make room, and nobody sees an error."""
    place = Room(10 * 4096)
    pool = NaivePool(place, reserve=0)
    pool.free(pool.allocate(8 * 4096))
    place.memory_info = lambda: (1 << 40, 1 << 40)  # a driver that promises too much
    allocation = pool.allocate(5 * 4096)
    assert sum(place.taken) == 5 * 4096
    assert pool.statistics().failures == 0
    pool.free(allocation)


def test_the_report_of_a_full_device():
    """Out of memory tells what was asked, what is live, the largest free block, the holders and what to change."""
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


def test_empty_cache_returns_the_bytes_and_keeps_live_memory():
    """Only cached blocks go back."""
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
    """The message names the variable and what is legal."""
    fresh_environment.setenv("MXNET_CPU_MEM_POOL_TYPE", "Buddy")
    with pytest.raises(ConfigError, match="MXNET_CPU_MEM_POOL_TYPE"):
        storage_registry.build(device.cpu(5))


def test_each_context_has_one_resource():
    """get() gives the same object again, and another for another context."""
    assert storage.get(device.cpu(0)) is storage.get(device.cpu(0))
    assert storage.get(device.cpu(0)) is not storage.get(device.cpu(1))


def test_using_replaces_and_restores():
    """Inside the block get() gives the replacement, afterwards the old resource, also after an error."""
    before = storage.get(device.cpu(0))
    other = RawResource(device.get(device.cpu(0)))
    with storage.using(other):
        assert storage.get(device.cpu(0)) is other
    assert storage.get(device.cpu(0)) is before
    with pytest.raises(ZeroDivisionError), storage.using(other):
        1 // 0  # noqa: B018
    assert storage.get(device.cpu(0)) is before


def test_poison_marks_fresh_and_returned_memory():
    """Reading before the first write gives the poison, and so does a view kept too long."""
    resource = PoisonResource(NaivePool(device.get(device.cpu())))
    allocation = resource.allocate(64)
    assert (allocation.raw == 0xFF).all()
    allocation.raw.fill(1)
    stale = allocation.raw
    resource.free(allocation)
    assert (stale == 0xFF).all()


def test_statistics_of_one_user_leave_out_the_others():
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
    """Bounds are themselves legal."""
    pool = kind(device.get(device.cpu()), page=32, reserve=100, **options)
    assert pool.rounded(32) == pool.rounded(1) == 32
    assert pool.rounded(33) == 64


def test_sizes_in_turn_leave_what_lies_ready_for_the_others():
    """A request that the cache serves takes nothing from the sizes that are in use beside it, so that a step of many
    sizes finds each as it was left; one that nothing serves may take all."""
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
    pool.free(pool.allocate(4999))  # of the size of a block that is there
    again = {nbytes: pool.allocate(nbytes) for nbytes in (100, 70_000, 300_000)}
    assert all(id(held.raw) == raws[nbytes] for nbytes, held in again.items())
    assert pool.statistics().system_allocations == 2 * len(sizes)


def test_peaks_are_exact_when_shelves_stay():
    """What lies ready is not live: it counts in no peak until somebody takes it, and then it does."""
    pool = NaivePool(device.get(device.cpu(9181)))
    one, other = pool.allocate(10_000), pool.allocate(500_000)
    pool.free(one)
    pool.free(other)
    pool.empty_cache()
    pool.free(pool.allocate(500_000))
    spare = pool.allocate(10_000)
    pool.free(spare)
    pool.free(pool.allocate(10_001))  # the same block for another request, which takes nothing of the large one
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


def test_peaks_are_exact_when_sizes_take_turns_from_their_shelves():
    """A small request that takes what was written off does not count beside a large block freed before."""
    pool = NaivePool(device.get(device.cpu(9182)))
    for nbytes in (2_000_001, 1, 2_000_001, 1, 2_000_001):
        pool.free(pool.allocate(nbytes))
        assert pool.statistics().peak_requested_bytes == 2_000_001
