"""The validator detects every kind of damage to a plan, and names the entries."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from weftplan import symbol as sym
from weftplan.device.context import cpu
from weftplan.errors import PlanError
from weftplan.ops.core.schema import Req
from weftplan.planner import PlanOptions, plan_symbol, validate


@pytest.fixture
def planned() -> Any:
    """A valid training plan with in-place entries, reuse and two outputs."""
    x = sym.FullyConnected(sym.Variable("x"), sym.Variable("w"), num_hidden=16, no_bias=True, name="fc")
    y = sym.tanh(x, name="t") * sym.sigmoid(x, name="s")
    net = sym.Group([sym.sum(y * y, name="total"), sym.exp(y, name="e")])
    plan = plan_symbol(net, {"x": (16, 16)}, grad_req="write", options=PlanOptions(strategy="match_range"))
    validate(plan)
    return plan


def _entry(planned: Any, name: str) -> int:
    """Return the number of the entry ``name``."""
    graph = planned.graph
    return next(e for e in range(graph.num_entries) if graph.entry_name(e) == name)


def _changed(planned: Any, **changes: Any) -> Any:
    """Return a copy of a plan with changed elements; each keyword is an array of the plan, with values by index."""
    arrays = {}
    for name, edits in changes.items():
        array = getattr(planned.memory, name).copy()
        for index, value in edits.items():
            array[index] = value
        arrays[name] = array
    return replace(planned, memory=replace(planned.memory, **arrays))


def test_two_live_entries_in_one_storage(planned: Any) -> None:
    """Two live entries in one storage raise an error with both names, the storage and the step."""
    t, s = _entry(planned, "t_output"), _entry(planned, "s_output")
    target = int(planned.memory.entry_storage[t])
    with pytest.raises(
        PlanError, match=rf"step \d+: entry '._output' in storage {target} is written over entry '._outpu"
    ):
        validate(_changed(planned, entry_storage={s: target}))


def test_overlapping_storages_need_an_order_edge() -> None:
    """Storages that share bytes without an order edge raise an error, because threads could overwrite live data."""
    x = sym.Variable("x")
    for k in range(6):
        x = sym.FullyConnected(x, num_hidden=16 if k % 2 else 32, no_bias=True, name=f"fc{k}")
    plan = plan_symbol(x, {"x": (16, 16)}, options=PlanOptions(strategy="arena"))
    validate(plan)
    assert plan.memory.num_reuse_edges > 0
    bare = replace(plan.memory, after_ptr=plan.memory.after_ptr * 0, after_storages=plan.memory.after_storages[:0])
    with pytest.raises(PlanError, match=r"storage \d+ reuses bytes of storage \d+, which held .* no order edge"):
        validate(replace(plan, memory=bare))


def test_wrong_order(planned: Any) -> None:
    """A node that runs before its input raises an error."""
    order = list(planned.order)
    order[0], order[1] = order[1], order[0]
    with pytest.raises(PlanError, match=r"step 0: .* runs before 'fc' \(step 1\), which it needs"):
        validate(replace(planned, order=order))


def test_missing_step(planned: Any) -> None:
    """A plan without one of its operators raises an error."""
    with pytest.raises(PlanError, match="expected each of"):
        validate(replace(planned, order=planned.order[:-1]))


def test_output_after_the_forward_part(planned: Any) -> None:
    """An output that is computed after the forward part raises an error."""
    with pytest.raises(PlanError, match="is made after the forward part"):
        validate(replace(planned, num_forward_nodes=2))


@pytest.mark.parametrize(
    ("field", "name", "value", "message"),
    [
        (
            "entry_nbytes",
            "t_output",
            4,
            r"entry 't_output' is planned with 4 bytes, but shape \(16, 16\) of float32 has",
        ),
        ("entry_storage", "t_output", -1, "entry 't_output' is read, but has no memory"),
        ("entry_storage", "t_output", 99, "entry 't_output' is in storage 99, but there are"),
        ("entry_last", "t_output", 2, "t_output"),
        ("entry_kind", "t_output", 5, "entry 't_output' is marked unused, but it is read"),
        ("entry_kind", "t_output", 0, "only variables and gradients are external"),
        ("entry_inplace", "t_output", 1, "cannot compute 't_output' in place of its input 1"),
    ],
)
def test_wrong_entry_facts(planned: Any, field: str, name: str, value: int, message: str) -> None:
    """One wrong value of an entry raises an error."""
    entry = _entry(planned, name)
    if field == "entry_inplace":
        requests = [Req.INPLACE if e == entry else req for e, req in enumerate(planned.requests)]
        planned = replace(_changed(planned, entry_kind={entry: 3}), requests=requests)
    with pytest.raises(PlanError, match=message):
        validate(_changed(planned, **{field: {entry: value}}))


def test_storage_outside_its_slab(planned: Any) -> None:
    """A storage outside its slab, and one that is too small, raise errors."""
    storage = int(planned.memory.entry_storage[_entry(planned, "t_output")])
    with pytest.raises(PlanError, match="is outside slab"):
        validate(_changed(planned, storage_offset={storage: 64}))
    with pytest.raises(PlanError, match="does not fit storage"):
        validate(_changed(planned, storage_nbytes={storage: 64}))


def test_alignment(planned: Any) -> None:
    """On a host an offset that is not a multiple of 64 raises an error."""
    storage = int(planned.memory.entry_storage[_entry(planned, "t_output")])
    slab = int(planned.memory.storage_slab[storage])
    grown = _changed(planned, slab_nbytes={slab: 1 << 20}, storage_offset={storage: 4})
    with pytest.raises(PlanError, match="is not aligned to 64 bytes"):
        validate(grown)


def test_claims_about_totals(planned: Any) -> None:
    """A wrong lower bound raises an error."""
    with pytest.raises(PlanError, match=r"claims a lower bound of \d+ bytes, but \d+ are alive at once"):
        validate(replace(planned, memory=replace(planned.memory, lower_bound=planned.memory.lower_bound - 4)))


def test_requests(planned: Any) -> None:
    """A request ADD for an entry that is no term of a skipped sum raises an error."""
    requests = list(planned.requests)
    requests[_entry(planned, "s_output")] = Req.ADD
    with pytest.raises(PlanError, match=r"'s_output' has kind .* but request ADD"):
        validate(replace(planned, requests=requests))


def test_a_copy_between_devices_cannot_add() -> None:
    """A request ADD for a copy between devices, which overwrites, raises an error."""
    with sym.AttrScope(ctx_group="left"):
        x = sym.Variable("x")
    with sym.AttrScope(ctx_group="right"):
        net = x * 3
    plan = plan_symbol(net, {"x": (4,)}, grad_req="write", group2ctx={"left": cpu(0), "right": cpu(1)})
    validate(plan)
    requests = list(plan.requests)
    requests[plan.gradients["x"]] = Req.ADD
    with pytest.raises(PlanError, match="is to add, but a copy between devices overwrites"):
        validate(replace(plan, requests=requests, grad_req={"x": Req.ADD}))


def test_workspace_over_live_data() -> None:
    """Scratch memory that overlaps an input of its node raises an error."""
    net = sym.clip(sym.exp(sym.Variable("x"), name="e"), a_min=0, a_max=1, name="c")
    plan = plan_symbol(net, {"x": (16, 16)}, grad_req="write", options=PlanOptions(strategy="none"))
    validate(plan)
    graph, memory = plan.graph, plan.memory
    actual = [
        (n, int(memory.entry_storage[e]))
        for n in plan.order
        for e in graph.inputs[n]
        if memory.workspace_nbytes[n]
        and memory.entry_storage[e] >= 0
        and memory.workspace_nbytes[n] <= memory.storage_nbytes[memory.entry_storage[e]]
    ]
    assert actual
    with pytest.raises(PlanError, match=r"scratch of 'c_backward' in storage \d+ is written over entry 'e_output'"):
        validate(_changed(plan, workspace_storage=dict(actual[:1])))


@pytest.mark.parametrize("storage", [-1, 99])
def test_workspace_without_a_storage(storage: int) -> None:
    """Scratch memory without a storage of the plan raises an error."""
    net = sym.clip(sym.exp(sym.Variable("x")), a_min=0, a_max=1, name="c")
    plan = plan_symbol(net, {"x": (16, 16)}, grad_req="write")
    scratch = {n: storage for n in plan.order if plan.memory.workspace_nbytes[n]}
    assert scratch
    with pytest.raises(PlanError, match=rf"needs \d+ bytes of workspace; its storage {storage} is smaller or missing"):
        validate(_changed(plan, workspace_storage=scratch))


def test_unwritten_storage_gives_no_order() -> None:
    """An order edge through a storage that no node writes does not count."""
    x = sym.Variable("x")
    for k in range(6):
        x = sym.FullyConnected(x, num_hidden=16 if k % 2 else 32, no_bias=True, name=f"fc{k}")
    plan = plan_symbol(x, {"x": (16, 16)}, options=PlanOptions(strategy="arena"))
    memory = plan.memory
    later = next(s for s in range(memory.num_storages) if len(memory.after(s)))
    rows = [memory.after(s).tolist() for s in range(memory.num_storages)]
    rows = [*rows[:later], [memory.num_storages], *rows[later + 1 :], rows[later]]
    between = replace(
        memory,
        storage_slab=np.append(memory.storage_slab, memory.storage_slab[later]),
        storage_offset=np.append(memory.storage_offset, memory.storage_offset[later]),
        storage_nbytes=np.append(memory.storage_nbytes, memory.storage_nbytes[later]),
        after_ptr=np.cumsum([0, *map(len, rows)]),
        after_storages=np.array([s for row in rows for s in row], dtype=np.int32),
    )
    with pytest.raises(PlanError, match=rf"storage {later} reuses bytes of storage \d+, .* no order edge"):
        validate(replace(plan, memory=between))


def test_sum_with_a_view_of_itself_is_not_in_place() -> None:
    """A sum of an array and of its reshape may not overwrite that array, because both inputs are the same bytes."""
    t = sym.tanh(sym.Variable("x"), name="t")
    net = sym.exp(sym.elemwise_add(t, sym.reshape(t, shape=(16, 16), name="r"), name="sum"))
    plan = plan_symbol(net, {"x": (16, 16)}, options=PlanOptions(strategy="match_range"))
    validate(plan)
    first, second, out = (_entry(plan, f"{name}_output") for name in ("t", "r", "sum"))
    shared = int(plan.memory.entry_storage[first])
    assert plan.memory.entry_storage[second] == shared != plan.memory.entry_storage[out]
    requests = [Req.INPLACE if e == out else req for e, req in enumerate(plan.requests)]
    wrong = _changed(plan, entry_storage={out: shared}, entry_kind={out: 3}, entry_inplace={out: 1})
    labels = copy(plan.memory.labels)
    labels._inplace = wrong.memory.entry_inplace.tolist()
    with pytest.raises(PlanError, match=r"writes sum_output over its own input 't_output'"):
        validate(replace(wrong, requests=requests, memory=replace(wrong.memory, labels=labels)))
