"""Parsing of devices on a command line: a count of CPU contexts, or a list such as ``cpu(0),gpu(1)``.

The module parses text only and does not check whether a device exists. It is stateless; any thread may call it.
"""

from __future__ import annotations

import re

import click

from weftplan.device.context import Context, cpu


def _suggestion(text: str) -> str:
    """Return a suggestion for a device name of other programs."""
    kind, _, number = text.strip().lower().partition(":")
    same = {"cuda": "gpu", "gpu": "gpu", "cpu": "cpu", "host": "cpu"}.get(kind)
    return "" if same is None else f"did you mean {same}{number if number.isdigit() else 0}? "


def parse_devices(text: str) -> list[Context]:
    """Parse ``"2"`` (that many CPU contexts) or a list such as ``"cpu(0),cpu(1)"`` or ``"gpu0,gpu1"``.

    >>> parse_devices("2"), parse_devices("cpu0,gpu(1)")
    ([cpu(0), cpu(1)], [cpu(0), gpu(1)])
    """
    if text.isdigit():
        if int(text) < 1:
            raise click.BadParameter("expected at least one device")
        return [cpu(i) for i in range(int(text))]
    contexts = []
    for item in text.split(","):
        match = re.fullmatch(r"\s*(cpu|gpu|sim)[(:]?(\d+)\)?\s*", item)
        if match is None:
            raise click.BadParameter(
                f"{item!r} is no device: {_suggestion(item)}expected a number of CPU contexts, or a list such as "
                f"gpu0,gpu1"
            )
        contexts.append(Context(match[1], int(match[2])))
    if len(set(contexts)) != len(contexts):
        raise click.BadParameter(f"a device occurs twice in {text!r}")
    return contexts
