"""Modelled seconds of elementwise functions: their own cost on a host, memory traffic on an accelerator."""

from __future__ import annotations

import pytest

import weftplan as mx
from weftplan.planner import plan_symbol
from weftplan.planner.symbolic.node_seconds import ACCELERATOR, HOST, seconds_of
from weftplan.symbol import Symbol

SHAPE = (64, 1024)
NUMBERS = 64 * 1024


def seconds(symbol: Symbol, context: mx.Context, dtype: str = "float32") -> list[float]:
    """Return the modelled seconds of the nodes of a symbol that reads ``x``, its gradient included."""
    planned = plan_symbol(symbol, {"x": SHAPE}, {"x": dtype}, grad_req="write", context=context)
    return [seconds_of(planned, nid) for nid in planned.order]


@pytest.mark.parametrize(("op", "params"), [("LeakyReLU", {"act_type": "gelu"}), ("erf", {})])
def test_slow_functions_take_their_own_time_on_a_host(op: str, params: dict[str, str]) -> None:
    """A function of many passes costs their time on a host (20 ns per element), and its memory traffic on a card."""
    symbol = getattr(mx.sym, op)(mx.sym.Variable("x"), **params)
    host = seconds(symbol, mx.cpu())
    assert host[0] == pytest.approx(20e-9 * NUMBERS, rel=0.1)
    assert seconds(symbol, mx.cpu(), "float64")[0] == pytest.approx(2 * host[0])
    assert seconds(symbol, mx.sim(0))[0] == pytest.approx(8 * NUMBERS / ACCELERATOR.bandwidth)


@pytest.mark.parametrize("op", ["relu", "exp", "tanh"])
def test_fast_functions_take_the_time_of_their_traffic(op: str) -> None:
    """The vector loops of these functions are faster than the memory that they read and write."""
    (forward, *_) = seconds(getattr(mx.sym, op)(mx.sym.Variable("x")), mx.cpu())
    assert forward == pytest.approx(8 * NUMBERS / HOST.bandwidth)
