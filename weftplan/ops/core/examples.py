"""Examples for the documentation of common operators; a test runs them as doctests."""

from __future__ import annotations

from collections.abc import Mapping

_HEAD = ">>> import weftplan as mx\n>>> x = mx.sym.Variable('x')\n"


def _shapes(call: str, shape: str, output: str, *inputs: str) -> str:
    """Return the text of an example that shows the shapes of inputs and output of the symbol ``call``."""
    text = f"{_HEAD}>>> y = {call}\n>>> y.infer_shape(x={shape})[1]\n[{output}]"
    if inputs:
        text += f"\n>>> dict(zip(y.list_arguments()[1:], y.infer_shape(x={shape})[0][1:]))\n{{{', '.join(inputs)}}}"
    return text


def _values(call: str, output: str) -> str:
    """Return the text of an example that shows the values of ``call`` for ``x = [[1, 2], [3, 4]]``."""
    return f">>> import weftplan as mx\n>>> x = mx.nd.array([[1, 2], [3, 4]])\n>>> {call}.asnumpy().tolist()\n{output}"


EXAMPLES: Mapping[str, str] = {
    "Activation": _shapes("mx.sym.Activation(x, act_type='relu')", "(2, 3)", "(2, 3)"),
    "BatchNorm": _shapes(
        "mx.sym.BatchNorm(x, name='bn')", "(8, 3, 5, 5)", "(8, 3, 5, 5)", "'bn_gamma': (3,)", "'bn_beta': (3,)"
    ),
    "Concat": _shapes("mx.sym.Concat(x, x, dim=1)", "(2, 3)", "(2, 6)"),
    "Convolution": _shapes(
        "mx.sym.Convolution(x, kernel=(3, 3), num_filter=16, pad=(1, 1), name='conv')",
        "(8, 3, 32, 32)",
        "(8, 16, 32, 32)",
        "'conv_weight': (16, 3, 3, 3)",
        "'conv_bias': (16,)",
    ),
    "Deconvolution": _shapes(
        "mx.sym.Deconvolution(x, kernel=(2, 2), stride=(2, 2), num_filter=4, name='up')",
        "(8, 3, 16, 16)",
        "(8, 4, 32, 32)",
        "'up_weight': (3, 4, 2, 2)",
    ),
    "Dropout": _shapes("mx.sym.Dropout(x, p=0.3)", "(2, 3)", "(2, 3)"),
    "Embedding": _shapes(
        "mx.sym.Embedding(x, input_dim=1000, output_dim=64, name='words')",
        "(8, 20)",
        "(8, 20, 64)",
        "'words_weight': (1000, 64)",
    ),
    "Flatten": _shapes("mx.sym.Flatten(x)", "(8, 3, 4, 4)", "(8, 48)"),
    "FullyConnected": _shapes(
        "mx.sym.FullyConnected(x, num_hidden=10, name='fc')",
        "(8, 3, 4, 4)",
        "(8, 10)",
        "'fc_weight': (10, 48)",
        "'fc_bias': (10,)",
    ),
    "LayerNorm": _shapes(
        "mx.sym.LayerNorm(x, name='ln')", "(8, 20, 64)", "(8, 20, 64)", "'ln_gamma': (64,)", "'ln_beta': (64,)"
    ),
    "Pooling": _shapes(
        "mx.sym.Pooling(x, kernel=(2, 2), stride=(2, 2), pool_type='max')", "(8, 3, 32, 32)", "(8, 3, 16, 16)"
    ),
    "Reshape": _shapes("mx.sym.Reshape(x, shape=(0, -1))", "(8, 3, 4)", "(8, 12)"),
    "SoftmaxOutput": _shapes("mx.sym.SoftmaxOutput(x, name='softmax')", "(8, 10)", "(8, 10)", "'softmax_label': (8,)"),
    "argmax": _values("mx.nd.argmax(x, axis=1)", "[1.0, 1.0]"),
    "broadcast_add": _values("mx.nd.broadcast_add(x, mx.nd.array([[10, 20]]))", "[[11.0, 22.0], [13.0, 24.0]]"),
    "clip": _values("mx.nd.clip(x, a_min=2, a_max=3)", "[[2.0, 2.0], [3.0, 3.0]]"),
    "dot": _values("mx.nd.dot(x, x)", "[[7.0, 10.0], [15.0, 22.0]]"),
    "exp": _values("mx.nd.exp(x - x)", "[[1.0, 1.0], [1.0, 1.0]]"),
    "mean": _values("mx.nd.mean(x, axis=0)", "[2.0, 3.0]"),
    "one_hot": _values("mx.nd.one_hot(mx.nd.array([1, 0]), depth=3)", "[[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]"),
    "slice_axis": _values("mx.nd.slice_axis(x, axis=1, begin=0, end=1)", "[[1.0], [3.0]]"),
    "softmax": _shapes("mx.sym.softmax(x, axis=-1)", "(8, 10)", "(8, 10)"),
    "sum": _values("mx.nd.sum(x, axis=1)", "[3.0, 7.0]"),
    "take": _values("mx.nd.take(x, mx.nd.array([1, 0]))", "[[3.0, 4.0], [1.0, 2.0]]"),
    "transpose": _values("mx.nd.transpose(x)", "[[1.0, 3.0], [2.0, 4.0]]"),
    "where": _values("mx.nd.where(x > 2, x, -x)", "[[-1.0, -2.0], [3.0, 4.0]]"),
}
