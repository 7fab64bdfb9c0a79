"""The error function by Chebyshev series, for array modules without it.

Importing this module fits two series to :func:`math.erf` and :func:`math.erfc`: ``erf(x) / x`` in ``x²`` for
``|x| < 1``, and ``exp(x²)·erfc(x)`` in ``(x - 2) / (x + 2)`` for ``1 <= |x| <= 6.5``; beyond that erf is ±1 in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from weftplan.ops.core.expression import Expr, f, where

_SPLIT = 1.0
_END = 6.5


def fit(function: Callable[[float], float], low: float, high: float, degree: int) -> tuple[float, ...]:
    """Return the Chebyshev coefficients of the polynomial that interpolates ``function`` on [low, high]."""

    def stretched(t: Any) -> Any:
        return np.array([function(low + (high - low) * (u + 1.0) / 2.0) for u in t])

    return tuple(float(c) for c in np.polynomial.chebyshev.chebinterpolate(stretched, degree))


def _small(square: float) -> float:
    x = math.sqrt(square)
    return math.erf(x) / x if x > 1e-8 else 2.0 / math.sqrt(math.pi)


def _large(mapped: float) -> float:
    x = 2.0 * (1.0 + mapped) / (1.0 - mapped)
    return math.exp(x * x) * math.erfc(x)


def _map(x: float) -> float:
    return (x - 2.0) / (x + 2.0)


_SMALL = fit(_small, 0.0, _SPLIT * _SPLIT, 13)
_LARGE = fit(_large, _map(_SPLIT), _map(_END), 20)


def clenshaw(coefficients: tuple[float, ...], t: Expr) -> Expr:
    """Return the Chebyshev series at ``t`` by Clenshaw's recurrence; there are at least three coefficients."""
    *lower, last_but_one, highest = coefficients
    a: Expr = t * highest * 2.0 + last_but_one
    b: Expr | float = highest
    constant, *between = lower
    for coefficient in reversed(between):
        a, b = t * a * 2.0 - b + coefficient, a
    return t * a - b + constant


def erf(x: Expr) -> Expr:
    """Return the formula of erf, with an error of a few units in the last place of the computing dtype."""
    u = abs(x)
    near = f.less(u, _SPLIT)
    # |x| >= split: 1 - exp(-x²)·series, with the sign of x; clamped, so that the series stays in its interval.
    u = u.clip(_SPLIT, _END)
    low, high = _map(_SPLIT), _map(_END)
    t = ((u - 2.0) / (u + 2.0) - 0.5 * (high + low)) * (2.0 / (high - low))
    series = clenshaw(_LARGE, t)
    far = f.copysign(1.0 - f.exp(-(u * u)) * series, x)
    # |x| < split: x·series(x²)
    series = clenshaw(_SMALL, (x * x).clip(0.0, _SPLIT * _SPLIT) * (2.0 / (_SPLIT * _SPLIT)) - 1.0)
    result = where(near, series * x, far)
    return where(f.isnan(x), x, result)
