"""Links between simulated devices: routes, wires that copies share, and refused links."""

from __future__ import annotations

import numpy as np
import pytest

import weftplan as mx
from tests.support.nested_calls import run_with
from weftplan import device
from weftplan.device import simulated_addresses, simulated_device
from weftplan.device.interconnect import interconnect
from weftplan.device.links import HOST, Interconnect, Route, connect, matrix, nvlink_mesh, pcie_tree, ports
from weftplan.device.simulated_addresses import Addresses
from weftplan.device.simulated_device import begin_together
from weftplan.errors import DeviceError
from weftplan.support import address_ranges

pytestmark = pytest.mark.usefixtures("no_links")

GIGABYTE = 1e9


def seconds_of_copies(pairs, nbytes):
    """Return the virtual seconds of copies between (source, target) pairs, all enqueued at the same time.

    Each copy has its own stream.
    """
    rooms = {place: device.get(mx.sim(place)).allocate(nbytes) for place in sorted({*sum(pairs, ())})}
    start = begin_together([device.get(mx.sim(place)) for place in rooms])
    streams = []
    for source, target in pairs:
        place = device.get(mx.sim(target))
        stream = place.new_stream()
        with stream:
            place.copy(rooms[target], rooms[source])
        streams.append(stream)
    for stream in streams:
        stream.synchronize()
    for place, raw in rooms.items():
        device.get(mx.sim(place)).free(raw)
    return [stream.time - start for stream in streams]


def test_each_pair_of_a_matrix_has_its_own_bandwidth_and_latency():
    """Each pair of a matrix has its own bandwidth and latency: 1 MB at 1 GB/s and 10 us takes 1.01 ms."""
    connect(matrix([[0, 1e9, 4e9], [1e9, 0, 1e9], [4e9, 1e9, 0]], [[0, 1e-5, 2e-5]] * 3))
    assert seconds_of_copies([(0, 1), (0, 2)], 1_000_000) == pytest.approx([1.01e-3, 0.27e-3])


def test_copies_share_a_wire():
    """Two copies into one port take twice as long as copies into two ports."""
    connect(ports(4, GIGABYTE, 0.0))
    assert seconds_of_copies([(0, 2), (1, 3)], 1_000_000) == pytest.approx([1e-3, 1e-3])
    connect(ports(4, GIGABYTE, 0.0))
    assert seconds_of_copies([(0, 2), (1, 2)], 1_000_000) == pytest.approx([1e-3, 2e-3])


def test_non_peers_copy_through_the_host():
    """Devices that are no peers copy through the host, and both hops take their time.

    ``without_peers()`` gives links on which all pairs copy in this way.
    """
    links = matrix([[0, 1e9], [0, 0]], 0.0, host_bandwidth=2e9, host_latency=1e-3)
    assert links.peers(0, 1)
    assert not links.peers(1, 0)
    connect(links)
    assert seconds_of_copies([(1, 0)], 2_000_000) == pytest.approx([2 * 2e-3])
    connect(links.without_peers())
    assert seconds_of_copies([(0, 1)], 2_000_000) == pytest.approx([2 * 2e-3])
    assert links.bandwidth(1, 0) == pytest.approx(1e9)


def test_host_copies_use_host_links():
    """A copy of 1 MB over a host link of 2 GB/s and 10 us takes 0.51 ms in each direction."""
    connect(matrix([[0]], host_bandwidth=2e9, host_latency=1e-5))
    place = device.get(mx.sim(0))
    raw, host = place.allocate(1_000_000), np.zeros(1_000_000, np.uint8)
    start = begin_together([place])
    stream = place.new_stream()
    with stream:
        place.copy(raw, host)
        place.copy(host, raw)
    stream.synchronize()
    place.free(raw)
    assert stream.time - start == pytest.approx(2 * 0.51e-3)


def test_copy_without_links_uses_cost_model():
    """Without links a copy takes the time of the cost model, and copies share no wire."""
    cost = device.get(mx.sim(0)).cost
    assert seconds_of_copies([(0, 2), (1, 2)], 1_000_000) == pytest.approx([cost.copy(1_000_000)] * 2)


@pytest.mark.parametrize("links", [nvlink_mesh(), pcie_tree(), ports(8, 1e9, 0.0)], ids=["mesh", "tree", "ports"])
def test_presets_are_symmetric(links):
    """In each preset all pairs have equal bandwidth in both directions, and every device reaches the host."""
    assert links.count == 8
    for a in range(8):
        assert links.hops(a, HOST)
        assert links.hops(HOST, a)
        for b in range(8):
            assert a == b or links.bandwidth(a, b) == links.bandwidth(b, a)


def test_each_device_of_the_mesh_has_six_links():
    """A device of the NVLink mesh has six links to four other devices."""
    links = nvlink_mesh(1e9)
    for a in range(8):
        actual = [round(links.bandwidth(a, b) / 1e9) for b in range(8) if links.peers(a, b)]
        assert (len(actual), sum(actual)) == (4, 6)


def test_interconnect_follows_context_order():
    """``interconnect`` numbers devices in the order of the given contexts; it returns None if a context is a CPU."""
    links = nvlink_mesh(1e9)
    connect(links)
    actual = interconnect([mx.sim(4), mx.sim(0), mx.sim(1)])
    assert actual is not None
    assert (round(actual.bandwidth(0, 1)), round(actual.bandwidth(1, 2)), actual.peers(0, 2)) == (2e9, 1e9, False)
    assert interconnect([mx.cpu(0), mx.cpu(1)]) is None
    assert interconnect([mx.cpu(0), mx.sim(1)]) is None


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: matrix([[0, 1e9]]), "as many columns as rows"),
        (lambda: matrix([[0, -1.0], [1.0, 0]]), "bandwidth above 0"),
        (lambda: matrix([[0, 1.0], [1.0, 0]], -1.0), "latency"),
        (lambda: Interconnect(1, (1.0,), {}), "no route to the host"),
        (lambda: Interconnect(1, (1.0,), {(0, 3): Route(0.0, (0,))}), "unknown place or wire"),
        (lambda: Interconnect(2, (1.0,), {(0, 1): Route(0.0, (7,))}), "unknown place or wire"),
    ],
)
def test_malformed_links_are_refused(make, words):
    """Malformed links raise DeviceError with the expected form."""
    with pytest.raises(DeviceError, match=words):
        make()


def test_dropped_memory_leaves_address_table():
    """Memory that is dropped without a free leaves the address table, since a host array may reuse the address."""
    place = device.get(mx.sim(97))
    with simulated_device._world:
        simulated_device._memory._remove_dead()
        before = len(simulated_device._memory)
        raw = place.allocate(1000)
        assert simulated_device._memory.device_index(raw[10:]) == 97
        del raw
        assert simulated_device._memory.device_index(np.zeros(1)) == HOST
        assert len(simulated_device._memory) == before


def test_memory_of_a_finalizer_is_noted_in_the_middle():
    """A finalizer allocates, drops and frees in the middle of another allocation: no address is lost or left."""
    files = (simulated_addresses.__file__, address_ranges.__file__)
    step, more, kept = 0, True, Addresses()
    first = np.zeros(8)
    kept.add(first, 7)
    while more:
        step += 1
        dropped = [np.zeros(4) for _ in range(2)]
        for one in (0, 1):
            kept.add(dropped[one], 3)

        def use(place, dropped=dropped):
            if dropped:
                dropped.pop()
            array = np.zeros(16)
            kept.add(array, place)
            assert kept.device_index(array[1:]) == place
            kept.remove(array)
            assert kept.device_index(array) == HOST
            assert kept.device_index(first[3:]) == 7

        more = run_with(files, step, lambda: use(1), lambda: use(2))
        dropped.clear()
        assert len(kept) == 1, step
    assert step > 30
