"""Free lists of freed memory: accounting, reuse, and Ctrl-C during both."""

from itertools import islice

import pytest

from weftplan import device
from weftplan.storage import NaivePool, exact_size_lists


class Breaking:
    """A function whose call number ``left`` raises KeyboardInterrupt."""

    def __init__(self, function, left):
        self.function, self.left = function, left

    def __call__(self, *args):
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt
        return self.function(*args)


def one_then_interrupted(items, number):
    """Yield at most one item, then raise KeyboardInterrupt; replaces ``islice``."""
    yield from islice(items, min(number, 1))
    raise KeyboardInterrupt


@pytest.mark.parametrize("where", ["before", "within", "behind"])
def test_interrupted_write_off_loses_no_memory(monkeypatch, where):
    """Ctrl-C at any point of the accounting loses no block, and the figures end at zero."""
    pool = NaivePool(device.get(device.cpu()))
    for held in [pool.allocate(5000) for _ in range(5)]:
        pool.free(held)
    for held in [pool.allocate(5000) for _ in range(4)]:
        pool.free(held)
    if where == "within":
        monkeypatch.setattr(exact_size_lists, "islice", one_then_interrupted)
    else:
        monkeypatch.setattr(exact_size_lists, "min", Breaking(min, 1 if where == "before" else 4), raising=False)
    with pytest.raises(KeyboardInterrupt):
        pool.free(pool.allocate(4999))
    monkeypatch.undo()
    reused = [pool.allocate(5000) for _ in range(5)]
    assert len({id(held.block) for held in reused}) == 5
    assert pool.statistics().system_allocations == 5
    for held in reused:
        pool.free(held)
    pool.empty_cache()
    figures = pool.statistics()
    assert (figures.requested_bytes, figures.allocated_bytes, figures.reserved_bytes) == (0, 0, 0)


def test_arrays_freed_at_once_are_reused_without_lock():
    """A thousand small arrays that are freed together serve the next thousand without the pool's lock."""
    pool = NaivePool(device.get(device.cpu()))
    for _ in range(3):
        for held in [pool.allocate(64) for _ in range(exact_size_lists.LIST_LIMIT)]:
            pool.free(held)
    taken = []
    pool.take_block = lambda nbytes: taken.append(nbytes)
    for held in [pool.allocate(64) for _ in range(exact_size_lists.LIST_LIMIT)]:
        pool.free(held)
    assert taken == []


def test_written_off_memory_is_scanned_once():
    """Requests served by the cache examine only the memory that was freed since the last request."""
    pool = NaivePool(device.get(device.cpu()))
    for _ in range(2):
        for held in [pool.allocate(64) for _ in range(100)]:
            pool.free(held)
    looked = []
    pool.free(pool.allocate(9000))
    whole = exact_size_lists._counted
    try:
        exact_size_lists._counted = lambda free_list: looked.append(len(free_list)) or whole(free_list)
        for nbytes in range(9001, 9101):
            pool.free(pool.allocate(nbytes))
    finally:
        exact_size_lists._counted = whole
    assert sum(number > 1 for number in looked) <= 1
