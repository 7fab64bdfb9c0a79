"""Small calls of every neural-network operator in every mode, for tests that apply to all of them.

A case is (operator, inputs, parameters). Values avoid kinks (ties, the point 0 of relu), which have no derivative.
"""

import numpy as np


def uniform(*shape, low=-1.0, high=1.0, seed=0):
    """Return random float64 values of the given shape, at least 0.05 away from 0."""
    x = np.random.RandomState(seed + 7 * sum(shape)).uniform(low, high, shape)
    return x + np.where(np.abs(x) < 0.05, 0.1, 0.0)


def distinct(*shape, seed=0):
    """Return random float64 values in (0, 1) of the given shape, without near ties."""
    size = int(np.prod(shape))
    return ((np.random.RandomState(seed).permutation(size) + 0.5) / size).reshape(shape)


def _convolution(data, filters, kernel, *, bias=True, group=1, **params):
    weight = (filters, data[1] // group, *kernel)
    params = {"kernel": kernel, "num_filter": filters, "num_group": group, **params}
    if not bias:
        params["no_bias"] = True
    return "Convolution", [uniform(*data), uniform(*weight), *([uniform(filters)] if bias else [])], params


def _deconvolution(data, filters, kernel, *, bias=True, group=1, **params):
    weight = (data[1], filters // group, *kernel)
    params = {"kernel": kernel, "num_filter": filters, "num_group": group, "no_bias": not bias, **params}
    return "Deconvolution", [uniform(*data), uniform(*weight), *([uniform(filters)] if bias else [])], params


FULLY_CONNECTED = [
    ("FullyConnected", [uniform(3, 4), uniform(5, 4), uniform(5)], {"num_hidden": 5}),
    ("FullyConnected", [uniform(3, 2, 4), uniform(5, 8)], {"num_hidden": 5, "no_bias": True}),
    ("FullyConnected", [uniform(3, 2, 4), uniform(5, 4), uniform(5)], {"num_hidden": 5, "flatten": False}),
    ("FullyConnected", [uniform(3), uniform(5, 1), uniform(5)], {"num_hidden": 5}),
    ("FullyConnected", [uniform(3, 4), uniform(4, 4), uniform(4)], {"num_hidden": 4}),
    ("FullyConnected", [uniform(1, 1), uniform(1, 1), uniform(1)], {"num_hidden": 1}),
]
CONVOLUTION = [
    _convolution((2, 3, 5, 4), 4, (3, 3)),
    _convolution((2, 3, 5, 4), 4, (3, 3), pad=(1, 1)),
    _convolution((2, 3, 5, 4), 4, (3, 3), pad=(1, 1), bias=False),
    _convolution((3, 3, 7, 6), 4, (3, 2), stride=(2, 3), pad=(2, 0)),
    _convolution((2, 4, 7, 6), 6, (3, 2), group=2, stride=(2, 1), pad=(1, 2), dilate=(2, 1), bias=False),
    _convolution((2, 4, 4, 4), 4, (3, 3), group=4, pad=(1, 1)),
    _convolution((2, 3, 5, 4), 4, (1, 1)),
    _convolution((2, 4, 3, 4), 4, (1, 1), group=2, bias=False),
    _convolution((2, 3, 5, 4), 4, (1, 1), stride=(2, 2)),
    _convolution((2, 3, 3, 4), 4, (1, 1), pad=(1, 0)),
    _convolution((2, 3, 5, 4), 2, (5, 4)),
    _convolution((2, 3, 8), 4, (3,), stride=(2,), pad=(1,)),
    _convolution((2, 3, 8), 4, (3,), dilate=(3,)),
    _convolution((2, 2, 4, 3, 3), 2, (2, 3, 2), pad=(1, 1, 0), stride=(2, 1, 1)),
]
DECONVOLUTION = [
    _deconvolution((2, 4, 3, 3), 2, (3, 2)),
    _deconvolution((2, 4, 3, 3), 2, (3, 2), group=2, stride=(2, 3), pad=(1, 0), adj=(1, 2), dilate=(1, 2)),
    _deconvolution((2, 4, 3, 3), 2, (4, 4), stride=(2, 2), target_shape=(6, 5), bias=False),
    _deconvolution((2, 3, 3, 2), 2, (1, 1)),
    _deconvolution((2, 3, 5), 2, (3,), stride=(2,), dilate=(2,), bias=False),
]
POOLING = []
for _kind in ("max", "avg", "sum", "lp"):
    for _p in (1, 2, 3) if _kind == "lp" else (None,):
        _params = {"pool_type": _kind, "p_value": _p}
        for _window in (
            {"kernel": (2, 2), "stride": (2, 2)},
            {"kernel": (3, 2), "stride": (2, 1), "pad": (1, 1)},
            {"kernel": (3, 3), "stride": (2, 2), "pooling_convention": "full"},
            {"kernel": (3, 3), "stride": (2, 2), "pad": (1, 1), "count_include_pad": False},
            {"kernel": (2, 2), "stride": (3, 3), "pooling_convention": "same"},
            {"global_pool": True},
        ):
            POOLING.append(("Pooling", [distinct(2, 3, 5, 6)], {**_params, **_window}))
        POOLING.append(("Pooling", [distinct(2, 3, 7)], {**_params, "kernel": (3,), "stride": (2,), "pad": (1,)}))
        POOLING.append(
            (
                "Pooling",
                [distinct(2, 2, 4, 3, 4)],
                {**_params, "kernel": (3, 2, 2), "stride": (2, 1, 2), "pad": (1, 0, 1)},
            )
        )


def _batch_norm(shape, axis, **params):
    channels = shape[axis]
    vectors = [uniform(channels, seed=k) for k in range(3)]
    return (
        "BatchNorm",
        [uniform(*shape), *vectors, uniform(channels, low=0.5, high=2.0)],
        {"axis": axis, "eps": 0.01, **params},
    )


BATCH_NORM = [
    _batch_norm(shape, axis, **params)
    for shape, axis in (((4, 3, 2, 2), 1), ((4, 2, 3), -1), ((4, 3), 1), ((3, 2, 4), 0))
    for params in ({"fix_gamma": False}, {}, {"fix_gamma": False, "use_global_stats": True})
]


def _sync_batch_norm(*shape, **params):
    _, arrays, _ = _batch_norm(shape, 1)
    return SYNC, arrays, {"key": "bn", "eps": 0.01, **params}


SYNC = "_contrib_SyncBatchNorm"
SYNC_BATCH_NORM = [
    _sync_batch_norm(4, 3, 2, 2, fix_gamma=False),
    _sync_batch_norm(4, 3, ndev=2),
    _sync_batch_norm(2, 3, 4, fix_gamma=False, use_global_stats=True),
    _sync_batch_norm(4, 3, 8, 8, fix_gamma=False),
]
NORMS = [
    *(("LayerNorm", [uniform(2, 3, 4), uniform(n), uniform(n)], {"axis": a}) for a, n in ((-1, 4), (1, 3), (0, 2))),
    ("LayerNorm", [uniform(3, 4), uniform(4), uniform(4)], {"eps": 0.1}),
    ("InstanceNorm", [uniform(2, 3, 4, 2), uniform(3), uniform(3)], {}),
    ("InstanceNorm", [uniform(2, 3, 5), uniform(3), uniform(3)], {"eps": 0.1}),
    *(
        ("L2Normalization", [uniform(3, 3, 4)], {"mode": mode, "eps": eps})
        for mode, eps in (("instance", 1e-10), ("channel", 0.3), ("spatial", 0.1))
    ),
    *(("LRN", [uniform(3, 6, 2, 2)], {"nsize": n, "alpha": 0.5, "knorm": 1.5}) for n in (1, 3, 5, 13)),
]
_WIDE = uniform(3, 4, 2) * 3
ACTIVATION = [
    *(("Activation", [_WIDE], {"act_type": kind}) for kind in ("relu", "sigmoid", "tanh", "softrelu", "softsign")),
    *(("LeakyReLU", [_WIDE], {"act_type": kind}) for kind in ("leaky", "elu", "selu", "gelu", "rrelu")),
    *(("LeakyReLU", [_WIDE], {"act_type": kind, "slope": -0.3}) for kind in ("leaky", "elu")),
    *(("LeakyReLU", [_WIDE], {"act_type": kind, "slope": 0.0}) for kind in ("leaky", "elu")),
    *(("LeakyReLU", [_WIDE, uniform(n)], {"act_type": "prelu"}) for n in (4, 1)),
    ("LeakyReLU", [uniform(4), uniform(4)], {"act_type": "prelu"}),
    *(
        ("LeakyReLU", [uniform(2, 3, 4), uniform(*g, seed=1)], {"act_type": "prelu"})
        for g in ((2, 3, 4), (1, 3, 1), (2, 1, 4), (1, 1, 4), (2, 1, 1))
    ),
]
SOFTMAX = [
    *(
        (name, [uniform(3, 4, 2) * 2], params)
        for name in ("softmax", "softmin", "log_softmax")
        for params in ({}, {"axis": 1, "temperature": 2.0}, {"axis": 0})
    ),
    ("softmax", [uniform(3, 4), np.array([4, 1, 2])], {"use_length": True}),
    ("softmax", [uniform(2, 4, 3), np.array([[4, 1, 2], [3, 3, 1]])], {"use_length": True, "axis": 1}),
    *(("SoftmaxActivation", [uniform(3, 4, 2)], {"mode": mode}) for mode in ("channel", "instance")),
]
RANDOM = [
    ("Dropout", [uniform(3, 4, 2)], {"p": 0.4}),
    ("Dropout", [uniform(3, 4, 2)], {"p": 0.4, "axes": (0, 2)}),
    ("Dropout", [uniform(3, 4, 2)], {"p": 0.0}),
    ("Dropout", [uniform(3, 4, 2)], {"p": 1.0}),
]
EMBEDDING = [
    ("Embedding", [np.array([[0, 4, 2], [2, -1, 9]]), uniform(5, 3)], {"input_dim": 5, "output_dim": 3}),
    ("Embedding", [np.array([1, 1, 1]), uniform(2, 3)], {"input_dim": 2, "output_dim": 3}),
]


def _rnn(mode, layers, both, *, steps=3, batch=2, inputs=3, size=2, project=None, lengths=None, **params):
    gates = {"rnn_relu": 1, "rnn_tanh": 1, "lstm": 4, "gru": 3}[mode]
    sides, units = (2 if both else 1), project or size
    count = sum(gates * size * ((sides * units if k else inputs) + units + 2) for k in range(layers)) * sides
    count += layers * sides * (project or 0) * size
    arrays = [uniform(steps, batch, inputs), uniform(count), uniform(layers * sides, batch, units)]
    if mode == "lstm":
        arrays.append(uniform(layers * sides, batch, size))
    if lengths is not None:
        arrays.append(np.array(lengths))
        params["use_sequence_length"] = True
    if project is not None:
        params["projection_size"] = project
    return "RNN", arrays, {"mode": mode, "num_layers": layers, "state_size": size, "bidirectional": both, **params}


RNN = [
    *(_rnn(mode, 1, False, state_outputs=True) for mode in ("rnn_relu", "rnn_tanh", "lstm", "gru")),
    *(_rnn(mode, 3, True) for mode in ("rnn_tanh", "lstm", "gru")),
    *(_rnn(mode, 2, True, state_outputs=True, p=0.4) for mode in ("lstm", "gru")),
    _rnn("lstm", 2, True, project=1, state_outputs=True),
    _rnn("lstm", 2, False, project=3, lengths=[3, 1], state_outputs=True),
    *(_rnn(mode, 2, True, lengths=[1, 3], state_outputs=True) for mode in ("rnn_relu", "lstm", "gru")),
    _rnn("gru", 1, False, steps=1, batch=1, inputs=1, size=1),
]
_WORDS = np.array([[1, 2, 1], [2, 2, 0]])
CTC = [
    ("CTCLoss", [uniform(6, 2, 4), _WORDS], {}),
    ("CTCLoss", [uniform(4, 2, 3), np.array([[0, 1, -1], [-1, -1, -1]])], {"blank_label": "last"}),
    (
        "CTCLoss",
        [uniform(7, 2, 4), _WORDS, np.array([4, 7]), np.array([3, 2])],
        {"use_data_lengths": True, "use_label_lengths": True},
    ),
    ("CTCLoss", [uniform(3, 2, 3), np.array([[1, 1, 1], [2, 0, 0]])], {}),
]

_ENDS = np.array([4, 1, 3])
SEQUENCES = [
    *((name, [uniform(4, 3, 2)], {}) for name in ("SequenceMask", "SequenceLast", "SequenceReverse")),
    *(
        (name, [uniform(4, 3, 2), _ENDS], {"use_sequence_length": True})
        for name in ("SequenceMask", "SequenceLast", "SequenceReverse")
    ),
    ("SequenceMask", [uniform(4, 3), np.array([9, 0, 2])], {"use_sequence_length": True, "value": 2.5}),
    ("SequenceMask", [uniform(2, 3), np.array([3, 1])], {"use_sequence_length": True, "axis": 1}),
    ("SequenceLast", [uniform(2, 3, 2), np.array([0, 9])], {"use_sequence_length": True, "axis": 1}),
    ("SequenceReverse", [uniform(4, 3), np.array([0, 9, 2])], {"use_sequence_length": True}),
]
GROUPS = [
    *(("GroupNorm", [uniform(2, 6, 3), uniform(n), uniform(n)], {"num_groups": n, "eps": 0.1}) for n in (1, 2, 3, 6)),
]
IMAGES = [
    ("Crop", [uniform(2, 3, 5, 6)], {"h_w": (2, 3), "offset": (3, 1)}),
    ("Crop", [uniform(2, 3, 5, 6), uniform(1, 2, 4, 3)], {"center_crop": True}),
    ("UpSampling", [uniform(2, 3, 2, 4)], {"scale": 3, "sample_type": "nearest"}),
    ("UpSampling", [uniform(1, 2, 4, 6), uniform(1, 3, 2, 3)], {"scale": 2, "sample_type": "nearest"}),
    (
        "UpSampling",
        [uniform(1, 2, 2, 3), uniform(1, 2, 4, 1), uniform(1, 2, 1, 6)],
        {"scale": 2, "sample_type": "nearest", "multi_input_mode": "sum"},
    ),
    *(
        (
            "UpSampling",
            [uniform(2, 2, 2, 3), uniform(2, 1, 2 * n - n % 2, 2 * n - n % 2)],
            {"scale": n, "sample_type": "bilinear", "num_filter": 2},
        )
        for n in (1, 2, 3)
    ),
]
_AFFINE = np.array([[0.9, 0.13, 0.07, -0.27, 0.83, 0.04], [1.2, -0.3, 0.11, 0.17, 1.1, -0.36]])
_REGIONS = np.array([[0, 0, 0, 4.0, 4], [1, 2, 1, 9, 3], [1, 3, 3, 1, 1], [0, 20, 20, 30, 30], [-1, 0, 0, 2, 2]])
SAMPLING = [
    ("ROIPooling", [distinct(2, 3, 5, 6), _REGIONS], {"pooled_size": (2, 2), "spatial_scale": 1.0}),
    ("ROIPooling", [distinct(2, 2, 4, 6), _REGIONS], {"pooled_size": (1, 3), "spatial_scale": 0.5}),
    ("GridGenerator", [_AFFINE], {"transform_type": "affine", "target_shape": (3, 4)}),
    ("GridGenerator", [uniform(2, 2, 3, 4)], {"transform_type": "warp"}),
    ("BilinearSampler", [uniform(2, 3, 4, 5), uniform(2, 2, 3, 2, low=-1.3, high=1.3)], {}),
    ("BilinearSampler", [uniform(1, 1, 4, 4), uniform(1, 2, 1, 5, seed=3)], {}),
    (
        "SpatialTransformer",
        [uniform(2, 3, 4, 5), _AFFINE],
        {"target_shape": (3, 2), "transform_type": "affine", "sampler_type": "bilinear"},
    ),
]
CROSS_ENTROPY = [("softmax_cross_entropy", [uniform(4, 3), np.array([0, 2, 1, 1], "float64")], {})]

WINDOWS = [
    ("Correlation", [uniform(2, 2, 4, 5), uniform(2, 2, 4, 5, seed=1)], {"pad_size": 1}),
    ("Correlation", [uniform(1, 2, 4, 5), uniform(1, 2, 4, 5, seed=1)], {"pad_size": 1, "is_multiply": False}),
    (
        "Correlation",
        [uniform(1, 2, 5, 6), uniform(1, 2, 5, 6, seed=1)],
        {"kernel_size": 3, "max_displacement": 2, "stride1": 2, "stride2": 2, "pad_size": 3},
    ),
    ("im2col", [uniform(2, 2, 4, 5)], {"kernel": (3, 2), "stride": (2, 1), "pad": (1, 1)}),
    ("im2col", [uniform(2, 2, 7)], {"kernel": (2,), "dilate": (3,)}),
    ("col2im", [uniform(2, 12, 12)], {"kernel": (3, 2), "stride": (2, 1), "pad": (1, 1), "output_size": (4, 5)}),
]
ATTENTION = [
    ("_contrib_interleaved_matmul_selfatt_qk", [uniform(3, 2, 12)], {"heads": 2}),
    ("_contrib_interleaved_matmul_selfatt_valatt", [uniform(3, 2, 12), uniform(4, 3, 3)], {"heads": 2}),
    ("_contrib_interleaved_matmul_encdec_qk", [uniform(3, 2, 4), uniform(5, 2, 8)], {"heads": 2}),
    ("_contrib_interleaved_matmul_encdec_valatt", [uniform(5, 2, 8), uniform(4, 3, 5)], {"heads": 2}),
    ("_contrib_div_sqrt_dim", [uniform(3, 5)], {}),
]
RESIZE = [
    *(
        ("_contrib_BilinearResize2D", [uniform(2, 2, 3, 4)], {"height": h, "width": w, "align_corners": corners})
        for h, w in ((5, 7), (2, 1), (3, 4))
        for corners in (True, False)
    ),
    ("_contrib_BilinearResize2D", [uniform(1, 2, 3, 4)], {"mode": "to_even_up"}),
    ("_contrib_BilinearResize2D", [uniform(1, 2, 3, 4), np.zeros((1, 2, 2, 6), np.float32)], {"mode": "like"}),
    *(
        ("_contrib_AdaptiveAvgPooling2D", [uniform(2, 2, 3, 4)], {"output_size": size})
        for size in ((1,), (2, 3), (5, 5))
    ),
]

DIFFERENTIABLE = [
    *FULLY_CONNECTED,
    *CONVOLUTION,
    *DECONVOLUTION,
    *POOLING,
    *BATCH_NORM,
    *SYNC_BATCH_NORM,
    *NORMS,
    *ACTIVATION,
    *SOFTMAX,
    *RANDOM,
    *EMBEDDING,
    *RNN,
    *WINDOWS,
    *ATTENTION,
    *RESIZE,
    *CTC,
    *SEQUENCES,
    *GROUPS,
    *IMAGES,
    *SAMPLING,
    *CROSS_ENTROPY,
]
"""Cases whose gradient rule gives the derivative of the output."""

_ROW = np.array([0, 1, 2, -1])
_PAIRS = np.array([[0, 1], [2, -1], [1, 1], [0, 2]])
LOSSES = [
    ("SoftmaxOutput", [uniform(4, 3), _ROW], {}),
    ("SoftmaxOutput", [uniform(4, 3), _ROW], {"use_ignore": True, "normalization": "valid"}),
    ("SoftmaxOutput", [uniform(4, 3), _ROW], {"smooth_alpha": 0.2, "normalization": "batch"}),
    ("SoftmaxOutput", [uniform(4, 3), _ROW], {"out_grad": True}),
    ("SoftmaxOutput", [uniform(4, 3), uniform(4, 3, low=0.0)], {"grad_scale": 0.5}),
    ("SoftmaxOutput", [uniform(4, 3, 2), _PAIRS], {"multi_output": True, "use_ignore": True}),
    ("SoftmaxOutput", [uniform(4, 2, 3), _PAIRS], {"preserve_shape": True, "normalization": "valid"}),
    ("SoftmaxOutput", [uniform(4, 2, 3), _PAIRS], {"normalization": "valid"}),
    *(
        (name, [uniform(4, 3), uniform(4, 3, seed=5)], {"grad_scale": 2.0})
        for name in ("LinearRegressionOutput", "LogisticRegressionOutput", "MAERegressionOutput")
    ),
    ("LinearRegressionOutput", [uniform(4, 1), uniform(4)], {}),
    ("IdentityAttachKLSparseReg", [distinct(4, 3), np.array([0.2, 0.5, 0.7])], {"penalty": 0.1}),
    *(("SVMOutput", [uniform(4, 3) * 2, np.array([0.0, 1, 2, -1])], {"use_linear": linear}) for linear in (0, 1)),
    *(("MakeLoss", [uniform(4, 3)], {"normalization": how}) for how in ("null", "batch", "valid")),
    ("make_loss", [uniform(4, 3)], {}),
]
"""Cases whose gradient is that of a loss, which ignores the incoming gradient."""

OTHERS = [
    ("BlockGrad", [uniform(4, 3)], {}),
    # Gradients of the statistics are dropped, as in MXNet.
    ("GroupNorm", [uniform(2, 4, 3, 2), uniform(2), uniform(2)], {"num_groups": 2, "output_mean_var": True}),
]

CASES = [*DIFFERENTIABLE, *LOSSES, *OTHERS]


def narrowed(op, arrays, dtype):
    """Return the arrays of a case with float64 converted to ``dtype``.

    With float16 data, the vectors of BatchNorm and of the sparsity penalty become float32.
    """
    vectors = "float32" if op in ("BatchNorm", SYNC, "IdentityAttachKLSparseReg") and dtype == "float16" else dtype
    return [x.astype(vectors if k else dtype) if x.dtype == np.float64 else x.copy() for k, x in enumerate(arrays)]


def ident(case):
    """Return the name of a case in test output."""
    op, arrays, params = case
    shapes = ";".join("x".join(map(str, x.shape)) for x in arrays)
    return f"{op}[{shapes}]" + ",".join(f"{key}={value}" for key, value in params.items() if value is not None)
