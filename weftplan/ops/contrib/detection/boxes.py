"""Boxes: corners and centres, areas, overlaps, and the operator box_iou.

A box is (left, top, right, bottom) or (centre x, centre y, width, height). A box with a negative side has area 0, and a
box of area 0 has overlap 0 with every box. The functions write their results to arrays that the caller provides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from weftplan.errors import ShapeError
from weftplan.ops.core.forms import ScratchSpecs, kernel
from weftplan.ops.core.params import p_enum
from weftplan.ops.core.registry import register
from weftplan.ops.core.rules import Shapes, floats_only, merge_shape, zero_gradient
from weftplan.ops.core.schema import DType, Op, Param, Params, Shape, SpecLike
from weftplan.support.array_types import ArrayModule, RawArray


def p_format(name: str, default: str, doc: str) -> Param:
    """Return a parameter ``name`` for the format of boxes, ``corner`` or ``center``."""
    return Param(name, p_enum("corner", "center"), default, doc)


def to_corners(xp: ArrayModule, boxes: RawArray, form: str, out: RawArray) -> None:
    """Write the corners of ``boxes`` (n, 4) to ``out``, another array, or the same one if ``form`` is ``corner``."""
    if form == "corner":
        if out is not boxes:
            xp.copyto(out, boxes)
        return
    for low, high in ((0, 2), (1, 3)):
        xp.multiply(boxes[:, high], 0.5, out=out[:, high])
        xp.subtract(boxes[:, low], out[:, high], out=out[:, low])
        xp.add(boxes[:, low], out[:, high], out=out[:, high])


def areas(xp: ArrayModule, boxes: RawArray, out: RawArray, spare: RawArray) -> None:
    """Write the areas of ``boxes``, given by corners, to ``out`` (n,); ``spare`` (n,) is scratch."""
    xp.subtract(boxes[:, 2], boxes[:, 0], out=out)
    xp.subtract(boxes[:, 3], boxes[:, 1], out=spare)
    xp.maximum(out, 0, out=out)
    xp.maximum(spare, 0, out=spare)
    xp.multiply(out, spare, out=out)


def overlap_scratch(count: int, dtype: DType) -> list[tuple[Shape, DType]]:
    """Return the shapes and dtypes of the scratch of :func:`overlaps` for ``count`` boxes."""
    return [((count,), dtype), ((count,), dtype)]


def overlaps(
    xp: ArrayModule,
    box: RawArray,
    area: RawArray | np.generic,
    boxes: RawArray,
    sizes: RawArray,
    out: RawArray,
    scratch: Sequence[RawArray],
) -> None:
    """Write the intersection over union of ``box`` and each of ``boxes`` (n, 4) to ``out`` (n,).

    All boxes are given by corners; ``area`` is the area of ``box``, ``sizes`` (n,) are the areas of ``boxes``.
    """
    low, high = scratch
    for axis, target in ((0, out), (1, high)):
        xp.minimum(boxes[:, axis + 2], box[axis + 2], out=target)
        xp.maximum(boxes[:, axis], box[axis], out=low)
        xp.subtract(target, low, out=target)
        xp.maximum(target, 0, out=target)
    xp.multiply(out, high, out=out)
    xp.add(sizes, area, out=low)
    xp.subtract(low, out, out=low)
    xp.divide(out, low, out=out)
    xp.copyto(out, 0, where=low <= 0)


# ------------------------------------------------------------------------------------------------------------- box_iou


def _iou_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    lhs, rhs = ins
    for shape in ins:
        if shape is not None and (not shape or shape[-1] not in (0, 4)):
            raise ShapeError(f"box_iou expects boxes of 4 numbers in the last dimension, got shape {shape}")
    if lhs is None or rhs is None:
        return ins, outs
    lhs, rhs = (*lhs[:-1], 4), (*rhs[:-1], 4)
    out = merge_shape((*lhs[:-1], *rhs[:-1]) or (1,), outs[0], f"output of box_iou of {lhs} and {rhs}")
    if out is not None and lhs[:-1] + rhs[:-1]:
        lhs, rhs = (*out[: len(lhs) - 1], 4), (*out[len(lhs) - 1 :], 4)
    return [lhs, rhs], [out]


def _iou_scratch(params: Params, lhs: SpecLike, rhs: SpecLike, out: SpecLike) -> ScratchSpecs:
    count, columns = math.prod(lhs.shape[:-1]), math.prod(rhs.shape[:-1])
    shapes: list[Shape] = [(count, 4), (columns, 4), (count,), (columns,), (max(count, columns),)]
    return [*((shape, out.dtype) for shape in shapes), *overlap_scratch(columns, out.dtype)]


@kernel(scratch=_iou_scratch)
def _iou(xp: ArrayModule, p: Params, lhs: RawArray, rhs: RawArray, out: RawArray, *buffers: RawArray) -> None:
    row_boxes, column_boxes, row_areas, column_areas, spare, *scratch = buffers
    for source, boxes, size in ((lhs, row_boxes, row_areas), (rhs, column_boxes, column_areas)):
        to_corners(xp, source.reshape(-1, 4), p["format"], boxes)
        areas(xp, boxes, size, spare[: len(size)])
    target = out.reshape(len(row_boxes), len(column_boxes))
    for row in range(len(row_boxes)):
        overlaps(xp, row_boxes[row], row_areas[row], column_boxes, column_areas, target[row], scratch)


register(
    Op(
        name="_contrib_box_iou",
        forward=_iou,
        infer_shape=_iou_shape,
        infer_dtype=floats_only("box_iou"),
        params=(p_format("format", "corner", "corners of the boxes, or centre and size"),),
        inputs=("lhs", "rhs"),
        gradient=zero_gradient,
        doc="Intersection over union of each box of lhs with each of rhs.",
    )
)
