"""Layers fused with their relu or batch norm: which layers are fused, and that results do not change."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import weftplan as mx
from weftplan.ops.core import registry
from weftplan.ops.core.schema import OpContext, TensorSpec
from weftplan.ops.fusion import relu as joined
from weftplan.planner import PlanOptions, plan_symbol


def operators(net: Any, grad_req: str = "null", **options: Any) -> list[str]:
    """Return the names of the operators of a planned graph."""
    planned = plan_symbol(net, {"x": (2, 3, 6, 6)}, grad_req=grad_req, options=PlanOptions(**options))
    return [node.op.name for node in planned.graph.nodes if node.op is not None]


def layers(relu: Any) -> Any:
    """Return convolution, batch norm, relu, convolution and relu; ``relu(data, name)`` builds a relu."""
    net = mx.sym.Convolution(mx.sym.Variable("x"), kernel=(3, 3), num_filter=4, name="c1")
    net = relu(mx.sym.BatchNorm(net, name="b1", fix_gamma=False), "r1")
    return relu(mx.sym.Convolution(net, kernel=(3, 3), num_filter=5, pad=(1, 1), name="c2"), "r2")


def activation(data: Any, name: str) -> Any:
    """Return a relu, by the operator Activation."""
    return mx.sym.Activation(data, act_type="relu", name=name)


def test_inference_joins_every_layer_with_its_relu():
    """In inference five nodes are fused into two, which have the names of the relus."""
    for relu in (activation, lambda data, name: mx.sym.relu(data, name=name)):
        net = layers(relu)
        assert operators(net) == ["Convolution+BatchNorm+relu", "Convolution+relu"]
        assert len(operators(net, fusion=False)) == 5
        planned = plan_symbol(net, {"x": (2, 3, 6, 6)})
        assert {"r1", "r2"} < {node.name for node in planned.graph.nodes}
        assert any("joined 3 pairs" in note for note in planned.memory.notes)


def test_training_joins_batch_norm_in_both_directions():
    """In training a batch norm is fused with its relu, forward and backward, but a convolution is not.

    The gradient of the convolution's relu needs the relu's node.
    """
    actual = operators(layers(activation), "write")
    assert actual.count("BatchNorm+relu") == actual.count("_backward_BatchNorm+relu") == 1
    assert actual.count("Activation") == actual.count("_backward_Activation") == 1


def residual(blocks: int) -> Any:
    """Return residual blocks; some show the means of their batch norms, and some end with a relu."""
    net = mx.sym.Variable("x")
    for k in range(blocks):
        norm = mx.sym.BatchNorm(net, name=f"b{k}", fix_gamma=False, output_mean_var=k % 3 == 1)
        right = activation(norm[0], f"r{k}")
        right = mx.sym.Convolution(right, kernel=(3, 3), pad=(1, 1), num_filter=3, name=f"c{k}")
        left = mx.sym.broadcast_add(net, mx.sym.reshape(norm[1], shape=(1, 3, 1, 1))) if k % 3 == 1 else net
        net = mx.sym.relu(left + right) if k % 2 else right + left
    return net


def normalized(**more: Any) -> Any:
    """Return a convolution, and a batch norm with parameters ``more``."""
    net = mx.sym.Convolution(mx.sym.Variable("x"), kernel=(3, 3), num_filter=4, name="c")
    return mx.sym.BatchNorm(net, name="b", **more)


def test_batch_norm_without_gradient_joins_the_convolution_before_it():
    """In inference a batch norm is fused with its convolution, with and without a relu.

    It stays unfused if it normalizes another axis, or if another node reads the convolution.
    """
    assert operators(normalized()) == ["Convolution+BatchNorm"]
    assert operators(activation(normalized(), "r")) == ["Convolution+BatchNorm+relu"]
    assert operators(activation(normalized(), "r"), "write")[:2] == ["Convolution", "BatchNorm+relu"]
    assert operators(normalized(axis=2)) == ["Convolution", "BatchNorm"]
    assert operators(normalized(output_mean_var=True)) == ["Convolution", "BatchNorm"]
    net = normalized()
    both = mx.sym.Group([net, net.get_internals()["c_output"]])
    assert operators(both) == ["Convolution", "BatchNorm"]
    pooled = mx.sym.BatchNorm(mx.sym.Pooling(mx.sym.Variable("x"), kernel=(2, 2), pool_type="max"))
    assert operators(pooled) == ["Pooling", "BatchNorm"]
    planned = plan_symbol(activation(normalized(), "r"), {"x": (2, 3, 6, 6)})
    apart = plan_symbol(activation(normalized(), "r"), {"x": (2, 3, 6, 6)}, options=PlanOptions(fusion=False))
    assert planned.memory.peak <= apart.memory.peak + 2 * 64  # room for a scale and a shift of each channel


LAYERS = {
    "dense": ({"kernel": (3, 3), "num_filter": 20, "stride": (2, 2), "pad": (1, 1)}, 5),
    "two groups": ({"kernel": (3, 3), "num_filter": 6, "num_group": 2, "no_bias": True}, 4),
    "pointwise": ({"kernel": (1, 1), "num_filter": 19, "no_bias": True}, 7),
    "depthwise": ({"kernel": (3, 3), "num_filter": 6, "num_group": 6, "pad": (1, 1)}, 6),
    "depthwise 5x5": ({"kernel": (5, 5), "num_filter": 6, "num_group": 6, "stride": (2, 2), "no_bias": True}, 6),
    "winograd": ({"kernel": (3, 3), "num_filter": 33, "pad": (1, 1), "no_bias": True}, 40),
    "winograd with bias": ({"kernel": (3, 3), "num_filter": 32, "pad": (1, 1)}, 32),
    "NumPy's": ({"kernel": (2, 5), "num_filter": 30, "num_group": 6, "dilate": (2, 2), "pad": (0, 2)}, 6),
    "to one pixel": ({"kernel": (12, 13), "num_filter": 5}, 4),
}


@pytest.mark.parametrize("kernels", ["numpy", "native", "auto"])
@pytest.mark.parametrize("norm", [{"fix_gamma": False}, {"fix_gamma": True, "use_global_stats": True}])
@pytest.mark.parametrize("layer", LAYERS)
def test_same_bits_with_batch_norm_in_a_convolution(layer: str, norm: dict[str, Any], kernels: str):
    """A convolution fused with batch norm has the bits of the unfused nodes, with every kernel, also in training."""
    how, channels = LAYERS[layer]
    for relu in (False, True):
        net = mx.sym.BatchNorm(mx.sym.Convolution(mx.sym.Variable("x"), name="c", **how), name="b", eps=1e-4, **norm)
        net = activation(net, "r") if relu else net
        for dtype in ("float32", "float64", "float16"):
            results = []
            for fusion in (True, False):
                executor = net.simple_bind(
                    mx.cpu(), grad_req="null", x=(2, channels, 12, 13), type_dict={"x": dtype},
                    options=PlanOptions(fusion=fusion, kernels=kernels),
                )  # fmt: skip
                assert ("Convolution+BatchNorm" in executor.debug_str()) == fusion
                assert executor.allocated_bytes == executor.memory_plan.peak
                rng = np.random.default_rng(2)
                for array in (*executor.arg_arrays, *executor.aux_arrays):
                    array[:] = rng.uniform(-1, 1, array.shape)
                executor.aux_dict["b_moving_var"][:] = rng.uniform(0.5, 2, executor.aux_dict["b_moving_var"].shape)
                collected = []
                for is_train in (False, True, False):
                    collected.append(executor.forward(is_train=is_train)[0].asnumpy().tobytes())
                results.append([*collected, *(array.asnumpy().tobytes() for array in executor.aux_arrays)])
            assert results[0] == results[1], dtype


@pytest.mark.parametrize("compat", ["mxnet", "paddle", "paddle_pir"])
def test_plans_for_other_frameworks_fuse_nothing(compat: str):
    """With ``compat`` a plan fuses nothing, because it is the plan of MXNet or Paddle."""
    assert "BatchNorm+relu" not in operators(layers(activation), compat=compat)


def relu_and_reader(net: Any) -> Any:
    """Return a relu of ``net``, and another reader of ``net``."""
    return mx.sym.Group([activation(net, "r"), net + 1])


def relu_and_output(net: Any) -> Any:
    """Return a relu of ``net``, and ``net`` as another output."""
    return mx.sym.Group([activation(net, "r"), net])


def tanh_of(net: Any) -> Any:
    """Return ``net`` with another activation than relu."""
    return mx.sym.Activation(net, act_type="tanh", name="r")


def relu_in_a_group(net: Any) -> Any:
    """Return a relu of ``net`` that may be on another device."""
    with mx.AttrScope(ctx_group="elsewhere"):
        return activation(net, "r")


def repeated_relu(net: Any) -> Any:
    """Return a relu of ``net`` with forced recomputation."""
    with mx.AttrScope(__force_mirroring__="1"):
        return activation(net, "r")


@pytest.mark.parametrize("extend", [relu_and_reader, relu_and_output, tanh_of, relu_in_a_group, repeated_relu])
def test_nodes_that_stay_apart(extend: Any):
    """Layer and relu stay unfused if the layer's result is read or returned, or if their attributes differ."""
    for layer in (mx.sym.BatchNorm(mx.sym.Variable("x"), name="l"),
                  mx.sym.Convolution(mx.sym.Variable("x"), kernel=(1, 1), num_filter=3, name="l")):  # fmt: skip
        assert not [name for name in operators(extend(layer)) if name.endswith("+relu")]


@pytest.mark.parametrize("kernels", ["numpy", "native"])
@pytest.mark.parametrize("grad_req", ["write", "add", "null"])
@pytest.mark.shows("MXNET_USE_FUSION")
def test_same_bits_with_fusion_and_without(kernels: str, grad_req: str, monkeypatch: pytest.MonkeyPatch):
    """A branching network with residual sums has the bits of unfused nodes, in training and inference."""
    net = layers(activation)
    net = activation(mx.sym.BatchNorm(net, name="b2", fix_gamma=True), "r3") + net
    net = activation(mx.sym.BatchNorm(net, name="b3", use_global_stats=True, fix_gamma=False), "r4")
    results = []
    for fusion in ("0", "1"):
        monkeypatch.setenv("MXNET_USE_FUSION", fusion)
        monkeypatch.setenv("WEFTPLAN_KERNELS", kernels)
        executor = net.simple_bind(mx.cpu(), grad_req=grad_req, x=(3, 3, 9, 7))
        assert ("BatchNorm+relu" in executor.debug_str()) == (fusion == "1")
        rng = np.random.default_rng(1)
        for array in executor.arg_arrays:
            array[:] = rng.normal(0, 1, array.shape)
        executor.forward(is_train=True)
        if grad_req != "null":
            executor.backward([mx.nd.array(rng.normal(0, 1, out.shape)) for out in executor.outputs])
        arrays = [*executor.outputs, *(g for g in executor.grad_arrays if g is not None), *executor.aux_arrays]
        actual = [array.asnumpy().tobytes() for array in arrays]
        results.append([*actual, *(out.asnumpy().tobytes() for out in executor.forward(is_train=False))])
    assert results[0] == results[1]


@pytest.mark.parametrize("kernels", ["numpy", "native"])
def test_same_bits_where_joined_nodes_are_computed_again(kernels: str):
    """Recomputing fused nodes changes no bit of outputs, gradients and moving statistics."""
    net = mx.sym.Variable("x")
    for i in range(4):
        net = activation(mx.sym.BatchNorm(net * 2, name=f"b{i}", fix_gamma=False), f"r{i}")
    results = []
    for recompute in ("off", "mxnet"):
        executor = net.simple_bind(mx.cpu(), x=(3, 3, 9, 7), options=PlanOptions(recompute=recompute, kernels=kernels))
        rng = np.random.default_rng(1)
        for array in executor.arg_arrays:
            array[:] = rng.normal(0, 1, array.shape)
        executor.forward(is_train=True)
        executor.backward([mx.nd.ones((3, 3, 9, 7))])
        arrays = [*executor.outputs, *(g for g in executor.grad_arrays if g is not None), *executor.aux_arrays]
        results.append([array.asnumpy().tobytes() for array in arrays])
    assert results[0] == results[1]


@pytest.mark.parametrize("values", [(np.nan, np.inf, -np.inf, -0.0), (0.0, 1e-40, -1e-40, 3.0)])
@pytest.mark.parametrize("name", sorted(joined.LAYERS))
def test_relu_of_unusual_values(name: str, values: tuple[float, ...]):
    """A fused relu returns NaN, infinities and denormals like the operator relu, and 0 for -0."""
    data = np.array(values, np.float32).reshape(1, 4, 1, 1)
    op = joined.LAYERS[name]
    layer = registry.get(name)
    arguments = (
        {"kernel": (1, 1), "num_filter": 4, "num_group": 4, "no_bias": True} if name == "Convolution" else {"eps": 0}
    )
    params = registry.parse_params(layer, arguments)
    ones = np.ones((4, 1, 1, 1), np.float32)
    zeros = np.zeros(4, np.float32)
    inputs = [data, ones] if name == "Convolution" else [data, ones.ravel(), zeros, zeros.copy(), ones.ravel().copy()]
    specs = [TensorSpec(a.shape, a.dtype) for a in inputs]
    results = []
    for one in (layer, op):
        outputs: list[Any] = [np.empty_like(data), None, None][: one.num_outputs(params)]
        shapes = [TensorSpec(data.shape, data.dtype)] * len(outputs)
        scratch = np.empty(one.workspace_bytes(params, specs, shapes), np.uint8)
        with np.errstate(all="ignore"):
            one.forward(OpContext(np, workspace=scratch), params, inputs, outputs)
        results.append(outputs[0])
    expected = np.maximum(results[0], 0) + 0.0
    assert results[1].tobytes() == expected.tobytes()


@pytest.mark.parametrize("grad_req", ["write", "null"])
def test_the_symbol_as_it_runs_can_be_written_and_read(grad_req: str):
    """The optimized symbol has the unfused nodes; after saving and loading, it computes the executor's bits."""
    net = layers(activation)
    executor = net.simple_bind(mx.cpu(), grad_req=grad_req, x=(2, 3, 6, 6))
    assert ("Convolution+BatchNorm" in executor.debug_str()) == (grad_req == "null")
    actual = mx.sym.load_json(executor.get_optimized_symbol().tojson())
    assert actual.list_arguments() == net.list_arguments()
    assert actual.list_auxiliary_states() == net.list_auxiliary_states()
    assert actual.get_internals().list_outputs() == net.get_internals().list_outputs()
    repeated = actual.simple_bind(mx.cpu(), x=(2, 3, 6, 6))
    rng = np.random.default_rng(4)
    for name, array in executor.arg_dict.items():
        array[:] = repeated.arg_dict[name][:] = rng.normal(0, 1, array.shape)
    want = executor.forward(is_train=True)[0].asnumpy()
    assert repeated.forward(is_train=True)[0].asnumpy().tobytes() == want.tobytes()


def test_a_monitor_says_what_it_cannot_show(monkeypatch: pytest.MonkeyPatch):
    """A monitor warns with the names of layers without outputs after a run; without fusion it shows all."""
    seen: list[str] = []
    executor = layers(activation).simple_bind(mx.cpu(), x=(2, 3, 6, 6))
    executor.forward()
    with pytest.warns(mx.errors.ConfigWarning, match=r"no outputs of \['b1'\].*MXNET_USE_FUSION=0"):
        executor.set_monitor_callback(lambda name, array: seen.append(name))
    executor = layers(activation).simple_bind(mx.cpu(), grad_req="null", x=(2, 3, 6, 6))
    executor.forward()
    with pytest.warns(mx.errors.ConfigWarning, match=r"no outputs of \['c1', 'b1', 'c2'\]"):
        executor.set_monitor_callback(lambda name, array: seen.append(name))
    monkeypatch.setenv("MXNET_USE_FUSION", "0")
    executor = layers(activation).simple_bind(mx.cpu(), x=(2, 3, 6, 6))
    executor.set_monitor_callback(lambda name, array: seen.append(name))
    executor.forward()
    assert "b1_output" in seen
