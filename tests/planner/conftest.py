"""Two interpreters of planned graphs, and random symbols to plan."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from weftplan import symbol as sym
from weftplan.ops.core.schema import OpContext, Req
from weftplan.planner import Kind, PlannedGraph

POISON = 0xA5


def _kernel(planned: PlannedGraph, nid: int, ins: list[Any], outs: list[Any], scratch: Any) -> None:
    """Run the kernel of a node in training mode; a recomputed node gets the random key of its original."""
    node = planned.graph.nodes[nid]
    assert node.op is not None
    key = (7, sum(map(ord, (node.mirror_of or node).name)))
    context = OpContext(np, is_train=True, workspace=scratch, random_key=key, recompute=node.mirror_of is not None)
    with np.errstate(all="ignore"):  # random graphs overflow now and then, in both interpreters to the same infinities
        if node.op.has_work(outs):
            node.op.forward(context, node.params, ins, outs)


def run_unshared(planned: PlannedGraph, given: dict[str, Any]) -> dict[str, Any]:
    """Run a planned graph with a separate array for each entry; its results are the reference for a plan's bits.

    Nothing is computed in place, and no node is skipped.
    """
    graph = planned.graph
    arrays: dict[int, Any] = _variables(planned, given)
    for nid in planned.order:
        ins = [arrays[e] for e in graph.inputs[nid]]
        outs = range(graph.row[nid], graph.row[nid + 1])
        for e in outs:
            arrays[e] = np.zeros(planned.shapes[e], planned.dtypes[e])
        _kernel(planned, nid, ins, [arrays[e] for e in outs], np.zeros(1 << 22, np.uint8))
    return _results(planned, {name: _added(arrays[e], given, name) for name, e in planned.gradients.items()}, arrays)


def run_planned(planned: PlannedGraph, given: dict[str, Any]) -> dict[str, Any]:
    """Run a planned graph in the planned memory, whose bytes start with a pattern of poison.

    Scratch memory is poisoned before each node, and so are outputs before they are written. Dead bytes are not cleared.
    """
    graph, plan = planned.graph, planned.memory
    slabs = [np.full(int(n), POISON, np.uint8) for n in plan.slab_nbytes]
    arrays = _variables(planned, given)
    grads = {}
    for name, e in planned.gradients.items():
        arrays[e] = np.full(planned.shapes[e], np.nan).astype(planned.dtypes[e])
        if planned.grad_req[name] == Req.ADD:
            arrays[e][...] = given[f"grad:{name}"]
        grads[name] = arrays[e]

    def view(e: int) -> Any:
        if e not in arrays:
            storage = int(plan.entry_storage[e])
            if storage < 0:
                return None
            slab, offset = plan.storage_slab[storage], plan.storage_offset[storage]
            arrays[e] = (
                slabs[slab][offset : offset + plan.entry_nbytes[e]].view(planned.dtypes[e]).reshape(planned.shapes[e])
            )
        return arrays[e]

    for nid in planned.order:
        if nid in planned.skipped:
            continue
        node = graph.nodes[nid]
        assert node.op is not None
        ignored = node.op.ignored(node.params)
        ins = [None if i in ignored else view(e) for i, e in enumerate(graph.inputs[nid])]
        outs = []
        scratch, end = None, int(plan.workspace_nbytes[nid])
        if end:
            storage = int(plan.workspace_storage[nid])
            start = int(plan.storage_offset[storage])
            scratch = slabs[int(plan.storage_slab[storage])][start : start + end]
            scratch[...] = POISON
        added = []
        for e in range(graph.row[nid], graph.row[nid + 1]):
            out = None if planned.requests[e] == Req.NULL else view(e)
            if planned.requests[e] == Req.ADD:
                end -= -(-out.nbytes // 64) * 64
                term = scratch[end : end + out.nbytes].view(out.dtype).reshape(out.shape)
                added.append((out, term))
                out = term
            elif out is not None and planned.requests[e] == Req.WRITE:
                out.reshape(-1).view(np.uint8)[...] = POISON
            outs.append(out)
        _kernel(planned, nid, ins, outs, None if scratch is None else scratch[:end])
        for out, term in added:
            np.add(out, term, out=out)
    return _results(planned, grads, {e: view(e) for e in planned.outputs})


def _variables(planned: PlannedGraph, given: dict[str, Any]) -> dict[int, Any]:
    """Return copies of the arguments and states ``given``, and ones for the gradients of outputs, by entry."""
    graph = planned.graph
    by_name = {graph.row[n]: given[name].copy() for name, n in (planned.arguments | planned.aux).items() if n >= 0}
    for i, n in enumerate(planned.head_grads):
        if n >= 0:
            out = planned.outputs[i]
            by_name[graph.row[n]] = np.ones(planned.shapes[out], planned.dtypes[out])
    return by_name


def _added(array: Any, given: dict[str, Any], name: str) -> Any:
    """Return the gradient ``array``, plus the previous contents of its gradient array if ``given`` has them."""
    before = given.get(f"grad:{name}")
    return array if before is None else before + array


def _results(planned: PlannedGraph, grads: dict[str, Any], arrays: dict[int, Any]) -> dict[str, Any]:
    """Return copies of the outputs and gradients by name."""
    by_name = {f"output{i}": arrays[e].copy() for i, e in enumerate(planned.outputs)}
    return by_name | {f"gradient of {name}": array.copy() for name, array in grads.items()}


def random_symbol(seed: int, size: int) -> Any:
    """Return a random graph of ``size`` steps on square matrices.

    It has chains, diamonds, several outputs, views, ignored inputs and shared weights.
    """
    rng = random.Random(seed)
    pool = [sym.Variable(f"x{i}") for i in range(1 + rng.randrange(3))]

    def pick() -> Any:
        return pool[max(0, len(pool) - 1 - int(rng.expovariate(0.6)))]

    for k in range(size):
        name = f"n{k}"
        choice = rng.randrange(11)
        if choice == 0:
            result = [sym.tanh(pick(), name=name)]
        elif choice == 1:
            result = [pick() + pick()]
        elif choice == 2:
            result = [pick() * pick()]
        elif choice == 3:
            result = [sym.Activation(pick(), act_type=rng.choice(["relu", "sigmoid"]), name=name)]
        elif choice == 4:
            result = [sym.FullyConnected(pick(), rng.choice(pool), num_hidden=6, no_bias=True, name=name)]
        elif choice == 5:
            result = [sym.Reshape(sym.Reshape(pick(), shape=(4, 9), name=f"{name}_flat"), shape=(6, 6), name=name)]
        elif choice == 6:
            result = list(sym.SliceChannel(pick(), num_outputs=2, axis=1, name=name))
            result = [sym.Concat(result[1], result[0], dim=1, name=f"{name}_joined")]
        elif choice == 7:
            result = [sym.add_n(pick(), pick(), pick(), name=name)]
        elif choice == 8:
            result = [sym.transpose(pick(), name=name)]
        elif choice == 9:
            result = [sym.BlockGrad(pick(), name=name)] if rng.random() < 0.3 else [sym.negative(pick(), name=name)]
        else:
            result = [sym.zeros_like(pick(), name=name) + pick()]
        pool += result
    heads = [pool[-1]] + [rng.choice(pool) for _ in range(rng.randrange(3))]
    return sym.Group(heads)


def random_values(symbol: Any, seed: int) -> dict[str, Any]:
    """Return a random value for each argument, and under ``grad:NAME`` the previous contents of its gradient."""
    rng = np.random.default_rng(seed)
    names = symbol.list_arguments()
    inputs = {name: rng.uniform(-1, 1, (6, 6)).astype(np.float32) for name in names}
    return inputs | {f"grad:{name}": rng.uniform(-1, 1, (6, 6)).astype(np.float32) for name in names}


@pytest.fixture(scope="session")
def interpret() -> Any:
    """Both interpreters, ``apart`` and ``planned``, and the makers of random symbols and values."""
    return SimpleNamespace(
        apart=run_unshared, planned=run_planned, symbol=random_symbol, values=random_values, kinds=Kind
    )


@pytest.fixture(scope="session")
def same() -> Callable[[dict[str, Any], dict[str, Any]], None]:
    """Return a function that asserts that two results have the same names and bits."""

    def check(got: dict[str, Any], want: dict[str, Any]) -> None:
        assert got.keys() == want.keys()
        for name, array in want.items():
            assert got[name].tobytes() == array.tobytes(), f"{name} differs:\n{got[name]}\n{array}"

    return check
