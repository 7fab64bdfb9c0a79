"""Residual networks, version 1 (stride in a block's first convolution), as in MXNet's model zoo."""

from __future__ import annotations

from weftplan import symbol as sym
from weftplan.models.layers import batch_norm, classify, conv, conv_bn_relu, global_avg_pool, pool, relu
from weftplan.symbol import Symbol

DEPTHS = {
    18: (False, (2, 2, 2, 2)),
    34: (False, (3, 4, 6, 3)),
    50: (True, (3, 4, 6, 3)),
    101: (True, (3, 4, 23, 3)),
    152: (True, (3, 8, 36, 3)),
}
"""Depth -> (whether blocks have a bottleneck, blocks per stage)."""


def _shortcut(x: Symbol, filters: int, stride: int, project: bool) -> Symbol:
    return batch_norm(conv(x, filters, 1, stride)) if project else x


def basic_block(x: Symbol, filters: int, stride: int, project: bool) -> Symbol:
    """Add two 3x3 convolutions and a shortcut, which is projected if the shape changes."""
    body = conv_bn_relu(x, filters, 3, stride, 1)
    body = batch_norm(conv(body, filters, 3, 1, 1))
    return relu(_shortcut(x, filters, stride, project) + body)


def bottleneck_block(x: Symbol, filters: int, stride: int, project: bool) -> Symbol:
    """Add 1x1, 3x3 and 1x1 convolutions and a shortcut; the first two have a quarter of the filters."""
    # The zoo's 1x1 convolutions have a bias, its other convolutions have none.
    body = conv_bn_relu(x, filters // 4, 1, stride, bias=True)
    body = conv_bn_relu(body, filters // 4, 3, 1, 1)
    body = batch_norm(conv(body, filters, 1, bias=True))
    return relu(body + _shortcut(x, filters, stride, project))


def resnet(depth: int, classes: int = 1000, *, thumbnail: bool = False) -> Symbol:
    """Build ResNet-18, 34, 50, 101 or 152.

    Args:
        thumbnail: a 3x3 stem without pooling, for images of about 32x32.
    """
    bottleneck, stages = DEPTHS[depth]
    block = bottleneck_block if bottleneck else basic_block
    x = sym.Variable("data")
    if thumbnail:
        x = conv(x, 64, 3, 1, 1)
    else:
        x = pool(conv_bn_relu(x, 64, 7, 2, 3), "max", 3, 2, 1)
    have = 64
    for stage, repeats in enumerate(stages):
        filters = (256 if bottleneck else 64) << stage
        for i in range(repeats):
            x = block(x, filters, 2 if stage > 0 and i == 0 else 1, i == 0 and filters != have)
        have = filters
    return classify(global_avg_pool(x), classes)


def resnet_small(classes: int = 10) -> Symbol:
    """Build three stages of one basic block with 16, 32 and 64 filters, for images of about 8x8."""
    x = conv_bn_relu(sym.Variable("data"), 16, 3, 1, 1)
    for stage, filters in enumerate((16, 32, 64)):
        x = basic_block(x, filters, 1 if stage == 0 else 2, stage > 0)
    return classify(global_avg_pool(x), classes)
