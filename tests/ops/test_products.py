"""Large matrix products are cut into parts: correct, with the same bits on any number of cores.

Small ones are not cut.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weftplan as mx
from tests.contract.devices import place
from tests.standin_cupy import meter
from weftplan import device, ops
from weftplan.kernels.compiled import scratch
from weftplan.ops.core import products, registry
from weftplan.ops.core.schema import OpContext
from weftplan.planner import PlanOptions
from weftplan.support import blas_threads, core_sharing


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, four_cores: None) -> None:
    """Treat products of test size as large, on four cores."""
    monkeypatch.setattr(products, "FEW", 1 << 12)


@pytest.fixture
def cuts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which each cut product adds its number of parts."""
    results: list[int] = []

    def noting(work: Any, parts: int) -> None:
        results.append(parts)
        core_sharing.split(work, parts)

    monkeypatch.setattr(products, "split", noting)
    return results


SIZES = [(5, 40, 33), (33, 40, 5), (48, 16, 48), (1, 100, 700), (700, 100, 1), (130, 31, 129)]


@pytest.mark.parametrize(("rows", "depth", "columns"), SIZES)
@pytest.mark.parametrize("turned", [(False, False), (True, False), (False, True)], ids=["plain", "left", "right"])
def test_values(cuts, rows, depth, columns, turned):
    """Each element is the sum of its products, in either layout of the factors; only large products are cut."""
    rng = np.random.default_rng(0)
    a = rng.standard_normal((depth, rows)).T if turned[0] else rng.standard_normal((rows, depth))
    b = rng.standard_normal((columns, depth)).T if turned[1] else rng.standard_normal((depth, columns))
    out = np.full((rows, columns), np.nan)
    products.product(np, a, b, out)
    assert np.allclose(out, np.einsum("ij,jk->ik", a, b), rtol=1e-12, atol=1e-12)
    assert not cuts or 1 < cuts[0] <= products.MOST
    assert bool(cuts) == (rows * depth * columns >= 2 * products.FEW)


def test_parts_follow_from_sizes(cuts, monkeypatch):
    """A product is cut into the same parts on machines with 1, 2 and 64 cores."""
    a, b, out = np.ones((70, 70)), np.ones((70, 70)), np.empty((70, 70))
    for cpus in (1, 2, 64):
        monkeypatch.setattr(blas_threads, "usable_cpus", lambda cpus=cpus: cpus)
        products.product(np, a, b, out)
    assert len(set(cuts)) == 1
    assert len(cuts) == 3


def test_gpu_product_is_not_cut(cuts):
    """A product on a GPU is one launch and is not cut."""
    with place("standin") as context:
        where = device.get(context(0))

        def run() -> None:
            a, b, out = (where.xp.ones((70, 70)) for _ in range(3))
            meter.reset()
            products.product(where.xp, a, b, out)
            assert (meter.total, cuts) == (1, [])
            assert bool((out == 70).all())

        where.launch(run)


@pytest.mark.parametrize(("cell", "kernels"), [("dense", "numpy"), ("dense", "auto"), ("lstm", "auto")])
def test_same_bits_on_every_engine(monkeypatch, cuts, cell, kernels):
    """A training step with cut products has the same bits on every engine, also with a single worker."""
    monkeypatch.setattr(scratch, "FEW", 1 << 12)
    if cell == "dense":
        hidden = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=90, name="a")
        symbol = mx.sym.FullyConnected(mx.sym.Activation(hidden, act_type="tanh"), num_hidden=37, name="b")
    else:
        symbol = mx.sym.RNN(mx.sym.Variable("data"), mode="lstm", state_size=24, num_layers=1, name="r")
    results = []
    for kind, options in (
        ("NaiveEngine", {}),
        ("ThreadedEnginePerDevice", {}),
        ("ThreadedEngine", {}),
        ("ThreadedEnginePerDevice", {"cpu_workers": 1}),
    ):
        engine = mx.engine.create(kind, **options)
        with mx.engine.using(engine):
            shape = (65, 70) if cell == "dense" else (9, 7, 33)
            executor = symbol.simple_bind(mx.cpu(), data=shape, plan_options=PlanOptions(kernels=kernels))
            random = np.random.RandomState(0)
            for array in executor.arg_arrays:
                array[:] = random.standard_normal(array.shape) * 0.1
            executor.forward(is_train=True)
            executor.backward([mx.nd.ones(out.shape) for out in executor.outputs])
            results.append(b"".join(grad.asnumpy().tobytes() for grad in executor.grad_arrays))
        engine.stop()
    assert cuts or (cell, kernels) == ("dense", "auto")  # computed by compiled kernels, if available
    assert len(set(results)) == 1


@pytest.mark.parametrize(("large", "parts"), [((False, False), []), ((True, False), [3]), ((True, True), [4])])
def test_several_products_wait_once(cuts, large, parts):
    """Products computed together are split at most once, and have the bits of single products.

    Small products alone are not split.
    """
    rng = np.random.default_rng(1)
    each = []
    for is_large in large:
        a, b = (rng.standard_normal((32, 32 if is_large else 4)).astype(np.float32) for _ in range(2))
        each.append((a, b.T, np.empty((32, 32), np.float32)))
    wanted = []
    for a, b, out in each:
        products.product(np, a, b, out)
        wanted.append(out.tobytes())
        out.fill(0)
    cuts.clear()
    products.products(*each)
    assert [out.tobytes() for _, _, out in each] == wanted
    assert cuts == parts


def test_the_gradient_of_the_data_may_lie_where_the_data_was():
    """The data's gradient may overwrite the data: the weight's gradient, which reads the data, is computed first."""
    op = registry.get("_backward_FullyConnected")
    params = registry.parse_params(registry.get("FullyConnected"), {"num_hidden": 32})
    rng = np.random.default_rng(2)
    ograd, data, weight = (rng.standard_normal((32, 32)).astype(np.float32) for _ in range(3))
    results = []
    for shared in (False, True):
        source = data.copy()
        outs = [source if shared else np.empty_like(data), np.empty_like(weight), np.empty(32, np.float32)]
        op.forward(OpContext(np), params, [ograd, source, weight], outs)
        results.append([out.tobytes() for out in outs])
    assert results[0] == results[1]


def _pair(shared: bool, shape: tuple[int, ...] = (37, 23)) -> tuple[Any, Any]:
    """Return two arrays of equal content, in the same memory or not."""
    values = np.random.default_rng(3).standard_normal(shape).astype(np.float32)
    return values, values if shared else values.copy()


_CASES: dict[str, tuple[str, dict[str, Any], tuple[int, ...], int]] = {
    "dot, left": ("dot", {"transpose_a": True}, (37, 23), 23),
    "dot, right": ("dot", {"transpose_b": True}, (37, 23), 37),
    "dot of vectors": ("dot", {}, (1001,), 1),
    "batch_dot, left": ("batch_dot", {"transpose_a": True}, (3, 37, 23), 23),
    "batch_dot, right": ("batch_dot", {"transpose_b": True}, (3, 37, 23), 37),
    "gemm2": ("linalg_gemm2", {"transpose_b": True}, (37, 23), 37),
    "FullyConnected": ("FullyConnected", {"num_hidden": 37, "no_bias": True}, (37, 23), 37),
}


@pytest.mark.parametrize("case", _CASES)
def test_bits_do_not_depend_on_shared_memory(case, monkeypatch):
    """A product of two equal operands has the same bits whether or not they share memory."""
    monkeypatch.setattr(products, "FEW", 1 << 24)
    name, inputs, shape, side = _CASES[case]
    op = registry.get(name)
    out = np.empty((1,) if len(shape) == 1 else (*shape[:-2], side, side), np.float32)
    results = []
    for shared in (True, False):
        op.forward(OpContext(np), registry.parse_params(op, inputs), list(_pair(shared, shape)), [out])
        results.append(out.tobytes())
    assert results[0] == results[1]


@pytest.mark.parametrize("name", ["dot", "batch_dot", "linalg_gemm2", "FullyConnected"])
def test_bits_of_gradients_do_not_depend_on_shared_memory(name, monkeypatch):
    """Gradients have the same bits whether or not the incoming gradient shares memory with an operand."""
    monkeypatch.setattr(products, "FEW", 1 << 24)
    op = registry.get(name)
    inputs = {"num_hidden": 32, "no_bias": True} if name == "FullyConnected" else {}
    shape = (2, 32, 32) if name == "batch_dot" else (32, 32)
    backward, actual = registry.get(f"_backward_{name}"), []
    for shared in (True, False):
        ograd, data = _pair(shared, shape)
        second = ograd if shared else data.copy()
        outs = [np.empty(shape, np.float32) for _ in range(2)]
        backward.forward(OpContext(np), registry.parse_params(op, inputs), [ograd, data, second], outs)
        actual.append(b"".join(out.tobytes() for out in outs))
    assert actual[0] == actual[1]


PLANS: list[dict[str, Any]] = [
    {},
    {"strategy": "none", "enable_inplace": False},
    {"strategy": "none"},
    {"strategy": "arena", "enable_inplace": False},
    {"strategy": "arena", "alignment": 4096},
    {"strategy": "match_range"},
    {"compat": "mxnet"},
    {"compat": "paddle"},
    {"recompute": "sqrt"},
]


@pytest.mark.parametrize("shape", [(37, 23), (1000, 7)])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("turned", ["transpose_a", "transpose_b"])
def test_plans_do_not_change_bits(shape, dtype, turned, monkeypatch):
    """An array times its own reshape, and its gradients, have the same bits under every plan.

    Plans decide whether the operands share memory: by strategy, alignment and in-place sharing.
    """
    monkeypatch.setattr(products, "FEW", 1 << 24)
    data = mx.sym.Variable("data") + 0.5
    symbol = mx.sym.dot(data, mx.sym.Reshape(mx.sym.Reshape(data, shape=(-1,)), shape=shape), **{turned: True})
    numbers = np.random.default_rng(3).standard_normal(shape).astype(dtype)
    seen = set()
    for options in PLANS:
        executor = symbol.simple_bind(
            mx.cpu(), plan_options=PlanOptions(**options), data=shape, type_dict={"data": dtype}
        )
        executor.arg_dict["data"][:] = numbers
        executor.forward(is_train=True)
        executor.backward([mx.nd.ones(executor.outputs[0].shape, dtype=dtype)])
        seen.add(executor.outputs[0].asnumpy().tobytes() + executor.grad_dict["data"].asnumpy().tobytes())
    assert len(seen) == 1


@pytest.mark.parametrize("columns", [2, 3, 16, 17, 31, 32, 33, 100])
def test_halves_have_fewer_columns_than_rows(columns):
    """Both halves of a split have at least one column, and fewer than the whole."""
    assert 0 < products._halfway(columns) < columns


def test_kernels_multiply_through_one_function():
    """Only ``core/products.py`` calls NumPy's products, except the product of a matrix and its own transpose."""
    folder = Path(ops.__file__).parent
    calls = {
        str(path.relative_to(folder)): count
        for path in folder.rglob("*.py")
        if (count := len(re.findall(r"(?:xp|np)\.(?:matmul|dot|inner|tensordot|einsum)\(", path.read_text())))
    }
    assert calls == {"core/products.py": 3, "linalg/products.py": 1}
