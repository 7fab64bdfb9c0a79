"""Budgets against time as a drawing: a line of modelled times, and dots of measured times.

Nothing is kept; any thread may call this.
"""

from __future__ import annotations

import html
from collections.abc import Sequence

from weftplan.device.amounts import amount

_WIDTH, _HEIGHT, _MARGIN = 640, 360, 56

Sample = tuple[int, float, float | None]
"""A budget in bytes, the modelled time of a step and the measured time or None, of the plain step's time."""


def trade_off_picture(title: str, samples: Sequence[Sample]) -> str:
    """Return an SVG drawing: budgets to the right, times upwards.

    >>> trade_off_picture("a step", [(2048, 1.0, 1.01), (1024, 1.2, None)]).count("<circle")
    1
    """
    budgets = [budget for budget, _, _ in samples]
    times = [time for _, modelled, measured in samples for time in (modelled, measured or modelled)]
    low, high, least, most = min(budgets), max(budgets), min(1.0, *times), max(1.01, *times)

    def place(nbytes: float, value: float) -> tuple[float, float]:
        right = _MARGIN + (_WIDTH - 2 * _MARGIN) * (nbytes - low) / max(high - low, 1)
        return right, _HEIGHT - _MARGIN - (_HEIGHT - 2 * _MARGIN) * (value - least) / (most - least)

    path = " ".join("{:.1f},{:.1f}".format(*place(budget, modelled)) for budget, modelled, _ in samples)
    dots = "".join(
        '<circle cx="{:.1f}" cy="{:.1f}" r="4" fill="#c33"/>'.format(*place(budget, measured))
        for budget, _, measured in samples
        if measured is not None
    )
    ends = "".join(
        f'<text x="{place(n, least)[0]:.1f}" y="{_HEIGHT - _MARGIN + 18}" text-anchor="middle">{amount(n)}</text>'
        for n in (low, high)
    )
    ticks = "".join(
        f'<text x="{_MARGIN - 6}" y="{place(low, v)[1] + 4:.1f}" text-anchor="end">{v:.2f}</text>'
        for v in (least, most)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
        f'font-size="12"><rect width="{_WIDTH}" height="{_HEIGHT}" fill="#fff"/>'
        f'<text x="{_WIDTH / 2}" y="20" text-anchor="middle" font-size="14">{html.escape(title)}</text>'
        f'<polyline points="{path}" fill="none" stroke="#246" stroke-width="2"/>{dots}{ends}{ticks}'
        f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 10}" text-anchor="middle">budget in bytes (line: modelled time of a '
        f"step, dots: measured)</text></svg>"
    )
