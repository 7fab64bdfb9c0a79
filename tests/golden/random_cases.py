"""Random operator calls, one for each seed, as golden cases: unusual shapes, several dtypes, parameters of every kind.

Python 3.8 and NumPy suffice, because MXNet 1.9.1's process generates the same cases. Values avoid points at which the
two packages may legitimately differ: slopes at a kink, or the order of equal elements.

The file is long because it has a generator for each family of operators, and tables of their ranges.
"""

import random

DIMS = (1, 1, 2, 3, 3, 4, 5, 7, 8, 9, 16, 17)
FLOATS = ("float32", "float32", "float32", "float64", "float16")
INTEGERS = ("int32", "int64", "int8", "uint8")

WIDE = (-3.0, 3.0)
POSITIVE = (0.2, 3.0)
INSIDE = (-0.9, 0.9)
UNARY = {
    **dict.fromkeys(
        ("exp", "expm1", "square", "abs", "negative", "sin", "cos", "tanh", "sigmoid", "relu", "softsign", "erf",
         "cbrt", "sinh", "cosh", "arctan", "arcsinh", "degrees", "radians", "sign", "zeros_like", "ones_like",
         "_copy", "BlockGrad", "Flatten", "logical_not"),
        WIDE,
    ),
    **dict.fromkeys(
        ("log", "log1p", "log2", "log10", "sqrt", "rsqrt", "rcbrt", "reciprocal", "gamma", "gammaln"), POSITIVE
    ),
    **dict.fromkeys(("arcsin", "arccos", "arctanh", "tan", "erfinv"), INSIDE),
    "arccosh": (1.2, 4.0),
    **dict.fromkeys(("round", "rint", "floor", "ceil", "trunc", "fix"), WIDE),
}  # fmt: skip
WHOLE = ("square", "abs", "negative", "relu", "sign", "_copy", "zeros_like", "ones_like", "exp", "sqrt", "tanh", "log",
         "expm1", "cosh", "degrees", "reciprocal", "cbrt", "sigmoid", "floor", "softsign", "logical_not")  # fmt: skip
SCALAR = ("_plus_scalar", "_minus_scalar", "_rminus_scalar", "_mul_scalar", "_div_scalar", "_rdiv_scalar",
          "_power_scalar", "_rpower_scalar", "_mod_scalar", "_rmod_scalar", "_maximum_scalar", "_minimum_scalar",
          "_hypot_scalar", "_equal_scalar", "_greater_scalar", "_lesser_equal_scalar", "_logical_and_scalar",
          "smooth_l1")  # fmt: skip
BINARY = ("add", "sub", "mul", "div", "mod", "power", "maximum", "minimum", "hypot")
COMPARE = ("equal", "not_equal", "greater", "greater_equal", "lesser", "lesser_equal", "logical_and", "logical_or")


class Maker:
    """A source of random choices from one seed."""

    def __init__(self, seed):
        self.pick = random.Random(seed)

    def dim(self):
        """Return a random dimension."""
        return self.pick.choice(DIMS)

    def shape(self, low=1, high=4, most=600):
        """Return a shape of ``low`` to ``high`` dimensions and at most ``most`` elements."""
        while True:
            shape = tuple(self.dim() for _ in range(self.pick.randint(low, high)))
            size = 1
            for dim in shape:
                size *= dim
            if size <= most:
                return shape

    def maybe(self, share=0.5):
        """Return True with the probability ``share``."""
        return self.pick.random() < share

    def axis(self, rank):
        """Return an axis, counted from the first (not negative) or from the last (negative)."""
        return self.pick.randrange(-rank, rank)

    def floats(self, shape, span=(-1.0, 1.0), dtype=None, **more):
        """Return the description of a float input with values in ``span``."""
        return {"shape": shape, "low": span[0], "high": span[1], "dtype": dtype or self.dtype, **more}

    def ints(self, shape, low, high, dtype="int32"):
        """Return the description of an integer input with values from ``low`` to ``high`` - 1."""
        return {"shape": shape, "low": low, "high": high, "dtype": dtype}

    def case(self):
        """Return the golden case of this seed."""
        self.dtype = self.pick.choice(FLOATS)
        family = self.pick.choice(FAMILIES)
        result = family(self)
        result.setdefault("params", {})
        result.setdefault("is_train", self.maybe(0.8))
        return result


# ------------------------------------------------------------------------------------------------------- elementwise


def _unary(m):
    op = m.pick.choice(sorted(UNARY))
    if op in WHOLE and m.maybe(0.2):
        return {"op": op, "inputs": [m.ints(m.shape(), 1, 6, m.pick.choice(INTEGERS))]}
    return {"op": op, "inputs": [m.floats(m.shape(), UNARY[op])]}


def _scalar(m):
    op = m.pick.choice(SCALAR)
    scalar = m.pick.choice((0.5, 1.5, 2.0, 3.0, 2.75))
    if m.maybe(0.25) and op not in ("_hypot_scalar", "smooth_l1"):
        spec = m.ints(m.shape(), 1, 7, m.pick.choice(INTEGERS))
    else:
        spec = m.floats(m.shape(), POSITIVE)
    return {"op": op, "inputs": [spec], "params": {"scalar": scalar}}


def _elementwise(m):
    short = m.pick.choice(BINARY + COMPARE)
    op = "elemwise_" + short if short in ("add", "sub", "mul", "div") else "_" + short
    shape = m.shape()
    if m.maybe(0.25) and short != "hypot":
        dtype = m.pick.choice(INTEGERS)
        return {"op": op, "inputs": [m.ints(shape, 1, 9, dtype), m.ints(shape, 1, 4, dtype)]}
    return {"op": op, "inputs": [m.floats(shape, POSITIVE), m.floats(shape, POSITIVE)]}


def _broadcast(m):
    short = m.pick.choice(BINARY + COMPARE)
    shape = m.shape()
    cut = [tuple(1 if m.maybe(0.3) else dim for dim in shape) for _ in range(2)]
    if m.maybe(0.2) and short != "hypot":
        dtype = m.pick.choice(INTEGERS)
        inputs = [m.ints(cut[0], 1, 9, dtype), m.ints(cut[1], 1, 4, dtype)]
    else:
        inputs = [m.floats(s, POSITIVE) for s in cut]
    return {"op": "broadcast_" + short, "inputs": inputs}


def _clip(m):
    low = m.pick.uniform(-2, 0)
    if m.maybe(0.3):
        spec = m.ints(m.shape(), 0, 9, m.pick.choice(INTEGERS))
        bounds = {"a_min": m.pick.choice((-5.0, 0.0, 2.5)), "a_max": m.pick.choice((5.0, 300.0, 3e9))}
        return {"op": "clip", "inputs": [spec], "params": bounds}
    return {"op": "clip", "inputs": [m.floats(m.shape(), WIDE)], "params": {"a_min": low, "a_max": low + 2.2}}


def _where(m):
    shape = m.shape()
    condition = shape if m.maybe() else shape[:1]
    kind = m.pick.choice(("float32", "int32"))
    return {
        "op": "where",
        "inputs": [m.ints(condition, 0, 2, kind), m.floats(shape), m.floats(shape)],
    }


def _cast(m):
    return {
        "op": "Cast",
        "inputs": [m.floats(m.shape(), (0.0, 90.0))],
        "params": {"dtype": m.pick.choice(FLOATS + INTEGERS)},
    }


# ------------------------------------------------------------------------------------------------ reductions, places


def _reduce(m):
    op = m.pick.choice(("sum", "mean", "max", "min", "prod", "nansum", "nanprod", "norm"))
    shape = m.shape()
    axes = tuple(sorted(m.pick.sample(range(len(shape)), m.pick.randint(1, len(shape)))))
    params = {"axis": axes, "keepdims": m.maybe()}
    if m.maybe(0.2):
        params.pop("axis")
    if op == "norm":
        params["ord"] = m.pick.choice((1, 2))
    elif m.maybe(0.2) and "axis" in params and len(axes) < len(shape):
        params["exclude"] = True
    span = (0.5, 1.2) if "prod" in op else (-1.0, 1.0)
    return {"op": op, "inputs": [m.floats(shape, span, distinct=op in ("max", "min"))], "params": params}


def _arg(m):
    shape = m.shape()
    return {
        "op": m.pick.choice(("argmax", "argmin")),
        "inputs": [m.floats(shape, dtype="float32", distinct=True)],
        "params": {"axis": m.axis(len(shape)), "keepdims": m.maybe()},
        "grad": False,
    }


def _order(m):
    shape = m.shape()
    axis = m.axis(len(shape))
    op = m.pick.choice(("sort", "argsort", "topk"))
    params = {"axis": axis, "is_ascend": m.maybe()}
    if op == "topk":
        params.update(k=m.pick.randint(1, shape[axis]), ret_typ=m.pick.choice(("value", "indices", "both", "mask")))
    return {
        "op": op,
        "inputs": [m.floats(shape, dtype=m.pick.choice(("float32", "float64")), distinct=True)],
        "params": params,
        "grad": op == "sort" or params.get("ret_typ") == "value",
    }


def _cumsum(m):
    shape = m.shape()
    params = {} if m.maybe(0.3) else {"axis": m.pick.randrange(len(shape))}
    return {"op": "cumsum", "inputs": [m.floats(shape)], "params": params}


def _transpose(m):
    shape = m.shape()
    order = list(range(len(shape)))
    m.pick.shuffle(order)
    kind = m.pick.choice((None, "int32", "uint8"))
    spec = m.floats(shape) if kind is None else m.ints(shape, 0, 99, kind)
    return {"op": "transpose", "inputs": [spec], "params": {"axes": tuple(order)} if m.maybe(0.8) else {}}


def _shapes(m):
    shape = m.shape(2, 4)
    rank = len(shape)
    axis = m.axis(rank)
    op, params = m.pick.choice((
        ("expand_dims", {"axis": axis}),
        ("SwapAxis", {"dim1": m.pick.randrange(rank), "dim2": m.pick.randrange(rank)}),
        ("reverse", {"axis": (m.pick.randrange(rank),)}),
        ("tile", {"reps": tuple(m.pick.randint(1, 3) for _ in range(m.pick.randint(1, 3)))}),
        ("repeat", {"repeats": m.pick.randint(1, 3), "axis": axis}),
        ("Reshape", {"shape": m.pick.choice(((-1,), (0, -1), (-2,), (-3, -2), (1, 0, -1), (-1, 1)))}),
        ("slice_axis", {"axis": axis, "begin": 0, "end": m.pick.randint(1, shape[axis])}),
        ("SliceChannel", {"axis": axis, "num_outputs": m.pick.choice([n for n in (1, 2, 3) if not shape[axis] % n])}),
        ("L2Normalization", {"mode": "instance"}),
    ))  # fmt: skip
    if op == "Reshape" and params["shape"] == (1, 0, -1) and rank < 2:
        params = {"shape": (-1,)}
    return {"op": op, "inputs": [m.floats(shape)], "params": params}


def _slice(m):
    shape = m.shape()
    begin = tuple(m.pick.randrange(dim) for dim in shape)
    end = tuple(m.pick.randint(b + 1, dim) for b, dim in zip(begin, shape))  # noqa: B905
    return {"op": "slice", "inputs": [m.floats(shape)], "params": {"begin": begin, "end": end}}


def _join(m):
    shape = m.shape(2, 4, 200)
    count = m.pick.randint(1, 4)
    if m.maybe(0.4):
        return {
            "op": "stack",
            "inputs": [m.floats(shape) for _ in range(count)],
            "params": {"axis": m.pick.randrange(-len(shape), len(shape) + 1)},
        }
    axis = m.pick.randrange(len(shape))
    parts = [(*shape[:axis], m.pick.choice((1, 2, 3, 5)), *shape[axis + 1 :]) for _ in range(count)]
    return {"op": "Concat", "inputs": [m.floats(part) for part in parts], "params": {"dim": axis}}


def _add_n(m):
    shape = m.shape()
    return {"op": "add_n", "inputs": [m.floats(shape) for _ in range(m.pick.randint(1, 6))]}


def _pad(m):
    shape = tuple(m.pick.choice((2, 3, 4, 5)) for _ in range(4))
    width = (0, 0, 0, 0, *(m.pick.randint(0, 1) for _ in range(4)))
    mode = m.pick.choice(("constant", "edge", "reflect"))
    return {"op": "Pad", "inputs": [m.floats(shape)], "params": {"mode": mode, "pad_width": width}}


def _dot(m):
    a, b, c = m.dim(), m.dim(), m.dim()
    left, right = m.maybe(), m.maybe()
    lead = (m.dim(),) if m.maybe() else ()
    shapes = [(*lead, b, a) if left else (*lead, a, b), (*lead, c, b) if right else (*lead, b, c)]
    kind = m.pick.choice(("float32", "float64"))
    return {
        "op": "batch_dot" if lead else "dot",
        "inputs": [m.floats(s, dtype=kind) for s in shapes],
        "params": {"transpose_a": left, "transpose_b": right},
    }


def _take(m):
    shape = m.shape(1, 3)
    axis = m.pick.randrange(len(shape))
    index = m.ints(m.shape(1, 2, 30), -2, shape[axis] + 2, m.pick.choice(("int32", "float32")))
    return {
        "op": "take",
        "inputs": [m.floats(shape), index],
        "params": {"axis": axis, "mode": m.pick.choice(("clip", "wrap"))},
        "grad": (0,),
    }


def _pick(m):
    shape = m.shape(2, 3)
    axis = m.axis(len(shape))
    remaining = list(shape)
    size = remaining.pop(axis)
    return {
        "op": "pick",
        "inputs": [m.floats(shape), m.ints(tuple(remaining), 0, size)],
        "params": {"axis": axis, "keepdims": m.maybe()},
        "grad": (0,),
    }


def _one_hot(m):
    depth = m.pick.randint(1, 9)
    return {
        "op": "one_hot",
        "inputs": [m.ints(m.shape(1, 2, 40), 0, depth)],
        "params": {"depth": depth, "on_value": 2.0, "dtype": m.pick.choice(("float32", "int32", "float64"))},
        "grad": False,
    }


def _blocks(m):
    side = m.pick.choice((2, 3))
    batch, channels, high, wide = (m.pick.choice((1, 2, 3)) for _ in range(4))
    if m.maybe():
        return {"op": "depth_to_space", "inputs": [m.floats((batch, channels * side * side, high, wide))],
                "params": {"block_size": side}}  # fmt: skip
    return {"op": "space_to_depth", "inputs": [m.floats((batch, channels, high * side, wide * side))],
            "params": {"block_size": side}}  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ layers


def _dense(m):
    shape = m.shape(2, 4)
    flatten = m.maybe(0.7)
    width = 1
    for dim in shape[1:] if flatten else shape[-1:]:
        width *= dim
    hidden = m.dim()
    bias = m.maybe(0.7)
    kind = m.pick.choice(("float32", "float64"))
    return {
        "op": "FullyConnected",
        "inputs": [m.floats(s, dtype=kind) for s in (shape, (hidden, width), *([(hidden,)] if bias else []))],
        "params": {"num_hidden": hidden, "no_bias": not bias, "flatten": flatten},
    }


def _window(m, rank):
    """Return (kernel, stride, pad, dilate, size) of each spatial axis; at least one window fits."""
    sides = []
    for _ in range(rank):
        kernel, stride, dilate = m.pick.choice((1, 2, 3, 4)), m.pick.choice((1, 1, 2, 3)), m.pick.choice((1, 1, 2))
        pad = m.pick.randint(0, kernel // 2)
        extent = dilate * (kernel - 1) + 1
        sides.append((kernel, stride, pad, dilate, max(1, extent - 2 * pad) + m.pick.randint(0, 6)))
    return tuple(zip(*sides))  # noqa: B905


def _convolution(m):
    rank = m.pick.choice((1, 2, 2, 2, 3))
    kernel, stride, pad, dilate, size = _window(m, rank)
    group = m.pick.choice((1, 1, 2, 3))
    channels, filters = group * m.pick.choice((1, 2, 3)), group * m.pick.choice((1, 2, 3))
    bias = m.maybe()
    kind = m.pick.choice(("float32", "float64")) if rank != 1 else "float32"
    data = (m.pick.choice((1, 2, 3)), channels, *size)
    shapes = [data, (filters, channels // group, *kernel), *([(filters,)] if bias else [])]
    return {
        "op": "Convolution",
        "inputs": [m.floats(s, dtype=kind) for s in shapes],
        "params": {"kernel": kernel, "stride": stride, "pad": pad, "dilate": dilate, "num_filter": filters,
                   "num_group": group, "no_bias": not bias},
    }  # fmt: skip


def _deconvolution(m):
    kernel, stride, pad, _, _ = _window(m, 2)
    group = m.pick.choice((1, 1, 2))
    channels, filters = group * m.pick.choice((1, 2, 3)), m.pick.choice((1, 2, 3))
    size = tuple(m.pick.randint(2, 5) for _ in range(2))
    bias = m.maybe()
    shapes = [(2, channels, *size), (channels, filters, *kernel), *([(filters * group,)] if bias else [])]
    return {
        "op": "Deconvolution",
        "inputs": [m.floats(s, dtype="float32") for s in shapes],
        "params": {"kernel": kernel, "stride": stride, "pad": pad, "num_filter": filters * group, "num_group": group,
                   "no_bias": not bias},
    }  # fmt: skip


def _pooling(m):
    rank = m.pick.choice((1, 2, 2, 3))
    kernel, stride, pad, _, size = _window(m, rank)
    size = tuple(max(k, s) for k, s in zip(kernel, size))  # noqa: B905
    kind = m.pick.choice(("max", "avg", "sum"))
    params = {"kernel": kernel, "stride": stride, "pad": pad, "pool_type": kind,
              "pooling_convention": m.pick.choice(("valid", "valid", "full"))}  # fmt: skip
    if kind == "avg":  # oneDNN divides differently in windows beyond the padding, and 0 by 0 outside of it
        params.update(count_include_pad=m.maybe(), pooling_convention="valid")
    if m.maybe(0.15):
        params = {"kernel": (1,) * rank, "global_pool": True, "pool_type": kind}
    data = (m.pick.choice((1, 2)), m.pick.choice((1, 3)), *size)
    return {"op": "Pooling", "inputs": [m.floats(data, dtype="float32", distinct=True)], "params": params}


def _norms(m):
    shape = (m.pick.choice((2, 3, 5)), m.pick.choice((1, 2, 4)), *m.shape(1, 2, 60))
    kind = m.pick.choice(("BatchNorm", "LayerNorm", "InstanceNorm", "LRN", "L2Normalization"))
    more = {"rtol": 2e-3, "atol": 2e-3}
    if kind == "LRN":
        shape = (2, m.pick.choice((3, 5, 7)), 3, 4)
        return {"op": kind, "inputs": [m.floats(shape, dtype="float32")],
                "params": {"nsize": m.pick.choice((1, 3, 5)), "alpha": 0.3, "knorm": 1.5}, **more}  # fmt: skip
    if kind == "L2Normalization":
        return {"op": kind, "inputs": [m.floats(shape, dtype="float32")], "params": {"mode": "channel"}, **more}
    channels = shape[-1] if kind == "LayerNorm" else shape[1]
    inputs = [m.floats(shape, dtype="float32"), m.floats((channels,), POSITIVE, dtype="float32"),
              m.floats((channels,), dtype="float32")]  # fmt: skip
    params = {"eps": 0.01}
    if kind == "BatchNorm":
        inputs += [m.floats((channels,), dtype="float32"), m.floats((channels,), POSITIVE, dtype="float32")]
        params.update(fix_gamma=m.maybe(), use_global_stats=m.maybe(0.2))
    return {"op": kind, "inputs": inputs, "params": params, **more}


def _softmax(m):
    shape = m.shape()
    op = m.pick.choice(("softmax", "log_softmax", "softmin"))
    params = {"axis": m.axis(len(shape))}
    if m.maybe(0.3):
        params["temperature"] = 2.0
    return {"op": op, "inputs": [m.floats(shape, WIDE, dtype=m.pick.choice(("float32", "float64")))], "params": params}


def _losses(m):
    op = m.pick.choice(("SoftmaxOutput", "LinearRegressionOutput", "LogisticRegressionOutput", "MAERegressionOutput"))
    shape = m.shape(2, 2)
    if op == "SoftmaxOutput":
        params = {
            "normalization": m.pick.choice(("null", "batch", "valid")),
            "use_ignore": m.maybe(),
            "ignore_label": 0,
        }
        return {"op": op, "inputs": [m.floats(shape, dtype="float32"), m.ints(shape[:1], 0, shape[1], "float32")],
                "params": params, "grad": (0,)}  # fmt: skip
    return {"op": op, "inputs": [m.floats(shape, dtype="float32"), m.floats(shape, dtype="float32")],
            "params": {"grad_scale": 0.5}, "grad": (0,)}  # fmt: skip


def _activation(m):
    kind = m.pick.choice(("relu", "sigmoid", "tanh", "softrelu", "softsign"))
    return {"op": "Activation", "inputs": [m.floats(m.shape(), WIDE)], "params": {"act_type": kind}}


def _leaky(m):
    kind = m.pick.choice(("leaky", "elu", "selu", "gelu", "prelu"))
    shape = m.shape(2, 4)
    params = {"act_type": kind}
    if kind in ("leaky", "elu"):
        params["slope"] = m.pick.choice((0.1, 0.25, 1.5))
    more = {"rtol": 1e-3, "atol": 1e-3} if kind == "gelu" else {}
    if kind == "selu":
        more["grad"] = False  # MXNet computes the slope from the data instead of the output
    kind_of = "float32" if kind in ("selu", "gelu") else m.pick.choice(("float32", "float64"))
    gamma = [m.floats((shape[1],), POSITIVE, dtype=kind_of)] if kind == "prelu" else []
    return {"op": "LeakyReLU", "inputs": [m.floats(shape, WIDE, dtype=kind_of), *gamma], "params": params, **more}


def _embedding(m):
    rows, width = m.pick.randint(1, 9), m.dim()
    return {
        "op": "Embedding",
        "inputs": [m.ints(m.shape(1, 2, 60), 0, rows, m.pick.choice(("float32", "int32"))), m.floats((rows, width))],
        "params": {"input_dim": rows, "output_dim": width},
        "grad": (1,),
    }


def _rnn(m):
    mode = m.pick.choice(("rnn_relu", "rnn_tanh", "lstm", "gru"))
    steps, batch, inputs, size = (m.pick.choice((1, 2, 3, 4)) for _ in range(4))
    layers, sides = m.pick.choice((1, 1, 2)), m.pick.choice((1, 1, 2))
    gates = {"lstm": 4, "gru": 3}.get(mode, 1)
    count = sum(sides * gates * size * ((inputs if k == 0 else sides * size) + size + 2) for k in range(layers))
    state = (layers * sides, batch, size)
    shapes = [(steps, batch, inputs), (count,), state, *([state] if mode == "lstm" else [])]
    return {
        "op": "RNN",
        "inputs": [m.floats(s, dtype="float32") for s in shapes],
        "names": ["data", "parameters", "state", *(["state_cell"] if mode == "lstm" else [])],
        "params": {"mode": mode, "num_layers": layers, "state_size": size, "bidirectional": sides == 2,
                   "state_outputs": m.maybe()},
        "is_train": True,
    }  # fmt: skip


def _sequence(m):
    op = m.pick.choice(("SequenceMask", "SequenceLast", "SequenceReverse"))
    shape = (m.pick.randint(1, 5), m.pick.randint(1, 4), *m.shape(1, 1))
    lengths = m.maybe(0.7)
    return {
        "op": op,
        "inputs": [m.floats(shape), *([m.ints((shape[1],), 1, shape[0] + 1, m.dtype)] if lengths else [])],
        "params": {"use_sequence_length": lengths},
        "grad": (0,),
    }


def _linalg(m):
    n, lead = m.pick.choice((1, 2, 3, 5)), (m.pick.choice((1, 2)),) if m.maybe() else ()
    kind = m.pick.choice(("float32", "float64"))
    op = m.pick.choice(("linalg_gelqf", "linalg_syrk", "linalg_trmm", "linalg_sumlogdiag", "linalg_extractdiag"))
    more = {"rtol": 1e-3, "atol": 1e-3}
    if op == "linalg_gelqf":
        return {"op": op, "inputs": [m.floats((*lead, n, n + m.pick.choice((0, 1, 3))), dtype=kind)], **more}
    spec = m.floats((*lead, n, n), (0.5, 2.0), dtype=kind)
    if op == "linalg_trmm":
        right, another = m.maybe(), m.dim()
        second = (*lead, another, n) if right else (*lead, n, another)
        params = {"rightside": right, "transpose": m.maybe(), "lower": m.maybe(), "alpha": 1.5}
        return {"op": op, "inputs": [spec, m.floats(second, dtype=kind)], "params": params}
    params = {"transpose": m.maybe(), "alpha": 0.5} if op == "linalg_syrk" else {}
    return {"op": op, "inputs": [spec], "params": params, **more}


FAMILIES = (
    _unary, _unary, _scalar, _elementwise, _broadcast, _broadcast, _clip, _where, _cast, _reduce, _reduce, _arg, _order,
    _cumsum, _transpose, _shapes, _shapes, _slice, _join, _add_n, _pad, _dot, _take, _pick, _one_hot, _blocks, _dense,
    _convolution, _deconvolution, _pooling, _norms, _softmax, _losses, _activation, _leaky, _embedding, _rnn, _sequence,
    _linalg,
)  # fmt: skip


def random_case(seed):
    """Return the golden case of a seed; README.md describes its keys."""
    return {"name": f"seed {seed}", **Maker(seed).case()}
