"""Proposal and MultiProposal: regions of interest from a proposal network ("Faster R-CNN", 2015).

The anchors of each pixel are moved and resized by the network's output, clipped to the image, sorted by score and
reduced by non-maximum suppression. Corners are pixels, both inclusive, so a box of one pixel has width 1. If fewer than
``rpn_post_nms_top_n`` regions remain, they are repeated from the first.
"""

from __future__ import annotations

import math

import numpy as np

from weftplan.errors import ParameterError, ShapeError
from weftplan.ops.contrib.detection.boxes import areas, overlap_scratch
from weftplan.ops.contrib.detection.suppression import suppress
from weftplan.ops.core.forms import ScratchSpecs, kernel
from weftplan.ops.core.kernels import BOOL
from weftplan.ops.core.params import p_bool, p_float, p_int, p_tuple
from weftplan.ops.core.registry import register
from weftplan.ops.core.rules import Shapes, floats_only, merge_dim, merge_shape, zero_gradient
from weftplan.ops.core.schema import Op, Param, Params, Shape, ShapeRule, SpecLike
from weftplan.support.array_types import ArrayModule, RawArray

_PARAMS = (
    Param("rpn_pre_nms_top_n", p_int, 6000, "at most this many boxes take part in suppression"),
    Param("rpn_post_nms_top_n", p_int, 300, "regions of each image"),
    Param("threshold", p_float, 0.7, "boxes that overlap more with a better one go"),
    Param("rpn_min_size", p_int, 16, "least height and width of a region, for an image of scale 1"),
    Param("scales", p_tuple(p_float), (4.0, 8.0, 16.0, 32.0), "sizes of anchors, in steps"),
    Param("ratios", p_tuple(p_float), (0.5, 1.0, 2.0), "ratios of height and width of anchors"),
    Param("feature_stride", p_int, 16, "pixels of the image for one of the network's output"),
    Param("output_score", p_bool, False, "give the scores as a second output"),
    Param("iou_loss", p_bool, False, "the network says how far each corner moves, in pixels"),
)


def anchors_of(params: Params) -> RawArray:
    """Return the corners (n, 4) of the anchors of the first pixel, as float64 on the host."""
    stride = params["feature_stride"]
    centre, area = 0.5 * (stride - 1), stride * stride
    anchors = []
    for ratio in params["ratios"]:
        side = math.floor(math.sqrt(math.floor(area / ratio)) + 0.5)
        height = math.floor(side * ratio + 0.5)
        for scale in params["scales"]:
            half_x, half_y = 0.5 * (side * scale - 1), 0.5 * (height * scale - 1)
            anchors.append((centre - half_x, centre - half_y, centre + half_x, centre + half_y))
    return np.array(anchors)


def _count(params: Params, name: str) -> int:
    count = len(params["scales"]) * len(params["ratios"])
    stride, ratios = params["feature_stride"], params["ratios"]
    fitting = stride > 0 and all(0 < ratio < math.inf and stride * stride / ratio < math.inf for ratio in ratios)
    if not count or not fitting or params["rpn_post_nms_top_n"] < 1:
        raise ParameterError(
            f"{name}: expected scales, positive ratios, feature_stride and rpn_post_nms_top_n, got scales="
            f"{params['scales']}, ratios={params['ratios']}, feature_stride={params['feature_stride']} and "
            f"rpn_post_nms_top_n={params['rpn_post_nms_top_n']}"
        )
    return count


def _infer_shape(name: str, max_images: int | None) -> ShapeRule:
    def infer(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
        count, top = _count(params, name), params["rpn_post_nms_top_n"]
        scores = merge_shape((0, 2 * count, 0, 0), ins[0], f"{name}: cls_prob (batch, 2 · anchors, height, width)")
        moves = merge_shape((0, 4 * count, 0, 0), ins[1], f"{name}: bbox_pred (batch, 4 · anchors, height, width)")
        info = merge_shape((0, 3), ins[2], f"{name}: im_info (batch, 3)")
        assert scores is not None
        assert moves is not None
        assert info is not None
        batch = merge_dim(merge_dim(scores[0], moves[0], f"{name}: batch"), info[0], f"{name}: batch of im_info")
        for width, out in zip((5, 1), outs, strict=True):
            merged = merge_shape((0, width), out, f"{name}: output (batch · rpn_post_nms_top_n, {width})")
            assert merged is not None
            if merged[0] % top:
                raise ShapeError(f"{name}: output {merged} is not a multiple of rpn_post_nms_top_n={top}")
            batch = merge_dim(batch, merged[0] // top, f"{name}: batch of output {merged}")
        if max_images is not None and batch > max_images:
            raise ShapeError(f"{name} takes one image, got a batch of {batch}: MultiProposal takes several")
        image = merge_shape(scores[2:], moves[2:], f"{name}: pixels of cls_prob and bbox_pred")
        assert image is not None
        new = [(batch, scores[1], *image), (batch, moves[1], *image), (batch, 3)]
        return [*new], [(batch * top, 5), (batch * top, 1)]

    return infer


def _compared(params: Params, count: int) -> int:
    return min(params["rpn_pre_nms_top_n"], count) if params["rpn_pre_nms_top_n"] > 0 else count


def _scratch(params: Params, scores: SpecLike, *specs: SpecLike | None) -> ScratchSpecs:
    """Return the scratch: boxes and scores of all anchors, and the arrays of suppression for the best anchors."""
    shape, dtype = scores.shape, scores.dtype
    count = shape[1] // 2 * shape[2] * shape[3]
    compared = _compared(params, count)
    shapes: list[Shape] = [(count, 4), (count,), (compared, 4), (compared,), (compared,)]
    return [*((shape, dtype) for shape in shapes), ((compared,), BOOL), *overlap_scratch(compared, dtype)]


@kernel(scratch=_scratch)
def _proposal(
    xp: ArrayModule,
    p: Params,
    scores: RawArray,
    moves: RawArray,
    info: RawArray,
    rois: RawArray | None,
    roi_scores: RawArray | None,
    *buffers: RawArray,
) -> None:
    boxes, values, best, sizes, row, survives, *scratch = buffers
    top = p["rpn_post_nms_top_n"]
    for item in range(scores.shape[0]):
        _propose(xp, p, scores[item], moves[item], info[item].tolist(), boxes, values)
        order = xp.argsort(-values, kind="stable")[: len(best)]
        xp.take(boxes, order, axis=0, out=best, mode="clip")
        xp.add(best[:, 2:], 1, out=best[:, 2:])  # corners are pixels: the far corner is included
        areas(xp, best, sizes, row)
        suppress(xp, best, sizes, None, p["threshold"], survives, row, scratch, inclusive=False)
        survivors = order[survives][:top]
        chosen = survivors[xp.arange(top) % len(survivors)]
        part = slice(item * top, (item + 1) * top)
        if rois is not None:
            rois[part, 0] = item
            rois[part, 1:] = boxes[chosen]
        if roi_scores is not None:
            roi_scores[part, 0] = values[chosen]


def _propose(
    xp: ArrayModule,
    params: Params,
    scores: RawArray,
    moves: RawArray,
    info: list[float],
    boxes: RawArray,
    values: RawArray,
) -> None:
    """Write one image's boxes and scores, ordered by row, column and anchor.

    A box gets a score of -1 if its pixel is beyond the image's height or width, which ``info`` has, or if one of its
    sides is below ``rpn_min_size`` in the image's scale.
    """
    anchors = anchors_of(params)
    count, (height, width) = len(anchors), scores.shape[1:]
    stride = params["feature_stride"]
    grid = boxes.reshape(height, width, count, 4)
    shape = (height, width, count)
    base = xp.asarray(anchors, dtype=boxes.dtype)
    columns = xp.arange(width, dtype=boxes.dtype)[None, :, None] * stride
    rows = xp.arange(height, dtype=boxes.dtype)[:, None, None] * stride
    by_anchor = moves.reshape(count, 4, height, width).transpose(2, 3, 0, 1)
    for low, shift, limit in ((0, columns, info[1]), (1, rows, info[0])):
        begin, end = base[:, low] + shift, base[:, low + 2] + shift
        move, stretch = by_anchor[..., low], by_anchor[..., low + 2]
        if params["iou_loss"]:
            begin, end = begin + move, end + stretch
        else:
            size = end - begin + 1
            centre = move * size + (begin + 0.5 * (size - 1))
            half = 0.5 * (xp.exp(stretch) * size - 1)
            begin, end = centre - half, centre + half
        grid[..., low] = xp.broadcast_to(xp.clip(begin, 0, limit - 1), shape)
        grid[..., low + 2] = xp.broadcast_to(xp.clip(end, 0, limit - 1), shape)
    ordered = values.reshape(shape)
    xp.copyto(ordered, scores[count:].transpose(1, 2, 0))
    ordered[int(info[0] / stride) :] = -1
    ordered[:, int(info[1] / stride) :] = -1
    least = params["rpn_min_size"] * info[2]
    small = (boxes[:, 2] - boxes[:, 0] + 1 < least) | (boxes[:, 3] - boxes[:, 1] + 1 < least)
    values[small] = -1
    boxes[small, :2] -= least / 2
    boxes[small, 2:] += least / 2


for _name, _max_images, _doc in (
    ("Proposal", 1, "Regions (0, x1, y1, x2, y2) of one image, the best first, and their scores."),
    ("MultiProposal", None, "Regions (image, x1, y1, x2, y2) of each image, the best first, and their scores."),
):
    register(
        Op(
            name=f"_contrib_{_name}",
            forward=_proposal,
            infer_shape=_infer_shape(_name, _max_images),
            infer_dtype=floats_only(_name),
            params=_PARAMS,
            inputs=("cls_prob", "bbox_pred", "im_info"),
            outputs=("output", "score"),
            visible_outputs=lambda params: 2 if params["output_score"] else 1,
            gradient=zero_gradient,
            doc=_doc,
        )
    )
