"""Killed processes and random orders of arrival, a few of each; ``tests.stress.kills`` runs more."""

from __future__ import annotations

import pytest

from tests.kvstore.ranks import need_mpi
from tests.stress.hosts import emulated
from tests.stress.kills import asynchronous, kills, orders

pytestmark = [pytest.mark.stress, pytest.mark.timeout(600)]


@pytest.mark.parametrize("seed", [1, 2])
def test_killed_processes(seed: int) -> None:
    """After a death the surviving processes recover, pull the sums over the remaining processes, and end."""
    need_mpi()
    wrong, hangs, times, right = kills(seed, 3)
    assert (wrong, hangs) == (0, 0)
    assert times
    assert right


def test_orders_of_arrival() -> None:
    """The same gradients give bitwise equal sums in fifty orders of arrival."""
    need_mpi()
    assert len(orders(1, 50)) == 1


def test_killed_processes_over_emulated_hosts() -> None:
    """Survivors on three emulated hosts, over TCP, recover, pull the sums over the remaining processes, and end."""
    need_mpi()
    with emulated() as hosts:
        wrong, hangs, times, right = kills(1, 3, hosts)
    assert (wrong, hangs) == (0, 0)
    assert times
    assert right


def test_killed_processes_of_dist_async() -> None:
    """In each of three jobs of dist_async, both survivors of a killed process get an error and end."""
    need_mpi()
    assert asynchronous(1, 3) == (6, 0)
