"""foreach, while_loop and cond on arrays, with the values of MXNet 1.9.1."""

import numpy as np
import pytest

import weftplan as mx
from weftplan.errors import DTypeError, ParameterError, ShapeError, UnknownOperatorError

C = mx.nd.contrib
X = np.array([[1, 2], [3, 4], [5, 6]], np.float32)
Z = np.array([0, 10], np.float32)


def as_numbers(value):
    """Return nested lists with each array replaced by (dtype, numbers)."""
    if isinstance(value, mx.nd.NDArray):
        return np.dtype(value.dtype).name, value.asnumpy().tolist()
    return type(value)(as_numbers(one) for one in value) if isinstance(value, list | tuple) else value


def f32(*rows):
    """Return rows of a float32 array in the form of :func:`as_numbers`."""
    return "float32", [list(row) if isinstance(row, list) else row for row in rows]


@pytest.fixture
def x():
    """Return an array of three rows."""
    return mx.nd.array(X)


@pytest.fixture
def z():
    """Return an array of two numbers, as a loop state."""
    return mx.nd.array(Z)


def test_foreach(x, z):
    """foreach visits rows in order and passes states on; outputs and states are nested as the body's."""
    result = C.foreach(lambda d, s: (d + s[0], [s[0] * 2]), x, [z + 1])
    assert as_numbers(result) == (f32([2, 13], [5, 26], [9, 50]), [f32(8, 88)])
    result = C.foreach(lambda d, s: (d + s, s + 1), x, z)
    assert as_numbers(result) == (f32([1, 12], [4, 15], [7, 18]), f32(3, 13))
    result = C.foreach(lambda d, s: ([d[0] + s, d[1]], s + 1), [x, x * 2], z)
    assert as_numbers(result) == ([f32([1, 12], [4, 15], [7, 18]), f32([2, 4], [6, 8], [10, 12])], f32(3, 13))
    result = C.foreach(lambda d, s: ([d, [d * 2, s[1][0]]], [s[0] + d, [s[1][0] + 1]]), x, [z, [z]])
    inner = [f32([2, 4], [6, 8], [10, 12]), f32([0, 10], [1, 11], [2, 12])]
    assert as_numbers(result) == ([f32([1, 2], [3, 4], [5, 6]), inner], [f32(9, 22), [f32(3, 13)]])


def test_foreach_edge_cases(x, z):
    """foreach equals MXNet in edge cases: no states, no outputs, tuples, None as state, unequal row counts."""
    assert as_numbers(C.foreach(lambda d, s: (d, s), x, [])) == (f32([1, 2], [3, 4], [5, 6]), [])
    assert as_numbers(C.foreach(lambda d, s: ([], [s[0] + d]), x, [z])) == ([], [f32(9, 22)])
    outputs, states = C.foreach(lambda d, s: ((d, d), (z,)), x, (z, z))
    assert (type(outputs), type(states), len(outputs)) == (list, tuple, 2)
    assert C.foreach(lambda d, s: (d, None), x, z)[1] is None
    assert as_numbers(C.foreach(lambda d, s: (d[0] + d[1], s), [x[:2], x], z))[0] == f32([2, 4], [6, 8])


def test_foreach_refuses(x, z):
    """foreach refuses calls that MXNet refuses, or that fail there later."""
    for data, states, body, error, words in (
        (3, z, lambda d, s: (d, s), DTypeError, "data must be"),
        (x, 3, lambda d, s: (d, s), DTypeError, "init_states must be"),
        ([x, [x]], z, lambda d, s: (d, s), DTypeError, "flat list"),
        (x, z, lambda d, s: (None, s), DTypeError, "output of step 0"),
        ((x, x[:2]), z, lambda d, s: (d[0], s), ShapeError, "as many as in the first"),
        ([], z, lambda d, s: (z, s), ShapeError, "at least one row"),
        (x, z, lambda d, s: (d if d[0].asscalar() < 2 else [d, d], s), ParameterError, "step 1 gave 2 arrays"),
        (x, z, lambda d, s: (d if d[0].asscalar() < 2 else mx.nd.ones((3,)), s), ShapeError, "output 0 has other"),
    ):
        with pytest.raises(error, match=words):
            C.foreach(body, data, states)


def test_while_loop():
    """while_loop returns outputs of max_iterations rows; rows after the last step are 0."""
    one, two = mx.nd.array([0], dtype="int64"), mx.nd.array([1], dtype="int64")
    condition, step = (lambda i, t: i <= 5), (lambda i, t: ([i + t], [i + 1, t + i]))
    result = C.while_loop(condition, step, (one, two), max_iterations=10)
    rows = [[1], [2], [4], [7], [11], [16], [0], [0], [0], [0]]
    assert as_numbers(result) == ([("int64", rows)], [("int64", [6]), ("int64", [16])])
    result = C.while_loop(condition, step, [one, two], max_iterations=3)
    assert as_numbers(result) == ([("int64", rows[:3])], [("int64", [3]), ("int64", [4])])
    result = C.while_loop(lambda i: True, lambda i: ([i, [i]], i + 1), one, max_iterations=mx.nd.array([2]))
    pair = ("int64", [[0], [1]])
    assert as_numbers(result) == ([pair, [pair]], ("int64", [2]))


def test_while_loop_without_outputs():
    """while_loop without a step, or whose steps return None, returns an empty list of outputs."""
    one = mx.nd.array([0], dtype="int64")
    step = lambda i: (i, i + 1)  # noqa: E731
    assert as_numbers(C.while_loop(lambda i: i < 0, step, one, max_iterations=3)) == ([], ("int64", [0]))
    assert as_numbers(C.while_loop(lambda i: True, step, one, max_iterations=0)) == ([], ("int64", [0]))
    assert as_numbers(C.while_loop(lambda i: i < 3, lambda i: (None, i + 1), one, max_iterations=5)) == (
        [],
        ("int64", [3]),
    )


def test_while_loop_refuses():
    """while_loop makes MXNet's checks, which raise ValueErrors, and refuses outputs other than arrays."""
    one = mx.nd.array([0])
    yes = lambda i: True  # noqa: E731
    for condition, step, start, limit, error, words in (
        (yes, lambda i: (i, i), one, None, ParameterError, "max_iterations should be specified"),
        (yes, lambda i: (i, i), one, "x", ParameterError, "max_iterations: expected int"),
        (yes, lambda i: (i, i), (), 3, ParameterError, "at least one element"),
        (yes, lambda i: (i, [i, i]), one, 3, ParameterError, "func got 1 and gave 2"),
        (yes, lambda i: (i, None), one, 3, ParameterError, "func got 1 and gave 0"),
        (yes, lambda i: ([i] * (int(i.asscalar()) + 1), i + 1), one, 3, ParameterError, "step 1 gave 2 arrays"),
        (yes, lambda i: (mx.nd.ones((int(i.asscalar()) + 1,)), i + 1), one, 3, ShapeError, "output 0 has other shapes"),
        (lambda i: mx.nd.ones((2,)), lambda i: (i, i), one, 3, ShapeError, "not a scalar"),
    ):
        with pytest.raises(error, match=words) as caught:
            C.while_loop(condition, step, start, max_iterations=limit)
        assert isinstance(caught.value, ValueError)
    with pytest.raises(DTypeError, match="output of step 0"):
        C.while_loop(yes, lambda i: (3, i), one, max_iterations=1)


def test_cond(x, z):
    """cond runs one branch; NaN counts as true, and a condition of several elements is refused."""
    assert C.cond(mx.nd.array([1]) < 5, lambda: x, lambda: z) is x
    assert as_numbers(C.cond(mx.nd.array([9]) < 5, lambda: x, lambda: [z])) == [f32(0, 10)]
    assert C.cond(True, lambda: x, lambda: z) is x
    assert C.cond(mx.nd.array([np.nan]), lambda: x, lambda: z) is x
    with pytest.raises(ShapeError, match="not a scalar"):
        C.cond(mx.nd.array([9, 1]), lambda: x, lambda: z)


@pytest.mark.parametrize(("name", "words"), [("foreach", "unroll"), ("while_loop", "unroll"), ("cond", "sym.where")])
def test_symbols_have_no_control_flow(name, words):
    """Control flow of symbols raises an error that names the alternative."""
    with pytest.raises(UnknownOperatorError, match=f"absent on purpose.*{words}.*nd.contrib.{name}"):
        getattr(mx.sym.contrib, name)
    assert not hasattr(mx.sym.contrib, name)
