"""DenseNet-121, for 224x224 images.

Every layer of a block reads the outputs of all earlier layers in it. This makes the network a test of memory sharing
(Huang et al., 2017).
"""

from __future__ import annotations

from weftplan import symbol as sym
from weftplan.models.layers import batch_norm, classify, concat, conv, conv_bn_relu, pool, relu
from weftplan.symbol import Symbol

GROWTH = 32
BLOCKS = (6, 12, 24, 16)


def _bn_relu_conv(x: Symbol, filters: int, kernel: int, pad: int = 0) -> Symbol:
    return conv(relu(batch_norm(x)), filters, kernel, 1, pad)


def densenet121(classes: int = 1000) -> Symbol:
    """Build DenseNet-121: dense blocks, with a transition that halves channels and sides between two blocks."""
    channels = 64
    x = pool(conv_bn_relu(sym.Variable("data"), channels, 7, 2, 3), "max", 3, 2, 1)
    for stage, layers in enumerate(BLOCKS):
        for _ in range(layers):
            x = concat([x, _bn_relu_conv(_bn_relu_conv(x, 4 * GROWTH, 1), GROWTH, 3, 1)])
        channels += layers * GROWTH
        if stage != len(BLOCKS) - 1:
            channels //= 2
            x = pool(_bn_relu_conv(x, channels, 1), "avg", 2, 2)
    x = pool(relu(batch_norm(x)), "avg", 7, 7)
    return classify(sym.Flatten(x), classes)
