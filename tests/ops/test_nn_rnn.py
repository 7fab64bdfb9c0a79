"""RNN: sequence lengths, dropout between layers, memory, wrong inputs, inference, and bound graphs."""

import numpy as np
import pytest

import weftplan as mx
from tests.support.ops_harness import (
    check_contract,
    check_gradient,
    check_hidden,
    differentiate,
    gradients,
    prepare,
    run,
)
from tests.support.ops_nn_cases import _rnn
from weftplan.errors import DTypeError, MXNetError, ParameterError, ShapeError
from weftplan.ops.core import registry

MODES = ("rnn_relu", "rnn_tanh", "lstm", "gru")


def rnn_call(mode, layers=1, both=False, **how):
    """Return (arrays, params) of an RNN call with state outputs; ``both`` makes it bidirectional."""
    _, arrays, params = _rnn(mode, layers, both, steps=5, batch=3, inputs=2, size=3, state_outputs=True, **how)
    return arrays, params


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("both", [False, True])
def test_a_short_sequence_is_run_as_if_alone(mode, both):
    """With lengths, each sample has the outputs, states and gradients of its own sequence; the rest is zero."""
    lengths = [2, 5, 1]
    arrays, params = rnn_call(mode, 2, both, lengths=lengths)
    plain = {key: value for key, value in params.items() if key != "use_sequence_length"}
    whole = run("RNN", arrays, params)
    visible = 3 if mode == "lstm" else 2
    rng = np.random.RandomState(1)
    ograds = [rng.uniform(-1, 1, y.shape) for y in whole[:visible]]
    actual = gradients("RNN", arrays, ograds, params)
    weights = np.zeros_like(arrays[1])
    for sample, length in enumerate(lengths):
        one = slice(sample, sample + 1)
        alone = [arrays[0][:length, one], arrays[1], *(state[:, one] for state in arrays[2:-1])]
        outputs = run("RNN", alone, plain)
        np.testing.assert_allclose(whole[0][:length, one], outputs[0], atol=1e-12)
        assert not whole[0][length:, one].any()
        for ours, theirs in zip(whole[1:visible], outputs[1:visible], strict=True):
            np.testing.assert_allclose(ours[:, one], theirs, atol=1e-12)
        inputs = [ograds[0][:length, one], *(g[:, one] for g in ograds[1:])]
        expected = gradients("RNN", alone, inputs, plain)
        np.testing.assert_allclose(actual[0][:length, one], expected[0], atol=1e-12)
        assert not actual[0][length:, one].any()
        weights += expected[1]
        for ours, theirs in zip(actual[2:-1], expected[2:], strict=True):
            np.testing.assert_allclose(ours[:, one], theirs, atol=1e-12)
    np.testing.assert_allclose(actual[1], weights, atol=1e-12)


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_inference_without_reserve_gives_the_same_bits(layers, both):
    """Outputs and states have the same bits without the hidden output."""
    arrays, params = rnn_call("lstm", layers, both)
    call = prepare("RNN", arrays, params)
    kept = [y.copy() for y in call()]
    alone = call(wanted=[True, True, True, False])
    for ours, theirs in zip(alone[:3], kept[:3], strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_dropout_lies_between_layers_only():
    """A single layer drops nothing.

    Two layers drop only in training, about the share p of the first layer's output.
    """
    arrays, params = rnn_call("gru", 1, p=0.5)
    np.testing.assert_array_equal(run("RNN", arrays, params)[0], run("RNN", arrays, {**params, "p": 0.0})[0])
    arrays, params = rnn_call("gru", 2, p=0.25)
    quiet = run("RNN", arrays, params, is_train=False)
    np.testing.assert_array_equal(quiet[0], run("RNN", arrays, {**params, "p": 0.0})[0])
    _, big, params = _rnn("gru", 2, False, steps=20, batch=20, inputs=2, size=30, p=0.25)
    mask = run("RNN", big, params)[-1]
    assert mask.shape == (1, 20, 20, 30)
    assert abs(mask.mean() - 0.75) < 0.02


def test_a_dropped_layer_is_the_second_layer_of_what_was_kept():
    """The second layer reads the first layer's output times the mask over 1 - p."""
    arrays, params = rnn_call("lstm", 2, p=0.4)
    outputs = run("RNN", arrays, params)
    single = {**params, "num_layers": 1, "p": 0.0}
    # Packed: weights of layer 0 (12 x 2, 12 x 3), of layer 1 (12 x 3, 12 x 3), then 24 biases each.
    vector = arrays[1]
    first = np.concatenate([vector[:60], vector[132:156]])
    second = np.concatenate([vector[60:132], vector[156:]])
    lower = run("RNN", [arrays[0], first, *(s[:1] for s in arrays[2:])], single)[0]
    upper = run("RNN", [lower * outputs[-1][0] / 0.6, second, *(s[1:] for s in arrays[2:])], single)[0]
    np.testing.assert_allclose(outputs[0], upper, atol=1e-12)


@pytest.mark.parametrize("mode", MODES)
def test_memory(mode):
    """Nothing but NumPy's buffers (8192 elements per operand) is allocated outside the workspace."""
    limit = 3 * 8192 * 4 + 20_000
    _, arrays, params = _rnn(mode, 2, True, steps=80, batch=64, inputs=64, size=64, state_outputs=True, p=0.1)
    call = prepare("RNN", [x.astype(np.float32) for x in arrays], params)
    check_hidden(call, limit)
    calls = differentiate(call, [np.ones(s.shape, s.dtype) for s in call.out_specs])[1].calls
    assert [one.op.name for one in calls] == ["_backward_RNN"]
    check_hidden(calls[0], limit)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"projection_size": 2}, "projection_size needs mode lstm"),
        ({"state_size": 4}, "RNN"),
        ({"num_layers": 2}, "RNN"),
    ],
)
def test_wrong_sizes(change, words):
    """Shapes that do not fit are refused; the error names the operator."""
    arrays, params = rnn_call("gru")
    with pytest.raises(ShapeError, match=words):
        run("RNN", arrays, {**params, **change})


@pytest.mark.parametrize(
    "change", [{"mode": "elman"}, {"p": 1.0}, {"num_layers": 0}, {"lstm_state_clip_min": -1.0}, {"state_size": "x"}]
)
def test_wrong_parameters(change):
    """Parameters out of range, and clipping of states, are refused by name."""
    op = registry.get("RNN")
    inputs = {"mode": "lstm", "num_layers": 1, "state_size": 2, **change}
    with pytest.raises(ParameterError, match=next(iter(change))):
        registry.parse_params(op, inputs)


def test_sizes_are_inferred_in_both_directions():
    """The data's shape determines the length of the parameter vector; a state determines the batch."""
    out = mx.sym.RNN(mx.sym.Variable("x"), state_size=4, num_layers=2, mode="lstm", state_outputs=True, name="r")
    assert out.list_arguments() == ["x", "r_parameters", "r_state", "r_state_cell"]
    assert out.list_outputs() == ["r_output", "r_state_output", "r_statecell_output"]
    shapes, outs, _ = out.infer_shape(x=(3, 0, 5), r_state=(2, 7, 4))
    assert shapes == [(3, 7, 5), (16 * 9 + 16 * 8 + 64,), (2, 7, 4), (2, 7, 4)]
    assert outs == [(3, 7, 4), (2, 7, 4), (2, 7, 4)]


@pytest.mark.parametrize("request_", ["write", "add"])
def test_in_a_bound_graph(request_):
    """A bound RNN gives the kernels' outputs and gradients, written or added."""
    arrays, params = rnn_call("lstm", 2, True)
    arrays = [x.astype(np.float32) for x in arrays]
    names = ["data", "parameters", "state", "cell"]
    out = mx.sym.RNN(*map(mx.sym.Variable, names), **params)
    inputs = dict(zip(names, map(mx.nd.array, arrays), strict=True))
    before = {name: mx.nd.ones(x.shape) for name, x in inputs.items()}
    executor = out.bind(mx.cpu(), inputs, args_grad=before, grad_req=request_)
    outputs = executor.forward(is_train=True)
    expected = run("RNN", arrays, params)
    for ours, theirs in zip(outputs, expected, strict=False):
        np.testing.assert_allclose(ours.asnumpy(), theirs, rtol=1e-6, atol=1e-6)
    ograds = [np.full(y.shape, 0.5, np.float32) for y in outputs]
    executor.backward([mx.nd.array(g) for g in ograds])
    wanted = gradients("RNN", arrays, ograds, params)
    for name, theirs in zip(names, wanted, strict=True):
        extra = 1.0 if request_ == "add" else 0.0
        np.testing.assert_allclose(executor.grad_dict[name].asnumpy(), theirs + extra, rtol=1e-5, atol=1e-5)


def test_repeated_layers_drop_alike():
    """Under a memory budget, layers run twice with the same masks and give the same gradients bit by bit."""
    x = mx.sym.Variable("data")
    for k in range(4):
        x = mx.sym.RNN(x, state_size=6, num_layers=2, p=0.3, mode="gru", name=f"r{k}")
    results = []
    for budget in (None, 251_392):
        executor = x.simple_bind(mx.cpu(), data=(30, 8, 6), memory_budget=budget)
        random = np.random.RandomState(0)
        for array in executor.arg_dict.values():
            array[:] = random.uniform(-0.5, 0.5, array.shape)
        mx.random.seed(4)
        executor.forward(is_train=True)
        executor.backward([mx.nd.ones((30, 8, 6))])
        results.append((executor, [executor.grad_dict[name].asnumpy() for name in sorted(executor.grad_dict)]))
    (plain, whole), (tight, repeated) = results
    assert tight.allocated_bytes < 0.9 * plain.allocated_bytes
    assert "run twice" in str(tight.memory_plan.notes)
    for first, second in zip(whole, repeated, strict=True):
        np.testing.assert_array_equal(first, second)


def test_the_error_of_a_wrong_array_names_the_operator():
    """An imperative call with wrong arrays raises an error that names the operator."""
    with pytest.raises(MXNetError, match="RNN"):
        mx.nd.RNN(mx.nd.ones((2, 3)), mx.nd.ones((4,)), mx.nd.ones((1, 1, 1)), mode="gru", state_size=1, num_layers=1)


def test_joined_parameters():
    """_rnn_param_concat concatenates along dim, and infers a single unknown size."""
    pieces = [np.arange(3.0), np.arange(4.0), np.arange(2.0)]
    np.testing.assert_array_equal(
        run("_rnn_param_concat", pieces, {"num_args": 3, "dim": 0})[0], np.concatenate(pieces)
    )
    check_gradient("_rnn_param_concat", pieces, {"num_args": 3, "dim": 0})
    check_contract("_rnn_param_concat", pieces, {"num_args": 3, "dim": 0})
    op = registry.get("_rnn_param_concat")
    shapes, _ = op.infer_shape(registry.parse_params(op, {"num_args": 3, "dim": 0}), [(3,), (0,), (2,)], [(9,)])
    assert list(shapes) == [(3,), (4,), (2,)]


def test_joined_parameters_of_two_directions():
    """_rnn_param_concat splits the remainder equally between two unknown sizes.

    A bidirectional layer can therefore be inferred from its data.
    """
    op = registry.get("_rnn_param_concat")
    params = registry.parse_params(op, {"num_args": 3, "dim": 0})
    shapes, _ = op.infer_shape(params, [(0,), (3,), (0,)], [(11,)])
    assert list(shapes) == [(4,), (3,), (4,)]
    unequal, _ = op.infer_shape(params, [(0,), (3,), (0,)], [(10,)])
    assert list(unequal) == [(0,), (3,), (0,)]
    names = [f"{way}0_{part}" for way in "lr" for part in ("i2h_weight", "h2h_weight", "i2h_bias", "h2h_bias")]
    pieces = [
        mx.sym.Reshape(
            mx.sym.Variable(name, shape=(5, 0) if "i2h_w" in name else (5, 5) if "h2h_w" in name else (5,)), shape=(-1,)
        )
        for name in sorted(names, key=lambda name: "bias" in name)
    ]
    joined = mx.sym._internal._rnn_param_concat(*pieces, dim=0, num_args=len(pieces))
    rnn = mx.sym.RNN(
        mx.sym.Variable("data"),
        joined,
        mx.sym.zeros((2, 3, 5)),
        state_size=5,
        num_layers=1,
        bidirectional=True,
        mode="rnn_tanh",
    )
    actual, _, _ = rnn.infer_shape(data=(7, 3, 6))
    assert dict(zip(rnn.list_arguments(), actual, strict=True))["r0_i2h_weight"] == (5, 6)


def test_integers_are_refused():
    """Dtype inference refuses an RNN of integers, before any kernel runs."""
    network = mx.sym.RNN(mx.sym.Variable("data"), state_size=2, num_layers=1, mode="gru", name="rnn")
    with pytest.raises(DTypeError, match="RNN expects floats, got int64: cast"):
        network.simple_bind(mx.cpu(), data=(3, 2, 4), type_dict={"data": "int64"})
