"""MLP, LeNet, AlexNet, VGG-16.

Each function builds a symbol with a softmax output and is stateless.
"""

from __future__ import annotations

from collections.abc import Sequence

from weftplan import symbol as sym
from weftplan.models.layers import classify, conv, dense, pool, relu, softmax
from weftplan.symbol import Symbol


def mlp(classes: int = 10, hidden: Sequence[int] = (128, 64)) -> Symbol:
    """Build fully connected layers with rectifiers, on flat input."""
    x = sym.Variable("data")
    for i, units in enumerate(hidden, 1):
        x = relu(dense(x, units, name=f"fc{i}"), name=f"relu{i}")
    return softmax(dense(x, classes, name=f"fc{len(hidden) + 1}"))


def lenet(classes: int = 10) -> Symbol:
    """Build LeNet for 28x28 images: 5x5 convolutions with 20 and 50 filters, tanh, max pooling, 500 units."""
    x = sym.Variable("data")
    for i, filters in enumerate((20, 50), 1):
        x = sym.Convolution(x, kernel=(5, 5), num_filter=filters, name=f"conv{i}")
        x = sym.Activation(x, act_type="tanh", name=f"tanh{i}")
        x = sym.Pooling(x, pool_type="max", kernel=(2, 2), stride=(2, 2), name=f"pool{i}")
    x = dense(sym.Flatten(x, name="flatten"), 500, name="fc1")
    x = sym.Activation(x, act_type="tanh", name="tanh3")
    return softmax(dense(x, classes, name="fc2"))


def lenet_small(classes: int = 10) -> Symbol:
    """Build LeNet's structure for images of about 8x8 pixels: 3x3 convolutions with 32 and 64 filters, 128 units.

    LeNet has no batch normalisation; with it a few epochs on the digits suffice for any seed.
    """
    x = sym.Variable("data")
    for i, filters in enumerate((32, 64), 1):
        x = conv(x, filters, 3, pad=1, name=f"conv{i}")
        x = relu(sym.BatchNorm(x, fix_gamma=False, name=f"bn{i}"), name=f"relu{i}")
        x = pool(x, "max", 2, 2, name=f"pool{i}")
    x = relu(dense(sym.Flatten(x, name="flatten"), 128, name="fc1"), name="relu3")
    return softmax(dense(x, classes, name="fc2"))


def _dropout_head(x: Symbol, classes: int) -> Symbol:
    """Add two layers of 4096 units with dropout, then the classes."""
    for _ in range(2):
        x = sym.Dropout(relu(dense(x, 4096)), p=0.5)
    return classify(x, classes)


def alexnet(classes: int = 1000) -> Symbol:
    """Build AlexNet, one tower, for 224x224 images."""
    x = sym.Variable("data")
    for filters, kernel, stride, pad, pooled in (
        (64, 11, 4, 2, True),
        (192, 5, 1, 2, True),
        (384, 3, 1, 1, False),
        (256, 3, 1, 1, False),
        (256, 3, 1, 1, True),
    ):
        x = relu(conv(x, filters, kernel, stride, pad, bias=True))
        if pooled:
            x = pool(x, "max", 3, 2)
    return _dropout_head(sym.Flatten(x), classes)


def vgg16(classes: int = 1000) -> Symbol:
    """Build VGG with 13 convolutions and 3 fully connected layers, for 224x224 images."""
    x = sym.Variable("data")
    for repeats, filters in ((2, 64), (2, 128), (3, 256), (3, 512), (3, 512)):
        for _ in range(repeats):
            x = relu(conv(x, filters, 3, pad=1, bias=True))
        x = pool(x, "max", 2, 2)
    return _dropout_head(x, classes)
