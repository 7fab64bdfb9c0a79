"""Small decisions of executors, on inputs at their limits."""

from types import SimpleNamespace

import pytest

import weftplan as mx
from weftplan.executor import waits
from weftplan.executor.dynamic import Collector
from weftplan.executor.prepared_calls import StepBuilder
from weftplan.executor.run_values import _overlap


@pytest.mark.parametrize(
    ("fraction", "count"), [(0.0, 0), (0.1, 1), (0.4, 1), (0.41, 2), (0.7, 2), (0.9, 3), (0.91, 4), (1.0, 4)]
)
def test_largest_chunks_up_to_a_fraction_of_all_bytes_are_freed(fraction, count):
    """Within a run the largest chunks are freed, until they have the fraction of all bytes."""
    collector = Collector()
    collector.threshold, collector.fraction = 0, fraction
    chunks = [SimpleNamespace(nbytes=nbytes) for nbytes in (20, 40, 10, 30)]
    assert [chunk.nbytes for chunk in collector._chosen(chunks)] == [40, 30, 20, 10][:count]


@pytest.mark.parametrize(
    ("read", "written", "overlap"),
    [
        ([(0, 0, 10)], [(0, 10, 20)], False),
        ([(0, 10, 20)], [(0, 0, 10)], False),
        ([(0, 0, 10)], [(0, 9, 20)], True),
        ([(0, 0, 10)], [(1, 0, 10)], False),
        ([(0, 0, 5), (0, 10, 15)], [(0, 5, 10), (0, 15, 20)], False),
        ([(0, 0, 5), (0, 0, 5)], [(0, 5, 6)], False),
        ([(1, 2, 3)], [(0, 0, 10), (1, 0, 10)], True),
    ],
)
def test_overlap_of_ranges_in_slabs(read, written, overlap):
    """Ranges (slab, begin, end) overlap if a byte of one slab is in both lists; neighbours share none."""
    assert _overlap(read, written) == overlap


def test_only_the_first_writer_of_a_storage_waits_for_the_memory():
    """The first writer also writes the vars of the storages before it; later writers, and nodes without one, do not."""
    executor = mx.sym.exp(mx.sym.sqrt(mx.sym.Variable("x")) * 2).simple_bind(mx.cpu(), x=(3,))
    asked = []
    memory = SimpleNamespace(after=lambda storage: asked.append(storage) or [storage])
    builder = StepBuilder(executor.planned, memory, {})
    assert [builder._reused(storage) for storage in (2, 2, -1, -1, 0)] == [[2], [], [], [], [0]]
    assert asked == [2, 0]


@pytest.mark.parametrize(
    ("waiting", "preparing", "expected"),
    [
        ({}, (), True),
        ({1: [2]}, (), True),  # 2 runs
        ({1: [2], 2: [3]}, (), True),  # 3 runs
        ({1: [2], 2: [1]}, (), False),  # a cycle
        ({1: [2], 2: [0]}, (), False),  # the calling thread is behind
        ({1: [2], 2: [1]}, (2,), True),  # 2 will release its memory
        ({1: [2, 3], 2: [1]}, (), True),  # 3 runs
        ({1: []}, (), False),
    ],
)
def test_a_thread_can_go_on_if_one_that_it_waits_for_can(monkeypatch, waiting, preparing, expected):
    """Thread 1 can go on if it waits, directly or through others, for a thread that runs or prepares; 0 is calling."""
    monkeypatch.setattr(waits, "waiting", waiting)
    monkeypatch.setattr(waits, "preparing", set(preparing))
    monkeypatch.setattr(waits.threading, "get_ident", lambda: 0)
    assert waits.can_go_on(1) == expected
