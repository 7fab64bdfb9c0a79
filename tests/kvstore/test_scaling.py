"""Closed forms of exchanges against a simulation of every message, the choice among them, and steps with overlap."""

from __future__ import annotations

import time
from collections.abc import Iterator
from math import ceil, log2
from types import SimpleNamespace

import pytest

from tests.kvstore.ranks import run_ranks
from tests.support.together import together
from weftplan import engine
from weftplan.errors import KVStoreError
from weftplan.kvstore.compression import Compression
from weftplan.kvstore.scaling import (
    ALGORITHMS,
    PRESETS,
    Gradient,
    Link,
    Topology,
    best_step,
    cheapest,
    measured,
    parse_topology,
    seconds,
    step,
)
from weftplan.kvstore.scaling.step import BUCKETS

LINK = Link(7e-6, 3e9, 2e-6)
Round = list[tuple[int, int, float]]
"""(from, to, bytes) of messages that are sent at once; a worker begins the next round when it has sent and received."""


def rounds(algorithm: str, workers: int, nbytes: float) -> Iterator[Round]:
    """The messages of an algorithm."""
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


def simulated(algorithm: str, workers: int, nbytes: float, link: Link) -> float:
    """Seconds of an exchange, message by message: each worker sends one at a time, and so does a shared link."""
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
    """Within a part in a thousand, whether latency or bandwidth decides."""
    found = seconds(algorithm, nbytes, workers, Topology("", LINK, LINK, 1))
    assert found == pytest.approx(simulated(algorithm, workers, nbytes, LINK), rel=1e-3)


@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
def test_a_shared_link_carries_one_byte_at_a_time(algorithm: str) -> None:
    """For large exchanges, where bandwidth decides."""
    link = Link(7e-6, 3e9, 2e-6, shared=True)
    found = seconds(algorithm, 1e9, 8, Topology("", link, link, 1))
    assert found == pytest.approx(simulated(algorithm, 8, 1e9, link), rel=1e-2)


@pytest.mark.parametrize("nbytes", [4e3, 1e5, 1e6, 1e8])
@pytest.mark.parametrize("name", ["8xnvlink4+100gbe", "8xpcie4+100gbe"])
def test_the_cheapest_is_no_slower_than_any(name: str, nbytes: float) -> None:
    """On 8 devices of an NVLink mesh and of a PCIe tree, and on several such machines."""
    topology = parse_topology(name)
    for workers in (8, 12, 64):
        algorithm, taken = cheapest(nbytes, workers, topology)
        assert taken == seconds(algorithm, nbytes, workers, topology)
        assert all(taken <= seconds(other, nbytes, workers, topology) for other in ALGORITHMS)


def test_the_choice_depends_on_size_and_workers() -> None:
    """Small exchanges of many workers avoid rings; between machines sums are made within each one first."""
    flat, deep = parse_topology("100gbe"), parse_topology("8xnvlink4+100gbe")
    assert cheapest(1e3, 1024, flat)[0] == "halving"
    assert cheapest(1e9, 1023, flat)[0] in ("ring", "one_step")
    assert cheapest(1e8, 64, deep)[0].startswith("within+")
    assert seconds("ring", 1e6, 1, flat) == 0


GRADIENTS = [Gradient(1 << 20, 0.01 + 0.001 * index) for index in range(20)]


def test_exchanges_hide_behind_backward() -> None:
    """All but the last one do on a fast network; on a slow one the step is as long as the exchanges."""
    fast, slow = parse_topology("nvlink4"), parse_topology("(50us,0.1GB/s)")
    computation = GRADIENTS[-1].ready
    hidden = step(GRADIENTS, computation, 8, fast, bucket=1)
    assert hidden.buckets == 20
    assert hidden.exposed == pytest.approx(cheapest(1 << 20, 8, fast)[1])
    exposed = step(GRADIENTS, computation, 8, slow, bucket=1)
    assert exposed.seconds == pytest.approx(GRADIENTS[0].ready + exposed.exchanging)
    joined = step(GRADIENTS, computation, 8, fast, bucket=1 << 40)
    assert joined.buckets == 1
    assert joined.exposed == pytest.approx(cheapest(20 << 20, 8, fast)[1])
    assert step(GRADIENTS, computation, 1, slow, bucket=1).seconds == computation


@pytest.mark.parametrize("workers", [2, 8, 4096])
def test_the_best_bucket_size(workers: int) -> None:
    """No size that is tried gives a shorter step."""
    topology = parse_topology("8xpcie4+10gbe")
    best = best_step(GRADIENTS, 0.03, workers, topology)
    assert all(best.seconds <= step(GRADIENTS, 0.03, workers, topology, bucket=size).seconds for size in BUCKETS)
    assert best.efficiency == pytest.approx(0.03 / best.seconds)


def test_nothing_hides_where_all_cores_compute() -> None:
    """Processes that share all cores of a machine exchange after the computation, not beside it."""
    link = Link(0.0, 5e9, 0.0)
    busy = Topology("", link, link, 1, fixed=1e-4, busy=True)
    found = step(GRADIENTS, 0.03, 4, busy, bucket=1)
    assert found.exchanging == pytest.approx(20 * seconds("one_step", 1 << 20, 4, busy))
    assert found.seconds == pytest.approx(0.03 + found.exchanging)
    assert step(GRADIENTS, 0.03, 1, busy, bucket=1).seconds == 0.03


def test_every_gradient_of_a_bucket_costs_something() -> None:
    """Beside what the exchange costs: once for each key, whatever bucket it is in; nothing without other workers."""
    link = Link(0.0, 5e9, 0.0)
    free, costly = (Topology("", link, link, 1, fixed=1e-4, per_key=each, busy=True) for each in (0.0, 5e-5))
    assert seconds("ring", 1e6, 4, costly, 7) == pytest.approx(seconds("ring", 1e6, 4, free) + 7 * 5e-5)
    assert cheapest(1e6, 4, costly, 7)[1] == pytest.approx(cheapest(1e6, 4, free)[1] + 7 * 5e-5)
    for bucket in (1, 3 << 20, 1 << 40):
        for compression in (None, Compression()):
            without, found = (
                step(GRADIENTS, 0.03, 4, one, bucket=bucket, compression=compression) for one in (free, costly)
            )
            assert found.seconds == pytest.approx(without.seconds + 20 * 5e-5)
    assert step(GRADIENTS, 0.03, 1, costly, bucket=1).seconds == 0.03


@pytest.mark.parametrize("kind", ["NaiveEngine", "ThreadedEnginePerDevice"])
@pytest.mark.parametrize(("one", "more"), [(3e-4, 1e-4), (3e-4, 0.0), (0.0, 2e-4)])
def test_a_key_costs_what_each_further_one_takes(monkeypatch, one, more, kind) -> None:
    """Of a store that takes so long for an exchange and for each key, while gradients are pending, as they are on all
    engines but the naive one. What it takes to make them is not the store's."""
    clock, counts, making = [0.0], [], measured._making

    def slowly(values):
        clock[0] += 7e-4 + 3e-4 * len(values)
        return making(values)

    class Store:
        _rule, _stored, _group = "the rule", {}, SimpleNamespace(moving_s=0.0)

        def init(self, keys, values):
            self._stored.update(zip(keys, values, strict=True))

        def barrier(self):
            pass

        def pushpull(self, keys, values, outs):
            assert self._rule.cut([(key, 10**9, "f4") for key in range(100)]) == [list(range(100))]
            assert len(keys) == len(values) == len(outs)
            for value in values:
                assert (value.var.write is None) == (kind == "NaiveEngine")
            counts.append(len(keys))
            clock[0] += one + more * len(keys)

    monkeypatch.setattr(measured.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(measured, "_making", slowly)
    monkeypatch.setattr(measured._Job, "slowest", lambda self, times: times)
    store = Store()
    with engine.using(engine.create(kind)):
        assert measured._of_keys(measured._Job(None, None, store), 3) == pytest.approx((one + more, more))
    assert set(counts) == {1, len(store._stored)}
    assert store._rule == "the rule"


def test_the_slowest_counts_in_each_round(tmp_path) -> None:
    """Two processes that are late in turn are as slow together as one that always is."""
    run_ranks(
        tmp_path,
        2,
        """
        from weftplan.kvstore.scaling import slowest
        left = [0, 0] + [0, 1, 0, 1]    # two rounds to warm up
        def work():
            if left.pop(0) == rank:
                time.sleep(0.02)
        assert slowest(work, kv, rounds=4) >= 0.02
        kv.barrier()
        """,
    )


def test_seconds_in_which_data_travel(tmp_path) -> None:
    """Where MPI carries everything, they are a part of an exchange; what is measured is the same everywhere."""
    run_ranks(
        tmp_path,
        2,
        """
        from weftplan.kvstore.scaling import measure
        value, out = mx.nd.ones((1 << 16,)), mx.nd.empty((1 << 16,))
        kv.init("w", mx.nd.zeros((1 << 16,)))
        before, start = kv._group.moving_s, time.perf_counter()
        kv.pushpull("w", value, out)
        out.wait_to_read()
        assert 0 < kv._group.moving_s - before < time.perf_counter() - start
        found = measure(kv, rounds=1)
        assert found.per_byte >= 0 and 1 / found.outer.bandwidth > 0 and found.fixed >= 0, found
        same = mx.nd.array([found.outer.bandwidth / 1e9, found.fixed, found.per_byte])
        kv.init("same", mx.nd.zeros((3,)))
        total = mx.nd.empty((3,))
        kv.pushpull("same", same, total)
        assert (total.asnumpy() == 2 * same.asnumpy()).all()
        kv.barrier()
        """,
        WEFTPLAN_KVSTORE_SHARED_MEMORY="0",
    )


class Timed:
    """A job whose exchanges take what a function of their bytes says: (seconds, those in which MPI carries data)."""

    def __init__(self, takes, *, workers=2, shares_memory=False):
        self.takes, self.rounds, self.sizes = takes, [], set()
        self.store = SimpleNamespace(num_workers=workers, shares_memory=shares_memory)

    def parts(self, works, rounds):
        self.rounds.append(rounds)
        self.sizes.update(works)
        return [self.takes(nbytes) for nbytes in works]

    def seconds(self, works, rounds):
        return [took for took, _ in self.parts(works, rounds)]


@pytest.fixture
def exchanges(monkeypatch):
    """An exchange is its bytes, for :class:`Timed`."""
    monkeypatch.setattr(measured, "_exchange", lambda store, nbytes: nbytes)


@pytest.mark.parametrize("workers", [2, 4])
def test_a_link_is_told_from_its_store(exchanges, workers) -> None:
    """Whatever each of them takes, and what is predicted of other sizes is what they take."""
    link, fixed, per_byte = Link(1e-4, 1e8, 2e-6), 3e-4, 5e-10

    def takes(nbytes):
        moved = seconds("one_step", nbytes, workers, Topology("", link, link, 1))
        return fixed + nbytes * per_byte + moved, moved

    found, beside = measured._of_bytes(Timed(takes, workers=workers), 3)
    assert found.bandwidth == pytest.approx(link.bandwidth)
    assert beside == pytest.approx(per_byte)
    for nbytes in (1e6, 3e7):
        topology = Topology("", found, found, 1, fixed=fixed, per_byte=beside)
        assert seconds("one_step", nbytes, workers, topology) == pytest.approx(takes(nbytes)[0], rel=1e-2)


def test_memory_that_all_share_is_the_link(exchanges) -> None:
    """All that an exchange takes is of its bytes then."""
    job = Timed(lambda nbytes: (1e-4 + nbytes / 2e9, 0.0), workers=4, shares_memory=True)
    link, beside = measured._of_bytes(job, 3)
    assert (link.latency, beside) == (0, 0)
    assert link.bandwidth == pytest.approx(1.5 * 2e9)


def test_exchanges_are_long_enough_and_quick_ones_are_repeated(exchanges) -> None:
    """Until one stands out against a short one; for a second, but not for more than six times the rounds."""
    quick = Timed(lambda nbytes: (1e-4 + nbytes / 1e9, nbytes / 1e9))
    measured._of_bytes(quick, 3)
    assert quick.sizes == {measured._SHORT, measured._LONG}
    assert quick.rounds[-1] == 18
    slow = Timed(lambda nbytes: (0.3 + nbytes / 1e7, nbytes / 1e7))
    measured._of_bytes(slow, 3)
    assert max(slow.sizes) == 32 << 20
    assert slow.rounds[-1] == 3


@pytest.mark.parametrize("noise", [0.3, 1.0, 4.0])
def test_noise_has_a_bandwidth(exchanges, noise) -> None:
    """Where a long exchange did not take longer, its bytes still take at least half of its time."""
    job = Timed(lambda nbytes: (0.02, 0.01) if nbytes > measured._SHORT else (0.02 * noise, 0.01 * noise))
    link, beside = measured._of_bytes(job, 3)
    assert 0.005 <= measured._LONGEST / link.bandwidth <= 0.01
    assert beside >= 0


def test_compression_pays_on_slow_links_only() -> None:
    """16 times fewer bytes, and the time of packing and expanding."""
    slow, fast, two = parse_topology("(50us,0.01GB/s)"), parse_topology("nvlink4"), Compression()
    for topology, pays in ((slow, True), (fast, False)):
        plain = best_step(GRADIENTS, 0.03, 4, topology)
        packed = best_step(GRADIENTS, 0.03, 4, topology, compression=two)
        assert (packed.seconds < plain.seconds) is pays
        assert packed.algorithm == "gather"


@pytest.mark.parametrize("workers", [2, 4096])
def test_every_byte_costs_its_store_something(workers) -> None:
    """As much over many workers as over two; nothing on links that are given."""
    link = parse_topology("10gbe").outer
    given, slow = (Topology("", link, link, 1, per_byte=each) for each in (0.0, 1e-9))
    assert parse_topology("10gbe").per_byte == 0
    for algorithm in ALGORITHMS:
        more = seconds(algorithm, 1e6, workers, slow) - seconds(algorithm, 1e6, workers, given)
        assert more == pytest.approx(1e-3)


def test_thousands_of_workers_are_judged_quickly() -> None:
    """Every number of workers up to 4,096 for a network of 200 gradients takes less than a minute of the processor."""
    gradients = [Gradient(500_000, 0.001 * index) for index in range(200)]
    topology, begin = parse_topology("8xnvlink4+100gbe"), time.process_time()
    for workers in range(1, 4097, 256):
        best_step(gradients, 0.2, workers, topology)
    assert (time.process_time() - begin) * 256 < 60 * 16


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("100gb", "did you mean '100gbe'"),
        ("0xnvlink4+100gbe", "1 to 65,536"),
        ("8xnvlink4", "unknown link"),
        ("(1..2us,3GB/s)", "LATENCY"),
        ("(1us,0GB/s)", "bandwidth > 0"),
        ("", "a topology is"),
    ],
)
def test_bad_topologies(text: str, words: str) -> None:
    """The error says what a topology looks like."""
    with pytest.raises(KVStoreError, match=words.replace("(", r"\(")):
        parse_topology(text)


def test_links() -> None:
    """Presets and numbers mean the same kind of thing; an unknown algorithm names the known ones."""
    found = parse_topology("4x(5us,12GB/s)+10gbe")
    assert (found.per_machine, found.inner, found.outer) == (4, Link(5e-6, 12e9), PRESETS["10gbe"])
    with pytest.raises(KVStoreError, match="one_step, ring"):
        seconds("rings", 1, 2, found)
