"""Quantization and histograms beyond the golden files: rounding, graphs, and refusals."""

from __future__ import annotations

import numpy as np
import pytest

import weftplan as mx
from weftplan.errors import DTypeError, MXNetError, ParameterError

DATA = np.random.RandomState(0).uniform(-2, 3, (4, 9)).astype(np.float32)


@pytest.mark.parametrize("kind", ["int8", "uint8"])
def test_there_and_back_is_near(kind: str) -> None:
    """Dequantizing restores each number to within 1/127 of the largest magnitude; zeros stay zeros."""
    data = np.abs(DATA) if kind == "uint8" else DATA
    codes, least, most = mx.nd.contrib.quantize_v2(mx.nd.array(data), out_type=kind)
    assert codes.dtype == np.dtype(kind)
    back = mx.nd.contrib.dequantize(codes, least, most).asnumpy()
    assert np.abs(back - data).max() <= np.abs(data).max() / 127 + 1e-6
    zeros = mx.nd.contrib.quantize_v2(mx.nd.zeros((3,)), out_type=kind)[0]
    assert zeros.asnumpy().tolist() == [0, 0, 0]


def test_a_bound_graph_of_both() -> None:
    """quantize_v2 and dequantize run as nodes of a bound graph; values outside the calibrated range are clipped."""
    x = mx.sym.Variable("x")
    node = mx.sym.contrib.quantize_v2(x, min_calib_range=-1.0, max_calib_range=1.0)
    net = mx.sym.contrib.dequantize(node[0], node[1], node[2])
    executor = net.simple_bind(mx.cpu(), grad_req="null", x=DATA.shape)
    actual = executor.forward(x=mx.nd.array(DATA))[0].asnumpy()
    np.testing.assert_allclose(actual, np.clip(DATA, -1, 1), atol=1 / 127)


def test_dtypes_and_ranges_are_checked() -> None:
    """Unsupported dtypes, and ranges that are not of shape (1,), are refused."""
    with pytest.raises(DTypeError):
        mx.nd.contrib.quantize_v2(mx.nd.array(DATA, dtype="float64"))
    with pytest.raises(DTypeError, match="uint8, int8 or int32"):
        mx.nd.contrib.dequantize(mx.nd.ones((2,)), mx.nd.zeros((1,)), mx.nd.ones((1,)))
    with pytest.raises(MXNetError):
        mx.nd.contrib.quantize(mx.nd.ones((2,)), mx.nd.zeros((2,)), mx.nd.ones((1,)))


def test_histograms_are_numpys() -> None:
    """histogram equals NumPy's for a number of bins, with and without a range, for edges, and as a symbol.

    Counts are int64.
    """
    array = mx.nd.array(DATA)
    edges = np.array([-2.0, 0.0, 0.5, 3.0], np.float32)
    for bins, inputs, limits in ((6, 6, (-1.5, 2.5)), (4, 4, None), (edges, mx.nd.array(edges), None)):
        counts, actual = mx.nd.histogram(array, bins=inputs, range=limits)
        want, want_edges = np.histogram(DATA, bins=bins, range=limits)
        assert counts.dtype == np.int64
        np.testing.assert_array_equal(counts.asnumpy(), want)
        np.testing.assert_allclose(actual.asnumpy(), want_edges, rtol=1e-6)
    net = mx.sym.histogram(mx.sym.Variable("x"), bins=6, range=(-1.5, 2.5))
    executor = net.simple_bind(mx.cpu(), grad_req="null", x=DATA.shape)
    np.testing.assert_array_equal(
        executor.forward(x=array)[0].asnumpy(), np.histogram(DATA, bins=6, range=(-1.5, 2.5))[0]
    )


def test_bins_are_checked() -> None:
    """histogram refuses a reversed range, a single edge, and a symbol without a range."""
    with pytest.raises(ParameterError, match="range"):
        mx.nd.histogram(mx.nd.array(DATA), bins=3, range=(2, 1))
    with pytest.raises(ParameterError, match="edges"):
        mx.nd.histogram(mx.nd.array(DATA), bins=mx.nd.array([1.0]))
    with pytest.raises(ParameterError, match="range"):
        mx.sym.histogram(mx.sym.Variable("x"), bins=3)
