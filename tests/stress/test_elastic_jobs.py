"""Ranks of elastic jobs that end at random batches; ``tests.stress.elastic`` runs more."""

from __future__ import annotations

import pytest

from tests.kvstore.ranks import need_mpi
from tests.stress.elastic import losses

pytestmark = [pytest.mark.stress, pytest.mark.timeout(3000)]


def test_ranks_that_end_at_random_batches() -> None:
    """Two jobs that lose five ranks each end with the weights of a job without a loss."""
    need_mpi()
    wrong, hung, jobs, kinds = losses(1, 10)
    assert (wrong, hung) == (0, 0)
    assert jobs == 2
    assert kinds.total() == 10
