"""Image augmenters of ``mx.image``: callables from an image to a new image, and their default list.

Images are NDArrays of shape (height, width, channels). Random augmenters draw from the sequence of ``mx.random``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from numpy.typing import ArrayLike

from weftplan import ndarray as nd
from weftplan.data.images.image import (
    center_crop,
    color_normalize,
    imresize,
    random_crop,
    random_size_crop,
    resize_short,
)
from weftplan.data.random_draws import draw_generator
from weftplan.errors import ParameterError
from weftplan.ndarray import NDArray
from weftplan.support.keyword_errors import Constructed

_GREY = (0.299, 0.587, 0.114)
"""Luma weights of red, green and blue (ITU-R BT.601)."""
_TO_YIQ = np.array([[0.299, 0.587, 0.114], [0.596, -0.274, -0.321], [0.211, -0.523, 0.311]])
_FROM_YIQ = np.array([[1.0, 0.956, 0.621], [1.0, -0.272, -0.647], [1.0, -1.107, 1.705]])
PCA_VALUES = np.array([55.46, 4.794, 1.148])
PCA_VECTORS = np.array([[-0.5675, 0.7192, 0.4009], [-0.5808, -0.0045, -0.8140], [-0.5836, -0.6948, 0.4203]])
"""Principal components of the colours of ImageNet's pixels, as the field uses them since AlexNet."""
IMAGENET_MEAN = (123.68, 116.28, 103.53)
IMAGENET_STD = (58.395, 57.12, 57.375)


PerChannel: TypeAlias = NDArray | npt.ArrayLike | bool | None
"""A number for each channel; True: the usual numbers; None or False: nothing."""


def _jsonable(value: object) -> object:
    return (
        value.asnumpy().tolist()
        if isinstance(value, NDArray)
        else value.tolist()
        if hasattr(value, "tolist")
        else value
    )


class Augmenter(Constructed):
    """Base of augmenters: callables on an image; :meth:`dumps` serializes an augmenter."""

    def __init__(self, **kwargs: object) -> None:
        self._kwargs = {name: _jsonable(value) for name, value in kwargs.items()}

    def dumps(self) -> object:
        """Serialize the augmenter's name and settings as JSON.

        >>> CastAug().dumps()
        '["castaug", {"type": "float32"}]'
        """
        return json.dumps([type(self).__name__.lower(), self._kwargs])

    def __call__(self, src: NDArray) -> NDArray:
        raise NotImplementedError(f"{type(self).__name__}.__call__")


class SequentialAug(Augmenter):
    """Several augmenters in sequence."""

    def __init__(self, ts: Sequence[Augmenter]) -> None:
        super().__init__()
        self.ts = list(ts)

    def dumps(self) -> object:
        return [type(self).__name__.lower(), [augmenter.dumps() for augmenter in self.ts]]

    def __call__(self, src: NDArray) -> NDArray:
        for augmenter in self.ts:
            src = augmenter(src)
        return src


class RandomOrderAug(SequentialAug):
    """Several augmenters in a random order."""

    def __call__(self, src: NDArray) -> NDArray:
        for k in draw_generator().permutation(len(self.ts)):
            src = self.ts[k](src)
        return src


class _Sized(Augmenter):
    """Base of augmenters with a target size and an interpolation."""

    def __init__(self, size: Any, interp: int = 2) -> None:
        super().__init__(size=size, interp=interp)
        self.size = size
        self.interp = interp


class ResizeAug(_Sized):
    """Resize the shorter side to ``size`` pixels."""

    def __call__(self, src: NDArray) -> NDArray:
        return resize_short(src, self.size, self.interp)


class ForceResizeAug(_Sized):
    """Resize to ``size`` (width, height), ignoring the aspect ratio."""

    def __call__(self, src: NDArray) -> NDArray:
        return imresize(src, self.size[0], self.size[1], self.interp)


class RandomCropAug(_Sized):
    """Crop ``size`` (width, height) at a random position."""

    def __call__(self, src: NDArray) -> NDArray:
        return random_crop(src, self.size, self.interp)[0]


class CenterCropAug(_Sized):
    """Crop ``size`` (width, height) at the centre."""

    def __call__(self, src: NDArray) -> NDArray:
        return center_crop(src, self.size, self.interp)[0]


class RandomSizedCropAug(Augmenter):
    """Crop a random fraction of the area with a random aspect ratio, and resize to ``size`` (width, height)."""

    def __init__(
        self, size: Sequence[int], area: float | Sequence[float], ratio: Sequence[float], interp: int = 2, **kwargs: Any
    ) -> None:
        area = kwargs.pop("min_area", area)
        if kwargs:
            raise ParameterError(f"RandomSizedCropAug: unknown settings {sorted(kwargs)}")
        super().__init__(size=size, area=area, ratio=ratio, interp=interp)
        self.size, self.area, self.ratio, self.interp = size, area, ratio, interp

    def __call__(self, src: NDArray) -> NDArray:
        return random_size_crop(src, self.size, self.area, self.ratio, self.interp)[0]


def _share(width: float) -> float:
    return float(draw_generator().uniform(-width, width))


def _grey(src: NDArray) -> NDArray:
    return src * nd.array([[_GREY]], dtype=src.dtype)


class BrightnessJitterAug(Augmenter):
    """Multiply all pixels by a random factor in [1 - ``brightness``, 1 + ``brightness``]."""

    def __init__(self, brightness: float) -> None:
        super().__init__(brightness=brightness)
        self.brightness = brightness

    def __call__(self, src: NDArray) -> NDArray:
        return src * (1.0 + _share(self.brightness))


class ContrastJitterAug(Augmenter):
    """Scale the distance of pixels from the image's mean brightness by a random factor."""

    def __init__(self, contrast: float) -> None:
        super().__init__(contrast=contrast)
        self.contrast = contrast

    def __call__(self, src: NDArray) -> NDArray:
        alpha = 1.0 + _share(self.contrast)
        grey = nd.sum(_grey(src)) * (3.0 * (1.0 - alpha) / src.size)
        return src * alpha + grey


class SaturationJitterAug(Augmenter):
    """Scale the distance of pixels from their own brightness by a random factor."""

    def __init__(self, saturation: float) -> None:
        super().__init__(saturation=saturation)
        self.saturation = saturation

    def __call__(self, src: NDArray) -> NDArray:
        alpha = 1.0 + _share(self.saturation)
        return src * alpha + nd.sum(_grey(src), axis=2, keepdims=True) * (1.0 - alpha)


class HueJitterAug(Augmenter):
    """Rotate colours in the IQ plane of YIQ by a random angle of up to ``hue`` half turns."""

    def __init__(self, hue: float) -> None:
        super().__init__(hue=hue)
        self.hue = hue

    def __call__(self, src: NDArray) -> NDArray:
        angle = _share(self.hue) * np.pi
        cos, sin = np.cos(angle), np.sin(angle)
        turn = np.array([[1.0, 0.0, 0.0], [0.0, cos, -sin], [0.0, sin, cos]])
        result: NDArray = nd.dot(src, nd.array((_FROM_YIQ @ turn @ _TO_YIQ).T, dtype=src.dtype))
        return result


class ColorJitterAug(RandomOrderAug):
    """Brightness, contrast and saturation, in a random order."""

    def __init__(self, brightness: float, contrast: float, saturation: float) -> None:
        jitters = (BrightnessJitterAug, brightness), (ContrastJitterAug, contrast), (SaturationJitterAug, saturation)
        super().__init__([kind(width) for kind, width in jitters if width > 0])


class LightingAug(Augmenter):
    """Add noise along the principal components of colours, with standard deviation ``alphastd``."""

    def __init__(self, alphastd: float, eigval: ArrayLike, eigvec: ArrayLike) -> None:
        super().__init__(alphastd=alphastd, eigval=eigval, eigvec=eigvec)
        self.alphastd, self.eigval, self.eigvec = alphastd, eigval, eigvec

    def __call__(self, src: NDArray) -> NDArray:
        alpha = draw_generator().normal(0, self.alphastd, size=3)
        return src + nd.array(np.dot(np.asarray(self.eigvec) * alpha, np.asarray(self.eigval)), dtype=src.dtype)


class ColorNormalizeAug(Augmenter):
    """Subtract ``mean`` and divide by ``std``: a number per channel, or None."""

    def __init__(self, mean: NDArray | ArrayLike | None, std: NDArray | ArrayLike | None) -> None:
        super().__init__(mean=mean, std=std)
        self.mean, self.std = (
            value if value is None or isinstance(value, NDArray) else nd.array(value) for value in (mean, std)
        )

    def __call__(self, src: NDArray) -> NDArray:
        return color_normalize(src, self.mean, self.std)


class RandomGrayAug(Augmenter):
    """Convert to grey in all channels, with probability ``p``."""

    def __init__(self, p: float) -> None:
        super().__init__(p=p)
        self.p = p

    def __call__(self, src: NDArray) -> NDArray:
        if draw_generator().random() >= self.p:
            return src
        shares = np.repeat([[0.21], [0.72], [0.07]], 3, axis=1)
        result: NDArray = nd.dot(src, nd.array(shares, dtype=src.dtype))
        return result


class HorizontalFlipAug(Augmenter):
    """Flip horizontally, with probability ``p``."""

    def __init__(self, p: float) -> None:
        super().__init__(p=p)
        self.p = p

    def __call__(self, src: NDArray) -> NDArray:
        if draw_generator().random() >= self.p:
            return src
        result: NDArray = nd.flip(src, axis=1)
        return result


class CastAug(Augmenter):
    """Cast to another dtype."""

    def __init__(self, typ: str = "float32") -> None:
        super().__init__(type=typ)
        self.typ = typ

    def __call__(self, src: NDArray) -> NDArray:
        return src.astype(self.typ)


def CreateAugmenter(
    data_shape: Sequence[int],
    resize: int = 0,
    rand_crop: bool = False,
    rand_resize: bool = False,
    rand_mirror: bool = False,
    mean: PerChannel = None,
    std: PerChannel = None,
    brightness: float = 0,
    contrast: float = 0,
    saturation: float = 0,
    hue: float = 0,
    pca_noise: float = 0,
    rand_gray: float = 0,
    inter_method: int = 2,
) -> list[Augmenter]:
    """Build the default list: resize, crop, mirror, cast, colours, noise, grey, normalize, each if requested.

    Args:
        data_shape: (channels, height, width) of the result.
        resize: pixels of the shorter side, before the crop.
        rand_crop, rand_resize: crop at a random position, and with a random size (requires ``rand_crop``).
        mean, std: a number per channel; True for ImageNet's values.
    """
    augs: list[Augmenter] = [ResizeAug(resize, inter_method)] if resize > 0 else []
    size = (data_shape[2], data_shape[1])
    if rand_resize and not rand_crop:
        raise ParameterError("CreateAugmenter: rand_resize needs rand_crop=True")
    if rand_resize:
        augs.append(RandomSizedCropAug(size, 0.08, (3.0 / 4.0, 4.0 / 3.0), inter_method))
    else:
        augs.append((RandomCropAug if rand_crop else CenterCropAug)(size, inter_method))
    if rand_mirror:
        augs.append(HorizontalFlipAug(0.5))
    return [*augs, *color_augmenters(brightness, contrast, saturation, hue, pca_noise, rand_gray, mean, std)]


def color_augmenters(
    brightness: float,
    contrast: float,
    saturation: float,
    hue: float,
    pca_noise: float,
    rand_gray: float,
    mean: PerChannel,
    std: PerChannel,
) -> list[Augmenter]:
    """Build the pixel-value augmenters, starting with the cast to float32; arguments as in CreateAugmenter."""
    augs: list[Augmenter] = [CastAug()]
    if brightness or contrast or saturation:
        augs.append(ColorJitterAug(brightness, contrast, saturation))
    if hue:
        augs.append(HueJitterAug(hue))
    if pca_noise > 0:
        augs.append(LightingAug(pca_noise, PCA_VALUES, PCA_VECTORS))
    if rand_gray > 0:
        augs.append(RandomGrayAug(rand_gray))
    mean, std = numbers(mean, IMAGENET_MEAN, "mean"), numbers(std, IMAGENET_STD, "std")
    if mean is not None or std is not None:
        augs.append(ColorNormalizeAug(mean, std))
    return augs


def numbers(value: PerChannel, usual: Sequence[float], what: str) -> NDArray | None:
    """Validate a number per channel; True means ``usual``; raises ParameterError for other values."""
    if value is None or value is False:
        return None
    if value is True:
        return nd.array(usual)
    value = value if isinstance(value, NDArray) else nd.array(np.asarray(value, np.float32))
    if value.shape[:1] not in ((1,), (3,)):
        raise ParameterError(f"{what} must hold 1 or 3 numbers, got shape {tuple(value.shape)}")
    return value
