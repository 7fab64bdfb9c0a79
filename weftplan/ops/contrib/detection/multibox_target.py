"""MultiBoxTarget: training targets of a single-shot detector's anchors, from the labelled boxes.

Each labelled box is matched to one anchor, greedily, the pair with the largest overlap first. Each remaining anchor is
matched to the box that it overlaps most, if the overlap exceeds ``overlap_threshold``. The other anchors are
background. A positive ``negative_mining_ratio`` limits the background to that number of anchors per matched anchor. It
selects the anchors with the lowest predicted probability of background; the remaining anchors get ``ignore_label``. The
labels of an image end at the first row whose class is -1.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from weftplan.errors import MXNetError, ShapeError
from weftplan.ops.contrib.detection.boxes import areas, overlap_scratch, overlaps
from weftplan.ops.contrib.detection.multibox import VARIANCES, check_variances
from weftplan.ops.core.forms import ScratchSpecs, kernel
from weftplan.ops.core.kernels import INDEX
from weftplan.ops.core.params import p_float, p_int
from weftplan.ops.core.registry import register
from weftplan.ops.core.rules import Shapes, floats_only, merge_shape, zero_gradient
from weftplan.ops.core.schema import Op, Param, Params, Shape, SpecLike
from weftplan.support.array_types import ArrayModule, RawArray

_LEAST = 1e-6
"""The greedy matching stops at pairs whose overlap does not exceed this number."""

_PARAMS = (
    Param("overlap_threshold", p_float, 0.5, "an anchor takes a box that it overlaps by more"),
    Param("ignore_label", p_float, -1.0, "class of anchors that do not count"),
    Param("negative_mining_ratio", p_float, -1.0, "background anchors for one with a box; -1: all"),
    Param("negative_mining_thresh", p_float, 0.5, "anchors that overlap a box by as much are no background"),
    Param("minimum_negative_samples", p_int, 0, "accepted, no effect, as in MXNet 1.9.1"),
    VARIANCES,
)


def _shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    name = "MultiBoxTarget"
    check_variances(params, name)
    anchor = merge_shape((1, 0, 4), ins[0], f"{name}: anchor (1, anchors, 4)")
    label = merge_shape((0, 0, 0), ins[1], f"{name}: label (batch, boxes, 5 or more)")
    cls_pred = merge_shape((0, 0, 0), ins[2], f"{name}: cls_pred (batch, classes, anchors)")
    assert anchor is not None
    assert label is not None
    assert cls_pred is not None
    if 0 < label[2] < 5:
        raise ShapeError(f"{name}: label has shape {label}, expected at least (class, 4 corners) for each box")
    grid: Shape = (0, 0)
    for shape, what in (((0, anchor[1]), "anchor"), ((label[0], 0), "label"), ((cls_pred[0], cls_pred[2]), "cls_pred")):
        grid = merge_shape(grid, shape, f"{name}: batch and anchors of {what} and before") or grid
    for position, out in enumerate(outs):
        merged = merge_shape((0, 0), out, f"{name}: output {position} of two dimensions")
        assert merged is not None
        if position < 2 and merged[1] % 4:
            raise ShapeError(f"{name}: output {position} has shape {merged}, expected 4 numbers for each anchor")
        merged = merged if position == 2 else (merged[0], merged[1] // 4)
        grid = merge_shape(grid, merged, f"{name}: batch and anchors of output {position}") or grid
    batch, count = grid
    wide = (batch, 4 * count)
    return [(1, count, 4), (batch, *label[1:]), (batch, cls_pred[1], count)], [wide, wide, (batch, count)]


def _scratch(params: Params, anchor: SpecLike, label: SpecLike, *specs: SpecLike | None) -> ScratchSpecs:
    """Return the scratch: two copies of the overlaps, work arrays, and each anchor's best overlap, area, box, state."""
    anchors, dtype = anchor.shape[1], anchor.dtype
    grid = (label.shape[1], anchors)
    return [
        (grid, dtype),
        (grid, dtype),
        ((anchors,), dtype),
        ((anchors,), dtype),
        ((anchors,), dtype),
        ((anchors,), INDEX),
        ((anchors,), np.dtype(np.int8)),
        *overlap_scratch(anchors, dtype),
    ]


@kernel(scratch=_scratch)
def _kernel(
    xp: ArrayModule,
    p: Params,
    anchor: RawArray,
    label: RawArray,
    cls_pred: RawArray,
    loc_target: RawArray | None,
    loc_mask: RawArray | None,
    cls_target: RawArray | None,
    *buffers: RawArray,
) -> None:
    grid, struck, best, sizes, spare, box, state, *scratch = buffers
    anchors = anchor[0]
    count = len(anchors)
    areas(xp, anchors, sizes, spare)
    for out, value in ((loc_target, 0.0), (loc_mask, 0.0), (cls_target, p["ignore_label"])):
        if out is not None:
            out.fill(value)
    for item in range(label.shape[0]):
        ended = xp.nonzero(label[item, :, 0] == -1)[0]
        number = int(ended[0]) if len(ended) else label.shape[1]
        if not number:
            continue
        truth = label[item, :number]
        for row in range(number):
            corners = truth[row, 1:5]
            area = xp.maximum(corners[2:3] - corners[:1], 0) * xp.maximum(corners[3:4] - corners[1:2], 0)
            overlaps(xp, corners, area, anchors, sizes, grid[row], scratch)
        _assign(xp, p, grid[:number], struck[:number], best, box, state)
        if p["negative_mining_ratio"] > 0:
            _mine(xp, p, cls_pred[item], best, state)
        else:
            xp.copyto(state, 0, where=state != 1)
        chosen = xp.nonzero(state == 1)[0]
        boxes = truth[box[chosen]]
        if cls_target is not None:
            xp.copyto(cls_target[item], 0, where=state == 0)
            cls_target[item][chosen] = boxes[:, 0] + 1
        if loc_mask is not None:
            loc_mask[item].reshape(count, 4)[chosen] = 1
        if loc_target is not None:
            loc_target[item].reshape(count, 4)[chosen] = encoded(xp, anchors[chosen], boxes[:, 1:5], p["variances"])


def _assign(
    xp: ArrayModule, params: Params, grid: RawArray, struck: RawArray, best: RawArray, box: RawArray, state: RawArray
) -> None:
    """Match anchors to boxes: set ``state`` to 1 for a matched anchor, else to -1.

    ``grid`` (boxes, anchors) has all overlaps; ``struck`` is scratch. For each anchor, ``box`` receives the index of
    its box and ``best`` their overlap; for an unmatched anchor, those of the box that it overlaps most.
    """
    number = len(grid)
    state.fill(-1)
    xp.copyto(struck, grid)
    xp.max(grid, axis=0, out=best)
    xp.argmax(grid, axis=0, out=box)
    for _ in range(number):
        # Of equal overlaps, take the first in the order of anchors, then of boxes.
        peaks = struck.max(axis=0)
        anchor = int(peaks.argmax())
        if not float(peaks[anchor]) > _LEAST:
            break
        row = int(struck[:, anchor].argmax())
        box[anchor], best[anchor], state[anchor] = row, grid[row, anchor], 1
        struck[row], struck[:, anchor] = -1, -1
    if params["overlap_threshold"] > 0:
        xp.copyto(state, 1, where=(state != 1) & (best > params["overlap_threshold"]))


def _mine(xp: ArrayModule, params: Params, predicted: RawArray, best: RawArray, state: RawArray) -> None:
    """Set ``state`` to 0 for the unmatched anchors with the lowest predicted probability of background.

    Their number is ``negative_mining_ratio`` times that of the matched anchors. An anchor qualifies if its largest
    overlap is below ``negative_mining_thresh``.
    """
    positive = int((state == 1).sum())
    count = min(int(positive * params["negative_mining_ratio"]), len(state) - positive)
    if not count:
        return
    free = xp.nonzero((state == -1) & (best < params["negative_mining_thresh"]))[0]
    if len(free) < count:
        raise MXNetError(
            f"MultiBoxTarget: {count} background anchors are wanted, but only {len(free)} overlap no box by "
            f"negative_mining_thresh={params['negative_mining_thresh']}: lower negative_mining_ratio"
        )
    scores = predicted[:, free]
    powers = xp.exp(scores - scores.max(axis=0))
    background = powers[0] / powers.sum(axis=0)
    state[free[xp.argsort(background, kind="stable")[:count]]] = 0


def encoded(xp: ArrayModule, anchors: RawArray, boxes: RawArray, variances: Sequence[float]) -> RawArray:
    """Return ``boxes`` (n, 4) encoded relative to ``anchors`` (n, 4)."""
    columns = [None] * 4
    for low, high in ((0, 2), (1, 3)):
        size, box_size = anchors[:, high] - anchors[:, low], boxes[:, high] - boxes[:, low]
        shift = (boxes[:, low] + boxes[:, high]) * 0.5 - (anchors[:, low] + anchors[:, high]) * 0.5
        columns[low] = shift / size / variances[low]
        columns[high] = xp.log(box_size / size) / variances[high]
    encoding: RawArray = xp.stack(columns, axis=1)
    return encoding


register(
    Op(
        name="_contrib_MultiBoxTarget",
        forward=_kernel,
        infer_shape=_shape,
        infer_dtype=floats_only("MultiBoxTarget"),
        params=_PARAMS,
        inputs=("anchor", "label", "cls_pred"),
        outputs=("loc_target", "loc_mask", "cls_target"),
        gradient=zero_gradient,
        doc="Coded locations, a mask of the anchors that have a box, and classes (0: background) for each anchor.",
    )
)
