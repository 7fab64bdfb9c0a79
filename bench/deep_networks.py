"""Networks of any depth; each function returns (symbol, input shapes, grad_req)."""

import weftplan as mx


def residual(layers, batch=32, side=32):
    """Return identity blocks of two convolutions each, with 16 channels and ``layers`` convolutions."""
    net = mx.sym.Variable("data")
    for i in range(layers // 2):
        inner = mx.sym.BatchNorm(net, name=f"bn{i}a")
        inner = mx.sym.Activation(inner, act_type="relu", name=f"relu{i}a")
        inner = mx.sym.Convolution(inner, kernel=(3, 3), pad=(1, 1), num_filter=16, name=f"conv{i}a")
        inner = mx.sym.BatchNorm(inner, name=f"bn{i}b")
        inner = mx.sym.Activation(inner, act_type="relu", name=f"relu{i}b")
        net = net + mx.sym.Convolution(inner, kernel=(3, 3), pad=(1, 1), num_filter=16, name=f"conv{i}b")
    symbol = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(net, num_hidden=10, name="fc"), name="softmax")
    return symbol, {"data": (batch, 16, side, side)}, "write"


def sliced_lstm(steps, batch=32, hidden=256, width=64):
    """Return one unrolled LSTM layer; its inputs are slices of one array that has a gradient.

    The bytes of the slices and of their gradients grow with the number of steps, whatever is recomputed.
    """
    slices = mx.sym.SliceChannel(mx.sym.Variable("data"), num_outputs=steps, axis=1, squeeze_axis=True, name="slices")
    symbol = _unrolled([slices[t] for t in range(steps)], hidden)
    return symbol, {"data": (batch, steps, width), "h": (batch, hidden), "c": (batch, hidden)}, "write"


def lstm(steps, batch=32, hidden=256, width=64):
    """Return one unrolled LSTM layer; each input is an array of its own without a gradient."""
    symbol = _unrolled([mx.sym.Variable(f"x{t}") for t in range(steps)], hidden)
    shapes = {"h": (batch, hidden), "c": (batch, hidden), **{f"x{t}": (batch, width) for t in range(steps)}}
    return (
        symbol,
        shapes,
        {n: "null" if n in shapes or n.endswith("label") else "write" for n in symbol.list_arguments()},
    )


def _unrolled(inputs, hidden):
    h, c = mx.sym.Variable("h"), mx.sym.Variable("c")
    weights = {f"{part}_{kind}": mx.sym.Variable(f"{part}_{kind}") for part in "xh" for kind in ("weight", "bias")}
    for x in inputs:
        gates = mx.sym.FullyConnected(x, weights["x_weight"], weights["x_bias"], num_hidden=4 * hidden)
        gates = gates + mx.sym.FullyConnected(h, weights["h_weight"], weights["h_bias"], num_hidden=4 * hidden)
        parts = mx.sym.SliceChannel(gates, num_outputs=4, axis=1)
        i, f, o = (mx.sym.Activation(parts[k], act_type="sigmoid") for k in range(3))
        c = f * c + i * mx.sym.Activation(parts[3], act_type="tanh")
        h = o * mx.sym.Activation(c, act_type="tanh")
    return mx.sym.SoftmaxOutput(mx.sym.FullyConnected(h, num_hidden=10, name="fc"), name="softmax")
