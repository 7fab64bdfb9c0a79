"""What a picture was drawn from: a line of text in the file itself, which a test compares with the present value.

The line is the description of an SVG and a text chunk of a PNG, so it travels with the picture.
"""

from __future__ import annotations

import html
import re
import struct
import zlib
from pathlib import Path

IMAGES = Path(__file__).parent / "images"
_HEAD = b"\x89PNG\r\n\x1a\n"
_KEY = b"tEXtDescription\0"


def write_source(picture: Path, source: str) -> None:
    """Store ``source``, one line of ASCII, in a finished PNG or SVG file."""
    if picture.suffix == ".svg":
        text = picture.read_text(encoding="utf-8")
        opening = re.search(r"<svg\b[^>]*>", text)
        assert opening is not None, picture
        described = f"{text[: opening.end()]}<desc>{html.escape(source)}</desc>{text[opening.end() :]}"
        picture.write_text(described, encoding="utf-8")
        return
    data, chunk = picture.read_bytes(), _KEY + source.encode("ascii")
    at = len(_HEAD) + 25  # after the first chunk, the header of 13 bytes
    packed = struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk))
    picture.write_bytes(data[:at] + packed + data[at:])


def read_source(picture: Path) -> str:
    """Return the text of :func:`write_source`; empty if there is none."""
    if picture.suffix == ".svg":
        found = re.search(r"<desc>(.*?)</desc>", picture.read_text(encoding="utf-8"))
        return html.unescape(found[1]) if found else ""
    data = picture.read_bytes()
    start = data.find(_KEY)
    (length,) = struct.unpack(">I", data[start - 4 : start]) if start > 0 else (len(_KEY) - 4,)
    return data[start + len(_KEY) : start + 4 + length].decode("ascii") if start > 0 else ""
