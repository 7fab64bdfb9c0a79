"""Detection operators: the kernel contract, shape inference in both directions, and comparisons with plain loops."""

import importlib.util
import inspect
import pathlib

import numpy as np
import pytest

from tests.support.ops_harness import check_contract, check_gradient, prepare, run
from tests.support.ops_harness import infer_shapes as infer
from tests.support.together import operator, together
from weftplan.errors import DTypeError, MXNetError, ParameterError, ShapeError
from weftplan.ops.core import registry

GOLDEN = pathlib.Path(__file__).resolve().parents[1] / "golden"
NMS, MATCHING, IOU = "_contrib_box_nms", "_contrib_bipartite_matching", "_contrib_box_iou"
ALIGN, PROPOSAL, PROPOSALS = (f"_contrib_{name}" for name in ("ROIAlign", "Proposal", "MultiProposal"))
RESIZE = "_contrib_BilinearResize2D"
PRIOR, DETECTION, TARGET = (f"_contrib_MultiBox{name}" for name in ("Prior", "Detection", "Target"))


def _module(name):
    spec = importlib.util.spec_from_file_location(f"detection_{name}", GOLDEN / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


inputs, cases = _module("inputs"), _module("cases_detection")


@together(by=operator)
@pytest.mark.parametrize("case", cases.CASES, ids=inputs.case_name)
@pytest.mark.parametrize("dtype", ["float64", "float16"])
def test_contract(case, dtype):
    """Every golden case meets the kernel contract in float64 and float16.

    The contract: unwanted outputs, exact workspace and in-place pairs.
    """
    arrays = [x.astype(dtype) for x in inputs.case_inputs(case)]
    check_contract(case["op"], arrays, case.get("params", {}))


def test_every_operator_has_a_case():
    """Every detection operator has a golden case."""
    family = {
        name
        for name in registry.names(aliases=False)
        if inspect.unwrap(registry.get(name).forward).__module__.startswith("weftplan.ops.contrib.detection")
        and registry.get(name).backward_of is None
        and not name.startswith("_np")  # test_numpy_names.py
    }
    assert family == {registry.get(case["op"]).name for case in cases.CASES}


def boxes(seed, count, *more):
    """Return random boxes as corners, of shape (*more, count, 4)."""
    rng = np.random.RandomState(seed)
    low = rng.uniform(0, 0.6, (*more, count, 2))
    return np.concatenate([low, low + rng.uniform(0.05, 0.4, (*more, count, 2))], axis=-1)


def overlap(a, b):
    """Return the intersection over union of two boxes."""
    width = min(a[2], b[2]) - max(a[0], b[0])
    height = min(a[3], b[3]) - max(a[1], b[1])
    inter = max(width, 0) * max(height, 0)
    union = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - inter
    return inter / union if union > 0 else 0.0


def test_overlaps_one_by_one():
    """box_iou returns the overlap of every pair of boxes, for any number of leading dimensions."""
    left, right = boxes(1, 3, 2), boxes(2, 5)
    (actual,) = run(IOU, [left, right])
    assert actual.shape == (2, 3, 5)
    for place in np.ndindex(actual.shape):
        assert actual[place] == pytest.approx(overlap(left[place[:2]], right[place[2]]))


@pytest.mark.parametrize("seed", range(8))
def test_suppression_one_by_one(seed):
    """box_nms returns the boxes that a plain loop keeps, by descending score, then rows of -1.

    Its second output is the row number of each kept box.
    """
    rng = np.random.RandomState(seed)
    count = 30
    data = np.concatenate([rng.randint(0, 3, (count, 1)), rng.uniform(size=(count, 1)), boxes(seed, count)], axis=1)
    params = {"id_index": 0, "overlap_thresh": 0.3, "valid_thresh": 0.2, "force_suppress": seed % 2}
    (out, places) = run(NMS, [data], params)
    kept = []
    for place in np.argsort(-data[:, 1], kind="stable"):
        rivals = [k for k in kept if seed % 2 or data[k, 0] == data[place, 0]]
        if data[place, 1] > 0.2 and all(overlap(data[k, 2:], data[place, 2:]) <= 0.3 for k in rivals):
            kept.append(place)
    np.testing.assert_array_equal(out[: len(kept)], data[kept])
    assert (out[len(kept) :] == -1).all()
    assert places[: len(kept), 0].tolist() == kept


def test_gradient_of_suppression():
    """The gradient of box_nms goes to the kept boxes; suppressed boxes get 0."""
    data = np.concatenate([np.linspace(0.9, 0.1, 6)[:, None], boxes(3, 6)], axis=1)
    check_gradient(NMS, [data], {"score_index": 0, "coord_start": 1, "overlap_thresh": 0.2})


@pytest.mark.parametrize("background", [{}, {"background_id": -1}, {"background_id": 0}])
def test_boxes_of_the_background_go(background):
    """box_nms drops boxes of the background class, which is -1 by default as in MXNet 1.9.1.

    Without ``id_index`` it keeps every box.
    """
    rows = np.array([[0, 0.5, 0.1, 0.1, 0.2, 0.2], [-1, 0.6, 0.5, 0.5, 0.7, 0.8], [1, 0.3, 0.8, 0.1, 0.9, 0.2]])
    kept = [0, 2] if background.get("background_id", -1) == -1 else [1, 2]
    actual = run(NMS, [rows], {"id_index": 0, **background})[0]
    np.testing.assert_array_equal(actual, [*rows[kept], [-1] * 6])
    actual = run(NMS, [rows], background)[0]
    np.testing.assert_array_equal(actual, rows[[1, 0, 2]])


REGIONS = np.array([[0, 1.1, 2.3, 5.2, 6.4], [1, 0.2, 0.3, 3.1, 2.2], [0, -2.0, 1.0, 3.0, 9.0], [7, 0, 0, 1, 1]])
AREA = {"pooled_size": (2, 3), "spatial_scale": 0.7}


@pytest.mark.parametrize("params", [{}, {"sample_ratio": 2}, {"aligned": True}, {"position_sensitive": True}])
def test_gradient_of_regions(params):
    """ROIAlign has the gradient of central differences for its data; a region of a missing image gives 0."""
    data = np.random.RandomState(0).uniform(-1, 1, (2, 6 if "position_sensitive" in params else 2, 5, 6))
    check_gradient(ALIGN, [data, REGIONS], {**AREA, **params}, wrt=(0,))
    (out,) = run(ALIGN, [data, REGIONS], {**AREA, **params})
    assert not out[3].any()
    assert out[:3].any()


def test_regions_of_a_plane():
    """ROIAlign of an image linear in row and column returns the values at the cell centres."""
    rows, columns = np.mgrid[:20, :30].astype(float)
    image = (2 * rows + 3 * columns)[None, None]
    (out,) = run(ALIGN, [image, np.array([[0, 4.0, 6.0, 16.0, 10.0]])], {"pooled_size": (2, 3), "spatial_scale": 1.0})
    np.testing.assert_allclose(out[0, 0], [[2 * y + 3 * x for x in (6, 10, 14)] for y in (7, 9)])


def test_proposals_are_repeated():
    """A single remaining region fills all output rows of Proposal, with its score."""
    params = {"scales": (1.0,), "ratios": (1.0,), "rpn_post_nms_top_n": 3, "rpn_min_size": 1, "output_score": True}
    scores = np.zeros((1, 2, 1, 1))
    scores[0, 1] = 0.75
    rois, values = run(PROPOSAL, [scores, np.zeros((1, 4, 1, 1)), np.array([[16.0, 16.0, 1.0]])], params)
    assert rois.tolist() == [[0, 0, 0, 15, 15]] * 3
    assert values.tolist() == [[0.75]] * 3


def test_targets_of_one_box():
    """MultiBoxTarget gives the box to the anchor equal to it, with offsets 0; the other anchors are background."""
    anchors = boxes(4, 5)[None]
    label = np.array([[[2.0, *anchors[0, 3]], [-1.0] * 5]])
    location, mask, classes = run(TARGET, [anchors, label, np.zeros((1, 4, 5))], {"overlap_threshold": 0.9})
    assert classes.tolist() == [[0, 0, 0, 3, 0]]
    np.testing.assert_allclose(location, 0, atol=1e-12)
    assert mask.reshape(5, 4).any(axis=1).tolist() == [False, False, False, True, False]


def test_detection_undoes_targets():
    """MultiBoxDetection decodes the offsets of MultiBoxTarget to the original boxes."""
    anchors, truth = boxes(5, 4)[None], boxes(6, 4)
    label = np.concatenate([np.arange(4.0)[:, None], truth], axis=1)[None]
    location, mask, classes = run(TARGET, [anchors, label, np.zeros((1, 5, 4))], {"overlap_threshold": -1.0})
    hot = np.zeros((1, 5, 4))
    hot[0, classes[0].astype(int), np.arange(4)] = 1
    (actual,) = run(DETECTION, [hot, location, anchors], {"clip": False})
    for row in actual[0]:
        if row[0] >= 0 and mask.reshape(4, 4)[np.abs(anchors[0] - row[2:]).sum(axis=1).argmin()].any():
            np.testing.assert_allclose(row[2:], truth[int(row[0])], atol=1e-9)


def test_too_few_negatives():
    """Negative mining with too few background anchors raises an error that states both counts."""
    anchors = np.tile(boxes(7, 1), (1, 6, 1))
    label = np.array([[[0.0, *anchors[0, 0]]]])
    params = {"negative_mining_ratio": 3.0, "overlap_threshold": -1.0}
    with pytest.raises(MXNetError, match="3 background anchors are wanted, but only 0"):
        run(TARGET, [anchors, label, np.zeros((1, 2, 6))], params)


@pytest.mark.parametrize(
    ("op", "ins", "outs", "params", "expected"),
    [
        (IOU, [(2, 3, 4), (5, 4)], [None], {}, ([(2, 3, 4), (5, 4)], [(2, 3, 5)])),
        (IOU, [(0, 4), (5, 0)], [(3, 0)], {}, ([(3, 4), (5, 4)], [(3, 5)])),
        (NMS, [None], [(2, 7, 6), None], {}, ([(2, 7, 6)], [(2, 7, 6), (2, 7, 1)])),
        (MATCHING, [(2, 3, 4)], [None, None], {"threshold": 1}, ([(2, 3, 4)], [(2, 3), (2, 4)])),
        (MATCHING, [None], [(2, 3), (0, 4)], {"threshold": 1}, ([(2, 3, 4)], [(2, 3), (2, 4)])),
        (ALIGN, [(2, 3, 8, 9), None], [(7, 0, 0, 0)], AREA, ([(2, 3, 8, 9), (7, 5)], [(7, 3, 2, 3)])),
        (
            ALIGN,
            [(2, 0, 8, 9), (7, 0)],
            [(0, 3, 0, 0)],
            {**AREA, "position_sensitive": True},
            ([(2, 18, 8, 9), (7, 5)], [(7, 3, 2, 3)]),
        ),
        (
            PROPOSALS,
            [(2, 0, 5, 0), (0, 0, 0, 6), None],
            [None, None],
            {"rpn_post_nms_top_n": 8},
            ([(2, 24, 5, 6), (2, 48, 5, 6), (2, 3)], [(16, 5), (16, 1)]),
        ),
        (
            PROPOSALS,
            [(0, 24, 5, 6), None, None],
            [None, (16, 0)],
            {"rpn_post_nms_top_n": 8},
            ([(2, 24, 5, 6), (2, 48, 5, 6), (2, 3)], [(16, 5), (16, 1)]),
        ),
        (PRIOR, [(0, 3, 4, 5)], [None], {"sizes": (0.1, 0.2)}, ([(0, 3, 4, 5)], [(1, 40, 4)])),
        (
            DETECTION,
            [(2, 3, 0), None, (1, 7, 4)],
            [None],
            {},
            ([(2, 3, 7), (2, 28), (1, 7, 4)], [(2, 7, 6)]),
        ),
        (DETECTION, [(0, 3, 0), None, None], [(2, 7, 0)], {}, ([(2, 3, 7), (2, 28), (1, 7, 4)], [(2, 7, 6)])),
        (
            TARGET,
            [(1, 7, 4), (2, 3, 5), (0, 4, 0)],
            [None] * 3,
            {},
            ([(1, 7, 4), (2, 3, 5), (2, 4, 7)], [(2, 28), (2, 28), (2, 7)]),
        ),
        (
            TARGET,
            [None, (0, 3, 5), (0, 4, 0)],
            [None, (2, 28), None],
            {},
            ([(1, 7, 4), (2, 3, 5), (2, 4, 7)], [(2, 28), (2, 28), (2, 7)]),
        ),
    ],
)
def test_shapes(op, ins, outs, params, expected):
    """Known shapes of inputs and outputs complete the unknown shapes."""
    assert infer(op, ins, outs, params) == expected


@pytest.mark.parametrize(
    ("op", "ins", "params", "error", "says"),
    [
        (IOU, [(3, 5), (2, 4)], {}, ShapeError, r"4 numbers in the last dimension, got shape \(3, 5\)"),
        (NMS, [(6,)], {}, ShapeError, "boxes, numbers of a box"),
        (NMS, [(3, 5)], {}, ParameterError, "do not fit boxes of 5 numbers"),
        (MATCHING, [(3,)], {"threshold": 0}, ShapeError, "rows, columns"),
        (MATCHING, [(3, 4)], {}, ParameterError, "'threshold' is missing"),
        (ALIGN, [(1, 2, 3, 4), (2, 5)], {**AREA, "pooled_size": (2,)}, ParameterError, "positive height and width"),
        (ALIGN, [(1, 4, 3, 4), (2, 5)], {**AREA, "position_sensitive": True}, ShapeError, "multiple of 6 channels"),
        (ALIGN, [(1, 2, 3, 4), (2, 4)], AREA, ShapeError, "rois"),
        (PROPOSAL, [(2, 24, 5, 6), (2, 48, 5, 6), (2, 3)], {}, ShapeError, "MultiProposal takes several"),
        (PROPOSAL, [(1, 23, 5, 6), None, None], {}, ShapeError, "cls_prob"),
        (PROPOSAL, [(1, 24, 5, 6), None, None], {"ratios": (0.0, 1.0, 2.0)}, ParameterError, "positive ratios"),
        (PROPOSAL, [(1, 24, 5, 6), None, None], {"ratios": (np.nan, 1.0, 2.0)}, ParameterError, "positive ratios"),
        (PROPOSAL, [(1, 24, 5, 6), None, None], {"ratios": (1e-310, 1.0, 2.0)}, ParameterError, "positive ratios"),
        (RESIZE, [(1, 2, 3, 4)], {"scale_height": np.inf}, ParameterError, "scale_height=inf"),
        (
            RESIZE,
            [(1, 2, 3, 4)],
            {"mode": "odd_scale", "scale_height": 1.0, "scale_width": np.nan},
            ParameterError,
            "scale_width=nan",
        ),
        (PRIOR, [(1, 2, 3, 4)], {"sizes": ()}, ParameterError, "sizes is empty"),
        (PRIOR, [(1, 2, 3, 4)], {"steps": (1.0,)}, ParameterError, "expected two numbers"),
        (PRIOR, [(1, 2, 3)], {}, ShapeError, "differ in rank"),
        (DETECTION, [(2, 3, 7), (2, 27), (1, 7, 4)], {}, ShapeError, "4 numbers for each anchor"),
        (DETECTION, [(2, 3, 7), (2, 32), (1, 7, 4)], {}, ShapeError, "anchors of loc_pred"),
        (DETECTION, [(2, 3, 7), (2, 28), (1, 7, 4)], {"variances": (1.0,)}, ParameterError, "expected four numbers"),
        (TARGET, [(1, 7, 4), (2, 3, 4), (2, 4, 7)], {}, ShapeError, "class, 4 corners"),
        (TARGET, [(1, 7, 4), (2, 3, 5), (3, 4, 7)], {}, ShapeError, "batch and anchors"),
    ],
)
def test_refused(op, ins, params, error, says):
    """Shapes and parameters that do not fit raise an error that states the reason."""
    actual = registry.get(op)
    with pytest.raises(error, match=says):
        infer(op, ins, [None] * len(actual.output_names(registry.parse_params(actual, params))), params)


@pytest.mark.parametrize("op", [IOU, NMS, MATCHING, PRIOR, DETECTION, TARGET, ALIGN, PROPOSAL, PROPOSALS])
def test_integers_are_refused(op):
    """Detection operators raise a DTypeError for int32 boxes."""
    actual = registry.get(op)
    params = registry.parse_params(actual, {"threshold": 0.5} if op == MATCHING else AREA if op == ALIGN else {})
    count = len(actual.input_names(params))
    with pytest.raises(DTypeError, match="expects floats, got int32"):
        actual.infer_dtype(params, [np.dtype("int32")] * count, [None] * actual.num_outputs(params))


def test_no_boxes_at_all():
    """box_nms and MultiBoxDetection return only -1 if no box passes the threshold."""
    data = np.concatenate([np.full((4, 2), 0.1), boxes(8, 4)], axis=1)
    assert (run(NMS, [data], {"valid_thresh": 0.5})[0] == -1).all()
    call = prepare(DETECTION, [np.zeros((2, 3, 5)), np.zeros((2, 20)), boxes(9, 5)[None]], {"threshold": 0.5})
    assert (call()[0] == -1).all()


@pytest.mark.parametrize("scale", [1e38, np.inf, np.nan])
@pytest.mark.parametrize(
    ("op", "params", "planes"),
    [
        (ALIGN, {"pooled_size": (2, 2)}, 4),
        ("ROIPooling", {"pooled_size": (2, 2)}, 4),
        ("_contrib_PSROIPooling", {"pooled_size": 2, "output_dim": 1}, 4),
        ("_contrib_DeformablePSROIPooling", {"pooled_size": 2, "output_dim": 1, "group_size": 2, "no_trans": True}, 4),
        ("_contrib_RROIAlign", {"pooled_size": (2, 2)}, 4),
    ],
)
def test_regions_beyond_all_numbers(op, params, planes, scale):
    """A region whose scaled corners are too large for float32, infinite or NaN gives 0."""
    columns = 6 if "RROI" in op else 5
    rois = np.array([[0, 1e30, 1e30, 2e30, 2e30, 3e30][:columns]], np.float32)
    out = run(op, [np.ones((1, planes, 3, 3), np.float32), rois], {**params, "spatial_scale": scale})[0]
    assert not out.any()
