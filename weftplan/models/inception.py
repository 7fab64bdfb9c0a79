"""Inception v3, for 299x299 images.

Its blocks run parallel branches and concatenate their channels (Szegedy et al., 2016). A call builds a symbol and is
stateless.
"""

from __future__ import annotations

from weftplan import symbol as sym
from weftplan.models.layers import Pair, classify, concat, conv_bn_relu, pool
from weftplan.symbol import Symbol

Step = tuple[int, int | Pair, int, int | Pair]
"""Filters, kernel, stride and pad of a convolution."""


def _chain(x: Symbol, *steps: Step) -> Symbol:
    for filters, kernel, stride, pad in steps:
        x = conv_bn_relu(x, filters, kernel, stride, pad, eps=1e-3)
    return x


def _pooled(x: Symbol, filters: int) -> Symbol:
    return _chain(pool(x, "avg", 3, 1, 1), (filters, 1, 1, 0))


def _grid35(x: Symbol, pooled: int) -> Symbol:
    """Add a block of the 35x35 grid."""
    return concat(
        [
            _chain(x, (64, 1, 1, 0)),
            _chain(x, (48, 1, 1, 0), (64, 5, 1, 2)),
            _chain(x, (64, 1, 1, 0), (96, 3, 1, 1), (96, 3, 1, 1)),
            _pooled(x, pooled),
        ]
    )


def _to_grid17(x: Symbol) -> Symbol:
    """Reduce 35x35 to 17x17."""
    return concat(
        [
            _chain(x, (384, 3, 2, 0)),
            _chain(x, (64, 1, 1, 0), (96, 3, 1, 1), (96, 3, 2, 0)),
            pool(x, "max", 3, 2),
        ]
    )


def _grid17(x: Symbol, n: int) -> Symbol:
    """Add a block of the 17x17 grid: 7x7 convolutions split into 1x7 and 7x1, ``n`` filters inside."""
    row: tuple[Pair, int, Pair] = ((1, 7), 1, (0, 3))
    column: tuple[Pair, int, Pair] = ((7, 1), 1, (3, 0))
    return concat(
        [
            _chain(x, (192, 1, 1, 0)),
            _chain(x, (n, 1, 1, 0), (n, *row), (192, *column)),
            _chain(x, (n, 1, 1, 0), (n, *column), (n, *row), (n, *column), (192, *row)),
            _pooled(x, 192),
        ]
    )


def _to_grid8(x: Symbol) -> Symbol:
    """Reduce 17x17 to 8x8."""
    return concat(
        [
            _chain(x, (192, 1, 1, 0), (320, 3, 2, 0)),
            _chain(x, (192, 1, 1, 0), (192, (1, 7), 1, (0, 3)), (192, (7, 1), 1, (3, 0)), (192, 3, 2, 0)),
            pool(x, "max", 3, 2),
        ]
    )


def _fork(x: Symbol) -> Symbol:
    """Add a 3x3 convolution split into parallel 1x3 and 3x1 convolutions."""
    return concat([_chain(x, (384, (1, 3), 1, (0, 1))), _chain(x, (384, (3, 1), 1, (1, 0)))])


def _grid8(x: Symbol) -> Symbol:
    """Add a block of the 8x8 grid."""
    return concat(
        [
            _chain(x, (320, 1, 1, 0)),
            _fork(_chain(x, (384, 1, 1, 0))),
            _fork(_chain(x, (448, 1, 1, 0), (384, 3, 1, 1))),
            _pooled(x, 192),
        ]
    )


def inception_v3(classes: int = 1000) -> Symbol:
    """Build Inception v3 without the auxiliary classifier."""
    x = _chain(sym.Variable("data"), (32, 3, 2, 0), (32, 3, 1, 0), (64, 3, 1, 1))
    x = _chain(pool(x, "max", 3, 2), (80, 1, 1, 0), (192, 3, 1, 0))
    x = pool(x, "max", 3, 2)
    for pooled in (32, 64, 64):
        x = _grid35(x, pooled)
    x = _to_grid17(x)
    for n in (128, 160, 160, 192):
        x = _grid17(x, n)
    x = _to_grid8(x)
    x = _grid8(_grid8(x))
    x = sym.Dropout(pool(x, "avg", 8, 8), p=0.5)
    return classify(x, classes)
