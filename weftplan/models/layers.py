"""The shared layers of the built-in networks. Names are automatic: call inside a fresh NameManager."""

from __future__ import annotations

from weftplan import symbol as sym
from weftplan.symbol import Symbol

Pair = tuple[int, int]


def pair(value: int | Pair) -> Pair:
    """Return ``3`` as ``(3, 3)``; keep a pair.

    >>> pair(3), pair((1, 7))
    ((3, 3), (1, 7))
    """
    return (value, value) if isinstance(value, int) else value


def conv(
    x: Symbol,
    filters: int,
    kernel: int | Pair,
    stride: int = 1,
    pad: int | Pair = 0,
    *,
    groups: int = 1,
    bias: bool = False,
    name: str | None = None,
) -> Symbol:
    """Add a 2-D convolution, without bias by default."""
    result: Symbol = sym.Convolution(
        x,
        kernel=pair(kernel),
        num_filter=filters,
        num_group=groups,
        stride=pair(stride),
        pad=pair(pad),
        no_bias=not bias,
        name=name,
    )
    return result


def batch_norm(x: Symbol, *, eps: float = 1e-5) -> Symbol:
    """Add batch normalisation with a learnt gamma."""
    result: Symbol = sym.BatchNorm(x, eps=eps, momentum=0.9, fix_gamma=False)
    return result


def relu(x: Symbol, name: str | None = None) -> Symbol:
    """Add a rectifier."""
    result: Symbol = sym.Activation(x, act_type="relu", name=name)
    return result


def conv_bn_relu(
    x: Symbol,
    filters: int,
    kernel: int | Pair,
    stride: int = 1,
    pad: int | Pair = 0,
    *,
    groups: int = 1,
    bias: bool = False,
    eps: float = 1e-5,
) -> Symbol:
    """Add convolution, batch normalisation, rectifier."""
    return relu(batch_norm(conv(x, filters, kernel, stride, pad, groups=groups, bias=bias), eps=eps))


def pool(x: Symbol, kind: str, kernel: int, stride: int, pad: int = 0, name: str | None = None) -> Symbol:
    """Add pooling of ``kind`` max or avg; an average includes the padding."""
    result: Symbol = sym.Pooling(x, pool_type=kind, kernel=pair(kernel), stride=pair(stride), pad=pair(pad), name=name)
    return result


def global_avg_pool(x: Symbol) -> Symbol:
    """Add the mean of each channel."""
    result: Symbol = sym.Pooling(x, pool_type="avg", kernel=(1, 1), global_pool=True)
    return result


def dense(x: Symbol, units: int, name: str | None = None) -> Symbol:
    """Add a fully connected layer with bias."""
    result: Symbol = sym.FullyConnected(x, num_hidden=units, name=name)
    return result


def concat(parts: list[Symbol]) -> Symbol:
    """Concatenate the channels of all parts."""
    result: Symbol = sym.Concat(*parts, dim=1)
    return result


def classify(x: Symbol, classes: int) -> Symbol:
    """Add a fully connected layer and the softmax loss, whose label is called ``softmax_label``."""
    return softmax(dense(x, classes))


def softmax(x: Symbol) -> Symbol:
    """Add the softmax loss called ``softmax``."""
    result: Symbol = sym.SoftmaxOutput(x, name="softmax")
    return result
