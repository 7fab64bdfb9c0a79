"""Large products are cut into parts: right, of the same bits on any number of cores, and small ones are not cut."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import weftplan as mx
from tests.contract.devices import place
from tests.standin_cupy import meter
from weftplan import blas, cores, device
from weftplan.ops import products, registry
from weftplan.ops.schema import OpContext


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, four_cores: None) -> None:
    """Products of test size are large, on four cores."""
    monkeypatch.setattr(products, "FEW", 1 << 12)


@pytest.fixture
def cuts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many parts each product was cut into."""
    found: list[int] = []

    def noting(work: Any, parts: int) -> None:
        found.append(parts)
        cores.split(work, parts)

    monkeypatch.setattr(products, "split", noting)
    return found


SIZES = [(5, 40, 33), (33, 40, 5), (48, 16, 48), (1, 100, 700), (700, 100, 1), (130, 31, 129)]


@pytest.mark.parametrize(("rows", "depth", "columns"), SIZES)
@pytest.mark.parametrize("turned", [(False, False), (True, False), (False, True)], ids=["plain", "left", "right"])
def test_values(cuts, rows, depth, columns, turned):
    """Each element is the sum of its products, in either layout of the factors."""
    rng = np.random.default_rng(0)
    a = rng.standard_normal((depth, rows)).T if turned[0] else rng.standard_normal((rows, depth))
    b = rng.standard_normal((columns, depth)).T if turned[1] else rng.standard_normal((depth, columns))
    out = np.full((rows, columns), np.nan)
    products.product(np, a, b, out)
    assert np.allclose(out, np.einsum("ij,jk->ik", a, b), rtol=1e-12, atol=1e-12)
    assert not cuts or 1 < cuts[0] <= products.MOST
    assert bool(cuts) == (rows * depth * columns >= 2 * products.FEW)


def test_parts_follow_from_sizes(cuts, monkeypatch):
    """Whatever the machine has, a product is cut in the same way."""
    a, b, out = np.ones((70, 70)), np.ones((70, 70)), np.empty((70, 70))
    for cpus in (1, 2, 64):
        monkeypatch.setattr(blas, "usable_cpus", lambda cpus=cpus: cpus)
        products.product(np, a, b, out)
    assert len(set(cuts)) == 1
    assert len(cuts) == 3


def test_one_call_elsewhere(cuts):
    """A GPU gets one product: its cores are not this module's business."""
    with place("standin") as context:
        where = device.get(context(0))

        def run() -> None:
            a, b, out = (where.xp.ones((70, 70)) for _ in range(3))
            meter.reset()
            products.product(where.xp, a, b, out)
            assert (meter.total, cuts) == (1, [])
            assert bool((out == 70).all())

        where.launch(run)


@pytest.mark.parametrize("cell", ["dense", "lstm"])
def test_same_bits_on_every_engine(cuts, cell):
    """A training step of layers that are cut, on one thread, on workers with idle cores, and on one worker by wish."""
    if cell == "dense":
        hidden = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=90, name="a")
        symbol = mx.sym.FullyConnected(mx.sym.Activation(hidden, act_type="tanh"), num_hidden=37, name="b")
    else:
        symbol = mx.sym.RNN(mx.sym.Variable("data"), mode="lstm", state_size=24, num_layers=1, name="r")
    found = []
    for kind, options in (
        ("NaiveEngine", {}),
        ("ThreadedEnginePerDevice", {}),
        ("ThreadedEngine", {}),
        ("ThreadedEnginePerDevice", {"cpu_workers": 1}),
    ):
        engine = mx.engine.create(kind, **options)
        with mx.engine.using(engine):
            shape = (65, 70) if cell == "dense" else (9, 7, 33)
            executor = symbol.simple_bind(mx.cpu(), data=shape)
            random = np.random.RandomState(0)
            for array in executor.arg_arrays:
                array[:] = random.standard_normal(array.shape) * 0.1
            executor.forward(is_train=True)
            executor.backward([mx.nd.ones(out.shape) for out in executor.outputs])
            found.append(b"".join(grad.asnumpy().tobytes() for grad in executor.grad_arrays))
        engine.stop()
    assert cuts
    assert len(set(found)) == 1


@pytest.mark.parametrize(("large", "parts"), [((False, False), []), ((True, False), [3]), ((True, True), [4])])
def test_several_products_wait_once(cuts, large, parts):
    """Each has the bits of one that is computed alone; small ones are not handed out by themselves."""
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
    """Then it is computed after the gradient of the weight, which reads the data."""
    op = registry.get("_backward_FullyConnected")
    params = registry.parse_params(registry.get("FullyConnected"), {"num_hidden": 32})
    rng = np.random.default_rng(2)
    ograd, data, weight = (rng.standard_normal((32, 32)).astype(np.float32) for _ in range(3))
    found = []
    for shared in (False, True):
        source = data.copy()
        outs = [source if shared else np.empty_like(data), np.empty_like(weight), np.empty(32, np.float32)]
        op.forward(OpContext(np), params, [ograd, source, weight], outs)
        found.append([out.tobytes() for out in outs])
    assert found[0] == found[1]
