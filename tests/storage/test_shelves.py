"""Shelves of freed memory: what is written off, what is served from them, and Ctrl-C in the middle."""

from itertools import islice

import pytest

from weftplan import device
from weftplan.storage import NaivePool, shelves


class Breaking:
    """A function that is broken off by its nth call, as by Ctrl-C."""

    def __init__(self, function, left):
        self.function, self.left = function, left

    def __call__(self, *args):
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt
        return self.function(*args)


def one_then_interrupted(items, number):
    """Stands in for ``islice``: Ctrl-C comes when one item has been taken."""
    yield from islice(items, min(number, 1))
    raise KeyboardInterrupt


@pytest.mark.parametrize("where", ["before", "within", "behind"])
def test_an_interrupt_while_memory_is_written_off_loses_none(monkeypatch, where):
    """Wherever Ctrl-C divides the work, each block is still on its shelf, and figures come to nothing in the end."""
    pool = NaivePool(device.get(device.cpu()))
    for held in [pool.allocate(5000) for _ in range(5)]:
        pool.free(held)
    for held in [pool.allocate(5000) for _ in range(4)]:
        pool.free(held)
    if where == "within":
        monkeypatch.setattr(shelves, "islice", one_then_interrupted)
    else:
        monkeypatch.setattr(shelves, "min", Breaking(min, 1 if where == "before" else 4), raising=False)
    with pytest.raises(KeyboardInterrupt):
        pool.free(pool.allocate(4999))
    monkeypatch.undo()
    again = [pool.allocate(5000) for _ in range(5)]
    assert len({id(held.block) for held in again}) == 5
    assert pool.statistics().system_allocations == 5
    for held in again:
        pool.free(held)
    pool.empty_cache()
    figures = pool.statistics()
    assert (figures.requested_bytes, figures.allocated_bytes, figures.reserved_bytes) == (0, 0, 0)


def test_as_many_as_die_together_are_served_again_without_the_cache():
    """A thousand small arrays that die at once lie ready for the next thousand, which take no lock."""
    pool = NaivePool(device.get(device.cpu()))
    for _ in range(3):
        for held in [pool.allocate(64) for _ in range(shelves.MOST_ON_ONE)]:
            pool.free(held)
    taken = []
    pool.take_block = lambda nbytes: taken.append(nbytes)
    for held in [pool.allocate(64) for _ in range(shelves.MOST_ON_ONE)]:
        pool.free(held)
    assert taken == []


def test_what_is_written_off_is_looked_at_once():
    """Requests that the cache serves look at what was freed since the last one, however much lies on shelves."""
    pool = NaivePool(device.get(device.cpu()))
    for _ in range(2):
        for held in [pool.allocate(64) for _ in range(100)]:
            pool.free(held)
    looked = []
    pool.free(pool.allocate(9000))
    whole = shelves._counted
    try:
        shelves._counted = lambda shelf: looked.append(len(shelf)) or whole(shelf)
        for nbytes in range(9001, 9101):
            pool.free(pool.allocate(nbytes))
    finally:
        shelves._counted = whole
    assert sum(number > 1 for number in looked) <= 1
