"""Shapes and dtypes of neural-network operators: inference in both directions, and errors that name the conflict."""

import numpy as np
import pytest

from tests.support.together import together
from weftplan.errors import DTypeError, ParameterError, ShapeError
from weftplan.ops.core import registry
from weftplan.ops.core.params import format_value

F16, F32, F64 = (np.dtype(f"float{bits}") for bits in (16, 32, 64))


def parsed(op, params):
    """Return the operator and its parameters, parsed from their text."""
    actual = registry.get(op)
    return actual, registry.parse_params(actual, {k: format_value(v) for k, v in params.items()})


def shapes(op, ins, outs, params):
    """Return the (input shapes, output shapes) that an operator infers, for as many outputs as ``outs``."""
    actual, values = parsed(op, params)
    count = actual.num_outputs(values)
    assert len(ins) == len(actual.input_names(values))
    new_ins, new_outs = actual.infer_shape(values, list(ins), [*outs, *[None] * (count - len(outs))])
    return list(new_ins), list(new_outs)[: len(outs)]


CONV = {"kernel": (3, 3), "num_filter": 8}


@together()
@pytest.mark.parametrize(
    ("op", "ins", "outs", "params", "expected"),
    [
        (
            "FullyConnected",
            [(32, 1, 8, 8), None, None],
            [None],
            {"num_hidden": 10},
            ([(32, 1, 8, 8), (10, 64), (10,)], [(32, 10)]),
        ),
        (
            "FullyConnected",
            [(0, 64), None, None],
            [(32, 0)],
            {"num_hidden": 10},
            ([(32, 64), (10, 64), (10,)], [(32, 10)]),
        ),
        (
            "FullyConnected",
            [(32, 0), (10, 64), None],
            [None],
            {"num_hidden": 10},
            ([(32, 64), (10, 64), (10,)], [(32, 10)]),
        ),
        (
            "FullyConnected",
            [(4, 5, 6), None],
            [None],
            {"num_hidden": 3, "flatten": False, "no_bias": True},
            ([(4, 5, 6), (3, 6)], [(4, 5, 3)]),
        ),
        ("FullyConnected", [None, None, None], [None], {"num_hidden": 3}, ([None, (3, 0), (3,)], [None])),
        (
            "Convolution",
            [(2, 3, 10, 9), None, None],
            [None],
            {**CONV, "stride": (2, 1), "pad": (1, 0)},
            ([(2, 3, 10, 9), (8, 3, 3, 3), (8,)], [(2, 8, 5, 7)]),
        ),
        (
            "Convolution",
            [(0, 3, 0, 0), None, None],
            [(2, 0, 8, 7)],
            CONV,
            ([(2, 3, 10, 9), (8, 3, 3, 3), (8,)], [(2, 8, 8, 7)]),
        ),
        (
            "Convolution",
            [(2, 0, 5, 5), (8, 2, 3, 3)],
            [None],
            {**CONV, "num_group": 2, "no_bias": True},
            ([(2, 4, 5, 5), (8, 2, 3, 3)], [(2, 8, 3, 3)]),
        ),
        ("Convolution", [None, None, None], [None], CONV, ([None, (8, 0, 3, 3), (8,)], [None])),
        (
            "Deconvolution",
            [(2, 6, 4, 4), None],
            [None],
            {"kernel": (4, 4), "num_filter": 8, "stride": (2, 2), "pad": (1, 1), "num_group": 2},
            ([(2, 6, 4, 4), (6, 4, 4, 4)], [(2, 8, 8, 8)]),
        ),
        ("Pooling", [(2, 3, 7, 8)], [None], {"kernel": (2, 2), "stride": (2, 2)}, ([(2, 3, 7, 8)], [(2, 3, 3, 4)])),
        (
            "Pooling",
            [(2, 3, 7, 8)],
            [None],
            {"kernel": (2, 2), "stride": (2, 2), "pooling_convention": "full"},
            ([(2, 3, 7, 8)], [(2, 3, 4, 4)]),
        ),
        (
            "Pooling",
            [(2, 3, 7, 8)],
            [None],
            {"kernel": (3, 3), "stride": (2, 2), "pooling_convention": "same"},
            ([(2, 3, 7, 8)], [(2, 3, 4, 4)]),
        ),
        ("Pooling", [(0, 3, 7, 0)], [(5, 0, 0, 0)], {"kernel": (2, 2)}, ([(5, 3, 7, 0)], [(5, 3, 6, 0)])),
        ("Pooling", [(2, 3, 7, 8)], [None], {"global_pool": True}, ([(2, 3, 7, 8)], [(2, 3, 1, 1)])),
        ("BatchNorm", [(2, 3, 4), *[None] * 4], [None], {}, ([(2, 3, 4), *[(3,)] * 4], [(2, 3, 4)])),
        ("BatchNorm", [(2, 0, 4), (3,), *[None] * 3], [None], {}, ([(2, 3, 4), *[(3,)] * 4], [(2, 3, 4)])),
        ("BatchNorm", [None, *[None] * 4], [(2, 5)], {"axis": -1}, ([(2, 5), *[(5,)] * 4], [(2, 5)])),
        ("LayerNorm", [(2, 3, 4), None, None], [None], {}, ([(2, 3, 4), (4,), (4,)], [(2, 3, 4)])),
        ("InstanceNorm", [(2, 3, 4), None, None], [None], {}, ([(2, 3, 4), (3,), (3,)], [(2, 3, 4)])),
        ("L2Normalization", [None], [(2, 3, 4)], {"mode": "channel"}, ([(2, 3, 4)], [(2, 3, 4)])),
        ("LRN", [None], [(2, 3, 4)], {"nsize": 3}, ([(2, 3, 4)], [(2, 3, 4)])),
        ("Activation", [(0, 3)], [(2, 0)], {"act_type": "relu"}, ([(2, 3)], [(2, 3)])),
        ("LeakyReLU", [(2, 3, 4), None], [None], {"act_type": "prelu"}, ([(2, 3, 4), (3,)], [(2, 3, 4)])),
        ("LeakyReLU", [(2, 3, 4), (1,)], [None], {"act_type": "prelu"}, ([(2, 3, 4), (1,)], [(2, 3, 4)])),
        ("LeakyReLU", [(2, 3, 4), (1, 0, 1)], [None], {"act_type": "prelu"}, ([(2, 3, 4), (1, 3, 1)], [(2, 3, 4)])),
        ("Dropout", [(2, 3, 4)], [None, None], {"axes": (1,)}, ([(2, 3, 4)], [(2, 3, 4), (2, 1, 4)])),
        ("softmax", [(2, 3, 4), None], [None], {"use_length": True}, ([(2, 3, 4), (2, 3)], [(2, 3, 4)])),
        ("SoftmaxOutput", [(4, 3), None], [None], {}, ([(4, 3), (4,)], [(4, 3)])),
        ("SoftmaxOutput", [(0, 3), (4,)], [None], {}, ([(4, 3), (4,)], [(4, 3)])),
        (
            "SoftmaxOutput",
            [(4, 3, 2, 5), None],
            [None],
            {"multi_output": True},
            ([(4, 3, 2, 5), (4, 10)], [(4, 3, 2, 5)]),
        ),
        (
            "SoftmaxOutput",
            [(4, 3, 2, 5), (4, 2, 5)],
            [None],
            {"multi_output": True},
            ([(4, 3, 2, 5), (4, 2, 5)], [(4, 3, 2, 5)]),
        ),
        ("SoftmaxOutput", [(4, 2, 3), None], [None], {"preserve_shape": True}, ([(4, 2, 3), (4, 2)], [(4, 2, 3)])),
        ("LinearRegressionOutput", [(4, 3), None], [None], {}, ([(4, 3), (4, 3)], [(4, 3)])),
        ("LinearRegressionOutput", [(4, 1), None], [None], {}, ([(4, 1), (4,)], [(4, 1)])),
        ("Embedding", [(4, 7), None], [None], {"input_dim": 9, "output_dim": 5}, ([(4, 7), (9, 5)], [(4, 7, 5)])),
        ("Embedding", [None, None], [(4, 7, 5)], {"input_dim": 9, "output_dim": 5}, ([(4, 7), (9, 5)], [(4, 7, 5)])),
    ],
)
def test_shapes(op, ins, outs, params, expected):
    """Known shapes of inputs and outputs complete unknown shapes and dimensions (0)."""
    assert shapes(op, ins, outs, params) == expected


@together()
@pytest.mark.parametrize(
    ("op", "ins", "params", "message"),
    [
        ("FullyConnected", [(32, 64), (10, 65), None], {"num_hidden": 10}, r"\(10, 64\) and \(10, 65\)"),
        ("FullyConnected", [(32, 64), None, (11,)], {"num_hidden": 10}, r"\(10,\) and \(11,\)"),
        ("FullyConnected", [(), None, None], {"num_hidden": 10}, r"shape \(\)"),
        ("Convolution", [(2, 3, 10), None, None], CONV, r"2 spatial axes.*\(2, 3, 10\)"),
        ("Convolution", [(2, 3, 5, 5), (8, 4, 3, 3), None], CONV, r"\(8, 3, 3, 3\) and \(8, 4, 3, 3\)"),
        ("Convolution", [(2, 3, 5, 2), None, None], CONV, r"spans 3.*\(2, 3, 5, 2\)"),
        ("Convolution", [(2, 3, 5, 5), None, None], {**CONV, "num_group": 2}, "3 channels.*num_group=2"),
        ("Deconvolution", [(2, 3, 5, 5), (4, 8, 3, 3)], CONV, r"\(3, 8, 3, 3\) and \(4, 8, 3, 3\)"),
        ("Deconvolution", [(2, 3, 1, 1), None], {**CONV, "pad": (2, 2)}, r"pad=\(2, 2\) leaves nothing"),
        ("Deconvolution", [(2, 3, 1, 1), None], {**CONV, "target_shape": (9, 9)}, r"\(9, 9\) is too large"),
        ("Pooling", [(2, 3, 5)], {"kernel": (2, 2)}, r"2 spatial axes.*\(2, 3, 5\)"),
        ("Pooling", [(2, 3, 5, 1)], {"kernel": (2, 2)}, r"kernel \(2, 2\) is larger than data \(2, 3, 5, 1\)"),
        ("Pooling", [(2, 3)], {"global_pool": True}, r"spatial axes, got data \(2, 3\)"),
        ("BatchNorm", [(2, 3, 4), (4,), None, None, None], {}, r"\(3,\) and \(4,\)"),
        ("BatchNorm", [(2, 3), *[None] * 4], {"axis": 2}, "axis 2 is out of range"),
        ("LayerNorm", [(2, 3, 4), (3,), None], {}, r"\(4,\) and \(3,\)"),
        ("InstanceNorm", [(2, 3), None, None], {}, r"\(2, 3\)"),
        ("L2Normalization", [(2, 3)], {"mode": "channel"}, r"\(2, 3\), mode=channel"),
        ("LeakyReLU", [(2, 3, 4), (4,)], {"act_type": "prelu"}, r"\(3,\) and \(4,\)"),
        (
            "LeakyReLU",
            [(2, 3, 4), (1, 3)],
            {"act_type": "prelu"},
            r"\(1, 3\), expected \(3,\), \(1,\) or what broadcasts",
        ),
        ("softmax", [(2, 3), None], {"axis": 2, "use_length": True}, "axis 2 is out of range"),
        ("softmax", [(2, 3, 4), (2, 4)], {"use_length": True}, r"\(2, 3\) and \(2, 4\)"),
        ("SoftmaxOutput", [(4, 3), (5,)], {}, r"label has shape \(5,\), expected \(4,\) or \(4, 3\) for data \(4, 3\)"),
        ("SoftmaxOutput", [(4,), None], {}, r"shape \(4,\), expected batch and classes"),
        ("LinearRegressionOutput", [(4, 3), (4,)], {}, r"label has shape \(4,\), expected \(4, 3\)"),
        ("LinearRegressionOutput", [(4, 3), (4, 2)], {}, r"\(4, 3\) and \(4, 2\)"),
        ("Embedding", [(4,), (9, 6)], {"input_dim": 9, "output_dim": 5}, r"\(9, 5\) and \(9, 6\)"),
        ("Dropout", [(4, 3)], {"axes": (2,)}, "axes 2 is out of range"),
    ],
)
def test_shape_clash(op, ins, params, message):
    """Conflicting shapes raise a ShapeError that names the operator and both shapes."""
    with pytest.raises(ShapeError, match=message) as caught:
        shapes(op, ins, [None], params)
    assert ("regression output" if op == "LinearRegressionOutput" else op) in str(caught.value)


@together()
@pytest.mark.parametrize(
    ("op", "ins", "params", "message"),
    [
        ("Convolution", [None] * 3, {"kernel": (), "num_filter": 1}, r"kernel=\(\)"),
        ("Convolution", [None] * 3, {"kernel": (1, 1, 1, 1), "num_filter": 1}, "one to three"),
        ("Convolution", [None] * 3, {**CONV, "stride": (0, 1)}, r"stride=\(0, 1\)"),
        ("Convolution", [None] * 3, {**CONV, "pad": (1,)}, r"pad=\(1,\): expected 2 numbers"),
        ("Convolution", [None] * 3, {**CONV, "dilate": (1, 0)}, r"dilate=\(1, 0\)"),
        ("Convolution", [None] * 3, {**CONV, "layout": "NHWC"}, "layout=NHWC: expected NCHW"),
        ("Convolution", [None] * 3, {**CONV, "num_group": 3}, "num_filter=8 is not a positive multiple of num_group=3"),
        ("Convolution", [None] * 3, {**CONV, "workspace": -1}, "workspace=-1"),
        ("Deconvolution", [(1, 1, 3, 3), None], {**CONV, "adj": (1, 0)}, r"adj=\(1, 0\)"),
        ("Deconvolution", [(1, 1, 3, 3), None], {**CONV, "target_shape": (5,)}, r"target_shape=\(5,\)"),
        ("Pooling", [(1, 1, 4, 4)], {"kernel": (2, 2), "stride": (1,)}, r"stride=\(1,\)"),
        ("Pooling", [(1, 1, 4, 4)], {"kernel": (2, 2), "pool_type": "lp"}, "p_value 1, 2 or 3, got None"),
        ("Pooling", [(1, 1, 4, 4)], {"kernel": (2, 2), "layout": "NHWC"}, "layout=NHWC: expected NCHW"),
        ("LRN", [(1, 4, 2, 2)], {"nsize": 0}, "nsize=0: expected at least 1"),
        ("Embedding", [(1,), None], {"input_dim": 0, "output_dim": 2}, "input_dim=0"),
        ("LeakyReLU", [(1,)], {"act_type": "rrelu", "lower_bound": 0.5}, "lower_bound=0.5 is above"),
        ("Dropout", [(1,)], {"p": 1.5}, "p='1.5'.*0 to 1"),
        ("Activation", [(1,)], {"act_type": "swish"}, "act_type='swish'.*relu"),
        ("Pooling", [(1, 1, 1)], {"kernel": (1,), "pool_type": "mean"}, "pool_type='mean'.*max, avg, sum, lp"),
        ("SoftmaxOutput", [(1, 1), None], {"normalization": "sum"}, "normalization='sum'"),
        ("FullyConnected", [(1, 1), None, None], {}, "'num_hidden' is missing"),
        ("FullyConnected", [(1, 1), None, None], {"num_hidden": -3}, "num_hidden='-3': expected at least 1"),
        ("BatchNorm", [(1, 1), *[None] * 4], {"epsilon": 1}, "unknown parameter 'epsilon'.*'eps'"),
    ],
)
def test_bad_parameter(op, ins, params, message):
    """An invalid parameter raises a ParameterError that names operator, parameter and value."""
    with pytest.raises(ParameterError, match=message) as caught:
        shapes(op, ins, [None], params)
    assert op in str(caught.value)


def dtypes(op, ins, params, out=None):
    """Return the inferred dtypes of inputs and outputs."""
    actual, values = parsed(op, params)
    new = actual.infer_dtype(values, list(ins), [out, *[None] * (actual.num_outputs(values) - 1)])
    return [list(part) for part in new]


def test_dtypes():
    """All inputs and outputs have one dtype, except labels, indices, masks and statistics."""
    assert dtypes("FullyConnected", [F16, None, None], {"num_hidden": 1}) == [[F16] * 3, [F16]]
    assert dtypes("Convolution", [None, None, F64], CONV) == [[F64] * 3, [F64]]
    assert dtypes("BatchNorm", [F16, *[None] * 4], {}) == [[F16, *[F32] * 4], [F16, F32, F32]]
    assert dtypes("BatchNorm", [F64, *[None] * 4], {}) == [[F64] * 5, [F64] * 3]
    assert dtypes("Dropout", [F16], {}) == [[F16], [F16, np.dtype("uint8")]]
    assert dtypes("SoftmaxOutput", [F32, np.dtype("int32")], {}) == [[F32, np.dtype("int32")], [F32]]
    assert dtypes("SoftmaxOutput", [F32, None], {}) == [[F32, F32], [F32]]
    assert dtypes("softmax", [F16], {"dtype": "float32"}) == [[F16], [F32]]
    assert dtypes("Embedding", [np.dtype("int64"), None], {"input_dim": 1, "output_dim": 1}) == [
        [np.dtype("int64"), F32],
        [F32],
    ]
    assert dtypes("Activation", [None], {"act_type": "relu"}, out=F64) == [[F64], [F64]]


@pytest.mark.parametrize(
    ("op", "ins", "params"),
    [
        ("FullyConnected", [F32, F64, None], {"num_hidden": 1}),
        ("Convolution", [F32, F16, None], CONV),
        ("BatchNorm", [F16, F16, None, None, None], {}),
        ("LayerNorm", [F32, F64, None], {}),
    ],
)
def test_dtype_clash(op, ins, params):
    """Different dtypes that must be equal raise DTypeError that names both."""
    with pytest.raises(DTypeError, match=r"float\d\d and float\d\d differ"):
        dtypes(op, ins, params)
