"""Verbs of higher layers, reached through hooks so that imports only go down."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from weftplan import symbol as sym
from weftplan.errors import MXNetError
from weftplan.symbol import hooks


def test_verbs_pass_the_symbol_and_everything_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """bind, simple_bind and plan call what was registered."""
    calls: list[Any] = []
    monkeypatch.setattr(hooks, "_hooks", {})
    hooks.set_binder(lambda *a, **k: calls.append(("bind", a, k)), lambda *a, **k: calls.append(("simple", a, k)))
    hooks.set_planner(lambda *a, **k: calls.append(("plan", a, k)))
    x = sym.Variable("x")
    x.bind("ctx", {"x": 1}, aux_states={})
    x.simple_bind("ctx", x=(2,))
    x.plan({"x": (2,)}, budget="1GB")
    assert [(kind, args[1:], more) for kind, args, more in calls] == [
        ("bind", ("ctx", {"x": 1}, None, "write"), {"aux_states": {}}),
        ("simple", ("ctx", "write"), {"x": (2,)}),
        ("plan", ({"x": (2,)},), {"budget": "1GB"}),
    ]
    assert all(args[0] is x for _, args, _ in calls)


def test_a_package_that_registers_nothing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names verb and package."""
    monkeypatch.setattr(hooks, "_hooks", {})
    with pytest.raises(MXNetError, match=r"symbol\.bind is not available: weftplan\.errors did not register it"):
        hooks.hook("bind", "weftplan.errors")


def test_symbols_import_nothing_above_them() -> None:
    """Importing the symbol package loads neither planner nor executor, engine or training."""
    code = "import sys, weftplan.symbol, weftplan.models; print(*(m for m in sys.modules if m.startswith('weftplan.')))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    above = ("planner", "executor", "engine", "storage", "kvstore", "training", "cli", "report", "ndarray")
    assert [m for m in loaded if m.split(".")[1] in above] == []
