"""gamma, gammaln, digamma and erfinv, with derivatives, for array modules without them.

The gamma functions reflect arguments below 1/2, shift the argument by the recurrence to at least 8, and use Stirling's
series there. The inverse error function is two Chebyshev series, which importing this module fits to the inverses of
:func:`math.erf` and :func:`math.erfc`: ``erfinv(x) / x`` in x² for ``|x| < 0.9``, and ``erfinv(x) / w`` in
``w = sqrt(-log(1 - |x|))`` beyond. Results in float64 have a relative error of about 1e-13 (gammaln near its zeros: an
absolute error of about 1e-14). Integers are computed in float64, all narrower floats in float32.
"""

from __future__ import annotations

import math

import numpy as np

from weftplan.ops.core.expression import BOOL, Expr, Kind, apply, cast, f
from weftplan.ops.elementwise.erf import clenshaw, fit
from weftplan.ops.elementwise.rows import row
from weftplan.support.array_types import ArrayModule, RawArray

_DOUBLE = np.dtype(np.float64)
_STEPS = 8
_LOG = (1 / 12, -1 / 360, 1 / 1260, -1 / 1680, 1 / 1188, -691 / 360360, 1 / 156)
"""Coefficients of Stirling's series of the logarithm of gamma, in odd powers of 1/z."""
_PSI = (-1 / 12, 1 / 120, -1 / 252, 1 / 240, -1 / 132, 691 / 32760, -1 / 12)
"""Coefficients of the asymptotic series of digamma, in even powers of 1/z."""

_PSI1 = (1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730, 7 / 6)
"""Coefficients of the series of z times digamma's derivative, without 1 and 1 / 2z, in even powers of 1/z."""


def _reflected(xp: ArrayModule, x: RawArray, z: RawArray, m: RawArray) -> None:
    """Set ``z`` to x, or to 1 - x if x < 1/2; ``m`` becomes x >= 1/2."""
    xp.subtract(1.0, x, out=z, casting="unsafe")
    xp.greater_equal(x, 0.5, out=m)
    xp.copyto(z, x, where=m)


def _series(xp: ArrayModule, coefficients: tuple[float, ...], z: RawArray, s: RawArray, t: RawArray) -> None:
    """Set ``s`` to the polynomial of 1/z² with these coefficients, constant first; ``t`` is scratch."""
    xp.multiply(z, z, out=t)
    xp.divide(1.0, t, out=t)
    s.fill(coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        xp.multiply(s, t, out=s)
        xp.add(s, coefficient, out=s)


def _stirling(xp: ArrayModule, z: RawArray, p: RawArray, s: RawArray, t: RawArray, m: RawArray) -> None:
    """Set ``s`` and ``p`` so that gamma(z) = exp(s) / p, for z >= 1/2; ``z`` is overwritten.

    ``s`` is the logarithm of gamma at z + n >= 8, after n steps of 1; ``p`` is z (z + 1) … (z + n - 1).
    """
    p.fill(1.0)
    for _ in range(_STEPS):
        xp.less(z, _STEPS, out=m)
        t.fill(1.0)
        xp.copyto(t, z, where=m)
        xp.multiply(p, t, out=p)
        xp.add(z, m, out=z)
    _series(xp, _LOG, z, s, t)
    xp.divide(s, z, out=s)
    xp.log(z, out=t)
    xp.subtract(t, 1.0, out=t)
    xp.subtract(z, 0.5, out=z)
    xp.multiply(t, z, out=t)  # (z - 1/2) log z - z + 1/2, finite or infinite but never inf - inf
    xp.add(s, t, out=s)
    xp.add(s, 0.5 * math.log(2.0 * math.pi) - 0.5, out=s)


def _turn(xp: ArrayModule, x: RawArray, z: RawArray, t: RawArray) -> None:
    """Set ``t`` to the integer nearest to x, and ``z`` to pi (x - t), whose sine or tangent a reflection needs."""
    xp.copyto(z, x)
    xp.rint(z, out=t)
    xp.subtract(z, t, out=z)
    xp.multiply(z, math.pi, out=z)


def _unreflected(xp: ArrayModule, x: RawArray, z: RawArray, s: RawArray, m: RawArray) -> None:
    """Set ``z`` to ``s`` if x >= 1/2, that is, without reflection."""
    xp.greater_equal(x, 0.5, out=m)
    xp.copyto(z, s, where=m)


def _climb(xp: ArrayModule, x: RawArray, z: RawArray, p: RawArray, t: RawArray, m: RawArray, *, power: int) -> None:
    """Set ``z`` to x, reflected and raised in steps of 1 to at least 8; ``p`` sums 1 / z^power over the steps."""
    _reflected(xp, x, z, m)
    p.fill(0.0)
    for _ in range(_STEPS):
        xp.less(z, _STEPS, out=m)
        xp.divide(m, z, out=t)
        if power == 2:
            xp.divide(t, z, out=t)
        xp.add(p, t, out=p)
        xp.add(z, m, out=z)


def _gamma(
    xp: ArrayModule, x: RawArray, out: RawArray, z: RawArray, p: RawArray, s: RawArray, t: RawArray, m: RawArray
) -> None:
    """Write gamma of ``x`` to ``out``, which may be ``x``."""
    _reflected(xp, x, z, m)
    _stirling(xp, z, p, s, t, m)
    xp.exp(s, out=s)
    xp.divide(s, p, out=s)  # gamma of x, or of 1 - x
    # Reflection: gamma(x) = pi / (sin(pi x) gamma(1 - x)), where sin(pi x) = (-1)^k sin(pi (x - k)), k the nearest.
    _turn(xp, x, z, t)
    xp.sin(z, out=z)
    xp.fmod(t, 2.0, out=p)
    xp.absolute(p, out=p)
    xp.multiply(p, -2.0, out=p)
    xp.add(p, 1.0, out=p)
    xp.multiply(z, p, out=z)
    xp.multiply(z, s, out=z)
    xp.divide(math.pi, z, out=z)
    _unreflected(xp, x, z, s, m)
    # NaN at negative integers, since the limits from both sides differ in sign; infinite at 0.
    xp.equal(t, x, out=m)
    xp.less(x, 0, out=p, casting="unsafe")
    xp.multiply(m, p, out=m, casting="unsafe")
    xp.copyto(z, math.nan, where=m)
    xp.copyto(out, z, casting="unsafe")


def _gammaln(
    xp: ArrayModule, x: RawArray, out: RawArray, z: RawArray, p: RawArray, s: RawArray, t: RawArray, m: RawArray
) -> None:
    """Write the logarithm of the absolute value of gamma of ``x`` to ``out``, which may be ``x``."""
    _reflected(xp, x, z, m)
    _stirling(xp, z, p, s, t, m)
    xp.log(p, out=p)
    xp.subtract(s, p, out=s)
    _turn(xp, x, z, t)
    xp.sin(z, out=z)
    xp.absolute(z, out=z)
    xp.divide(math.pi, z, out=z)
    xp.log(z, out=z)
    xp.subtract(z, s, out=z)
    _unreflected(xp, x, z, s, m)
    xp.isinf(x, out=m)
    xp.copyto(z, math.inf, where=m)
    xp.copyto(out, z, casting="unsafe")


def _psi(xp: ArrayModule, x: RawArray, z: RawArray, p: RawArray, s: RawArray, t: RawArray, m: RawArray) -> None:
    """Set ``z`` to digamma of ``x``, infinite at its poles, as in MXNet 1.9.1."""
    _climb(xp, x, z, p, t, m, power=1)
    _series(xp, (0.0, *_PSI), z, s, t)
    xp.subtract(s, p, out=s)
    xp.log(z, out=t)
    xp.add(s, t, out=s)
    xp.divide(0.5, z, out=t)
    xp.subtract(s, t, out=s)
    # Reflection: psi(x) = psi(1 - x) - pi / tan(pi x)
    _turn(xp, x, z, t)
    xp.tan(z, out=z)
    xp.divide(math.pi, z, out=z)
    xp.subtract(s, z, out=z)
    _unreflected(xp, x, z, s, m)
    xp.equal(t, x, out=m)
    xp.less_equal(x, 0, out=p, casting="unsafe")
    xp.multiply(m, p, out=m, casting="unsafe")
    xp.copyto(z, math.inf, where=m)


def _psi1(xp: ArrayModule, x: RawArray, z: RawArray, p: RawArray, s: RawArray, t: RawArray, m: RawArray) -> None:
    """Set ``z`` to the derivative of digamma at ``x``, infinite at the poles."""
    _climb(xp, x, z, p, t, m, power=2)
    _series(xp, (0.0, *_PSI1), z, s, t)
    xp.add(s, 1.0, out=s)
    xp.divide(s, z, out=s)
    xp.add(s, p, out=s)
    xp.divide(0.5, z, out=t)
    xp.divide(t, z, out=t)
    xp.add(s, t, out=s)
    # Reflection: psi'(x) = (pi / sin(pi x))² - psi'(1 - x)
    _turn(xp, x, z, t)
    xp.sin(z, out=z)
    xp.divide(math.pi, z, out=z)
    xp.multiply(z, z, out=z)
    xp.subtract(z, s, out=z)
    _unreflected(xp, x, z, s, m)


def _room(xp: ArrayModule, x: RawArray) -> tuple[RawArray, ...]:
    """Return the scratch arrays (z, p, s, t, m) of the functions above, newly allocated in the shape of ``x``."""
    return *(xp.empty(x.shape, _DOUBLE) for _ in range(4)), xp.empty(x.shape, bool)


def gammaln_of(xp: ArrayModule, x: RawArray) -> RawArray:
    """Return a new array of log |gamma(x)|, for small float64 arrays: it also allocates all scratch."""
    out: RawArray = xp.empty(x.shape, _DOUBLE)
    _gammaln(xp, x, out, *_room(xp, x))
    return out


def digamma_of(xp: ArrayModule, x: RawArray) -> RawArray:
    """Return a new array of digamma(x), the derivative of :func:`gammaln_of`, for small float64 arrays."""
    z, *others = _room(xp, x)
    _psi(xp, x, z, *others)
    return z


# ------------------------------------------------------------------------------------------------------ erfinv

_CENTRE = 0.9
_FIRST = math.sqrt(-math.log(1.0 - _CENTRE))
_LAST = math.sqrt(53.0 * math.log(2.0))
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
_FAR = fit(_far, _FIRST, _LAST, 30)


def _erfinv(
    xp: ArrayModule,
    x: RawArray,
    out: RawArray,
    u: RawArray,
    w: RawArray,
    t: RawArray,
    a: RawArray,
    b: RawArray,
    c: RawArray,
    m: RawArray,
) -> None:
    """Write erfinv of ``x`` to ``out``: ±infinity at ±1, NaN beyond."""
    xp.copyto(u, x)
    xp.absolute(u, out=w)
    xp.subtract(1.0, w, out=w)
    xp.log(w, out=w)
    xp.negative(w, out=w)
    xp.sqrt(w, out=w)  # inf at ±1, nan beyond
    xp.clip(w, _FIRST, _LAST, out=t)
    xp.subtract(t, 0.5 * (_FIRST + _LAST), out=t)
    xp.multiply(t, 2.0 / (_LAST - _FIRST), out=t)
    series = clenshaw(xp, _FAR, t, a, b, c)
    xp.multiply(w, series, out=w)
    xp.copysign(w, u, out=w)
    xp.absolute(u, out=t)
    xp.less(t, _CENTRE, out=m)
    xp.multiply(u, u, out=t)
    xp.clip(t, 0.0, _CENTRE * _CENTRE, out=t)
    xp.multiply(t, 2.0 / (_CENTRE * _CENTRE), out=t)
    xp.subtract(t, 1.0, out=t)
    series = clenshaw(xp, _NEAR, t, a, b, c)
    xp.multiply(series, u, out=series)
    xp.copyto(w, series, where=m)
    xp.copyto(out, w, casting="unsafe")


# ------------------------------------------------------------------------------------------------------ the operators

_FOUR: tuple[Kind, ...] = (*("float",) * 4, BOOL)
_THREE = _FOUR[1:]


def _digamma(x: Expr) -> Expr:
    return apply(_psi, x, scratch=_THREE, kind="float", separate=True)


row(
    "gamma",
    lambda x: apply(_gamma, x, scratch=_FOUR),
    lambda g, x, y: apply(_gamma, x, scratch=_FOUR, kind="float") * _digamma(x) * g,
    grad_compute="float",
    doc="The gamma function: (x - 1)! of whole x.",
)
row(
    "gammaln",
    lambda x: apply(_gammaln, x, scratch=_FOUR),
    lambda g, x, y: _digamma(x) * g,
    doc="Logarithm of the absolute value of the gamma function.",
)
row(
    "digamma",
    lambda x: cast(_digamma(x), None),
    lambda g, x, y: apply(_psi1, x, scratch=_THREE, kind="float", separate=True) * g,
    in_mxnet=False,  # MXNet 2.0 has it
    doc="Derivative of the logarithm of the gamma function; infinite at its poles.",
)
row(
    "erfinv",
    lambda x: apply(_erfinv, x, scratch=(*("float",) * 6, BOOL)),
    lambda g, x, y: f.exp(y * y) * (math.sqrt(math.pi) / 2.0) * g,
    grad_compute="float",
    doc="Inverse of the Gauss error function, on [-1, 1].",
)
