"""MobileNet, version 1, for 224x224 images.

Depthwise and pointwise convolutions alternate (Howard et al., 2017). A call builds a symbol and is stateless.
"""

from __future__ import annotations

from weftplan import symbol as sym
from weftplan.models.layers import classify, conv_bn_relu, global_avg_pool
from weftplan.symbol import Symbol

# (filters, stride) of each pair of a depthwise and a pointwise convolution
_PAIRS = ((64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *((512, 1),) * 5, (1024, 2), (1024, 1))


def mobilenet(classes: int = 1000) -> Symbol:
    """Build alternating depthwise 3x3 and pointwise 1x1 convolutions, width multiplier 1."""
    have = 32
    x = conv_bn_relu(sym.Variable("data"), have, 3, 2, 1)
    for filters, stride in _PAIRS:
        x = conv_bn_relu(x, have, 3, stride, 1, groups=have)
        x = conv_bn_relu(x, filters, 1)
        have = filters
    return classify(sym.Flatten(global_avg_pool(x)), classes)
