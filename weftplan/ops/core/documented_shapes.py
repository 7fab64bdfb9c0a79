"""Input shapes of operators, for their documentation; a test compares them with shape inference.

In a shape, a name is a dimension or a parameter of the operator, and ``*name`` is any number of dimensions.
"""

from __future__ import annotations

from collections.abc import Mapping

_IMAGE = "(batch, channels, *spatial)"
_PICTURE = "(batch, channels, height, width)"
_SCORES = {"data": "(batch, classes)", "label": "(batch,)"}
_TARGETS = {"data": "(batch, *outputs)", "label": "(batch, *outputs)"}
_OF_CHANNELS = {"gamma": "(channels,)", "beta": "(channels,)"}

INPUT_SHAPES: Mapping[str, Mapping[str, str]] = {
    "BatchNorm": {"data": _IMAGE, **_OF_CHANNELS, "moving_mean": "(channels,)", "moving_var": "(channels,)"},
    "BilinearSampler": {"data": _PICTURE, "grid": "(batch, 2, rows, columns)"},
    "CTCLoss": {"data": "(steps, batch, classes)", "label": "(batch, labels)"},
    "Convolution": {
        "data": _IMAGE,
        "weight": "(num_filter, channels / num_group, *kernel)",
        "bias": "(num_filter,)",
    },
    "Deconvolution": {"data": _IMAGE, "weight": "(channels, num_filter / num_group, *kernel)"},
    "Embedding": {"data": "(*places,)", "weight": "(input_dim, output_dim)"},
    "FullyConnected": {"data": "(batch, inputs)", "weight": "(num_hidden, inputs)", "bias": "(num_hidden,)"},
    "InstanceNorm": {"data": _IMAGE, **_OF_CHANNELS},
    "L2Normalization": {"data": _IMAGE},
    "LRN": {"data": _PICTURE},
    "LayerNorm": {"data": "(*places, features)", "gamma": "(features,)", "beta": "(features,)"},
    "LinearRegressionOutput": _TARGETS,
    "LogisticRegressionOutput": _TARGETS,
    "MAERegressionOutput": _TARGETS,
    "Pooling": {"data": _IMAGE},
    "RNN": {
        "data": "(steps, batch, inputs)",
        "parameters": "one vector",
        "state": "(num_layers * (1 + bidirectional), batch, state_size)",
    },
    "ROIPooling": {"data": _PICTURE, "rois": "(regions, 5)"},
    "SVMOutput": _SCORES,
    "SequenceMask": {"data": "(steps, batch, *rest)"},
    "SoftmaxOutput": _SCORES,
    "SpatialTransformer": {"data": _PICTURE, "loc": "(batch, 6)"},
    "batch_dot": {"lhs": "(batch, rows, inner)", "rhs": "(batch, inner, columns)"},
    "dot": {"lhs": "(rows, inner)", "rhs": "(inner, columns)"},
    "pick": {"data": "(batch, classes)", "index": "(batch,)"},
    "softmax_cross_entropy": _SCORES,
    "take": {"a": "(rows, *rest)", "indices": "(*places,)"},
    "where": {"condition": "(*shape,)", "x": "(*shape,)", "y": "(*shape,)"},
}
