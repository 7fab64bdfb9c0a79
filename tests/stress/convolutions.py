"""Trials that compare a random convolution or deconvolution with its float64 definition.

``python -m tests.stress.trials convolutions`` runs them. Each trial draws the sizes (one to three axes, strides,
dilations, groups), the dtype (float32 or float64), limits that decide how the kernels split their work, and an engine.
The sizes include single channels, images that are copied in bands, filters that are packed in slices, and 3x3 windows
for Winograd's algorithm. The definition shares no code with the kernels, unlike the reference in trials of networks.
"""

from __future__ import annotations

import math
import random
from typing import Any
from unittest import mock

import numpy as np

import weftplan as mx
from tests.ops.convolution_reference import gradients, reference
from weftplan import engine
from weftplan.kernels.compiled import parts, scratch
from weftplan.kernels.compiled.depthwise import tables as depthwise_tables
from weftplan.kernels.compiled.winograd import implementation as winograd
from weftplan.ops.nn.conv_geometry import Geometry, geometry, output_extent
from weftplan.planner import PlanOptions

MOST = 1 << 25
"""Maximum number of multiplications per pass."""


def draw_geometry(rng: random.Random) -> tuple[Geometry, bool]:
    """Return the random sizes of a moderate convolution, and whether to test its transpose instead."""
    while True:
        axes = rng.choice((1, 2, 2, 2, 3))
        most = {1: 300, 2: 40, 3: 12}[axes]
        kernel = tuple(rng.choice((1, 2, 3, 3, 4, 5, 7)) for _ in range(axes))
        dilate = tuple(rng.choice((1, 1, 2, 3)) for _ in range(axes))
        stride = tuple(rng.choice((1, 1, 2, 3, 4)) for _ in range(axes))
        pad = tuple(rng.randint(0, min(3, (k - 1) * d)) for k, d in zip(kernel, dilate, strict=True))
        image = tuple(rng.randint(1, most) for _ in range(axes))
        groups = rng.choice((1, 1, 1, 2, 3))
        channels, filters = (groups * rng.choice((1, 3, 8, 17, 48, 100, 400)) for _ in range(2))
        if rng.random() < 0.2:
            groups = channels = filters = rng.choice((2, 5, 16, 33))
        batch = rng.choice((1, 1, 2, 3, 5, 9))
        dtype = np.dtype(rng.choice(("float32", "float32", "float64")))
        if rng.random() < 0.25:  # sizes for Winograd's kernels
            kernel, dilate, stride, groups, dtype = (3, 3), (1, 1), (1, 1), 1, np.dtype("float32")
            pad, image = ((rng.randint(0, 2), rng.randint(0, 2)), (rng.randint(1, most), rng.randint(1, most)))
            channels, filters = (rng.choice((17, 33, 48, 100, 260)) for _ in range(2))
        if any((k - 1) * d + 1 > e + 2 * p for k, d, e, p in zip(kernel, dilate, image, pad, strict=True)):
            continue
        grid = tuple(map(output_extent, image, kernel, stride, pad, dilate))
        if batch * filters * (channels // groups) * math.prod(kernel) * math.prod(grid) > MOST:
            continue
        geometries = geometry(
            (batch, channels, *image), filters, kernel, stride, dilate, pad, grid, groups, dtype, 1024
        )
        return geometries, rng.random() < 0.3


def trial(seed: str) -> bool:
    """Check that the output and all gradients equal the definition within rounding; return True."""
    rng = random.Random(seed)
    geo, transposed = draw_geometry(rng)
    values = np.random.default_rng(rng.randrange(1 << 30))
    image = geo.batch, geo.channels, *geo.image
    grid = geo.batch, geo.filters, *geo.grid
    weight = geo.filters, geo.channels // geo.groups, *geo.kernel
    params: dict[str, Any] = {
        "kernel": geo.kernel, "stride": geo.stride, "dilate": geo.dilate, "pad": geo.pad, "num_group": geo.groups,
        "num_filter": geo.channels if transposed else geo.filters, "no_bias": rng.random() < 0.5,
    }  # fmt: skip
    if transposed:
        params["adj"] = tuple(
            e + 2 * p - (g - 1) * s - (k - 1) * d - 1
            for e, p, g, s, k, d in zip(geo.image, geo.pad, geo.grid, geo.stride, geo.kernel, geo.dilate, strict=True)
        )
    relu = not transposed and rng.random() < 0.3
    few = rng.choice((1 << 10, 1 << 14, 1 << 23))
    kernels = rng.choice(("native", "native", "native", "numpy"))
    driver = rng.choice(("NaiveEngine", "ThreadedEngine", "ThreadedEnginePerDevice"))
    data, out = (grid, image) if transposed else (image, grid)
    layer = mx.sym.Deconvolution if transposed else mx.sym.Convolution
    net = layer(mx.sym.Variable("x"), name="c", **params)
    if relu:
        net = mx.sym.Activation(net, act_type="relu")
    chosen = mx.engine.create(driver)
    with (
        engine.using(chosen),
        mock.patch.object(scratch, "FEW", few),
        mock.patch.object(depthwise_tables, "FEW", few),
        mock.patch.object(winograd, "MAX_STORED_BYTES", rng.choice((0, 1 << 16, winograd.MAX_STORED_BYTES))),
        mock.patch("weftplan.support.blas_threads.usable_cpus", return_value=4),
        mock.patch.object(parts, "idle_cores", rng.choice((parts.idle_cores, lambda: 1))),
    ):
        executor = net.simple_bind(
            mx.cpu(), type_dict={"x": geo.dtype}, plan_options=PlanOptions(kernels=kernels), x=data
        )
        arrays = {name: values.uniform(-1, 1, array.shape).astype(geo.dtype)
                  for name, array in executor.arg_dict.items()}  # fmt: skip
        for name, array in arrays.items():
            executor.arg_dict[name][:] = array
        ograd = values.uniform(-1, 1, out).astype(geo.dtype)
        got = {"output": executor.forward(is_train=True)[0].asnumpy()}
        executor.backward([mx.nd.array(ograd, dtype=geo.dtype)])
        got.update((name, gradient.asnumpy()) for name, gradient in executor.grad_dict.items())
        assert executor.allocated_bytes == executor.memory_plan.peak, "allocated is not as planned"
    chosen.stop()
    x, w = arrays["x"], arrays["c_weight"]
    assert w.shape == weight
    bias = 0.0 if params["no_bias"] else arrays["c_bias"].astype(np.float64).reshape(1, -1, *[1] * len(geo.image))
    if transposed:
        dx, dw = gradients(geo, ograd, w, x)
        want = {"output": dx + bias, "x": reference(geo, ograd, w), "c_weight": dw}
    else:
        plain = reference(geo, x, w) + bias
        if relu:
            # If rounding decides the sign, the gradient may flow or not.
            ograd = ograd * (got["output"] > 0)
            plain = np.maximum(plain, 0)
        dx, dw = gradients(geo, x, w, ograd)
        want = {"output": plain, "x": dx, "c_weight": dw}
    if not params["no_bias"]:
        want["c_bias"] = ograd.astype(np.float64).sum(axis=(0, *range(2, ograd.ndim)))
    taps = math.prod(geo.kernel)
    forward, backward = geo.channels // geo.groups * taps, geo.filters // geo.groups * taps
    terms = {
        "output": backward if transposed else forward, "x": forward if transposed else backward,
        "c_weight": geo.batch * math.prod(geo.grid), "c_bias": ograd[:, 0].size,
    }  # fmt: skip
    eps = float(np.finfo(geo.dtype).eps)
    for name, array in want.items():
        worst = float(np.abs(got[name] - array).max())
        limit = eps * (8 + terms[name])
        assert worst <= limit, f"{name} is off by {worst:.2e} (limit {limit:.2e}): {geo}, {kernels}, {params}"
    return True
