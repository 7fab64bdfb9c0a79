"""``mx.image`` functions on single images: read, resize, crop, rotate.

Images are NDArrays on the host of shape (height, width, channels), except for :func:`imrotate`, which takes (channels,
height, width). Each function waits for its inputs and returns a new array. Random functions draw from the sequence of
``mx.random``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from weftplan import ndarray as nd
from weftplan.data.batch import Host
from weftplan.data.image_files import decode
from weftplan.data.images import resampling
from weftplan.data.random_draws import draw_generator
from weftplan.errors import MXNetError, ParameterError, ShapeError
from weftplan.ndarray import NDArray
from weftplan.ops.core.params import from_text, p_float, p_tuple
from weftplan.support.array_types import RawArray
from weftplan.support.atomic_files import open_to_read

Box = tuple[int, int, int, int]
"""(left, top, width, height) in pixels."""


def host(src: NDArray | ArrayLike) -> Host:
    """Return the pixels of an image as (height, width, channels)."""
    pixels: Host = src.asnumpy() if isinstance(src, NDArray) else np.asarray(src)
    if pixels.ndim != 3:
        raise ShapeError(f"an image has the shape (height, width, channels), got {pixels.shape}")
    return pixels


def _give(pixels: Host, out: NDArray | None = None) -> NDArray:
    if out is None:
        return nd.array(pixels, dtype=pixels.dtype)
    if tuple(out.shape) != pixels.shape:
        raise ShapeError(f"out has shape {tuple(out.shape)}, the image {pixels.shape}")
    out[:] = pixels
    return out


def _decoded(content: bytes, flag: int, to_rgb: bool | int, out: NDArray | None, what: str) -> NDArray:
    pixels = decode(content, flag, what)
    return _give(pixels if to_rgb or pixels.shape[2] < 3 else pixels[:, :, ::-1], out)


def imdecode(
    buf: NDArray | bytes | bytearray | memoryview | RawArray,
    flag: int = 1,
    to_rgb: bool | int = True,
    out: NDArray | None = None,
) -> NDArray:
    """Decode the bytes of an image file.

    Args:
        buf: bytes, a bytearray, or an array of uint8.
        flag: 1 for three channels, 0 for one grey channel.
        to_rgb: whether red is the first channel; else blue is, as in OpenCV.

    Raises:
        FormatError: no image, or a damaged one.
        ParameterError: ``buf`` is text.
    """
    if isinstance(buf, NDArray):
        buf = buf.asnumpy()
    if not isinstance(buf, (bytes, bytearray, memoryview, np.ndarray)):
        raise ParameterError(f"imdecode: expected bytes, a bytearray or an array of uint8, got {type(buf).__name__}")
    return _decoded(bytes(buf), flag, to_rgb, out, "imdecode")


def imread(
    filename: str | os.PathLike[str], flag: int = 1, to_rgb: bool | int = True, out: NDArray | None = None
) -> NDArray:
    """Return the image of a file; settings as for :func:`imdecode`.

    Args:
        filename: path of an image that Pillow reads.
        flag: 1: three channels, 0: grey.
        to_rgb: RGB instead of BGR.
        out: array that takes the result.

    Raises:
        MXNetError: the file cannot be read.
        FormatError: it holds no image.
    """
    path = Path(filename)
    try:
        with open_to_read(path) as file:
            content = file.read()
    except OSError as error:
        raise MXNetError(f"imread: {path} cannot be read: {error.strerror}") from error
    return _decoded(content, flag, to_rgb, out, str(path))


def imresize(src: NDArray | ArrayLike, w: int, h: int, interp: int = 1, out: NDArray | None = None) -> NDArray:
    """Return an image of ``w`` x ``h`` pixels.

    ``interp``: 0 nearest, 1 linear, 2 cubic, 3 area, 4 Lanczos, with OpenCV's weights; 9 chooses by the sizes (cubic to
    enlarge, area to shrink, else linear), 10 at random.

    Args:
        src: image: (height, width, channels).
        w: width of the result.
        h: height of the result.
        interp: see above.
        out: array that takes the result.

    >>> imresize(nd.array(np.arange(12).reshape(2, 2, 3)), 4, 2).shape
    (2, 4, 3)
    """
    pixels = host(src)
    w, h, interp = map(from_text, (w, h, interp))
    sizes = (*pixels.shape[:2], h, w)
    return _give(resampling.resize(pixels, w, h, resampling.method_of(interp, sizes, _draw(interp))), out)


def _draw(interp: int) -> np.random.Generator | None:
    return draw_generator() if interp == resampling.ANY else None


def scale_down(src_size: Sequence[int], size: Sequence[int]) -> tuple[int, int]:
    """Shrink a crop's (width, height) to fit the image, preserving the aspect ratio.

    >>> scale_down((640, 480), (720, 120))
    (640, 106)
    """
    width, height = float(size[0]), float(size[1])
    if src_size[1] < height:
        width, height = width * src_size[1] / height, float(src_size[1])
    if src_size[0] < width:
        width, height = float(src_size[0]), height * src_size[0] / width
    return int(width), int(height)


def copyMakeBorder(
    src: NDArray | ArrayLike,
    top: int,
    bot: int,
    left: int,
    right: int,
    type: int = 0,
    value: float = 0.0,
    values: Sequence[float] | float | str = (),
    out: NDArray | None = None,
) -> NDArray:
    """Return an image with a border around it.

    ``type``, by OpenCV's numbers: 0 of ``values``, 1 the edge repeated, 2 mirrored with the edge twice, 3 from the
    other side, 4 mirrored.

    Args:
        src: image: (height, width, channels).
        top: rows above.
        bot: rows below.
        left: columns on the left.
        right: columns on the right.
        type: kind of border, see above.
        value: value of every channel of the border; ignored if ``values`` is given.
        values: a value for each channel of the border, or one for all.
        out: array that takes the result.
    """
    top, bot, left, right, type = map(from_text, (top, bot, left, right, type))
    channels = p_tuple(p_float)(values) or (p_float(value),)
    return _give(resampling.border(host(src), top, bot, left, right, type, list(channels)), out)


def resize_short(src: NDArray | RawArray, size: int, interp: int = 2) -> NDArray:
    """An image whose shorter side has ``size`` pixels, with the same ratio.

    Args:
        src: image: (height, width, channels).
        size: pixels of the shorter side.
        interp: way of interpolation, as for :func:`imresize`.
    """
    h, w, _ = src.shape
    width, height = (size, size * h // w) if h > w else (size * w // h, size)
    return imresize(src, width, height, interp)


def fixed_crop(
    src: NDArray | ArrayLike, x0: int, y0: int, w: int, h: int, size: Sequence[int] | None = None, interp: int = 2
) -> NDArray:
    """Crop an image at (x0, y0), and resize to ``size`` (width, height) if given.

    Args:
        src: image: (height, width, channels).
        x0: left edge.
        y0: upper edge.
        w: width of the crop.
        h: height of the crop.
        size: (width, height) of the result; None: that of the crop.
        interp: way of interpolation, as for :func:`imresize`.
    """
    pixels = host(src)
    if x0 < 0 or y0 < 0 or w < 1 or h < 1 or x0 + w > pixels.shape[1] or y0 + h > pixels.shape[0]:
        raise ParameterError(f"a crop of {w} x {h} pixels at ({x0}, {y0}) is outside of an image of {pixels.shape}")
    part = pixels[y0 : y0 + h, x0 : x0 + w]
    return _give(part) if size is None or (w, h) == tuple(size) else imresize(part, size[0], size[1], interp)


def random_crop(src: NDArray | RawArray, size: Sequence[int], interp: int = 2) -> tuple[NDArray, Box]:
    """Crop ``size`` (width, height) at a random position; returns (image, box). A smaller image is enlarged.

    Args:
        src: image: (height, width, channels).
        size: (width, height) of the result.
        interp: way of interpolation, as for :func:`imresize`.
    """
    h, w, _ = src.shape
    width, height = scale_down((w, h), size)
    draw = draw_generator()
    box = int(draw.integers(0, w - width + 1)), int(draw.integers(0, h - height + 1)), width, height
    return fixed_crop(src, *box, size, interp), box


def center_crop(src: NDArray | RawArray, size: Sequence[int], interp: int = 2) -> tuple[NDArray, Box]:
    """Crop ``size`` (width, height) at the centre; returns (image, box). A smaller image is enlarged.

    Args:
        src: image: (height, width, channels).
        size: (width, height) of the result.
        interp: way of interpolation, as for :func:`imresize`.
    """
    h, w, _ = src.shape
    width, height = scale_down((w, h), size)
    box = (w - width) // 2, (h - height) // 2, width, height
    return fixed_crop(src, *box, size, interp), box


def random_size_crop(
    src: NDArray | RawArray,
    size: Sequence[int],
    area: float | Sequence[float],
    ratio: Sequence[float],
    interp: int = 2,
    **kwargs: Any,
) -> tuple[NDArray, Box]:
    """Return (image, box): a crop of a random share of the area and a random ratio, in ``size`` (width, height).

    Args:
        area: smallest and largest share; a number is the smallest.
        ratio: smallest and largest width over height.
    """
    h, w, _ = src.shape
    area = kwargs.pop("min_area", area)  # its name in older scripts
    if kwargs:
        raise ParameterError(f"random_size_crop: unknown settings {sorted(kwargs)}")
    low, high = (area, 1.0) if isinstance(area, (int, float)) else area
    draw = draw_generator()
    for _ in range(10):
        share = draw.uniform(low, high) * h * w
        shape = np.exp(draw.uniform(np.log(ratio[0]), np.log(ratio[1])))
        width, height = round(np.sqrt(share * shape)), round(np.sqrt(share / shape))
        if 1 <= width <= w and 1 <= height <= h:
            box = int(draw.integers(0, w - width + 1)), int(draw.integers(0, h - height + 1)), width, height
            return fixed_crop(src, *box, size, interp), box
    return center_crop(src, size, interp)


def color_normalize(src: NDArray, mean: NDArray | float | None, std: NDArray | float | None = None) -> NDArray:
    """Return the image minus ``mean``, divided by ``std``; arrays of one number for each channel, or None.

    Args:
        src: image: (height, width, channels).
        mean: subtracted: one number for each channel.
        std: divisor: one number for each channel; None: no division.
    """
    if mean is not None:
        src = src - mean
    return src if std is None else src / std


def imrotate(src: NDArray, rotation_degrees: NDArray | float, zoom_in: bool = False, zoom_out: bool = False) -> NDArray:
    """Rotate an image (channels, height, width), or a batch of images, around the centre; float32.

    Args:
        rotation_degrees: a number, or for a batch an array with an angle per image.
        zoom_in: enlarge until no black border is visible. zoom_out: shrink until the whole image is visible.

    Raises:
        ValueError: both zooms, or another number of angles than images.
        TypeError: another dtype, or an array of angles for one image.
    """
    if zoom_in and zoom_out:
        raise ParameterError("imrotate: zoom_in and zoom_out exclude each other")
    if np.dtype(src.dtype) != np.float32:
        raise TypeError(f"imrotate: images must be float32, got {np.dtype(src.dtype)}")
    if src.ndim not in (3, 4):
        raise ShapeError(f"imrotate: expected (channels, height, width) or a batch, got shape {tuple(src.shape)}")
    is_single = isinstance(rotation_degrees, (int, float, np.number))
    if src.ndim == 3:
        if not is_single:
            raise TypeError("imrotate: one image takes one angle, a number")
        return imrotate(src.expand_dims(axis=0), rotation_degrees, zoom_in, zoom_out)[0]
    count, _, h, w = src.shape
    angles = np.full(count, rotation_degrees) if is_single else np.asarray(nd.array(rotation_degrees).asnumpy())
    if len(angles) != count:
        raise ParameterError(f"imrotate: {count} images, but {len(angles)} angles")
    radians = np.deg2rad(angles.astype(np.float64))[:, None, None]
    middle_y, middle_x = (h - 1) / 2, (w - 1) / 2
    y, x = np.mgrid[0:h, 0:w].astype(np.float64)
    y, x = (y - middle_y)[None], (x - middle_x)[None]
    turned_x, turned_y = x * np.cos(radians) - y * np.sin(radians), x * np.sin(radians) + y * np.cos(radians)
    grid = np.stack([turned_x / (middle_x or 1), turned_y / (middle_y or 1)], axis=1)
    if zoom_in or zoom_out:
        reach, tilt, turn = np.hypot(h, w), np.arctan2(h, w), np.abs(radians)
        corners = [
            np.abs(reach * np.array([np.cos(tilt + sign * turn), np.sin(tilt + sign * turn)])) for sign in (1, -1)
        ]
        max_x, max_y = np.maximum(*corners)
        scale = np.maximum(max_x / w, max_y / h) if zoom_out else np.minimum(w / max_x, h / max_y)
        grid *= scale[:, None]
    positions = nd.array(grid.astype(np.float32), ctx=src.context)
    result: NDArray = nd.BilinearSampler(src, positions)  # type: ignore[attr-defined,unused-ignore]
    return result


def random_rotate(
    src: NDArray, angle_limits: Sequence[float], zoom_in: bool = False, zoom_out: bool = False
) -> NDArray:
    """:func:`imrotate` by a random angle between two, for a batch one for each image.

    Args:
        src: image or batch of images: (..., channels, height, width), float32.
        angle_limits: (lowest, highest) angle in degrees.
        zoom_in: enlarge, until no border is seen.
        zoom_out: shrink, until the whole image is seen.
    """
    low, high = angle_limits
    angles = draw_generator().uniform(low, high, size=1 if src.ndim == 3 else src.shape[0])
    return imrotate(src, float(angles[0]) if src.ndim == 3 else nd.array(angles), zoom_in, zoom_out)
