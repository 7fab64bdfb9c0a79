"""box_encode and box_decode: boxes as offsets from anchors, in units of the anchors' sizes.

The kernels have no state, so any worker thread may run them. Importing the module registers both operators.
"""

from __future__ import annotations

from weftplan.errors import ShapeError
from weftplan.ops.contrib.detection.boxes import p_format
from weftplan.ops.core.forms import ScratchSpecs, kernel
from weftplan.ops.core.kernels import BOOL, INDEX, gather, to_index
from weftplan.ops.core.params import p_float
from weftplan.ops.core.registry import register
from weftplan.ops.core.rules import Shapes, floats_only, merge_dim, merge_shape, zero_gradient
from weftplan.ops.core.schema import Op, Param, Params, SpecLike
from weftplan.support.array_types import ArrayModule, RawArray


def _to_centres(xp: ArrayModule, boxes: RawArray, out: RawArray) -> None:
    """Convert corners to centre and size; ``out`` (n, 4) may be ``boxes``."""
    for low, high in ((0, 2), (1, 3)):
        xp.subtract(boxes[:, high], boxes[:, low], out=out[:, high])
        xp.multiply(boxes[:, low], 2, out=out[:, low])  # (2 low + size) / 2: exact, and without scratch
        xp.add(out[:, low], out[:, high], out=out[:, low])
        xp.multiply(out[:, low], 0.5, out=out[:, low])


# ---------------------------------------------------------------------------------------------------------- box_encode


def _encode_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    samples, matches, anchors, refs, means, stds = ins
    for name, shape, rank in (("samples", samples, 2), ("matches", matches, 2), ("anchors", anchors, 3),
                              ("refs", refs, 3)):  # fmt: skip
        if shape is not None and len(shape) != rank:
            raise ShapeError(f"box_encode: {name} must have {rank} dimensions, got shape {shape}")
    rows = merge_shape(merge_shape(samples, matches, "samples and matches of box_encode"), (0, 0), "samples")
    boxes = merge_shape(anchors, (*(rows or (0, 0)), 4), "anchors of box_encode, four numbers for each sample")
    for out in outs:
        boxes = merge_shape(boxes, out, "anchors and outputs of box_encode")
    assert boxes is not None
    four = [merge_shape((4,), shape, "means and stds of box_encode") for shape in (means, stds)]
    refs = merge_shape(refs, (boxes[0], 0, 4), "refs of box_encode, some for each image")
    return [boxes[:2], boxes[:2], boxes, refs, *four], [boxes, boxes]


def _encode_scratch(
    params: Params, samples: SpecLike, matches: SpecLike, anchors: SpecLike, *specs: SpecLike | None
) -> ScratchSpecs:
    count, dtype = anchors.shape[1], anchors.dtype
    return [((count, 4), dtype), ((count, 4), dtype), ((count,), INDEX), ((count,), BOOL)]


@kernel(scratch=_encode_scratch)
def _encode(
    xp: ArrayModule,
    p: Params,
    samples: RawArray,
    matches: RawArray,
    anchors: RawArray,
    refs: RawArray,
    means: RawArray,
    stds: RawArray,
    targets: RawArray | None,
    masks: RawArray | None,
    *buffers: RawArray,
) -> None:
    centres, matched, index, idle = buffers
    for image in range(anchors.shape[0]):
        xp.less_equal(samples[image], 0.5, out=idle)
        if masks is not None:
            masks[image].fill(1)
            xp.copyto(masks[image], 0, where=idle[:, None])
        if targets is None:
            continue
        to_index(xp, matches[image], refs.shape[1], "clip", index)
        _to_centres(xp, anchors[image], centres)
        gather(xp, refs[image], index, 0, matched)
        _to_centres(xp, matched, matched)
        target = targets[image]
        xp.subtract(matched[:, :2], centres[:, :2], out=target[:, :2])
        xp.divide(target[:, :2], centres[:, 2:], out=target[:, :2])
        xp.divide(matched[:, 2:], centres[:, 2:], out=target[:, 2:])
        xp.log(target[:, 2:], out=target[:, 2:])
        xp.subtract(target, means, out=target)
        xp.divide(target, stds, out=target)
        xp.copyto(target, 0, where=idle[:, None])


register(
    Op(
        name="_contrib_box_encode",
        forward=_encode,
        infer_shape=_encode_shape,
        infer_dtype=floats_only("box_encode"),
        inputs=("samples", "matches", "anchors", "refs", "means", "stds"),
        outputs=("output0", "output1"),
        gradient=zero_gradient,
        doc="Offsets of the matched refs from the anchors, both given by corners, and a mask; 0 where a sample is not "
        "positive.",
    )
)

# ---------------------------------------------------------------------------------------------------------- box_decode


def _decode_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    data, anchors = ins
    data = merge_shape(merge_shape(data, (0, 0, 4), "data of box_decode"), outs[0], "data and output of box_decode")
    anchors = merge_shape(anchors, (1, 0, 4), "anchors of box_decode")
    assert data is not None
    assert anchors is not None
    count = merge_dim(data[1], anchors[1], "number of offsets and of anchors of box_decode")
    data = (data[0], count, 4)
    return [data, (1, count, 4)], [data]


@kernel(scratch=lambda p, data, anchors, out: [((anchors.shape[1], width), anchors.dtype) for width in (4, 2)])
def _decode(
    xp: ArrayModule, p: Params, data: RawArray, anchors: RawArray, out: RawArray, centres: RawArray, half: RawArray
) -> None:
    if p["format"] == "corner":
        _to_centres(xp, anchors[0], centres)
    else:
        xp.copyto(centres, anchors[0])
    for image in range(data.shape[0]):
        offsets, target = data[image], out[image]
        for axis in (0, 1):
            # Compute the half sizes first: ``out`` may share the memory of the offsets, whose last columns they need.
            size = half[:, axis]
            xp.multiply(offsets[:, axis + 2], p[f"std{axis + 2}"], out=size)
            if p["clip"] > 0:
                xp.minimum(size, p["clip"], out=size)
            xp.exp(size, out=size)
            xp.multiply(size, centres[:, axis + 2], out=size)
            xp.multiply(size, 0.5, out=size)
        for axis in (0, 1):
            centre = target[:, axis]
            xp.multiply(offsets[:, axis], p[f"std{axis}"], out=centre)
            xp.multiply(centre, centres[:, axis + 2], out=centre)
            xp.add(centre, centres[:, axis], out=centre)
        xp.add(target[:, :2], half, out=target[:, 2:])
        xp.subtract(target[:, :2], half, out=target[:, :2])


register(
    Op(
        name="_contrib_box_decode",
        forward=_decode,
        infer_shape=_decode_shape,
        infer_dtype=floats_only("box_decode"),
        params=(
            *(Param(f"std{k}", p_float, 1.0, f"factor of number {k} of the offsets") for k in range(4)),
            Param("clip", p_float, -1.0, "limit of the logarithms of sizes; not positive: none"),
            p_format("format", "center", "the anchors: corners, or centre and size"),
        ),
        inputs=("data", "anchors"),
        gradient=zero_gradient,
        doc="Corners of the boxes that have these offsets from the anchors.",
    )
)
