"""Golden cases of the neural-network operators (pure data)."""

CASES = []


def _add(op, *inputs, **kwargs):
    CASES.append({"op": op, "inputs": list(inputs), **kwargs})


def _distinct(*shape):
    return {"shape": shape, "distinct": True}


def _labels(*shape, low=0, high=3):
    return {"shape": shape, "dtype": "int32", "low": low, "high": high}


def _classes(*rows):
    return {"value": list(rows), "dtype": "float32"}


# ------------------------------------------------------------------------------------------ FullyConnected
_add("FullyConnected", (3, 4), (5, 4), (5,), params={"num_hidden": 5})
_add("FullyConnected", (3, 2, 4), (5, 8), params={"num_hidden": 5, "no_bias": True})
_add("FullyConnected", (3, 2, 4), (5, 4), (5,), params={"num_hidden": 5, "flatten": False})

# ------------------------------------------------------------------------------------------ Activation, LeakyReLU
WIDE = {"shape": (3, 4, 2), "low": -4.0, "high": 4.0}
for _type in ("relu", "sigmoid", "tanh", "softrelu", "softsign"):
    _add("Activation", WIDE, params={"act_type": _type})
for _type in ("leaky", "elu", "gelu"):
    _add("LeakyReLU", WIDE, params={"act_type": _type})
# MXNet computes the gradient of selu below 0 wrongly, from the data instead of the output.
_add("LeakyReLU", WIDE, params={"act_type": "selu"}, grad=False)
_add("LeakyReLU", WIDE, params={"act_type": "leaky", "slope": 0.1})
_add("LeakyReLU", WIDE, params={"act_type": "elu", "slope": 1.5})
_add("LeakyReLU", WIDE, (4,), params={"act_type": "prelu"})
_add("LeakyReLU", WIDE, (1,), params={"act_type": "prelu"})
_add("LeakyReLU", (3, 4), (3, 4), params={"act_type": "prelu"}, name="prelu, gamma like data")
_add("LeakyReLU", (3, 4), (1, 4), params={"act_type": "prelu"})
# No rrelu: its second output is memory that MXNet has not written when it is not training.

# ------------------------------------------------------------------------------------------ Convolution
_add("Convolution", (2, 3, 5, 6), (4, 3, 3, 3), (4,), params={"kernel": (3, 3), "num_filter": 4})
_add("Convolution", (2, 3, 5, 6), (4, 3, 3, 3), (4,), params={"kernel": (3, 3), "num_filter": 4, "pad": (1, 1)})
_add(
    "Convolution",
    (2, 4, 7, 6),
    (6, 2, 3, 2),
    params={
        "kernel": (3, 2),
        "num_filter": 6,
        "num_group": 2,
        "stride": (2, 1),
        "pad": (1, 2),
        "dilate": (2, 1),
        "no_bias": True,
    },
)
_add("Convolution", (2, 3, 5, 4), (4, 3, 1, 1), (4,), params={"kernel": (1, 1), "num_filter": 4})
_add("Convolution", (2, 3, 5, 4), (4, 3, 1, 1), (4,), params={"kernel": (1, 1), "num_filter": 4, "stride": (2, 2)})
_add("Convolution", (2, 4, 5, 5), (4, 1, 3, 3), (4,), params={"kernel": (3, 3), "num_filter": 4, "num_group": 4})
_add("Convolution", (2, 3, 8), (4, 3, 3), (4,), params={"kernel": (3,), "num_filter": 4, "stride": (2,), "pad": (1,)})
_add(
    "Convolution",
    (1, 2, 4, 5, 3),
    (2, 2, 2, 3, 2),
    (2,),
    params={"kernel": (2, 3, 2), "num_filter": 2, "pad": (1, 1, 0), "stride": (2, 1, 1)},
)

# ------------------------------------------------------------------------------------------ Deconvolution
_add("Deconvolution", (2, 4, 3, 3), (4, 2, 3, 2), params={"kernel": (3, 2), "num_filter": 2})
_add(
    "Deconvolution",
    (2, 4, 3, 3),
    (4, 1, 3, 2),
    (2,),
    params={
        "kernel": (3, 2),
        "num_filter": 2,
        "num_group": 2,
        "stride": (2, 3),
        "pad": (1, 0),
        "adj": (1, 2),
        "no_bias": False,
    },
)
# No target_shape: MXNet 1.9.1 cannot run it with oneDNN.
_add("Deconvolution", (2, 3, 5), (3, 2, 3), params={"kernel": (3,), "num_filter": 2, "stride": (2,), "dilate": (2,)})

# ------------------------------------------------------------------------------------------ Pooling
for _type in ("max", "avg", "sum"):
    for _window in (
        {"kernel": (2, 2), "stride": (2, 2)},
        {"kernel": (3, 2), "stride": (2, 1), "pad": (1, 1)},
        {"kernel": (3, 3), "stride": (2, 2), "pooling_convention": "full"},
        {"kernel": (3, 3), "stride": (2, 2), "pad": (1, 1), "pooling_convention": "full"},
        {"global_pool": True, "kernel": (2, 2)},
    ):
        _add("Pooling", _distinct(2, 3, 5, 6), params={"pool_type": _type, **_window})
    _add("Pooling", _distinct(2, 3, 7), params={"pool_type": _type, "kernel": (3,), "stride": (2,), "pad": (1,)})
    _add(
        "Pooling",
        _distinct(1, 2, 4, 3, 4),
        params={"pool_type": _type, "kernel": (3, 2, 2), "stride": (2, 1, 2), "pad": (1, 0, 1)},
    )
_add(
    "Pooling",
    (2, 3, 5, 6),
    params={"pool_type": "avg", "kernel": (3, 3), "stride": (2, 2), "pad": (1, 1), "count_include_pad": False},
)
_add("Pooling", _distinct(1, 2, 3, 4), params={"pool_type": "sum", "kernel": (2, 2), "pad": (2, 3)})
_add("Pooling", {"value": [[[1.0, 1, 0, 1, 1, 1]]]}, params={"kernel": (3,)}, name="the first of equal maxima")
for _p in (1, 2, 3):
    _add(
        "Pooling",
        {"shape": (2, 2, 4, 5), "low": 0.1, "high": 1.0},
        params={"pool_type": "lp", "p_value": _p, "kernel": (2, 3), "stride": (2, 1)},
    )

# ------------------------------------------------------------------------------------------ BatchNorm
_VAR = {"shape": (3,), "low": 0.5, "high": 2.0}
for _case in (
    {"fix_gamma": False},
    {"fix_gamma": False, "eps": 0.1, "momentum": 0.3},
    {"fix_gamma": True},
    {"fix_gamma": False, "use_global_stats": True},
):
    for _train in (True, False):
        # MXNet updates the moving statistics in the backward pass, so gradients are requested.
        _add(
            "BatchNorm",
            (4, 3, 2, 3),
            (3,),
            (3,),
            (3,),
            _VAR,
            params=_case,
            is_train=_train,
            grad=_train,
        )
_add("BatchNorm", (4, 2, 3), (3,), (3,), (3,), _VAR, params={"fix_gamma": False, "axis": -1})
_add("BatchNorm", (5, 3), (3,), (3,), (3,), _VAR, params={"fix_gamma": False})
_add("BatchNorm", (4, 3, 2, 3), (3,), (3,), (3,), _VAR, params={"output_mean_var": True})

# ------------------------------------------------------------------------------------------ other normalisations
for _axis, _size in ((-1, 4), (1, 3)):
    _add("LayerNorm", (2, 3, 4), (_size,), (_size,), params={"axis": _axis})
_add("LayerNorm", (2, 3, 4), (4,), (4,), params={"eps": 0.1, "output_mean_var": True}, grad=False)
_add("InstanceNorm", (2, 3, 4, 2), (3,), (3,))
_add("InstanceNorm", (2, 3, 5), (3,), (3,), params={"eps": 0.1})
for _mode in ("instance", "channel", "spatial"):
    _add("L2Normalization", (2, 3, 2, 2), params={"mode": _mode})
    _add("L2Normalization", (2, 3, 2, 2), params={"mode": _mode, "eps": 0.5})
for _size in (1, 2, 3, 4, 5):
    _add("LRN", (2, 6, 2, 3), params={"nsize": _size, "alpha": 0.5, "beta": 0.6, "knorm": 1.5})
_add("LRN", (1, 4, 2, 2), params={"nsize": 3})

# ------------------------------------------------------------------------------------------ softmax
for _op in ("softmax", "log_softmax", "softmin"):
    _add(_op, (3, 4, 2))
    _add(_op, (3, 4, 2), params={"axis": 1, "temperature": 2.0})
_add("softmax", (3, 4), {"value": [4, 1, 2], "dtype": "int32"}, params={"use_length": True}, grad=[0])
_add(
    "softmax",
    (2, 4, 3),
    {"value": [[4, 1, 2], [3, 3, 1]], "dtype": "int32"},
    params={"use_length": True, "axis": 1, "temperature": 0.5},
    grad=[0],
)
_add("SoftmaxActivation", (4, 3))
_add("SoftmaxActivation", (2, 3, 2, 2), params={"mode": "channel"})
# MXNet's backward pass of mode=instance takes other axes than its forward pass when there are more than two.
_add("SoftmaxActivation", (2, 3, 2, 2), params={"mode": "instance"}, grad=False)

_ROW = _classes(0, 1, 2, -1)
for _case in (
    {},
    {"normalization": "batch"},
    {"normalization": "valid"},
    {"use_ignore": True},
    {"use_ignore": True, "normalization": "valid", "ignore_label": 1},
    {"smooth_alpha": 0.3},
    {"smooth_alpha": 0.3, "use_ignore": True},
    {"grad_scale": 3.0},
):
    _add("SoftmaxOutput", (4, 3), _ROW, params=_case, grad=[0])
_add("SoftmaxOutput", (4, 3), _ROW, is_train=False, grad=False)
_PAIRS = _classes([0, 1], [2, -1], [1, 1], [0, -1])
for _case in (
    {},
    {"normalization": "batch"},
    {"normalization": "valid"},
    {"use_ignore": True, "normalization": "valid"},
    {"use_ignore": True, "normalization": "batch"},
    {"use_ignore": True, "grad_scale": 0.5},
    {"smooth_alpha": 0.2},
):
    _add("SoftmaxOutput", (4, 3, 2), _PAIRS, params={"multi_output": True, **_case}, grad=[0])
for _case in ({}, {"normalization": "batch"}, {"normalization": "valid", "use_ignore": True}):
    _add("SoftmaxOutput", (4, 2, 3), _PAIRS, params={"preserve_shape": True, **_case}, grad=[0])
_add("SoftmaxOutput", (4, 2, 3), _PAIRS, grad=[0])
_add("SoftmaxOutput", (4, 2, 3), _PAIRS, params={"normalization": "batch"}, grad=[0])
_add("SoftmaxOutput", (4, 3), {"shape": (4, 3), "low": 0.0, "high": 1.0}, params={"grad_scale": 2.0}, grad=[0])
_add("SoftmaxOutput", (4, 2, 3), _PAIRS, params={"normalization": "valid"}, grad=[0])
# No out_grad: MXNet 1.9.1 multiplies by the output instead of the incoming gradient.

# ------------------------------------------------------------------------------------------ losses
for _op in ("LinearRegressionOutput", "LogisticRegressionOutput", "MAERegressionOutput"):
    _add(_op, (4, 3), (4, 3), grad=[0])
    _add(_op, (4, 3, 2), (4, 3, 2), params={"grad_scale": 2.0}, grad=[0])
    _add(_op, (4, 1), (4,), grad=[0])
for _case in ({}, {"grad_scale": 2.0, "normalization": "batch"}, {"normalization": "valid", "valid_thresh": 0.1}):
    _add("MakeLoss", (4, 3), params=_case)
_add("make_loss", (4, 3))
_add("BlockGrad", (4, 3))

# ------------------------------------------------------------------------------------------ Embedding, Dropout
_add("Embedding", {"value": [[0.0, 4, 2], [2, -1, 9]]}, (5, 3), params={"input_dim": 5, "output_dim": 3}, grad=[1])
_add("Dropout", (4, 3), is_train=False, grad=False)
_add("Dropout", (4, 3), params={"p": 0.0})
