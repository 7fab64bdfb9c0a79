"""``weftplan fits``: whether a PyTorch training step fits a card, without the card."""

from __future__ import annotations

import click

from weftplan.cli.options import json_option, model_argument
from weftplan.cli.plan.card_answer import answer_for_card


@click.command("fits", context_settings={"help_option_names": ["-h", "--help"]})
@model_argument()
@click.option(
    "--card", required=True, metavar="CARD", help='The card, such as "RTX 4090", or its memory, such as 24GB.'
)
@click.option(
    "--conf", metavar="TEXT", help="Settings of PyTorch's allocator, as PYTORCH_CUDA_ALLOC_CONF, which is the default."
)
@json_option("Print the figures as JSON.")
def command(model: str, card: str, conf: str | None, as_json: bool) -> None:
    """Say whether a PyTorch training step fits a card. The step is traced, not run, and no card is needed.

    MODEL is FILE.py:function or package.module:function. The function takes no arguments and returns (step, arguments)
    or (loss, arguments, optimizer). Models may be built under torch.device("meta").

    The exit code is 0 if the step fits, 1 if it does not, and 2 if that cannot be said: the step or an option is wrong,
    or the card's memory lies within the stated ranges ("may fit").
    """
    answer_for_card(model, card, conf, as_json=as_json)
