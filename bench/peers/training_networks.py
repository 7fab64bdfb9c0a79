"""The three networks of bench_training.py over the symbol API that weftplan and MXNet 1.9.1 share."""

SIZES = {"mlp": (128, (784,)), "lenet": (64, (1, 28, 28)), "resnet18": (32, (3, 32, 32))}
"""Batch size and shape of a sample."""


def mlp(sym):
    """784-512-512-10."""
    net = sym.Variable("data")
    for i in (1, 2):
        net = sym.Activation(sym.FullyConnected(net, num_hidden=512, name=f"fc{i}"), act_type="relu", name=f"relu{i}")
    return sym.FullyConnected(net, num_hidden=10, name="fc3")


def lenet(sym):
    """Two convolutions of 5x5 (20 and 50 filters), max pooling, 500 hidden units."""
    net = sym.Variable("data")
    for i, filters in ((1, 20), (2, 50)):
        net = sym.Convolution(net, kernel=(5, 5), num_filter=filters, name=f"conv{i}")
        net = sym.Activation(net, act_type="relu", name=f"relu{i}")
        net = sym.Pooling(net, kernel=(2, 2), stride=(2, 2), pool_type="max", name=f"pool{i}")
    net = sym.Activation(
        sym.FullyConnected(sym.Flatten(net), num_hidden=500, name="fc1"), act_type="relu", name="relu3"
    )
    return sym.FullyConnected(net, num_hidden=10, name="fc2")


def resnet18(sym):
    """The 18 layers for 32x32 images: 3x3 stem, stages of 64, 128, 256, 512 filters with two basic blocks each."""
    count = [0]

    def conv(x, filters, stride=1, kernel=3, act=True):
        count[0] += 1
        i = count[0]
        pad = (kernel // 2,) * 2
        x = sym.Convolution(
            x, kernel=(kernel,) * 2, stride=(stride,) * 2, pad=pad, num_filter=filters, no_bias=True, name=f"conv{i}"
        )
        x = sym.BatchNorm(x, fix_gamma=False, eps=1e-5, name=f"bn{i}")
        return sym.Activation(x, act_type="relu", name=f"relu{i}") if act else x

    net, before = conv(sym.Variable("data"), 64), 64
    for filters in (64, 128, 256, 512):
        for block in (0, 1):
            stride = 2 if block == 0 and filters != 64 else 1
            same = net if filters == before else conv(net, filters, stride, kernel=1, act=False)
            body = conv(conv(net, filters, stride), filters, act=False)
            net, before = sym.Activation(body + same, act_type="relu", name=f"out{filters}_{block}"), filters
    net = sym.Pooling(net, global_pool=True, pool_type="avg", kernel=(4, 4), name="pool")
    return sym.FullyConnected(sym.Flatten(net), num_hidden=10, name="fc")
