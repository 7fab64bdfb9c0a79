"""Image resizing and affine warps with OpenCV's rules, in NumPy, for any dtype and channel count.

Resizing is separable: each axis is resampled in turn, and each new pixel is a weighted sum of a few old pixels that an
index table selects. uint8 results are rounded and differ from OpenCV's fixed-point sums by at most 1. All functions are
thread-safe.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np

from weftplan.data.batch import Host
from weftplan.errors import ParameterError
from weftplan.support.array_types import DTypeLike

NEAREST, LINEAR, CUBIC, AREA, LANCZOS = range(5)
_AREA_LARGER = -1
"""Area interpolation of a growing side: each new pixel copies its old pixel, or blends two at a boundary."""
BY_SIZE, ANY = 9, 10
"""Additional methods: chosen by the sizes, and drawn at random."""


def method_of(interp: int, sizes: Sequence[int] = (), draw: np.random.Generator | None = None) -> int:
    """Resolve ``interp`` to a method of 0 to 4; 9 chooses by ``sizes`` (old and new height and width), 10 at random.

    >>> method_of(9, (10, 10, 20, 20)), method_of(9, (10, 10, 5, 5)), method_of(9, (10, 10, 5, 20)), method_of(9)
    (2, 3, 1, 2)
    """
    if interp == BY_SIZE:
        if not sizes:
            return CUBIC
        old_h, old_w, new_h, new_w = sizes
        larger, smaller = new_h > old_h and new_w > old_w, new_h < old_h and new_w < old_w
        return CUBIC if larger else AREA if smaller else LINEAR
    if interp == ANY:
        assert draw is not None
        return int(draw.integers(0, 5))
    if interp not in range(5):
        raise ParameterError(
            f"interp must be 0 (nearest), 1 (linear), 2 (cubic), 3 (area), 4 (Lanczos), 9 or 10, got {interp!r}"
        )
    return interp


def _linear(x: Host) -> Host:
    return np.where(np.abs(x) < 1, 1 - np.abs(x), 0.0)


def _cubic(x: Host) -> Host:
    """OpenCV's cubic kernel, whose slope parameter is -0.75."""
    x = np.abs(x)
    near = (1.25 * x - 2.25) * x * x + 1
    far = ((-0.75 * x + 3.75) * x - 6) * x + 3
    return np.where(x <= 1, near, np.where(x < 2, far, 0.0))


def _lanczos(x: Host) -> Host:
    return np.where(np.abs(x) < 4, np.sinc(x) * np.sinc(x / 4), 0.0)


_KERNELS: dict[int, tuple[int, Callable[[Host], Host]]] = {CUBIC: (2, _cubic), LANCZOS: (4, _lanczos)}
"""Method -> (taps on each side, weights by distance); all others are linear."""


@lru_cache(maxsize=256)
def _table(old: int, new: int, method: int) -> tuple[Host, Host]:
    """Return (indices, weights) of shape (new, taps): the old pixels of each new pixel."""
    ratio = old / new
    indices = np.arange(new)
    if method == NEAREST:
        index = np.minimum(np.floor(indices * ratio), old - 1).astype(np.intp)
        return index[:, None], np.ones((new, 1), np.float32)
    if method == AREA:
        taps = int(np.ceil(ratio)) + 1
        lowest = np.floor(indices * ratio).astype(np.intp)
        index = lowest[:, None] + np.arange(taps)
        begin, end = indices[:, None] * ratio, (indices[:, None] + 1) * ratio
        weights = np.clip(np.minimum(index + 1, end) - np.maximum(index, begin), 0, None)
    elif method == _AREA_LARGER:
        left = np.floor(indices * ratio)
        share = (indices + 1) - (left + 1) / ratio
        share = np.where(share <= 0, 0.0, share - np.floor(share))
        index = left.astype(np.intp)[:, None] + np.arange(2)
        weights = np.stack([1 - share, share], axis=1)
    else:
        half, kernel = _KERNELS.get(method, (1, _linear))
        centre = (indices + 0.5) * ratio - 0.5
        lowest = np.floor(centre).astype(np.intp)
        index = lowest[:, None] + np.arange(1 - half, 1 + half)
        weights = kernel(centre[:, None] - index)
    weights = weights / weights.sum(axis=1, keepdims=True)
    return np.clip(index, 0, old - 1), weights.astype(np.float32)


def _along(pixels: Host, axis: int, new: int, method: int) -> Host:
    index, weights = _table(pixels.shape[axis], new, method)
    if method == NEAREST:
        return pixels.take(index[:, 0], axis=axis)
    shape = [1] * pixels.ndim
    shape[axis] = new
    total = pixels.take(index[:, 0], axis=axis) * weights[:, 0].reshape(shape)
    for k in range(1, index.shape[1]):
        total += pixels.take(index[:, k], axis=axis) * weights[:, k].reshape(shape)
    return total


def as_dtype(values: Host, dtype: DTypeLike) -> Host:
    """Convert ``values`` to a dtype; for integer dtypes round and clip to the range."""
    dtype = np.dtype(dtype)
    if values.dtype == dtype or dtype.kind not in "iu":
        return values.astype(dtype, copy=False)
    info = np.iinfo(dtype)
    return np.clip(np.rint(values), info.min, info.max).astype(dtype)


def resize(pixels: Host, width: int, height: int, method: int = LINEAR) -> Host:
    """Return an image of shape (rows, columns, channels) in another size.

    Raises:
        ParameterError: a side is below 1.
    """
    if width < 1 or height < 1 or not pixels.size:
        raise ParameterError(f"resize: cannot make {width} x {height} pixels of an image of shape {pixels.shape}")
    if pixels.shape[:2] == (height, width):
        return pixels.copy()
    if method == NEAREST:
        return _along(_along(pixels, 0, height, method), 1, width, method)
    if method == AREA and (height > pixels.shape[0] or width > pixels.shape[1]):
        method = _AREA_LARGER
    floats = np.asarray(pixels, np.float64 if pixels.dtype == np.float64 else np.float32)
    return as_dtype(_along(_along(floats, 0, height, method), 1, width, method), pixels.dtype)


def warp(pixels: Host, matrix: Host, width: int, height: int, method: int, fill: float) -> Host:
    """Warp an image: its pixel at (x, y) moves to ``matrix @ (x, y, 1)``; uncovered pixels become ``fill``."""
    inverse = np.linalg.inv(np.vstack([matrix, [0.0, 0.0, 1.0]]))
    ys, xs = np.mgrid[0:height, 0:width].astype(np.float64)
    x = inverse[0, 0] * xs + inverse[0, 1] * ys + inverse[0, 2]
    y = inverse[1, 0] * xs + inverse[1, 1] * ys + inverse[1, 2]
    if method == NEAREST:
        x, y = np.rint(x), np.rint(y)
    half, kernel = _KERNELS.get(method, (1, _linear))
    rows, columns = pixels.shape[:2]
    first_x, first_y = np.floor(x), np.floor(y)
    taps = range(1 - half, 1 + half)
    total = np.zeros((height, width, pixels.shape[2]), np.float32)
    for dy in taps:
        for dx in taps:
            at_x, at_y = first_x + dx, first_y + dy
            inside = (at_x >= 0) & (at_x < columns) & (at_y >= 0) & (at_y < rows)
            weight = (kernel(x - at_x) * kernel(y - at_y)).astype(np.float32)
            sampled = pixels[np.where(inside, at_y, 0).astype(np.intp), np.where(inside, at_x, 0).astype(np.intp)]
            total += weight[..., None] * np.where(inside[..., None], sampled, np.float32(fill))
    return as_dtype(total, pixels.dtype)


BORDERS = {0: "constant", 1: "edge", 2: "symmetric", 3: "wrap", 4: "reflect"}
"""OpenCV's kinds of borders and NumPy's names for them."""


def border(pixels: Host, top: int, bottom: int, left: int, right: int, kind: int, fill: Sequence[float]) -> Host:
    """Add a border of rows and columns around an image; ``fill`` has a number per channel if ``kind`` is 0.

    Raises:
        ParameterError: another kind, or a margin below 0.
    """
    if kind not in BORDERS or min(top, bottom, left, right) < 0:
        raise ParameterError(f"type must be one of {BORDERS} and margins at least 0, got {kind!r}")
    margins = ((top, bottom), (left, right), (0, 0))
    if kind:
        return np.pad(pixels, margins, BORDERS[kind])  # type: ignore[call-overload,no-any-return]
    rows, columns, channels = pixels.shape
    out = np.empty((rows + top + bottom, columns + left + right, channels), pixels.dtype)
    out[:] = np.resize(np.asarray(fill or [0.0]), channels)
    out[top : top + rows, left : left + columns] = pixels
    return out
