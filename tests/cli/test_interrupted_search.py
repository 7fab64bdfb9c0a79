"""Ctrl-C during the search of ``weftplan plan --budget`` prints the best plan so far and exits with 130."""

from __future__ import annotations

import json
import signal

import pytest
from click.testing import CliRunner

from weftplan import models
from weftplan.cli import main
from weftplan.planner import stop_request
from weftplan.planner.recompute.ladder import Ladder

NETWORK = ["plan", "resnet18", "--batch", "2"]


@pytest.fixture
def ctrl_c(monkeypatch: pytest.MonkeyPatch):
    """Return ``install(*presses)``, which raises SIGINT at these evaluations of a plan's price.

    ``install`` returns a list that has an item for each evaluation so far.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    prices: list[int] = []
    look = Ladder.look

    def install(*presses: int) -> list[int]:
        def press(self, chosen):
            actual = look(self, chosen)
            prices.append(1)
            if len(prices) in presses:
                signal.raise_signal(signal.SIGINT)
            return actual

        monkeypatch.setattr(Ladder, "look", press)
        return prices

    yield install
    signal.signal(signal.SIGINT, before)


def test_the_best_so_far_is_printed(ctrl_c) -> None:
    """After Ctrl-C the best plan that fits is printed, and the search ends within ten evaluations."""
    budget = int(models.get("resnet18").plan(models.input_shapes("resnet18", 2), optimizer="sgd").total * 0.97)
    prices = ctrl_c(80)
    done = CliRunner().invoke(main, [*NETWORK, "--optimizer", "sgd", "--budget", str(budget), "--json"])
    assert done.exit_code == 130, done.output
    assert "interrupted: what was found until then is printed above" in done.stderr
    assert json.loads(done.stdout)["total"] <= budget
    assert len(prices) < 90
    assert not stop_request.asked()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_nothing_that_fits_was_found(ctrl_c) -> None:
    """If no plan fits so far, the command exits with 130 and reports the smallest need so far."""
    ctrl_c(1)
    done = CliRunner().invoke(main, [*NETWORK, "--budget", "120MB"])
    assert (done.exit_code, done.stdout) == (130, "")
    assert "interrupted: no plan that fits was found until then: the budget is 120,000,000 bytes" in done.stderr
    assert "a longer search may find less" in done.stderr


def test_the_second_ctrl_c_is_an_interrupt(ctrl_c) -> None:
    """A second Ctrl-C ends the search immediately: the command prints no plan and exits with 130."""
    ctrl_c(5, 6)
    done = CliRunner().invoke(main, [*NETWORK, "--budget", "120MB"])
    assert (done.exit_code, done.stdout) == (130, "")
    assert "interrupted: the search ended at once" in done.stderr
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_stopping_outside_of_a_block_stops_nothing() -> None:
    """``stop`` has no effect outside of ``stoppable``; leaving an inner block does not end an outer block."""
    stop_request.stop()
    assert not stop_request.asked()
    with stop_request.stoppable():
        with stop_request.stoppable():
            assert not stop_request.asked()
        stop_request.stop()
        assert stop_request.asked()
    assert not stop_request.asked()
