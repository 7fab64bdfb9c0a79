"""cuBLAS: workspaces of a fixed size, so that products on several streams have the same bits in every run."""

import numpy as np
import pytest

import weftplan as mx
from tests.contract.devices import place
from tests.standin_cupy import machine
from weftplan import planner
from weftplan.device import cublas
from weftplan.errors import BudgetError


def network():
    """Return a network of two branches of matrix products."""
    sym = mx.sym
    x = sym.Variable("data")
    a, b = (sym.FullyConnected(sym.FullyConnected(x, num_hidden=4), num_hidden=4) for _ in range(2))
    return a * b


@pytest.mark.parametrize("setting", [None, ":16:8", ":0:0"])
def test_products_are_reproducible(monkeypatch, setting):
    """Workspaces have a fixed size unless CUBLAS_WORKSPACE_CONFIG sets another.

    A plan reports their bytes, and whether results may vary from run to run.
    """
    if setting is None:
        monkeypatch.delenv(cublas.VARIABLE, raising=False)
    else:
        monkeypatch.setenv(cublas.VARIABLE, setting)
    with place("standin", gpu_workers=2) as context:
        x = [mx.nd.ones((4, 4), ctx=context(0)) for _ in range(4)]
        for _ in range(8):
            x = [mx.nd.dot(one, one) * 0.1 for one in x]
        mx.nd.waitall()
        np.testing.assert_array_equal(x[0].asnumpy(), x[3].asnumpy())
        assert bool(machine.unreproducible) == (setting == ":0:0")
        taken = {handle.workspace for handle in machine.handles.values()}
        monkeypatch.setenv("MXNET_GPU_WORKER_NTHREADS", "2")
        plan = planner.plan_symbol(network(), {"data": (2, 4)}, context=context(0)).memory
    if setting != ":0:0":
        assert taken == {cublas.workspace_bytes()}
    each = {None: 33_554_432, ":16:8": 131_072, ":0:0": 0}[setting]
    assert plan.external_bytes["cublas_workspaces"] == 2 * each
    assert ("cuBLAS" in plan.left_out) == (setting == ":0:0")
    assert ("may vary from run to run" in plan.left_out) == (setting == ":0:0")


def test_a_plan_for_a_host_has_no_workspaces():
    """A plan for a host, or without matrix products, has no workspaces."""
    assert "cublas_workspaces" not in planner.plan_symbol(network(), {"data": (2, 4)}).memory.external_bytes
    without = mx.sym.exp(mx.sym.Variable("data"))
    assert (
        "cublas_workspaces" not in planner.plan_symbol(without, {"data": (2,)}, context=mx.gpu(0)).memory.external_bytes
    )


def test_a_budget_covers_the_workspaces(monkeypatch):
    """Workspaces are part of a plan's total, once per GPU with products; a budget below them fits no plan."""
    monkeypatch.delenv(cublas.VARIABLE, raising=False)
    plan = network().plan(data=(2, 4), train=False, context=mx.gpu(0))
    assert plan.total > 33_554_432
    assert network().plan(data=(2, 4), train=False, context=mx.gpu(0), budget=plan.total).total == plan.total
    with pytest.raises(BudgetError) as caught:
        network().plan(data=(2, 4), train=False, context=mx.gpu(0), budget=33_554_432)
    assert caught.value.smallest == plan.total
    with mx.AttrScope(ctx_group="there"):
        there = mx.sym.FullyConnected(network(), num_hidden=3)
    two = there.plan(data=(2, 4), train=False, context=mx.gpu(0), group2ctx={"there": mx.gpu(1)})
    assert two.external_bytes["cublas_workspaces"] == 2 * 33_554_432
