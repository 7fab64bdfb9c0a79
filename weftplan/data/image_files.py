"""Image codecs: decode files into pixels and encode pixels, through Pillow.

Pixels are uint8 arrays of shape (height, width, channels) in RGB order, as in MXNet. All functions are thread-safe.
"""

from __future__ import annotations

import io
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from weftplan.errors import FormatError, MXNetError, ParameterError
from weftplan.support.array_types import DType
from weftplan.support.atomic_files import other_kind

Host = np.ndarray[Any, DType]

COLOUR = 1
"""The flag for three channels. 0 is the flag for one grey channel, -1 for the channels of the file."""
_DOCUMENTS = frozenset({".pdf", ".eps", ".ps", ".mpg", ".mpeg", ".hdf", ".h5", ".fits", ".fit", ".grib", ".bufr"})
"""Suffixes that Pillow registers for documents and data, which it cannot decode by itself."""
_PLAIN = {1: "L", 3: "RGB", 4: "RGBA"}


def pillow() -> ModuleType:
    """Import ``PIL.Image``; raises MXNetError with the install command if Pillow is missing."""
    try:
        from PIL import Image
    except ImportError as error:
        raise MXNetError("images need Pillow: pip install 'weftplan[image]'") from error
    return Image


def image_suffixes() -> frozenset[str]:
    """Return the suffixes of files that Pillow reads, in lower case and with a dot."""
    module = pillow()
    module.init()
    readable = frozenset(suffix for suffix, kind in module.registered_extensions().items() if kind in module.OPEN)
    return readable - _DOCUMENTS


def decode(content: bytes, flag: int = COLOUR, what: str = "these bytes") -> Host:
    """Decode a file's bytes into pixels, rotated according to its EXIF orientation.

    Args:
        flag: 1 for three channels, 0 for one grey channel, -1 for the channels of the file.
        what: names the file in errors.

    Raises:
        FormatError: no image, or a damaged one, or one of more pixels than Pillow lets pass.
        ParameterError: another flag.
    """
    if flag not in (-1, 0, 1):
        raise ParameterError(f"flag must be 1 (three channels), 0 (grey) or -1 (as in the file), got {flag!r}")
    module = pillow()
    from PIL import ImageOps

    if not content:
        raise FormatError(f"{what}: no image: there are no bytes")
    try:
        with module.open(io.BytesIO(content)) as opened:
            # Pillow only warns up to twice its limit. Filters of warnings belong to the process and would change those
            # of other threads, so the limit is compared here.
            pixels, limit = opened.width * opened.height, module.MAX_IMAGE_PIXELS
            if limit is not None and pixels > limit:
                raise module.DecompressionBombError(f"image size ({pixels} pixels) exceeds limit of {limit} pixels")
            if flag == 0:
                opened.draft("L", None)  # a JPEG stores its grey values, which RGB rounds; MXNet reads them, too
            opened.load()
            picture = ImageOps.exif_transpose(opened)
    except module.UnidentifiedImageError:
        reason = other_kind(content[:64]) or f"it begins with {content[:12]!r}"
        raise FormatError(f"{what}: no image that can be read; {reason}") from None
    except (module.DecompressionBombWarning, module.DecompressionBombError) as error:
        raise FormatError(f"{what}: {error}") from None
    except Exception as error:  # a damaged file may raise anything inside its decoder
        raise FormatError(f"{what}: a damaged image: {error}") from error
    if picture.mode.startswith(("I", "F")):  # 16 bits a pixel and more: the upper eight count
        deep = np.asarray(picture, np.float64) / (256.0 if picture.mode.startswith("I") else 1.0)
        picture = module.fromarray(np.clip(deep, 0, 255).astype(np.uint8))
    if flag == 0:
        picture = picture.convert("L")
    elif flag == 1 or picture.mode not in _PLAIN.values():
        picture = picture.convert("RGB")
    values = np.asarray(picture, np.uint8)
    return values if values.ndim == 3 else values[:, :, None]


def encode(pixels: ArrayLike, quality: int = 95, img_fmt: str = ".jpg") -> bytes:
    """Encode pixels as a JPEG or PNG file.

    Args:
        pixels: uint8 of shape (height, width[, 1, 3 or 4]).
        quality: of JPEG from 1 to 100; for PNG the compression from 0 to 9, and 9 for anything above.
        img_fmt: ``.jpg`` or ``.png``.

    Raises:
        ParameterError: another format or quality, or no pixels.
    """
    pixels = np.asarray(pixels)
    kind = {".jpg": "JPEG", ".jpeg": "JPEG", ".png": "PNG"}.get(img_fmt.lower())
    if kind is None:
        raise ParameterError(f"img_fmt must be '.jpg' or '.png', got {img_fmt!r}")
    if pixels.ndim == 3 and pixels.shape[2] == 1:
        pixels = pixels[:, :, 0]
    if pixels.dtype != np.uint8 or not (pixels.ndim == 2 or (pixels.ndim == 3 and pixels.shape[2] in (3, 4))):
        raise ParameterError(f"expected uint8 pixels of (height, width, 1 or 3), got {pixels.dtype} {pixels.shape}")
    least = 1 if kind == "JPEG" else 0
    if not least <= quality <= 100:
        raise ParameterError(f"quality of {kind} must be {least} to 100, got {quality}")
    held = io.BytesIO()
    picture = pillow().fromarray(np.ascontiguousarray(pixels))
    if kind == "JPEG":
        picture.convert("RGB" if pixels.ndim == 3 else "L").save(held, kind, quality=quality)
    else:
        picture.save(held, kind, compress_level=min(quality, 9))
    return held.getvalue()
