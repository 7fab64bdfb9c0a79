"""The rules of PyTorch's caching allocator, one by one, and compared with a slow model on random requests."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weftplan.errors import BudgetError, PlanError
from weftplan.torch.allocator import MIB, Allocator, AllocatorSettings

EXPANDABLE = AllocatorSettings(expandable_segments=True)


def reserved_for(*sizes: int, **options: Any) -> int:
    """Return the bytes reserved for requests that are all alive."""
    allocator = Allocator(**options)
    for size in sizes:
        allocator.allocate(size)
    return allocator.reserved


def test_requests_are_rounded_up_to_512_bytes() -> None:
    """One byte takes 512 bytes, 513 bytes take 1,024, and none take nothing."""
    allocator = Allocator()
    assert [getattr(allocator.allocate(n), "size", 0) for n in (1, 512, 513, 0)] == [512, 512, 1024, 0]


@pytest.mark.parametrize(
    ("size", "segment"),
    [(1, 2), (MIB, 2), (MIB + 1, 20), (10 * MIB - 512, 20), (10 * MIB, 10), (10 * MIB + 1, 12), (33 * MIB, 34)],
)
def test_sizes_of_segments(size: int, segment: int) -> None:
    """Small requests take segments of 2 MiB, requests below 10 MiB of 20 MiB, larger requests multiples of 2 MiB."""
    assert reserved_for(size) == segment * MIB


def test_the_rest_of_a_block_serves_later_requests() -> None:
    """Four small requests of 512 KiB share one segment, and the fifth makes another."""
    assert reserved_for(*[MIB // 2] * 4) == 2 * MIB
    assert reserved_for(*[MIB // 2] * 5) == 4 * MIB


def test_a_large_block_is_split_only_if_more_than_a_mebibyte_is_left() -> None:
    """A freed block of 12 MiB serves 11 MiB whole, and 10 MiB with a rest that serves 2 MiB."""
    for size, rest in ((11 * MIB, 0), (10 * MIB, 2 * MIB)):
        allocator = Allocator()
        allocator.free(allocator.allocate(12 * MIB))
        block = allocator.allocate(size)
        assert block is not None
        assert block.size == 12 * MIB - rest
        before = allocator.reserved
        allocator.allocate(2 * MIB)
        assert (allocator.reserved == before) == bool(rest)


def test_the_smallest_fitting_block_is_taken() -> None:
    """Of freed blocks of 40 and 20 MiB a request of 18 MiB takes that of 20 MiB."""
    allocator = Allocator()
    large, small = allocator.allocate(40 * MIB), allocator.allocate(20 * MIB)
    allocator.free(large)
    allocator.free(small)
    assert allocator.allocate(18 * MIB) is not None
    assert allocator.allocate(40 * MIB) is not None
    assert allocator.reserved == 60 * MIB


def test_freed_neighbours_merge() -> None:
    """Two freed halves of a segment serve a request for the whole."""
    allocator = Allocator()
    halves = [allocator.allocate(MIB) for _ in range(2)]
    for half in halves:
        allocator.free(half)
    quarter = [allocator.allocate(MIB // 4) for _ in range(8)]
    assert len(quarter) == 8
    assert allocator.reserved == 2 * MIB


def test_free_segments_are_released_at_the_limit() -> None:
    """At the limit, free segments return to the device and the request succeeds; used segments stay, and it fails."""
    allocator = Allocator(limit=40 * MIB)
    first = allocator.allocate(30 * MIB)
    allocator.free(first)
    allocator.allocate(32 * MIB)
    assert (allocator.reserved, allocator.retries, allocator.peak_reserved) == (32 * MIB, 1, 32 * MIB)
    with pytest.raises(BudgetError) as caught:
        allocator.allocate(20 * MIB)
    assert caught.value.smallest == 52 * MIB
    assert allocator.reserved == 32 * MIB


def test_streams_do_not_share_blocks() -> None:
    """A block freed on one stream does not serve another stream."""
    allocator = Allocator()
    allocator.free(allocator.allocate(10 * MIB, stream=0))
    allocator.allocate(10 * MIB, stream=1)
    assert allocator.reserved == 20 * MIB


def test_max_split_size_keeps_large_blocks_whole() -> None:
    """Blocks above the size are not split, smaller requests do not take them, and larger requests only nearly whole."""
    settings = AllocatorSettings(max_split_size=100 * MIB)
    for freed, asked, total in ((200, 50, 250), (200, 185, 200), (200, 150, 350)):
        allocator = Allocator(settings=settings)
        allocator.free(allocator.allocate(freed * MIB))
        allocator.allocate(asked * MIB)
        assert allocator.reserved == total * MIB


def test_garbage_collection_releases_old_segments() -> None:
    """Above the threshold the older of two free segments is released before a new segment is made."""
    reserved = []
    for threshold in (0.0, 0.5):
        allocator = Allocator(limit=100 * MIB, settings=AllocatorSettings(garbage_collection_threshold=threshold))
        old, new = allocator.allocate(30 * MIB), allocator.allocate(28 * MIB)
        allocator.free(old)
        allocator.free(allocator.allocate(512))
        allocator.free(new)
        allocator.allocate(32 * MIB)
        reserved.append(allocator.reserved // MIB)
    assert reserved == [92, 62]


def test_expandable_segments_grow_by_pages() -> None:
    """Requests of 15 MiB share pages of 20 MiB, and small requests pages of 2 MiB."""
    assert reserved_for(*[15 * MIB] * 4, settings=EXPANDABLE) == 60 * MIB
    assert reserved_for(*[15 * MIB] * 4) == 64 * MIB
    assert reserved_for(*[512 * 1024] * 5, settings=EXPANDABLE) == 4 * MIB


def test_expandable_segments_grow_a_freed_block() -> None:
    """A freed block at the end of the segment grows in place, instead of a second block beside it."""
    allocator = Allocator(settings=EXPANDABLE)
    allocator.free(allocator.allocate(100 * MIB))
    allocator.allocate(110 * MIB)
    assert allocator.reserved == 120 * MIB


def test_expandable_segments_release_pages() -> None:
    """At the limit whole free pages inside the segment are unmapped, and mapped again where they are needed."""
    allocator = Allocator(limit=120 * MIB, settings=EXPANDABLE)
    first, last = allocator.allocate(60 * MIB), allocator.allocate(20 * MIB)
    allocator.free(first)
    allocator.allocate(80 * MIB)
    assert last is not None
    assert (allocator.reserved, allocator.allocated) == (100 * MIB, 100 * MIB)


def test_settings_are_parsed() -> None:
    """Known keys are read; unknown keys, keys that are not modelled and bad values are refused with the key."""
    text = "expandable_segments:True, max_split_size_mb:64,garbage_collection_threshold:0.8"
    assert AllocatorSettings.parse(text) == AllocatorSettings(True, 64 * MIB, 0.8)
    assert AllocatorSettings.parse("") == AllocatorSettings()
    for bad in ("expandable_segment:True", "backend:cudaMallocAsync", "max_split_size_mb:x", "max_split_size_mb:8"):
        with pytest.raises(PlanError, match="PYTORCH_CUDA_ALLOC_CONF"):
            AllocatorSettings.parse(bad)


class Slow:
    """The default rules on lists of (begin, end, is used) for each segment, searched from the start every time."""

    def __init__(self, limit: int | None) -> None:
        self.limit, self.segments, self.made = limit, {}, 0  # type: ignore[var-annotated]

    def reserved(self) -> int:
        """Return the bytes of all segments."""
        return sum(total for _, total, _ in self.segments.values())

    def allocate(self, nbytes: int) -> tuple[int, int]:
        """Return (segment, begin) of a block; raise MemoryError at the limit."""
        size = (nbytes + 511) // 512 * 512
        small = size <= MIB
        fitting = [
            (end - begin, key, begin)
            for key, (is_small, _, parts) in self.segments.items()
            for begin, end, used in parts
            if is_small == small and not used and end - begin >= size
        ]
        if not fitting:
            total = 2 * MIB if small else 20 * MIB if size < 10 * MIB else (size + 2 * MIB - 1) // (2 * MIB) * 2 * MIB
            if self.limit is not None and self.reserved() + total > self.limit:
                self.segments = {k: s for k, s in self.segments.items() if any(used for _, _, used in s[2])}
            if self.limit is not None and self.reserved() + total > self.limit:
                raise MemoryError
            self.made += 1
            self.segments[self.made] = (small, total, [(0, total, False)])
            fitting = [(total, self.made, 0)]
        _, key, begin = min(fitting)
        parts = self.segments[key][2]
        k = next(k for k, part in enumerate(parts) if part[0] == begin)
        end = parts[k][1]
        rest = end - begin - size
        splits = rest >= 512 if small else rest > MIB
        parts[k : k + 1] = [(begin, begin + size, True), (begin + size, end, False)] if splits else [(begin, end, True)]
        return key, begin

    def free(self, block: tuple[int, int]) -> None:
        """Free a block and join all neighbours that are free."""
        key, begin = block
        parts = self.segments[key][2]
        out: list[tuple[int, int, bool]] = []
        for part in [(b, e, used and b != begin) for b, e, used in parts]:
            if out and not part[2] and not out[-1][2]:
                out[-1] = (out[-1][0], part[1], False)
            else:
                out.append(part)
        parts[:] = out


SIZES = st.one_of(st.integers(1, 3 * MIB), st.integers(MIB - 600, MIB + 600), st.integers(1, 40 * MIB))
EVENTS = st.lists(st.tuples(SIZES, st.integers(0, 7)), max_size=60)


@given(EVENTS, st.sampled_from([None, 64 * MIB, 200 * MIB]))
def test_reserved_bytes_equal_the_slow_model(events: list[tuple[int, int]], limit: int | None) -> None:
    """After every request and every free, both models have reserved the same bytes, and fail at the same requests."""
    fast, slow = Allocator(limit), Slow(limit)
    alive: list[Any] = []
    for size, action in events:
        if action < 3 and alive:
            block, other = alive.pop(size % len(alive))
            fast.free(block)
            slow.free(other)
        else:
            try:
                other = slow.allocate(size)
            except MemoryError:
                with pytest.raises(BudgetError):
                    fast.allocate(size)
            else:
                alive.append((fast.allocate(size), other))
        assert fast.reserved == slow.reserved()


@given(EVENTS, st.sampled_from([None, 64 * MIB, 200 * MIB]))
def test_expandable_segments_stay_consistent(events: list[tuple[int, int]], limit: int | None) -> None:
    """Blocks of an expandable segment cover it without gaps, and their mapped bytes are those reserved."""
    allocator = Allocator(limit, EXPANDABLE)
    alive: list[Any] = []
    for size, action in events:
        if action < 3 and alive:
            allocator.free(alive.pop(size % len(alive)))
        else:
            try:
                alive.append(allocator.allocate(size))
            except BudgetError:
                continue
        mapped = used = 0
        for pool in allocator._pools.values():
            block = pool.first
            while block is not None:
                mapped += block.size * block.mapped
                used += block.size * block.used
                assert block.after is None or block.after.address == block.address + block.size
                assert block.after is None or not (block.is_free() and block.after.is_free())
                block = block.after
        assert (mapped, used) == (allocator.reserved, allocator.allocated)
        assert limit is None or mapped <= limit
