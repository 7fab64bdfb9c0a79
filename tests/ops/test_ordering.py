"""Details of sort, argsort and topk: ties, NaN, blocks, and positions too large for a dtype."""

import numpy as np
import pytest

from tests.support.ops_harness import gradients, prepare, run
from tests.support.together import together
from weftplan.errors import ParameterError, ShapeError
from weftplan.ops.core import tiling

NAN = float("nan")


@together()
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int8", "uint8", "int32", "int64", "bool"])
@pytest.mark.parametrize("axis", [0, 1, 2, -1, None])
def test_equal_elements_keep_their_order(dtype, axis):
    """Equal elements keep their order, ascending and descending, for every dtype and its lowest number.

    sort, argsort and topk agree.
    """
    x = np.random.RandomState(0).randint(0, 3, (4, 30, 3)).astype(dtype)
    if np.dtype(dtype).kind in "iu":
        x[0, :2] = np.iinfo(dtype).min
    flat = x.reshape(-1) if axis is None else x
    along = -1 if axis is None else axis
    up = np.argsort(flat, axis=along, kind="stable")
    keys = flat.astype(np.float64)
    down = np.argsort(-keys, axis=along, kind="stable")
    for ascending, order in ((True, up), (False, down)):
        params = {"axis": axis, "is_ascend": ascending}
        values, hidden = run("sort", [x], params)
        np.testing.assert_array_equal(hidden, order)
        np.testing.assert_array_equal(values, np.take_along_axis(flat, order, along))
        np.testing.assert_array_equal(run("argsort", [x], {**params, "dtype": "int32"})[0], order)
        best = run("topk", [x], {**params, "k": 3, "ret_typ": "indices", "dtype": "int64"})[0]
        np.testing.assert_array_equal(best, np.take(order, range(3), along))


def test_nan_is_the_greatest():
    """NaN comes last in ascending and first in descending order."""
    x = np.array([2, NAN, -1, NAN, 5])
    assert run("argsort", [x], {})[0].tolist() == [2, 0, 4, 1, 3]
    assert run("topk", [x], {"k": 3})[0].tolist() == [1, 3, 4]


@pytest.mark.parametrize("shape", [(7, 5), (7, 5, 3), (2, 3, 4, 2)])
def test_blocks_of_rows_change_nothing(shape, monkeypatch):
    """Values, positions, masks and gradients are the same if a block has only one row."""
    x = np.random.RandomState(1).uniform(-1, 1, shape)
    calls = [("sort", {"axis": 1}), ("argsort", {"axis": 1})]
    calls += [("topk", {"axis": 1, "k": 2, "ret_typ": kind}) for kind in ("value", "indices", "mask", "both")]

    def everything():
        results = [array for op, params in calls for array in run(op, [x], params)]
        return results + gradients("sort", [x], [x], {"axis": 1})

    whole = everything()
    monkeypatch.setattr(tiling._thread, "grain", tiling.Grain(1, 2 << 20))
    for expected, actual in zip(whole, everything(), strict=True):
        np.testing.assert_array_equal(actual, expected)


def test_positions_must_fit_their_dtype():
    """A dtype that cannot represent every position is refused.

    The hidden positions next to values are exact in any case.
    """
    x = np.arange(3000.0)
    for op, dtype in (("topk", "float16"), ("argsort", "float16"), ("topk", "uint8")):
        with pytest.raises(ShapeError, match=r"cannot hold positions up to 2,999; give dtype='int32'"):
            prepare(op, [x], {"dtype": dtype})
    _, hidden = run("topk", [x], {"ret_typ": "value", "dtype": "float16"})
    assert hidden.tolist() == [2999]
    assert run("topk", [x[:256]], {"dtype": "uint8"})[0].tolist() == [255]
    with pytest.raises(ShapeError, match="k=4 exceeds the 3 elements"):
        prepare("topk", [x[:3]], {"k": 4})
    with pytest.raises(ParameterError, match="ret_typ"):
        prepare("topk", [x], {"ret_typ": "values"})
