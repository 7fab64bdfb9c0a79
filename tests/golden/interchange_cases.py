"""Networks that MXNet 1.9.1 and weftplan build alike: each case is a function of the package.

This file imports neither package, so that both sides can load it.
"""

import zlib

import numpy as np


def values(name, shape):
    """Return the array called ``name``, drawn from a seed of this name.

    Weights are centred and scaled to their fan-in, so that signals neither vanish nor saturate. All other arrays are
    positive, so that every operator is defined.
    """
    random = np.random.RandomState(zlib.crc32(name.encode()) & 0x7FFFFFFF)
    if name.endswith("weight") and len(shape) > 1:
        bound = (3.0 / np.prod(shape[1:])) ** 0.5
        return random.uniform(-bound, bound, size=shape).astype(np.float32)
    return random.uniform(0.2, 1.2, size=shape).astype(np.float32)


def arithmetic(mx):
    """Return a symbol of Python's arithmetic and comparison operators, with symbols and with numbers as operands."""
    sym = mx.sym
    a, b = sym.Variable("a"), sym.Variable("b")
    x = (a + b) * 2 - (1 - a) / (b + 3)
    x = x + 2**a + b**2 + a**b + 7 / b + a % 3 + 5 % b - a / b + (-a) - (a - 0.5)
    x = x + (a > b) + (a >= 1) + (a < b) + (a <= 1) + (a == b) + (a != 1) + (2 > a)  # noqa: SIM300
    x = x + sym.maximum(a, b) + sym.minimum(a, 0.75) + abs(a - b)
    return sym.Group([x, sym.exp(a, name="e"), a * b])


def shapes(mx):
    """Return a symbol of operators that move data: reshape, transpose, slice, split, concatenate, reduce, broadcast."""
    sym = mx.sym
    a = sym.Variable("a", shape=(2, 3, 4))
    x = sym.transpose(a, axes=(0, 2, 1))
    x = sym.Reshape(x, shape=(0, -1))
    y = a.reshape(shape=(-3, 0)).expand_dims(axis=0)
    parts = sym.SliceChannel(a, num_outputs=3, axis=1, squeeze_axis=True)
    z = sym.Concat(*[parts[i] for i in range(3)], dim=0, name="joined")
    w = sym.broadcast_add(sym.sum(a, axis=(1, 2), keepdims=True), a)
    v = sym.slice_axis(w, axis=2, begin=1, end=None).mean(axis=1)
    return sym.Group([x, y, z, v, sym.Flatten(a), sym.clip(a, -0.5, 0.5), parts[1]])


def mlp(mx):
    """Return a network of fully connected layers with batch normalisation and attributes of every kind."""
    sym = mx.sym
    x = sym.Variable("data")
    with mx.AttrScope(ctx_group="first", __note__='quotes " and \\ and\ttabs'):
        x = sym.FullyConnected(x, num_hidden=16, name="fc1", lr_mult="0.5")
        x = sym.BatchNorm(x, fix_gamma=False, eps=1e-4, name="bn1")
    x = sym.Activation(x, act_type="relu")
    x = sym.Dropout(x, p=0.3)
    x = sym.LeakyReLU(x, act_type="prelu", name="slope")
    weight = sym.Variable("shared_weight", shape=(4, 16), lr_mult=2.0, init='["one", {}]')
    x = sym.FullyConnected(data=x, weight=weight, num_hidden=4, no_bias=True, name="fc2")
    return sym.SoftmaxOutput(x, name="softmax")


def convnet(mx):
    """Return a network of convolutions and poolings with a residual connection."""
    sym = mx.sym
    x = sym.Variable("data")
    x = sym.Convolution(x, kernel=(3, 3), num_filter=6, pad=(1, 1), name="conv1")
    y = sym.Activation(sym.BatchNorm(x), act_type="relu", name="act1")
    y = sym.Convolution(y, kernel=(3, 3), num_filter=6, pad=(1, 1), num_group=2, no_bias=True, name="conv2")
    x = sym.Pooling(x + y, kernel=(2, 2), stride=(2, 2), pool_type="max")
    x = sym.Pooling(x, kernel=(1, 1), global_pool=True, pool_type="avg")
    x = sym.FullyConnected(sym.Flatten(x), num_hidden=5)
    return sym.softmax(x, axis=-1, name="out")


def recurrent(mx):
    """Return a symbol of a gated cell in twelve steps with shared weights, and of operators with over ten inputs."""
    sym = mx.sym
    data, weight, bias = sym.Variable("data"), sym.Variable("w"), sym.Variable("b")
    h = sym.Variable("h0", shape=(0, 3), __layout__="NC")
    outputs = []
    for t, x in enumerate(sym.split(data, num_outputs=12, axis=1, squeeze_axis=True)):
        gates = sym.FullyConnected(x, weight, bias, num_hidden=6, name=f"t{t}")
        left, right = sym.split(gates, num_outputs=2, name=f"s{t}")
        h = sym.sigmoid(left) * sym.tanh(right) + h * 0.5
        outputs.append(sym.expand_dims(h, axis=1))
    return sym.Group([sym.Concat(*outputs, dim=1), sym.add_n(*outputs), sym.BlockGrad(h)])


def layers(mx):
    """Return a network of GRU, bidirectional LSTM and ReLU layers with states.

    The GRU's parameters are concatenated from pieces and scaled.
    """
    sym = mx.sym
    x = sym.Variable("data")
    pieces = [sym.Reshape(sym.Variable(name, shape=shape), shape=(-1,)) for name, shape in
              (("wx", (9, 4)), ("wh", (9, 3)), ("bias", (18,)))]  # fmt: skip
    vector = getattr(sym, "_internal", sym)._rnn_param_concat(*pieces, dim=0, name="joined")
    x = sym.RNN(x, vector * 0.3 - 0.2, state_size=3, num_layers=1, mode="gru", name="first")
    x = sym.RNN(data=x, parameters=sym.Variable("second") * 0.3 - 0.2, state_size=2, num_layers=2, mode="lstm",
                bidirectional=True, p=0.25, state_outputs=True, name="lstm")  # fmt: skip
    y = sym.RNN(x[0], state_size=2, num_layers=1, mode="rnn_relu", state_outputs=True, name="last")
    return sym.Group([x[1], x[2], y[0], y[1]])


def matrices(mx):
    """Return factors, solutions, determinants and triangles of positive definite matrices."""
    sym = mx.sym
    a = sym.Variable("a", shape=(2, 3, 3))
    spd = sym.linalg_gemm2(a, a, transpose_b=True) + sym.linalg_makediag(sym.Variable("d", shape=(2, 3)))
    factor = sym.linalg_potrf(spd, name="factor")
    x = sym.linalg_trsm(factor, sym.Variable("b", shape=(2, 3, 2)), alpha=2.0, name="solved")
    y = sym.linalg_gemm(sym.linalg_inverse(spd), x, x, beta=-0.5, name="product")
    z = sym.linalg_syrk(sym.linalg_trmm(factor, y, transpose=True), transpose=True)
    lower = sym.linalg_extracttrian(sym.linalg_potri(factor))
    back = sym.linalg_extractdiag(sym.linalg_maketrian(lower), offset=-1)
    return sym.Group([z, back, sym.linalg_slogdet(spd)[1], sym.linalg_det(spd), sym.linalg_sumlogdiag(factor)])


def places(mx):
    """Return a symbol of coordinate operators, number grids, moments, splits and special functions."""
    sym = mx.sym
    a = sym.Variable("a", shape=(4, 3, 2))
    where = sym.Variable("where", shape=(2, 5), init="zeros")
    x = sym.gather_nd(a, where, name="gathered")
    y = sym.scatter_nd(sym.Variable("b", shape=(5, 2)), where * 0 + 1, shape=(4, 3, 2))
    grids = [sym.eye(3, 4, k=1), sym.linspace(0, 3, 5, endpoint=False, name="line"), sym.arange(4), sym.full((2,), 3)]
    moments = sym.moments(a, axes=(0, 2), keepdims=True, name="m")
    parts = sym.split_v2(a, (1, 3), axis=0)
    halves = sym.split_v2(a, 2, axis=2, squeeze_axis=True)
    z = sym.gamma(a) + sym.gammaln(a) * sym.erfinv(a * 0.5) - sym.hypot(a, 3) + sym.hypot(a, a)
    index = sym.unravel_index(sym.ravel_multi_index(where, shape=(4, 3)), shape=(2, 6))
    return sym.Group([x, y, *grids, moments[0], moments[1], parts[1], halves[1], z, index])


def sequences(mx):
    """Return a symbol of layers over sequences, channel groups and images, and of losses."""
    sym = mx.sym
    data = sym.Variable("data")
    x = sym.SequenceMask(data, use_sequence_length=True, value=-1.0, name="mask")
    y = sym.SequenceReverse(data, sym.Variable("lengths"), use_sequence_length=True, name="reverse")
    last = sym.SequenceLast(x + y, axis=1, name="last")
    image = sym.Variable("image", shape=(2, 4, 4, 6))
    normal = sym.GroupNorm(image, num_groups=2, eps=1e-3, name="groups")
    large = sym.UpSampling(normal, scale=2, sample_type="bilinear", num_filter=4, name="smooth")
    both = sym.UpSampling(image, sym.Crop(image, h_w=(2, 3), num_args=1), scale=2, sample_type="nearest", num_args=2)
    crop = sym.Crop(large, normal, num_args=2, center_crop=True)
    loss = sym.softmax_cross_entropy(last, sym.Variable("label", shape=(5,)))
    return sym.Group([sym.SVMOutput(last, name="svm", margin=0.5), crop, both, loss])


def speech(mx):
    """Return two CTC losses of a recurrent layer's logits: with padded labels, and with label lengths."""
    sym = mx.sym
    x = sym.RNN(sym.Variable("data"), sym.Variable("vector") * 0.3 - 0.2, state_size=4, num_layers=1, mode="lstm")
    label = sym.Variable("label", shape=(3, 2)) * 0 + 2
    lengths = sym.Variable("lengths", shape=(3,)) * 0 + 2
    padded = sym.CTCLoss(x, label, name="padded")
    inputs = sym.CTCLoss(
        data=x, label=label, label_lengths=lengths, use_label_lengths=True, blank_label="last", name="g"
    )
    return sym.Group([padded, sym.MakeLoss(inputs)])


def first_releases(mx):
    """Return a network of the operators that MXNet keeps from its first releases, with automatic names."""
    sym = mx.sym
    x = sym.Convolution_v1(sym.Variable("data"), kernel=(3, 3), num_filter=4, pad=(1, 1))
    x = sym.BatchNorm_v1(x, fix_gamma=False)
    x = sym.Pooling_v1(-x, kernel=(3, 3), stride=(2, 2), pad=(1, 1))
    return sym.Group([x, sym.Pooling_v1(x, global_pool=True, pool_type="avg")])


CASES = {
    "places": (places, {}),
    "sequences": (sequences, {"data": (5, 3, 4)}),
    "arithmetic": (arithmetic, {"a": (2, 3), "b": (2, 3)}),
    "shapes": (shapes, {}),
    "mlp": (mlp, {"data": (5, 7)}),
    "convnet": (convnet, {"data": (2, 3, 6, 6)}),
    "recurrent": (recurrent, {"data": (2, 12, 4)}),
    "layers": (layers, {"data": (5, 3, 4)}),
    "matrices": (matrices, {}),
    "speech": (speech, {"data": (6, 3, 5)}),
    "first_releases": (first_releases, {"data": (2, 3, 6, 6)}),
}
"""Cases by name: (builder, shapes that inference needs)."""

OURS = {"lenet": {"data": (2, 1, 8, 8)}, "resnet": {"data": (2, 1, 8, 8)}, "mlp": {"data": (2, 64)}}
"""Built-in networks for digits, whose JSON weftplan writes and MXNet reads, with their input shapes."""
