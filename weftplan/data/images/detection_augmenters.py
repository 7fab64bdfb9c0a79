"""Object-detection augmenters: callables on an image and its boxes, and their default list.

Boxes are rows of (class, left, top, right, bottom, …); coordinates are fractions of the image's width and height.
Random augmenters draw from the sequence of ``mx.random``. No augmenter modifies its inputs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from weftplan.data.batch import Host
from weftplan.data.images.augmenters import Augmenter, ForceResizeAug, PerChannel, ResizeAug, color_augmenters
from weftplan.data.images.image import copyMakeBorder, fixed_crop
from weftplan.data.random_draws import draw_generator
from weftplan.errors import ParameterError
from weftplan.ndarray import NDArray
from weftplan.symbol.node import warn

Limits: TypeAlias = float | tuple[float, float]
"""The lowest and the highest value, or one value for both."""
Several: TypeAlias = float | list[float]
"""A setting, or a setting of each of several augmenters."""
SeveralLimits: TypeAlias = Limits | list[Limits]
Pair = tuple[NDArray, Host]
_LEAST_AREA = 2
"""Minimum area in pixels: smaller crops are rejected, and smaller objects are left out of the coverage check."""


class DetAugmenter(Augmenter):
    """Base of detection augmenters: callables on an image and its boxes."""

    def __call__(self, src: NDArray, label: Host) -> Pair:  # type: ignore[override]
        raise NotImplementedError(f"{type(self).__name__}.__call__")


class DetBorrowAug(DetAugmenter):
    """Adapter for an image augmenter that does not move boxes."""

    def __init__(self, augmenter: Augmenter) -> None:
        if not isinstance(augmenter, Augmenter) or isinstance(augmenter, DetAugmenter):
            raise TypeError(f"DetBorrowAug expects an augmenter of images, got {type(augmenter).__name__}")
        super().__init__(augmenter=augmenter.dumps())
        self.augmenter = augmenter

    def dumps(self) -> object:
        return [type(self).__name__.lower(), self.augmenter.dumps()]

    def __call__(self, src: NDArray, label: Host) -> Pair:  # type: ignore[override]
        return self.augmenter(src), label


class DetRandomSelectAug(DetAugmenter):
    """A random choice among several augmenters, or with probability ``skip_prob`` no augmenter."""

    def __init__(self, aug_list: DetAugmenter | Sequence[DetAugmenter], skip_prob: float = 0) -> None:
        super().__init__(skip_prob=skip_prob)
        self.aug_list = [aug_list] if isinstance(aug_list, DetAugmenter) else list(aug_list)
        for augmenter in self.aug_list:
            if not isinstance(augmenter, DetAugmenter):
                raise ParameterError(f"DetRandomSelectAug chooses from DetAugmenters, got {type(augmenter).__name__}")
        self.skip_prob = skip_prob if self.aug_list else 1

    def dumps(self) -> object:
        return [type(self).__name__.lower(), [augmenter.dumps() for augmenter in self.aug_list]]

    def __call__(self, src: NDArray, label: Host) -> Pair:  # type: ignore[override]
        draw = draw_generator()
        if draw.random() < self.skip_prob:
            return src, label
        return self.aug_list[int(draw.integers(len(self.aug_list)))](src, label)


class DetHorizontalFlipAug(DetAugmenter):
    """Flip image and boxes horizontally, with probability ``p``."""

    def __init__(self, p: float) -> None:
        super().__init__(p=p)
        self.p = p

    def __call__(self, src: NDArray, label: Host) -> Pair:  # type: ignore[override]
        if draw_generator().random() >= self.p:
            return src, label
        turned = label.copy()
        turned[:, 1], turned[:, 3] = 1 - label[:, 3], 1 - label[:, 1]
        return src[:, ::-1], turned


class _Region(NamedTuple):
    """Rectangle of pixels; it may extend beyond the image."""

    x: int
    y: int
    width: int
    height: int


def _sides(
    ratio: float, areas: tuple[float, float], low: float, high: float, draw: np.random.Generator
) -> tuple[int, int] | None:
    """Draw (width, height) of a rectangle with this ratio, an area in ``areas`` and ``low`` <= height <= ``high``."""
    least = math.ceil(max(math.sqrt(areas[0] / ratio), low) - 0.5)
    limit = int(min(math.sqrt(areas[1] / ratio), high) + 0.5)
    if least > limit:
        return None
    height = int(draw.integers(least, limit + 1))
    return round(height * ratio), height


class _Ranged(DetAugmenter):
    """Base of augmenters that draw a rectangle from ranges of aspect ratio and relative area."""

    def __init__(self, aspect_ratio_range: Limits, area_range: Limits, max_attempts: int, **kwargs: object) -> None:
        ratios, areas = (
            tuple(limits) if isinstance(limits, list | tuple) else (limits, limits)
            for limits in (aspect_ratio_range, area_range)
        )
        super().__init__(aspect_ratio_range=ratios, area_range=areas, max_attempts=max_attempts, **kwargs)
        self.aspect_ratio_range, self.area_range, self.max_attempts = ratios, areas, max_attempts
        self.enabled = 0 < ratios[0] <= ratios[1] and self._least_area() < areas[1] and areas[0] <= areas[1]
        if not self.enabled:
            warn(f"{type(self).__name__} does nothing: aspect_ratio_range is {ratios}, area_range {areas}")

    def _least_area(self) -> float:
        """Lower limit for the upper end of ``area_range``."""
        return 0

    def __call__(self, src: NDArray, label: Host) -> Pair:  # type: ignore[override]
        height, width = src.shape[:2]
        if not self.enabled or not height or not width:
            return src, label
        areas = self.area_range[0] * height * width, self.area_range[1] * height * width
        draw = draw_generator()
        for _ in range(self.max_attempts):
            ratio = draw.uniform(self.aspect_ratio_range[0], self.aspect_ratio_range[1])
            attempt = self._attempt(src, label, ratio, areas, draw)
            if attempt is not None:
                return attempt
        return src, label

    def _attempt(
        self, src: NDArray, label: Host, ratio: float, areas: tuple[float, float], draw: np.random.Generator
    ) -> Pair | None:
        raise NotImplementedError


class DetRandomCropAug(_Ranged):
    """Crop a random region, and keep the boxes that are covered sufficiently.

    Args:
        min_object_covered: fraction of every touched box that must exceed this value inside the region.
        aspect_ratio_range: width / height of the region.
        area_range: area of the region relative to the image.
        min_eject_coverage: a box is dropped if at most this fraction remains; at least one box must remain.
        max_attempts: attempts before the image is left uncropped.
    """

    def __init__(
        self,
        min_object_covered: float = 0.1,
        aspect_ratio_range: Limits = (0.75, 1.33),
        area_range: Limits = (0.05, 1.0),
        min_eject_coverage: float = 0.3,
        max_attempts: int = 50,
    ) -> None:
        super().__init__(
            aspect_ratio_range,
            area_range,
            max_attempts,
            min_object_covered=min_object_covered,
            min_eject_coverage=min_eject_coverage,
        )
        self.min_object_covered = min_object_covered
        self.min_eject_coverage = min_eject_coverage

    def _attempt(
        self, src: NDArray, label: Host, ratio: float, areas: tuple[float, float], draw: np.random.Generator
    ) -> Pair | None:
        height, width = src.shape[:2]
        sides = _sides(ratio, areas, 1, min(height, (width + 0.499) / ratio), draw)
        if sides is None or sides[0] > width or sides[0] * sides[1] < _LEAST_AREA:
            return None
        x, y = (
            int(draw.integers(full_size - part + 1)) for full_size, part in zip((width, height), sides, strict=True)
        )
        region_label = self._remaining_labels(label, _Region(x, y, *sides), width, height)
        return None if region_label is None else (fixed_crop(src, x, y, *sides), region_label)

    def _remaining_labels(self, label: Host, part: _Region, width: int, height: int) -> Host | None:
        """Return the boxes inside a region of the image; None if the region violates the limits."""
        scale = np.array([part.width / width, part.height / height] * 2)
        moved = label.copy()
        moved[:, 1:5] = np.clip((label[:, 1:5] - [part.x / width, part.y / height] * 2) / scale, 0, 1)
        old_areas, new_areas = _areas(label), _areas(moved) * scale[0] * scale[1]
        with np.errstate(divide="ignore", invalid="ignore"):
            covered = np.where(old_areas > 0, new_areas / old_areas, 0)
        touched = (covered > 0) & (old_areas * width * height > _LEAST_AREA)
        if not touched.any() or covered[touched].min() <= self.min_object_covered:
            return None
        boxes: Host = moved[(new_areas > 0) & (covered > self.min_eject_coverage)]
        return boxes if len(boxes) else None


def _areas(label: Host) -> Host:
    sides = np.maximum(label[:, 3:5] - label[:, 1:3], 0)
    areas: Host = sides[:, 0] * sides[:, 1]
    return areas


class DetRandomPadAug(_Ranged):
    """Place the image at a random position in a larger canvas.

    Args:
        aspect_ratio_range: width / height of the canvas.
        area_range: area of the canvas relative to the image.
        max_attempts: attempts before the image is left unpadded.
        pad_val: fill value per channel, or a single value for all.
    """

    def __init__(
        self,
        aspect_ratio_range: Limits = (0.75, 1.33),
        area_range: Limits = (1.0, 3.0),
        max_attempts: int = 50,
        pad_val: float | Sequence[float] = (128, 128, 128),
    ) -> None:
        values = tuple(pad_val) if isinstance(pad_val, list | tuple) else (pad_val,) * 3
        super().__init__(aspect_ratio_range, area_range, max_attempts, pad_val=values)
        self.pad_val = values

    def _least_area(self) -> float:
        return 1

    def _attempt(
        self, src: NDArray, label: Host, ratio: float, areas: tuple[float, float], draw: np.random.Generator
    ) -> Pair | None:
        height, width = src.shape[:2]
        sides = _sides(ratio, areas, max(height + 2, (width + 2) / ratio), math.inf, draw)
        if sides is None or sides[0] < width + 2:
            return None
        x, y = (
            int(draw.integers(part - full_size + 1)) for full_size, part in zip((width, height), sides, strict=True)
        )
        moved = label.copy()
        moved[:, 1:5] = (label[:, 1:5] * ([width, height] * 2) + [x, y] * 2) / (sides * 2)
        right, bottom = sides[0] - width - x, sides[1] - height - y
        return copyMakeBorder(src, y, bottom, x, right, 0, values=self.pad_val), moved


def CreateMultiRandCropAugmenter(
    min_object_covered: Several = 0.1,
    aspect_ratio_range: SeveralLimits = (0.75, 1.33),
    area_range: SeveralLimits = (0.05, 1.0),
    min_eject_coverage: Several = 0.3,
    max_attempts: int | list[int] = 50,
    skip_prob: float = 0,
) -> DetRandomSelectAug:
    """Choose among several :class:`DetRandomCropAug`, with settings as lists; a single setting applies to all.

    Args:
        min_object_covered: least share of an object that a crop must cover.
        aspect_ratio_range: (lowest, highest) ratio of width to height.
        area_range: (lowest, highest) share of the image's area.
        min_eject_coverage: share of an object that must remain in the crop; other objects are dropped.
        max_attempts: tries before the image stays whole.
        skip_prob: probability that an image is not cropped.

    >>> len(CreateMultiRandCropAugmenter([0.1, 0.5, 0.9], area_range=[(0.1, 1), (0.2, 1), (0.3, 1)]).aug_list)
    3
    """
    columns = (min_object_covered, aspect_ratio_range, area_range, min_eject_coverage, max_attempts)
    lists = [values if isinstance(values, list) else [values] for values in columns]
    count = max(map(len, lists))
    if any(len(values) not in (1, count) for values in lists):
        raise ParameterError(
            f"CreateMultiRandCropAugmenter: lists of {', '.join(str(len(values)) for values in lists)} settings; give "
            f"each setting once or {count} times"
        )
    columns_by_crop = [values * count if len(values) == 1 else values for values in lists]
    return DetRandomSelectAug(
        [DetRandomCropAug(*settings) for settings in zip(*columns_by_crop, strict=True)], skip_prob
    )


def CreateDetAugmenter(
    data_shape: Sequence[int],
    resize: int = 0,
    rand_crop: float = 0,
    rand_pad: float = 0,
    rand_gray: float = 0,
    rand_mirror: bool = False,
    mean: PerChannel = None,
    std: PerChannel = None,
    brightness: float = 0,
    contrast: float = 0,
    saturation: float = 0,
    pca_noise: float = 0,
    hue: float = 0,
    inter_method: int = 2,
    min_object_covered: Several = 0.1,
    aspect_ratio_range: Any = (0.75, 1.33),
    area_range: Any = (0.05, 3.0),
    min_eject_coverage: Several = 0.3,
    max_attempts: Any = 50,
    pad_val: float | Sequence[float] = (127, 127, 127),
) -> list[DetAugmenter]:
    """Build the default list: resize, crop, mirror, pad, resize to the result, cast, colours, noise, grey, normalize.

    Args:
        data_shape: (channels, height, width) of the result.
        resize: pixels of the shorter side, before anything else.
        rand_crop, rand_pad, rand_gray: probabilities.
        mean, std: a number per channel; True for ImageNet's values.
        area_range: relative area of crops; its upper end also applies to padding.
    """
    augs: list[DetAugmenter] = [DetBorrowAug(ResizeAug(resize, inter_method))] if resize > 0 else []
    crop = (min_object_covered, aspect_ratio_range, area_range, min_eject_coverage, max_attempts)
    if rand_crop > 0:
        augs.append(CreateMultiRandCropAugmenter(*crop, skip_prob=1 - rand_crop))
    if rand_mirror:
        augs.append(DetHorizontalFlipAug(0.5))
    if rand_pad > 0:
        padded = DetRandomPadAug(aspect_ratio_range, (1.0, area_range[1]), max_attempts, pad_val)
        augs.append(DetRandomSelectAug([padded], 1 - rand_pad))
    plain = [
        ForceResizeAug((data_shape[2], data_shape[1]), inter_method),
        *color_augmenters(brightness, contrast, saturation, hue, pca_noise, rand_gray, mean, std),
    ]
    return [*augs, *map(DetBorrowAug, plain)]
