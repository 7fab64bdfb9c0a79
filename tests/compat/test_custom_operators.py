"""Operators written in Python (mx.operator): on arrays, in graphs, in training, in files, and refusals."""

import numpy as np
import pytest

import weftplan as mx
from weftplan import engine
from weftplan.errors import MXNetError, ParameterError, ShapeError, UnknownOperatorError


class Scaled(mx.operator.CustomOp):
    """An operator y = factor * x * x by mx.nd, which counts its runs in an auxiliary state."""

    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, is_train, req, in_data, out_data, aux):
        """Compute the output, count the run, and store the input."""
        aux[0][:] = aux[0] + 1
        self.kept = in_data[0].asnumpy()
        self.assign(out_data[0], req[0], mx.nd.square(in_data[0]) * self.factor)

    def backward(self, req, out_grad, in_data, out_data, in_grad, aux):
        """Compute the gradient, and check that the input that forward stored is the same."""
        np.testing.assert_array_equal(self.kept, in_data[0].asnumpy())
        self.assign(in_grad[0], req[0], 2 * self.factor * in_data[0] * out_grad[0])


@mx.operator.register("scaled")
class ScaledProp(mx.operator.CustomOpProp):
    """The declaration of ``scaled``."""

    def __init__(self, factor="1"):
        super().__init__()
        self.factor = float(factor)

    def list_auxiliary_states(self):
        """Return the name of the count of runs."""
        return ["runs"]

    def infer_shape(self, in_shape):
        """Return the input's shape for the output, and one element for the count."""
        return in_shape, [in_shape[0]], [[1]]

    def create_operator(self, ctx, shapes, dtypes):
        """Return the operator; dtypes are float32 or float64."""
        assert dtypes[0] in (np.float32, np.float64)
        return Scaled(self.factor)


@mx.operator.register("softmax_numpy")
class SoftmaxProp(mx.operator.CustomOpProp):
    """The declaration of a loss in NumPy, as in MXNet's tutorial.

    Its gradient reads only the label and the output.
    """

    def __init__(self):
        super().__init__(need_top_grad=False)

    def list_arguments(self):
        """Return the names of scores and labels."""
        return ["data", "label"]

    def infer_shape(self, in_shape):
        """Return the shapes: one label for each row of scores."""
        return [in_shape[0], (in_shape[0][0],)], [in_shape[0]]

    def declare_backward_dependency(self, out_grad, in_data, out_data):
        """Return the label and the output, which backward reads."""
        return [in_data[1], out_data[0]]

    def create_operator(self, ctx, shapes, dtypes):
        """Return a new operator for each node."""
        return SoftmaxOp()


class SoftmaxOp(mx.operator.CustomOp):
    """A softmax with cross-entropy in Python."""

    def forward(self, is_train, req, in_data, out_data, aux):
        """Compute the probabilities."""
        scores = in_data[0].asnumpy()
        actual = np.exp(scores - scores.max(axis=1, keepdims=True))
        self.assign(out_data[0], req[0], mx.nd.array(actual / actual.sum(axis=1, keepdims=True)))

    def backward(self, req, out_grad, in_data, out_data, in_grad, aux):
        """Write the difference of probabilities and label; the label's gradient is 0."""
        assert (len(out_grad), len(in_data), len(out_data)) == (0, 1, 1)
        actual = out_data[0].asnumpy()
        actual[np.arange(len(actual)), in_data[0].asnumpy().astype(int)] -= 1
        self.assign(in_grad[0], req[0], actual)
        self.assign(in_grad[1], req[1], 0)


def two_layers(loss):
    """Return a symbol of a fully connected layer and a loss."""
    return loss(mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=3, name="fc"))


def custom_loss(scores):
    """Return the loss in Python on these scores."""
    return mx.sym.Custom(scores, name="softmax", op_type="softmax_numpy")


def trained(net):
    """Return the parameters after two epochs on two contexts."""
    rng = np.random.default_rng(3)
    data = mx.io.NDArrayIter(rng.random((24, 5)), rng.integers(0, 3, 24), batch_size=6)
    module = mx.mod.Module(net, context=[mx.cpu(0), mx.cpu(1)])
    mx.random.seed(5)
    module.fit(data, num_epoch=2, optimizer_params={"learning_rate": 0.3}, initializer=mx.init.Xavier())
    return {name: value.asnumpy() for name, value in module.get_params()[0].items()}


class Careless(mx.operator.CustomOp):
    """An operator whose forward raises ``error``."""

    error: Exception = AssertionError("no luck")

    def forward(self, is_train, req, in_data, out_data, aux):
        raise Careless.error


@mx.operator.register("careless")
class CarelessProp(mx.operator.CustomOpProp):
    """The declaration of ``careless``: one input, one output of its shape."""

    def create_operator(self, ctx, shapes, dtypes):
        return Careless()


class OwnError(Exception):
    """An exception whose constructor takes only a keyword."""

    def __init__(self, *, code):
        super().__init__(f"code {code}")
        self.code = code


ERRORS = {
    "assertion": lambda: AssertionError("no luck"),
    "key": lambda: KeyError("k"),
    "system": lambda: OSError(2, "gone"),
    "own": lambda: OwnError(code=7),
}
"""Functions that create an error.

Tests share no error objects, because a raised error keeps its frames, and so the failed array, alive.
"""


@pytest.mark.parametrize("kind", ERRORS)
def test_errors_of_user_code_are_mxnet_errors(kind, monkeypatch):
    """An error of user code becomes an MXNetError, as in MXNet, and keeps its class, arguments and attributes."""
    error = ERRORS[kind]()
    monkeypatch.setattr(Careless, "error", error)
    with pytest.raises(MXNetError) as caught:
        mx.nd.Custom(mx.nd.ones((2,)), op_type="careless").wait_to_read()
    assert isinstance(caught.value, type(error))
    assert caught.value.args == error.args
    assert getattr(caught.value, "code", None) == getattr(error, "code", None)
    assert any("test_custom_operators.py" in str(frame.path) for frame in caught.traceback)


@pytest.mark.parametrize("kind", ["NaiveEngine", "ThreadedEngine", "ThreadedEnginePerDevice", "Simulator"])
def test_training_with_a_loss_in_python(kind):
    """On every engine, a loss in Python trains to the weights of SoftmaxOutput."""
    with engine.using(engine.create(kind)):
        actual = trained(two_layers(custom_loss))
        expected = trained(two_layers(lambda scores: mx.sym.SoftmaxOutput(scores, name="softmax")))
    for name, value in expected.items():
        np.testing.assert_allclose(actual[name], value, rtol=1e-4, atol=1e-6, err_msg=name)


def test_gradients_states_and_settings():
    """Settings arrive as text, forward changes states, and gradients equal the formula.

    The executor allocates the planned bytes.
    """
    net = mx.sym.Custom(mx.sym.Variable("x"), factor=3, name="scaled", op_type="scaled")
    net = mx.sym.Custom(net, factor=0.5, name="again", op_type="scaled")
    assert net.list_arguments() == ["x"]
    assert net.list_auxiliary_states() == ["scaled_runs", "again_runs"]
    executor = net.simple_bind(mx.cpu(), x=(2, 3))
    x = np.arange(6, dtype="float32").reshape(2, 3)
    for _ in range(2):
        executor.forward(is_train=True, x=x)
        executor.backward(mx.nd.ones((2, 3)))
    np.testing.assert_allclose(executor.outputs[0].asnumpy(), 4.5 * x**4, rtol=1e-5)
    np.testing.assert_allclose(executor.grad_arrays[0].asnumpy(), 18 * x**3, rtol=1e-5)
    assert [a.asscalar() for a in executor.aux_arrays] == [2, 2]
    assert executor.allocated_bytes == executor.memory_plan.peak


def test_arrays():
    """mx.nd.Custom takes inputs by position or name, writes to ``out``, and counts in its state.

    A wrong number of inputs is refused.
    """
    x, runs = mx.nd.array([1.0, 2.0]), mx.nd.zeros((1,))
    assert mx.nd.Custom(x, runs, op_type="scaled", factor=2).asnumpy().tolist() == [2, 8]
    out = mx.nd.zeros((2,))
    mx.nd.Custom(data=x, runs=runs, op_type="scaled", out=out)
    assert out.asnumpy().tolist() == [1, 4]
    assert runs.asscalar() == 2
    with pytest.raises(ParameterError, match="the inputs are data, runs"):
        mx.nd.Custom(x, runs, x, op_type="scaled")
    with pytest.raises(ParameterError, match="expected 2 inputs"):
        mx.nd.Custom(x, op_type="scaled")


def test_files():
    """A symbol with a custom operator is saved as in MXNet.

    Shapes can be inferred after loading only if the operator is registered.
    """
    net = two_layers(custom_loss)
    text = net.tojson()
    assert '"op": "Custom"' in text
    reloaded = mx.sym.load_json(text)
    assert reloaded.tojson() == text
    assert reloaded.infer_shape(data=(4, 5))[0] == net.infer_shape(data=(4, 5))[0]
    unregistered = mx.sym.load_json(text.replace("softmax_numpy", "softmax_nump"))
    with pytest.raises(UnknownOperatorError, match=r"Custom\(op_type=softmax_nump\) \(1 node"):
        unregistered.infer_shape(data=(4, 5))


def test_what_is_refused():
    """A missing op_type, unknown settings and a wrong class are refused.

    The error for a wrong shape names the operator.
    """
    x = mx.sym.Variable("x")
    with pytest.raises(ParameterError, match="needs op_type"):
        mx.sym.Custom(x)
    with pytest.raises(ParameterError, match=r"ScaledProp does not take .*'speed': '2'"):
        mx.sym.Custom(x, op_type="scaled", speed=2)
    with pytest.raises(ParameterError, match="subclasses of CustomOpProp"):
        mx.operator.register("wrong")(Scaled)
    with pytest.raises(ShapeError, match=r"Custom \(softmax_numpy\)"):
        two_layers(custom_loss).simple_bind(mx.cpu(), data=(4, 5), softmax_label=(3,))
    assert {"Custom", "FullyConnected"} <= set(mx.operator.get_all_registered_operators())


def test_an_error_in_python_arrives_at_the_wait():
    """An exception of user code is raised, with its own class, at the wait for the operator's output."""

    class Broken(mx.operator.CustomOp):
        def forward(self, is_train, req, in_data, out_data, aux):
            raise ZeroDivisionError("nobody expects it")

    @mx.operator.register("broken")
    class BrokenProp(mx.operator.CustomOpProp):
        def create_operator(self, ctx, shapes, dtypes):
            return Broken()

    with engine.using(engine.create("ThreadedEngine")):
        result = mx.nd.Custom(mx.nd.ones((2,)), op_type="broken")
        with pytest.raises(ZeroDivisionError, match="nobody expects it"):
            result.wait_to_read()
    assert isinstance(engine.get(), engine.Engine)


def test_backward_wants_training():
    """backward after a forward outside training is refused, because user code may not have stored its state."""
    executor = mx.sym.Custom(mx.sym.Variable("x"), op_type="scaled", name="s").simple_bind(mx.cpu(), x=(2,))
    executor.forward()
    with pytest.raises(MXNetError, match="Custom 's' keeps what its gradient needs in training only"):
        executor.backward(mx.nd.ones((2,)))
