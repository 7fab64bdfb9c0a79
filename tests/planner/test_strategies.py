"""Planning strategies: their registry, and packers that are passed to them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from weftplan import config, models
from weftplan.cli import main
from weftplan.errors import PlanError
from weftplan.planner import Packing, PlanOptions, pack, plan_symbol, validate
from weftplan.planner.options import STRATEGIES
from weftplan.planner.strategies import Arena, WholeBlocks, register


@pytest.fixture
def stacked() -> Iterator[str]:
    """The name of a registered strategy whose packer never lets buffers share bytes."""

    def stack(lower: Any, upper: Any, size: Any, *, alignment: int, **rest: Any) -> Packing:
        size = -(-size // alignment) * alignment
        return Packing(np.cumsum(size) - size, int(size.sum()), 0)

    yield register(Arena("stacked", packer=stack)).name
    del STRATEGIES["stacked"]


def lenet(strategy: str) -> Any:
    """Return the training plan of LeNet by a strategy."""
    options = PlanOptions(strategy=strategy)
    return plan_symbol(models.get("lenet"), models.input_shapes("lenet", 4), grad_req="write", options=options)


def test_custom_packer_places_the_buffers(stacked: str) -> None:
    """A plan by a custom packer is valid, has the strategy's name, and is as large as the packer makes it."""
    planned, arena = lenet(stacked), lenet("arena")
    validate(planned)
    assert planned.memory.strategy == stacked
    assert planned.memory.peak > 1.5 * arena.memory.peak
    assert planned.memory.lower_bound == arena.memory.lower_bound


def test_registered_strategy_is_known_everywhere(stacked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A registered strategy is accepted by options and by the variable, and shown by ``plan --compare``."""
    monkeypatch.setenv("WEFTPLAN_PLANNER_STRATEGY", stacked)
    assert config.get("WEFTPLAN_PLANNER_STRATEGY") == PlanOptions.from_environment().strategy == stacked
    shown = CliRunner().invoke(main, ["plan", "mlp", "--inference", "--compare"], catch_exceptions=False)
    assert f"strategy {stacked}" in shown.output


def test_wrong_packing_is_refused() -> None:
    """If a packer lets live buffers overlap, planning raises a PlanError."""

    def overlap(lower: Any, upper: Any, size: Any, *, alignment: int, **rest: Any) -> Packing:
        return Packing(np.zeros(len(size), np.int64), int(size.max()), 0)

    register(Arena("overlapping", packer=overlap))
    try:
        with pytest.raises(PlanError, match="overlap"):
            lenet("overlapping")
    finally:
        del STRATEGIES["overlapping"]


def test_name_that_is_taken_is_refused() -> None:
    """Registering a second strategy under a name raises an error, and the first stays registered."""
    with pytest.raises(PlanError, match="'arena' is registered already"):
        register(WholeBlocks("arena", reuse=True))
    assert STRATEGIES["arena"] == Arena("arena", packer=pack)
