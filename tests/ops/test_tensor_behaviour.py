"""Behaviour of single tensor operators that the general contract tests do not cover."""

import math

import numpy as np
import pytest

import weftplan as mx
from tests.support.ops_harness import check_hidden, differentiate, gradients, prepare, run
from weftplan.errors import MXNetError, ParameterError, ShapeError, UnknownOperatorError
from weftplan.ops.core import registry, tiling
from weftplan.ops.core.schema import OpContext

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("_plus", "elemwise_add"), ("_Plus", "elemwise_add"), ("_minus", "elemwise_sub"), ("_mul", "elemwise_mul"),
        ("_div", "elemwise_div"), ("_PlusScalar", "_plus_scalar"), ("_RDivScalar", "_rdiv_scalar"),
        ("broadcast_plus", "broadcast_add"), ("broadcast_minus", "broadcast_sub"), ("ElementWiseSum", "add_n"),
        ("identity", "_copy"), ("reshape", "Reshape"), ("flatten", "Flatten"), ("concat", "Concat"),
        ("split", "SliceChannel"), ("swapaxes", "SwapAxis"), ("cast", "Cast"), ("pad", "Pad"), ("flip", "reverse"),
        ("sum_axis", "sum"), ("max_axis", "max"), ("min_axis", "min"), ("uniform", "_random_uniform"),
        ("random_normal", "_random_normal"), ("linalg_gemm2", "_linalg_gemm2"), ("broadcast_axes", "broadcast_axis"),
        ("crop", "slice"),
    ],
)  # fmt: skip
def test_alias(alias, name):
    """Each alias of MXNet names the same operator object."""
    assert registry.get(alias) is registry.get(name)
    assert registry.get(alias).name == name


def test_unknown_operator_suggests():
    """The error for a misspelt operator name suggests similar names."""
    with pytest.raises(UnknownOperatorError, match="'broadcast_add'"):
        registry.get("brodcast_add")


def test_add_makes_no_gradient_node():
    """The gradient of elemwise_add is the incoming gradient itself, for both operands, without a node."""
    call = prepare("elemwise_add", [np.ones(3), np.ones(3)])
    call()
    ograd = np.arange(3.0)
    actual, builder = differentiate(call, [ograd])
    assert actual[0] is ograd
    assert actual[1] is ograd
    assert not builder.calls


@pytest.mark.parametrize(
    ("op", "kept"),
    [
        ("relu", "y"), ("tanh", "y"), ("sigmoid", "y"), ("sqrt", "y"), ("exp", "y"), ("log", "x"), ("square", "x"),
        ("abs", "x"), ("Flatten", ""), ("negative", ""), ("_plus_scalar", ""), ("_mul_scalar", ""), ("sum", ""),
        ("transpose", ""), ("clip", "x"), ("_rpower_scalar", "y"), ("max", "xy"), ("Cast", ""),
    ],
)  # fmt: skip
def test_gradient_keeps_alive(op, kept):
    """The gradient keeps exactly the listed arrays alive: the forward input (x), the output (y), both or neither."""
    params = {"clip": {"a_min": 0, "a_max": 1}, "Cast": {"dtype": "float64"}}.get(op, {})
    call = prepare(op, [np.full((2, 2), 0.5)], params)
    call()
    _, builder = differentiate(call, [np.ones(s.shape, s.dtype) for s in call.out_specs])
    used = [
        x for result in builder.calls for k, x in enumerate(result.inputs) if k not in result.op.ignored(result.params)
    ]
    assert any(x is call.inputs[0] for x in used) == ("x" in kept)
    assert any(x is call.outputs[0] for x in used) == ("y" in kept)


def test_identity_pairs():
    """Reshaping operators and their gradients declare that the output may share the input's memory.

    The pair is marked as an identity: it may be used even while other nodes read the input. Cast's pair is not.
    """
    for name in ("Reshape", "Flatten", "expand_dims", "squeeze", "reshape_like"):
        for op in (registry.get(name), registry.get(f"_backward_{name}")):
            assert [tuple(p) for p in op.inplace_pairs({})] == [(0, 0, True)]
    assert not registry.get("Cast").inplace_pairs({})[0].identity


@pytest.mark.parametrize(("dtype", "ulps"), [("float64", 40), ("float32", 8), ("float16", 1)])
def test_erf_accuracy(dtype, ulps):
    """erf is accurate to ``ulps`` units in the last place from -7 to 7, and odd."""
    x = np.concatenate([np.linspace(-7, 7, 5001), np.geomspace(1e-7, 1, 500)]).astype(dtype)
    (y,) = run("erf", [x])
    exact = np.array([math.erf(float(v)) for v in x])
    assert (
        np.abs((y.astype(np.float64) - exact) / np.spacing(np.abs(exact).astype(dtype)).astype(np.float64)).max()
        <= ulps
    )
    np.testing.assert_array_equal(run("erf", [-x])[0], -y)


def test_large_relu():
    """relu of a large array, which has its own kernel, passes NaN and infinity through and never returns -0."""
    x = np.tile(np.array([NAN, -1, 2, -INF, INF, -0.0], np.float32), 2000)
    (y,) = run("relu", [x])
    np.testing.assert_array_equal(y[:6], np.array([NAN, 0, 2, 0, INF, 0], np.float32))
    np.testing.assert_array_equal(y.reshape(-1, 6), np.broadcast_to(y[:6], (2000, 6)))
    assert not np.signbit(y[np.isfinite(y)]).any()
    assert run("Activation", [x], {"act_type": "relu"})[0].tobytes() == y.tobytes()


def test_where_keeps_nan_apart():
    """where ignores the branch that is not chosen, even NaN or infinity, in values and gradients."""
    condition, x, y = np.array([1, 0, 1, 0]), np.array([1, NAN, NAN, -0.0]), np.array([INF, 2, 3, -0.0])
    (chosen,) = run("where", [condition, x, y])
    np.testing.assert_array_equal(chosen, [1, 2, NAN, -0.0])
    assert np.signbit(chosen[3])
    _, left, right = gradients("where", [condition, x, y], [np.array([NAN, 5, 6, INF])])
    np.testing.assert_array_equal(left, [NAN, 0, 6, 0])
    np.testing.assert_array_equal(right, [0, 5, 0, INF])


def test_max_gradient_goes_to_every_tie():
    """Every element that equals the maximum gets the whole gradient, as in MXNet."""
    assert gradients("max", [np.array([1.0, 3.0, 3.0])], [np.array([2.0])])[0].tolist() == [0, 2, 2]


def test_argmax_takes_the_first():
    """argmax returns the first of equal values, in the data's dtype."""
    (y,) = run("argmax", [np.array([[1, 3, 3], [2, 2, 0]], np.float32)], {"axis": 1})
    assert y.tolist() == [1, 0]
    assert y.dtype == np.float32


@pytest.mark.parametrize("size", [3, 100_000])
def test_norm_of_huge_and_tiny_numbers(size):
    """norm is accurate even if the squares overflow float32 or int32, or underflow, as in MXNet 1.9.1."""
    for scale in (1e-25, 1e25, 3e30):
        x = np.full(size, scale, np.float32)
        np.testing.assert_allclose(run("norm", [x], {})[0], [scale * math.sqrt(size)], rtol=1e-6)
        rows = run("norm", [x.reshape(1, -1).repeat(2, 0)], {"axis": 1})[0]
        np.testing.assert_allclose(rows, [scale * math.sqrt(size)] * 2, rtol=1e-6)
        np.testing.assert_allclose(gradients("norm", [x], [np.ones(1, np.float32)])[0], 1 / math.sqrt(size), rtol=1e-5)
    assert run("norm", [np.full(4, 100, np.int32) * 1000], {})[0].tolist() == [200_000]


def test_half_sums_run_in_single():
    """float16 is summed in float32: sums do not stop growing at 2048, and means do not overflow."""
    x = np.ones((4096, 3), np.float16)
    assert run("sum", [x], {"axis": 0})[0].tolist() == [4096] * 3
    assert run("norm", [x], {"axis": 0, "ord": 1})[0].tolist() == [4096] * 3
    assert run("mean", [np.full(70000, 2.0, np.float16)])[0].tolist() == [2]
    _, right = gradients("broadcast_mul", [x, np.ones((1, 3), np.float16)], [x])
    assert right.tolist() == [[4096] * 3]


def test_broadcast_gradient_summed_in_blocks():
    """The gradient of a large broadcast_mul, which is summed in blocks, equals the exact sum."""
    x = np.arange(300_000, dtype=np.float64).reshape(1000, 300)
    _, small = gradients("broadcast_mul", [x, np.ones((1, 300))], [np.ones_like(x)])
    np.testing.assert_allclose(small[0], x.sum(0), rtol=1e-13)
    _, column = gradients("broadcast_mul", [x, np.ones((1000, 1))], [np.ones_like(x)])
    np.testing.assert_allclose(column[:, 0], x.sum(1), rtol=1e-13)


@pytest.mark.parametrize("wanted", [(1,), (0, 3), (1, 2), (0, 2, 3), (2,)])
def test_concat_gradient_with_unwanted_outputs(wanted):
    """If all output shapes are known, the gradient of Concat computes any subset of its outputs."""
    arrays = [np.zeros((2, k + 1)) for k in range(4)]
    call = prepare("Concat", arrays)
    call()
    g = np.arange(20.0).reshape(2, 10)
    _, builder = differentiate(call, [g])
    actual = builder.calls[0](wanted=[k in wanted for k in range(4)])
    for k, part in enumerate(np.split(g, [1, 3, 6], axis=1)):
        if k in wanted:
            np.testing.assert_array_equal(actual[k], part)
        else:
            assert actual[k] is None


def test_concat_gradient_without_shapes():
    """Without output shapes, the gradient of Concat fills only outputs at either end.

    An output in between raises an error that names ``output_shapes``.
    """
    op = registry.get("_backward_Concat")
    g = np.arange(6.0).reshape(1, 6)
    params = {"num_args": 3, "dim": 1}
    first, last = np.empty((1, 1)), np.empty((1, 3))
    op.forward(OpContext(np), params, [g], [first, None, last])
    assert first.tolist() == [[0]]
    assert last.tolist() == [[3, 4, 5]]
    with pytest.raises(MXNetError, match="output_shapes"):
        op.forward(OpContext(np), params, [g], [None, np.empty((1, 2)), None])


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_random_depends_on_the_key_alone(dtype):
    """The same key draws the same numbers, another key other numbers; mean and deviation are as requested."""
    for op, mean, deviation in (
        ("_random_uniform", 2.0, 4 / math.sqrt(12)),
        ("_random_normal", 2.0, 3.0),
    ):
        params = {"shape": (200, 500), "dtype": dtype}
        params.update({"low": 0, "high": 4} if "uniform" in op else {"loc": 2, "scale": 3})
        one, repeated, second = (run(op, [], params, key=key)[0] for key in ((1, 2), (1, 2), (1, 3)))
        assert one.dtype == dtype
        np.testing.assert_array_equal(one, repeated)
        assert (one != second).mean() > 0.9
        assert one.astype(np.float64).mean() == pytest.approx(mean, abs=0.05)
        assert one.astype(np.float64).std() == pytest.approx(deviation, abs=0.05)
        assert registry.get(op).random


def test_random_refuses_integers():
    """_random_normal refuses an integer dtype."""
    with pytest.raises(ParameterError, match="expected float16, bfloat16, float32, float64 or None"):
        run("_random_normal", [], {"shape": (2,), "dtype": "int32"})


def test_take_raise_mode():
    """take with mode raise refuses an index out of range; the error names the range of the indices."""
    x = np.arange(3.0)
    assert run("take", [x, np.array([2, 0])], {"mode": "raise"})[0].tolist() == [2, 0]
    with pytest.raises(MXNetError, match="from -1 to 3 exceed the 3 rows"):
        run("take", [x, np.array([3, -1])], {"mode": "raise"})


def test_arange_across_blocks():
    """A range longer than two blocks equals NumPy's."""
    (y,) = run("_arange", [], {"start": 0, "stop": 2 * tiling.HOST.block + 5, "dtype": "int32"})
    np.testing.assert_array_equal(y, np.arange(2 * tiling.HOST.block + 5))


@pytest.mark.parametrize("shape", [(1,), (1, 1, 1), (65537,), (3, 1, 5, 1, 2, 1, 2)])
def test_odd_shapes(shape):
    """Operators give NumPy's results for a single element, 65,537 elements, and many axes of size 1."""
    x = np.random.RandomState(0).uniform(0.5, 1.5, shape)
    np.testing.assert_allclose(run("tanh", [x])[0], np.tanh(x), rtol=1e-14)
    np.testing.assert_allclose(gradients("tanh", [x], [np.ones(shape)])[0], 1 - np.tanh(x) ** 2, rtol=1e-12)
    np.testing.assert_allclose(run("sum", [x])[0], [x.sum()], rtol=1e-12)
    np.testing.assert_allclose(run("norm", [x])[0], [np.sqrt((x * x).sum())], rtol=1e-12)
    row = x[..., :1]
    np.testing.assert_allclose(gradients("broadcast_mul", [x, row], [np.ones(shape)])[0], np.broadcast_to(row, shape))


@pytest.mark.parametrize(("shape", "axis"), [((4000,), 0), ((300, 700), 0), ((300, 700), 1), ((5, 400, 30), 1)])
def test_cumsum_of_halves(shape, axis):
    """cumsum adds float16 in float32, and allocates at most 20,000 bytes outside its workspace."""
    x = np.random.RandomState(0).uniform(-1, 1, shape).astype(np.float16)
    call = prepare("cumsum", [x], {"axis": axis})
    np.testing.assert_array_equal(call()[0], np.cumsum(x, axis=axis, dtype=np.float32).astype(np.float16))
    check_hidden(call, 20_000)


@pytest.mark.parametrize(("op", "params"), [("sort", {}), ("argsort", {}), ("topk", {"k": 3, "ret_typ": "both"})])
def test_sorting_allocates_little(op, params):
    """Sorting 2 MB allocates at most 200,000 bytes outside the workspace."""
    call = prepare(op, [np.random.RandomState(0).rand(1000, 500).astype(np.float32)], params)
    check_hidden(call, 200_000)


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize(("dtype", "wanted"), [("float16", "float32"), ("float32", "float64"), ("int32", "float32")])
def test_norm_in_another_dtype(order, dtype, wanted):
    """norm returns ``out_dtype``; its gradient has the dtype of the data."""
    x = np.array([[3, 4, 0], [-60, 80, 0]], dtype)
    params = {"ord": order, "axis": 1, "out_dtype": wanted}
    (y,) = run("norm", [x], params)
    assert y.dtype == wanted
    np.testing.assert_allclose(y, np.linalg.norm(x.astype(float), order, axis=1), rtol=1e-6)
    (actual,) = gradients("norm", [x], [np.full(2, 5, wanted)], params)
    assert actual.dtype == dtype
    if dtype != "int32":
        expected = np.sign(x) * 5 if order == 1 else x / y[:, None] * 5
        np.testing.assert_allclose(actual, expected, rtol=2e-3)


@pytest.mark.parametrize("size", [1, 7, 20000, 300001])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int32"])
def test_allclose_is_numpys(size, dtype):
    """contrib.allclose agrees with numpy.allclose for tolerances, infinities, NaN, and a differing last element."""
    rng = np.random.default_rng(size)
    a = (rng.standard_normal(size) * 100).astype(dtype)
    cases = [(a, a.copy()), (a, (a * 1.5 + 1).astype(dtype))]
    if np.dtype(dtype).kind == "f":
        for old, new in (
            (np.nan, np.nan),
            (np.nan, 1),
            (np.inf, np.inf),
            (np.inf, -np.inf),
            (1, np.inf),
            (1, 1 + 2e-3),
        ):
            b = a.copy()
            c = a.copy()
            c[-1], b[-1] = old, new
            cases.append((c, b))
    for left, right in cases:
        for settings in ({}, {"equal_nan": True}, {"rtol": 0.01, "atol": 0.5}):
            with np.errstate(all="ignore"):
                wide = [x.astype("float64") for x in (left, right)]
                expected = np.allclose(*wide, **settings)
            (x, y) = (mx.nd.array(v, dtype=dtype) for v in (left, right))
            actual = mx.nd.contrib.allclose(x, y, **settings)
            assert (actual.shape, actual.dtype, bool(actual.asscalar())) == ((1,), np.uint8, expected), (
                settings,
                left[-1],
            )


def test_broadcast_like_with_no_axes():
    """broadcast_like refuses empty or unequal lists of axes, as MXNet 1.9.1 does.

    Without lists it broadcasts all axes.
    """
    x, like = mx.nd.ones((1, 3)), mx.nd.ones((2, 3))
    assert mx.nd.broadcast_like(x, like).shape == (2, 3)
    for axes in ({"lhs_axes": (), "rhs_axes": ()}, {"lhs_axes": (0,)}, {"lhs_axes": (0,), "rhs_axes": ()}):
        with pytest.raises(ShapeError, match="equally long and not empty"):
            mx.nd.broadcast_like(x, like, **axes)


def test_indices_out_of_bounds_are_index_errors():
    """gather_nd, and take with mode raise, report the range of bad indices in an IndexError.

    The error is raised by the wait, and is an MXNetError too.
    """
    data = mx.nd.array([[0, 1, 2], [3, 4, 5]])
    with pytest.raises(IndexError, match="indices from 0 to 3 exceed axis 1") as caught:
        mx.nd.gather_nd(data, mx.nd.array([[0, 1, 0], [0, 1, 3]])).wait_to_read()
    assert isinstance(caught.value, MXNetError)
    with pytest.raises(IndexError, match="indices from 0 to 2 exceed the 2 rows"):
        mx.nd.take(data, mx.nd.array([0, 2]), mode="raise").wait_to_read()


def test_users_decide_unknown_dimensions_of_ones():
    """-1 in the shape of ones is an unknown dimension, like 0; its users decide it, even through a transpose."""
    total = mx.sym.ones(shape=(2, -1)) + mx.sym.transpose(mx.sym.ones(shape=(3, -1)))
    assert total.bind(mx.cpu(), {}).forward()[0].shape == (2, 3)
    total = mx.sym.ones(shape=(2, 3)) + mx.sym.transpose(mx.sym.ones(shape=(-1, -1)))
    assert total.infer_shape()[1] == [(2, 3)]


def test_padding_of_axes_that_are_not_there():
    """Pooling accepts zero padding for more axes than its kernel has, as MXNet does, and refuses other padding."""
    x = mx.nd.ones((1, 1, 10))
    same = {"kernel": 2, "stride": 2, "pool_type": "max", "pooling_convention": "same"}
    assert mx.nd.Pooling(x, pad=(0, 0, 0), **same).shape == (1, 1, 5)
    with pytest.raises(ParameterError, match="pad="):
        mx.nd.Pooling(x, pad=(0, 1, 0), **same)
