"""Layer norm and GRU cells on a GPU: the host's values in few launches, and no memory outside the plan."""

import numpy as np
import pytest

import weftplan as mx
from tests.contract.devices import place
from tests.standin_cupy import meter
from weftplan import device

LOOSE = {"float16": 2e-2, "float32": 2e-5, "float64": 1e-11}


def step(symbol, shapes, ctx, dtype):
    """Return output and gradients by name, and the launches of one training step."""
    types = dict.fromkeys(symbol.list_arguments(), dtype)
    executor = symbol.simple_bind(ctx, grad_req="write", type_dict=types, **shapes)
    rng = np.random.default_rng(4)
    for array in executor.arg_dict.values():
        array[:] = mx.nd.array(rng.standard_normal(array.shape), ctx=ctx, dtype=dtype)
    executor.forward(is_train=True)
    out = executor.outputs[0]
    head = mx.nd.array(rng.standard_normal(out.shape), ctx=ctx, dtype=dtype)
    mx.nd.waitall()
    meter.reset()
    executor.forward(is_train=True)
    executor.backward(head)
    launches = dict(meter.launches)
    assert executor.allocated_bytes == executor.memory_plan.peak
    arrays = {"out": out, **executor.grad_dict}
    return {name: array.asnumpy() for name, array in arrays.items()}, launches


def check_values(symbol, shapes, dtype):
    """Check that values equal the host's and repeat bit by bit; return the launches on the stand-in."""
    with place("standin", kind="NaiveEngine") as context:
        expected, _ = step(symbol, shapes, mx.cpu(), dtype)
        actual, launches = step(symbol, shapes, context(0), dtype)
        repeated, _ = step(symbol, shapes, context(1), dtype)
        if dtype != "float16":  # CuPy's products copy rows that are not contiguous
            assert device.get(context(0)).temporaries.reserved == 0
    for name, array in expected.items():
        scale = max(1.0, float(np.abs(array).max()))
        apart = np.abs(actual[name].astype(float) - array.astype(float)).max()
        assert apart <= LOOSE[dtype] * scale, name
        assert actual[name].tobytes() == repeated[name].tobytes()
    return launches


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize(
    ("op", "shape", "axis"),
    [
        ("LayerNorm", (5, 70), -1),
        ("LayerNorm", (40, 3), -1),
        ("LayerNorm", (3, 6, 4), 1),
        ("LayerNorm", (2, 1), -1),
        ("InstanceNorm", (2, 3, 5, 4), None),
        ("InstanceNorm", (3, 40, 1), None),
    ],
)
def test_norms_are_three_launches(op, shape, axis, dtype):
    """Layer and instance norms take one launch forwards and two backwards.

    Rows and gammas are longer and shorter than a block is wide, along any axis.
    """
    how = {} if axis is None else {"axis": axis}
    launches = check_values(getattr(mx.sym, op)(mx.sym.Variable("data"), name="n", **how), {"data": shape}, dtype)
    assert {name: count for name, count in launches.items() if "row" in name} == {
        "normalize_rows": 1,
        "normalize_rows_back": 1,
        "sum_over_rows": 1,
    }


@pytest.mark.parametrize("wanted", [{"data": "write"}, {"n_gamma": "write"}, {"n_beta": "write", "data": "add"}])
def test_norms_compute_what_is_wanted(wanted):
    """Gradients requested alone equal the host's; scratch for the others is part of the plan."""
    symbol = mx.sym.LayerNorm(mx.sym.Variable("data"), name="n")
    results = []
    with place("standin", kind="NaiveEngine") as context:
        for ctx in (mx.cpu(), context(0)):
            executor = symbol.simple_bind(ctx, grad_req=wanted, data=(4, 9))
            for k, array in enumerate(executor.arg_dict.values()):
                array[:] = mx.nd.array(np.sin(np.arange(array.size) * (k + 1.3)).reshape(array.shape), ctx=ctx)
            for array in executor.grad_dict.values():
                if array is not None:
                    array[:] = 1
            executor.forward(is_train=True)
            executor.backward(mx.nd.array(np.cos(np.arange(36.0)).reshape(4, 9), ctx=ctx))
            assert executor.allocated_bytes == executor.memory_plan.peak
            results.append({n: a.asnumpy() for n, a in executor.grad_dict.items() if a is not None})
            del executor
    for name, array in results[0].items():
        np.testing.assert_allclose(results[1][name], array, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_a_step_of_a_gru_is_two_launches(bidirectional, dtype):
    """A GRU step takes one product and one cell kernel forwards.

    Backwards it takes one cell kernel, and its products.
    """
    steps, batch, size = 4, 2, 3
    state = mx.sym.Variable("state")
    symbol = mx.sym.RNN(
        mx.sym.Variable("data"), mx.sym.Variable("w"), state, state_size=size, num_layers=1, mode="gru",
        bidirectional=bidirectional,
    )  # fmt: skip
    ways = 1 + bidirectional
    shapes = {"data": (steps, batch, 5), "state": (ways, batch, size)}
    launches = check_values(symbol, shapes, dtype)
    assert (launches["gru_step"], launches["gru_back"]) == (steps * ways, steps * ways)
    if dtype != "float16":  # forward: the input; backward: input, weights, states and initial state
        assert launches["sgemm" if dtype == "float32" else "dgemm"] == (2 * steps + 5) * ways
