"""Recurrent cells: values against NumPy formulas, fused against single steps, names, modifiers, checkpoints."""

import subprocess
import sys

import numpy as np
import pytest

import weftplan as mx
from weftplan.errors import ParameterError

LENGTH, BATCH, INPUT, HIDDEN = 4, 3, 5, 2


def sigmoid(x):
    """Return the logistic function."""
    return 1 / (1 + np.exp(-x))


def values_of(symbol, seed=0, **shapes):
    """Return a symbol's outputs, and the random parameters and inputs by name."""
    rng = np.random.default_rng(seed)
    executor = symbol.simple_bind(mx.cpu(), grad_req="null", **shapes)
    inputs = {name: rng.standard_normal(a.shape).astype("float32") for name, a in sorted(executor.arg_dict.items())}
    outputs = executor.forward(**inputs)
    return [o.asnumpy() for o in outputs], inputs


def plain(x, state, w):
    """Return output and states of one step of the plain cell."""
    h = np.tanh(x @ w["i2h_weight"].T + w["i2h_bias"] + state[0] @ w["h2h_weight"].T + w["h2h_bias"])
    return h, [h]


def lstm(x, state, w):
    """Return output and states of one step of Hochreiter and Schmidhuber's cell."""
    gates = x @ w["i2h_weight"].T + w["i2h_bias"] + state[0] @ w["h2h_weight"].T + w["h2h_bias"]
    i, f, c, o = np.split(gates, 4, axis=1)
    cell = sigmoid(f) * state[1] + sigmoid(i) * np.tanh(c)
    h = sigmoid(o) * np.tanh(cell)
    return h, [h, cell]


def gru(x, state, w):
    """Return output and states of one step of Cho's unit in cuDNN's form."""
    a, b = x @ w["i2h_weight"].T + w["i2h_bias"], state[0] @ w["h2h_weight"].T + w["h2h_bias"]
    (ar, az, ao), (br, bz, bo) = np.split(a, 3, axis=1), np.split(b, 3, axis=1)
    update = sigmoid(az + bz)
    h = (1 - update) * np.tanh(ao + sigmoid(ar + br) * bo) + update * state[0]
    return h, [h]


CELLS = [("RNNCell", plain, 1), ("LSTMCell", lstm, 2), ("GRUCell", gru, 1)]


@pytest.mark.parametrize(("kind", "step", "states"), CELLS)
@pytest.mark.parametrize("layout", ["NTC", "TNC"])
def test_values(kind, step, states, layout):
    """Each cell, unrolled over a symbol with a time axis, computes its formula from zero states."""
    cell = getattr(mx.rnn, kind)(HIDDEN, prefix="c_")
    merged, last = cell.unroll(LENGTH, mx.sym.Variable("data"), layout=layout, merge_outputs=True)
    assert len(last) == states == len(cell.state_info)
    shape = (BATCH, LENGTH, INPUT) if layout == "NTC" else (LENGTH, BATCH, INPUT)
    (actual, *ends), inputs = values_of(mx.sym.Group([merged, *last]), data=shape)
    weights = {name.removeprefix("c_"): value for name, value in inputs.items()}
    steps = inputs["data"].swapaxes(0, 1) if layout == "NTC" else inputs["data"]
    state, expected = [np.zeros((BATCH, HIDDEN))] * states, []
    for x in steps:
        h, state = step(x, state, weights)
        expected.append(h)
    expected = np.stack(expected, axis=layout.find("T"))
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)
    for a, b in zip(ends, state, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", ["rnn_tanh", "rnn_relu", "lstm", "gru"])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_fused_and_single_steps_agree(mode, bidirectional):
    """The RNN operator and the unfused cells, with its weights unpacked and packed, give the same outputs."""
    fused = mx.rnn.FusedRNNCell(HIDDEN, 2, mode, bidirectional, get_next_state=True, prefix="f_")
    data = mx.sym.Variable("data")
    one, last = fused.unroll(LENGTH, data, layout="TNC", merge_outputs=True)
    (actual, *_), inputs = values_of(mx.sym.Group([one, *last]), data=(LENGTH, BATCH, INPUT))
    pieces = fused.unpack_weights({"f_parameters": mx.nd.array(inputs["f_parameters"])})
    assert fused.pack_weights(pieces)["f_parameters"].asnumpy().tolist() == inputs["f_parameters"].tolist()
    stack = fused.unfuse()
    joined = stack.pack_weights(pieces)
    second, _ = stack.unroll(LENGTH, data, layout="TNC", merge_outputs=True)
    executor = second.simple_bind(mx.cpu(), grad_req="null", data=(LENGTH, BATCH, INPUT))
    executor.copy_params_from(joined)
    executor.forward(data=inputs["data"])
    np.testing.assert_allclose(executor.outputs[0].asnumpy(), actual, rtol=1e-4, atol=1e-5)
    assert stack.unpack_weights(joined).keys() == pieces.keys()


def test_fused_outputs_as_a_list_and_turned():
    """merge_outputs=False splits the time axis; layout NTC is transposed, with a warning."""
    cell = mx.rnn.FusedRNNCell(HIDDEN, prefix="f_")
    with pytest.warns(UserWarning, match="'TNC' saves that"):
        outputs, states = cell.unroll(LENGTH, mx.sym.Variable("data"), merge_outputs=False)
    assert (len(outputs), states) == (LENGTH, [])
    assert mx.sym.Group(outputs).infer_shape(data=(BATCH, LENGTH, INPUT))[1] == [(BATCH, HIDDEN)] * LENGTH


def test_initial_values():
    """Packed weights start with the network's initializer, biases with 0, and forget biases with forget_bias."""
    cell = mx.rnn.FusedRNNCell(HIDDEN, 1, "lstm", forget_bias=3.0, prefix="f_")
    outputs, _ = cell.unroll(LENGTH, mx.sym.Variable("data"), layout="TNC", merge_outputs=True)
    module = mx.mod.Module(outputs, label_names=None)
    module.bind([mx.io.DataDesc("data", (LENGTH, BATCH, INPUT), layout="TNC")], for_training=False)
    module.init_params(mx.init.Constant(0.5))
    pieces = cell.unpack_weights(module.get_params()[0])
    for name, value in pieces.items():
        expected = 0.5 if name.endswith("weight") else 3.0 if name.endswith("_f_bias") else 0.0
        assert (value.asnumpy() == expected).all(), name
    single = mx.rnn.LSTMCell(HIDDEN, "s_", forget_bias=2.0).unroll(1, [mx.sym.Variable("data")])[0][0]
    module = mx.mod.Module(single, label_names=None)
    module.bind([("data", (BATCH, INPUT))], for_training=False)
    module.init_params()
    assert module.get_params()[0]["s_i2h_bias"].asnumpy().tolist() == [0, 0, 2, 2, 0, 0, 0, 0]


def test_weights_are_shared_and_named():
    """Cells with the same params share variables; each unroll numbers steps from 0."""
    first = mx.rnn.GRUCell(HIDDEN, prefix="a_")
    second = mx.rnn.GRUCell(HIDDEN, prefix="b_", params=first.params)
    x = [mx.sym.Variable(f"x{k}") for k in range(2)]
    both = mx.sym.Group(first.unroll(2, x)[0] + second.unroll(2, x)[0])
    assert [n for n in both.list_arguments() if n.endswith("weight")] == ["a_i2h_weight", "a_h2h_weight"]
    assert both.list_outputs() == ["a_t0_out_output", "a_t1_out_output", "b_t0_out_output", "b_t1_out_output"]
    assert mx.sym.Group(first.unroll(2, x)[0]).list_outputs() == ["a_t0_out_output", "a_t1_out_output"]


def test_modifiers():
    """ResidualCell adds the input.

    ZoneoutCell is the cell itself outside training, and keeps old values in training at its rates. Wrong uses are
    refused.
    """
    x = [mx.sym.Variable(f"x{k}") for k in range(3)]
    shapes = {f"x{k}": (BATCH, HIDDEN) for k in range(3)}
    (bare, *_), inputs = values_of(mx.sym.Group(mx.rnn.RNNCell(HIDDEN).unroll(3, x)[0]), **shapes)
    residual = mx.rnn.ResidualCell(mx.rnn.RNNCell(HIDDEN))
    (actual, *_), _ = values_of(mx.sym.Group(residual.unroll(3, x)[0]), **shapes)
    np.testing.assert_allclose(actual, bare + inputs["x0"], rtol=1e-5)
    zoneout = mx.sym.Group(mx.rnn.ZoneoutCell(mx.rnn.RNNCell(HIDDEN), 0.5, 0.5).unroll(3, x)[0])
    for _ in range(2):
        residual.reset()  # begins the numbers of the modified cell again, too
        assert residual(x[0], residual.begin_state())[1][0].name == residual.base_cell._prefix + "t0_out"
    (outside, *_), _ = values_of(zoneout, **shapes)
    np.testing.assert_array_equal(outside, bare)
    cell = mx.rnn.ZoneoutCell(mx.rnn.RNNCell(50), zoneout_outputs=0.25)
    outputs, _ = cell.unroll(2, [mx.sym.Variable("x0"), mx.sym.Variable("x1")])
    executor = mx.sym.Group(outputs).simple_bind(mx.cpu(), grad_req="null", x0=(80, 4), x1=(80, 4))
    for array in executor.arg_arrays:
        array[:] = 0.1
    first, second = (o.asnumpy() for o in executor.forward(is_train=True))
    assert (first == 0).mean() == pytest.approx(0.25, abs=0.05)
    assert (second == first).mean() == pytest.approx(0.25, abs=0.05)
    with pytest.raises(ParameterError, match="was given to a modifier"):
        cell.base_cell.begin_state()
    with pytest.raises(ParameterError, match="single steps, which FusedRNNCell does not make"):
        mx.rnn.ZoneoutCell(mx.rnn.FusedRNNCell(HIDDEN))
    stack = mx.rnn.SequentialRNNCell()
    stack.add(mx.rnn.LSTMCell(HIDDEN, "l0_"))
    stack.add(mx.rnn.DropoutCell(0.5))
    stack.add(mx.rnn.LSTMCell(HIDDEN, "l1_"))
    merged, states = stack.unroll(3, mx.sym.Variable("data"), merge_outputs=True)
    assert len(states) == 4
    assert merged.infer_shape(data=(BATCH, 3, INPUT))[1] == [(BATCH, 3, HIDDEN)]


@pytest.mark.parametrize("kind", ["ConvRNNCell", "ConvLSTMCell", "ConvGRUCell"])
def test_images_over_time(kind):
    """Convolutional cells keep the size of their states, and gradients reach every weight."""
    cell = getattr(mx.rnn, kind)((1, 3, 6, 8), 4, prefix="c_")
    outputs, _ = cell.unroll(3, mx.sym.Variable("data"), layout="NTC", merge_outputs=True)
    executor = outputs.simple_bind(mx.cpu(), data=(2, 3, 3, 6, 8))
    rng = np.random.default_rng(1)
    for array in executor.arg_arrays:
        array[:] = rng.standard_normal(array.shape)
    executor.forward(is_train=True)
    executor.backward(mx.nd.ones((2, 3, 4, 6, 8)))
    assert all(gradient.asnumpy().any() for gradient in executor.grad_arrays)
    with pytest.raises(ParameterError, match="must be odd"):
        getattr(mx.rnn, kind)((1, 3, 6, 8), 4, h2h_kernel=(2, 2))


def test_checkpoints_of_single_gates(tmp_path):
    """Checkpoints store the weights of single gates, which other cells can load.

    The callback saves every ``period`` epochs.
    """
    cell = mx.rnn.LSTMCell(HIDDEN, "l_")
    net = mx.sym.Group(cell.unroll(2, [mx.sym.Variable("x0"), mx.sym.Variable("x1")])[0])
    _, inputs = values_of(net, x0=(BATCH, INPUT), x1=(BATCH, INPUT))
    args = {name: mx.nd.array(value) for name, value in inputs.items() if name.startswith("l_")}
    save = mx.rnn.do_rnn_checkpoint(cell, str(tmp_path / "net"), period=2)
    for epoch in range(3):
        save(epoch, net, args, {})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["net-0002.params", "net-symbol.json"]
    raw = mx.model.load_checkpoint(tmp_path / "net", 2)[1]
    assert "l_i2h_f_weight" in raw
    assert "l_i2h_weight" not in raw
    _, actual, _ = mx.rnn.load_rnn_checkpoint([cell], str(tmp_path / "net"), 2)
    for name, value in args.items():
        np.testing.assert_array_equal(actual[name].asnumpy(), value.asnumpy())


@pytest.mark.parametrize("layout", ["NT", "TN"])
def test_sentences_in_buckets(layout):
    """Sentences are padded to their bucket, labels are the next words, and a bucketing network trains on them."""
    rng = np.random.default_rng(2)
    sentences = [list(rng.integers(1, 9, n)) for n in [3] * 8 + [5] * 9 + [9]]
    it = mx.rnn.BucketSentenceIter(sentences, 4, buckets=[3, 6], invalid_label=0, layout=layout)
    assert (it.discarded, it.default_bucket_key) == (1, 6)
    seen = []
    for batch in it:
        data, label = (a.asnumpy() if layout == "NT" else a.asnumpy().T for a in (batch.data[0], batch.label[0]))
        assert data.shape == (4, batch.bucket_key)
        np.testing.assert_array_equal(label[:, :-1], data[:, 1:])
        assert (label[:, -1] == 0).all()
        seen.append(batch.bucket_key)
    assert sorted(seen) == [3, 3, 6, 6]
    it.reset()
    start = it.state()
    rows = [batch.data[0].asnumpy().tolist() for batch in it]
    for _ in range(3):  # other orders
        it.reset()
    it.set_state(start)
    assert [batch.data[0].asnumpy().tolist() for batch in it] == rows
    it.reset()

    def generate(length):
        stack = mx.rnn.SequentialRNNCell()
        stack.add(mx.rnn.LSTMCell(8, "l0_"))
        words = mx.sym.Embedding(mx.sym.Variable("data"), input_dim=9, output_dim=4, name="embed")
        outputs, _ = stack.unroll(length, words, layout=f"{layout}C", merge_outputs=True)
        scores = mx.sym.FullyConnected(mx.sym.reshape(outputs, shape=(-1, 8)), num_hidden=9, name="fc")
        label = mx.sym.reshape(mx.sym.Variable("softmax_label"), shape=(-1,))
        return mx.sym.SoftmaxOutput(scores, label, name="softmax"), ["data"], ["softmax_label"]

    module = mx.mod.BucketingModule(generate, it.default_bucket_key)
    metric = mx.metric.Perplexity(0)
    module.fit(it, eval_metric=metric, num_epoch=3, initializer=mx.init.Xavier(), optimizer="adam")
    assert 1 < metric.get()[1] < 20


def test_words_as_numbers():
    """Unknown words get the number of the unknown token, or are refused without one."""
    known = {"a": 1, "b": 2}
    assert mx.rnn.encode_sentences([["a", "z", "y"]], vocab=known, unknown_token="?") == ([[1, 0, 0]], known)
    assert known["?"] == 0
    with pytest.raises(ParameterError, match="'z' is not in vocab"):
        mx.rnn.encode_sentences([["z"]], vocab={"a": 1})
    assert mx.rnn.encode_sentences([["a", "b"]], invalid_label=0)[0] == [[1, 2]]


def test_a_file_may_name_fused_rnn_before_the_cells_are_imported():
    """A saved symbol that names the FusedRNN initializer loads before ``weftplan.rnn`` is imported.

    The test starts a process, because this process has imported the cells.
    """
    rule = mx.init.FusedRNN(None, 4, 1, "lstm").dumps()
    script = f"""
import sys, weftplan as mx
start = mx.sym.zeros((1, 2, 4))
weights = mx.sym.Variable("weights", attr={{"__init__": {rule!r}}})
net = mx.sym.RNN(mx.sym.Variable("data"), weights, start, start, mode="lstm", state_size=4, num_layers=1)
assert "weftplan.rnn" not in sys.modules
module = mx.mod.Module(mx.sym.load_json(net.tojson()), label_names=None)
module.bind([("data", (3, 2, 5))], for_training=False)
module.init_params(mx.init.Xavier())
print(module.get_params()[0]["weights"].asnumpy().tolist().count(1.0))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == 8  # both biases of the four gates that forget
    assert mx.init.FusedRNN.__name__ == "FusedRNN"


def test_names_of_nodes():
    """Nodes that concatenate and split steps have MXNet's names, which scripts look up among the internals."""
    with mx.name.NameManager():
        both = mx.rnn.BidirectionalCell(mx.rnn.RNNCell(2, prefix="l_"), mx.rnn.RNNCell(2, prefix="r_"))
        joined, _ = both.unroll(2, mx.sym.var("data"), merge_outputs=True)
        apart, _ = mx.rnn.RNNCell(2, prefix="a_").unroll(2, joined, merge_outputs=True)
        with pytest.warns(UserWarning, match="'TNC' saves that"):
            fused, _ = mx.rnn.FusedRNNCell(2, prefix="f_").unroll(2, apart, layout="NTC")
    assert joined.list_outputs() == ["bi_out_output"]
    assert apart.name == "concat0"
    assert fused.name == "swapaxes1"
    inner = fused.get_internals().list_outputs()
    assert {"split0_output0", "split1_output1", "bi_t1_output", "swapaxes0_output"} <= set(inner)
