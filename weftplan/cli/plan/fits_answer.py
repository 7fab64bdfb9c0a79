"""The answer to the question whether a PyTorch step fits a card: printed, with its exit code."""

from __future__ import annotations

import json

import click

from weftplan.cli.plan.torch_step import forecast
from weftplan.errors import MXNetError

UNKNOWN = 2
"""Exit code of a question that cannot be answered; 1 means that the step does not fit."""


def answer_for_card(model: str, card: str, conf: str | None, *, as_json: bool) -> None:
    """Print the forecast for a card of the step that the function ``model`` makes; exit with 1 or 2 unless it fits."""
    try:
        answer = forecast(model, card, conf)
    except (MXNetError, click.ClickException) as error:
        text = error.format_message() if isinstance(error, click.ClickException) else str(error)
        click.echo(json.dumps({"fits": None, "error": text}) if as_json else f"cannot be said: {text}", err=not as_json)
        raise click.exceptions.Exit(UNKNOWN) from None
    click.echo(json.dumps(answer.to_json(), indent=1) if as_json else str(answer))
    code = UNKNOWN if answer.fits is None else int(not answer.fits)
    if code:
        raise click.exceptions.Exit(code)
