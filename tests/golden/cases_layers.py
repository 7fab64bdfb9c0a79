"""Golden cases of layers over sequences, channel groups and images, and of losses."""

CASES = []


def _add(op, *inputs, **kwargs):
    CASES.append({"op": op, "inputs": list(inputs), **kwargs})


def _half(*shape):
    return {"shape": shape, "dtype": "float16"}


def _double(*shape):
    return {"shape": shape, "dtype": "float64"}


# Gradients of lengths, labels and of Crop's second input are not stored: MXNet leaves them unwritten.
# ------------------------------------------------------------------------------------------------ sequences
STEPS = {"value": [4.0, 0.0, 2.0]}
ROWS = {"value": [3, 1, 1, 2, 3], "dtype": "int32"}
for _op in ("SequenceMask", "SequenceLast", "SequenceReverse"):
    _add(_op, (4, 3, 2), grad=(0,))
    _add(
        _op,
        _half(4, 3),
        {"value": [1.0, 4.0, 2.0], "dtype": "float16"},
        params={"use_sequence_length": True},
        grad=(0,),
    )
    _add(
        _op,
        _double(4, 5, 2),
        {"value": [1, 4, 2, 3, 4], "dtype": "int32"},
        params={"use_sequence_length": True},
        grad=(0,),
    )
_add("SequenceMask", (4, 3, 2), STEPS, params={"use_sequence_length": True, "value": -1.5}, grad=(0,))
_add("SequenceMask", (5, 3, 2, 2), ROWS, params={"use_sequence_length": True, "axis": 1}, grad=(0,))
_add(
    "SequenceMask",
    {"shape": (4, 3), "dtype": "int32", "low": -9, "high": 9},
    {"value": [2, 9, 0], "dtype": "int32"},
    params={"use_sequence_length": True, "value": 7.0},
    grad=False,
)
_add("SequenceLast", (5, 3, 2), ROWS, params={"use_sequence_length": True, "axis": 1}, grad=(0,))
_add("SequenceLast", (5, 3), params={"axis": 1})
_add("SequenceReverse", (4, 3, 2, 2), STEPS, params={"use_sequence_length": True}, grad=(0,))

# ------------------------------------------------------------------------------------------------ GroupNorm
for _groups in (1, 2, 4):
    _add("GroupNorm", (2, 4, 3), (_groups,), (_groups,), params={"num_groups": _groups})
_add("GroupNorm", (2, 6, 3, 2), (3,), (3,), params={"num_groups": 3, "eps": 0.1})
_add("GroupNorm", (2, 4, 3), (2,), (2,), params={"num_groups": 2, "output_mean_var": True}, is_train=False, grad=False)
_add("GroupNorm", _double(2, 4, 2, 2), _double(2), _double(2), params={"num_groups": 2})

# ------------------------------------------------------------------------------------------------ losses
SCORES = {"shape": (4, 3), "low": -2.0, "high": 2.0}
LABELS = {"value": [0.0, 2.0, 1.0, 1.0]}
for _params in ({}, {"use_linear": True}, {"margin": 0.3, "regularization_coefficient": 2.5}):
    _add("SVMOutput", SCORES, LABELS, params=_params, grad=(0,))
_add("SVMOutput", SCORES, {"value": [0.0, 5.0, -1.0, 1.0]}, params={"use_linear": True, "margin": 0.3}, grad=(0,))
_add("SVMOutput", (2, 3, 4), {"value": [[0.0, 1.0, 2.0], [3.0, 3.0, 0.0]]}, grad=(0,))
_add("SVMOutput", _half(2, 3), {"value": [0, 1], "dtype": "float16"}, grad=(0,), rtol=1e-3)
_add("softmax_cross_entropy", SCORES, LABELS, grad=(0,))
_add("softmax_cross_entropy", {"value": [[30.0, 0.0], [0.0, 1.0]]}, {"value": [1.0, 1.0]}, grad=(0,))
_add(
    "softmax_cross_entropy",
    {"shape": (4, 3), "low": -2.0, "high": 2.0, "dtype": "float64"},
    {"value": [0, 2, 1, 1], "dtype": "float64"},
    grad=(0,),
)

# ------------------------------------------------------------------------------------------------ images
IMAGE = (2, 3, 5, 6)
_add("Crop", IMAGE, params={"h_w": (2, 3), "num_args": 1})
_add("Crop", IMAGE, params={"h_w": (2, 3), "offset": (3, 1), "num_args": 1})
_add("Crop", IMAGE, params={"h_w": (4, 3), "center_crop": True, "num_args": 1})
_add("Crop", IMAGE, (1, 7, 2, 2), params={"offset": (1, 4), "num_args": 2})
_add("Crop", IMAGE, (1, 7, 2, 3), params={"center_crop": True, "num_args": 2})
for _scale in (1, 2, 3):
    _add("UpSampling", (2, 3, 2, 4), params={"scale": _scale, "sample_type": "nearest", "num_args": 1})
    _add(
        "UpSampling",
        (2, 3, 2, 4),
        (3, 1, 2 * _scale - _scale % 2, 2 * _scale - _scale % 2),
        params={"scale": _scale, "sample_type": "bilinear", "num_filter": 3, "num_args": 2},
    )
_add("UpSampling", (1, 2, 4, 6), (1, 3, 2, 3), params={"scale": 2, "sample_type": "nearest", "num_args": 2})
_add(
    "UpSampling",
    (2, 3, 4, 2),
    (2, 3, 8, 4),
    (2, 3, 2, 1),
    params={"scale": 2, "sample_type": "nearest", "num_args": 3, "multi_input_mode": "sum"},
)
_add("UpSampling", _double(2, 3, 2, 4), params={"scale": 2, "sample_type": "nearest", "num_args": 1})
