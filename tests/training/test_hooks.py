"""Methods that a class of the user overrides are called as MXNet 1.9.1 calls them: order, number and arguments."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest

import weftplan as mx
from tests.golden import hook_cases

RECORDED = json.loads((Path(hook_cases.__file__).parent / "data" / "hooks.json").read_text())


def expected(script: str) -> list[str]:
    """Return MXNet's lines of a script, except for one argument that differs on purpose.

    A module of a chain gets the values of all its modules. Module refuses names that it does not have, unless it may
    ignore them; the chain refuses names that no module has.
    """
    lines = [RECORDED["lines"][number] for number in RECORDED["scripts"][script]]
    parts = ("first.init_params", "second.init_params")
    return [
        line.replace("allow_extra=False", "allow_extra=True") if line.lstrip().startswith(parts) else line
        for line in lines
    ]


@pytest.mark.parametrize("script", hook_cases.SCRIPTS, ids=lambda script: script.__name__)
def test_calls_are_those_of_mxnet(script):
    """A script makes the same calls here as in MXNet, and callbacks find at least MXNet's variables."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lines = hook_cases.play(mx, script)
    ours, theirs = lines, expected(script.__name__)
    assert [line for line in ours if "locals: " not in line] == [line for line in theirs if "locals: " not in line]
    variables = [[{*line[8:].split(", ")} for line in many if "locals: " in line] for many in (ours, theirs)]
    for here, there in zip(*variables, strict=True):
        assert there <= here
