"""Measured links: on simulated devices they equal the configured links, on GPUs the times of copies."""

from __future__ import annotations

import pytest

import weftplan as mx
from tests import standin_cupy
from weftplan import device
from weftplan.device.interconnect import declare, interconnect
from weftplan.device.links import HOST, connect, matrix, nvlink_mesh, pcie_tree
from weftplan.device.measured_links import measured
from weftplan.errors import DeviceError
from weftplan.kvstore.exchange.choice import Chooser
from weftplan.kvstore.exchange.ways import TreeRule


@pytest.fixture(autouse=True)
def _apart_afterwards():
    yield
    connect(None)
    declare(None)


@pytest.mark.parametrize("name", ["mesh", "tree", "uneven"])
def test_measured_links_equal_simulated_links(name: str, monkeypatch: pytest.MonkeyPatch):
    """The measured bandwidth and latency of each pair are those of its link, and only peers have a link.

    This is also true if a device's clock is ahead of the others.
    """
    uneven = matrix([[0, 5e9, 0], [9e9, 0, 2e9], [0, 1e9, 0]], [[0, 1e-6, 0], [2e-6, 0, 3e-6], [0, 4e-6, 0]])
    inputs = {"mesh": nvlink_mesh(), "tree": pcie_tree(), "uneven": uneven}[name]
    connect(inputs)
    first = device.get(mx.sim(0))
    monkeypatch.setattr(first, "_clock", first.clock + 100.0)  # restored after the test: other tests read it
    actual = measured([mx.sim(index) for index in range(inputs.count)])
    assert set(actual.routes) == set(inputs.routes)
    for (a, b), route in inputs.routes.items():
        assert actual.routes[a, b].latency == pytest.approx(route.latency, rel=1e-3, abs=1e-9)
        speed = min(inputs.wires[wire] for wire in route.wires)
        assert actual.wires[actual.routes[a, b].wires[0]] == pytest.approx(speed, rel=1e-3)


def test_measured_links_give_the_same_trees():
    """MXNET_KVSTORE_USETREE gives the same trees for a measured mesh as for the configured one."""
    contexts = [mx.sim(index) for index in range(8)]
    plans = []
    connect(nvlink_mesh())
    for links in (nvlink_mesh(), measured(contexts)):
        connect(links)
        chooser = Chooser(peers=True, trees_only=True, rule=TreeRule(), log_trees=False)
        plans.append(chooser.plan(contexts, 0, 1_000_000, 4))
    first, second = plans
    assert first is not None
    assert second is not None
    assert [share.parents for share in first.way.shares] == [share.parents for share in second.way.shares]


def test_stores_use_declared_links():
    """Measured links of GPUs have positive bandwidths; after ``declare`` stores plan with them."""
    with standin_cupy.installed():
        contexts = [mx.gpu(index) for index in range(3)]
        actual = measured(contexts)
        assert actual.count == 3
        assert all(wire > 0 for wire in actual.wires)
        assumed = interconnect(contexts)
        declare(actual)
        links = interconnect(contexts)
        assert assumed is not None
        assert links is not None
        assert set(links.routes) == set(assumed.routes)
        assert links.wires == actual.wires
        chooser = Chooser(peers=True, trees_only=True, rule=TreeRule(), log_trees=False)
        plan = chooser.plan(contexts, 0, 1000, 4)
        declare(None)
        second = chooser.plan(contexts, 0, 1000, 4)
        assert plan is not None
        assert second is not None
        assert plan.seconds != second.seconds


def test_mistakes():
    """``measured`` raises DeviceError for a single device, for duplicates and for CPUs."""
    for contexts in ([mx.sim(0)], [mx.sim(0), mx.sim(0)], [mx.cpu(0), mx.cpu(1)]):
        with pytest.raises(DeviceError, match="two or more GPUs"):
            measured(contexts)
    assert (0, HOST) in measured([mx.sim(0), mx.sim(1)]).routes
