"""cuBLAS: workspaces of a fixed size, so that products on several streams have the same bits in every run."""

import numpy as np
import pytest

import weftplan as mx
from tests.contract.devices import place
from tests.standin_cupy import machine
from weftplan import planner
from weftplan.device import cublas


def network():
    """Two branches of products."""
    sym = mx.sym
    x = sym.Variable("data")
    a, b = (sym.FullyConnected(sym.FullyConnected(x, num_hidden=4), num_hidden=4) for _ in range(2))
    return a * b


@pytest.mark.parametrize("setting", [None, ":16:8", ":0:0"])
def test_products_are_reproducible(monkeypatch, setting):
    """The workspaces are fixed before the first handle is made, unless the user says otherwise; a plan says how much
    they take, and whether bits may vary."""
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
        text = plan.left_out
    if setting != ":0:0":
        assert taken == {cublas.workspace_bytes()}
    each = {None: 33_554_432, ":16:8": 131_072, ":0:0": 0}[setting]
    assert f"{2 * each:,} bytes of cuBLAS (2 workers with {each:,} each" in text
    assert ("may vary from run to run" in text) == (setting == ":0:0")


def test_a_plan_for_a_host_names_no_bytes():
    """There is no cuBLAS."""
    assert "bytes of cuBLAS" not in planner.plan_symbol(network(), {"data": (2, 4)}).memory.left_out
