"""Comparisons of plans of one network: strategies, policies and budgets, and memory against time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from weftplan.errors import BudgetError, MXNetError
from weftplan.planner import MemoryPlan
from weftplan.planner.options import STRATEGIES

POINTS = 6
"""Number of plans on the curve of memory against time, including both ends."""
SHARES = (0.9, 0.75, 0.5)
"""Compared budgets, as shares of the memory without a budget."""

Make = Callable[..., MemoryPlan]
Row = dict[str, Any]


def compare(make: Make, *, train: bool) -> Iterator[Row]:
    """Return a row for each strategy and, for training, for each recompute policy and some budgets."""
    off = {"recompute": "off"}
    for strategy in reversed(STRATEGIES):
        yield _row(f"strategy {strategy}", make, strategy=strategy, order="given", **off)
    plain = _row("auto, best order", make, strategy="auto", order="best", **off)
    yield plain
    if not train:
        return
    for policy in ("mxnet", "echo", "sqrt", "cheap"):
        yield _row(f"recompute {policy}", make, strategy="auto", recompute=policy)
    for share in SHARES:
        if "counted" in plain:
            yield _row(f"budget {share:.0%} of it", make, budget=int(plain["counted"] * share))


def curve(make: Make) -> Iterator[Row]:
    """Yield plans from the fastest to the smallest: without a budget, then under decreasing budgets."""
    plain = _row("no budget", make)
    yield plain
    try:
        make(budget=1)
        return  # no memory is planned
    except BudgetError as error:
        smallest = error.smallest
    if smallest is None or "counted" not in plain:
        return
    previous = plain["counted"]
    for k in range(1, POINTS):
        budget = plain["counted"] - (plain["counted"] - smallest) * k // (POINTS - 1)
        if budget < previous:
            row = _row(f"budget {budget}", make, budget=budget)
            if "counted" in row:
                previous = row["counted"]
                yield row


def _row(name: str, make: Make, **named: object) -> Row:
    start = time.perf_counter()
    try:
        plan = make(**named)
    except MXNetError as error:  # a plan that fails must not hide the others
        return {"plan": name, "error": str(error)}
    return {
        "plan": name,
        "total": plan.total,
        "counted": plan.counted,
        "peak": plan.peak,
        "over_bound": plan.peak / plan.lower_bound if plan.lower_bound else 1.0,
        "more_time": plan.more_time,
        "reuse_edges": plan.num_reuse_edges,
        "planned_in_s": time.perf_counter() - start,
    }
