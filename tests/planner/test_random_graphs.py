"""Random graphs with every strategy: plans are valid, and runs on poisoned memory have the right bits."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from weftplan.planner import PlanOptions, plan_symbol, validate

OPTIONS = {
    "auto": PlanOptions(),
    "arena": PlanOptions(strategy="arena"),
    "match_range": PlanOptions(strategy="match_range", match_range=16),
    "exact_sizes": PlanOptions(strategy="match_range", match_range=1),
    "off": PlanOptions(strategy="none"),
    "no_inplace": PlanOptions(enable_inplace=False),
    "mxnet": PlanOptions(strategy="match_range", match_range=16, compat="mxnet", sizes="mxnet"),
    "mxnet_auto": PlanOptions(compat="mxnet", sizes="mxnet"),
    "colors": PlanOptions(strategy="match_range", num_temp=4),
    "chained_sums": PlanOptions(inplace_grad_sum_cap=2),
    "chained_blocks": PlanOptions(strategy="match_range", inplace_grad_sum_cap=2, compat="mxnet"),
    "sweep": PlanOptions(strategy="match_range", match_range=16, auto_search=True),
    "given_order": PlanOptions(reorder=False),
    "no_merging": PlanOptions(eliminate_common_expr=False),
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("grad_req", ["null", "write", "add"])
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32), size=st.integers(1, 24))
def test_same_bits_and_valid(interpret: Any, same: Any, name: str, grad_req: str, seed: int, size: int) -> None:
    """A plan is valid, and its run has the bits of a run with separate arrays for all entries."""
    symbol = interpret.symbol(seed, size)
    shapes = dict.fromkeys(symbol.list_arguments(), (6, 6))
    planned = plan_symbol(symbol, shapes, grad_req=grad_req, options=OPTIONS[name])
    validate(planned)
    assert planned.memory.lower_bound <= planned.memory.peak
    values = interpret.values(symbol, seed)
    if grad_req != "add":
        values = {k: v for k, v in values.items() if not k.startswith("grad:")}
    same(interpret.planned(planned, values), interpret.apart(planned, values))


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), size=st.integers(1, 30))
def test_sharing_never_exceeds_no_sharing(interpret: Any, seed: int, size: int) -> None:
    """The peak of ``auto`` is at most that of ``arena`` and of ``match_range``, which is at most that of ``none``."""
    symbol = interpret.symbol(seed, size)
    shapes = dict.fromkeys(symbol.list_arguments(), (6, 6))
    peaks = [
        plan_symbol(symbol, shapes, grad_req="write", options=PlanOptions(strategy=strategy)).memory
        for strategy in ("auto", "match_range", "none", "arena")
    ]
    assert peaks[0].peak <= peaks[3].peak
    assert peaks[0].peak <= peaks[1].peak <= peaks[2].peak <= peaks[2].unshared_bytes
