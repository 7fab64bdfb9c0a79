"""box_nms and bipartite_matching: non-maximum suppression and matching of scored boxes.

Both visit their candidates from the best score to the worst, in stable order. Each decision depends on the earlier
ones, so the loop runs on the host; only the comparison of a box with all later boxes is an array operation.
"""

from __future__ import annotations

from collections.abc import Sequence

from weftplan.errors import ParameterError, ShapeError
from weftplan.ops.contrib.detection.boxes import areas, overlap_scratch, overlaps, p_format, to_corners
from weftplan.ops.core.forms import ScratchSpecs, kernel
from weftplan.ops.core.kernels import BOOL, INDEX
from weftplan.ops.core.params import p_bool, p_float, p_int
from weftplan.ops.core.registry import register
from weftplan.ops.core.rules import (
    DTypes,
    Shapes,
    backward,
    floats_only,
    grad,
    merge_dtype,
    merge_shape,
    zero_gradient,
)
from weftplan.ops.core.schema import Op, Param, Params, Shape, SpecLike
from weftplan.support.array_types import ArrayModule, RawArray

_NMS = (
    Param("overlap_thresh", p_float, 0.5, "boxes that overlap more with a better one go"),
    Param("valid_thresh", p_float, 0.0, "boxes with a score up to this go"),
    Param("topk", p_int, -1, "at most this many boxes take part; -1: all"),
    Param("coord_start", p_int, 2, "where the 4 coordinates of a box begin"),
    Param("score_index", p_int, 1, "where the score stands"),
    Param("id_index", p_int, -1, "where the class stands; -1: there is none"),
    Param("background_id", p_int, -1, "class whose boxes go, as those of class -1 do by default"),
    Param("force_suppress", p_bool, False, "boxes of other classes suppress, too"),
    p_format("in_format", "corner", "coordinates of data"),
    p_format("out_format", "corner", "coordinates of the output"),
)


def suppress(
    xp: ArrayModule,
    boxes: RawArray,
    sizes: RawArray,
    classes: RawArray | None,
    threshold: float,
    survives: RawArray,
    row: RawArray,
    scratch: Sequence[RawArray],
    *,
    inclusive: bool,
) -> None:
    """Set ``survives`` (n, bool) to False for each box that an earlier kept box overlaps by more than ``threshold``.

    Args:
        boxes: corners (n, 4), in the order of their scores.
        sizes: areas of the boxes.
        classes: class of each box; a box suppresses only boxes of its class. None: it suppresses all.
        row: scratch of n numbers, as is each array in ``scratch``.
        inclusive: whether an overlap of exactly ``threshold`` suppresses, too.
    """
    count = len(boxes)
    survives.fill(True)
    for best in range(count - 1):
        if not bool(survives[best]):
            continue
        later = slice(best + 1, count)
        overlap = row[: count - best - 1]
        overlaps(
            xp, boxes[best], sizes[best], boxes[later], sizes[later], overlap, [s[: len(overlap)] for s in scratch]
        )
        suppressed = overlap >= threshold if inclusive else overlap > threshold
        if classes is not None:
            suppressed &= classes[later] == classes[best]
        xp.copyto(survives[later], False, where=suppressed)


def _nms_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    data = merge_shape(ins[0], outs[0], "box_nms: data and output")
    if data is None:
        return ins, outs
    if len(data) < 2:
        raise ShapeError(f"box_nms expects boxes (…, boxes, numbers of a box), got shape {data}")
    width = data[-1]
    if width:
        highest = max(params["coord_start"] + 3, params["score_index"], params["id_index"])
        lowest = min(params["coord_start"], params["score_index"])
        if highest >= width or lowest < 0:
            raise ParameterError(
                f"box_nms: coord_start={params['coord_start']}, score_index={params['score_index']} and "
                f"id_index={params['id_index']} do not fit boxes of {width} numbers (data {data})"
            )
    return [data], [data, merge_shape((*data[:-1], 1), outs[1], "box_nms: places of the boxes kept")]


def _nms_dtype(params: Params, ins: DTypes, outs: DTypes) -> tuple[DTypes, DTypes]:
    data = merge_dtype(ins[0], outs[0], "box_nms: data and output")
    return [data], [data, merge_dtype(INDEX, outs[1], "box_nms: places of the boxes kept")]


def _nms_scratch(params: Params, data: SpecLike, *outputs: SpecLike | None) -> ScratchSpecs:
    count, dtype = data.shape[-2], data.dtype
    shapes: list[Shape] = [(count, 4), (count, 4), (count,), (count,), (count,)]
    mine = [*((shape, dtype) for shape in shapes), ((count,), BOOL), ((count,), INDEX)]
    return [*mine, *overlap_scratch(count, dtype)]


@kernel(scratch=_nms_scratch)
def _nms(
    xp: ArrayModule, p: Params, data: RawArray, out: RawArray | None, record: RawArray | None, *buffers: RawArray
) -> None:
    """Write the boxes that remain to ``out`` and their row numbers in ``data`` to ``record``; pad both with -1."""
    order, boxes, sizes, row, classes, survives, candidates, *scratch = buffers
    count, width = data.shape[-2:]
    source = data.reshape(-1, count, width)
    out, record = (None if y is None else y.reshape(source.shape[0], count, -1) for y in (out, record))
    corner, label = p["coord_start"], p["id_index"]
    coordinates = slice(corner, corner + 4)
    for item in range(source.shape[0]):
        chosen = _candidates(xp, p, source[item])
        number = len(chosen)
        candidates[:number] = chosen
        xp.take(source[item][:, coordinates], chosen, axis=0, out=order[:number], mode="clip")
        to_corners(xp, order[:number], p["in_format"], boxes[:number])
        areas(xp, boxes[:number], sizes[:number], row[:number])
        same = None
        if label >= 0 and not p["force_suppress"]:
            same = classes[:number]
            same[...] = source[item][chosen, label]
        limit, mask = p["overlap_thresh"], survives[:number]
        suppress(xp, boxes[:number], sizes[:number], same, limit, mask, row, scratch, inclusive=False)
        survivors = candidates[:number][mask]
        if record is not None:
            record[item].fill(-1)
            record[item, : len(survivors), 0] = survivors
        if out is not None:
            out[item].fill(-1)
            out[item, : len(survivors)] = source[item][survivors]
            _converted(xp, out[item, : len(survivors), coordinates], p["in_format"], p["out_format"])


def _candidates(xp: ArrayModule, params: Params, boxes: RawArray) -> RawArray:
    """Return the row numbers of the boxes that are compared with each other, the best score first.

    Their score is above ``valid_thresh``, and they are not background; ``topk`` limits their number.
    """
    scores = boxes[:, params["score_index"]]
    valid = scores > params["valid_thresh"]
    if params["id_index"] >= 0:
        valid &= boxes[:, params["id_index"]] != params["background_id"]
    rows = xp.nonzero(valid)[0]
    order: RawArray = rows[xp.argsort(-scores[rows], kind="stable")]
    return order[: params["topk"]] if params["topk"] > 0 else order


def _converted(xp: ArrayModule, boxes: RawArray, source: str, target: str) -> None:
    """Convert ``boxes`` from format ``source`` to ``target``, in place."""
    if source == target or not len(boxes):
        return
    low, high = boxes[:, :2].copy(), boxes[:, 2:].copy()
    if target == "center":
        boxes[:, :2], boxes[:, 2:] = (low + high) * 0.5, high - low
    else:
        boxes[:, :2], boxes[:, 2:] = low - high * 0.5, low + high * 0.5


@kernel
def _backward_nms(xp: ArrayModule, p: Params, ograd: RawArray, record: RawArray, out: RawArray) -> None:
    """Copy each output row's gradient to its box in the data; formats are ignored, as in MXNet 1.9.1."""
    count, width = out.shape[-2:]
    out.fill(0)
    target, g, positions = out.reshape(-1, count, width), ograd.reshape(-1, count, width), record.reshape(-1, count)
    for item in range(target.shape[0]):
        valid = positions[item] >= 0
        target[item][positions[item][valid]] = g[item][valid]


register(
    Op(
        name="_contrib_box_nms",
        forward=_nms,
        infer_shape=_nms_shape,
        infer_dtype=floats_only("box_nms", _nms_dtype),
        params=_NMS,
        outputs=("output0", "places"),
        visible_outputs=1,
        gradient=grad("_backward_contrib_box_nms", "g0", "y1"),
        aliases=("_contrib_box_non_maximum_suppression",),
        doc="The boxes that no better one overlaps with too much, the best first; the other rows are -1.",
    )
)
backward("_contrib_box_nms", _backward_nms, ("ograd", "places"), params=_NMS)

# -------------------------------------------------------------------------------------------------- bipartite_matching


def _matching_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    data, rows, columns = ins[0], outs[0], outs[1]
    if data is None and rows is not None and columns is not None:
        data = (*rows, columns[-1])
    if data is None:
        return ins, outs
    if len(data) < 2:
        raise ShapeError(f"bipartite_matching expects scores (…, rows, columns), got shape {data}")
    rows = merge_shape(data[:-1], rows, "bipartite_matching: rows of data and matches of rows")
    columns = merge_shape((*data[:-2], data[-1]), columns, "bipartite_matching: columns of data and their matches")
    assert rows is not None
    assert columns is not None
    return [(*rows, columns[-1])], [rows, (*rows[:-1], columns[-1])]


def _matching_dtype(params: Params, ins: DTypes, outs: DTypes) -> tuple[DTypes, DTypes]:
    data = ins[0]
    for position, out in enumerate(outs):
        data = merge_dtype(data, out, f"bipartite_matching: scores and output {position}")
    return [data], [data, data]


@kernel(scratch=lambda p, data, *outputs: [(data.shape[-2:-1], INDEX), (data.shape[-1:], INDEX)])
def _matching(
    xp: ArrayModule,
    p: Params,
    data: RawArray,
    of_rows: RawArray | None,
    of_columns: RawArray | None,
    rows: RawArray,
    columns: RawArray,
) -> None:
    count, width = data.shape[-2:]
    scores = data.reshape(-1, count, width)
    for item in range(scores.shape[0]):
        _match(xp, p, scores[item].reshape(-1), width, rows, columns)
        for out, matches in zip((of_rows, of_columns), (rows, columns), strict=True):
            if out is not None:
                out.reshape(scores.shape[0], -1)[item] = matches


def _match(xp: ArrayModule, params: Params, scores: RawArray, width: int, rows: RawArray, columns: RawArray) -> None:
    ascending, threshold = params["is_ascend"], params["threshold"]
    rows.fill(-1)
    columns.fill(-1)
    order = xp.argsort(scores if ascending else -scores, kind="stable")
    good = scores[order] < threshold if ascending else scores[order] > threshold
    matched_rows: set[int] = set()
    matched_columns: set[int] = set()
    limit = params["topk"] + 1 if params["topk"] > 0 else min(len(rows), len(columns))  # topk + 1, as in MXNet 1.9.1
    for position in order[good].tolist():
        if len(matched_rows) >= limit:
            break
        row, column = divmod(position, width)
        if row not in matched_rows and column not in matched_columns:
            matched_rows.add(row)
            matched_columns.add(column)
            rows[row], columns[column] = column, row


register(
    Op(
        name="_contrib_bipartite_matching",
        forward=_matching,
        infer_shape=_matching_shape,
        infer_dtype=floats_only("bipartite_matching", _matching_dtype),
        params=(
            Param("is_ascend", p_bool, False, "small scores are good ones"),
            Param("threshold", p_float, doc="only scores above this (is_ascend: below) match"),
            Param("topk", p_int, -1, "at most one match more than this, as in MXNet 1.9.1; -1: any number"),
        ),
        outputs=("output0", "output1"),
        gradient=zero_gradient,
        doc="Greedy matches of rows and columns by score: the column of each row, the row of each column, else -1.",
    )
)
