"""Memory budgets for GPU models that this machine does not have."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from weftplan.cli.plan.command import command
from weftplan.device.cards import CARDS, CHECKED, EXCHANGE, GIB, LIBRARIES, card_budget
from weftplan.device.cuda_context import context_range
from weftplan.errors import PlanError


@pytest.mark.parametrize("card", CARDS)
def test_budget_excludes_process_memory(card: str) -> None:
    """A budget is the memory without check bits, the CUDA context and libraries, and NCCL's buffers for several GPUs.

    Cards with GDDR memory lose a sixteenth to check bits.
    """
    memory = CARDS[card] * GIB * (15 if card in CHECKED else 16) // 16
    reserve = context_range(card)[1] + LIBRARIES
    assert card_budget(card)[0] == memory - reserve
    assert card_budget(card.lower(), devices=2)[0] == memory - reserve - EXCHANGE


def test_a_size_means_powers_of_1024() -> None:
    """A card's size in GB or GiB means powers of 1024. Its context may be that of any kind of card."""
    assert card_budget("8GB")[0] == card_budget("8 gib")[0] < card_budget("RTX 4060")[0]


@pytest.mark.parametrize(("card", "message"), [("RTX 470", "RTX 4070"), ("0.5GB", "alone take 1.53 GiB")])
def test_a_card_without_a_budget_is_refused(card: str, message: str) -> None:
    """An unknown card raises PlanError with the nearest name; a too small card, with the bytes needed in advance."""
    with pytest.raises(PlanError, match=message):
        card_budget(card)


def test_the_command_plans_for_a_card() -> None:
    """``--card`` sets and explains the budget; with ``--budget`` the command exits with status 2 and an explanation."""
    asked = ["resnet50", "--batch", "2", "--card", "8GB", "--json"]
    report = json.loads(CliRunner().invoke(command, asked).stdout)
    assert report["total"] <= card_budget("8GB")[0]
    assert report["card"] == card_budget("8GB")[1]
    assert "a card of 8GB: 8.00 GiB" in CliRunner().invoke(command, asked[:-1]).stdout
    refused = CliRunner().invoke(command, [*asked, "--budget", "2GB"])
    assert refused.exit_code == 2
    assert "leave out one of --card and --budget" in refused.output
