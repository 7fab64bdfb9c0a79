"""Placement on devices: groups, copies between devices, auxiliary states, and memory of each device."""

from __future__ import annotations

from typing import Any

import pytest

from weftplan import symbol as sym
from weftplan.device.context import Context, cpu, sim
from weftplan.errors import BindError
from weftplan.planner import PlanOptions, plan_symbol, validate

GROUPS = {"left": cpu(0), "right": cpu(1)}


def _two_devices() -> Any:
    """Return fc0 of x and w0 in the group ``left``, followed by fc1 with w1 in the group ``right``."""
    with sym.AttrScope(ctx_group="left"):
        h = sym.FullyConnected(sym.Variable("x"), sym.Variable("w0"), num_hidden=6, no_bias=True, name="fc0")
        h = sym.tanh(h, name="t0")
    with sym.AttrScope(ctx_group="right"):
        h = sym.FullyConnected(h, sym.Variable("w1"), num_hidden=6, no_bias=True, name="fc1")
        return sym.tanh(h, name="t1")


def _plan(net: Any, **kwargs: Any) -> Any:
    """Plan a symbol whose arguments all have shape (6, 6) on the devices of ``GROUPS``, and validate the plan."""
    shapes = dict.fromkeys(net.list_arguments(), (6, 6))
    planned = plan_symbol(net, shapes, **{"grad_req": "write", "group2ctx": GROUPS} | kwargs)
    validate(planned)
    return planned


def _where(planned: Any) -> dict[str, Context]:
    """Return the device of each node by name."""
    return {node.name: ctx for node, ctx in zip(planned.graph.nodes, planned.devices, strict=True)}


def test_groups_place_nodes_and_gradients_follow() -> None:
    """Gradients run on the devices of their nodes, with one copy forward and one backward."""
    planned = _plan(_two_devices())
    where = _where(planned)
    assert [where[n] for n in ("x", "w0", "fc0", "t0", "fc0_backward")] == [cpu(0)] * 5
    assert [where[n] for n in ("w1", "fc1", "t1", "fc1_backward")] == [cpu(1)] * 4
    copies = {node.name: where[node.name] for node in planned.graph.nodes if node.name.endswith("_copy")}
    assert copies == {"t0_0_copy": cpu(1), "fc1_backward_0_copy": cpu(0)}


def test_each_device_has_memory_of_its_own() -> None:
    """Each device has separate storages, and the peaks of the devices add up to the plan's peak."""
    planned = _plan(_two_devices(), options=PlanOptions(strategy="match_range"))
    by_device = planned.memory.peak_by_device
    assert set(by_device) == {cpu(0), cpu(1)}
    assert all(nbytes > 0 for nbytes in by_device.values())
    assert sum(by_device.values()) == planned.memory.peak
    for eid in range(planned.graph.num_entries):
        storage = int(planned.memory.entry_storage[eid])
        if storage >= 0:
            assert planned.memory.storage_context(storage) == planned.entry_device(eid)


def test_two_devices_compute_the_same_bits(interpret: Any, same: Any) -> None:
    """A graph on two devices has the bits of the graph on one device."""
    net = _two_devices()
    values = {k: v for k, v in interpret.values(net, 1).items() if not k.startswith("grad:")}
    same(interpret.planned(_plan(net), values), interpret.planned(_plan(net, group2ctx=None), values))


def test_one_copy_per_destination() -> None:
    """Three readers on another device share one copy."""
    with sym.AttrScope(ctx_group="left"):
        e = sym.exp(sym.Variable("x"), name="e")
    with sym.AttrScope(ctx_group="right"):
        net = sym.Group([sym.tanh(e), sym.sqrt(e), sym.square(e)])
    names = [node.name for node in _plan(net, grad_req="null").graph.nodes]
    assert names.count("e_0_copy") == 1


def test_gradients_arrive_where_their_arrays_are() -> None:
    """A gradient is written on the device of the caller's array, even if its group is on another device."""
    planned = _plan(_two_devices(), variable_contexts={"x": cpu(0), "w0": cpu(0), "w1": cpu(0)})
    assert planned.entry_device(planned.gradients["w1"]) == cpu(0)
    assert planned.entry_device(planned.graph.row[planned.arguments["w1"]]) == cpu(0)
    assert _where(planned)["fc1"] == cpu(1)


def test_without_a_map_groups_are_ignored() -> None:
    """Without ``group2ctx`` all nodes are on the default device."""
    planned = _plan(_two_devices(), group2ctx=None, context=sim(0))
    assert set(planned.devices) == {sim(0)}
    assert planned.memory.contexts == (sim(0),)


def test_a_group_without_a_device() -> None:
    """A group without a device raises an error that lists the known groups."""
    with pytest.raises(BindError, match=r"is in ctx_group 'right', but group2ctx has only \['left'\]"):
        _plan(_two_devices(), group2ctx={"left": cpu(0)})


def test_a_state_on_another_device() -> None:
    """An auxiliary state on another device than its node raises an error, because a copy of it would be updated."""
    with sym.AttrScope(ctx_group="left"):
        mean = sym.Variable("mean")
    with sym.AttrScope(ctx_group="right"):
        net = sym.BatchNorm(sym.Variable("x"), moving_mean=mean, name="bn")
    with pytest.raises(BindError, match=r"BatchNorm \('bn'\) on cpu\(1\) writes to 'mean', which is on cpu\(0\)"):
        plan_symbol(net, {"x": (2, 3, 4, 4)}, group2ctx=GROUPS)
