"""The special codes of ``Reshape``: 0, -1, -2, -3 and -4.

Shape inference and conversion use this arithmetic, which reads the codes from the left or from the right.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from weftplan.errors import ShapeError
from weftplan.ops.core.schema import Shape


def reshaped(source: Shape, codes: Sequence[int], *, reverse: bool = False) -> Shape:
    """Return the shape that ``Reshape(shape=codes)`` gives to a tensor of shape ``source``.

    ====  ==========================================================
    0     the same dimension of the input
    -1    inferred from the total size (at most once)
    -2    all remaining dimensions of the input
    -3    the product of the next two dimensions of the input
    -4    the next dimension of the input split into the two that follow (one of which may be -1)
    ====  ==========================================================

    ``reverse`` matches the codes with the input from the right; the two sizes of -4 then precede it, as in MXNet 1.9.1,
    or follow it if that has no meaning. A dimension 0 of ``source`` is unknown, and so are dimensions computed from it.

    >>> reshaped((2, 3, 4), (-4, 1, 2, -2)), reshaped((10, 5, 4), (-1, 0), reverse=True)
    ((1, 2, 3, 4), (50, 4))

    Raises:
        ShapeError: the sizes do not agree, or a code has no dimension of the input left to work on.
    """
    groups = _grouped_from_right(source, codes) if reverse else _grouped(source, codes)
    dims = list(source)
    if reverse:
        dims.reverse()
    walk = _Walk(source, codes, dims, reverse)
    for group in groups:
        walk.take(group)
    return walk.finish()


def _grouped(source: Shape, codes: Sequence[int]) -> list[tuple[int, ...]]:
    """Return ``codes`` as groups: each -4 with its two sizes, every other code alone."""
    groups: list[tuple[int, ...]] = []
    position = 0
    while position < len(codes):
        width = 3 if codes[position] == -4 else 1
        group = tuple(codes[position : position + width])
        if group[0] < -4:
            raise ShapeError(f"Reshape of {source} to {tuple(codes)}: code {group[0]} is unknown, expected -4 or more")
        if len(group) < width or (width == 3 and (min(group[1:]) < -1 or 0 in group or group[1:] == (-1, -1))):
            raise ShapeError(f"Reshape of {source} to {tuple(codes)}: -4 needs two sizes, of which one may be -1")
        groups.append(group)
        position += width
    return groups


def _grouped_from_right(source: Shape, codes: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the groups from last to first; -4 takes the two sizes before it if that is valid for the whole list."""
    try:
        groups = _grouped(source, codes[::-1])
    except ShapeError:
        return _grouped(source, codes)[::-1]
    return [(-4, group[2], group[1]) if group[0] == -4 else group for group in groups]


class _Walk:
    """The state of a reshape: dimensions of the input not yet read, and dimensions of the output, code by code."""

    def __init__(self, source: Shape, codes: Sequence[int], dims: list[int], reverse: bool) -> None:
        self.what = f"Reshape of {source} to {tuple(codes)}" + (" from the right" if reverse else "")
        self.reverse = reverse
        self.size = math.prod(source)
        self.unread = dims[::-1]
        self.out: list[int] = []
        self.inferred: int | None = None

    def pop_dim(self) -> int:
        if not self.unread:
            raise ShapeError(f"{self.what}: the input has no dimension left for the next code")
        return self.unread.pop()

    def take(self, group: tuple[int, ...]) -> None:
        code = group[0]
        if code == 0:
            self.out.append(self.pop_dim())
        elif code == -2:
            self.out.extend(reversed(self.unread))
            self.unread.clear()
        elif code == -3:
            self.out.append(self.pop_dim() * self.pop_dim())
        elif code == -4:
            self.split(self.pop_dim(), *group[1:])
        else:
            if self.unread:
                self.unread.pop()
            if code == -1:
                if self.inferred is not None:
                    raise ShapeError(f"{self.what}: only one dimension may be -1")
                self.inferred = len(self.out)
            self.out.append(1 if code == -1 else code)

    def split(self, dim: int, outer: int, inner: int) -> None:
        if outer == -1:
            outer = dim // inner
        elif inner == -1:
            inner = dim // outer
        if dim and outer * inner != dim:
            raise ShapeError(f"{self.what}: {dim} cannot be split into {outer} x {inner}")
        self.out.extend((inner, outer) if self.reverse else (outer, inner))

    def finish(self) -> Shape:
        size = math.prod(self.out)
        if self.inferred is not None:
            if size and self.size % size:
                raise ShapeError(f"{self.what}: {self.size} elements are not divisible by {size}")
            self.out[self.inferred] = self.size // size if size else 0
        elif size != self.size and 0 not in self.out and self.size:
            raise ShapeError(f"{self.what}: {self.size} elements do not fit into {size}")
        return tuple(reversed(self.out) if self.reverse else self.out)
