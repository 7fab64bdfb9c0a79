"""Compiled convolutions whose images are copied in bands of rows, against NumPy: strides, dilations, sizes."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

import weftplan as mx
from weftplan.kernels.compiled.size_table import ConvSizes, data_bands, forward_bands
from weftplan.planner import PlanOptions

pytest.importorskip("llvmlite")

Case = tuple[tuple[int, int, int, int], int, tuple[int, int], tuple[int, int], tuple[int, int], tuple[int, int]]

UNEVEN: list[Case] = [
    ((1, 48, 35, 21), 120, (5, 7), (2, 2), (2, 1), (3, 2)),
    ((1, 48, 29, 35), 120, (7, 7), (2, 1), (2, 1), (1, 3)),
    ((2, 3, 34, 24), 200, (6, 5), (4, 2), (2, 2), (1, 0)),
    ((1, 100, 25, 25), 200, (5, 3), (2, 2), (1, 2), (1, 1)),
    ((1, 16, 40, 29), 200, (3, 3), (3, 3), (1, 2), (2, 1)),
    ((1, 100, 35, 29), 200, (4, 2), (3, 2), (1, 1), (1, 0)),
]
"""Convolutions as (image, filters, kernel, stride, dilation, padding).

In each, one phase of the stride has fewer rows than another phase, but its taps reach further.
"""


def run_step(case: Case, kernels: str) -> tuple[list[Any], ConvSizes]:
    """Return output and gradients of one training step, and the sizes of the convolution."""
    image, filters, kernel, stride, dilate, pad = case
    net = mx.sym.Convolution(
        mx.sym.Variable("x"), kernel=kernel, stride=stride, dilate=dilate, pad=pad, num_filter=filters, no_bias=True,
        name="c",
    )  # fmt: skip
    executor = net.simple_bind(mx.cpu(), plan_options=PlanOptions(kernels=kernels), x=image)
    rng = np.random.default_rng(1)
    for name in ("x", "c_weight"):
        array = executor.arg_dict[name]
        array[:] = rng.normal(0, 1, array.shape)
    out = executor.forward(is_train=True)[0].asnumpy()
    executor.backward([mx.nd.array(rng.normal(0, 1, out.shape))])
    s = ConvSizes(
        batch=image[0], groups=1, channels=image[1], filters=filters, image=(1, *image[2:]), grid=(1, *out.shape[2:]),
        kernel=(1, *kernel), stride=(1, *stride), dilate=(1, *dilate), pad=(0, *pad), itemsize=4,
    )  # fmt: skip
    return [out, *(gradient.asnumpy() for gradient in executor.grad_arrays)], s


def check(case: Case) -> tuple[int, int]:
    """Check that compiled and NumPy's results agree; return the numbers of bands forward and backward."""
    got, s = run_step(case, "native")
    want, _ = run_step(case, "numpy")
    for name, a, b in zip(("output", "gradient of x", "gradient of the weight"), got, want, strict=True):
        np.testing.assert_allclose(
            a, b, rtol=0, atol=1e-4 * max(1.0, float(np.abs(b).max())), err_msg=f"{name}, {case}"
        )
    return forward_bands(s).count, data_bands(s).count


@pytest.mark.parametrize("case", UNEVEN)
def test_phases_of_different_lengths(case: Case):
    """Gradients in several bands are correct: each band contains all rows that any phase reads."""
    assert check(case)[1] > 1


def test_random_sizes():
    """Fifty random convolutions agree with NumPy's kernel; at least five have several bands forward and backward."""
    rng, banded = random.Random(5), 0
    done = 0
    while done < 50:
        kernel = rng.randint(1, 7), rng.randint(1, 5)
        dilate = rng.randint(1, 2), rng.randint(1, 2)
        stride = rng.randint(1, 4), rng.randint(1, 3)
        pad = tuple(rng.randint(0, min(3, (k - 1) * d)) for k, d in zip(kernel, dilate, strict=True))
        image = rng.choice([1, 2]), rng.choice([16, 48, 100]), rng.randint(14, 36), rng.randint(14, 36)
        if any((k - 1) * d + 1 > n + 2 * p for k, d, n, p in zip(kernel, dilate, image[2:], pad, strict=True)):
            continue
        forwards, backwards = check((image, rng.choice([40, 120]), kernel, stride, dilate, (pad[0], pad[1])))
        banded += forwards > 1 and backwards > 1
        done += 1
    assert banded >= 5
