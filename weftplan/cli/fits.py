"""``weftplan fits``: whether a PyTorch training step fits a card, without the card."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from weftplan.cli.options import json_option, model_argument
from weftplan.cli.plan.torch_step import forecast
from weftplan.errors import MXNetError

if TYPE_CHECKING:
    from weftplan.torch.card_forecast import Forecast

UNKNOWN = 2
"""Exit code of a question that cannot be answered; 1 means that the step does not fit."""


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

    The exit code is 0 if the step fits, 1 if it does not, and 2 if that cannot be said.
    """
    try:
        answer = forecast(model, card, conf)
    except (MXNetError, click.ClickException) as error:
        text = error.format_message() if isinstance(error, click.ClickException) else str(error)
        click.echo(json.dumps({"fits": None, "error": text}) if as_json else f"cannot be said: {text}", err=not as_json)
        raise click.exceptions.Exit(UNKNOWN) from None
    show(answer, as_json=as_json)


def show(answer: Forecast, *, as_json: bool) -> None:
    """Print a forecast, and exit with its code."""
    click.echo(json.dumps(answer.to_json(), indent=1) if as_json else str(answer))
    code = UNKNOWN if answer.fits is None else int(not answer.fits)
    if code:
        raise click.exceptions.Exit(code)
