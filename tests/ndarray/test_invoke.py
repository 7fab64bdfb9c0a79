"""Operator calls on arrays: arguments, inference, errors at the call, out=, aliasing, random operators.

The operators are small and registered in this file, so that each property of a declaration is tested separately.
"""

import numpy as np
import pytest

import weftplan as mx
from tests.support.together import together
from weftplan import nd
from weftplan.errors import DeviceError, DTypeError, ParameterError, ShapeError, UnknownOperatorError
from weftplan.ndarray.array import OPERATOR_METHODS
from weftplan.ops.core import registry
from weftplan.ops.core.params import p_float, p_int
from weftplan.ops.core.rules import same_dtype, same_shape
from weftplan.ops.core.schema import InplacePair, Op, Param, aligned

pytestmark = pytest.mark.usefixtures("each_engine")
CALLS = {}


def _axpy(ctx, params, ins, outs):
    """Compute a * x + y through scratch.

    It writes y to the output first, which is correct in place of y but not in place of x.
    """
    scratch = ctx.take(ins[0].shape, ins[0].dtype)
    outs[0][...] = ins[1]
    np.multiply(ins[0], params["a"], out=scratch)
    outs[0] += scratch


def _counted(ctx, params, ins, outs):
    """Add one to the auxiliary input; output the data, and a copy of the count as the hidden output."""
    ins[1] += 1
    outs[0][...] = ins[0]
    outs[1][...] = ins[1]


def _noise(ctx, params, ins, outs):
    outs[0][...] = ctx.generator().random(outs[0].shape)


@pytest.fixture(autouse=True, scope="module")
def operators():
    """Register the operators of these tests for the whole module."""
    small_operators = [
        Op(
            name="_test_axpy",
            forward=_axpy,
            infer_shape=same_shape,
            infer_dtype=same_dtype,
            params=(Param("a", p_float, 2.0), Param("unused", p_int, 0)),
            inputs=("x", "y"),
            inplace=(InplacePair(1, 0),),
            workspace=lambda params, ins, outs: aligned(ins[0].nbytes),
        ),
        Op(
            name="_test_counted",
            forward=_counted,
            infer_shape=lambda p, i, o: (i, [i[0], i[1]]),
            infer_dtype=same_dtype,
            inputs=("data", "count"),
            aux=(1,),
            outputs=("output", "hidden"),
            visible_outputs=1,
        ),
        Op(name="_test_noise", forward=_noise, infer_shape=same_shape, infer_dtype=same_dtype, random=True),
        Op(
            name="_test_total",
            forward=lambda ctx, params, ins, outs: np.copyto(outs[0], sum(ins)),
            infer_shape=same_shape,
            infer_dtype=same_dtype,
            params=(Param("num_args", p_int),),
            inputs=lambda params: tuple(f"arg{k}" for k in range(params["num_args"])),
            variadic="num_args",
        ),
        Op(
            name="_test_unknowable",
            forward=_noise,
            infer_shape=lambda p, i, o: (i, o),
            infer_dtype=same_dtype,
        ),
    ]
    for op in small_operators:
        registry.register(op)
    yield
    for op in small_operators:
        del registry._OPS[op.name]
        nd.__dict__.pop(op.name, None)


X, Y = np.array([1, 2, 3], np.float32), np.array([10, 20, 30], np.float32)


def test_ways_to_give_arguments():
    """Inputs and then parameters can be given by position or by name, parameters as text or numbers."""
    x, y = nd.array(X), nd.array(Y)
    for result in (
        nd._test_axpy(x, y),
        nd._test_axpy(x, y=y),
        nd._test_axpy(y=y, x=x, a="2"),
        nd._test_axpy(x, y, 2.0),
        nd._test_axpy(x, y, a=2, name="ignored"),
        nd.invoke("_test_axpy", [x, y], {"a": 2})[0],
    ):
        np.testing.assert_array_equal(result.asnumpy(), 2 * X + Y)
    np.testing.assert_array_equal(nd._test_axpy(x, y, 3.0).asnumpy(), 3 * X + Y)


def test_none_as_input_or_parameter():
    """None in place of an optional input is skipped; elsewhere it is a parameter value."""
    x = nd.array([[1, 2], [3, 4]])
    assert nd.sum(x, None, True).asnumpy().tolist() == [[10]]
    assert nd.mean(x, None, True).shape == (1, 1)
    assert nd.softmax(x, None, 0).asnumpy()[0, 0] == pytest.approx(1 / (1 + np.exp(2)))
    assert nd.FullyConnected(x, x, None, 2, True).asnumpy().tolist() == [[5, 11], [11, 25]]
    for call in (lambda: nd.concat(x, None), lambda: nd.sum(None), lambda: nd.broadcast_add(x, None)):
        with pytest.raises((ParameterError, DTypeError), match=r"None|got 0|missing inputs rhs"):
            call()


def test_equal_but_distinct_parameters():
    """The call cache distinguishes 0.0 from -0.0, and (1,) from (1.0,) and (True,)."""
    x = nd.array([1, 2])
    for zero in (0.0, -0.0, np.float32(0), np.float32(-0.0)):
        assert np.signbit(nd._mul_scalar(x, scalar=zero).asnumpy()).all() == np.signbit(zero)
    row = nd.array([[1, 2]])
    assert nd.sum(row, axis=(1,)).asnumpy().tolist() == [3]
    for bad in ((1.0,), (True,)):
        with pytest.raises(ParameterError, match="axis"):
            nd.sum(row, axis=bad)


def test_any_number_of_inputs():
    """``num_args`` is counted from the inputs; a list counts as its elements."""
    arrays = [nd.array(X), nd.array(Y), nd.array(X)]
    np.testing.assert_array_equal(nd._test_total(*arrays).asnumpy(), 2 * X + Y)
    np.testing.assert_array_equal(nd._test_total(arrays).asnumpy(), 2 * X + Y)
    np.testing.assert_array_equal(nd._test_total(arrays[0], num_args=1).asnumpy(), X)


def test_any_number_of_named_inputs():
    """Inputs of an operator that takes any number of them have names, which count them."""
    a, b = nd.array([1, 2]), nd.array([3])
    assert nd.concat(arg1=b, arg0=a, dim=0).tolist() == nd.concat(a, arg1=b, dim=0).tolist() == [1, 2, 3]


def test_out_may_be_an_input():
    """``out`` may be an input, also one that is not a declared in-place pair, or overlap inputs."""
    for target in ("x", "y", "other", "overlap"):
        base = nd.array(np.concatenate([X, Y]))
        x, y = base[:3], base[3:]
        out = {"x": x, "y": y, "other": nd.zeros(3), "overlap": base[1:4]}[target]
        assert nd._test_axpy(x, y, out=out) is out
        np.testing.assert_array_equal(out.asnumpy(), 2 * X + Y)


def test_auxiliary_inputs_are_written():
    """Writes to an auxiliary state are ordered and stored; the hidden output is not returned."""
    data, count = nd.array(X), nd.zeros(3)
    result = nd._test_counted(data, count)
    nd._test_counted(data, count)
    assert isinstance(result, nd.NDArray)
    np.testing.assert_array_equal(count.asnumpy(), [2, 2, 2])


def test_random_operators_get_a_key_per_call():
    """Calls of a random operator differ, and the seed repeats them."""
    mx.random.seed(2)
    a, b = nd._test_noise(nd.ones(4)).asnumpy(), nd._test_noise(nd.ones(4)).asnumpy()
    mx.random.seed(2)
    np.testing.assert_array_equal(nd._test_noise(nd.ones(4)).asnumpy(), a)
    assert (a != b).all()


def test_workspace_is_returned():
    """The workspace is freed after the call."""
    from weftplan import device, storage
    from weftplan.storage import RawResource

    context = mx.cpu(6)
    with storage.using(RawResource(device.get(context))) as resource:
        x = nd.array(X, context)
        y = nd._test_axpy(x, x)
        y.wait_to_read()
        nd.waitall()
        assert resource.statistics().live == 2
        assert resource.statistics().allocations == 3
        del x, y
        nd.waitall()
        nd.waitall()


@pytest.mark.parametrize("context", [mx.cpu(1), mx.sim(84)])
def test_operators_run_on_their_inputs_context(context):
    """Outputs and workspace are on the context of the inputs, simulated devices included."""
    x, y = nd.array(X, context), nd.array(Y, context)
    result = nd._test_axpy(x, y)
    assert result.context == context
    np.testing.assert_array_equal(result.asnumpy(), 2 * X + Y)


@together()
@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda x, y: nd.invoke("_test_axpi", [x, y]), UnknownOperatorError, "did you mean '_test_axpy'"),
        (lambda x, y: nd._test_axpy(x), ParameterError, r"expected 2 inputs \(x, y\), got 1"),
        (lambda x, y: nd._test_axpy(x, z=y), ParameterError, "unknown or repeated input 'z'"),
        (lambda x, y: nd._test_axpy(y=y), ParameterError, "missing inputs x"),
        (lambda x, y: nd._test_axpy(x, y, b=1), ParameterError, "unknown parameter 'b'"),
        (lambda x, y: nd._test_axpy(x, y, a="much"), ParameterError, "parameter a='much'"),
        (
            lambda x, y: nd._test_axpy(x, y, 1, None, "n", 3, 4),
            ParameterError,
            "it takes 6 at most: x, y, a, unused, out",
        ),
        (lambda x, y: nd.invoke("_test_axpy", [x, 3]), DTypeError, "input 1 must be an NDArray, got int"),
        (lambda x, y: nd._test_axpy(x, nd.ones(2)), ShapeError, r"_test_axpy\(x: \(3,\) float32, y: \(2,\) float32\)"),
        (lambda x, y: nd._test_axpy(x, y.astype("int32")), DTypeError, "float32 and int32"),
        (lambda x, y: nd._test_axpy(x, y.as_in_context(mx.cpu(1))), DeviceError, r"on cpu\(0\), cpu\(1\)"),
        (lambda x, y: nd._test_axpy(x, y, out=nd.ones(3, mx.cpu(1))), DeviceError, "out is on"),
        (lambda x, y: nd._test_axpy(x, y, out=nd.ones(4)), ShapeError, "_test_axpy"),
        (lambda x, y: nd._test_axpy(x, y, out=[x, y]), ParameterError, "needs 1 arrays, got 2"),
        (lambda x, y: nd._test_axpy(nd.zeros((0,)), nd.zeros((0,))), ShapeError, "do not take empty arrays"),
        (lambda x, y: nd._test_unknowable(x), ShapeError, "output output cannot be told"),
        (lambda x, y: nd.no_such_operator, AttributeError, "no attribute or operator 'no_such_operator'"),
        (lambda x, y: nd.FullyConected, AttributeError, r"operator 'FullyConected'; did you mean 'FullyConnected'\?$"),
        (lambda x, y: nd.zeroes, AttributeError, r"operator 'zeroes'; did you mean 'zeros'\?$"),
        (lambda x, y: nd.sparse.dot, AttributeError, "mx.nd.sparse.dot is absent on purpose: every array is dense"),
        (lambda x, y: x.no_such_method, AttributeError, "no attribute 'no_such_method'"),
    ],
)
def test_errors_are_raised_at_the_call(call, error, says):
    """Wrong calls raise before anything is pushed, on every engine, and the inputs keep their values."""
    x, y = nd.array(X), nd.array(Y)
    with pytest.raises(error, match=says):
        call(x, y)
    np.testing.assert_array_equal(x.asnumpy(), X)
    np.testing.assert_array_equal(y.asnumpy(), Y)


def test_methods_call_operators():
    """Methods such as x.sum(axis=1), x.T and x.exp() give NumPy's results."""
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    x = nd.array(values)
    np.testing.assert_array_equal(x.sum(axis=1).asnumpy(), values.sum(1))
    np.testing.assert_array_equal(x.T.asnumpy(), values.T)
    np.testing.assert_allclose(x.exp().log().asnumpy(), values, atol=1e-6)
    np.testing.assert_array_equal((x @ x.T).asnumpy(), values @ values.T)
    np.testing.assert_array_equal(x.expand_dims(0).asnumpy(), values[None])


def test_context_of_operators_without_inputs():
    """The context of an operator without inputs is ``ctx``, else that of ``out``, else the current context.

    ``ctx`` may be a context, text, or a positional argument.
    """
    one = mx.cpu(1)
    for result in (
        nd._zeros(shape=(2,), ctx=one),
        nd._zeros(shape=(2,), ctx="cpu(1)"),
        nd.random_uniform(0, 1, (2,), one),
        nd.random_normal(shape=(2,), out=nd.ones(2, one)),
        nd._arange(0, 3, ctx=one),
    ):
        assert result.context == one
        result.wait_to_read()
    with one:
        assert nd._ones(shape=2).context == one
    assert nd._ones(shape=2, ctx="").context == mx.cpu(0)
    for bad, says in (
        ("cpu(x)", "ctx must be a context"),
        (3, "ctx must be a context"),
        ("moon", "unknown device type"),
    ):
        with pytest.raises(DeviceError, match=says):
            nd._zeros(shape=(2,), ctx=bad)


def test_non_arrays_are_named():
    """An input or out that is not an NDArray raises an error that names it."""
    x = nd.array(X)
    for call, says in (
        (lambda: nd.take(x, [0, 1]), "take: input indices must be an NDArray, got list"),
        (lambda: nd.where(x, x, 0), "where: input y must be an NDArray, got int"),
        (lambda: nd.sum(X), "sum: input data must be an NDArray, got ndarray"),
        (lambda: nd.exp(x, out=X), "exp: out must be an NDArray or a list of them, got ndarray"),
        (lambda: nd.exp(x, out=[3]), "exp: out must be an NDArray"),
    ):
        with pytest.raises(DTypeError, match=says):
            call()
    with pytest.raises(ParameterError, match="depth=-1: expected at least 1"):
        nd.one_hot(x, depth=-1)


def test_every_method_has_its_operator():
    """Every operator method of NDArray has an operator."""
    assert sorted(name for name in OPERATOR_METHODS if not registry.contains(name)) == []
    assert set(dir(nd.NDArray)) >= OPERATOR_METHODS
    assert nd.NDArray.sum(nd.array([1, 2])).asscalar() == 3


def test_namespaces():
    """nd.linalg, nd.op, nd.contrib and nd._internal have the operators with these names in MXNet."""
    x = nd.array([[1, 2], [3, 4]])
    assert nd.linalg.gemm2(x, x).asnumpy().tolist() == [[7, 10], [15, 22]]
    assert nd._internal._plus_scalar(x, scalar=1.0).asnumpy().tolist() == [[2, 3], [4, 5]]
    assert nd.op.sum(x).asscalar() == 10
    assert {"gemm2"} <= set(dir(nd.linalg))
    assert {"linalg", "op", "contrib"} <= set(dir(nd))
    with pytest.raises(AttributeError, match=r"mx.nd.linalg has no operator 'gem2'; did you mean 'gemm2'\?$"):
        nd.linalg.gem2(x, x)


def test_split_v2():
    """split_v2 splits into equal sections, or between indices, as a function and as a method."""
    values = np.arange(8, dtype=np.float32).reshape(2, 4)
    x = nd.array(values)
    for pieces in (nd.split_v2(x, (1, 3), axis=1), x.split_v2([1, 3], 1)):
        assert [piece.asnumpy().tolist() for piece in pieces] == [p.tolist() for p in np.split(values, (1, 3), 1)]
    assert [piece.shape for piece in nd.split_v2(x, 2, squeeze_axis=True)] == [(4,), (4,)]
    assert x.split_v2(1).shape == (2, 4)
    assert x.split_v2((), axis=1).shape == (2, 4)
    for bad in (3, (2, 2), (3, 1), (9,)):
        with pytest.raises(ShapeError, match="_split_v2"):
            x.split_v2(bad, axis=1)
    with pytest.raises(ParameterError, match="got float"):
        nd.split_v2(x, 2.5)


def test_infinities_are_results_not_warnings():
    """Overflow, log(0) and 1/0 give IEEE 754 results silently, in operators and in arithmetic."""
    assert mx.nd.sigmoid(mx.nd.array([-1000.0, 1000.0])).asnumpy().tolist() == [0, 1]
    assert mx.nd.log(mx.nd.array([0.0])).asscalar() == -np.inf
    assert np.isnan(mx.nd.log(mx.nd.array([-1.0])).asscalar())
    assert (mx.nd.array([1e38]) * 10).asscalar() == np.inf
    assert (mx.nd.array([1.0]) / 0).asscalar() == np.inf


def test_legacy_row_element_functions():
    """choose_element_0index reads one element of each row, and fill_element_0index replaces it.

    onehot_encode writes 1 to one element of each row.
    """
    rows, index = mx.nd.array(np.arange(12).reshape(3, 4)), mx.nd.array([5, -1, 3])
    assert mx.nd.choose_element_0index(rows, index).asnumpy().tolist() == [3, 4, 11]
    filled = mx.nd.fill_element_0index(rows, mx.nd.array([100, 200, 300]), index).asnumpy()
    assert filled.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 300]]
    out = mx.nd.ones((3, 4), dtype="float64")
    assert mx.nd.onehot_encode(mx.nd.array([0, 2, 3]), out) is out
    assert out.asnumpy().tolist() == [[1, 0, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]


def test_isnan_isinf_isfinite():
    """isnan, isinf and isfinite return 1 or 0 in the dtype of the input."""
    x = mx.nd.array([1.0, np.nan, -np.inf])
    assert mx.nd.contrib.isnan(x).asnumpy().tolist() == [0, 1, 0]
    assert mx.nd.contrib.isinf(x).asnumpy().tolist() == [0, 0, 1]
    assert mx.nd.contrib.isfinite(x).asnumpy().tolist() == [1, 0, 0]


@pytest.mark.parametrize("dtype", ["int32", "uint8", "int64"])
def test_ranges_of_integers(dtype):
    """Start and step of an integer arange are truncated; the length follows from the original numbers."""
    assert mx.nd.arange(1.3, 6.6, 1.3, dtype=dtype).asnumpy().tolist() == [1, 2, 3, 4, 5]
    assert mx.nd.arange(1.3, 6.6, 1.3, repeat=2, dtype=dtype).asnumpy().tolist() == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert mx.nd.arange(9, 1, -2.5, dtype=dtype).asnumpy().tolist() == [9, 7, 5, 3]
    assert mx.nd.arange(3, dtype=dtype).asnumpy().tolist() == [0, 1, 2]


def test_khatri_rao():
    """Each column of khatri_rao is the Kronecker product of the matrices' columns."""
    matrices = [np.random.RandomState(k).uniform(-1, 1, (k + 2, 3)).astype("f4") for k in range(3)]
    product = mx.nd.khatri_rao(*map(mx.nd.array, matrices)).asnumpy()
    for column in range(3):
        expected = np.kron(np.kron(matrices[0][:, column], matrices[1][:, column]), matrices[2][:, column])
        np.testing.assert_allclose(product[:, column], expected, rtol=1e-5)
    with pytest.raises(ShapeError, match="expected equal sizes, got 3 and 2"):
        mx.nd.khatri_rao(mx.nd.ones((2, 3)), mx.nd.ones((2, 2)))
