"""Operators on arrays against NumPy, or against MXNet's rules where the two differ."""

import operator
import threading

import numpy as np
import pytest

import weftplan as mx
from tests.support.together import together
from weftplan import nd
from weftplan.errors import DeviceError, DTypeError, ShapeError
from weftplan.ndarray.errstate import quietly

pytestmark = pytest.mark.usefixtures("each_engine")
BINARY = "add sub mul truediv floordiv mod pow eq ne lt le gt ge".split()  # noqa: SIM905
INPLACE = "iadd isub imul itruediv ifloordiv imod ipow".split()  # noqa: SIM905
A = np.array([[1.5, 2, -7], [0.25, 3, 4]], np.float32)
B = np.array([[2, -0.5, 3], [1.5, 3, -2]], np.float32)


@together()
@pytest.mark.parametrize("name", BINARY)
@pytest.mark.parametrize("other", [B, B[0], B[:, :1], np.float32(3)], ids=["same", "row", "column", "zero-d"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_arrays_broadcast_as_in_numpy(name, other, dtype):
    """Operators on equal shapes, rows, columns and zero-dimensional arrays give NumPy's bits."""
    function = getattr(operator, name)
    a, b = A.astype(dtype), np.asarray(other).astype(dtype)
    result = function(nd.array(a, dtype=dtype), nd.array(b, dtype=dtype))
    assert result.dtype == np.dtype(dtype)
    np.testing.assert_array_equal(result.asnumpy(), function(a, b).astype(dtype))


@together()
@pytest.mark.parametrize("name", BINARY)
@pytest.mark.parametrize("value", [2, 2.5, -3, True, np.float64(1.5), np.int32(2)])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_numbers_take_the_dtype_of_the_array(name, value):
    """A number on the left or right takes the array's dtype, float32."""
    function = getattr(operator, name)
    result, swapped = function(nd.array(A), value), function(value, nd.array(A))
    assert result.dtype == swapped.dtype == np.float32
    np.testing.assert_array_equal(result.asnumpy(), function(A, np.float32(value)).astype(np.float32))
    np.testing.assert_array_equal(swapped.asnumpy(), function(np.float32(value), A).astype(np.float32))


@together()
@pytest.mark.parametrize("name", INPLACE)
@pytest.mark.parametrize("other", [B, B[0], 3, 0.5], ids=["same", "row", "int", "float"])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_in_place(name, other):
    """An in-place operator keeps the array and its var, and has the plain operator's result; views see it."""
    x = nd.array(A)
    view, var = x[1], x.var
    operand = nd.array(other) if isinstance(other, np.ndarray) else other
    result = getattr(operator, name)(x, operand)
    assert result is x
    assert x.var is var
    expected = getattr(operator, name[1:])(A, other).astype(np.float32)
    np.testing.assert_array_equal(x.asnumpy(), expected)
    np.testing.assert_array_equal(view.asnumpy(), expected[1])


# Results of MXNet 1.9.1 on [1, 2, -7] of int32 and [1, 2, 3] of uint8.
INTEGERS = [
    (lambda i: i + 1.5, [2, 3, -6]),
    (lambda i: i * 1.5, [1, 2, -7]),
    (lambda i: i / 2, [0, 1, -3]),
    (lambda i: i % 3, [1, 2, 2]),
    (lambda i: i**2, [1, 4, 49]),
    (lambda i: i - 2.5, [-1, 0, -9]),
    (lambda i: 2 / i, [2, 1, 0]),
    (lambda i: 1.5 / i, [1, 0, 0]),
    (lambda i: 2 % i, [0, 0, -5]),
    (lambda i: 2**i, [2, 4, 0]),
    (lambda i: i / i, [1, 1, 1]),
    (lambda i: i == 1, [1, 0, 0]),
    (lambda i: -i, [-1, -2, 7]),
    (lambda i: i / 0, [0, 0, 0]),
]


@together()
@pytest.mark.parametrize(("formula", "expected"), INTEGERS)
def test_integers_follow_mxnet(formula, expected):
    """A number is truncated to the integer dtype, which stays; division rounds towards zero, and x / 0 gives 0."""
    result = formula(nd.array([1, 2, -7], dtype="int32"))
    assert result.dtype == np.int32
    np.testing.assert_array_equal(result.asnumpy(), expected)


def test_small_integers_wrap():
    """uint8 wraps around as in C, also for numbers out of range."""
    u = nd.array([1, 2, 3], dtype="uint8")
    np.testing.assert_array_equal((u + 300).asnumpy(), [45, 46, 47])
    np.testing.assert_array_equal((u - 5).asnumpy(), [252, 253, 254])
    np.testing.assert_array_equal((-u).asnumpy(), [255, 254, 253])
    assert (nd.array([1, 0], dtype="bool") + 1).dtype == np.int64


def test_numeric_exceptions_are_silent():
    """Division by zero and overflow give inf and nan without a warning (warnings are errors here)."""
    x = nd.array([1, 0, 3e38])
    np.testing.assert_array_equal((x / 0).asnumpy(), [np.inf, np.nan, np.inf])
    np.testing.assert_array_equal((x * 1e10)[2:].asnumpy(), [np.inf])
    x *= 1e30
    assert np.isinf(x.asnumpy()[2])


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int32"])
def test_a_remainder_by_zero_is_zero(dtype):
    """Every form of x % 0 gives 0 as in MXNet 1.9.1; NumPy gives NaN for floats."""
    x, divisor = nd.array([7, -3, 5], dtype=dtype), nd.array([0, 2, 0], dtype=dtype)
    for result in (x % divisor, nd.modulo(x, divisor), nd.broadcast_mod(x, divisor)):
        np.testing.assert_array_equal(result.asnumpy(), [0, 1, 0])
    np.testing.assert_array_equal((x % 0).asnumpy(), [0, 0, 0])
    np.testing.assert_array_equal((5 % divisor).asnumpy(), [0, 1, 0])
    np.testing.assert_array_equal((x % nd.array([[0], [4]], dtype=dtype)).asnumpy(), [[0, 0, 0], [3, 1, 1]])
    divisor %= divisor
    np.testing.assert_array_equal(divisor.asnumpy(), [0, 0, 0])


def test_unary_and_functions():
    """Signs, and functions with a number on either side, give NumPy's results."""
    x = nd.array(A)
    np.testing.assert_array_equal((-x).asnumpy(), -A)
    np.testing.assert_array_equal(abs(x).asnumpy(), abs(A))
    assert +x is x
    np.testing.assert_array_equal(nd.maximum(x, 2).asnumpy(), np.maximum(A, 2))
    np.testing.assert_array_equal(nd.minimum(2, x).asnumpy(), np.minimum(A, 2))
    np.testing.assert_array_equal(nd.subtract(2, x).asnumpy(), 2 - A)
    np.testing.assert_array_equal(nd.lesser(x, nd.array(B)).asnumpy(), A < B)
    assert nd.maximum(2, 3) == 3


def test_logic_of_arrays_and_numbers():
    """logical_and, logical_or and logical_xor give 0 and 1 in the dtype of the arrays, with numbers on either side."""
    x, y = nd.array([[0, 2], [-1, 0]]), nd.array([1, 0])
    np.testing.assert_array_equal(nd.logical_and(x, y).asnumpy(), [[0, 0], [1, 0]])
    np.testing.assert_array_equal(nd.logical_or(x, y).asnumpy(), [[1, 1], [1, 0]])
    np.testing.assert_array_equal(nd.logical_xor(x, y).asnumpy(), [[1, 1], [0, 0]])
    np.testing.assert_array_equal(nd.logical_xor(2, y).asnumpy(), [0, 1])
    whole = nd.logical_and(nd.array([1, 0], dtype="int8"), 3)
    assert whole.dtype == np.int8
    assert whole.asnumpy().tolist() == [1, 0]


def test_functions_of_two_numbers_give_numbers():
    """Functions of two numbers return numbers as in MXNet, comparisons 1 or 0; other types are refused by name."""
    values = nd.add(1, 2), nd.power(2, 3), nd.divide(1, 2), nd.modulo(-5, 3), nd.maximum(2, 3.5), nd.minimum(2, 3.5)
    assert values == (3, 8, 0.5, 1, 3.5, 2)
    truths = nd.equal(1, 1.0), nd.lesser(1, 0), nd.logical_and(1, 2), nd.logical_xor(2, 3), nd.logical_or(0, 3)
    assert list(map(repr, truths)) == ["1", "0", "1", "0", "1"]
    with pytest.raises(DTypeError, match="add: expected NDArrays or numbers, got str and int"):
        nd.add("1", 2)


@pytest.mark.parametrize("dtype", ["float64", "int32", "float16"])
def test_dtypes_must_agree(dtype):
    """Different dtypes raise an error that names both, also in place, and nothing changes."""
    x = nd.ones(3)
    with pytest.raises(DTypeError, match=f"float32 and {dtype} differ.*astype"):
        x + nd.ones(3, dtype=dtype)
    with pytest.raises(DTypeError, match=f"float32 and {dtype}"):
        x += nd.ones(3, dtype=dtype)
    assert x.asnumpy().sum() == 3


def test_shapes_must_broadcast():
    """Shapes that do not broadcast raise an error that names both; in place the left shape must not change."""
    with pytest.raises(ShapeError, match=r"add: shapes \(2, 3\) and \(2,\) do not broadcast"):
        nd.ones((2, 3)) + nd.ones(2)
    x = nd.ones(3)
    with pytest.raises(ShapeError, match=r"\(2, 3\) does not broadcast to \(3,\), which is written in place"):
        x += nd.ones((2, 3))


def test_contexts_must_agree():
    """Arrays on different contexts raise an error that names the required copy."""
    with pytest.raises(DeviceError, match=r"cpu\(0\) and cpu\(1\); copy one with as_in_context\(cpu\(0\)\)"):
        nd.ones(2) + nd.ones(2, mx.cpu(1))


@pytest.mark.parametrize("other", [None, "a", [1, 2], object()])
def test_other_types_are_refused(other):
    """Other types raise a TypeError with the type's name."""
    with pytest.raises(TypeError, match=f"add: type {type(other).__name__} is not supported"):
        nd.ones(2) + other


@pytest.mark.parametrize("values", [np.ones(2, complex), np.array(["a", "b"]), np.array([None, 1])])
def test_numpy_arrays_of_other_things_are_refused(values):
    """NumPy arrays of complex numbers, text or objects are refused."""
    for call in (lambda: nd.ones(2) + values, lambda: values * nd.ones(2)):
        with pytest.raises(DTypeError, match=f"a NumPy array of {values.dtype} is not supported"):
            call()


def test_not_a_number_for_integers():
    """Adding NaN to an integer array raises an error, because NaN has no integer value."""
    with pytest.raises(DTypeError, match="cast the array"):
        nd.ones(2, dtype="int32") + float("nan")


def test_errstate_of_the_thread_is_ignored():
    """A caller with errstate "raise" gets infinity for 1 / 0 on every engine, and keeps its setting."""
    with np.errstate(all="raise"):
        x = nd.array([1.0, -1.0])
        assert (x / 0).asnumpy().tolist() == [np.inf, -np.inf]
        x /= 0
        assert x.asnumpy().tolist() == [np.inf, -np.inf]
        assert np.geterr()["divide"] == "raise"
        with pytest.raises(FloatingPointError):
            np.divide(np.ones(1), 0)


def test_quiet_calls_nest_and_overlap():
    """``quietly`` ignores numeric errors in nested calls and in concurrent calls of several threads.

    Exceptions of the called function are raised.
    """
    barrier = threading.Barrier(4, timeout=60)
    inner = []

    def note(a, b, out):
        inner.append((a, b, out, np.geterr()["divide"]))

    def outer(a, b, out):
        barrier.wait()  # all four are inside a quiet call now
        quietly(note, a, b, out)
        note(a, b, out)

    threads = [threading.Thread(target=quietly, args=(outer, 1, 2, 3)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert inner == [(1, 2, 3, "ignore")] * 8
    with pytest.raises(ZeroDivisionError):
        quietly(lambda a, b, out: a // b, 1, 0, None)


@pytest.mark.parametrize("act", [lambda a, b: a + b, operator.iadd, lambda a, b: b * a])
@pytest.mark.parametrize("power", [53, 1024])
def test_integers_beyond_float_precision(act, power):
    """An integer within a float's range is rounded; a larger one is refused, and the array is unchanged."""
    a = nd.ones((3,), dtype="float64")
    a.wait_to_read()
    if power < 1000:
        assert act(a, 2**power).asnumpy().tolist() == act(np.ones(3), float(2**power)).tolist()
    else:
        with pytest.raises(DTypeError, match="integer of 1025 bits is too large for an array of float64"):
            act(a, 2**power)
        assert a.asnumpy().tolist() == [1, 1, 1]


def test_booleans_do_not_hold_sums():
    """Arithmetic in place on an array of bool is refused, as in MXNet, and the array stays usable."""
    a = nd.array([1, 0], dtype="bool")
    for other in (2, nd.array([1, 1], dtype="bool")):
        with pytest.raises(DTypeError, match="add: arithmetic of bool arrays gives int64"):
            a += other
    assert (a + 2).asnumpy().tolist() == [3, 2]
    assert a.asnumpy().tolist() == [True, False]
