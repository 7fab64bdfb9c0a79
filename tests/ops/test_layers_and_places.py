"""Layers over sequences and images, and operators on coordinates: errors, inference, accuracy, hidden memory."""

import math
import re

import numpy as np
import pytest

from tests.support.ops_harness import check_hidden, differentiate, gradients, prepare, run
from tests.support.together import together
from weftplan.errors import DTypeError, MXNetError, ParameterError, ShapeError
from weftplan.ops.core import registry

IMAGE = np.zeros((1, 2, 4, 6))
LENGTHS = {"use_sequence_length": True}
AFFINE = {"transform_type": "affine"}


@together()
@pytest.mark.parametrize(
    ("op", "shapes", "params", "error", "message"),
    [
        ("SequenceMask", [(4, 3), (2,)], LENGTHS, ShapeError, "sequence_length.*(3 and 2)"),
        ("SequenceMask", [(4, 3)], {"axis": 2}, ParameterError, "axis=2: expected 0 or 1"),
        ("SequenceReverse", [(4, 3)], {"axis": 1}, ParameterError, "axis=1: expected 0$"),
        ("SequenceLast", [(4,)], {}, ShapeError, "at least 2 axes"),
        ("GroupNorm", [(2, 5, 3), (2,), (2,)], {"num_groups": 2}, ShapeError, "do not divide the 5 channels"),
        ("GroupNorm", [(2, 4), (2,), (2,)], {"num_groups": 2}, ShapeError, "batch, channels and space"),
        ("GroupNorm", [(2, 4, 3), (4,), (4,)], {"num_groups": 2}, ShapeError, "gamma with num_groups=2"),
        ("SVMOutput", [(4, 3), (4, 1)], {}, ShapeError, "label"),
        ("softmax_cross_entropy", [(4, 3, 2), (4,)], {}, ShapeError, "(rows, classes)"),
        ("Crop", [(1, 2, 4, 6)], {}, ParameterError, "h_w=.*positive"),
        ("Crop", [(1, 2, 4, 6)], {"h_w": (3, 3), "offset": (2, 0)}, ShapeError, "does not lie in data"),
        ("Crop", [(1, 2, 4, 6), (1, 2, 5, 5)], {"center_crop": True}, ShapeError, "does not lie in data"),
        ("UpSampling", [(1, 2, 4, 6)], {"scale": 0, "sample_type": "nearest"}, ParameterError, "scale=0"),
        (
            "UpSampling",
            [(1, 2, 4, 6), (1, 2, 3, 6)],
            {"scale": 2, "sample_type": "nearest"},
            ShapeError,
            "does not divide 8x12",
        ),
        (
            "UpSampling",
            [(1, 2, 4, 6), (2, 1, 4, 4)],
            {"scale": 2, "sample_type": "bilinear"},
            ParameterError,
            "num_filter=0",
        ),
        ("GridGenerator", [(2, 5)], {**AFFINE, "target_shape": (2, 2)}, ShapeError, "affine maps"),
        ("GridGenerator", [(2, 6)], AFFINE, ParameterError, "target_shape"),
        ("GridGenerator", [(2, 3, 4, 4)], {"transform_type": "warp"}, ShapeError, "flow"),
        ("BilinearSampler", [(2, 3, 4, 4), (1, 2, 4, 4)], {}, ShapeError, "differ in batch"),
        ("BilinearSampler", [(2, 3, 4, 4), (2, 3, 4, 4)], {}, ShapeError, "grid"),
        (
            "SpatialTransformer",
            [(2, 3, 4, 4), (2, 6)],
            {**AFFINE, "sampler_type": "bilinear"},
            ParameterError,
            "target",
        ),
        ("ROIPooling", [(2, 3, 4, 4), (5, 4)], {"pooled_size": (2, 2), "spatial_scale": 1}, ShapeError, "rois"),
        ("ROIPooling", [(2, 3, 4, 4), (5, 5)], {"pooled_size": (0, 2), "spatial_scale": 1}, ParameterError, "positive"),
        ("gather_nd", [(4, 3), (3, 2)], {}, ShapeError, "has only 2 axes"),
        ("gather_nd", [(4, 3), (2,)], {}, ShapeError, "expected (coordinates, places"),
        ("scatter_nd", [(3,), (2, 2)], {"shape": (4, 3)}, ShapeError, "scatter_nd"),
        ("batch_take", [(4, 3, 2), (4,)], {}, ShapeError, "(rows, columns)"),
        ("ravel_multi_index", [(3, 5)], {"shape": (4, 3)}, ShapeError, "ravel_multi_index"),
        ("unravel_index", [(3, 5)], {"shape": (4, 3)}, ShapeError, "one axis of places"),
        ("unravel_index", [(3,)], {"shape": ()}, ParameterError, "at least one dimension"),
        ("moments", [(3, 4)], {}, ParameterError, "axes is empty"),
        ("moments", [(3, 4)], {"axes": (2,)}, ShapeError, "out of range"),
        ("_eye", [], {"N": 0}, ParameterError, "N=0"),
        ("_linspace", [], {"start": 0, "stop": 1, "num": 0}, ParameterError, "num=0"),
    ],
)
def test_refused(op, shapes, params, error, message):
    """Bad shapes and parameters raise an error of the right class that names the operator and the fault."""
    pattern = message.replace("(", r"\(").replace(")", r"\)")
    with pytest.raises(error, match=pattern) as caught:
        prepare(op, [np.zeros(shape) for shape in shapes], params)
    assert op.strip("_").split("_")[-1] in str(caught.value)


@pytest.mark.parametrize(
    ("op", "ins", "outs", "params", "expected"),
    [
        ("SequenceMask", [None, None], [(4, 3)], LENGTHS, ([(4, 3), (3,)], [(4, 3)])),
        ("SequenceMask", [(4, 0), (3,)], [None], LENGTHS, ([(4, 3), (3,)], [(4, 3)])),
        ("SequenceMask", [(0, 4, 2), (3,)], [None], {**LENGTHS, "axis": 1}, ([(3, 4, 2), (3,)], [(3, 4, 2)])),
        ("SequenceLast", [(4, 0, 2)], [(3, 0)], {}, ([(4, 3, 2)], [(3, 2)])),
        ("SequenceLast", [(0, 4), None], [(3,)], {**LENGTHS, "axis": 1}, ([(3, 4), (3,)], [(3,)])),
        (
            "GroupNorm",
            [None] * 3,
            [(2, 4, 3), None, None],
            {"num_groups": 2},
            ([(2, 4, 3), (2,), (2,)], [(2, 4, 3), (2, 2), (2, 2)]),
        ),
        ("SVMOutput", [(0, 3), (5,)], [None], {}, ([(5, 3), (5,)], [(5, 3)])),
        ("softmax_cross_entropy", [(0, 3), (5,)], [None], {}, ([(5, 3), (5,)], [(1,)])),
        (
            "Crop",
            [(2, 0, 5, 6), (1, 1, 2, 3)],
            [(0, 3, 0, 0)],
            {"num_args": 2},
            ([(2, 3, 5, 6), (1, 1, 2, 3)], [(2, 3, 2, 3)]),
        ),
        (
            "UpSampling",
            [(2, 3, 0, 5), None],
            [(2, 3, 8, 10)],
            {"scale": 2, "num_filter": 3, "sample_type": "bilinear", "num_args": 2},
            ([(2, 3, 0, 5), (3, 1, 4, 4)], [(2, 3, 8, 10)]),
        ),
        ("GridGenerator", [None], [(5, 0, 0, 0)], {**AFFINE, "target_shape": (3, 4)}, ([(5, 6)], [(5, 2, 3, 4)])),
        ("BilinearSampler", [(0, 3, 5, 6), None], [(2, 0, 3, 4)], {}, ([(2, 3, 5, 6), (2, 2, 3, 4)], [(2, 3, 3, 4)])),
        ("scatter_nd", [None, (2, 5)], [None], {"shape": (4, 3, 2)}, ([(5, 2), (2, 5)], [(4, 3, 2)])),
        ("scatter_nd", [(5, 2), (2, 0)], [None], {"shape": (4, 3, 2)}, ([(5, 2), (2, 5)], [(4, 3, 2)])),
        ("batch_take", [(0, 3), None], [(5,)], {}, ([(5, 3), (5,)], [(5,)])),
        ("ravel_multi_index", [None], [(5,)], {"shape": (4, 3)}, ([(2, 5)], [(5,)])),
        ("unravel_index", [None], [(2, 5)], {"shape": (4, 3)}, ([(5,)], [(2, 5)])),
    ],
)
def test_inference_goes_both_ways(op, ins, outs, params, expected):
    """Known shapes of inputs and outputs complete the unknown shapes."""
    actual = registry.get(op)
    parsed = registry.parse_params(actual, params)
    new = actual.infer_shape(parsed, list(ins), list(outs))
    assert (list(new[0]), list(new[1])) == expected


@pytest.mark.parametrize("op", ["GridGenerator", "BilinearSampler", "ROIPooling", "moments"])
def test_integers_are_refused(op):
    """Operators that compute floats refuse integers."""
    rule, count = registry.get(op).infer_dtype, {"GridGenerator": 1, "moments": 1}.get(op, 2)
    with pytest.raises(DTypeError, match=f"{op} expects floats"):
        rule({}, [np.dtype("int32")] * count, [None] * (2 if op in ("moments", "ROIPooling") else 1))


@pytest.mark.parametrize("op", ["gather_nd", "scatter_nd"])
@pytest.mark.parametrize("index", [3, -4])
def test_coordinates_outside_are_refused(op, index):
    """A coordinate out of range raises an error that names its axis, forward and backward."""
    data = np.arange(3.0) if op == "gather_nd" else np.ones(1)
    params = {} if op == "gather_nd" else {"shape": (3,)}
    with pytest.raises(MXNetError, match=re.escape(f"{op}: indices from {index} to {index} exceed axis 0")):
        run(op, [data, np.array([[index]])], params)
    if op == "gather_nd":
        with pytest.raises(MXNetError, match="exceed axis 0"):
            gradients(op, [data, np.array([[index]])], [np.ones(1)])


def test_negative_coordinates_are_differentiated_where_they_read():
    """The gradient of a negative coordinate goes to the element that was read; in MXNet it goes to another element."""
    (g, _) = gradients("gather_nd", [np.zeros((3, 4)), np.array([[-1, 0], [-2, 1]])], [np.array([5.0, 7.0])])
    assert g[2, 2] == 5.0
    assert g[0, 1] == 7.0
    assert np.count_nonzero(g) == 2


def test_diagonals_beyond_the_matrix():
    """_eye returns zeros if the diagonal lies outside the matrix."""
    for k in (-9, -3, 4, 9):
        assert not run("_eye", [], {"N": 3, "M": 4, "k": k})[0].any()


def test_special_functions_to_many_digits():
    """gamma, gammaln and erfinv in float64 agree with the standard library to 5e-13."""
    x = np.array([0.1, 0.5, 0.7, 1.5, 2.5, 7.9, 8.1, 33.3, 150.2, -0.3, -2.7, -7.5])
    np.testing.assert_allclose(run("gamma", [x])[0], [math.gamma(v) for v in x], rtol=5e-13)
    np.testing.assert_allclose(run("gammaln", [x])[0], [math.lgamma(v) for v in x], rtol=1e-13, atol=1e-14)
    y = np.array([1e-12, 0.1, 0.5, 0.89, 0.9, 0.91, 0.999, 0.999999, -0.3, -0.95])
    np.testing.assert_allclose([math.erf(v) for v in run("erfinv", [y])[0]], y, rtol=2e-14)


BIG = np.random.RandomState(0).uniform(0.1, 0.9, (256, 4096)).astype(np.float32)
PLACES = np.stack([np.arange(4096) % 256, np.arange(4096)])
LARGE = [
    *((op, [BIG], {}) for op in ("gamma", "gammaln", "erfinv", "SequenceReverse")),
    *((op, [BIG, np.full(4096, 99)], LENGTHS) for op in ("SequenceMask", "SequenceReverse")),
    *(("moments", [BIG], {"axes": (axis,)}) for axis in (0, 1)),
    ("gather_nd", [BIG, PLACES], {}),
    ("batch_take", [BIG, np.arange(256)], {}),
    ("GroupNorm", [BIG.reshape(8, 32, 64, 64), np.ones(4, np.float32), np.ones(4, np.float32)], {"num_groups": 4}),
    ("SVMOutput", [BIG, np.zeros(256, np.float32)], {}),
    ("softmax_cross_entropy", [BIG, np.zeros(256, np.float32)], {}),
    ("UpSampling", [BIG.reshape(4, 64, 64, 64)], {"scale": 2, "sample_type": "nearest"}),
    ("Crop", [BIG.reshape(4, 64, 64, 64)], {"h_w": (60, 60)}),
    ("BilinearSampler", [BIG.reshape(4, 64, 64, 64), np.zeros((4, 2, 64, 64), np.float32)], {}),
]


@pytest.mark.parametrize("case", LARGE, ids=lambda case: case[0])
def test_no_hidden_memory(case):
    """On 4 MiB of data no kernel allocates more than 600,000 bytes outside its workspace, forward or backward."""
    op, arrays, params = case
    call = prepare(op, arrays, params)
    check_hidden(call, 600_000)
    for result in differentiate(call, [np.ones(s.shape, s.dtype) for s in call.out_specs])[1].calls:
        check_hidden(result, 600_000)
