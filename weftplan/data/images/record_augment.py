"""Augmentation settings and pipeline of ``ImageRecordIter`` for a single image.

Pure functions of pixels, settings and a generator; all are thread-safe.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from weftplan.data.batch import Host
from weftplan.data.images.augmenters import PCA_VALUES, PCA_VECTORS
from weftplan.data.images.resampling import as_dtype, border, method_of, resize, warp
from weftplan.errors import ParameterError, ShapeError

_GREY = np.array([0.299, 0.587, 0.114], np.float32)


@dataclass(frozen=True, slots=True)
class Augmentation:
    """Settings under MXNet's names; a default does nothing.

    In this order: ``resize`` (pixels of the shorter side); turned, sheared, scaled and stretched at random (``rotate``
    or up to ``max_rotate_angle`` degrees, ``max_shear_ratio``, ``min_random_scale`` to ``max_random_scale``,
    ``max_aspect_ratio``), within ``min_img_size`` to ``max_img_size``; ``pad`` pixels of ``fill_value`` around; a crop
    in the middle or (``rand_crop``) anywhere, of a side from ``min_crop_size`` to ``max_crop_size``, or
    (``random_resized_crop``) of a share of the area from ``min_random_area`` to ``max_random_area``; ``brightness``,
    ``contrast`` and ``saturation`` in a random order; ``random_h``, ``random_l`` and ``random_s`` added to hue (of
    180), lightness and saturation (of 255); ``pca_noise``; ``rand_mirror``, or ``mirror`` always; then minus the mean,
    times a contrast, plus an illumination (``max_random_contrast``, ``max_random_illumination``), times ``scale``,
    divided by the standard deviation.
    """

    resize: int = -1
    rotate: int = -1
    max_rotate_angle: int = 0
    max_shear_ratio: float = 0.0
    min_random_scale: float = 1.0
    max_random_scale: float = 1.0
    min_aspect_ratio: float | None = None
    max_aspect_ratio: float = 0.0
    min_img_size: float = 0.0
    max_img_size: float = 1e10
    pad: int = 0
    fill_value: int = 255
    rand_crop: bool = False
    min_crop_size: int = -1
    max_crop_size: int = -1
    random_resized_crop: bool = False
    min_random_area: float = 1.0
    max_random_area: float = 1.0
    brightness: float = 0.0
    contrast: float = 0.0
    saturation: float = 0.0
    random_h: int = 0
    random_s: int = 0
    random_l: int = 0
    pca_noise: float = 0.0
    mirror: bool = False
    rand_mirror: bool = False
    mean_r: float = 0.0
    mean_g: float = 0.0
    mean_b: float = 0.0
    mean_a: float = 0.0
    std_r: float = 1.0
    std_g: float = 1.0
    std_b: float = 1.0
    std_a: float = 1.0
    scale: float = 1.0
    max_random_contrast: float = 0.0
    max_random_illumination: float = 0.0
    inter_method: int = 1

    def __post_init__(self) -> None:
        method_of(self.inter_method, draw=np.random.Generator(np.random.Philox(0)))
        for low, high in (("min_random_scale", "max_random_scale"), ("min_random_area", "max_random_area"),
                          ("min_crop_size", "max_crop_size")):  # fmt: skip
            if getattr(self, low) > getattr(self, high):
                raise ParameterError(f"{low}={getattr(self, low)} is above {high}={getattr(self, high)}")

    @property
    def moves(self) -> bool:
        """Whether the settings include an affine transformation."""
        stretched = self.max_aspect_ratio != 0 and not self.random_resized_crop
        scaled = self.min_random_scale != 1 or self.max_random_scale != 1
        sized = self.max_img_size < 1e10 or self.min_img_size > 0
        return self.rotate > 0 or self.max_rotate_angle > 0 or self.max_shear_ratio > 0 or scaled or stretched or sized


def augment(pixels: Host, to: Augmentation, shape: tuple[int, ...], draw: np.random.Generator) -> Host:
    """Return the augmented image as uint8 of ``shape`` (channels, height, width); see :class:`Augmentation`.

    Raises:
        ShapeError: it is smaller than the crop.
    """
    if to.resize > 0:
        h, w = pixels.shape[:2]
        size = (to.resize, to.resize * h // w) if h > w else (to.resize * w // h, to.resize)
        pixels = resized(pixels, size, to, draw)
    if to.moves:
        pixels = _moved(pixels, to, draw)
    if to.pad > 0:
        pixels = border(pixels, to.pad, to.pad, to.pad, to.pad, 0, [to.fill_value])
    pixels = _cropped(pixels, to, (shape[2], shape[1]), draw)
    if shape[0] == 3:
        pixels = coloured(pixels, to, draw)
    if to.mirror or (to.rand_mirror and draw.random() < 0.5):
        pixels = pixels[:, ::-1]
    return pixels.transpose(2, 0, 1)


def normalized(pixels: Host, to: Augmentation, mean: Host | None, draw: np.random.Generator) -> Host:
    """Return the pixels as float32: minus the mean (of each pixel, or each channel's setting), scaled, divided."""
    stds = [to.std_r, to.std_g, to.std_b, to.std_a][: len(pixels)]
    values = pixels.astype(np.float32)
    values -= _mean(to, len(pixels), mean)
    if to.max_random_contrast or to.max_random_illumination:
        values *= np.float32(1 + draw.uniform(-to.max_random_contrast, to.max_random_contrast))
        values += np.float32(draw.uniform(-to.max_random_illumination, to.max_random_illumination))
    if to.scale != 1:
        values *= np.float32(to.scale)
    if any(std != 1 for std in stds):
        values /= np.array(stds, np.float32)[:, None, None]
    return values


def signed_bytes(pixels: Host, to: Augmentation, mean: Host | None) -> Host:
    """Return the pixels minus the rounded mean, clipped to [-128, 127], as int8."""
    mean = _mean(to, len(pixels), mean)
    rounded = np.trunc(mean + np.copysign(0.5, mean))  # halves away from 0, as in MXNet 1.9.1
    signed: Host = np.clip(pixels - rounded, -128, 127).astype(np.int8)
    return signed


def _mean(to: Augmentation, channels: int, mean: Host | None) -> Host:
    """Return the mean of each pixel from the file if there is one, else the mean of each channel from the settings."""
    if mean is not None:
        return mean
    return np.array([to.mean_r, to.mean_g, to.mean_b, to.mean_a][:channels], np.float32)[:, None, None]


def resized(pixels: Host, size: tuple[int, int], to: Augmentation, draw: np.random.Generator) -> Host:
    """Return the image in the size (width, height)."""
    if pixels.shape[:2] == (size[1], size[0]):
        return pixels
    sizes = (*pixels.shape[:2], size[1], size[0])
    return resize(pixels, *size, method_of(to.inter_method, sizes, draw))


def _moved(pixels: Host, to: Augmentation, draw: np.random.Generator) -> Host:
    """Rotate, shear, scale and stretch around the centre."""
    rows, columns = pixels.shape[:2]
    shear = draw.uniform(-to.max_shear_ratio, to.max_shear_ratio)
    angle = to.rotate if to.rotate > 0 else int(draw.integers(-to.max_rotate_angle, to.max_rotate_angle + 1))
    scale = draw.uniform(to.min_random_scale, to.max_random_scale)
    stretch = 0.0 if to.random_resized_crop else to.max_aspect_ratio
    ratio = 1 + draw.uniform(-stretch, stretch)
    high, wide = 2 * scale / (1 + ratio), 2 * scale * ratio / (1 + ratio)
    cos, sin = np.cos(np.deg2rad(angle)), np.sin(np.deg2rad(angle))
    target = np.clip(scale * np.array([columns, rows]), to.min_img_size, to.max_img_size)
    turn = np.array([[high * cos - shear * sin * wide, high * sin + shear * cos * wide], [-sin * wide, cos * wide]])
    shift = target / 2 - turn @ (np.array([columns, rows]) / 2)
    width, height = (max(1, int(side)) for side in target)
    sizes = (rows, columns, height, width)
    method = method_of(to.inter_method, sizes, draw)
    return warp(pixels, np.column_stack([turn, shift]), width, height, method, to.fill_value)


def _cropped(pixels: Host, to: Augmentation, size: tuple[int, int], draw: np.random.Generator) -> Host:
    rows, columns = pixels.shape[:2]
    if to.random_resized_crop:
        lowest = 1 - to.max_aspect_ratio if to.min_aspect_ratio is None else to.min_aspect_ratio
        highest = 1 + to.max_aspect_ratio if to.min_aspect_ratio is None else to.max_aspect_ratio
        for _ in range(10):
            area = draw.uniform(to.min_random_area, to.max_random_area) * rows * columns
            ratio = draw.uniform(lowest, highest)
            width, height = round(np.sqrt(area * ratio)), round(np.sqrt(area / ratio))
            if 1 <= width <= columns and 1 <= height <= rows:
                return resized(_part(pixels, width, height, to, draw), size, to, draw)
        side = min(rows, columns)
        return resized(_middle(pixels, side, side), size, to, draw)
    if to.max_crop_size > 0:
        side = int(draw.integers(max(1, to.min_crop_size), to.max_crop_size + 1))
        if side > min(rows, columns):
            raise ShapeError(f"an image of {columns} x {rows} pixels has no crop of {side} (max_crop_size)")
        return resized(_part(pixels, side, side, to, draw), size, to, draw)
    if rows < size[1]:  # as in MXNet, an image that is too small is enlarged, first to the height, then to the width
        pixels = resized(pixels, (int(np.float32(size[1]) / np.float32(rows) * np.float32(columns)), size[1]), to, draw)
        rows, columns = pixels.shape[:2]
    if columns < size[0]:
        pixels = resized(pixels, (size[0], int(np.float32(size[0]) / np.float32(columns) * np.float32(rows))), to, draw)
    return _part(pixels, *size, to, draw)


def _part(pixels: Host, width: int, height: int, to: Augmentation, draw: np.random.Generator) -> Host:
    """Crop at a random position if ``rand_crop`` is set, else at the centre."""
    if not (to.rand_crop or to.random_resized_crop):
        return _middle(pixels, width, height)
    y, x = (int(draw.integers(0, old - new + 1)) for old, new in zip(pixels.shape[:2], (height, width), strict=True))
    return pixels[y : y + height, x : x + width]


def _middle(pixels: Host, width: int, height: int) -> Host:
    y, x = (pixels.shape[0] - height) // 2, (pixels.shape[1] - width) // 2
    return pixels[y : y + height, x : x + width]


def coloured(pixels: Host, to: Augmentation, draw: np.random.Generator) -> Host:
    """Return the image with its colours changed at random."""
    values: Any = None
    if to.brightness or to.contrast or to.saturation:
        values = pixels.astype(np.float32)
        for which in draw.permutation(3):
            width = (to.brightness, to.contrast, to.saturation)[which]
            share = np.float32(1 + draw.uniform(-width, width))
            if which == 0:
                values = values * share
            elif width:
                grey = (values @ _GREY)[..., None]
                values = values * share + (grey.mean(dtype=np.float32) if which == 1 else grey) * (1 - share)
    if to.random_h or to.random_s or to.random_l:
        limits = (to.random_h, to.random_l, to.random_s)
        moves = [int(draw.integers(-limit, limit + 1)) for limit in limits]
        values = _from_hls(_to_hls(pixels if values is None else values), moves)
    if to.pca_noise > 0:
        alpha = draw.normal(0, to.pca_noise, 3)
        values = (pixels if values is None else values) + ((PCA_VECTORS * alpha) @ PCA_VALUES).astype(np.float32)
    return pixels if values is None else as_dtype(values, np.uint8)


def _to_hls(values: Host) -> Host:
    """Hue (0 to 180), lightness and saturation (0 to 255) of red, green and blue."""
    rgb = np.clip(values, 0, 255).astype(np.float32) / 255
    high, low = rgb.max(axis=2), rgb.min(axis=2)
    span, total = high - low, high + low
    safe = np.where(span > 0, span, 1)
    red, green, blue = rgb[..., 0], rgb[..., 1], rgb[..., 2]
    hue = np.where(
        high == red, (green - blue) / safe, np.where(high == green, 2 + (blue - red) / safe, 4 + (red - green) / safe)
    )
    hue = np.where(span > 0, hue * 30 % 180, 0)
    saturation = np.where(span > 0, span / np.maximum(np.where(total < 1, total, 2 - total), 1e-12), 0)
    return np.stack([hue, total * 127.5, saturation * 255], axis=2)


def _from_hls(hls: Host, moves: list[int]) -> Host:
    """Red, green and blue of hue, lightness and saturation, moved within their limits."""
    hue = np.clip(hls[..., 0] + moves[0], 0, 180) / 30
    light = np.clip(hls[..., 1] + moves[1], 0, 255) / 255
    saturation = np.clip(hls[..., 2] + moves[2], 0, 255) / 255
    reach = saturation * np.minimum(light, 1 - light)
    parts = []
    for start in (0, 4, 2):  # red, green, blue: a sixth of the circle is 1
        sector = (start + hue) % 6
        parts.append(light + reach * np.clip(np.minimum(np.abs(sector - 3) - 1, 1), -1, 1))
    return np.stack(parts, axis=2).astype(np.float32) * 255
