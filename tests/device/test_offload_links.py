"""Link speeds of offload targets, which plans use.

They are measured once on GPUs, configured on simulated devices, and otherwise assumed.
"""

import numpy as np
import pytest

import weftplan as mx
from tests.contract.devices import place
from tests.standin_cupy import machine, meter
from weftplan import device, planner
from weftplan.device import offload_links
from weftplan.device.offload_links import speed
from weftplan.device.offload_targets import Link
from weftplan.device.simulated import CostModel, configure
from weftplan.errors import PlanError
from weftplan.planner.spill.search import PCIE, spill_targets

HOST = mx.Context("cpu_pinned", 0)


@pytest.fixture(autouse=True)
def _short_copies(monkeypatch):
    monkeypatch.setattr(offload_links, "_LONG", 1 << 20)


def count_copies():
    """Return the number of copies in and out that the stand-in has counted."""
    return meter.launches["memcpy HtoD"] + meter.launches["memcpy DtoH"]


def test_a_gpu_is_measured_once():
    """The speed of a GPU's link is that of the slower direction; a second call copies nothing."""
    with place("standin") as context:
        machine.rates = {"memcpy HtoD": 25e6, "memcpy DtoH": 20e6}  # bytes per millisecond
        actual = speed(context(0), HOST)
        assert actual is not None
        assert actual.bandwidth == pytest.approx(20e9, rel=0.06)
        assert actual.latency == pytest.approx(10e-6)
        count = count_copies()
        assert count > 0
        machine.rates = {}
        assert speed(context(0), HOST) == actual
        assert count_copies() == count
        assert speed(context(1), HOST) is None  # a pair without a set rate: its copies take no time


def test_two_gpus_are_measured():
    """The link to another GPU has its own measured speed."""
    with place("standin") as context:
        machine.rates = {"memcpy peer": 200e6}
        actual = speed(context(0), context(1))
        assert actual is not None
        assert actual.bandwidth == pytest.approx(200e9, rel=0.06)
        assert device.get(context(0)).memory_info()[0] == machine.capacity[0] - machine.used[0]


def test_small_differences_are_rounded_away():
    """Measurements that differ by a few per cent give the same speed and hence the same plan."""
    seen = set()
    for rate in (20.0e6, 20.3e6, 19.8e6):
        with place("standin") as context:
            machine.rates = {"memcpy HtoD": rate, "memcpy DtoH": rate}
            seen.add(speed(context(0), HOST))
    assert len(seen) == 1


def test_unmeasurable_link_is_assumed():
    """Without memory for the copies, and for devices that are no GPUs, no speed is measured; plans assume PCIe."""
    with place("standin") as context:
        machine.rates = {"memcpy HtoD": 25e6, "memcpy DtoH": 20e6}
        machine.capacity[0] = 1 << 19
        assert speed(context(0), HOST) is None
        (actual,) = spill_targets(context(0), planner.PlanOptions())
        assert actual.link == PCIE
    assert speed(mx.cpu(), HOST) is None


def test_simulated_device_reports_its_cost_model():
    """The speed of a simulated device is that of its cost model; no copy is made, and no time passes."""
    ctx = mx.sim(70)
    configure(70, cost=CostModel(bandwidth=3e9, latency=2e-5))
    before = device.get(ctx).clock
    assert speed(ctx, mx.Context("cpu_pinned", 70)) == Link(3e9, 2e-5)
    assert device.get(ctx).clock == before


def network():
    """Return a network whose intermediate results wait for the backward part."""
    net = mx.sym.Variable("data")
    for k in range(6):
        net = mx.sym.Activation(mx.sym.FullyConnected(net, num_hidden=64, name=f"f{k}"), act_type="tanh")
    return mx.sym.SoftmaxOutput(net, name="softmax")


def bind_with_budget(ctx, share):
    """Return an executor whose memory budget is the given share of its planned memory."""
    net = network()
    shapes = {"data": (256, 64), "softmax_label": (256,)}
    whole = net.plan(shapes, context=ctx).peak
    chosen = planner.PlanOptions.from_environment(budget=int(share * whole))
    return net.simple_bind(ctx, plan_options=chosen, **shapes)


@pytest.mark.shows("WEFTPLAN_MEASURE_LINKS")
@pytest.mark.parametrize("setting", ["0", "1"])
def test_a_bind_with_a_budget_measures(setting, monkeypatch):
    """A bind with a budget measures the link; with WEFTPLAN_MEASURE_LINKS=0 it assumes PCIe."""
    monkeypatch.setenv("WEFTPLAN_MEASURE_LINKS", setting)
    with place("standin") as context:
        machine.rates = {"memcpy HtoD": 25e6, "memcpy DtoH": 25e6}
        executor = bind_with_budget(context(0), 1.0)
        (target,) = spill_targets(context(0), executor.memory_plan.options)
        if setting == "1":
            assert target.link == speed(context(0), HOST)
            assert target.link.bandwidth == pytest.approx(25e9, rel=0.06)
        else:
            assert target.link == PCIE
            assert device.get(context(0)).offload_links == {}
        del executor


@pytest.mark.stress
def test_slow_link_reduces_offloading():
    """With a slow link, a plan within a small budget offloads fewer bytes."""
    moved = {}
    for rate in (25e6, 1e3):
        with place("standin") as context:
            machine.rates = {"memcpy HtoD": rate, "memcpy DtoH": rate}
            executor = bind_with_budget(context(0), 0.7)
            moved[rate] = executor.memory_plan.offloaded
            assert executor.allocated_bytes == executor.memory_plan.peak
            del executor
    assert moved[25e6] > moved[1e3]


def test_a_bind_without_a_budget_measures_nothing():
    """A bind without a budget, and a plan without a bind, measure nothing."""
    with place("standin") as context:
        machine.rates = {"memcpy HtoD": 25e6, "memcpy DtoH": 25e6}
        executor = network().simple_bind(context(0), data=(8, 64), softmax_label=(8,))
        network().plan({"data": (8, 64), "softmax_label": (8,)}, context=context(0), budget=10**9)
        assert device.get(context(0)).offload_links == {}
        del executor


@pytest.mark.parametrize("links", [(("gpu(0)", "cpu_pinned(0)", 0.0, 0.0),), (("gpu(0)",),), (("a", "b", "fast", 0),)])
def test_bad_links_are_refused(links):
    """In the option ``links`` a speed of 0, a row that is too short or a word for a number raises PlanError."""
    with pytest.raises(PlanError, match="plan option links must be a tuple"):
        planner.PlanOptions(links=links)


def test_rounding_error_is_small():
    """A rounded speed differs from the speed by less than a twentieth."""
    for bandwidth in np.logspace(8, 12, 50):
        steps = round(np.log(bandwidth) / np.log(offload_links._STEP))
        assert offload_links._STEP**steps == pytest.approx(bandwidth, rel=0.05)
