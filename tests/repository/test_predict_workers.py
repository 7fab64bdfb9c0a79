"""examples/predict_workers.py: its formulas agree with a simulation of each message."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from math import ceil, log2
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.together import together

EXAMPLE: Any = SimpleNamespace(
    **runpy.run_path(str(Path(__file__).parents[2] / "examples" / "predict_workers.py"), run_name="example")
)
ALGORITHMS, Link, Topology = EXAMPLE.ALGORITHMS, EXAMPLE.Link, EXAMPLE.Topology
cheapest, parse_topology, seconds, step = EXAMPLE.cheapest, EXAMPLE.parse_topology, EXAMPLE.seconds, EXAMPLE.step

LINK = Link(7e-6, 3e9, 2e-6)
Round = list[tuple[int, int, float]]
"""(from, to, bytes) of simultaneous messages; a worker begins the next round after it has sent and received."""


def rounds(algorithm: str, workers: int, nbytes: float) -> Iterator[Round]:
    """Yield the messages of each round of an algorithm."""
    every = range(workers)
    part = nbytes / workers
    if algorithm == "one_step":
        for _ in range(2):
            yield [(w, (w + k) % workers, part) for k in range(1, workers) for w in every]
    elif algorithm == "ring":
        for _ in range(2 * (workers - 1)):
            yield [(w, (w + 1) % workers, part) for w in every]
    elif algorithm == "halving":
        distances = [1 << level for level in range(int(log2(workers)))]
        for distance in [*reversed(distances), *distances]:
            yield [(w, w ^ distance, part * distance) for w in every]
    else:
        levels = [1 << level for level in range(ceil(log2(workers)))]
        for distance in levels:
            yield [(w, w - distance, nbytes) for w in every if w % (2 * distance) == distance]
        for distance in reversed(levels):
            yield [(w - distance, w, nbytes) for w in every if w % (2 * distance) == distance]


def simulated_seconds(algorithm: str, workers: int, nbytes: float, link: Any) -> float:
    """Return the seconds of an exchange, simulated by message; a worker and a shared link send one at a time."""
    clock = [0.0] * workers
    bus = 0.0
    for messages in rounds(algorithm, workers, nbytes):
        begin, sent, done = list(clock), list(clock), list(clock)
        for source, target, size in messages:
            start = max(begin[source], sent[source]) + link.overhead
            if link.shared:
                bus = max(bus, start) + size / link.bandwidth
                end = bus
            else:
                end = start + size / link.bandwidth
            sent[source] = end
            done[source], done[target] = max(done[source], end), max(done[target], end + link.latency)
        clock = done
    return max(clock)


@together()
@pytest.mark.parametrize("nbytes", [1e3, 1e6, 1e9])
@pytest.mark.parametrize("workers", [2, 4, 8, 32])
@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
def test_closed_forms_are_what_messages_take(algorithm: str, workers: int, nbytes: float) -> None:
    """The formula is within 0.1 % of the simulation, for small and large exchanges."""
    actual = seconds(algorithm, nbytes, workers, Topology(LINK, LINK))
    assert actual == pytest.approx(simulated_seconds(algorithm, workers, nbytes, LINK), rel=1e-3)


@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
def test_a_shared_link_carries_one_byte_at_a_time(algorithm: str) -> None:
    """On a shared link the formula is within 1 % of the simulation of a large exchange."""
    link = Link(7e-6, 3e9, 2e-6, shared=True)
    actual = seconds(algorithm, 1e9, 8, Topology(link, link))
    assert actual == pytest.approx(simulated_seconds(algorithm, 8, 1e9, link), rel=1e-2)


@pytest.mark.parametrize("nbytes", [4e3, 1e5, 1e6, 1e8])
@pytest.mark.parametrize("name", ["8xnvlink4+100gbe", "8xpcie4+100gbe"])
def test_the_cheapest_is_no_slower_than_any(name: str, nbytes: float) -> None:
    """``cheapest`` returns the fastest algorithm, on one and several machines."""
    topology = parse_topology(name)
    for workers in (8, 12, 64):
        taken, algorithm = cheapest(nbytes, workers, topology)
        assert taken == seconds(algorithm, nbytes, workers, topology)
        assert all(taken <= seconds(second, nbytes, workers, topology) for second in ALGORITHMS)


def test_the_choice_depends_on_size_and_workers() -> None:
    """Small exchanges of many workers use halving; several machines first sum within each machine."""
    flat, deep = parse_topology("100gbe"), parse_topology("8xnvlink4+100gbe")
    assert cheapest(1e3, 1024, flat)[1] == "halving"
    assert cheapest(1e9, 1023, flat)[1] in ("ring", "one_step")
    assert cheapest(1e8, 64, deep)[1].startswith("within+")
    assert seconds("ring", 1e6, 1, flat) == 0


GRADIENTS = [(1 << 20, 0.01 + 0.001 * index) for index in range(20)]


def test_exchanges_hide_during_backward() -> None:
    """On a fast network only the last exchange adds time; on a slow network the exchanges decide the step time."""
    fast, slow = parse_topology("nvlink4"), parse_topology("(50us,0.1GB/s)")
    computation = GRADIENTS[-1][1]
    hidden = step(GRADIENTS, computation, 8, fast, 1)
    assert hidden.buckets == 20
    assert hidden.seconds - computation == pytest.approx(cheapest(1 << 20, 8, fast)[0])
    exposed = step(GRADIENTS, computation, 8, slow, 1)
    assert exposed.seconds == pytest.approx(GRADIENTS[0][1] + exposed.exchanging)
    fused = step(GRADIENTS, computation, 8, fast, 1 << 40)
    assert fused.buckets == 1
    assert fused.seconds - computation == pytest.approx(cheapest(20 << 20, 8, fast)[0])
    assert step(GRADIENTS, computation, 1, slow, 1).seconds == computation


@pytest.mark.parametrize("workers", [2, 8, 4096])
def test_the_best_bucket_size(workers: int) -> None:
    """No other bucket size gives a shorter step than ``best_step``."""
    topology = parse_topology("8xpcie4+10gbe")
    best = EXAMPLE.best_step(GRADIENTS, 0.03, workers, topology)
    sizes = EXAMPLE.BUCKETS
    assert all(best.seconds <= step(GRADIENTS, 0.03, workers, topology, size).seconds for size in sizes)


def test_links_by_name_and_by_numbers() -> None:
    """A link is given by numbers or a preset's name; an unknown name gives an error with the known names."""
    topology = parse_topology("4x(5us,12GB/s)+10gbe")
    assert (topology.per_machine, topology.inner) == (4, Link(5e-6, 12e9))
    assert topology.outer == EXAMPLE.PRESETS["10gbe"]
    with pytest.raises(SystemExit, match="'100gb': expected one of nvlink4"):
        parse_topology("100gb")
