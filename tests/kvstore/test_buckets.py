"""Groups of gradients: FLAGS_fuse_parameter_groups_size and _memory_size as Paddle documents them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weftplan.errors import ConfigError
from weftplan.kvstore.buckets import BucketRule

F4, F2 = np.dtype("f4"), np.dtype("f2")


@pytest.mark.shows("FLAGS_fuse_parameter_groups_size", "FLAGS_fuse_parameter_memory_size")
def test_the_flags_set_both_limits(monkeypatch: pytest.MonkeyPatch):
    """By default no limit of gradients, and 8 MiB; the flags change both; 0 gradients is an error."""
    assert BucketRule.from_environment() == BucketRule(-1, 8 * 2**20)
    monkeypatch.setenv("FLAGS_fuse_parameter_groups_size", "5")
    monkeypatch.setenv("FLAGS_fuse_parameter_memory_size", "16")
    assert BucketRule.from_environment() == BucketRule(5, 16 * 2**20)
    monkeypatch.setenv("FLAGS_fuse_parameter_groups_size", "0")
    with pytest.raises(ConfigError, match="at least one gradient"):
        BucketRule.from_environment()


def test_small_gradients_before_a_cut_move_to_the_next_group():
    """A bias travels with the weight after it, unless the weight leaves no room for it or the count ends the group."""
    layers = [("w2", 90, F4), ("b1", 2, F4), ("c1", 3, F4), ("w1", 80, F4), ("b0", 2, F4), ("w0", 99, F4)]
    assert BucketRule(-1, 100).cut(layers) == [["w2"], ["b1", "c1", "w1", "b0"], ["w0"]]
    assert BucketRule(-1, 101).cut(layers) == [["w2"], ["b1", "c1", "w1"], ["b0", "w0"]]
    assert BucketRule(3, 100).cut(layers) == [["w2", "b1", "c1"], ["w1", "b0"], ["w0"]]
    assert BucketRule(-1, 100).cut([("w1", 90, F4), ("c", 6, F4), ("w0", 90, F4)]) == [["w1", "c"], ["w0"]]


def test_examples():
    """1 is one group for each, -1 is one group for all; dtypes are kept apart; a large one is alone."""
    items = [("a", 10, F4), ("b", 10, F4), ("c", 50, F4), ("d", 10, F2)]
    assert BucketRule(1, None).cut(items) == [["a"], ["b"], ["c"], ["d"]]
    assert BucketRule(-1, None).cut(items) == [["a", "b", "c"], ["d"]]
    assert BucketRule(-1, 20).cut(items) == [["a", "b"], ["c"], ["d"]]
    assert BucketRule(-1, 0).cut(items) == [["a"], ["b"], ["c"], ["d"]]
    assert BucketRule(3, None).cut([]) == []


@given(
    st.lists(st.tuples(st.integers(0, 100), st.sampled_from([F4, F2])), max_size=30),
    st.one_of(st.just(-1), st.integers(1, 5)),
    st.one_of(st.none(), st.integers(0, 150)),
)
def test_groups_keep_order_and_limits(sizes: list[tuple[int, np.dtype]], count: int, nbytes: int | None):
    """Groups put together are the items; each has one dtype and keeps both limits, or has one item."""
    items = [(i, size, dtype) for i, (size, dtype) in enumerate(sizes)]
    groups = BucketRule(count, nbytes).cut(items)
    assert [item for group in groups for item in group] == list(range(len(items)))
    for group in groups:
        assert len({sizes[item][1] for item in group}) == 1
        assert count == -1 or len(group) <= count
        assert nbytes is None or len(group) == 1 or sum(sizes[item][0] for item in group) <= nbytes
