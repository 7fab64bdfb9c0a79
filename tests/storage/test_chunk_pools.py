"""Paddle's two strategies: the sizes that its source gives, what is cut where, and what goes back when.

Figures marked "worked" come from the rules of PaddlePaddle's ``buddy_allocator.cc`` and
``auto_growth_best_fit_allocator.cc``, carried out by hand.
"""

import itertools

import pytest

from tests.storage.rooms import MIB, Room, address, layout
from weftplan.errors import ConfigError, OutOfMemoryError
from weftplan.storage import AutoGrowth, NaiveBestFit
from weftplan.storage.naive_best_fit import HEADER


def paddle_gpu(room, first=100 * MIB, refill=50 * MIB):
    """Paddle's buddy allocator of a GPU."""
    return NaiveBestFit(room, first=first, refill=refill, unit=256, header=HEADER, insist=True)


@pytest.mark.parametrize(
    ("nbytes", "occupied"), [(10, 256), (10240, 10496), (MIB, 1048832), (99 * MIB, 103809280), (100 * MIB - 64, None)]
)
def test_worked_sizes_on_a_gpu(nbytes, occupied):
    """64 bytes of header, rounded up to 256; the last request that fits takes all of the chunk."""
    pool = paddle_gpu(Room())
    assert pool.allocate(nbytes).size == (occupied or 100 * MIB)
    assert pool.statistics().reserved_bytes == 100 * MIB


def test_worked_size_of_the_first_request_past_the_chunk():
    """100 MiB less 63 bytes does not fit behind the header: it goes to the device, and back with its free."""
    room = Room()
    pool = paddle_gpu(room)
    pool.allocate(10)
    huge = pool.allocate(100 * MIB - 63)
    assert room.taken == [100 * MIB, 100 * MIB + 256]
    pool.free(huge)
    assert room.taken == [100 * MIB]


def test_worked_growth_of_two_large_requests():
    """Two of 60 MiB: the second does not fit into the first chunk, and is larger than what a refill takes."""
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
    """On the host the unit is a page, and the header counts too."""
    pool = NaiveBestFit(Room(), first=500 * MIB, unit=4096, header=HEADER, insist=True)
    assert pool.allocate(nbytes).size == occupied


def test_worked_size_of_page_locked_memory():
    """One byte takes 64 KiB."""
    assert NaiveBestFit(Room(), first=MIB, unit=65536, header=HEADER).allocate(1).size == 65536


def test_the_documented_rule_compares_the_request_itself():
    """Without a header exactly a chunk is cut from one, and one byte more goes to the device."""
    room = Room()
    pool = NaiveBestFit(room, first=MIB)
    whole = pool.allocate(MIB)
    pool.allocate(MIB + 1)
    assert room.taken == [MIB, MIB + 1]
    pool.free(whole)
    pool.statistics()
    assert room.taken == [MIB, MIB + 1]


def test_later_chunks_are_as_large_as_the_first():
    """Unless a size is given; and what the device refuses is replaced by the request alone."""
    room = Room(total=5 * MIB)
    pool = NaiveBestFit(room, first=2 * MIB)
    for _ in range(5):
        pool.allocate(MIB)
    assert room.taken == [2 * MIB, 2 * MIB, MIB]
    with pytest.raises(OutOfMemoryError, match="device full"):
        pool.allocate(1)


def test_a_pool_that_insists_on_its_chunks_fails_with_them():
    """As Paddle: 1 MiB is free, but a chunk is 2."""
    room = Room(total=3 * MIB)
    pool = NaiveBestFit(room, first=2 * MIB, insist=True)
    pool.allocate(2 * MIB)
    with pytest.raises(OutOfMemoryError, match="device full"):
        pool.allocate(10)


def test_sizes_as_functions_are_asked_when_chunks_are_needed():
    """A share of what is free: the refill is one of what is free then, so chunks shrink."""
    room = Room(total=100 * MIB)

    def share():
        return room.memory_info()[0] // 2

    pool = NaiveBestFit(room, first=share, refill=share)
    assert room.taken == []
    for _ in range(3):
        pool.allocate(20 * MIB)
    assert room.taken == [50 * MIB, 25 * MIB]
    assert pool.largest == 50 * MIB


def test_chunks_of_nothing_send_every_request_to_the_device():
    """The documented way to see what a network really needs."""
    room = Room()
    pool = NaiveBestFit(room, first=0)
    first, _ = pool.allocate(100), pool.allocate(5000)
    assert room.taken == [100, 5000]
    pool.free(first)
    assert room.taken == [5000]
    assert pool.statistics().cached_bytes == 0


def test_a_cap_is_kept_to_the_byte():
    """What is held never exceeds it, chunks and direct requests alike; the message names the flag."""
    pool = NaiveBestFit(Room(), first=MIB, cap=2 * MIB)
    pool.allocate(10)
    pool.allocate(MIB)
    with pytest.raises(OutOfMemoryError, match=r"FLAGS_fraction_of_cuda_pinned_memory_to_use allows 2,097,152"):
        pool.allocate(MIB)
    assert pool.statistics().reserved_bytes == 2 * MIB


def test_naive_best_fit_takes_the_low_end_and_merges():
    """Three blocks side by side; the freed middle is the best fit, and all of them become one again.

    [a][b][c][...]   free b: [a][ ][c][...]   free a: [    ][c][...]   free c: [           ]
    """
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
    """The high end goes out, the rest stays free; a chunk goes back when all of it is free."""
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
    """One byte takes one unit, and a free block of 1024 gives its high half to a request of 512."""
    pool = AutoGrowth(Room(), unit=256)
    assert pool.allocate(1).size == 256
    assert pool.statistics().reserved_bytes == 256
    block = pool.allocate(1024)
    base = address(block)
    pool.free(block)
    assert address(pool.allocate(512)) == base + 512
    assert pool.statistics().reserved_bytes == 256 + 1024


def test_auto_growth_keeps_slivers():
    """What is left of a block stays free however small it is."""
    pool = AutoGrowth(Room(), unit=256)
    block = pool.allocate(1024)
    pool.free(block)
    pool.allocate(768)
    assert layout(pool) == [[(0, 256, True), (256, 768, False)]]


def test_the_oldest_place_wins_among_equal_blocks():
    """Chunks are ordered by age, not by address: the same calls give the same places in every run."""
    pool = AutoGrowth(Room(), unit=256)
    held = [pool.allocate(1024) for _ in range(3)]
    places = [address(a) for a in held]
    for allocation in reversed(held):
        pool.free(allocation)
    pool.empty_cache  # noqa: B018
    pool.statistics()
    assert [address(pool.allocate(n)) for n in (1024, 1023, 1022)] == places


def test_idle_chunks_make_room_for_a_new_one():
    """A device that is full gets back what nobody uses, and the request is served from a new chunk."""
    room = Room(total=10 * MIB)
    pool = AutoGrowth(room)
    kept, idle = pool.allocate(2 * MIB), pool.allocate(6 * MIB)
    pool.free(idle)
    pool.allocate(7 * MIB)
    assert room.taken == [2 * MIB, 7 * MIB]
    assert pool.statistics().failures == 0
    pool.free(kept)


def test_a_free_and_an_allocation_of_one_size_give_the_same_memory():
    """The pair that programs repeat takes the memory as it is; statistics see it as free in between."""
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
def test_memory_on_shelves_merges_before_a_chunk_is_taken(kind):
    """Many freed blocks of one size serve a request of the whole chunk: nothing is lost to what was freed last."""
    pool = kind(Room(), **({"chunk": MIB} if kind is AutoGrowth else {"first": MIB}))
    for _ in range(2):
        held = [pool.allocate(MIB // 16) for _ in range(16)]
        for allocation in held:
            pool.free(allocation)
    pool.allocate(MIB)
    assert pool.statistics().reserved_bytes == MIB


@pytest.mark.parametrize("options", [{"unit": 0}, {"chunk": -1}])
def test_auto_growth_refuses_bad_options(options):
    """Nothing below what has a meaning."""
    with pytest.raises(ConfigError, match="at least"):
        AutoGrowth(Room(), **options)


@pytest.mark.parametrize("options", [{"first": -1}, {"refill": -1}, {"unit": 0}, {"header": -1}])
def test_naive_best_fit_refuses_bad_options(options):
    """The message names the option."""
    with pytest.raises(ConfigError, match=next(iter(options))):
        NaiveBestFit(Room(), **options)


@pytest.mark.parametrize("kind", [AutoGrowth, NaiveBestFit])
@pytest.mark.parametrize("step", range(12))
def test_an_interrupt_anywhere_never_gives_memory_twice(kind, step):
    """Ctrl-C in the middle of a change may lose memory; what is handed out later still overlaps nothing.

    The nth change of the list of free blocks is broken off.
    """
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
