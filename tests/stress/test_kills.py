"""Killed processes and random orders of arrival, a few of each; ``tests.stress.kills`` takes seeds and counts."""

from __future__ import annotations

import pytest

from tests.kvstore.ranks import need_mpi
from tests.stress.kills import kills, orders

pytestmark = [pytest.mark.stress, pytest.mark.timeout(600)]


@pytest.mark.parametrize("seed", [1, 2])
def test_killed_processes(seed: int) -> None:
    """Whoever is left recovers, has right sums, and ends."""
    need_mpi()
    wrong, hangs, times, right = kills(seed, 3)
    assert (wrong, hangs) == (0, 0)
    assert times
    assert right


def test_orders_of_arrival() -> None:
    """The same gradients have the same sums to the bit."""
    need_mpi()
    assert len(orders(1, 50)) == 1
