"""Arrays: values, asynchrony, views, waits, conversions and copies, on every engine."""

import copy
import pickle
import struct

import numpy as np
import pytest

import weftplan as mx
from tests.support.together import together
from weftplan import nd
from weftplan.errors import (
    DeviceError,
    DTypeError,
    FormatError,
    ParameterError,
    ShapeError,
)
from weftplan.ndarray import NDArray

pytestmark = pytest.mark.usefixtures("each_engine")


@pytest.mark.parametrize("dtype", "float16 float32 float64 uint8 int8 int32 int64 bool".split())  # noqa: SIM905
def test_array_keeps_values_and_dtype(dtype):
    """``array`` of a NumPy array keeps its values, shape and the named dtype."""
    values = np.array([[0, 1, 2], [3, 100, 1]]).astype(dtype)
    x = nd.array(values, dtype=dtype)
    assert (x.shape, x.size, x.ndim, x.dtype, x.stype) == ((2, 3), 6, 2, np.dtype(dtype), "default")
    assert x.nbytes == values.nbytes
    np.testing.assert_array_equal(x.asnumpy(), values)


def test_default_dtype_is_float32():
    """Lists, numbers and NumPy arrays become float32, as in MXNet 1.9.1; NDArrays keep their dtype."""
    for source in ([1, 2], 5.0, np.arange(3), np.ones(2), [True, False]):
        assert nd.array(source).dtype == np.float32
    assert nd.array(nd.ones(2, dtype="int8")).dtype == np.int8


def test_the_source_may_change_after_the_call():
    """``array`` and assignment copy the source before they return, although work is asynchronous."""
    values = np.ones(1000, np.float32)
    x, y = nd.array(values), nd.zeros(1000)
    y[:] = values
    values[:] = 7
    assert x.asnumpy().sum() == y.asnumpy().sum() == 1000


@pytest.mark.parametrize("bad", ["text", [[1, 2], [3]], object(), [None], 1j])
def test_array_refuses_non_numbers(bad):
    """``array`` refuses values that are not numbers."""
    with pytest.raises(DTypeError, match="array: expected numbers"):
        nd.array(bad)


@pytest.mark.parametrize("bad", ["complex64", "float33", "datetime64[s]", object])
def test_unsupported_dtypes_are_refused(bad):
    """Unknown and unsupported dtypes are refused at the call."""
    with pytest.raises(DTypeError, match="dtype"):
        nd.zeros(2, dtype=bad)


@pytest.mark.parametrize("bad", [-1, (2, -3), 1.5, (1.0, 2), "ab", None])
def test_bad_shapes_are_refused(bad):
    """Negative, fractional and non-numeric dimensions raise a ShapeError."""
    with pytest.raises(ShapeError, match="shape"):
        nd.empty(bad)


def test_creation_functions():
    """zeros, ones, full, arange, linspace and eye agree with NumPy."""
    np.testing.assert_array_equal(nd.zeros((2, 3)).asnumpy(), np.zeros((2, 3)))
    np.testing.assert_array_equal(nd.ones(3, dtype="int32").asnumpy(), np.ones(3))
    np.testing.assert_array_equal(nd.full((2,), 3.5).asnumpy(), [3.5, 3.5])
    np.testing.assert_array_equal(nd.arange(1, 7, 2, dtype="int32").asnumpy(), [1, 3, 5])
    np.testing.assert_array_equal(nd.arange(3, repeat=2).asnumpy(), [0, 0, 1, 1, 2, 2])
    np.testing.assert_array_equal(nd.linspace(0, 1, 3).asnumpy(), [0, 0.5, 1])
    np.testing.assert_array_equal(nd.eye(2, 3, 1).asnumpy(), np.eye(2, 3, 1))
    np.testing.assert_array_equal(nd.zeros_like(nd.ones((2, 2))).asnumpy(), np.zeros((2, 2)))
    np.testing.assert_array_equal(nd.ones_like(nd.zeros(2, dtype="int8")).asnumpy(), [1, 1])
    np.testing.assert_array_equal(nd.full((2, 2), [1, 2]).asnumpy(), [[1, 2], [1, 2]])
    np.testing.assert_array_equal(nd.full((2,), nd.array([3]), dtype="int8").asnumpy(), [3, 3])
    with pytest.raises(ParameterError, match="cannot assign str"):
        nd.full((2,), "seven")
    assert nd.zeros((0, 3)).asnumpy().shape == (0, 3)
    assert nd.array(5.0).shape == ()


def test_concatenate_stack_and_moveaxis():
    """concatenate, stack and moveaxis agree with NumPy, and refuse arrays that do not fit."""
    a, b = np.arange(6.0).reshape(2, 3), np.ones((2, 3))
    x, y = nd.array(a), nd.array(b)
    np.testing.assert_array_equal(nd.concatenate([x, y], axis=1).asnumpy(), np.concatenate([a, b], 1))
    np.testing.assert_array_equal(nd.stack(x, y, axis=-1).asnumpy(), np.stack([a, b], -1))
    c = np.arange(24.0).reshape(2, 3, 4)
    for move in ((0, 2), (2, 0), (-1, 1), ([0, 1], [2, 0])):
        np.testing.assert_array_equal(nd.moveaxis(nd.array(c), *move).asnumpy(), np.moveaxis(c, *move))
    with pytest.raises(ShapeError, match="differ outside axis 0"):
        nd.concatenate([x, nd.ones((2, 4))])
    with pytest.raises(ShapeError, match="stack"):
        nd.stack(x, nd.ones((2, 4)))
    for nothing, says in (
        (lambda: nd.stack(), "stack needs at least one"),
        (lambda: nd.stack([]), "stack needs at least one"),
        (lambda: nd.stack(x, 1), "stack: number 1 must be an NDArray, got int"),
        (lambda: nd.concatenate([]), "concatenate needs a list"),
        (lambda: nd.concatenate(x), "concatenate needs a list"),
        (lambda: nd.concatenate([x, b]), "concatenate: number 1 must be an NDArray, got ndarray"),
    ):
        with pytest.raises(DTypeError, match=says):
            nothing()


def test_arguments_have_the_names_of_mxnet():
    """Functions accept arguments by MXNet's names and in MXNet's order."""
    x = nd.array(source_array=[1, 2], dtype="int8")
    assert nd.power(base=x, exp=2).asnumpy().tolist() == [1, 4]
    assert nd.from_numpy(ndarray=np.ones(2)).shape == nd.from_dlpack(dlpack=np.ones(2)).shape == (2,)
    assert nd.arange(0, 4, 1, 1, None, mx.cpu(1), "int64").context == mx.cpu(1)
    assert nd.empty((2,), mx.cpu(1), "int8", "default").dtype == np.int8
    for bad in (lambda: nd.arange(0, infer_range=True), lambda: nd.empty(2, stype="csr")):
        with pytest.raises(ParameterError, match=r"infer_range|dense"):
            bad()


def test_context_names_are_refused():
    """The name of a context is not accepted in place of a context."""
    x = nd.ones(2)
    for call in (
        lambda: nd.ones(2, ctx="cpu"),
        lambda: nd.array([1], "cpu(0)"),
        lambda: x.as_in_context("cpu"),
        lambda: nd.random.uniform(ctx="cpu"),
    ):
        with pytest.raises(DeviceError, match=r"a context such as mx.cpu\(0\) was expected, got 'cpu"):
            call()


def test_autograd_is_absent_on_purpose():
    """Names familiar to MXNet users raise an error that explains gradients."""
    for name in ("grad", "attach_grad", "backward"):
        assert not hasattr(nd.ones(1), name)
        with pytest.raises(AttributeError, match=r"absent on purpose; bind a symbol and call executor\.backward"):
            getattr(nd.ones(1), name)


def test_scalars():
    """An array of one element converts to Python numbers; an array of several raises an error."""
    x = nd.array([[2.5]])
    assert (x.asscalar(), x.item(), float(x), int(x), bool(x), len(x)) == (2.5, 2.5, 2.5, 2, True, 1)
    assert [0, 10, 20][nd.array([2], dtype="int64")] == 20
    assert not nd.zeros(1)
    with pytest.raises(ShapeError, match="not a scalar"):
        nd.ones(3).asscalar()
    with pytest.raises(ValueError, match="ambiguous"):
        bool(nd.ones(3))
    assert 2 in nd.array([1, 2])
    assert [row.asscalar() for row in nd.array([1, 2])] == [1, 2]
    assert repr(nd.array([1, 2])) == "\n[1. 2.]\n<NDArray 2 @cpu(0)>"


def test_numpy_sees_values():
    """np.asarray copies, ``copy=False`` is refused, and NumPy's operators return NDArrays."""
    x = nd.array([1, 2])
    values = np.asarray(x)
    values[0] = 9
    assert x.asnumpy()[0] == 1
    assert np.asarray(x, dtype=np.float64).dtype == np.float64
    assert isinstance(np.ones(2, np.float32) + x, NDArray)
    with pytest.raises(ValueError, match="copy"):
        x.__array__(copy=False)


def test_views_share_memory_and_order():
    """A write through a view is visible in the whole array in push order, and vice versa."""
    x = nd.zeros((2, 3))
    view = x.reshape((3, 2))
    x[:] = 1
    view[1] = 5
    x += 1
    np.testing.assert_array_equal(x.asnumpy(), [[2, 2, 6], [6, 2, 2]])
    assert view.var is x.var


def test_reshape_codes_and_errors():
    """``reshape`` supports MXNet's codes and refuses shapes of other sizes."""
    x = nd.zeros((2, 3, 4))
    assert x.reshape(-1).shape == (24,)
    assert x.reshape(4, 6).shape == (4, 6)
    assert x.reshape((0, -1)).shape == (2, 12)
    assert x.reshape(shape=(-3, 0)).shape == (6, 4)
    assert x.reshape((-4, 1, 2, -2)).shape == (1, 2, 3, 4)
    assert x.reshape((-1, 0), reverse=True).shape == (6, 4)
    assert nd.zeros((0, 3)).reshape((3, 0)).shape == (3, 0)
    for bad in ((5, -1), (2, 2), (-7,), (-1, -1)):
        with pytest.raises(ShapeError, match="eshape"):
            x.reshape(bad)


def test_inplace_reshapes_give_views():
    """expand_dims, squeeze and flatten copy; with inplace=True they share the memory, as in MXNet."""
    x = nd.zeros((2, 1, 3))
    for function, shape in (
        (lambda **kw: x.expand_dims(axis=-1, **kw), (2, 1, 3, 1)),
        (lambda **kw: x.squeeze(axis=1, **kw), (2, 3)),
        (lambda **kw: x.squeeze(**kw), (2, 3)),
        (lambda **kw: x.flatten(**kw), (2, 3)),
    ):
        copy, view = function(), function(inplace=True)
        assert copy.shape == view.shape == shape
        view += 1
        np.testing.assert_array_equal(view.asnumpy(), x.asnumpy().reshape(shape))
        assert copy.var is not x.var
        assert view.var is x.var
    assert x.asnumpy().tolist() == [[[4, 4, 4]], [[4, 4, 4]]]
    with pytest.raises(ShapeError, match="dimension 0"):
        x.squeeze(0, inplace=True)


def test_transpose_argument_forms():
    """``transpose`` accepts axes separately, as a sequence, or by name."""
    x = nd.zeros((2, 3, 4))
    assert x.transpose().shape == x.transpose(None).shape == (4, 3, 2)
    for result in (x.transpose(1, 0, 2), x.transpose((1, 0, 2)), x.transpose([1, 0, 2]), x.transpose(axes=(1, 0, 2))):
        assert result.shape == (3, 2, 4)


def test_copies_are_independent():
    """copy, copyto and astype allocate new memory; as_in_context on the same context does not."""
    x = nd.array([1.5, -2.5])
    same, moved = x.copy(), x.copyto(mx.cpu(1))
    cast = x.astype("int32")
    x[:] = 0
    np.testing.assert_array_equal(same.asnumpy(), [1.5, -2.5])
    np.testing.assert_array_equal(moved.asnumpy(), [1.5, -2.5])
    np.testing.assert_array_equal(cast.asnumpy(), [1, -2])
    assert moved.context == mx.cpu(1)
    assert x.as_in_context(mx.cpu(0)) is x
    assert x.astype("float32", copy=False) is x
    assert x.copyto(x) is x
    np.testing.assert_array_equal(copy.deepcopy(moved).asnumpy(), [1.5, -2.5])
    back = pickle.loads(pickle.dumps(moved))
    assert back.context == mx.cpu(1)
    np.testing.assert_array_equal(back.asnumpy(), [1.5, -2.5])


def test_copyto_casts_and_checks():
    """copyto requires equal shapes but not equal dtypes."""
    target = nd.zeros(2, dtype="int32")
    assert nd.array([1.5, 2.5]).copyto(target) is target
    np.testing.assert_array_equal(target.asnumpy(), [1, 2])
    with pytest.raises(ShapeError, match=r"\(2,\), the target \(3,\)"):
        nd.ones(2).copyto(nd.ones(3))
    with pytest.raises(DTypeError, match="NDArray or a Context, got int"):
        nd.ones(2).copyto(3)


@together()
@pytest.mark.parametrize("source", [mx.cpu(0), mx.cpu(1), mx.cpu_pinned(0), mx.sim(80), mx.sim(81)])
@pytest.mark.parametrize("target", [mx.cpu(0), mx.cpu(1), mx.sim(80), mx.sim(81)])
@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_copies_between_all_kinds_of_context(source, target, dtype):
    """Copies between any two contexts keep the values, with or without a cast, and later operations see them."""
    x = nd.array(np.arange(8), ctx=source)
    x += 1
    y = nd.empty((8,), target, dtype)
    x.copyto(y)
    y *= 2
    assert y.context == target
    np.testing.assert_array_equal(y.asnumpy(), 2 * np.arange(1, 9))


def test_arithmetic_on_a_simulated_device():
    """Arithmetic on arrays of sim(i) gives the host's results."""
    with mx.sim(82):
        x = nd.array([[1, 2], [3, 4]])
        y = (x * 2 + 1)[:, 1]
        y[0] = -1
        z = x[[1, 0], [0, 0]]
    assert y.context == mx.sim(82)
    np.testing.assert_array_equal(y.asnumpy(), [-1, 9])
    np.testing.assert_array_equal(z.asnumpy(), [3, 1])


def test_numpy_all_and_any():
    """numpy.all and numpy.any accept arrays, also along an axis, and give NumPy's values."""
    x = mx.nd.array([[1, 0], [1, 1]])
    assert np.all(x == x)
    assert not np.all(x)
    assert np.any(x)
    assert np.all(x, axis=0).tolist() == [True, False]
    assert np.any(x, axis=1, keepdims=True).tolist() == [[True], [True]]


def test_pickled_state_of_mxnet_is_loaded():
    """A pickled state of MXNet, one record of a parameter file, loads, although gpu(2) is missing."""
    record = struct.pack("<IiIqiii3f", 0xF993FAC9, 0, 1, 3, 2, 0, 0, 0, 1, 2)
    array = mx.nd.ones((2, 2), dtype="int32")
    array.__setstate__({"handle": bytearray(record)})
    assert (array.shape, array.dtype, array.asnumpy().tolist()) == ((3,), np.float32, [0, 1, 2])
    array += 1
    assert array.asnumpy().tolist() == [1, 2, 3]
    with pytest.raises(FormatError, match="pickled array"):
        array.__setstate__({"handle": record[:-1]})


def test_array_outlives_its_module_silently(monkeypatch):
    """An array finalized after its module was cleared, as at interpreter exit, causes no warning."""
    array = mx.nd.from_numpy(np.ones(3, "f4"))
    array.wait_to_read()
    monkeypatch.setattr("weftplan.ndarray.memory.chunk.dead", None)
    del array  # a warning from a destructor is an error here
