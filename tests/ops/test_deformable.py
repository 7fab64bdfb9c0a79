"""Deformable convolutions and regions: plain loops, numeric gradients, inference in both directions, refusals."""

import importlib.util
import math
import pathlib

import numpy as np
import pytest

from tests.support.ops_harness import check_contract, check_gradient, gradients, run
from tests.support.ops_harness import infer_shapes as infer
from weftplan.errors import DTypeError, ParameterError, ShapeError
from weftplan.ops.core import registry, tiling

GOLDEN = pathlib.Path(__file__).resolve().parents[1] / "golden"
PLAIN, MODULATED = "_contrib_DeformableConvolution", "_contrib_ModulatedDeformableConvolution"
POSITION, MOVED, TURNED = (f"_contrib_{name}" for name in ("PSROIPooling", "DeformablePSROIPooling", "RROIAlign"))
WINDOW = {"kernel": (3, 2), "stride": (2, 1), "dilate": (1, 2), "pad": (1, 1), "num_filter": 4}
GROUPED = {**WINDOW, "num_group": 2, "num_deformable_group": 2}
REGIONS = np.array([[0, 1.1, 2.3, 12.2, 14.4], [1, 3.2, 0.3, 9.1, 11.2], [0, -4.0, 2.0, 6.0, 18.0], [7, 0, 0, 1, 1]])


def _module(name):
    spec = importlib.util.spec_from_file_location(f"deformable_{name}", GOLDEN / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


inputs, cases = _module("inputs"), _module("cases_windows")


def tensors(*, groups=1, modulated=False, bias=True, seed=0):
    """Return data, offset, mask, weight and bias that fit WINDOW or GROUPED.

    No offset moves an element onto a pixel, because slopes jump there.
    """
    rng = np.random.RandomState(seed)
    moves = rng.randint(-2, 3, (2, groups * 12, 3, 6)) + rng.uniform(0.1, 0.9, (2, groups * 12, 3, 6))
    actual = [rng.uniform(-1, 1, (2, 4, 5, 6)), moves]
    if modulated:
        actual.append(rng.uniform(0, 1, (2, groups * 6, 3, 6)))
    actual.append(rng.uniform(-1, 1, (4, 4 // groups, 3, 2)))
    return [*actual, rng.uniform(-1, 1, 4)] if bias else actual


def by_loops(data, offset, mask, weight, *, groups, modulated):
    """Return the convolution without bias by its definition, element by element."""
    out = np.zeros((2, 4, 3, 6))
    each, filters = 4 // groups, 4 // groups

    def pixel(image, y, x):
        if not modulated:
            if not (0 <= y < 5 and 0 <= x < 6):
                return 0.0
            y, x = min(y, 4), min(x, 5)
        total = 0.0
        for row in (math.floor(y), math.floor(y) + 1):
            for column in (math.floor(x), math.floor(x) + 1):
                if 0 <= row < 5 and 0 <= column < 6:
                    total += (1 - abs(y - row)) * (1 - abs(x - column)) * image[row, column]
        return total

    for n, f, i, j in np.ndindex(out.shape):
        for c in range(each):
            channel = f // filters * each + c
            for a, b in np.ndindex(3, 2):
                group = channel // (4 // groups)
                tap = group * 6 + a * 2 + b
                y, x = (offset[n, 2 * tap + axis, i, j] for axis in (0, 1))
                value = pixel(data[n, channel], i * 2 - 1 + a + y, j - 1 + b * 2 + x)
                out[n, f, i, j] += weight[f, c, a, b] * value * (mask[n, tap, i, j] if modulated else 1)
    return out


@pytest.mark.parametrize("modulated", [False, True])
@pytest.mark.parametrize("groups", [1, 2])
def test_convolution_by_loops(groups, modulated):
    """Both convolutions sample every window element where its offset moves it, as plain loops do."""
    data, offset, *mask, weight, bias = tensors(groups=groups, modulated=modulated)
    params = GROUPED if groups == 2 else WINDOW
    (out,) = run(MODULATED if modulated else PLAIN, [data, offset, *mask, weight, bias], params)
    expected = by_loops(data, offset, mask[0] if mask else None, weight, groups=groups, modulated=modulated)
    np.testing.assert_allclose(out, expected + bias[:, None, None], atol=1e-12)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("op", [PLAIN, MODULATED])
def test_gradients_of_convolutions(op, groups):
    """Data, offsets, mask, weight and bias have the gradients of central differences."""
    rng = np.random.RandomState(6)
    moves = rng.randint(-1, 2, (1, groups * 8, 2, 2)) + rng.uniform(0.1, 0.9, (1, groups * 8, 2, 2))
    mask = [rng.uniform(0, 1, (1, groups * 4, 2, 2))] if op == MODULATED else []
    weight = rng.uniform(-1, 1, (2, 2 // groups, 2, 2))
    params = {"kernel": (2, 2), "stride": (2, 1), "pad": (1, 0), "dilate": (1, 2), "num_filter": 2}
    params |= {"num_group": groups, "num_deformable_group": groups, "no_bias": groups == 2}
    bias = [] if groups == 2 else [rng.uniform(-1, 1, 2)]
    check_gradient(op, [rng.uniform(-1, 1, (1, 2, 3, 4)), moves, *mask, weight, *bias], params)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("op", [PLAIN, MODULATED])
def test_contract_of_convolutions(op, dtype):
    """Both convolutions meet the kernel contract: unwanted outputs and the exact workspace."""
    check_contract(op, [x.astype(dtype) for x in tensors(groups=2, modulated=op == MODULATED)], GROUPED)


@pytest.mark.parametrize("op", [PLAIN, MODULATED])
def test_tiles_do_not_matter(op):
    """Computing one window at a time gives the values and gradients of all windows together."""
    actual = tensors(groups=2, modulated=op == MODULATED)
    heads = [np.random.RandomState(1).uniform(-1, 1, (2, 4, 3, 6))]
    whole = [*run(op, actual, GROUPED), *gradients(op, actual, heads, GROUPED)]
    with tiling.using(tiling.Grain(block=1 << 16, tile_bytes=5 * 6 * 4 * 8)):
        pieces = [*run(op, actual, GROUPED), *gradients(op, actual, heads, GROUPED)]
    for one, second in zip(whole, pieces, strict=True):
        np.testing.assert_allclose(one, second, atol=1e-12)


def test_no_moves_are_an_ordinary_convolution():
    """With offsets of 0 and a mask of 1, both convolutions equal Convolution."""
    data, offset, mask, weight, bias = tensors(modulated=True)
    expected = run("Convolution", [data, weight, bias], WINDOW)[0]
    np.testing.assert_allclose(run(PLAIN, [data, 0 * offset, weight, bias], WINDOW)[0], expected, atol=1e-12)
    still = [data, 0 * offset, np.ones_like(mask), weight, bias]
    np.testing.assert_allclose(run(MODULATED, still, WINDOW)[0], expected, atol=1e-12)


@pytest.mark.parametrize("op", [PLAIN, MODULATED])
def test_offsets_that_are_no_numbers(op):
    """Elements with an offset of NaN, infinity or 1e300 are outside of the image and add 0."""
    data, offset, *mask, weight, bias = tensors(modulated=op == MODULATED)
    for value in (np.nan, np.inf, -np.inf, 1e300):
        (out,) = run(op, [data, np.full_like(offset, value), *mask, weight, bias], WINDOW)
        np.testing.assert_array_equal(out, np.broadcast_to(bias[:, None, None], out.shape))


@pytest.mark.parametrize("case", [c for c in cases.CASES if c["op"] == PLAIN], ids=inputs.case_name)
@pytest.mark.parametrize("dtype", ["float64", "float16"])
def test_contract_of_golden_cases(case, dtype):
    """MXNet's golden cases meet the kernel contract in float64 and float16."""
    check_contract(case["op"], [x.astype(dtype) for x in inputs.case_inputs(case)], case["params"])


@pytest.mark.parametrize("params", [{}, {"group_size": 3}, {"group_size": 1, "spatial_scale": 0.25}])
def test_gradient_of_position_sensitive_pooling(params):
    """The data has the gradient of central differences; a region of a missing image gives 0."""
    params = {"output_dim": 2, "pooled_size": 2, "spatial_scale": 0.5, **params}
    planes = 2 * params.get("group_size", 2) ** 2
    data = np.random.RandomState(1).uniform(-1, 1, (2, planes, 8, 9))
    check_gradient(POSITION, [data[:, :, :5, :6], REGIONS], params, wrt=(0,))
    (out,) = run(POSITION, [data, REGIONS], params)
    assert not out[3].any()
    assert out[:3].any()


@pytest.mark.parametrize("classes", [0, 1, 2])
def test_gradient_of_moved_regions(classes):
    """Data and offsets have the gradients of central differences."""
    rng = np.random.RandomState(2)
    params = {"output_dim": 2, "pooled_size": 3, "group_size": 2, "spatial_scale": 0.5, "sample_per_part": 2}
    data, regions = rng.uniform(-1, 1, (1, 8, 4, 3)), REGIONS[[0, 2]] * [1, 0.4, 0.4, 0.4, 0.4]
    if not classes:
        check_gradient(MOVED, [data, regions], {**params, "no_trans": True}, wrt=(0,))
        return
    trans = rng.uniform(-1, 1, (2, 2 * classes, 2, 2))
    check_gradient(MOVED, [data, regions, trans], {**params, "part_size": 2, "trans_std": 0.13}, wrt=(0, 2))


@pytest.mark.parametrize("ratio", [-1, 2])
def test_gradient_of_turned_regions(ratio):
    """The data has the gradient of central differences; MXNet 1.9.1 has no such gradient."""
    data = np.random.RandomState(3).uniform(-1, 1, (2, 2, 6, 7))
    regions = np.array([[0, 4.0, 5.0, 6.0, 3.0, 30.0], [1, 2.0, 7.0, 4.0, 8.0, -100.0], [2, 1, 1, 1, 1, 0]])
    check_gradient(
        TURNED, [data, regions], {"pooled_size": (2, 3), "spatial_scale": 0.9, "sampling_ratio": ratio}, wrt=(0,)
    )


def test_rotation_by_zero_equals_roi_align():
    """RROIAlign with angle 0 equals ROIAlign of the same corners."""
    data = np.random.RandomState(4).uniform(-1, 1, (1, 2, 9, 8))
    (turned,) = run(
        TURNED, [data, np.array([[0, 4.0, 4.0, 5.0, 3.0, 0.0]])], {"pooled_size": 2 * (2,), "spatial_scale": 1}
    )
    area = {"pooled_size": 2 * (2,), "spatial_scale": 1.0}
    (straight,) = run("_contrib_ROIAlign", [data, np.array([[0, 1.5, 2.5, 6.5, 5.5]])], area)
    np.testing.assert_allclose(turned, straight, atol=1e-12)


AREA = {"output_dim": 3, "pooled_size": 4, "group_size": 2, "spatial_scale": 0.5}
FULL = [(2, 4, 5, 6), (2, 12, 3, 6), (4, 4, 3, 2), (4,)]


@pytest.mark.parametrize(
    ("op", "ins", "outs", "params", "expected"),
    [
        (PLAIN, [(2, 4, 5, 6), None, None, None], [None], WINDOW, (FULL, [(2, 4, 3, 6)])),
        (PLAIN, [(0, 4, 5, 6), (2, 0, 0, 0), None, None], [None], WINDOW, (FULL, [(2, 4, 3, 6)])),
        (
            MODULATED,
            [(0, 4, 5, 6), None, None, None, None],
            [(2, 0, 0, 0)],
            WINDOW,
            ([FULL[0], FULL[1], (2, 6, 3, 6), *FULL[2:]], [(2, 4, 3, 6)]),
        ),
        (POSITION, [(2, 0, 8, 9), None], [(7, 0, 0, 0)], AREA, ([(2, 12, 8, 9), (7, 5)], [(7, 3, 4, 4)])),
        (
            MOVED,
            [(2, 0, 8, 9), None, (7, 6, 0, 0)],
            [None],
            AREA,
            ([(2, 12, 8, 9), (7, 5), (7, 6, 4, 4)], [(7, 3, 4, 4)]),
        ),
        (
            TURNED,
            [(2, 3, 8, 9), None],
            [(7, 0, 0, 0)],
            {"pooled_size": (2, 3), "spatial_scale": 1.0},
            ([(2, 3, 8, 9), (7, 6)], [(7, 3, 2, 3)]),
        ),
    ],
)
def test_shapes(op, ins, outs, params, expected):
    """Known shapes of inputs and outputs complete the unknown shapes."""
    assert infer(op, ins, outs, params) == expected


@pytest.mark.parametrize(
    ("op", "ins", "params", "error", "says"),
    [
        (PLAIN, [(2, 4, 5), None, None, None], {**WINDOW, "kernel": (3,)}, ParameterError, "a height and a width"),
        (PLAIN, [(2, 4, 5, 6), (2, 12, 3, 5), None, None], WINDOW, ShapeError, "DeformableConvolution: output"),
        (PLAIN, [(2, 4, 5, 6), (2, 11, 3, 6), None, None], WINDOW, ShapeError, r"offset \(batch, 12"),
        (PLAIN, [(2, 3, 5, 6), *[None] * 3], {**WINDOW, "num_deformable_group": 2}, ShapeError, "multiple of num_def"),
        (PLAIN, [None] * 4, {**WINDOW, "num_deformable_group": 0}, ParameterError, "expected at least 1"),
        (MODULATED, [None, (2, 12, 3, 6), (2, 6, 3, 5), None, None], WINDOW, ShapeError, "offset and mask"),
        (POSITION, [(2, 11, 8, 9), None], AREA, ShapeError, "output_dim"),
        (POSITION, [None, (7, 4)], AREA, ShapeError, "rois"),
        (POSITION, [None, None], {**AREA, "pooled_size": 0}, ParameterError, "pooled_size=0"),
        (MOVED, [None, None, (7, 4, 4, 4)], AREA, ShapeError, "classes that divide"),
        (MOVED, [None, None, (7, 3, 4, 4)], AREA, ShapeError, "two planes for each class"),
        (MOVED, [None, None, None], {**AREA, "sample_per_part": 0}, ParameterError, "sample_per_part=0"),
        (TURNED, [None, (7, 5)], {"pooled_size": (2, 3), "spatial_scale": 1.0}, ShapeError, "rois"),
        (
            TURNED,
            [None, None],
            {"pooled_size": (2,), "spatial_scale": 1.0},
            ParameterError,
            "positive height and width",
        ),
    ],
)
def test_refused(op, ins, params, error, says):
    """Shapes and parameters that do not fit raise an error that states the reason."""
    with pytest.raises(error, match=says):
        infer(op, ins, [None], params)


@pytest.mark.parametrize(
    ("op", "params"),
    [(PLAIN, WINDOW), (MODULATED, WINDOW), (POSITION, AREA), (MOVED, AREA),
     (TURNED, {"pooled_size": (2, 3), "spatial_scale": 1.0})],
)  # fmt: skip
def test_integers_are_refused(op, params):
    """Operators that interpolate the data refuse integers."""
    actual = registry.get(op)
    parsed = registry.parse_params(actual, params)
    count = len(actual.input_names(parsed))
    with pytest.raises(DTypeError, match="expects floats, got int32"):
        actual.infer_dtype(parsed, [np.dtype("int32")] * count, [None])
