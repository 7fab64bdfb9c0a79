"""Behaviour of single neural-network operators beyond the common contract.

This file tests what the backward pass keeps, activations and embeddings. Other families have their own files:
``test_nn_<family>.py``.
"""

import numpy as np
import pytest

from tests.support.ops_harness import differentiate, gradients, prepare, run
from tests.support.ops_nn_cases import uniform


def arrays_kept(op, arrays, params):
    """Return the sorted names of the arrays that the gradient reads: x<k> for forward inputs, y<k> for outputs."""
    call = prepare(op, arrays, params)
    call()
    _, builder = differentiate(call, [np.ones(s.shape, s.dtype) for s in call.out_specs])
    kept_names = set()
    for result in builder.calls:
        ignored = result.op.ignored(result.params)
        used = [x for k, x in enumerate(result.inputs) if k not in ignored]
        kept_names |= {f"x{k}" for k, x in enumerate(call.inputs) if any(x is one for one in used)}
        kept_names |= {f"y{k}" for k, y in enumerate(call.outputs) if any(y is one for one in used)}
    return " ".join(sorted(kept_names))


X = uniform(2, 3, 4, 4)
C3 = [uniform(3) for _ in range(4)]


@pytest.mark.parametrize(
    ("op", "arrays", "params", "expected"),
    [
        ("FullyConnected", [uniform(3, 4), uniform(5, 4), uniform(5)], {"num_hidden": 5}, "x0 x1"),
        ("Convolution", [X, uniform(2, 3, 1, 1), uniform(2)], {"kernel": (1, 1), "num_filter": 2}, "x0 x1"),
        *(
            ("Activation", [X], {"act_type": kind}, "y0")
            for kind in ("relu", "sigmoid", "tanh", "softrelu", "softsign")
        ),
        ("LeakyReLU", [X], {}, "y0"),
        ("LeakyReLU", [X], {"slope": -0.1}, "x0"),
        ("LeakyReLU", [X], {"act_type": "elu"}, "y0"),
        ("LeakyReLU", [X], {"act_type": "selu"}, "y0"),
        ("LeakyReLU", [X], {"act_type": "gelu"}, "x0"),
        ("LeakyReLU", [X], {"act_type": "rrelu"}, "y1"),
        ("LeakyReLU", [X, C3[0]], {"act_type": "prelu"}, "x0 x1"),
        ("Pooling", [X], {"kernel": (2, 2), "pool_type": "avg"}, ""),
        ("Pooling", [X], {"kernel": (2, 2), "pool_type": "sum"}, ""),
        ("Pooling", [X], {"kernel": (2, 2)}, "x0 y0"),
        ("BatchNorm", [X, *C3], {}, "x0 y1 y2"),
        ("BatchNorm", [X, *C3], {"fix_gamma": False}, "x0 x1 y1 y2"),
        ("Dropout", [X], {}, "y1"),
        ("softmax", [X], {}, "y0"),
        ("log_softmax", [X], {}, "y0"),
        ("SoftmaxOutput", [uniform(2, 3), np.zeros(2)], {}, "x1 y0"),
        ("LinearRegressionOutput", [uniform(2, 3), uniform(2, 3)], {}, "x1 y0"),
        ("MakeLoss", [X], {}, ""),
        ("MakeLoss", [X], {"normalization": "valid"}, "y0"),
        ("Embedding", [np.zeros(2), uniform(3, 2)], {"input_dim": 3, "output_dim": 2}, "x0"),
        ("L2Normalization", [X], {}, "y0 y1"),
    ],
)
def test_backward_keeps_no_more_than_it_must(op, arrays, params, expected):
    """The backward pass keeps exactly these arrays alive; they decide the planned peak."""
    assert arrays_kept(op, arrays, params) == expected


@pytest.mark.parametrize("kind", ["sigmoid", "tanh", "softrelu", "softsign"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_activation_of_large_numbers(kind, dtype):
    """Saturated activations are finite, and their slopes lie between 0 and 1."""
    data = np.array([-1e4, -100, 0, 100, 1e4], dtype)
    call = prepare("Activation", [data], {"act_type": kind})
    out = call()[0]
    slope = differentiate(call, [np.ones_like(data)])[0][0]
    assert np.isfinite(out).all()
    assert (slope >= 0).all()
    assert (slope <= 1).all()


def test_embedding_clips_indices_and_adds_repeated_rows():
    """Embedding clips indices outside the vocabulary and adds up the gradients of a repeated row."""
    weight = uniform(3, 2)
    index = np.array([-5, 1, 1, 99])
    params = {"input_dim": 3, "output_dim": 2}
    np.testing.assert_array_equal(run("Embedding", [index, weight], params)[0], weight[[0, 1, 1, 2]])
    actual = gradients("Embedding", [index, weight], [np.ones((4, 2))], params)
    np.testing.assert_array_equal(actual[1], [[1, 1], [2, 2], [1, 1]])
    assert not actual[0].any()
