"""Budgets against time as a drawing: a line of modelled times, and dots of measured times.

Nothing is kept; any thread may call this.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

from weftplan.device.amounts import unit_of

_WIDTH, _HEIGHT = 640, 360
_LEFT, _RIGHT, _TOP, _BOTTOM = 78, 20, 34, 54
_TEXT, _GRID, _LINE, _DOT = (
    "var(--text, #1c2430)",
    "var(--grid, #e6eaf0)",
    "var(--curve, #0072b2)",
    "var(--pin, #c1121f)",
)
"""Colours: those of the page around the drawing, and those of a light page in a file of its own."""

Sample = tuple[int, float, float | None]
"""A budget in bytes, the modelled time of a step and the measured time or None, of the plain step's time."""


def trade_off_picture(title: str, samples: Sequence[Sample]) -> str:
    """Return an SVG drawing: budgets to the right, times upwards; a legend explains the dots if there are any.

    >>> picture = trade_off_picture("a step", [(2048, 1.0, 1.01), (1024, 1.2, None)])
    >>> picture.count("<circle"), "measured" in picture, "budget, KiB" in picture
    (2, True, True)
    >>> trade_off_picture("a step", [(2048, 1.0, None)]).count("measured")
    0
    """
    unit, name = unit_of(max(budget for budget, _, _ in samples))
    budgets = [budget / unit for budget, _, _ in samples]
    times = [time for _, modelled, measured in samples for time in (modelled, measured or modelled)]
    xs, ys = ticks(min(budgets), max(budgets), 6), ticks(min(1.0, *times), max(1.01, *times), 5)

    def place(budget: float, value: float) -> tuple[float, float]:
        right = (budget - xs[0]) / (xs[-1] - xs[0]) * (_WIDTH - _LEFT - _RIGHT)
        return _LEFT + right, _HEIGHT - _BOTTOM - (value - ys[0]) / (ys[-1] - ys[0]) * (_HEIGHT - _TOP - _BOTTOM)

    def text(x: float, y: float, words: str, more: str = 'text-anchor="middle"') -> str:
        return f'<text x="{x:.1f}" y="{y:.1f}" style="fill:{_TEXT}" {more}>{html.escape(words)}</text>'

    bottom, middle = place(xs[0], ys[0])[1], (_TOP + _HEIGHT - _BOTTOM) / 2
    parts = [text(_LEFT, 20, title, 'font-size="14"')] if title else []
    for x in xs:
        parts += [_path(f"M{place(x, 0)[0]:.1f} {_TOP}V{bottom}", _GRID), text(place(x, 0)[0], bottom + 18, f"{x:g}")]
    for y in ys:
        at = place(xs[0], y)[1]
        parts.append(_path(f"M{_LEFT} {at:.1f}H{_WIDTH - _RIGHT}", _GRID))
        parts.append(text(_LEFT - 6, at + 4, f"{y:.{_digits(ys)}f}", 'text-anchor="end"'))
    parts.append(text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 10, f"budget, {name}"))
    parts.append(text(14, middle, "time of a step", f'text-anchor="middle" transform="rotate(-90 14 {middle:.1f})"'))
    corners = " ".join("{:.1f} {:.1f}".format(*place(x, y)) for x, (_, y, _) in zip(budgets, samples, strict=True))
    parts.append(_path(f"M{corners}", _LINE, 2))
    dots = [(x, measured) for x, (_, _, measured) in zip(budgets, samples, strict=True) if measured is not None]
    parts += [_dot(*place(x, measured)) for x, measured in dots]
    if dots:
        right = _WIDTH - _RIGHT
        parts += [_dot(right - 100, 16), text(right, 20, "measured", 'text-anchor="end"')]
        parts += [_path(f"M{right - 230} 16h20", _LINE, 2), text(right - 116, 20, "modelled", 'text-anchor="end"')]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'font-family="system-ui, sans-serif" font-size="12"><rect width="{_WIDTH}" height="{_HEIGHT}" '
        f'style="fill:var(--page, #fff)"/>{"".join(parts)}</svg>'
    )


def ticks(low: float, high: float, count: int) -> list[float]:
    """Return two to ``count`` + 1 round numbers at equal distances; the first is at most ``low``, the last ``high``.

    >>> ticks(87.3, 134, 6), ticks(1.0, 1.33, 5), ticks(3, 3, 5)
    ([80.0, 90.0, 100.0, 110.0, 120.0, 130.0, 140.0], [1.0, 1.1, 1.2, 1.3, 1.4], [3.0, 4.0])
    """
    rough = (high - low) / count or 1.0
    ten = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * ten for factor in (1, 2, 5, 10) if factor * ten >= rough * (1 - 1e-9))
    first = math.floor(low / step + 1e-9)
    last = max(math.ceil(high / step - 1e-9), first + 1)
    return [float(f"{number * step:.9g}") for number in range(first, last + 1)]


def _digits(numbers: Sequence[float]) -> int:
    """Return how many digits after the point all numbers need."""
    return max(len(f"{number:.9g}".partition(".")[2]) for number in numbers)


def _path(path: str, colour: str, width: float = 1) -> str:
    return f'<path d="{path}" style="stroke:{colour}" fill="none" stroke-width="{width}"/>'


def _dot(x: float, y: float) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" style="fill:{_DOT}"/>'
