"""MultiBoxPrior and MultiBoxDetection of single-shot detectors (Liu et al., "SSD", 2016).

Boxes are given by corners relative to the image. A box is encoded relative to an anchor: the shift of its centre in
units of the anchor's size, and the logarithms of the ratios of the sizes, each divided by a variance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from weftplan.errors import ParameterError, ShapeError
from weftplan.ops.contrib.detection.boxes import areas, overlap_scratch
from weftplan.ops.contrib.detection.suppression import suppress
from weftplan.ops.core.forms import ScratchSpecs, kernel
from weftplan.ops.core.kernels import BOOL, INDEX
from weftplan.ops.core.params import p_bool, p_float, p_int, p_tuple
from weftplan.ops.core.registry import register
from weftplan.ops.core.rules import Shapes, floats_only, merge_shape, zero_gradient
from weftplan.ops.core.schema import Op, Param, Params, Shape, SpecLike
from weftplan.support.array_types import ArrayModule, RawArray

_floats = p_tuple(p_float)

# ------------------------------------------------------------------------------------------------------- MultiBoxPrior

_PRIOR = (
    Param("sizes", _floats, (1.0,), "sizes of boxes, relative to the image"),
    Param("ratios", _floats, (1.0,), "ratios of width and height"),
    Param("clip", p_bool, False, "limit the boxes to the image"),
    Param("steps", _floats, (-1.0, -1.0), "distance of neighbours (y, x); -1: one pixel of data"),
    Param("offsets", _floats, (0.5, 0.5), "place of the centre within a step (y, x)"),
)


def _per_pixel(params: Params) -> int:
    for name in ("sizes", "ratios"):
        if not params[name]:
            raise ParameterError(f"MultiBoxPrior: {name} is empty, expected at least one number")
    for name in ("steps", "offsets"):
        if len(params[name]) != 2:
            raise ParameterError(f"MultiBoxPrior: {name}={params[name]}: expected two numbers (y, x)")
    return len(params["sizes"]) + len(params["ratios"]) - 1


def _prior_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    count = _per_pixel(params)
    data = merge_shape((0, 0, 0, 0), ins[0], "MultiBoxPrior: data (batch, channels, height, width)")
    assert data is not None
    out = merge_shape((1, data[2] * data[3] * count, 4), outs[0], "output of MultiBoxPrior (1, boxes, 4)")
    return [data], [out]


@kernel
def _prior(xp: ArrayModule, p: Params, data: RawArray, out: RawArray) -> None:
    height, width = data.shape[2:]
    count = _per_pixel(p)
    boxes = out.reshape(height, width, count, 4)
    step_y, step_x = (step if step > 0 else 1.0 / side for step, side in zip(p["steps"], (height, width), strict=True))
    offset_y, offset_x = p["offsets"]
    rows = xp.asarray((np.arange(height) + offset_y) * step_y, dtype=out.dtype)[:, None]
    columns = xp.asarray((np.arange(width) + offset_x) * step_x, dtype=out.dtype)
    sizes, ratios = p["sizes"], p["ratios"]
    shapes = [(size, ratios[0]) for size in sizes] + [(sizes[0], ratio) for ratio in ratios[1:]]
    for k, (size, ratio) in enumerate(shapes):
        root = math.sqrt(ratio)
        half_x, half_y = size * height / width * root / 2, size / root / 2
        boxes[:, :, k, 0], boxes[:, :, k, 2] = columns - half_x, columns + half_x
        boxes[:, :, k, 1], boxes[:, :, k, 3] = rows - half_y, rows + half_y
    if p["clip"]:
        xp.clip(out, 0.0, 1.0, out=out)


register(
    Op(
        name="_contrib_MultiBoxPrior",
        forward=_prior,
        infer_shape=_prior_shape,
        infer_dtype=floats_only("MultiBoxPrior"),
        params=_PRIOR,
        gradient=zero_gradient,
        doc="Anchors of every pixel of data: (1, height · width · boxes of a pixel, 4), corners.",
    )
)

# --------------------------------------------------------------------------------------------------- MultiBoxDetection

VARIANCES = Param("variances", _floats, (0.1, 0.1, 0.2, 0.2), "of centre x, y, width and height")
_DETECTION = (
    Param("clip", p_bool, True, "limit the boxes to the image"),
    Param("threshold", p_float, 0.01, "boxes whose best class has a lower probability go"),
    Param("background_id", p_int, 0, "accepted, no effect: the background is class 0, as in MXNet 1.9.1"),
    Param("nms_threshold", p_float, 0.5, "boxes that overlap as much with a better one go"),
    Param("force_suppress", p_bool, False, "boxes of other classes suppress, too"),
    VARIANCES,
    Param("nms_topk", p_int, -1, "at most this many boxes take part; -1: all"),
)


def check_variances(params: Params, name: str) -> None:
    """Raise ParameterError unless the parameter ``variances`` has four numbers."""
    if len(params["variances"]) != 4:
        raise ParameterError(f"{name}: variances={params['variances']}: expected four numbers")


def _detection_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    name = "MultiBoxDetection"
    check_variances(params, name)
    cls_prob = merge_shape((0, 0, 0), ins[0], f"{name}: cls_prob (batch, classes, anchors)")
    loc_pred = merge_shape((0, 0), ins[1], f"{name}: loc_pred (batch, 4 · anchors)")
    anchor = merge_shape((1, 0, 4), ins[2], f"{name}: anchor (1, anchors, 4)")
    out = merge_shape((0, 0, 6), outs[0], f"{name}: output (batch, anchors, 6)")
    assert cls_prob is not None
    assert loc_pred is not None
    assert anchor is not None
    assert out is not None
    if loc_pred[1] % 4:
        raise ShapeError(f"{name}: loc_pred has shape {loc_pred}, expected 4 numbers for each anchor")
    grid: Shape = (0, 0)
    for shape, what in (
        ((cls_prob[0], cls_prob[2]), "cls_prob"),
        ((loc_pred[0], loc_pred[1] // 4), "loc_pred"),
        ((0, anchor[1]), "anchor"),
        (out[:2], "output"),
    ):
        grid = merge_shape(grid, shape, f"{name}: batch and anchors of {what} and before") or grid
    batch, count = grid
    return [(batch, cls_prob[1], count), (batch, 4 * count), (1, count, 4)], [(batch, count, 6)]


def decode(xp: ArrayModule, anchors: RawArray, coded: RawArray, variances: Sequence[float], out: RawArray) -> None:
    """Decode ``coded`` (n, 4), relative to ``anchors``, to the corners of boxes, ``out`` (n, 4)."""
    for low, high in ((0, 2), (1, 3)):
        begin, end = anchors[:, low], anchors[:, high]
        size = end - begin
        centre = coded[:, low] * variances[low] * size + (begin + end) * 0.5
        half = xp.exp(coded[:, high] * variances[high]) * size * 0.5
        xp.subtract(centre, half, out=out[:, low])
        xp.add(centre, half, out=out[:, high])


def _detection_scratch(
    params: Params, cls_prob: SpecLike, loc_pred: SpecLike, anchor: SpecLike, out: SpecLike
) -> ScratchSpecs:
    count, dtype = cls_prob.shape[2], out.dtype
    vector = (count,)
    return [
        ((count, 6), dtype),
        (vector, dtype),
        (vector, dtype),
        (vector, BOOL),
        (vector, INDEX),
        *overlap_scratch(count, dtype),
    ]


@kernel(scratch=_detection_scratch)
def _detection(
    xp: ArrayModule,
    p: Params,
    cls_prob: RawArray,
    loc_pred: RawArray,
    anchor: RawArray,
    out: RawArray,
    *buffers: RawArray,
) -> None:
    decoded, sizes, row, survives, best, *scratch = buffers
    out.fill(-1)
    for item in range(out.shape[0]):
        number = _detect(xp, p, cls_prob[item], loc_pred[item].reshape(-1, 4), anchor[0], best, decoded)
        boxes = decoded[:number]
        target = out[item]
        if number and 0 < p["nms_threshold"] <= 1:
            order = xp.argsort(-boxes[:, 1], kind="stable")
            limit = min(number, p["nms_topk"]) if p["nms_topk"] > 0 else number
            xp.copyto(target[:number], boxes)
            target[:limit] = boxes[order[:limit]]
            target[limit:number, 0] = -1
            chosen = target[:limit]
            areas(xp, chosen[:, 2:], sizes[:limit], row[:limit])
            classes = None if p["force_suppress"] else chosen[:, 0].copy()
            threshold = p["nms_threshold"]
            suppress(
                xp, chosen[:, 2:], sizes[:limit], classes, threshold, survives[:limit], row, scratch, inclusive=True
            )
            xp.copyto(chosen[:, 0], -1, where=~survives[:limit])
        else:
            xp.copyto(target[:number], boxes)


def _detect(
    xp: ArrayModule,
    params: Params,
    probability: RawArray,
    coded: RawArray,
    anchors: RawArray,
    best: RawArray,
    boxes_out: RawArray,
) -> int:
    """Write (class, score, corners) of each detected box to ``boxes_out``; return the number of these boxes.

    The score of a box is its largest probability of a class other than the background. A box is detected if its score
    reaches ``threshold``.
    """
    if len(probability) < 2:
        return 0
    xp.argmax(probability[1:], axis=0, out=best)
    scores = xp.take_along_axis(probability[1:], best[None], axis=0)[0]
    passing = xp.nonzero(scores >= params["threshold"])[0]
    number = len(passing)
    boxes = boxes_out[:number]
    boxes[:, 0] = best[passing]
    boxes[:, 1] = scores[passing]
    decode(xp, anchors[passing], coded[passing], params["variances"], boxes[:, 2:])
    if params["clip"]:
        boxes[:, 2:] = xp.clip(boxes[:, 2:], 0.0, 1.0)
    return number


register(
    Op(
        name="_contrib_MultiBoxDetection",
        forward=_detection,
        infer_shape=_detection_shape,
        infer_dtype=floats_only("MultiBoxDetection"),
        params=_DETECTION,
        inputs=("cls_prob", "loc_pred", "anchor"),
        gradient=zero_gradient,
        doc="(class, score, corners) of each box found, the best first; -1 as class for what does not count.",
    )
)
