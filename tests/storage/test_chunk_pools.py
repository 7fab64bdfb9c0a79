"""Pools of Paddle's two strategies: block sizes, positions in a chunk, and when chunks are released.

Figures of tests named "worked" are computed by hand from the rules of PaddlePaddle's ``buddy_allocator.cc`` and
``auto_growth_best_fit_allocator.cc``.
"""

import itertools

import pytest

from tests.storage.small_devices import MIB, Room, address, layout
from weftplan.errors import ConfigError, OutOfMemoryError
from weftplan.storage import AutoGrowth, NaiveBestFit
from weftplan.storage.naive_best_fit import HEADER


def paddle_gpu(room, first=100 * MIB, refill=50 * MIB):
    """Return Paddle's buddy allocator for a GPU."""
    return NaiveBestFit(room, first=first, refill=refill, unit=256, header=HEADER, insist=True)


@pytest.mark.parametrize(
    ("nbytes", "occupied"), [(10, 256), (10240, 10496), (MIB, 1048832), (99 * MIB, 103809280), (100 * MIB - 64, None)]
)
def test_worked_sizes_on_a_gpu(nbytes, occupied):
    """A block is the request plus 64 bytes, rounded up to 256; the largest request takes the whole chunk."""
    pool = paddle_gpu(Room())
    assert pool.allocate(nbytes).size == (occupied or 100 * MIB)
    assert pool.statistics().reserved_bytes == 100 * MIB


def test_worked_size_of_a_request_beyond_the_chunk():
    """A request that does not fit into a chunk with its header is allocated from the device, and freed to it."""
    room = Room()
    pool = paddle_gpu(room)
    pool.allocate(10)
    huge = pool.allocate(100 * MIB - 63)
    assert room.taken == [100 * MIB, 100 * MIB + 256]
    pool.free(huge)
    assert room.taken == [100 * MIB]


def test_worked_growth_of_two_large_requests():
    """The second of two requests of 60 MiB is larger than a refill, so it is allocated from the device."""
    pool = paddle_gpu(Room())
    held = [pool.allocate(60 * MIB), pool.allocate(60 * MIB)]
    now = pool.statistics()
    assert (now.reserved_bytes, now.allocated_bytes) == (167772416, 125829632)
    for allocation in held:
        pool.free(allocation)
    assert pool.empty_cache() == 167772416
    pool.allocate(1)
    assert pool.statistics().reserved_bytes == 100 * MIB, "with nothing held the next chunk is a first one again"


@pytest.mark.parametrize(("nbytes", "occupied"), [(1, 4096), (4032, 4096), (4033, 8192), (4096, 8192)])
def test_worked_sizes_on_a_cpu(nbytes, occupied):
    """On a host a block is the request plus 64 bytes, rounded up to pages of 4,096."""
    pool = NaiveBestFit(Room(), first=500 * MIB, unit=4096, header=HEADER, insist=True)
    assert pool.allocate(nbytes).size == occupied


def test_worked_size_of_page_locked_memory():
    """One byte of page-locked memory takes a block of 64 KiB."""
    assert NaiveBestFit(Room(), first=MIB, unit=65536, header=HEADER).allocate(1).size == 65536


def test_documented_rule_ignores_the_header():
    """Without a header, a request of a whole chunk is served from a chunk, and a larger one from the device."""
    room = Room()
    pool = NaiveBestFit(room, first=MIB)
    whole = pool.allocate(MIB)
    pool.allocate(MIB + 1)
    assert room.taken == [MIB, MIB + 1]
    pool.free(whole)
    pool.statistics()
    assert room.taken == [MIB, MIB + 1]


def test_later_chunks_are_as_large_as_the_first():
    """Without a refill size, later chunks are as large as the first; if that fails, the request alone is allocated."""
    room = Room(total=5 * MIB)
    pool = NaiveBestFit(room, first=2 * MIB)
    for _ in range(5):
        pool.allocate(MIB)
    assert room.taken == [2 * MIB, 2 * MIB, MIB]
    with pytest.raises(OutOfMemoryError, match="device full"):
        pool.allocate(1)


def test_insisting_pool_fails_with_its_chunk():
    """With ``insist``, as in Paddle, a request fails if the device has no room for a whole chunk."""
    room = Room(total=3 * MIB)
    pool = NaiveBestFit(room, first=2 * MIB, insist=True)
    pool.allocate(2 * MIB)
    with pytest.raises(OutOfMemoryError, match="device full"):
        pool.allocate(10)


def test_size_functions_are_called_on_demand():
    """Functions for chunk sizes are called for each chunk, so a share of the free memory shrinks."""
    room = Room(total=100 * MIB)

    def share():
        return room.memory_info()[0] // 2

    pool = NaiveBestFit(room, first=share, refill=share)
    assert room.taken == []
    for _ in range(3):
        pool.allocate(20 * MIB)
    assert room.taken == [50 * MIB, 25 * MIB]
    assert pool.largest == 50 * MIB


def test_empty_chunks_allocate_from_the_device():
    """With a chunk size of 0, each request is allocated from the device and freed to it."""
    room = Room()
    pool = NaiveBestFit(room, first=0)
    first, _ = pool.allocate(100), pool.allocate(5000)
    assert room.taken == [100, 5000]
    pool.free(first)
    assert room.taken == [5000]
    assert pool.statistics().cached_bytes == 0


def test_cap_is_exact():
    """Chunks and direct requests together never exceed the cap; the error names the flag."""
    pool = NaiveBestFit(Room(), first=MIB, cap=2 * MIB)
    pool.allocate(10)
    pool.allocate(MIB)
    with pytest.raises(OutOfMemoryError, match=r"FLAGS_fraction_of_cuda_pinned_memory_to_use allows 2,097,152"):
        pool.allocate(MIB)
    assert pool.statistics().reserved_bytes == 2 * MIB


def test_naive_best_fit_cuts_low_and_merges():
    """NaiveBestFit allocates the low end of the smallest sufficient block, and merges adjacent freed blocks."""
    pool = NaiveBestFit(Room(), first=MIB)
    a, b, c = (pool.allocate(n) for n in (1000, 2000, 3000))
    assert layout(pool) == [[(0, 1024, False), (1024, 2048, False), (3072, 3008, False), (6080, MIB - 6080, True)]]
    base = address(a)
    pool.free(b)
    pool.statistics()
    b = pool.allocate(1500)
    assert address(b) == base + 1024, "the hole fits better than the rest of the chunk"
    pool.free(b)
    pool.free(a)
    assert layout(pool)[0][0] == (0, 3072, True)
    pool.free(c)
    assert layout(pool) == [[(0, MIB, True)]]


def test_worked_places_of_auto_growth():
    """AutoGrowth allocates the high end of a block, and returns a chunk only when all of it is free."""
    pool = AutoGrowth(Room(), chunk=MIB, unit=256)
    first = pool.allocate(1000)
    second = pool.allocate(1000)
    base = address(second) - 1046528
    assert address(first) - base == 1047552
    assert pool.statistics().reserved_bytes == MIB
    pool.free(first)
    assert pool.empty_cache() == 0, "the other still lives"
    pool.free(second)
    assert pool.empty_cache() == MIB


def test_worked_growth_by_the_request():
    """Without a chunk size, a chunk is the request rounded up to the unit; a smaller request takes its high end."""
    pool = AutoGrowth(Room(), unit=256)
    assert pool.allocate(1).size == 256
    assert pool.statistics().reserved_bytes == 256
    block = pool.allocate(1024)
    base = address(block)
    pool.free(block)
    assert address(pool.allocate(512)) == base + 512
    assert pool.statistics().reserved_bytes == 256 + 1024


def test_auto_growth_keeps_small_remainders():
    """AutoGrowth keeps the remainder of a block free, however small it is."""
    pool = AutoGrowth(Room(), unit=256)
    block = pool.allocate(1024)
    pool.free(block)
    pool.allocate(768)
    assert layout(pool) == [[(0, 256, True), (256, 768, False)]]


def test_the_oldest_place_wins_among_equal_blocks():
    """Among equal blocks the oldest chunk is used, so equal calls give equal positions in every run."""
    pool = AutoGrowth(Room(), unit=256)
    held = [pool.allocate(1024) for _ in range(3)]
    places = [address(a) for a in held]
    for allocation in reversed(held):
        pool.free(allocation)
    pool.empty_cache  # noqa: B018
    pool.statistics()
    assert [address(pool.allocate(n)) for n in (1024, 1023, 1022)] == places


def test_idle_chunks_are_released_for_new_chunks():
    """If the device is full, unused chunks are released to it, and the request gets a new chunk."""
    room = Room(total=10 * MIB)
    pool = AutoGrowth(room)
    kept, idle = pool.allocate(2 * MIB), pool.allocate(6 * MIB)
    pool.free(idle)
    pool.allocate(7 * MIB)
    assert room.taken == [2 * MIB, 7 * MIB]
    assert pool.statistics().failures == 0
    pool.free(kept)


def test_free_then_allocate_reuses_the_memory():
    """An allocation right after a free of the same size reuses the memory; statistics count both calls."""
    pool = AutoGrowth(Room(), chunk=MIB)
    first = pool.allocate(5000)
    pool.free(pool.allocate(5000))
    place = address(first)
    pool.free(first)
    assert first.raw is None
    assert address(pool.allocate(5000)) == place
    now = pool.statistics()
    assert (now.live, now.requested_bytes, now.peak_requested_bytes) == (1, 5000, 10000)
    assert (now.allocations, now.hits) == (3, 2)


@pytest.mark.parametrize("kind", [AutoGrowth, NaiveBestFit])
def test_freed_memory_merges_before_growth(kind):
    """Adjacent freed blocks merge before the pool grows, so they serve a request of the whole chunk."""
    pool = kind(Room(), **({"chunk": MIB} if kind is AutoGrowth else {"first": MIB}))
    for _ in range(2):
        held = [pool.allocate(MIB // 16) for _ in range(16)]
        for allocation in held:
            pool.free(allocation)
    pool.allocate(MIB)
    assert pool.statistics().reserved_bytes == MIB


@pytest.mark.parametrize("options", [{"unit": 0}, {"chunk": -1}])
def test_auto_growth_refuses_bad_options(options):
    """A unit below 1 or a negative chunk size of AutoGrowth raises ConfigError."""
    with pytest.raises(ConfigError, match="at least"):
        AutoGrowth(Room(), **options)


@pytest.mark.parametrize("options", [{"first": -1}, {"refill": -1}, {"unit": 0}, {"header": -1}])
def test_naive_best_fit_refuses_bad_options(options):
    """An option of NaiveBestFit out of range raises ConfigError with the name of the option."""
    with pytest.raises(ConfigError, match=next(iter(options))):
        NaiveBestFit(Room(), **options)


@pytest.mark.parametrize("kind", [AutoGrowth, NaiveBestFit])
@pytest.mark.parametrize("step", range(12))
def test_interrupt_never_allocates_memory_twice(kind, step):
    """After Ctrl-C at any change of the free list, live allocations still do not overlap."""
    pool = kind(Room(), **({"chunk": MIB} if kind is AutoGrowth else {"first": MIB}))
    held = [pool.allocate(n) for n in (1000, 2000, 3000, 4000, 5000)]

    class Breaking(list):
        left = step

        def strike(self):
            self.left -= 1
            if self.left < 0:
                self.left = 1 << 60
                raise KeyboardInterrupt

        def __delitem__(self, at):
            super().__delitem__(at)
            self.strike()

        def insert(self, at, item):
            self.strike()
            super().insert(at, item)

    pool._free = Breaking(pool._free)
    struck = False
    for turn in range(12):
        try:
            if held:
                pool.free(held.pop(turn % len(held)))
            pool.statistics()
            held.append(pool.allocate(600 + 100 * turn))
            held.append(pool.allocate(1700))
        except KeyboardInterrupt:
            struck = True
        ranges = sorted((address(a), address(a) + a.nbytes) for a in held)
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(ranges))
    assert struck
