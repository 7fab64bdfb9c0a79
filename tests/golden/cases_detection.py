"""Golden cases of detection: boxes, non-maximum suppression, anchors and their targets (pure data)."""

import random

CASES = []


def _add(op, *inputs, **more):
    CASES.append({"op": op, "inputs": list(inputs), "grad": False, **more})


def _boxes(seed, count, classes=3, score=True, side=0.5, ends=0):
    """Return ``count`` random rows (class, score, left, top, right, bottom); the last ``ends`` rows are -1.

    Without ``score`` the rows have no score.
    """
    pick = random.Random(seed)
    rows = []
    for k in range(count):
        x, y = pick.random() * (1 - side), pick.random() * (1 - side)
        corners = [x, y, x + side * (0.3 + 0.7 * pick.random()), y + side * (0.3 + 0.7 * pick.random())]
        row = [float(pick.randrange(classes)), *([pick.random()] if score else []), *corners]
        rows.append(row if k < count - ends else [-1.0] * len(row))
    return rows


def _tensor(value):
    return {"value": value}


for _format in ("corner", "center"):
    _add("_contrib_box_iou", _tensor([row[2:] for row in _boxes(1, 5)]), _tensor([row[2:] for row in _boxes(2, 3)]),
         params={"format": _format}, name="box_iou " + _format)  # fmt: skip
_add("_contrib_box_iou", _tensor([[row[2:] for row in _boxes(k, 2)] for k in (1, 2)]), _tensor([_boxes(3, 1)[0][2:]]),
     name="box_iou of more dimensions")  # fmt: skip
_add("_contrib_box_iou", _tensor([[0.5, 0.5, 0.2, 0.2], [0.0, 0.0, 1.0, 1.0]]), _tensor([[0.1, 0.1, 0.1, 0.4]]),
     name="box_iou without area")  # fmt: skip

_BATCH = [_boxes(k, 12) for k in (5, 6)]
for _k, _p in enumerate((
    {}, {"id_index": 0}, {"id_index": 0, "force_suppress": True}, {"overlap_thresh": 0.2, "topk": 5},
    {"valid_thresh": 0.5, "id_index": 0}, {"id_index": 0, "background_id": 1}, {"overlap_thresh": 0.9},
    {"out_format": "center"}, {"in_format": "center"}, {"in_format": "center", "out_format": "corner"},
    {"valid_thresh": 2.0}, {"id_index": 0, "background_id": -1}, {"id_index": 0, "background_id": 0, "topk": 4},
)):  # fmt: skip
    _add("_contrib_box_nms", _tensor(_BATCH), params=_p, name=f"box_nms {_k}", grad=True)
_add("_contrib_box_nms", _tensor(_BATCH[0]), params={"coord_start": 2, "score_index": 1}, name="box_nms 2d", grad=True)
_add("_contrib_box_nms", _tensor([[_BATCH]]), params={"overlap_thresh": 0.3}, name="box_nms 5d", grad=True)

for _k, _p in enumerate((
    {"threshold": 0.1}, {"threshold": 0.6}, {"threshold": 0.5, "is_ascend": True}, {"threshold": 0.1, "topk": 2},
    {"threshold": 1e-12, "topk": 1},
)):  # fmt: skip
    for _shape in ((4, 5), (2, 6, 3)):
        _add("_contrib_bipartite_matching", {"shape": _shape, "low": 0.0, "high": 1.0, "distinct": True}, params=_p,
             name=f"bipartite_matching {_k} {_shape}")  # fmt: skip

for _k, _p in enumerate((
    {}, {"sizes": (0.3, 0.6, 0.9), "ratios": (1.0, 2.0, 0.5)}, {"sizes": (0.4,), "ratios": (2.0, 0.5, 3.0)},
    {"sizes": (0.8, 0.2), "ratios": (1.0,), "clip": True}, {"sizes": (0.3,), "steps": (0.2, 0.1)},
    {"sizes": (0.3,), "offsets": (0.2, 0.7)},
)):  # fmt: skip
    _add("_contrib_MultiBoxPrior", (2, 3, 4, 5), params=_p, name=f"MultiBoxPrior {_k}")


def _anchors(seed, count):
    return [[row[2:] for row in _boxes(seed, count, side=0.6)]]


_N = 14
for _k, _p in enumerate((
    {}, {"nms_threshold": 0.3}, {"nms_threshold": 0.3, "force_suppress": True}, {"threshold": 0.5},
    {"nms_topk": 4, "nms_threshold": 0.4}, {"clip": False}, {"nms_threshold": -1.0}, {"threshold": 2.0},
    {"variances": (0.2, 0.2, 0.3, 0.3)},
)):  # fmt: skip
    _add("_contrib_MultiBoxDetection", {"shape": (2, 4, _N), "low": 0.0, "high": 1.0}, (2, 4 * _N),
         _tensor(_anchors(11, _N)), params=_p, name=f"MultiBoxDetection {_k}")  # fmt: skip

_TRUTH = [[[row[0], *row[2:]] for row in _boxes(k, 4, ends=ends)] for k, ends in ((21, 1), (22, 0), (23, 4), (24, 3))]
for _k, _p in enumerate((
    {}, {"overlap_threshold": 0.3}, {"overlap_threshold": -1.0}, {"ignore_label": -7.0},
    {"negative_mining_ratio": 2.0}, {"negative_mining_ratio": 1.0, "negative_mining_thresh": 0.4},
    {"negative_mining_ratio": 0.3, "minimum_negative_samples": 3}, {"variances": (0.2, 0.3, 0.4, 0.5)},
)):  # fmt: skip
    _add("_contrib_MultiBoxTarget", _tensor(_anchors(12, 20)), _tensor(_TRUTH), (4, 3, 20), params=_p,
         name=f"MultiBoxTarget {_k}")  # fmt: skip

_CORNERS = [[row[2:] for row in _boxes(k, 6)] for k in (31, 32)]
_REFS = [[row[2:] for row in _boxes(k, 4)] for k in (33, 34)]
_add("_contrib_box_encode", _tensor([[1, 0.4, 0.6, -1, 0, 1], [-1, 2, 0.5, 1, 1, 1]]),
     _tensor([[0, 1, 2, 3, 0, 1.7], [3, 3, 2, 0, 1, 1]]), _tensor(_CORNERS), _tensor(_REFS),
     _tensor([0.1, -0.2, 0.0, 0.3]), _tensor([0.1, 0.1, 0.2, 0.3]), name="box_encode")  # fmt: skip
for _k, _p in enumerate((
    {}, {"format": "corner"}, {"std0": 0.1, "std1": 0.2, "std2": 0.3, "std3": 0.4, "clip": 0.05}, {"clip": 0.0},
)):  # fmt: skip
    _add("_contrib_box_decode", (2, 6, 4), _tensor(_CORNERS[:1]), params=_p, name=f"box_decode {_k}")

_ROIS = [[0, 1.0, 2.0, 9.0, 12.0], [1, 3.3, 0.2, 14.1, 7.7], [1, -3.0, -2.0, 5.0, 40.0], [0, 6.0, 6.0, 6.2, 6.1]]
for _k, _p in enumerate((
    {"pooled_size": (2, 3), "spatial_scale": 0.5}, {"pooled_size": (3, 2), "spatial_scale": 0.5, "sample_ratio": 2},
    {"pooled_size": (7, 7), "spatial_scale": 0.25}, {"pooled_size": (2, 2), "spatial_scale": 0.5, "aligned": True},
    {"pooled_size": (2, 3), "spatial_scale": 0.5, "aligned": True, "sample_ratio": 3},
    {"pooled_size": (1, 1), "spatial_scale": 1.0},
)):  # fmt: skip
    _add("_contrib_ROIAlign", (2, 4, 8, 9), _tensor(_ROIS), params=_p, name=f"ROIAlign {_k}", grad=(0,))
_P = {"pooled_size": (2, 3), "spatial_scale": 0.5, "position_sensitive": True}
_add("_contrib_ROIAlign", (2, 12, 8, 9), _tensor(_ROIS), params=_P, name="ROIAlign by position", grad=(0,))

for _k, _p in enumerate((
    {}, {"output_score": True, "rpn_post_nms_top_n": 8}, {"iou_loss": True}, {"rpn_post_nms_top_n": 40},
    {"threshold": 0.3, "rpn_post_nms_top_n": 30},
    {"rpn_pre_nms_top_n": 10}, {"rpn_min_size": 40}, {"scales": (2.0, 3.0), "ratios": (1.0, 0.4)},
)):  # fmt: skip
    _base = {"scales": (2.0, 4.0), "ratios": (0.5, 1.0), "rpn_post_nms_top_n": 12, "output_score": False}
    _p = {**_base, **_p}
    _one = ({"shape": (1, 8, 5, 6), "low": 0.0, "high": 1.0, "distinct": True}, (1, 16, 5, 6))
    _two = ({"shape": (2, 8, 5, 6), "low": 0.0, "high": 1.0, "distinct": True}, (2, 16, 5, 6))
    _info = [[70.0, 96.0, 1.0], [80.0, 90.0, 0.5]]
    _add("_contrib_Proposal", *_one, _tensor(_info[:1]), params=_p, name=f"Proposal {_k}", atol=1e-4)
    _add("_contrib_MultiProposal", *_two, _tensor(_info), params=_p, name=f"MultiProposal {_k}", atol=1e-4)

_FLAT = [[0, 10.0, 22.0, 161.0, 173.0], [1, 20.0, 15.0, 154.0, 160.0], [0, -30.0, 100.0, 40.4, 300.0],
         [1, 90.5, 31.5, 91.0, 32.0], [1, 40.0, 40.0, 20.0, 30.0], [0, 300.0, 0.0, 320.0, 40.0]]  # fmt: skip
for _k, _p in enumerate((
    {"output_dim": 2, "pooled_size": 3}, {"output_dim": 3, "pooled_size": 4, "group_size": 2},
    {"output_dim": 2, "pooled_size": 2, "group_size": 3}, {"output_dim": 1, "pooled_size": 7, "group_size": 1},
)):  # fmt: skip
    _group = _p.get("group_size", _p["pooled_size"])
    _add("_contrib_PSROIPooling", (2, _p["output_dim"] * _group**2, 12, 14), _tensor(_FLAT),
         params={"spatial_scale": 0.0625, **_p}, name=f"PSROIPooling {_k}", grad=(0,))  # fmt: skip

for _k, (_classes, _p) in enumerate((
    (1, {"output_dim": 2, "group_size": 3, "pooled_size": 3, "trans_std": 0.1}),
    (2, {"output_dim": 4, "group_size": 2, "pooled_size": 4, "part_size": 2, "sample_per_part": 3, "trans_std": 0.3}),
    (3, {"output_dim": 3, "group_size": 1, "pooled_size": 2, "part_size": 3, "sample_per_part": 2, "trans_std": 1.0}),
    (0, {"output_dim": 2, "group_size": 2, "pooled_size": 3, "sample_per_part": 2, "no_trans": True}),
)):  # fmt: skip
    _part = _p.get("part_size", _p["pooled_size"])
    _trans = [(len(_FLAT), 2 * _classes, _part, _part)] if _classes else []
    _add("_contrib_DeformablePSROIPooling", (2, _p["output_dim"] * _p["group_size"] ** 2, 12, 14), _tensor(_FLAT),
         *_trans, params={"spatial_scale": 0.0625, **_p}, name=f"DeformablePSROIPooling {_k}",
         grad=(0, 2) if _classes else (0,))  # fmt: skip

_TURNED = [[0, 5.0, 6.0, 7.0, 4.0, 30.0], [1, 3.3, 2.2, 14.1, 7.7, -75.0], [1, 0.0, 1.0, 6.0, 9.0, 180.0],
           [0, 8.0, 7.0, 0.2, 0.1, 10.0], [0, 20.0, 20.0, 3.0, 3.0, 45.0]]  # fmt: skip
for _k, _p in enumerate((
    {"pooled_size": (2, 3), "spatial_scale": 1.0}, {"pooled_size": (3, 2), "spatial_scale": 0.5, "sampling_ratio": 2},
    {"pooled_size": (1, 1), "spatial_scale": 1.0}, {"pooled_size": (4, 4), "spatial_scale": 0.7, "sampling_ratio": 1},
)):  # fmt: skip
    _add("_contrib_RROIAlign", (2, 3, 8, 9), _tensor(_TURNED), params=_p, name=f"RROIAlign {_k}")
