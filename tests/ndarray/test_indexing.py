"""Indexing against NumPy, and which selections are views."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.support.together import together
from weftplan import nd
from weftplan.errors import ParameterError, ShapeError

pytestmark = pytest.mark.usefixtures("each_engine")
SHAPE = (2, 3, 4)
BASE = np.arange(24, dtype=np.float32).reshape(SHAPE)
VIEWS = [
    0, -1, slice(0, 1), slice(None), slice(0, 2, 2), (0, 1), (0, slice(1, 3)), (0, 1, 2), Ellipsis, None,
    (slice(None), None), (slice(0, 1), slice(0, 1), slice(1, 3)), (slice(0, 1), 0), slice(-5, None), np.int64(1),
]  # fmt: skip
COPIES = [
    (slice(None), 1), (Ellipsis, 0), slice(None, None, -1), [0, 1], [0], (0, [0, 1]), np.array([1, 0]),
    ([0, 1], [0, 1]), ([0, 1], slice(None), [0, 1]), np.array([True, False]), (Ellipsis, np.array([0, 3])),
]  # fmt: skip


def expected(key):
    """Return NumPy's result, with shape (1,) for a single element as in MXNet."""
    value = BASE[key]
    return value.reshape(value.shape or (1,))


@together()
@pytest.mark.parametrize("key", VIEWS, ids=str)
def test_contiguous_selections_are_views(key):
    """A write through a contiguous selection changes the array, as in MXNet 1.9.1."""
    x = nd.array(BASE)
    part = x[key]
    np.testing.assert_array_equal(part.asnumpy(), expected(key))
    part[:] = -1
    after = BASE.copy()
    after[key] = -1
    np.testing.assert_array_equal(x.asnumpy(), after)


@together()
@pytest.mark.parametrize("key", COPIES, ids=str)
def test_other_selections_are_copies(key):
    """A write to another selection leaves the array unchanged."""
    x = nd.array(BASE)
    part = x[key]
    np.testing.assert_array_equal(part.asnumpy(), expected(key))
    part[:] = -1
    np.testing.assert_array_equal(x.asnumpy(), BASE)


@together()
@pytest.mark.parametrize("key", VIEWS + COPIES, ids=str)
@pytest.mark.parametrize("kind", ["number", "numpy", "array"])
def test_assignment(key, kind):
    """``x[key] = value`` writes the same as NumPy."""
    x, after = nd.array(BASE), BASE.copy()
    values = -np.arange(1, BASE[key].size + 1, dtype=np.float32).reshape(BASE[key].shape)
    x[key] = {"number": 9, "numpy": values, "array": nd.array(values)}[kind]
    after[key] = 9 if kind == "number" else values
    np.testing.assert_array_equal(x.asnumpy(), after)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_random_basic_keys_agree_with_numpy(data):
    """Random keys of integers, slices, ... and None read and write as in NumPy."""
    shape = data.draw(hnp.array_shapes(min_dims=1, max_dims=4, max_side=4))
    key = data.draw(hnp.basic_indices(shape, allow_newaxis=True, allow_ellipsis=True))
    values = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    x, want = nd.array(values), values[key]
    np.testing.assert_array_equal(x[key].asnumpy(), np.reshape(want, np.shape(want) or (1,)))
    x[key] = -5
    values[key] = -5
    np.testing.assert_array_equal(x.asnumpy(), values)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_random_index_arrays_agree_with_numpy(data):
    """Random index arrays, as NumPy arrays or NDArrays, select as in NumPy."""
    shape = data.draw(hnp.array_shapes(min_dims=1, max_dims=3, max_side=4))
    key = data.draw(hnp.integer_array_indices(shape))
    values = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    want = values[key]
    want = np.reshape(want, np.shape(want) or (1,))
    x = nd.array(values)
    np.testing.assert_array_equal(x[key].asnumpy(), want)
    np.testing.assert_array_equal(x[tuple(nd.array(part, dtype="int64") for part in key)].asnumpy(), want)


def test_ndarray_indices_and_masks():
    """Float NDArrays count as integer indices, boolean arrays as masks; both may be pending."""
    x = nd.array([10, 20, 30])
    index = nd.zeros(2)
    index += 1
    index[0] = 2
    np.testing.assert_array_equal(x[index].asnumpy(), [30, 20])
    np.testing.assert_array_equal(x[nd.array([1, 0, 1], dtype="bool")].asnumpy(), [10, 30])
    x[index] = nd.array([1, 2])
    np.testing.assert_array_equal(x.asnumpy(), [10, 2, 1])


def test_an_array_may_be_assigned_from_itself():
    """Assignment between overlapping parts, and with one array as index and value, uses the old values."""
    x = nd.array([1, 2, 3, 4])
    x[1:] = x[:3]
    np.testing.assert_array_equal(x.asnumpy(), [1, 1, 2, 3])
    y = nd.array([1, 0])
    y[y] = y
    np.testing.assert_array_equal(y.asnumpy(), [0, 1])


def test_values_broadcast_and_cast():
    """Assigned values broadcast, lose leading dimensions of 1, and are truncated for integer arrays."""
    x = nd.zeros((2, 2), dtype="int32")
    x[:] = [1.9, 2]
    x[1] = np.ones((1, 1, 2)) * 7
    np.testing.assert_array_equal(x.asnumpy(), [[1, 2], [7, 7]])


@pytest.mark.parametrize("key", [2, -3, (0, 3), (0, 0, 0, 0), [2], ([0], [9])], ids=str)
def test_out_of_range_raises_at_the_call(key):
    """An index out of range raises an IndexError on reading and writing, and nothing changes."""
    x = nd.array(BASE)
    with pytest.raises(IndexError):
        x[key]
    with pytest.raises(IndexError):
        x[key] = 1
    np.testing.assert_array_equal(x.asnumpy(), BASE)


@pytest.mark.parametrize("key", [1.5, "a", {}, [0.5], pytest.param(object(), id="object")], ids=str)
def test_invalid_index_types_are_refused(key):
    """An invalid index raises an error that lists the legal index types."""
    with pytest.raises(ParameterError, match="integers"):
        nd.array(BASE)[key]


@pytest.mark.parametrize("bad", [None, "3", [1, None], 1j, np.array([1j, 2]), [[1], [2, 3]], {"a": 1}])
def test_non_numeric_values_are_refused(bad):
    """Values that are not real numbers are refused by name, and nothing is written."""
    x = nd.array([[1, 2], [3, 4]])
    for key in (0, [0, 1]):
        with pytest.raises(ParameterError, match="cannot assign"):
            x[key] = bad
    np.testing.assert_array_equal(x.asnumpy(), [[1, 2], [3, 4]])


def test_numpy_arrays_without_dimensions_as_indices():
    """A NumPy array without dimensions selects as in NumPy."""
    values = np.arange(6.0).reshape(2, 3)
    x = nd.array(values)
    np.testing.assert_array_equal(x[np.array(1)].asnumpy(), values[1])
    np.testing.assert_array_equal(x[0, np.array(-1)].asnumpy(), [values[0, -1]])
    np.testing.assert_array_equal(x[np.array(True)].asnumpy(), values[None])


def test_nan_is_out_of_range():
    """NaN as an index raises an IndexError, without a conversion warning."""
    with pytest.raises(IndexError, match="out of bounds"):
        nd.ones(3)[nd.array([np.nan])].asnumpy()


def test_unfitting_values_are_refused():
    """Values that do not fit are refused; the error names the shapes, and nothing changes."""
    x = nd.array(BASE)
    with pytest.raises(ShapeError, match=r"shape \(3,\) to a part of shape \(2, 3, 4\)"):
        x[:] = np.ones(3)
    with pytest.raises(ShapeError, match="cannot assign"):
        x[0] = nd.ones((2, 3, 4))
    with pytest.raises(ParameterError, match="cannot assign str"):
        x[0] = "text"
    np.testing.assert_array_equal(x.asnumpy(), BASE)
