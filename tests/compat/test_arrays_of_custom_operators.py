"""Arrays of custom operators: those that user code takes from outside, keeps between calls, and lets out."""

import itertools
import threading

import numpy as np
import pytest

import weftplan as mx
from weftplan import engine
from weftplan.errors import MXNetError

ENGINES = {
    "one worker": {"cpu_workers": 1},
    "three workers": {"cpu_workers": 3},
    "ThreadedEngine": {"kind": "ThreadedEngine", "cpu_workers": 1},
    "NaiveEngine": {"kind": "NaiveEngine"},
    "Simulator": {"kind": "Simulator"},
}


NUMBERS = itertools.count()


@pytest.fixture(params=ENGINES)
def driver(request):
    """Make each engine the process-wide one."""
    with engine.using(engine.create(**ENGINES[request.param])) as current:
        yield current
    current.stop()


def custom(forward, backward=None):
    """Return a function that makes the node of an operator with these methods."""

    class Computing(mx.operator.CustomOp):
        pass

    Computing.forward = forward
    if backward is not None:
        Computing.backward = backward

    class Property(mx.operator.CustomOpProp):
        def create_operator(self, ctx, in_shapes, in_dtypes):
            return Computing()

    kind = f"of_arrays_{next(NUMBERS)}"
    mx.operator.register(kind)(Property)
    return lambda *inputs: mx.sym.Custom(*inputs, op_type=kind)


def run(node, x, head=None):
    """Return output and gradient of a node of one input."""
    executor = node(mx.sym.var("x")).simple_bind(mx.cpu(), x=x.shape)
    executor.arg_dict["x"][:] = x
    out = executor.forward(is_train=True)[0].asnumpy()
    if head is None:
        return out
    executor.backward([mx.nd.array(head)])
    return out, executor.grad_dict["x"].asnumpy()


X = np.arange(6, dtype=np.float32).reshape(2, 3)


def test_a_constant_made_outside(driver):
    """User code reads an array of the main thread, with an operation on it still pending."""
    constant = mx.nd.ones((2, 3)) * 2

    def forward(self, is_train, req, in_data, out_data, aux):
        self.assign(out_data[0], req[0], in_data[0] * constant)

    for _ in range(5):
        constant += 1
        np.testing.assert_array_equal(run(custom(forward), X), X * constant.asnumpy())


def test_arrays_kept_from_forward_to_backward(driver):
    """A mask and an input that forward stores are read by backward."""

    def forward(self, is_train, req, in_data, out_data, aux):
        self.mask, self.kept = in_data[0] > 2, in_data[0]
        self.assign(out_data[0], req[0], self.mask * in_data[0])

    def backward(self, req, out_grad, in_data, out_data, in_grad, aux):
        self.assign(in_grad[0], req[0], self.mask * out_grad[0] + self.kept)

    for _ in range(3):
        out, grad = run(custom(forward, backward), X, X + 1)
        np.testing.assert_array_equal(out, X * (X > 2))
        np.testing.assert_array_equal(grad, (X > 2) * (X + 1) + X)


def test_arrays_that_leave(driver):
    """Arrays that user code makes, and inputs that it stores, are used by the main thread, also as targets."""
    left = []

    def forward(self, is_train, req, in_data, out_data, aux):
        left[:] = [in_data[0] * 3, in_data[0].copy()]
        out_data[0][:] = in_data[0]

    run(custom(forward), X)
    left[1][:] = left[0] + 1
    np.testing.assert_array_equal((left[1] + mx.nd.ones((2, 3))).asnumpy(), X * 3 + 2)


def test_reads_that_user_code_leaves_pending(driver):
    """The memory of inputs is not used again before the operations that user code pushed have read it."""
    left = []

    def forward(self, is_train, req, in_data, out_data, aux):
        left.append(mx.nd.broadcast_add(in_data[0], in_data[0]))
        out_data[0][:] = in_data[0]

    net = mx.sym.var("x")
    for _ in range(6):
        net = custom(forward)(net * 2) + 1
    executor = net.simple_bind(mx.cpu(), grad_req="null", x=(64, 64))
    executor.arg_dict["x"][:] = value = 1
    executor.forward()
    executor.outputs[0].wait_to_read()
    for array in left:
        np.testing.assert_array_equal(array.asnumpy(), np.full((64, 64), value * 4))
        value = value * 2 + 1


@pytest.mark.parametrize("made", ["inside", "outside"])
def test_an_executor_and_a_module_run_inside(driver, made):
    """User code runs an executor, and a module trains and predicts, bound outside or inside."""
    net = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=3, no_bias=True, name="fc")

    def make():
        module = mx.mod.Module(mx.sym.MakeLoss(net), label_names=None, context=mx.cpu())
        module.bind([("data", (2, 3))])
        module.init_params(mx.init.One())
        module.init_optimizer(optimizer_params={"learning_rate": 0.0})
        return module, net.bind(mx.cpu(), {"data": mx.nd.ones((2, 3)), "fc_weight": mx.nd.ones((3, 3))})

    outer = make() if made == "outside" else None

    def forward(self, is_train, req, in_data, out_data, aux):
        module, executor = outer or make()
        module.forward_backward(mx.io.DataBatch([in_data[0]]))
        module.update()
        result = module.get_outputs()[0].asnumpy() + executor.forward(data=in_data[0])[0].asnumpy()
        self.assign(out_data[0], req[0], result)

    np.testing.assert_array_equal(run(custom(forward), X), 2 * X.sum(1, keepdims=True) * np.ones((1, 3)))


def test_custom_operators_inside_each_other():
    """With one worker, user code may wait for user code that waits; afterwards one worker runs at a time again."""
    with engine.using(engine.create(cpu_workers=1)) as current:

        def inner(self, is_train, req, in_data, out_data, aux):
            self.assign(out_data[0], req[0], (in_data[0] + 1).asnumpy())

        inside = custom(inner)

        def forward(self, is_train, req, in_data, out_data, aux):
            self.assign(out_data[0], req[0], run(inside, in_data[0].asnumpy()) + run(inside, in_data[0].asnumpy()))

        for _ in range(4):
            np.testing.assert_array_equal(run(custom(forward), X), 2 * X + 2)
        most, now, lock = [0], [0], threading.Lock()

        def count(step):
            with lock:
                now[0] += step
                most[0] = max(most[0], now[0])

        def work():
            count(1)
            threading.Event().wait(0.002)
            count(-1)

        for _ in range(20):
            current.push(work, (), (current.new_variable(),))
        current.wait_for_all()
        assert most[0] == 1
    current.stop()


@pytest.mark.parametrize("where", ["forward", "backward", "an operation that it pushes"])
def test_fit_raises_an_error_of_a_custom_layer(driver, where):
    """An error of user code in any batch is raised by ``fit``, in the last batch, too."""
    calls = []

    def forward(self, is_train, req, in_data, out_data, aux):
        calls.append("forward")
        if where == "forward" and len(calls) == 3:
            raise ValueError("no luck")
        self.assign(out_data[0], req[0], in_data[0])

    def backward(self, req, out_grad, in_data, out_data, in_grad, aux):
        if where != "forward" and len(calls) == 3:
            if where == "backward":
                raise ValueError("no luck")
            in_grad[0][:] = mx.nd.Custom(out_grad[0], op_type="of_errors")
            return
        self.assign(in_grad[0], req[0], out_grad[0])

    class Failing(mx.operator.CustomOp):
        def forward(self, is_train, req, in_data, out_data, aux):
            raise ValueError("no luck")

    class Property(mx.operator.CustomOpProp):
        def create_operator(self, ctx, in_shapes, in_dtypes):
            return Failing()

    mx.operator.register("of_errors")(Property)
    net = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=3, name="first")
    net = mx.sym.FullyConnected(custom(forward, backward)(net), num_hidden=3, name="second")
    module = mx.mod.Module(mx.sym.SoftmaxOutput(net, name="softmax"), context=mx.cpu())
    with pytest.raises(MXNetError, match="no luck"):
        module.fit(mx.io.NDArrayIter(np.ones((6, 4)), np.zeros(6), 2), num_epoch=1)
    assert len(calls) == 3


def test_each_executor_has_operators_of_its_own():
    """What an operator object stores is the executor's, as in MXNet: not that of another executor of the symbol."""

    def forward(self, is_train, req, in_data, out_data, aux):
        self.calls = getattr(self, "calls", 0) + 1
        self.assign(out_data[0], req[0], in_data[0] * self.calls)

    def backward(self, req, out_grad, in_data, out_data, in_grad, aux):
        self.assign(in_grad[0], req[0], out_grad[0] * self.calls)

    node = custom(forward, backward)
    net = node(node(mx.sym.var("x")))
    executors = [net.simple_bind(mx.cpu(), x=(2,)) for _ in range(2)]
    for expected in ([1, 1], [4, 4], [9, 9]):
        for executor in executors:
            executor.arg_dict["x"][:] = 1
            assert executor.forward(is_train=True)[0].tolist() == expected
            executor.backward([mx.nd.ones((2,))])
            assert executor.grad_dict["x"].tolist() == expected
