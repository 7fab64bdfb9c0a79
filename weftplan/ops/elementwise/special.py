"""gamma, gammaln, digamma and erfinv, with derivatives, for array modules without them.

The gamma functions reflect arguments below 1/2, shift the argument by the recurrence to at least 8, and use Stirling's
series there. The inverse error function is two Chebyshev series, which importing this module fits to the inverses of
:func:`math.erf` and :func:`math.erfc`: ``erfinv(x) / x`` in x² for ``|x| < 0.9``, and ``erfinv(x) / w`` in
``w = sqrt(-log(1 - |x|))`` beyond. Results in float64 have a relative error of about 1e-13 (gammaln near its zeros: an
absolute error of about 1e-14). Integers are computed in float64, all narrower floats in float32.
"""

from __future__ import annotations

import math
from functools import partial

from weftplan.ops.core.expression import Expr, cast, f, where
from weftplan.ops.elementwise.erf import clenshaw, fit
from weftplan.ops.elementwise.rows import row

_STEPS = 8
_LOG = (1 / 12, -1 / 360, 1 / 1260, -1 / 1680, 1 / 1188, -691 / 360360, 1 / 156)
"""Coefficients of Stirling's series of the logarithm of gamma, in odd powers of 1/z."""
_PSI = (-1 / 12, 1 / 120, -1 / 252, 1 / 240, -1 / 132, 691 / 32760, -1 / 12)
"""Coefficients of the asymptotic series of digamma, in even powers of 1/z."""

_PSI1 = (1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730, 7 / 6)
"""Coefficients of the series of z times digamma's derivative, without 1 and 1 / 2z, in even powers of 1/z."""


def _reflected(x: Expr) -> Expr:
    """Return x, or 1 - x if x < 1/2."""
    return _unreflected(x, x, 1.0 - x)


def _unreflected(x: Expr, value: Expr, reflection: Expr) -> Expr:
    """Return ``value`` if x >= 1/2, else ``reflection``."""
    return where(f.greater_equal(x, 0.5), value, reflection)


def _series(coefficients: tuple[float, ...], z: Expr) -> Expr:
    """Return the polynomial of 1/z² with these coefficients, constant first."""
    t = 1.0 / (z * z)
    *lower, highest = coefficients
    s = highest * t + lower.pop()
    for coefficient in reversed(lower):
        s = s * t + coefficient
    return s


def _stirling(z: Expr) -> tuple[Expr, Expr]:
    """Return s and p so that gamma(z) = exp(s) / p, for z >= 1/2.

    s is the logarithm of gamma at z + n >= 8, after n steps of 1; p is z (z + 1) … (z + n - 1).
    """
    p: Expr | None = None
    for _ in range(_STEPS):
        is_low = f.less(z, _STEPS)
        factor = where(is_low, z, cast(1.0, "float"))
        p = factor if p is None else p * factor
        z = z + is_low
    assert p is not None
    s = _series(_LOG, z) / z
    s = s + (f.log(z) - 1.0) * (z - 0.5)  # (z - 1/2) log z - z + 1/2, finite or infinite but never inf - inf
    return s + (0.5 * math.log(2.0 * math.pi) - 0.5), p


def _turn(x: Expr) -> tuple[Expr, Expr]:
    """Return pi (x - t), whose sine or tangent a reflection needs, and t, the integer nearest to x."""
    z = cast(x, "float")
    t = f.rint(z)
    return (z - t) * math.pi, t


def _climb(x: Expr, power: int) -> tuple[Expr, Expr]:
    """Return z: x, reflected and raised in steps of 1 to at least 8, and the sum of 1 / z^power over the steps."""
    z, total = _reflected(x), None
    for _ in range(_STEPS):
        is_low = f.less(z, _STEPS)
        term = is_low / z if power == 1 else is_low / z / z
        total = term if total is None else total + term
        z = z + is_low
    assert total is not None
    return z, total


def _at_poles(x: Expr, t: Expr, below: str, pole: float, value: Expr) -> Expr:
    """Return ``pole`` if x is the integer t and less than 0 (or equal, by the comparison ``below``), else ``value``."""
    inner = where(getattr(f, below)(x, 0), pole, value)
    return where(f.equal(t, x), inner, value)


def _gamma(x: Expr) -> Expr:
    s, p = _stirling(_reflected(x))
    s = f.exp(s) / p  # gamma of x, or of 1 - x
    # Reflection: gamma(x) = pi / (sin(pi x) gamma(1 - x)), where sin(pi x) = (-1)^k sin(pi (x - k)), k the nearest.
    z, t = _turn(x)
    z = math.pi / (f.sin(z) * (abs(f.fmod(t, 2.0)) * -2.0 + 1.0) * s)
    # NaN at negative integers, since the limits from both sides differ in sign; infinite at 0.
    return _at_poles(x, t, "less", math.nan, _unreflected(x, s, z))


def gammaln(x: Expr) -> Expr:
    """Return log |gamma(x)|."""
    s, p = _stirling(_reflected(x))
    s = s - f.log(p)
    z = f.log(math.pi / abs(f.sin(_turn(x)[0]))) - s
    result = _unreflected(x, s, z)
    return where(f.isinf(x), math.inf, result)


def digamma(x: Expr) -> Expr:
    """Return digamma of x, infinite at its poles, as in MXNet 1.9.1."""
    z, total = _climb(x, 1)
    s = _series((0.0, *_PSI), z) - total
    s = s + f.log(z) - 0.5 / z
    # Reflection: psi(x) = psi(1 - x) - pi / tan(pi x)
    z, t = _turn(x)
    z = s - math.pi / f.tan(z)
    return _at_poles(x, t, "less_equal", math.inf, _unreflected(x, s, z))


def _psi1(x: Expr) -> Expr:
    """Return the derivative of digamma at x, infinite at the poles."""
    z, total = _climb(x, 2)
    s = (_series((0.0, *_PSI1), z) + 1.0) / z + total
    s = s + 0.5 / z / z
    # Reflection: psi'(x) = (pi / sin(pi x))² - psi'(1 - x)
    z = (math.pi / f.sin(_turn(x)[0])).square() - s
    return _unreflected(x, s, z)


# ------------------------------------------------------------------------------------------------------ erfinv

_CENTRE = 0.9
_FAR_LOW = math.sqrt(-math.log(1.0 - _CENTRE))
_FAR_HIGH = math.sqrt(53.0 * math.log(2.0))
"""The w of the largest float64 below 1, ``1 - 2**-53``, up to rounding."""


def _near(square: float) -> float:
    """Return erfinv(x) / x for x² = ``square``, by Newton's method on erf."""
    x = math.sqrt(square)
    if x < 1e-8:
        return math.sqrt(math.pi) / 2.0
    y = x
    for _ in range(60):
        y -= (math.erf(y) - x) * math.sqrt(math.pi) / 2.0 * math.exp(y * y)
    return y / x


def _far(w: float) -> float:
    """Return erfinv(x) / w for 1 - x = exp(-w²), by Newton's method on the logarithm of erfc."""
    y = w
    for _ in range(60):
        tail = math.erfc(y)
        y += (math.log(tail) + w * w) * tail * math.sqrt(math.pi) / 2.0 * math.exp(y * y)
    return y / w


_NEAR = fit(_near, 0.0, _CENTRE * _CENTRE, 30)
_FAR = fit(_far, _FAR_LOW, _FAR_HIGH, 30)


def _erfinv(x: Expr) -> Expr:
    """Return erfinv of x: ±infinity at ±1, NaN beyond."""
    u = cast(x, "float")
    w = f.sqrt(-f.log(1.0 - abs(u)))  # inf at ±1, nan beyond
    t = (w.clip(_FAR_LOW, _FAR_HIGH) - 0.5 * (_FAR_LOW + _FAR_HIGH)) * (2.0 / (_FAR_HIGH - _FAR_LOW))
    far = f.copysign(w * clenshaw(_FAR, t), u)
    is_near = f.less(abs(u), _CENTRE)
    t = (u * u).clip(0.0, _CENTRE * _CENTRE) * (2.0 / (_CENTRE * _CENTRE)) - 1.0
    return where(is_near, clenshaw(_NEAR, t) * u, far)


# ------------------------------------------------------------------------------------------------------ the operators

_in_float = partial(row, compute="float", grad_compute="float")
_in_float("gamma", _gamma, lambda g, x, y: _gamma(x) * digamma(x) * g, doc="The gamma function: (x - 1)! of whole x.")
_in_float("gammaln", gammaln, lambda g, x, y: digamma(x) * g,
          doc="Logarithm of the absolute value of the gamma function.")  # fmt: skip
_in_float("digamma", digamma, lambda g, x, y: _psi1(x) * g, in_mxnet=False,  # MXNet 2.0 has it
          doc="Derivative of the logarithm of the gamma function; infinite at its poles.")  # fmt: skip
_in_float("erfinv", _erfinv, lambda g, x, y: f.exp(y * y) * (math.sqrt(math.pi) / 2.0) * g,
          doc="Inverse of the Gauss error function, on [-1, 1].")  # fmt: skip
