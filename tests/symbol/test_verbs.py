"""Methods of symbols that higher layers register, so that the symbol package does not import these layers."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from weftplan import symbol as sym
from weftplan.errors import MXNetError
from weftplan.support import slots


def test_verbs_pass_the_symbol_and_everything_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """``bind``, ``simple_bind`` and ``plan`` call the registered functions with the symbol and all arguments."""
    calls: list[Any] = []
    monkeypatch.setattr(slots.BIND, "value", lambda *a, **k: calls.append(("bind", a, k)))
    monkeypatch.setattr(slots.SIMPLE_BIND, "value", lambda *a, **k: calls.append(("simple", a, k)))
    monkeypatch.setattr(slots.PLAN_SYMBOL, "value", lambda *a, **k: calls.append(("plan", a, k)))
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


def test_a_provider_that_fills_nothing_is_an_error() -> None:
    """If importing the provider does not fill a slot, ``get`` raises an error; a filled slot returns its value."""
    empty: slots.Slot[int] = slots.Slot("weftplan.symbol.verbs", "weftplan.errors", "Symbol.bind")
    with pytest.raises(MXNetError, match=r"weftplan\.errors was imported and did not provide 'Symbol\.bind'"):
        empty.get()
    empty.fill(3)
    assert empty.get() == 3


def test_symbols_import_nothing_above_them() -> None:
    """Importing the symbol package loads no higher layer, such as planner, executor, engine or training."""
    code = "import sys, weftplan.symbol, weftplan.models; print(*(m for m in sys.modules if m.startswith('weftplan.')))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    above = ("planner", "executor", "engine", "storage", "kvstore", "training", "cli", "report", "ndarray")
    assert [m for m in loaded if m.split(".")[1] in above] == []
