"""Reference convolutions and their gradients in float64, tap by tap, from the definition."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np

from weftplan.ops.nn.conv_geometry import Geometry


def taps(geo: Geometry) -> Iterator[tuple[tuple[int, ...], tuple[slice, ...]]]:
    """Yield each position in the window, and the slices of the padded image that it reads."""
    for tap in product(*map(range, geo.kernel)):
        yield (
            tap,
            tuple(
                slice(t * d, t * d + (g - 1) * s + 1, s)
                for t, d, g, s in zip(tap, geo.dilate, geo.grid, geo.stride, strict=True)
            ),
        )


def reference(geo: Geometry, x: Any, w: Any) -> Any:
    """Return the cross-correlation of ``x`` and ``w`` in float64, without bias."""
    x, w = x.astype(np.float64), w.astype(np.float64)
    padded = np.pad(x, [(0, 0), (0, 0), *((p, p) for p in geo.pad)])
    out = np.zeros((geo.batch, geo.filters, *geo.grid))
    per, of = geo.channels // geo.groups, geo.filters // geo.groups
    for tap, cut in taps(geo):
        for group in range(geo.groups):
            part = padded[(slice(None), slice(group * per, (group + 1) * per), *cut)]
            some = w[(slice(group * of, (group + 1) * of), slice(None), *tap)]
            out[:, group * of : (group + 1) * of] += np.einsum("nc...,kc->nk...", part, some)
    return out


def gradients(geo: Geometry, x: Any, w: Any, dy: Any) -> tuple[Any, Any]:
    """Return the gradients of ``sum(reference * dy)`` with respect to ``x`` and ``w``, in float64."""
    x, w, dy = (a.astype(np.float64) for a in (x, w, dy))
    padded = np.pad(x, [(0, 0), (0, 0), *((p, p) for p in geo.pad)])
    dpadded, dw = np.zeros_like(padded), np.zeros_like(w)
    per, of = geo.channels // geo.groups, geo.filters // geo.groups
    for tap, cut in taps(geo):
        for group in range(geo.groups):
            place = (slice(None), slice(group * per, (group + 1) * per), *cut)
            mine = slice(group * of, (group + 1) * of)
            dpadded[place] += np.einsum("nk...,kc->nc...", dy[:, mine], w[(mine, slice(None), *tap)])
            axes = [0, *range(2, dy.ndim)]
            dw[(mine, slice(None), *tap)] = np.tensordot(dy[:, mine], padded[place], (axes, axes))
    inner = tuple(slice(p, p + e) for p, e in zip(geo.pad, geo.image, strict=True))
    return dpadded[(slice(None), slice(None), *inner)], dw
