"""Compiled batch norm against formulas in float64: random shapes, in place, unwanted outputs, vector widths."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from weftplan.kernels.compiled.batch_norm import implementation as batch_norm
from weftplan.kernels.compiled.batch_norm import kernels as batch_norm_kernels
from weftplan.kernels.compiled.target import Target, host
from weftplan.ops.core import implementations, registry
from weftplan.ops.core.schema import OpContext, TensorSpec
from weftplan.ops.fusion import relu as joined
from weftplan.ops.fusion.normalize import NORMALIZE

HOST = host()
pytestmark = pytest.mark.skipif(isinstance(HOST, str), reason=f"no compiled kernels: {HOST}")


def native(name: str, params: dict[str, Any], inputs: list[Any], outputs: list[Any], shapes: Any, **how: Any) -> None:
    """Run the compiled kernel of an operator in exactly its scratch."""
    op = registry.get(name)
    ins = [TensorSpec(a.shape, a.dtype) for a in inputs]
    actual = implementations.choose(op, params, ins, shapes, "native").implementation
    assert actual.name == "native"
    workspace = np.full(actual.workspace(params, ins, shapes), 0xFF, np.uint8)
    ignored = op.ignored(params)
    actual.kernel(
        OpContext(np, workspace=workspace, **how),
        params,
        [None if i in ignored else a for i, a in enumerate(inputs)],
        outputs,
    )


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    """Return the shape and parameters of a random call."""
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=2, max_size=5)))
    axis = draw(st.integers(0, len(shape) - 1))
    assume(prod(shape[axis + 1 :]) > 1)  # otherwise NumPy computes it
    return {
        "shape": shape,
        "axis": axis,
        "dtype": draw(st.sampled_from((np.float32, np.float64))),
        "fix_gamma": draw(st.booleans()),
        "use_global_stats": draw(st.booleans()),
        "is_train": draw(st.booleans()),
        "wanted": draw(st.tuples(st.booleans(), st.booleans(), st.booleans())),
        "inplace": draw(st.booleans()),
        "seed": draw(st.integers(0, 99)),
    }


def case(**changes: Any) -> dict[str, Any]:
    """Return the settings of a training call with all outputs; ``changes`` override them."""
    return {
        "shape": (4, 5, 13, 11), "axis": 1, "dtype": np.float32, "fix_gamma": False, "use_global_stats": False,
        "is_train": True, "wanted": (True, True, True), "inplace": False, "seed": 0, **changes,
    }  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(cases())
@example(case())
@example(case(shape=(2, 3, 40, 41)))
@example(case(shape=(2, 3, 40, 41), inplace=True, dtype=np.float64))
@example(case(shape=(7, 3, 2), axis=-2))
def test_against_the_formula(given_case: dict[str, Any]):
    """Outputs, moving statistics and gradients equal the formula in float64 within rounding error, in place too."""
    shape, axis, dtype = given_case["shape"], given_case["axis"] % len(given_case["shape"]), given_case["dtype"]
    rng = np.random.default_rng(given_case["seed"])
    count = shape[axis]
    vector = [1] * len(shape)
    vector[axis] = count
    axes = tuple(i for i in range(len(shape)) if i != axis)
    x, dy = (rng.normal(0.5, 2, shape).astype(dtype) for _ in range(2))
    gamma, beta, mean, var = (rng.uniform(0.5, 2, count).astype(dtype) for _ in range(4))
    params = registry.parse_params(
        registry.get("BatchNorm"),
        {name: given_case[name] for name in ("axis", "fix_gamma", "use_global_stats")} | {"eps": 1e-3},
    )
    trains = given_case["is_train"] and not given_case["use_global_stats"]
    x8, dy8 = x.astype(np.float64), dy.astype(np.float64)
    m, v = (x8.mean(axes), x8.var(axes)) if trains else (mean.astype(np.float64), var.astype(np.float64))
    inverse = 1 / np.sqrt(v + 1e-3)
    g = np.ones(count) if given_case["fix_gamma"] else gamma.astype(np.float64)
    centred = x8 - m.reshape(vector)
    expected = centred * (inverse * g).reshape(vector) + beta.reshape(vector)
    moved = [0.9 * mean.astype(np.float64) + 0.1 * m, 0.9 * var.astype(np.float64) + 0.1 * v] if trains else [mean, var]
    moved = [one.copy() for one in moved]

    data = x.copy()
    room = [data if given_case["inplace"] else np.empty_like(x), np.empty(count, dtype), np.empty(count, dtype)]
    outputs = [a if w else None for a, w in zip(room, given_case["wanted"], strict=True)]
    specs = [TensorSpec(a.shape, a.dtype) for a in room]
    native("BatchNorm", params, [data, gamma, beta, mean, var], outputs, specs, is_train=given_case["is_train"])
    tolerance = {"rtol": 2e-4, "atol": 2e-4} if dtype == np.float32 else {"rtol": 1e-11, "atol": 1e-11}
    for got, want in zip(outputs, (expected, m, inverse), strict=True):
        if got is not None:
            np.testing.assert_allclose(got, want, **tolerance)
    for got, want in zip((mean, var), moved, strict=True):
        np.testing.assert_allclose(got, want, **tolerance)

    products = (dy8 * centred).sum(axes) * inverse
    dx = dy8 * (inverse * g).reshape(vector)
    if not given_case["use_global_stats"]:
        size = x.size // count
        along = centred * (products * inverse / size).reshape(vector)
        dx = (dy8 - dy8.mean(axes, keepdims=True) - along) * (inverse * g).reshape(vector)
    ograd = dy.copy()
    room = [ograd if given_case["inplace"] else np.empty_like(x), np.empty(count, dtype), np.empty(count, dtype)]
    outputs = [a if w else None for a, w in zip(room, given_case["wanted"], strict=True)]
    kept = [m.astype(dtype), inverse.astype(dtype)]
    native("_backward_BatchNorm", params, [ograd, x, gamma, *kept], outputs, specs)
    wanted = (dx, np.zeros(count) if given_case["fix_gamma"] else products, dy8.sum(axes))
    loose = {"rtol": 2e-3, "atol": 2e-3} if dtype == np.float32 else tolerance
    for got, want in zip(outputs, wanted, strict=True):
        if got is not None:
            np.testing.assert_allclose(got, want, **loose)


@pytest.mark.parametrize("mode", ["native", "numpy"])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("settings", [{}, {"fix_gamma": True}, {"use_global_stats": True}])
def test_gradient_behind_a_relu(settings: dict[str, Any], dtype: Any, mode: str):
    """The fused gradient has the bits of the gradients of relu and batch norm.

    It does not read relu's output. Inputs include values next to the threshold, no negative values, and NaN.
    """
    if mode == "native" and dtype == np.float16:
        pytest.skip("there is no such kernel")
    op, norm = joined.GRADIENTS["_backward_BatchNorm"], registry.get("_backward_BatchNorm")
    params = registry.parse_params(registry.get("BatchNorm"), {"fix_gamma": False, "eps": 1e-3, **settings})
    rng = np.random.default_rng(5)
    x, dy = (rng.normal(0, 2, (3, 6, 5, 29)).astype(dtype) for _ in range(2))
    acc = np.float32 if dtype == np.float16 else dtype
    x[:, 1] = np.nan
    gamma, beta, mean, var = (rng.uniform(-1, 1, 6).astype(acc) for _ in range(4))
    var += 2
    beta[2], beta[3], x[:, 3] = -20, 20, np.abs(x[:, 3])
    mean[4], beta[4], x[:, 4] = 0, 0, np.maximum(x[:, 4], 0)  # with these statistics many are exactly 0
    y, kept = np.empty_like(x), [np.empty(6, acc) for _ in range(2)]
    shapes = [TensorSpec(a.shape, a.dtype) for a in (x, gamma, gamma)]

    def run(one: Any, inputs: list[Any], outputs: list[Any]) -> list[Any]:
        specs = [TensorSpec(a.shape, a.dtype) for a in inputs]
        chosen = implementations.choose(one, params, specs, shapes, mode).implementation
        assert chosen.name == mode
        scratch = np.full(chosen.workspace(params, specs, shapes), 0xFF, np.uint8)
        arguments = [None if i in one.ignored(params) else a for i, a in enumerate(inputs)]
        with np.errstate(all="ignore"):
            chosen.kernel(OpContext(np, is_train=True, workspace=scratch), params, arguments, outputs)
        return outputs

    run(joined.LAYERS["BatchNorm"], [x, gamma, beta, mean, var], [y, *kept])
    for wanted in ((True, True, True), (True, False, False), (False, True, True)):
        room = [[np.empty_like(x), np.empty(6, acc), np.empty(6, acc)] for _ in range(2)]
        first, second = ([a if w else None for a, w in zip(outs, wanted, strict=True)] for outs in room)
        run(norm, [dy * (y != 0), x, gamma, *kept], first)
        run(op, [dy, x, gamma, beta, *kept], second)
        for a, b in zip(first, second, strict=True):
            assert (a is None) == (b is None)
            assert a is None or a.tobytes() == b.tobytes()


@pytest.mark.parametrize("plane", [7, 16, 49, 200, 1024])
def test_bits_do_not_depend_on_the_width_of_vectors(plane: int):
    """Vectors of 128, 256 and 512 bits give bit-identical results."""
    assert isinstance(HOST, Target)
    rng = np.random.default_rng(1)
    x = rng.normal(size=(3, 4, plane)).astype(np.float32)
    beta = np.zeros(4, np.float32)
    results = []
    for bits in (128, 256, 512):
        target = Target(HOST.cpu, HOST.features, bits, HOST.registers, HOST.compiler)
        y, mean, var, inverse = np.empty_like(x), *(np.empty(4, np.float32) for _ in range(3))
        constants = np.array([1e-5, 1 / (3 * plane)], np.float32)
        arrays = (x, y, beta, beta, mean, var, inverse, constants)
        values = dict(zip(batch_norm_kernels.FORWARD, map(batch_norm.address, arrays), strict=False))
        values |= {"gamma": 0, "images": 3, "channels": 4, "plane": plane, "last": 4}
        words = np.array([values.get(name, 0) for name in batch_norm_kernels.FORWARD], np.int64)
        batch_norm.entries(x.dtype, target)["forward"](batch_norm.address(words))
        dx, dgamma, dbeta = np.empty_like(x), np.empty(4, np.float32), np.empty(4, np.float32)
        back = (y, x, dx, beta, mean, inverse, dgamma, dbeta, constants, beta)
        places = dict(zip(batch_norm_kernels.BACKWARD, map(batch_norm.address, back), strict=False))
        places |= {"gamma": 0, "dx_image": 4 * plane * 4, "dx_channel": plane * 4}
        words = np.array([{**values, **places}.get(name, 0) for name in batch_norm_kernels.BACKWARD], np.int64)
        batch_norm.entries(x.dtype, target)["backward"](batch_norm.address(words))
        results.append(b"".join(a.tobytes() for a in (y, mean, var, inverse, dx, dgamma, dbeta)))
    assert results[0] == results[1] == results[2]


def test_a_recomputed_call_leaves_the_moving_statistics_alone():
    """A recomputed node gives the same output and does not update the moving statistics."""
    rng = np.random.default_rng(2)
    x = rng.normal(size=(2, 3, 20)).astype(np.float32)
    vectors = [np.ones(3, np.float32) for _ in range(4)]
    params = registry.parse_params(registry.get("BatchNorm"), {})
    out = [np.empty_like(x), None, None]
    specs = [TensorSpec(x.shape, x.dtype), *[TensorSpec((3,), x.dtype)] * 2]
    native("BatchNorm", params, [x, *vectors], out, specs, is_train=True, recompute=True)
    assert all((one == 1).all() for one in vectors)
    repeated = [np.empty_like(x), None, None]
    native("BatchNorm", params, [x, *vectors], repeated, specs, is_train=True)
    assert repeated[0].tobytes() == out[0].tobytes()
    assert not any((one == 1).all() for one in vectors[2:])


@pytest.mark.parametrize(("shape", "name"), [((8, 64, 1, 2), "native"), ((8, 64, 1, 1), "numpy"), ((8, 64), "numpy")])
def test_planes_of_one_element_are_left_to_numpy(shape, name):
    """NumPy computes planes of a single element, for which a loop over a channel's contiguous elements is slower."""
    op = registry.get("BatchNorm")
    vector = TensorSpec((64,), np.dtype(np.float32))
    whole = TensorSpec(shape, np.dtype(np.float32))
    params = registry.parse_params(op, {})
    for mode in ("auto", "native"):
        actual = implementations.choose(op, params, [whole, *[vector] * 4], [whole, vector, vector], mode)
        assert actual.implementation.name == name


@pytest.mark.parametrize(("channel", "lines"), [(400, 4), (100, 1), (1600, 16), (401, 5)])
def test_prefetched_lines_per_plane(channel: int, lines: int) -> None:
    """Prefetching spreads the cache lines of the other array's plane evenly over a pass.

    ``late_lines`` is the number of lines to prefetch per 256 bytes of the processed plane, which has 400 bytes.
    """
    words = batch_norm.fetching(batch_norm_kernels.LATE, 4096, 3 * channel, channel, 400, behind=2)
    assert words == {
        "late_at": 4096 + 2 * channel, "late_image": 3 * channel, "late_channel": channel, "late_lines": lines,
    }  # fmt: skip
    assert words.keys() <= set(batch_norm_kernels.FETCHED)


def test_unwanted_result_is_not_prefetched() -> None:
    """An unwanted result has the address 0, and no line is prefetched for it."""
    assert batch_norm.fetching(batch_norm_kernels.EARLY, 0, 64, 64, 64)["early_lines"] == 0


@pytest.mark.parametrize("mode", ["numpy", "native"])
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_known_statistics_give_the_same_bits(mode: str, relu: bool, fixed: bool, dtype: Any) -> None:
    """A training batch norm recomputed from its data and statistics has the same bits, also in place."""
    rng = np.random.default_rng(4)
    params = registry.parse_params(registry.get("BatchNorm"), {"fix_gamma": fixed, "eps": 1e-3})
    data = rng.normal(0.5, 2, (3, 5, 7, 9)).astype(dtype)
    gamma, beta, mean, var = (rng.uniform(0.5, 2, 5).astype(dtype) for _ in range(4))
    kept, out, repeated = [np.empty(5, dtype) for _ in range(2)], np.empty_like(data), np.empty_like(data)

    def run(op: Any, params: Any, inputs: list[Any], outputs: list[Any]) -> None:
        ins, outs = ([TensorSpec(a.shape, a.dtype) for a in arrays] for arrays in (inputs, outputs))
        actual = implementations.choose(op, params, ins, outs, mode).implementation
        assert actual.name == mode
        workspace = np.full(actual.workspace(params, ins, outs), 0xFF, np.uint8)
        ignored = op.ignored(params)
        arguments = [None if i in ignored else a for i, a in enumerate(inputs)]
        actual.kernel(OpContext(np, is_train=True, workspace=workspace), params, arguments, outputs)

    run(joined.norm_of(joined.RELU * relu), params, [data, gamma, beta, mean, var], [out, *kept])
    second_run = {"fix_gamma": fixed, "relu": relu}
    run(NORMALIZE, second_run, [data, gamma, beta, *kept], [repeated])
    assert repeated.tobytes() == out.tobytes()
    run(NORMALIZE, second_run, [data, gamma, beta, *kept], [data])
    assert data.tobytes() == out.tobytes()
