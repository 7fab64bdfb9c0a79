"""Augmentation settings and pipeline of ``ImageDetRecordIter`` for one image with its boxes.

Boxes are rows of (class, left, top, right, bottom, …); coordinates are fractions of the image's size. Pure functions of
pixels, boxes, settings and a generator; all are thread-safe.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from weftplan.data.batch import Host
from weftplan.data.images.record_augment import Augmentation, coloured, resized
from weftplan.data.images.resampling import border
from weftplan.errors import ParameterError

_LEAST_PAD = 1.05
"""Minimum size of a padded canvas, as a multiple of the image's sides; below it the image is not padded."""
Rectangle = tuple[float, float, float, float]
"""Left, top, right, bottom as fractions of the image; outside of [0, 1] for a canvas around it."""


@dataclass(frozen=True, slots=True)
class DetAugmentation:
    """Settings under MXNet's names; a default does nothing.

    In this order: ``resize`` (pixels of the shorter side); hue (of 180), saturation and lightness (of 255) moved by up
    to ``max_random_hue``, ``max_random_saturation`` and ``max_random_illumination``, and contrast by a share of up to
    ``max_random_contrast``, each with its probability; mirrored with ``rand_mirror_prob``; placed in a canvas of up to
    ``max_pad_scale`` times the size with ``rand_pad_prob``; cropped with ``rand_crop_prob`` by the first of
    ``num_crop_sampler`` samplers, in a random order, that finds a crop in its ``max_crop_trials``. The settings of
    samplers are lists, or one value for all. A crop must meet one of its limits for some box: intersection over union
    (``…_crop_overlaps``), share of the crop (``…_sample_coverages``), share of the box (``…_object_coverages``). Boxes
    with their centre outside (``crop_emit_mode`` center), or with at most ``emit_overlap_thresh`` of them inside
    (overlap), are dropped. Then ``resize_mode``: ``force`` to the size, or with the sides' ratio ``fit`` into it, or
    ``shrink`` if larger; at last minus the mean, times ``scale``, divided by the standard deviation.
    """

    resize: int = -1
    rand_crop_prob: float = 0.0
    min_crop_scales: Any = 0.0
    max_crop_scales: Any = 1.0
    min_crop_aspect_ratios: Any = 1.0
    max_crop_aspect_ratios: Any = 1.0
    min_crop_overlaps: Any = 0.0
    max_crop_overlaps: Any = 1.0
    min_crop_sample_coverages: Any = 0.0
    max_crop_sample_coverages: Any = 1.0
    min_crop_object_coverages: Any = 0.0
    max_crop_object_coverages: Any = 1.0
    num_crop_sampler: int = 1
    crop_emit_mode: str = "center"
    emit_overlap_thresh: float = 0.3
    max_crop_trials: Any = 25
    rand_pad_prob: float = 0.0
    max_pad_scale: float = 1.0
    max_random_hue: int = 0
    random_hue_prob: float = 0.0
    max_random_saturation: int = 0
    random_saturation_prob: float = 0.0
    max_random_illumination: int = 0
    random_illumination_prob: float = 0.0
    max_random_contrast: float = 0.0
    random_contrast_prob: float = 0.0
    rand_mirror_prob: float = 0.0
    fill_value: int = 127
    inter_method: int = 1
    resize_mode: str = "force"
    mean_r: float = 0.0
    mean_g: float = 0.0
    mean_b: float = 0.0
    mean_a: float = 0.0
    std_r: float = 0.0
    std_g: float = 0.0
    std_b: float = 0.0
    std_a: float = 0.0
    scale: float = 1.0

    def __post_init__(self) -> None:
        for name, allowed in (("crop_emit_mode", ("center", "overlap")), ("resize_mode", ("force", "shrink", "fit"))):
            if getattr(self, name) not in allowed:
                raise ParameterError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")
        for name in _PER_SAMPLER:
            value = getattr(self, name)
            if isinstance(value, (list, tuple)) and len(value) not in (1, self.num_crop_sampler):
                raise ParameterError(
                    f"{name} must have a value for each of the {self.num_crop_sampler} crop samplers, got {value!r}"
                )

    @property
    def plain(self) -> Augmentation:
        """The settings that images without boxes share."""
        pixels: dict[str, Any] = {f"mean_{c}": getattr(self, f"mean_{c}") for c in "rgba"}
        pixels |= {f"std_{c}": getattr(self, f"std_{c}") or 1.0 for c in "rgba"}  # MXNet's 0 means none
        return Augmentation(**pixels, scale=self.scale, inter_method=self.inter_method)

    def of_sampler(self, name: str, number: int) -> Any:
        """Return a setting of one crop sampler."""
        value = getattr(self, name)
        return value[number % len(value)] if isinstance(value, (list, tuple)) else value


_PER_SAMPLER = (
    "max_crop_trials",
    *(
        f"{end}_crop_{what}"
        for end in ("min", "max")
        for what in ("scales", "aspect_ratios", "overlaps", "sample_coverages", "object_coverages")
    ),
)


def augment_boxes(
    pixels: Host, boxes: Host, to: DetAugmentation, shape: tuple[int, ...], draw: np.random.Generator
) -> tuple[Host, Host]:
    """Return the augmented image as uint8, (channels, height, width) of at most ``shape``, and its boxes."""
    plain = to.plain
    if to.resize > 0:
        h, w = pixels.shape[:2]
        size = (to.resize, to.resize * h // w) if h > w else (to.resize * w // h, to.resize)
        pixels = resized(pixels, size, plain, draw)
    if pixels.shape[2] == 3:
        pixels = _coloured(pixels, to, draw)
    if to.rand_mirror_prob > 0 and draw.random() < to.rand_mirror_prob:
        pixels, boxes = pixels[:, ::-1], boxes.copy()
        boxes[:, 1], boxes[:, 3] = 1 - boxes[:, 3], 1 - boxes[:, 1]
    if to.rand_pad_prob > 0 and to.max_pad_scale > 1 and draw.random() < to.rand_pad_prob:
        pixels, boxes = _padded(pixels, boxes, to, draw)
    if to.rand_crop_prob > 0 and to.num_crop_sampler > 0 and draw.random() < to.rand_crop_prob:
        pixels, boxes = _cropped(pixels, boxes, to, draw)
    return resized(pixels, _target(pixels.shape, shape, to.resize_mode), plain, draw).transpose(2, 0, 1), boxes


def _target(old: Sequence[int], shape: Sequence[int], mode: str) -> tuple[int, int]:
    """Return (width, height) of the result."""
    rows, columns, height, width = old[0], old[1], shape[1], shape[2]
    if mode == "force":
        return width, height
    if mode == "shrink" and rows <= height and columns <= width:
        return columns, rows
    if height * columns < width * rows:
        return max(1, columns * height // rows), height
    return width, max(1, rows * width // columns)


def _coloured(pixels: Host, to: DetAugmentation, draw: np.random.Generator) -> Host:
    moves = {}
    for name in ("hue", "saturation", "illumination"):
        chosen = draw.random() < getattr(to, f"random_{name}_prob")
        moves[name] = getattr(to, f"max_random_{name}") if chosen else 0
    colours = Augmentation(
        random_h=moves["hue"], random_s=moves["saturation"], random_l=moves["illumination"],
    )  # fmt: skip
    pixels = coloured(pixels, colours, draw)
    if draw.random() < to.random_contrast_prob:
        share = 1 + draw.uniform(-to.max_random_contrast, to.max_random_contrast)
        pixels = np.clip(np.rint(pixels * share), 0, 255).astype(np.uint8)
    return pixels


def _padded(pixels: Host, boxes: Host, to: DetAugmentation, draw: np.random.Generator) -> tuple[Host, Host]:
    """Place the image at a random position of a larger canvas with the same ratio of sides."""
    scale = draw.uniform(1, to.max_pad_scale)
    if scale < _LEAST_PAD:
        return pixels, boxes
    rows, columns = pixels.shape[:2]
    height, width = int(rows * scale), int(columns * scale)
    top, left = (int(draw.integers(0, new - old + 1)) for new, old in ((height, rows), (width, columns)))
    canvas = (-left / columns, -top / rows, (width - left) / columns, (height - top) / rows)
    around = border(pixels, top, height - rows - top, left, width - columns - left, 0, [to.fill_value])
    return around, _projected(boxes, canvas)


def _cropped(pixels: Host, boxes: Host, to: DetAugmentation, draw: np.random.Generator) -> tuple[Host, Host]:
    """Crop by the first sampler that finds a crop; without one the image stays."""
    rows, columns = pixels.shape[:2]
    for sampler in draw.permutation(to.num_crop_sampler):
        for _ in range(int(to.of_sampler("max_crop_trials", sampler))):
            crop = _rectangle(to, sampler, columns / rows, draw)
            cropped_boxes = _remaining_boxes(boxes, crop, to, sampler)
            if cropped_boxes is None:
                continue
            left, right = round(crop[0] * columns), round(crop[2] * columns)
            top, bottom = round(crop[1] * rows), round(crop[3] * rows)
            if right > left and bottom > top:
                return pixels[top:bottom, left:right], cropped_boxes
    return pixels, boxes


def _rectangle(to: DetAugmentation, sampler: int, ratio: float, draw: np.random.Generator) -> Rectangle:
    """Draw a crop: its scale, then the ratio of its sides, then its position."""
    scale = draw.uniform(to.of_sampler("min_crop_scales", sampler), to.of_sampler("max_crop_scales", sampler))
    scale = max(scale, 1e-6)
    least = max(to.of_sampler("min_crop_aspect_ratios", sampler) / ratio, scale * scale)
    limit = min(to.of_sampler("max_crop_aspect_ratios", sampler) / ratio, 1 / (scale * scale))
    stretch = np.sqrt(draw.uniform(min(least, limit), max(least, limit)))
    width, height = min(1.0, scale * stretch), min(1.0, scale / stretch)
    left, top = draw.uniform(0, 1 - width), draw.uniform(0, 1 - height)
    return left, top, left + width, top + height


def _remaining_boxes(boxes: Host, crop: Rectangle, to: DetAugmentation, sampler: int) -> Host | None:
    """Return the boxes inside a crop, relative to it; None if the crop does not meet its limits or keeps no box."""
    if not len(boxes):
        return boxes
    inside = np.maximum(np.minimum(boxes[:, 3:5], crop[2:]) - np.maximum(boxes[:, 1:3], crop[:2]), 0).prod(axis=1)
    areas = np.maximum(boxes[:, 3:5] - boxes[:, 1:3], 0).prod(axis=1)
    area = (crop[2] - crop[0]) * (crop[3] - crop[1])
    shares = {
        "overlaps": inside / np.maximum(areas + area - inside, 1e-12),
        "sample_coverages": inside / max(area, 1e-12),
        "object_coverages": inside / np.maximum(areas, 1e-12),
    }
    limits = {name: [to.of_sampler(f"{end}_crop_{name}", sampler) for end in ("min", "max")] for name in shares}
    acting = {name: ends for name, ends in limits.items() if ends[0] > 0 or ends[1] < 1}
    meets = [((shares[name] >= low) & (shares[name] <= high)).any() for name, (low, high) in acting.items()]
    if acting and not any(meets):
        return None
    if to.crop_emit_mode == "center":
        centres = (boxes[:, 1:3] + boxes[:, 3:5]) / 2
        keep = ((centres >= crop[:2]) & (centres <= crop[2:])).all(axis=1)
    else:
        keep = shares["object_coverages"] > to.emit_overlap_thresh
    return np.clip(_projected(boxes[keep], crop), [-np.inf, 0, 0, 0, 0, *[-np.inf] * (boxes.shape[1] - 5)],
                   [np.inf, 1, 1, 1, 1, *[np.inf] * (boxes.shape[1] - 5)]) if keep.any() else None  # fmt: skip


def _projected(boxes: Host, frame: Rectangle) -> Host:
    """Return boxes relative to another frame."""
    moved = boxes.copy()
    for near, far in ((1, 3), (2, 4)):
        start, side = frame[near - 1], frame[far - 1] - frame[near - 1]
        moved[:, near], moved[:, far] = (boxes[:, near] - start) / side, (boxes[:, far] - start) / side
    return moved
