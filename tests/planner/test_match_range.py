"""MXNet's sharing rules, on small graphs whose plans are known and on figures of MXNet 1.9.1."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from weftplan import models
from weftplan import symbol as sym
from weftplan.ops.core.schema import Req
from weftplan.planner import Kind, PlanOptions, plan_symbol, validate
from weftplan.planner.match_range import BlockPool, colors


def _mxnet(**kwargs: Any) -> PlanOptions:
    """Return options that plan as MXNet does, with a match range of 16, changed by ``kwargs``."""
    return PlanOptions(
        **{"strategy": "match_range", "match_range": 16, "sizes": "mxnet", "compat": "mxnet", "workspaces": False}
        | kwargs
    )


def test_the_smallest_block_that_is_large_enough() -> None:
    """Of free blocks of 100, 200 and 400, a request of 150 takes the block of 200."""
    pool = BlockPool([100, 200, 400, 150], 16)
    blocks = [pool.allocate(e, 0, 0) for e in range(3)]
    for block in blocks:
        pool.release(block, 0)
    assert pool.allocate(3, 0, 0) == blocks[1]
    assert pool.block_bytes == [100, 200, 400]


def test_else_the_largest_that_is_too_small_and_it_grows() -> None:
    """A request of 300 takes a free block of 200, which grows to 300."""
    pool = BlockPool([100, 200, 300], 16)
    for e in range(2):
        pool.release(pool.allocate(e, 0, 0), 0)
    # The block of 100 was free when 200 was requested, and has grown to 200.
    assert pool.block_bytes == [200]
    assert pool.allocate(2, 0, 0) == 0
    assert pool.block_bytes == [300]


@pytest.mark.parametrize(("size", "reused"), [(50, True), (49, False), (201, True), (202, False)])
def test_the_range_is_inclusive(size: int, reused: bool) -> None:
    """With a range of 2, a free block of 100 serves requests of 50 to 201, because 201 // 2 is 100."""
    pool = BlockPool([100, size], 2)
    pool.release(pool.allocate(0, 0, 0), 0)
    assert (pool.allocate(1, 0, 0) == 0) is reused


def test_range_zero_never_reuses() -> None:
    """A range of 0 disables reuse."""
    pool = BlockPool([100, 100], 0)
    pool.release(pool.allocate(0, 0, 0), 0)
    assert pool.allocate(1, 0, 0) == 1


def test_order_in_which_free_blocks_are_taken() -> None:
    """Of two free blocks of 100, a request of 100 takes the first freed, and one of 120 the last freed."""
    for size, expected in ((100, 1), (120, 0)):
        pool = BlockPool([100, 100, size], 16)
        blocks = [pool.allocate(e, 0, 0) for e in range(2)]
        for block in reversed(blocks):
            pool.release(block, 0)
        assert pool.allocate(2, 0, 0) == expected


def test_devices_and_colors_do_not_mix() -> None:
    """A free block serves only requests on its device and of its colour."""
    pool = BlockPool([100] * 4, 16, color=[1, 0, 1])
    pool.release(pool.allocate(0, 0, 0), 0)
    assert pool.allocate(1, 1, 2) == 1
    assert pool.allocate(2, 0, 1) == 2
    assert pool.allocate(3, 0, 2) == 0


@pytest.mark.parametrize(("grad_req", "blocks"), [("write", 12), ("null", 2)])
def test_ten_squares(grad_req: str, blocks: int) -> None:
    """For ten squares of 7.5 MB each, plans have MXNet 1.9.1's 90 MB in training and 15 MB in inference."""
    y = sym.Variable("x")
    for _ in range(10):
        y = y * y
    planned = plan_symbol(y, {"x": (10, 3, 256, 256)}, grad_req=grad_req, options=_mxnet())
    validate(planned)
    assert planned.memory.num_storages == blocks
    assert planned.memory.reported_bytes == blocks * 7864320
    blocked = plan_symbol(sym.BlockGrad(y), {"x": (10, 3, 256, 256)}, grad_req="write", options=_mxnet())
    assert blocked.memory.reported_bytes >> 20 == 15


@pytest.mark.parametrize(
    ("options", "planned_bytes"),
    [({}, 87_040), ({"match_range": 0}, 103_424), ({"match_range": 1}, 103_424), ({"auto_search": True}, 87_040)],
)
def test_mlp_is_planned_as_by_mxnet(options: dict[str, Any], planned_bytes: int) -> None:
    """The training plan of the MLP with batch 64 has the bytes of MXNet 1.9.1."""
    planned = plan_symbol(
        models.get("mlp"), models.input_shapes("mlp", 64), grad_req="write", options=_mxnet(**options)
    )
    validate(planned)
    assert planned.memory.reported_bytes == planned_bytes
    assert planned.memory.lower_bound == 84_480


def test_outputs_are_allocated_largest_first() -> None:
    """Of two outputs of equal size, the later gets the block that was freed first."""
    parts = sym.SliceChannel(sym.tanh(sym.Variable("x")), num_outputs=2, axis=1)
    planned = plan_symbol(sym.Group([parts[0], parts[1]]), {"x": (4, 6)}, options=PlanOptions(strategy="match_range"))
    first, second = (int(planned.memory.entry_storage[e]) for e in planned.outputs)
    assert second < first


def test_an_entry_used_twice_is_not_replaced_in_place() -> None:
    """x * x, which reads one entry twice, is not computed in place, but x * y is."""
    x = sym.exp(sym.Variable("x"))
    for net, kind in ((x * x, Kind.OWN), (x * sym.Variable("y"), Kind.INPLACE)):
        planned = plan_symbol(net, {"x": (2, 2), "y": (2, 2)})
        assert planned.memory.entry_kind[planned.outputs[0]] == kind


def test_reshape_shares_memory_with_other_readers() -> None:
    """A reshape shares the memory of x although ``tanh`` reads x later; ``sqrt`` may not overwrite that memory."""
    x = sym.exp(sym.Variable("x"), name="e")
    flat = sym.Reshape(x, shape=(-1,), name="flat")
    net = sym.Group([sym.sqrt(flat, name="root"), sym.tanh(x, name="squash")])
    planned = plan_symbol(net, {"x": (2, 3)})
    validate(planned)
    memory, graph = planned.memory, planned.graph
    entry = {graph.entry_name(e): e for e in range(graph.num_entries)}
    assert memory.entry_storage[entry["flat_output"]] == memory.entry_storage[entry["e_output"]]
    assert memory.entry_storage[entry["root_output"]] != memory.entry_storage[entry["flat_output"]]
    assert memory.entry_storage[entry["squash_output"]] == memory.entry_storage[entry["e_output"]]


def test_variables_and_gradients_are_never_planned() -> None:
    """Variables and gradients belong to the caller and have storage -1."""
    planned = plan_symbol(sym.exp(sym.Variable("x")), {"x": (2, 2)}, grad_req="write")
    memory = planned.memory
    for eid in (planned.graph.row[planned.arguments["x"]], planned.gradients["x"]):
        assert memory.entry_storage[eid] == -1
        assert memory.entry_kind[eid] == Kind.EXTERNAL
    assert memory.external_bytes == {"arguments": 16, "gradients": 16, "aux": 0, "head_grads": 16}
    assert memory.total == memory.peak + 48


def test_unread_outputs() -> None:
    """An unread output has no memory, except in MXNet's plan, and its request is NULL."""
    net = sym.SliceChannel(sym.exp(sym.Variable("x")), num_outputs=2, axis=1, name="split")[1]
    ours = plan_symbol(net, {"x": (16, 32)}, options=PlanOptions(strategy="match_range"))
    mxnet = plan_symbol(net, {"x": (16, 32)}, options=_mxnet())
    entry = ours.outputs[0] - 1
    for planned, storage in ((ours, False), (mxnet, True)):
        validate(planned)
        assert planned.requests[entry] == Req.NULL
        assert planned.memory.entry_kind[entry] == Kind.UNUSED
        assert bool(planned.memory.entry_storage[entry] >= 0) is storage
    assert ours.memory.peak < mxnet.memory.peak


def test_sizes_of_other_dtypes() -> None:
    """Like MXNet 1.9.1, ``sizes="mxnet"`` reports 4 bytes per element for any dtype; the peak has the dtype's bytes."""
    net = sym.exp(sym.Variable("x")) * sym.Variable("y")
    for dtype, width in (("float64", 8), ("float16", 2)):
        dtypes = {"x": dtype, "y": dtype}
        true = plan_symbol(net, {"x": (8, 8), "y": (8, 8)}, dtypes, options=PlanOptions(strategy="match_range"))
        mxnet = plan_symbol(net, {"x": (8, 8), "y": (8, 8)}, dtypes, options=_mxnet())
        assert true.memory.reported_bytes == true.memory.peak == mxnet.memory.peak == 64 * width
        assert mxnet.memory.reported_bytes == 64 * 4
        assert true.dtypes[true.outputs[0]] == np.dtype(dtype)


def test_auto_search_finds_the_best_range() -> None:
    """``auto_search`` gives the smallest plan of the ranges 1, 2, 4, 8 and 16."""
    net, shapes = models.get("lenet"), models.input_shapes("lenet", 8)
    single = [
        plan_symbol(net, shapes, grad_req="write", options=_mxnet(match_range=r)).memory.reported_bytes
        for r in (1, 2, 4, 8, 16)
    ]
    swept = plan_symbol(net, shapes, grad_req="write", options=_mxnet(auto_search=True)).memory.reported_bytes
    assert swept == min(single)


def test_colors_follow_the_longest_paths() -> None:
    """With two colours the longest path gets the first colour, and short branches get the second."""
    x = sym.Variable("x")
    long = sym.tanh(sym.exp(sym.sqrt(x, name="l0"), name="l1"), name="l2")
    short = sym.square(x, name="s0")
    more = sym.abs(x, name="m0")
    planned = plan_symbol(sym.Concat(long, short, more, name="join"), {"x": (2, 2)})
    graph = planned.graph

    class _Program:
        pass

    program: Any = _Program()
    program.graph = graph
    color = {node.name: shade for node, shade in zip(graph.nodes, colors(program, 2), strict=True)}
    assert [color[name] for name in ("l0", "l1", "l2", "join", "s0", "m0")] == [0, 0, 0, 0, 1, 1]
    assert colors(program, 1) == []


def test_first_of_two_dying_inputs_is_overwritten() -> None:
    """A sum of two results without later readers overwrites the first."""
    net = sym.tanh(sym.exp(sym.Variable("x"), name="a") + sym.sin(sym.Variable("y"), name="b"), name="c")
    planned = plan_symbol(net, {"x": (4, 4), "y": (4, 4)}, options=PlanOptions(strategy="none"))
    entry = {planned.graph.entry_name(e): e for e in range(planned.graph.num_entries)}
    (total,) = planned.graph.inputs[-1]
    memory = planned.memory
    assert memory.entry_storage[entry["a_output"]] == 0
    assert memory.entry_storage[entry["b_output"]] == 1
    assert memory.entry_storage[total] == 0
    assert memory.entry_inplace[total] == 0
