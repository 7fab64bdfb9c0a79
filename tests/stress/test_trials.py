"""Trials with new seeds; ``python -m tests.stress.trials`` runs more of them."""

from __future__ import annotations

import pytest

from tests.stress import trials
from tests.support.seeds import seed

pytestmark = [pytest.mark.stress, pytest.mark.timeout(900)]


@pytest.mark.parametrize("kind", list(trials.TRIALS))
def test_fresh_seeds_find_nothing(kind: str) -> None:
    """A hundred trials of each kind with a new seed do not fail."""
    number = seed(fresh=True)
    print(f"seed {number}")
    assert trials.run(kind, number, 100) == 0
