"""Convolutions through cuDNN on stand-ins: values, planned workspace, and the choice of an algorithm."""

import contextlib
import importlib.metadata
import inspect
import sys
import threading

import numpy as np
import pytest

import weftplan as mx
from tests.contract.devices import GPUS, place
from tests.standin_cudnn import cudnn
from tests.standin_cudnn.graph import Graph, recommended
from tests.standin_cupy import machine, meter
from weftplan.errors import DeviceError
from weftplan.kernels.cuda import cudnn_algorithms

SHAPES = {
    "plain": ((2, 4, 9, 8), {"kernel": (3, 3), "pad": (1, 1), "num_filter": 6}),
    "strided": ((2, 4, 9, 8), {"kernel": (3, 2), "stride": (2, 3), "num_filter": 6}),
    "dilated": ((1, 4, 9, 9), {"kernel": (3, 3), "dilate": (2, 2), "pad": (2, 1), "num_filter": 4}),
    "pointwise": ((2, 4, 5, 5), {"kernel": (1, 1), "num_filter": 3}),
    "groups": ((2, 6, 7, 7), {"kernel": (3, 3), "num_group": 3, "num_filter": 9}),
    "depthwise": ((2, 6, 7, 7), {"kernel": (3, 3), "num_group": 6, "num_filter": 6, "no_bias": True}),
    "line": ((2, 4, 11), {"kernel": (3,), "stride": (2,), "pad": (1,), "num_filter": 5}),
    "volume": ((1, 3, 5, 6, 4), {"kernel": (2, 3, 2), "pad": (0, 1, 1), "num_filter": 4}),
}


def network(name, params):
    """Return a symbol that applies the layer ``name`` to its data."""
    return getattr(mx.sym, name)(mx.sym.Variable("data"), name="c", **params)


def results(net, shape, ctx, dtype="float32"):
    """Return the output and gradients of one training step, and the executor.

    After the call, ``meter`` counts the launches of this step.
    """
    rng = np.random.default_rng(3)
    types = dict.fromkeys(net.list_arguments(), dtype)
    executor = net.simple_bind(ctx, grad_req="write", data=shape, type_dict=types)
    for array in executor.arg_dict.values():
        array[:] = mx.nd.array(rng.standard_normal(array.shape).astype(dtype), dtype=dtype)
    head = mx.nd.array(rng.standard_normal(executor.outputs[0].shape).astype(dtype), ctx=ctx, dtype=dtype)
    executor.forward(is_train=True)
    meter.reset()
    executor.forward(is_train=True)
    executor.backward(head)
    actual = [executor.outputs[0].asnumpy(), *(executor.grad_dict[name].asnumpy() for name in net.list_arguments())]
    return actual, executor


def same(found, expected, dtype):
    """Check that two lists of arrays agree within the tolerance of ``dtype``."""
    for mine, theirs in zip(found, expected, strict=True):
        loose = 2e-2 if dtype == "float16" else 2e-5
        np.testing.assert_allclose(mine.astype(float), theirs.astype(float), rtol=loose, atol=loose * 10)


@contextlib.contextmanager
def provided(where, **settings):
    """Provide contexts of GPUs with cuDNN: real GPUs if ``where`` is "gpu", else stand-ins."""
    if where == "gpu":
        pytest.importorskip("cudnn", reason="nvidia-cudnn-frontend is not installed")
    with cudnn() if where == "standin" else contextlib.nullcontext(), place(where, **settings) as context:
        yield context


@pytest.mark.parametrize("where", GPUS)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", ["Convolution", "Deconvolution"])
@pytest.mark.parametrize("case", SHAPES)
def test_values_are_those_of_the_host(case, name, dtype, where):
    """Output and gradients equal the host's.

    cuDNN computes each of the three parts, and CuPy allocates nothing outside the plan.
    """
    shape, params = SHAPES[case]
    if name == "Deconvolution" and params.get("num_group", 1) > 1:
        shape = (shape[0], params["num_filter"], *shape[2:])
    net = network(name, params)
    with provided(where, kind="NaiveEngine") as context:
        expected, _ = results(net, shape, mx.cpu(), dtype)
        actual, executor = results(net, shape, context(0), dtype)
        launched = {kind for kind in meter.launches if kind.startswith("cudnn")}
        assert where == "gpu" or launched == {"cudnn fprop", "cudnn dgrad", "cudnn wgrad"}
        assert mx.device.get(context(0)).temporaries.reserved == 0
        del executor
    same(actual, expected, dtype)


def bound(context, **params):
    """Bind a convolution, run it once, and return all algorithms that cuDNN has chosen."""
    net = network("Convolution", {"kernel": (3, 3), "num_filter": 4, "no_bias": True, **params})
    executor = net.simple_bind(context(0), grad_req="null", data=(2, 4, 8, 8))
    executor.forward(is_train=False)
    executor.outputs[0].wait_to_read()
    assert executor.allocated_bytes == executor.memory_plan.peak
    return [actual for actual in cudnn_algorithms._algorithms.values() if not isinstance(actual, str)]


IMAGE = 2 * 4 * 8 * 8 * 4


@pytest.mark.parametrize(
    ("level", "tf32", "megabytes", "share"),
    [
        ("0", "0", 1024, 2.0),  # the first that is recommended, without TF32 and without atomics
        ("0", "1", 1024, 1.0),  # TF32 is recommended before it
        ("1", "0", 1024, 4.0),  # the fastest
        ("1", "0", 0, 0.0),  # the fastest without scratch
        ("2", "0", 0, 4.0),  # the fastest, whatever it takes
        ("1", "1", 1024, 1.0),
    ],
)
@pytest.mark.shows("MXNET_CUDNN_AUTOTUNE_DEFAULT")
def test_settings_choose_the_algorithm(monkeypatch, level, tf32, megabytes, share):
    """The tuning level, the operator's workspace limit and TF32 decide which algorithm is chosen."""
    monkeypatch.setenv("MXNET_CUDNN_AUTOTUNE_DEFAULT", level)
    monkeypatch.setenv("FLAGS_enable_cublas_tensor_op_math", tf32)
    with cudnn(), place("standin", kind="NaiveEngine") as context:
        (actual,) = bound(context, workspace=megabytes)
        assert actual.workspace == share * IMAGE


@pytest.mark.parametrize(("limit", "share"), [("-1", 4.0), ("0", 0.0), ("1024", 4.0)])
@pytest.mark.shows("FLAGS_conv_workspace_size_limit")
def test_the_flag_limits_scratch_beside_the_operator(monkeypatch, limit, share):
    """The smaller of FLAGS_conv_workspace_size_limit and the operator's limit bounds the chosen algorithm's scratch."""
    monkeypatch.setenv("MXNET_CUDNN_AUTOTUNE_DEFAULT", "1")
    monkeypatch.setenv("FLAGS_conv_workspace_size_limit", limit)
    with cudnn(), place("standin", kind="NaiveEngine") as context:
        (actual,) = bound(context)
        assert actual.workspace == share * IMAGE


@pytest.mark.parametrize(
    ("settings", "tf32"),
    [
        ({"MXNET_CUDA_TENSOR_OP_MATH_ALLOW_CONVERSION": "1"}, True),
        ({"MXNET_CUDA_TENSOR_OP_MATH_ALLOW_CONVERSION": "1", "MXNET_CUDA_ALLOW_TENSOR_CORE": "0"}, False),
        ({"FLAGS_enable_cublas_tensor_op_math": "1", "MXNET_CUDA_ALLOW_TENSOR_CORE": "0"}, False),
        ({"FLAGS_enable_cublas_tensor_op_math": "0", "MXNET_CUDA_TENSOR_OP_MATH_ALLOW_CONVERSION": "1"}, False),
        ({"MXNET_CUDA_ALLOW_TENSOR_CORE": "1"}, False),
    ],
)
@pytest.mark.shows("MXNET_CUDA_TENSOR_OP_MATH_ALLOW_CONVERSION", "MXNET_CUDA_ALLOW_TENSOR_CORE")
def test_mxnets_variables_of_tensor_cores(monkeypatch, settings, tf32):
    """Variables of MXNet allow or forbid TF32 for float32 products and convolutions.

    MXNET_CUDA_TENSOR_OP_MATH_ALLOW_CONVERSION allows it unless Paddle's flag is set; MXNET_CUDA_ALLOW_TENSOR_CORE=0
    always forbids it.
    """
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    with cudnn(), place("standin", kind="NaiveEngine") as context:
        (actual,) = bound(context)
        assert actual.workspace == (1.0 if tf32 else 2.0) * IMAGE
        assert machine.compute_types == ({"float32": "TF32"} if tf32 else {})


@pytest.mark.shows("FLAGS_cudnn_exhaustive_search")
def test_exhaustive_search_and_the_node_itself(monkeypatch):
    """FLAGS_cudnn_exhaustive_search measures the algorithms, unless the node's own ``cudnn_tune`` is off."""
    monkeypatch.setenv("FLAGS_cudnn_exhaustive_search", "1")
    with cudnn(), place("standin", kind="NaiveEngine") as context:
        (searched,) = bound(context)
        assert searched.workspace == 4 * IMAGE
        cudnn_algorithms.forget()
        (told,) = bound(context, cudnn_tune="off")
        assert told.workspace == 2 * IMAGE


def test_a_choice_is_made_once(monkeypatch):
    """A second executor of the same problem reuses the chosen algorithm without trying plans."""
    monkeypatch.setenv("MXNET_CUDNN_AUTOTUNE_DEFAULT", "1")
    with cudnn(), place("standin", kind="NaiveEngine") as context:
        bound(context)
        tried = machine.clock
        bound(context)
        assert machine.clock - tried == next(plan.time for plan in recommended if plan.name == "quick")


def test_convolutions_are_captured(monkeypatch):
    """A step with cuDNN is replayed as CUDA graphs and gives the bits of separate calls."""
    shape, params = SHAPES["plain"]
    net = mx.sym.Activation(network("Convolution", params), act_type="relu")
    results = []
    for setting in ("0", "1"):
        monkeypatch.setenv("MXNET_ENABLE_CUDA_GRAPHS", setting)
        with cudnn(), place("standin") as context:
            executor = net.simple_bind(context(0), grad_req="write", data=shape)
            for name, array in executor.arg_dict.items():
                array[:] = np.sin(np.arange(array.size) + len(name)).reshape(array.shape)
            head = mx.nd.ones(executor.outputs[0].shape, ctx=context(0))
            for _ in range(4):
                executor.forward(is_train=True)
                executor.backward(head)
            results.append({name: array.asnumpy() for name, array in executor.grad_dict.items()})
            states = {state for *_, state in executor.cuda_graphs()}
            del executor
    assert states == {"captured"}
    for name, array in results[0].items():
        np.testing.assert_array_equal(array, results[1][name])


def test_another_setting_later_does_not_change_what_was_planned(monkeypatch):
    """An executor runs its planned algorithms even if the tuning level has changed since."""
    with cudnn(), place("standin", kind="NaiveEngine") as context:
        net = network("Convolution", {"kernel": (3, 3), "num_filter": 4})
        executor = net.simple_bind(context(0), grad_req="write", data=(2, 4, 8, 8))
        monkeypatch.setenv("MXNET_CUDNN_AUTOTUNE_DEFAULT", "2")
        executor.forward(is_train=True)
        executor.backward(mx.nd.ones(executor.outputs[0].shape, ctx=context(0)))
        assert executor.grad_dict["c_weight"].asnumpy().shape == (4, 4, 3, 3)


@pytest.mark.parametrize("why", ["missing", "broken", "float64", "off", "numpy"])
def test_products_where_cudnn_is_not(monkeypatch, why):
    """Without cuDNN, convolutions run through cuBLAS and give the same values.

    cuDNN is missing, not loadable, without the dtype, switched off for the node, or switched off by WEFTPLAN_KERNELS.
    """
    shape, params = SHAPES["plain"]
    dtype = "float64" if why == "float64" else "float32"
    if why == "off":
        params = {**params, "cudnn_off": True}
    if why == "numpy":
        monkeypatch.setenv("WEFTPLAN_KERNELS", "numpy")
    net = network("Convolution", params)
    with cudnn() as module, place("standin", kind="NaiveEngine") as context, monkeypatch.context() as within:
        if why == "missing":
            within.setitem(sys.modules, "cudnn", None)
        if why == "broken":

            def refuse():
                raise RuntimeError("CUDNN_STATUS_SUBLIBRARY_LOADING_FAILED")

            within.setattr(module, "create_handle", refuse)
        expected, _ = results(net, shape, mx.cpu(), dtype)
        actual, executor = results(net, shape, context(0), dtype)
        assert not [kind for kind in meter.launches if kind.startswith("cudnn")]
        del executor
    same(actual, expected, dtype)


@pytest.mark.parametrize("name", ["Convolution", "Deconvolution"])
def test_pointwise_products_take_nothing_beside_the_plan(name):
    """Without cuDNN, pointwise convolutions of several images allocate nothing outside the plan.

    The transposed weight lies in planned scratch; CuPy would allocate a copy of it.
    """
    shape, params = SHAPES["pointwise"]
    net = network(name, {**params, "no_bias": True})
    with place("standin", kind="NaiveEngine") as context:
        expected, _ = results(net, shape, mx.cpu())
        actual, executor = results(net, shape, context(0))
        assert mx.device.get(context(0)).temporaries.reserved == 0
        del executor
    same(actual, expected, "float32")


def test_a_plan_for_cudnn_does_not_run_without_scratch():
    """If even the smallest algorithm needs more scratch than was planned, the error states the planned bytes."""
    with cudnn(), place("standin", kind="NaiveEngine") as context:
        problem = cudnn_algorithms.CudnnProblem(
            "fprop", (1, 1, 4, 4), (1, 1, 3, 3), (1, 1, 2, 2), (1, 1), (1, 1), (0, 0), "float64"
        )
        xp = mx.device.get(context(0)).xp
        with pytest.raises(DeviceError, match="planned for cuDNN with 0 bytes"):
            cudnn_algorithms.run(xp, problem, 0, (None, None, None), None)


@pytest.mark.shows("FLAGS_enable_cublas_tensor_op_math")
def test_products_as_tf32(monkeypatch):
    """FLAGS_enable_cublas_tensor_op_math=1 sets CuPy's float32 compute type to TF32; by default none is set."""
    with place("standin") as context:
        mx.nd.ones((2, 2), ctx=context(0)).wait_to_read()
        assert machine.compute_types == {}
    monkeypatch.setenv("FLAGS_enable_cublas_tensor_op_math", "1")
    with place("standin") as context:
        mx.nd.ones((2, 2), ctx=context(0)).wait_to_read()
        assert machine.compute_types == {"float32": "TF32"}


def test_the_steps_of_a_graph_have_an_order():
    """The stand-in refuses to create execution plans before the graph is lowered."""
    with cudnn() as module, place("standin", kind="NaiveEngine"):
        graph = module.pygraph(handle=module.create_handle())
        with pytest.raises(AssertionError, match="order"):
            graph.create_execution_plans([])


def test_the_stand_in_has_the_real_names():
    """The stand-in's methods take only parameters of the real package, if that is installed."""
    try:
        version = importlib.metadata.version("nvidia-cudnn-frontend")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("nvidia-cudnn-frontend is not installed")
    real = __import__("cudnn")
    for name, method in vars(Graph).items():
        if name.startswith("_") or not callable(method):
            continue
        theirs = inspect.signature(getattr(real.pygraph, name)).parameters
        if "args" in theirs:
            continue  # a method generated from a table
        assert set(inspect.signature(method).parameters) <= set(theirs), (name, version)


@pytest.mark.parametrize("level", ["0", "1"])
def test_nodes_are_planned_on_their_own_gpu(monkeypatch, level):
    """The binding thread chooses each node's algorithm on the node's own GPU.

    This holds for an executor on gpu(2) and for both GPUs of a Module, which use the same algorithm. No worker thread
    chooses or measures.
    """
    monkeypatch.setenv("MXNET_CUDNN_AUTOTUNE_DEFAULT", level)
    asked, choose = [], cudnn_algorithms._choose
    main = threading.current_thread()

    def spied(library, xp, *rest):
        asked.append((xp.cuda.runtime.getDevice(), threading.current_thread() is main))
        return choose(library, xp, *rest)

    monkeypatch.setattr(cudnn_algorithms, "_choose", spied)
    net = network("Convolution", {"kernel": (3, 3), "num_filter": 4})
    net = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(net, num_hidden=3, name="f"), name="softmax")
    with cudnn(), place("standin") as context:
        executor = net.simple_bind(context(2), data=(2, 4, 8, 8))
        planned = list(asked)
        executor.forward(is_train=True)
        executor.backward()
        mx.nd.waitall()
        assert planned == asked
        assert set(asked) == {(2, True)}
        asked.clear()
        contexts = [context(1), context(3)]
        rng = np.random.default_rng(0)
        data = mx.io.NDArrayIter(rng.standard_normal((4, 4, 8, 8)).astype(np.float32), np.zeros(4, np.float32), 4)
        module = mx.mod.Module(net, context=contexts)
        module.fit(data, num_epoch=2)
        assert set(asked) == {(1, True), (3, True)}
        assert (
            len({actual.index for actual in cudnn_algorithms._algorithms.values() if not isinstance(actual, str)}) == 1
        )
        del executor, module
