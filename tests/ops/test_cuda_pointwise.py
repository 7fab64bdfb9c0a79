"""Generated kernels of fused elementwise nodes: indices, vectors and their ends, and compiler output."""

from __future__ import annotations

import itertools
import re
from typing import Any

import numpy as np
import pytest

import weftplan as mx
from tests.contract.devices import place
from tests.cuda_on_host import build
from tests.cuda_on_host.kernels import on_host
from tests.support import ops_cuda_sources as cuda
from tests.support.pointwise_networks import NETWORKS, groups, planned
from weftplan.kernels.cuda import pointwise
from weftplan.ops.core.cuda_source import text_of
from weftplan.ops.core.formulas import FUNCTIONS
from weftplan.planner import plan_symbol

needs_nvcc = pytest.mark.skipif(cuda.NVCC is None, reason="nvcc is not installed")
needs_cuobjdump = pytest.mark.skipif(
    cuda.NVCC is None or cuda.CUOBJDUMP is None, reason="nvcc or cuobjdump is not installed"
)

SHAPES = {
    (2, 3, 4): [(1, 3, 1), (1, 1, 4), (2, 1, 1), (1, 3, 4), (2, 3, 1), (1, 1, 1)],
    (5, 7): [(1, 7), (5, 1), (1, 1)],
    (3, 8): [(3, 1)],
    (1, 1): [(1, 1)],
}


@pytest.mark.parametrize(("shape", "own"), [(shape, own) for shape, owns in SHAPES.items() for own in owns])
def test_every_form_of_an_index(shape: Any, own: Any):
    """A fused broadcast sum and product equals NumPy's, for sizes that are multiples of a vector and others."""
    x = mx.sym.broadcast_add(mx.sym.Variable("data"), mx.sym.Variable("own", shape=own)) * 3.0
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal(shape).astype(np.float32), rng.standard_normal(own).astype(np.float32)
    with place("standin", kind="NaiveEngine") as context:
        executor = x.simple_bind(context(0), grad_req="null", data=shape)
        assert groups(executor.planned.graph)
        executor.arg_dict["data"][:], executor.arg_dict["own"][:] = a, b
        np.testing.assert_array_equal(executor.forward()[0].asnumpy(), (a + b) * np.float32(3.0))


def test_a_shape_of_two_alternations_is_not_fused():
    """A broadcast shape that alternates twice has no index form, so its nodes are not fused."""
    x = mx.sym.broadcast_add(mx.sym.Variable("data"), mx.sym.Variable("own", shape=(2, 1, 4))) * 3.0
    assert not groups(planned(x, (2, 3, 4), grad_req="null").graph)


@pytest.mark.skipif(bool(build.missing()), reason=build.missing() or "nothing is missing")
@pytest.mark.parametrize("name", NETWORKS)
def test_machine_code_computes_the_values(name: str):
    """Generated sources, compiled for the host, give the host's values and gradients.

    They run in two orders of threads, with every access checked.
    """
    make, shape = NETWORKS[name]
    results = []
    with place("standin", kind="NaiveEngine") as context, on_host((0, 1)) as host:
        for ctx in (mx.cpu(), context(0)):
            executor = make().simple_bind(ctx, grad_req="write", data=shape)
            rng = np.random.default_rng(5)
            for array in executor.arg_arrays:
                array[:] = mx.nd.array(rng.standard_normal(array.shape), ctx=ctx)
            executor.forward(is_train=True)
            executor.backward([mx.nd.ones(out.shape, ctx=ctx) for out in executor.outputs])
            arrays = [*executor.outputs, *executor.grad_arrays]
            results.append([array.asnumpy() for array in arrays])
        assert any(kernel == "pointwise" for _, kernel in host.executed)
    for expected, actual in zip(*results, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=2e-4, atol=2e-4)


@needs_nvcc
def test_vectors_are_one_instruction(tmp_path: Any):
    """nvcc merges loads and stores of neighbouring elements into one instruction, because the pointers are aligned."""
    for dtype, words in (("float32", "v4"), ("float64", "v2")):
        data = mx.sym.Variable("data")
        symbol = mx.sym.exp(data * 2.0) + data
        plan = plan_symbol(symbol, {"data": (4, 8)}, {"data": dtype}, context=mx.gpu(0))
        (group,) = groups(plan.graph)
        kernel = pointwise.kernel_of(group, (True,), pointwise.lanes_of(group))
        text = cuda.ptx(text_of(kernel.code, T=group.dtype), tmp_path)["pointwise"]
        assert len(re.findall(rf"ld\.global(?:\.nc)?\.{words}\b", text)) == 1
        assert len(re.findall(rf"st\.global\.{words}\b", text)) == 1


@needs_nvcc
def test_no_operation_is_contracted(tmp_path: Any):
    """A product and a sum are rounded twice: the kernel has no fused multiply-add."""
    data = mx.sym.Variable("data")
    plan = planned(data * 2.0 + data, (4, 8), grad_req="null")
    (group,) = groups(plan.graph)
    text = text_of(pointwise.kernel_of(group, (True,), 1).code, T=group.dtype)
    assert "fma" not in cuda.ptx(text, tmp_path)["pointwise"]


@needs_cuobjdump
def test_functions_do_not_depend_on_contraction(tmp_path: Any):
    """A generated function has the same instructions with and without contraction, and so the same bits.

    CuPy compiles its kernels with contraction, this package without. float64 functions that differ are left to CuPy.
    """
    heads = "const T* x, const T* z, T* y"
    bodies = {name: f"{name}(x[i]{', z[i]' * (count - 1)})" for name, count in FUNCTIONS.items()}
    bodies |= {"sqrt": "sqrt(x[i])", "divide": "x[i] / z[i]", "maximum": "isnan(x[i]) ? x[i] : fmax(x[i], z[i])"}
    text = "".join(f'extern "C" __global__ void k_{name}({heads}) {{ int i = threadIdx.x; y[i] = {body}; }}\n'
                   for name, body in bodies.items())  # fmt: skip
    for dtype in (np.float32, np.float64):
        code = text_of(text, T=np.dtype(dtype))
        with_it, without = (cuda.sass(code, tmp_path, options=[f"--fmad={one}"]) for one in ("true", "false"))
        differing = {name for name in bodies if with_it[f"k_{name}"] != without[f"k_{name}"]}
        assert differing == (set(pointwise._CONTRACTED) if dtype == np.float64 else set())


def test_functions_that_contraction_changes_are_not_generated():
    """log and log1p are fused in float32 but not in float64, where contraction would change their bits."""
    for dtype, fused in (("float32", True), ("float64", False)):
        for name, outer in itertools.product(("log", "log1p"), ("exp",)):
            symbol = getattr(mx.sym, outer)(getattr(mx.sym, name)(mx.sym.Variable("data")))
            plan = plan_symbol(symbol, {"data": (4, 8)}, {"data": dtype}, context=mx.gpu(0))
            assert bool(groups(plan.graph)) == fused


def test_a_formula_too_long_is_not_fused():
    """A long chain is split into fused kernels of at most 48 members."""
    x = mx.sym.Variable("data")
    for _ in range(200):
        x = x * 1.5 + 0.5
    members = [len(group.members) for group in groups(planned(x, (4, 4), grad_req="null").graph)]
    assert sum(members) == 400
    assert max(members) <= 48
