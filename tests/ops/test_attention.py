"""Attention, mixed precision and resizing: inference in both directions, dtypes, values and refusals."""

import numpy as np
import pytest

from tests.support.ops_harness import check_contract, run
from weftplan.errors import DTypeError, ParameterError, ShapeError
from weftplan.ops.core import registry

QK, VALUES = "_contrib_interleaved_matmul_selfatt_qk", "_contrib_interleaved_matmul_selfatt_valatt"
QK2, VALUES2 = "_contrib_interleaved_matmul_encdec_qk", "_contrib_interleaved_matmul_encdec_valatt"
RESIZE, ADAPTIVE = "_contrib_BilinearResize2D", "_contrib_AdaptiveAvgPooling2D"
F16, F32, F64, I32 = (np.dtype(name) for name in ("float16", "float32", "float64", "int32"))


def infer(op, ins, outs, params):
    """Return the (input shapes, output shapes) that the operator infers."""
    actual = registry.get(op)
    return actual.infer_shape(registry.parse_params(actual, params), list(ins), list(outs))


@pytest.mark.parametrize(
    ("op", "ins", "outs", "params", "expected"),
    [
        (QK, [(5, 2, 24)], [None], {"heads": 4}, ([(5, 2, 24)], [(8, 5, 5)])),
        (QK, [(0, 0, 24)], [(8, 0, 5)], {"heads": 4}, ([(5, 2, 24)], [(8, 5, 5)])),
        (QK, [None], [(8, 5, 5)], {"heads": 4}, ([(5, 2, 0)], [(8, 5, 5)])),
        (VALUES, [(5, 2, 24), None], [None], {"heads": 4}, ([(5, 2, 24), (8, 5, 5)], [(5, 2, 8)])),
        (VALUES, [None, None], [(5, 2, 8)], {"heads": 4}, ([(5, 2, 24), (8, 5, 5)], [(5, 2, 8)])),
        (VALUES, [None, (8, 5, 0)], [(0, 0, 8)], {"heads": 4}, ([(5, 2, 24), (8, 5, 5)], [(5, 2, 8)])),
        (QK2, [(5, 2, 8), (3, 0, 0)], [None], {"heads": 4}, ([(5, 2, 8), (3, 2, 16)], [(8, 5, 3)])),
        (QK2, [None, (3, 2, 16)], [(0, 5, 0)], {"heads": 4}, ([(5, 2, 8), (3, 2, 16)], [(8, 5, 3)])),
        (VALUES2, [(3, 2, 16), (0, 5, 0)], [None], {"heads": 4}, ([(3, 2, 16), (8, 5, 3)], [(5, 2, 8)])),
        (VALUES2, [None, (8, 5, 3)], [(0, 0, 8)], {"heads": 4}, ([(3, 2, 16), (8, 5, 3)], [(5, 2, 8)])),
        ("_contrib_div_sqrt_dim", [(2, 0)], [(0, 3)], {}, ([(2, 3)], [(2, 3)])),
        ("_contrib_arange_like", [(2, 3)], [None], {}, ([(2, 3)], [(2, 3)])),
        ("_contrib_arange_like", [(2, 0)], [(3,)], {"axis": -1}, ([(2, 3)], [(3,)])),
        ("_contrib_arange_like", [None], [(3,)], {"axis": 1}, ([None], [(3,)])),
        ("amp_cast", [None], [(2, 3)], {"dtype": "float16"}, ([(2, 3)], [(2, 3)])),
        ("amp_multicast", [None, (4,)], [(2, 0), None], {"num_outputs": 2}, ([(2, 0), (4,)], [(2, 0), (4,)])),
        (RESIZE, [(2, 3, 5, 7)], [None], {"height": 4, "width": 6}, ([(2, 3, 5, 7)], [(2, 3, 4, 6)])),
        (RESIZE, [(0, 3, 5, 7)], [(2, 0, 0, 0)], {"height": 4, "width": 6}, ([(2, 3, 5, 7)], [(2, 3, 4, 6)])),
        (RESIZE, [None], [(2, 3, 0, 0)], {"height": 4, "width": 6}, ([(2, 3, 0, 0)], [(2, 3, 4, 6)])),
        (RESIZE, [(2, 3, 0, 7)], [None], {"mode": "to_even_up"}, ([(2, 3, 0, 7)], [(2, 3, 0, 8)])),
        (
            RESIZE,
            [(2, 3, 5, 7), (1, 1, 4, 0)],
            [(0, 0, 0, 6)],
            {"mode": "like"},
            ([(2, 3, 5, 7), (1, 1, 4, 6)], [(2, 3, 4, 6)]),
        ),
        (ADAPTIVE, [(2, 3, 5, 7)], [None], {}, ([(2, 3, 5, 7)], [(2, 3, 1, 1)])),
        (ADAPTIVE, [(0, 3, 5, 7)], [(2, 0, 0, 0)], {"output_size": "(2, 4)"}, ([(2, 3, 5, 7)], [(2, 3, 2, 4)])),
    ],
)
def test_shapes(op, ins, outs, params, expected):
    """Known shapes of inputs and outputs complete the unknown shapes."""
    actual = infer(op, ins, outs, params)
    assert (list(actual[0]), list(actual[1])) == expected


@pytest.mark.parametrize(
    ("op", "ins", "params", "error", "says"),
    [
        (QK, [(5, 2, 20)], {"heads": 4}, ShapeError, r"multiple of 3 · heads=4, got shape \(5, 2, 20\)"),
        (QK, [(5, 2)], {"heads": 4}, ShapeError, "steps, batch, width"),
        (QK, [(5, 2, 12)], {"heads": 0}, ParameterError, "at least 1"),
        (VALUES, [(5, 2, 24), (7, 5, 5)], {"heads": 4}, ShapeError, "multiple of heads=4"),
        (VALUES, [(5, 2, 24), (8, 5, 6)], {"heads": 4}, ShapeError, "keys of"),
        (QK2, [(5, 2, 8), (3, 1, 16)], {"heads": 4}, ShapeError, "batches of"),
        (QK2, [(5, 2, 8), (3, 2, 24)], {"heads": 4}, ShapeError, "widths a part"),
        (RESIZE, [(2, 3, 5, 7)], {"height": 0}, ParameterError, "height of the output would be 0"),
        (RESIZE, [(2, 3, 5, 7)], {"mode": "odd_scale"}, ParameterError, "needs scale_height"),
        (RESIZE, [(2, 3, 5)], {}, ShapeError, "differ in rank"),
        (ADAPTIVE, [(2, 3, 5, 7)], {"output_size": (1, 2, 3)}, ParameterError, "one or two positive numbers"),
        ("_contrib_arange_like", [(2, 3)], {"repeat": 0}, ShapeError, "repeat must be at least 1"),
        ("_contrib_arange_like", [(2, 3)], {"axis": 2}, ShapeError, "axis of arange_like 2"),
        ("amp_cast", [(2,)], {"dtype": "complex64"}, ParameterError, "expected a dtype"),
    ],
)
def test_refused(op, ins, params, error, says):
    """Shapes and parameters that do not fit are refused, with the reason."""
    with pytest.raises(error, match=says):
        infer(op, ins, [None], params)


@pytest.mark.parametrize(
    ("op", "params", "ins", "expected"),
    [
        ("amp_cast", {"dtype": "float16"}, [F32], [F16]),
        ("amp_cast", {"dtype": "float16"}, [I32], [I32]),
        ("amp_cast", {"dtype": "float16"}, [F64], [F64]),
        ("amp_cast", {"dtype": "float16"}, [None], [None]),
        ("amp_multicast", {"num_outputs": 3}, [F16, F32, I32], [F32, F32, I32]),
        ("amp_multicast", {"num_outputs": 2, "cast_narrow": True}, [F16, F32], [F16, F16]),
        ("amp_multicast", {"num_outputs": 2}, [F16, None], [None, None]),
    ],
)
def test_dtypes_of_mixed_precision(op, params, ins, expected):
    """Floats are cast to the requested, widest or narrowest dtype; float64 and integers are unchanged by amp_cast."""
    actual = registry.get(op)
    _, outs = actual.infer_dtype(registry.parse_params(actual, params), ins, [None] * len(ins))
    assert [None if out is None else np.dtype(out) for out in outs] == expected
    assert all(a is b for a, b in zip(outs, expected, strict=True) if b is None)


def test_multicast_in_place():
    """amp_multicast meets the kernel contract in place, for casts between equal and different sizes."""
    arrays = [np.ones((3, 2), np.float16), np.full(4, 2, np.float32), np.arange(3)]
    check_contract("amp_multicast", arrays, {"num_outputs": 3})
    outs = run("amp_multicast", arrays, {"num_outputs": 3})
    assert [out.dtype for out in outs] == [F32, F32, np.dtype(np.int64)]


@pytest.mark.parametrize("op", [QK, VALUES, QK2, VALUES2, "_contrib_div_sqrt_dim", RESIZE, ADAPTIVE])
def test_integers_are_refused(op):
    """Attention and resizing operators refuse integers."""
    actual = registry.get(op)
    params = registry.parse_params(actual, {"heads": 1} if "interleaved" in op else {})
    with pytest.raises(DTypeError, match="expects floats, got int32"):
        actual.infer_dtype(params, [I32] * len(actual.input_names(params)), [None])


def test_resizing_back_and_forth():
    """An image linear in its rows stays so at a larger size; adaptive pooling to one pixel gives the mean."""
    image = np.tile(np.linspace(0, 1, 5)[:, None], (1, 1, 1, 3))
    (wide,) = run(RESIZE, [image], {"height": 9, "width": 7})
    np.testing.assert_allclose(wide[0, 0, :, 4], np.linspace(0, 1, 9))
    (small,) = run(ADAPTIVE, [image], {})
    np.testing.assert_allclose(small, 0.5)
