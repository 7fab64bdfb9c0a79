"""The error function by Chebyshev series, for array modules without it.

Importing this module fits two series to :func:`math.erf` and :func:`math.erfc`: ``erf(x) / x`` in ``x²`` for
``|x| < 1``, and ``exp(x²)·erfc(x)`` in ``(x - 2) / (x + 2)`` for ``1 <= |x| <= 6.5``; beyond that erf is ±1 in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from weftplan.ops.core.expression import BOOL, Kind
from weftplan.support.array_types import ArrayModule, RawArray

ERF_SCRATCH: tuple[Kind, ...] = (*("float",) * 5, BOOL)
"""Kinds of the scratch arrays of :func:`erf`."""
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


def clenshaw(
    xp: ArrayModule, coefficients: tuple[float, ...], t: RawArray, a: RawArray, b: RawArray, c: RawArray
) -> RawArray:
    """Evaluate a Chebyshev series at ``t`` by Clenshaw's recurrence; return the buffer (a, b or c) with the result."""
    a.fill(0.0)
    b.fill(0.0)
    for coefficient in reversed(coefficients[1:]):
        xp.multiply(t, a, out=c)
        xp.multiply(c, 2.0, out=c)
        xp.subtract(c, b, out=c)
        xp.add(c, coefficient, out=c)
        a, b, c = c, a, b
    xp.multiply(t, a, out=c)
    xp.subtract(c, b, out=c)
    xp.add(c, coefficients[0], out=c)
    return c


def erf(
    xp: ArrayModule,
    x: RawArray,
    out: RawArray,
    t: RawArray,
    u: RawArray,
    a: RawArray,
    b: RawArray,
    c: RawArray,
    near: RawArray,
) -> None:
    """Write erf of ``x`` to ``out``, which may be ``x``.

    ``t``, ``u``, ``a``, ``b``, ``c`` (floats) and ``near`` (bool) are scratch of the same size. The error is a few
    units in the last place of the scratch's dtype.
    """
    xp.absolute(x, out=u)
    xp.less(u, _SPLIT, out=near)
    # |x| >= split: 1 - exp(-x²)·series, with the sign of x; clamped, so that the series stays in its interval.
    xp.clip(u, _SPLIT, _END, out=u)
    xp.add(u, 2.0, out=a)
    xp.subtract(u, 2.0, out=t)
    xp.divide(t, a, out=t)
    low, high = _map(_SPLIT), _map(_END)
    xp.subtract(t, 0.5 * (high + low), out=t)
    xp.multiply(t, 2.0 / (high - low), out=t)
    series = clenshaw(xp, _LARGE, t, a, b, c)
    xp.multiply(u, u, out=u)
    xp.negative(u, out=u)
    xp.exp(u, out=u)
    xp.multiply(u, series, out=u)
    xp.subtract(1.0, u, out=u)
    xp.copysign(u, x, out=u, casting="same_kind")
    # |x| < split: x·series(x²)
    xp.multiply(x, x, out=t, casting="same_kind")
    xp.clip(t, 0.0, _SPLIT * _SPLIT, out=t)
    xp.multiply(t, 2.0 / (_SPLIT * _SPLIT), out=t)
    xp.subtract(t, 1.0, out=t)
    series = clenshaw(xp, _SMALL, t, a, b, c)
    xp.multiply(series, x, out=series, casting="same_kind")
    xp.copyto(u, series, where=near)
    xp.isnan(x, out=near)
    xp.copyto(u, x, where=near, casting="same_kind")
    xp.copyto(out, u, casting="unsafe")
