"""The networks of bench_training.py, written with the symbol API that weftplan and MXNet 1.9.1 share."""

import importlib

import numpy as np

SIZES = {
    "mlp": (128, (784,)),
    "lenet": (64, (1, 28, 28)),
    "resnet18": (32, (3, 32, 32)),
    "resnet18_224": (8, (3, 224, 224)),
    "mobilenet": (4, (3, 224, 224)),
    "lstm": (32, (35,)),
}
"""Batch size and shape of a sample, by network."""
WORDS = 10_000
"""Size of the LSTM's vocabulary."""


def batch(network):
    """Return random (data, labels) for one batch; for the LSTM these are words and the next words."""
    size, shape = SIZES[network]
    rng = np.random.RandomState(0)
    if network == "lstm":
        words = rng.randint(0, WORDS, (size, *shape))
        return words.astype(np.float32), np.roll(words, -1, axis=1).astype(np.float32)
    return rng.uniform(-1, 1, (size, *shape)).astype(np.float32), rng.randint(0, 10, size).astype(np.float32)


def with_loss(sym, network):
    """Return a network with its loss; the LSTM has a loss at every step."""
    label = sym.Variable("softmax_label")
    if network == "lstm":
        label = sym.Reshape(label, shape=(-1,))
    return sym.SoftmaxOutput(globals()[network](sym), label, name="softmax", normalization="batch")


def mlp(sym):
    """Return an MLP 784-512-512-10."""
    net = sym.Variable("data")
    for i in (1, 2):
        net = sym.Activation(sym.FullyConnected(net, num_hidden=512, name=f"fc{i}"), act_type="relu", name=f"relu{i}")
    return sym.FullyConnected(net, num_hidden=10, name="fc3")


def lenet(sym):
    """Return LeNet: two 5x5 convolutions (20 and 50 filters), max pooling, 500 hidden units."""
    net = sym.Variable("data")
    for i, filters in ((1, 20), (2, 50)):
        net = sym.Convolution(net, kernel=(5, 5), num_filter=filters, name=f"conv{i}")
        net = sym.Activation(net, act_type="relu", name=f"relu{i}")
        net = sym.Pooling(net, kernel=(2, 2), stride=(2, 2), pool_type="max", name=f"pool{i}")
    net = sym.Activation(
        sym.FullyConnected(sym.Flatten(net), num_hidden=500, name="fc1"), act_type="relu", name="relu3"
    )
    return sym.FullyConnected(net, num_hidden=10, name="fc2")


def _layers(sym):
    """Return a function that adds a convolution with batch norm and an optional relu, and numbers their names."""
    count = [0]

    def conv(x, filters, stride=1, kernel=3, act=True, groups=1):
        count[0] += 1
        i = count[0]
        shape = {"kernel": (kernel,) * 2, "stride": (stride,) * 2, "pad": (kernel // 2,) * 2}
        x = sym.Convolution(x, num_filter=filters, num_group=groups, no_bias=True, name=f"conv{i}", **shape)
        x = sym.BatchNorm(x, fix_gamma=False, eps=1e-5, name=f"bn{i}")
        return sym.Activation(x, act_type="relu", name=f"relu{i}") if act else x

    return conv


def mobilenet(sym):
    """Return MobileNet v1: alternating depthwise and pointwise layers."""
    conv = _layers(sym)
    net, before = conv(sym.Variable("data"), 32, stride=2), 32
    steps = [(1, 64), (2, 128), (1, 128), (2, 256), (1, 256), (2, 512), *[(1, 512)] * 5, (2, 1024), (1, 1024)]
    for stride, filters in steps:
        net = conv(conv(net, before, stride, groups=before), filters, kernel=1)
        before = filters
    net = sym.Pooling(net, global_pool=True, pool_type="avg", kernel=(7, 7), name="pool")
    return sym.FullyConnected(sym.Flatten(net), num_hidden=10, name="fc")


def resnet18_224(sym):
    """Return ResNet-18 for 224x224 images: a 7x7 stem of stride 2, then max pooling."""
    return resnet18(sym, large=True)


def resnet18(sym, large=False):
    """Return ResNet-18 for 32x32 images: a 3x3 stem, then two basic blocks each of 64, 128, 256 and 512 filters."""
    conv = _layers(sym)
    net, before = conv(sym.Variable("data"), 64, 2 if large else 1, 7 if large else 3), 64
    if large:
        net = sym.Pooling(net, kernel=(3, 3), stride=(2, 2), pad=(1, 1), pool_type="max", name="pool0")
    for filters in (64, 128, 256, 512):
        for block in (0, 1):
            stride = 2 if block == 0 and filters != 64 else 1
            same = net if filters == before else conv(net, filters, stride, kernel=1, act=False)
            body = conv(conv(net, filters, stride), filters, act=False)
            net, before = sym.Activation(body + same, act_type="relu", name=f"out{filters}_{block}"), filters
    net = sym.Pooling(net, global_pool=True, pool_type="avg", kernel=(4, 4), name="pool")
    return sym.FullyConnected(sym.Flatten(net), num_hidden=10, name="fc")


def lstm(sym):
    """Return a language model: words embedded in 200 numbers, two layers of 200 cells over 35 steps, and scores."""
    rnn = importlib.import_module(sym.__name__.partition(".")[0]).rnn
    net = sym.Embedding(sym.Variable("data"), input_dim=WORDS, output_dim=200, name="embedding")
    cells = rnn.SequentialRNNCell()
    for layer in (0, 1):
        cells.add(rnn.LSTMCell(200, prefix=f"lstm{layer}_"))
    net, _ = cells.unroll(SIZES["lstm"][1][0], net, merge_outputs=True)
    return sym.FullyConnected(sym.Reshape(net, shape=(-1, 200)), num_hidden=WORDS, name="fc")
