"""Registry of engine types, which ``create``, MXNET_ENGINE_TYPE and the command line use."""

from __future__ import annotations

import subprocess
import sys

import pytest

from weftplan import engine
from weftplan.engine.naive import NaiveEngine
from weftplan.engine.registry import register, registered
from weftplan.errors import ConfigError, EngineError

SCRIPT = """
from weftplan import config, engine
from weftplan.cli.doctor.command import environment_markdown
from weftplan.engine.naive import NaiveEngine
from weftplan.engine.registry import register

@register
class Plain(NaiveEngine):
    kind = "Plain"
    options = ("pace",)

    def __init__(self, pace=1):
        super().__init__()
        self.pace = pace

from weftplan.cli.train.command import command
(option,) = [param for param in command.params if param.name == "kind"]
assert "Plain" in option.type.choices
assert type(engine.get()) is Plain and engine.get().pace == 1
assert engine.create("Plain", pace=3).pace == 3
assert "Simulator, Plain |" in environment_markdown()
"""


def test_registered_type_is_known_everywhere(monkeypatch):
    """``create`` and MXNET_ENGINE_TYPE accept a new type; ``train --engine`` and the page of variables list it."""
    monkeypatch.setenv("MXNET_ENGINE_TYPE", "Plain")
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


def test_duplicate_name_is_refused():
    """A second class with a registered name raises ConfigError, and the first stays registered."""
    with pytest.raises(ConfigError, match="'NaiveEngine' is registered already"):
        register(type("Other", (NaiveEngine,), {}))
    assert registered()["NaiveEngine"] is NaiveEngine
    assert register(NaiveEngine) is NaiveEngine


def test_option_of_another_type_is_refused():
    """An option that belongs to another engine type raises EngineError."""
    with pytest.raises(EngineError, match=r"NaiveEngine has no options .'seed'"):
        engine.create("NaiveEngine", seed=1)
