"""The planner prefers reuse of memory that needs no waits, at the same peak, and counts the waits that remain."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weftplan import models
from weftplan.planner import MemoryPlan, PlannedGraph, PlanOptions, pack, plan_symbol, validate
from weftplan.planner import buffers as buffers_module
from weftplan.planner.packing import Precedence, check_packing, reuse_edges

ARENA = PlanOptions(strategy="arena", kernels="numpy", reorder=False)
"""One arena, the order given, and NumPy's kernels: the scratch of compiled kernels depends on the installation."""


def planned(name: str, grad_req: str) -> PlannedGraph:
    """Plan a built-in network with batch 8 in one arena."""
    return plan_symbol(models.get(name), models.input_shapes(name, 8), grad_req=grad_req, options=ARENA)


def iterate_nodes(graph: PlannedGraph, needs: dict[int, set[int]]) -> Iterator[tuple[int, list[int]]]:
    """Yield (node, entries that it reads) for each node that runs, and set ``needs[node]`` to its transitive inputs."""
    index = graph.graph
    for nid in graph.order:
        node = index.nodes[nid]
        assert node.op is not None
        ignored = node.op.ignored(node.params)
        reads = [e for i, e in enumerate(index.inputs[nid]) if i not in ignored]
        needs[nid] = {nid}.union(*(needs.get(index.entry_node[e], set()) for e in reads))
        if nid not in graph.skipped:
            yield nid, reads


def count_waits(graph: PlannedGraph) -> int:
    """Return the number of waits of a plan, counted from its storages and its graph."""
    plan, index = graph.memory, graph.graph
    needs: dict[int, set[int]] = {}
    users: dict[int, set[int]] = {}
    for nid, reads in iterate_nodes(graph, needs):
        touched = [int(plan.entry_storage[e]) for e in (*reads, *range(index.row[nid], index.row[nid + 1]))]
        for storage in (*touched, int(plan.workspace_storage[nid])):
            users.setdefault(storage, set()).add(nid)
    position = {nid: step for step, nid in enumerate(graph.order)}
    waits = 0
    for storage in range(plan.num_storages):
        for earlier in plan.after(storage).tolist():
            writer = min(users[storage], key=position.__getitem__)
            waits += not users[earlier] <= needs[writer]
    return waits


@pytest.mark.parametrize("name", ["resnet18", "inception_v3", "lstm", "mobilenet"])
@pytest.mark.parametrize("grad_req", ["null", "write", "add"])
def test_the_count_is_that_of_the_graph(name: str, grad_req: str) -> None:
    """The number of waits in a plan equals a count from its graph, and the plan is valid."""
    graph = planned(name, grad_req)
    validate(graph)
    assert graph.memory.num_added_waits == count_waits(graph)


def without_preference(monkeypatch: pytest.MonkeyPatch, name: str, grad_req: str) -> PlannedGraph:
    """Plan a network without the order of nodes, so that the planner does not prefer reuse without waits."""
    with monkeypatch.context() as patch:
        patch.setattr(buffers_module.Buffers, "order", lambda self: None)
        return planned(name, grad_req)


@pytest.mark.parametrize(
    ("name", "grad_req", "most"),
    [
        ("resnet50", "write", 0.35),
        ("inception_v3", "write", 0.14),
        ("inception_v3", "null", 0.11),
        ("lstm", "write", 0.4),
        ("lstm", "null", 0.4),
    ],
)
def test_fewer_waits_at_the_same_peak(name: str, grad_req: str, most: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the preference at most the share ``most`` of waits is left in networks with branches, at no higher peak."""
    blind, seeing = without_preference(monkeypatch, name, grad_req), planned(name, grad_req)
    assert seeing.memory.peak <= blind.memory.peak
    assert count_waits(seeing) <= most * count_waits(blind)


@pytest.mark.parametrize("name", models.names())
@pytest.mark.parametrize("grad_req", ["null", "write"])
def test_never_a_byte_more_and_never_more_waits(name: str, grad_req: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every built-in network, preferring reuse without waits raises neither the peak nor the number of waits."""
    blind, seeing = without_preference(monkeypatch, name, grad_req), planned(name, grad_req)
    assert seeing.memory.peak <= blind.memory.peak
    assert seeing.memory.num_added_waits is not None
    assert seeing.memory.num_added_waits <= count_waits(blind)


buffers = st.lists(
    st.tuples(st.integers(0, 20), st.integers(1, 10), st.integers(1, 30)).map(lambda b: (b[0], b[0] + b[1], b[2])),
    max_size=24,
)


@given(buffers, st.integers(0, 2**32), st.sampled_from(["fast", "normal"]))
@settings(deadline=None, max_examples=80)
def test_pack_with_an_order(rows: list[tuple[int, int, int]], seed: int, effort: str) -> None:
    """With a random precedence ``pack`` gives a valid packing with no higher peak."""
    lower, upper, size = ([row[k] for row in rows] for k in range(3))
    rng = np.random.default_rng(seed)
    chosen = [int(x) for x in rng.integers(0, 1 << 12, 2 * len(rows))]
    order = Precedence([x & 0x111 for x in chosen[::2]], chosen[1::2])
    blind = pack(lower, upper, size, effort=effort)  # type: ignore[arg-type]
    seeing = pack(lower, upper, size, effort=effort, order=order)  # type: ignore[arg-type]
    assert check_packing(lower, upper, size, seeing.offsets) == seeing.peak <= blind.peak


def test_fewer_waits_in_random_packings() -> None:
    """A precedence lowers the waits of 200 random packings by more than a fifth in total.

    A single packing may have more waits, because ``pack`` takes the first packing that is small enough.
    """
    waits = [0, 0]
    for seed in range(200):
        rng = np.random.default_rng(seed)
        lower = rng.integers(0, 21, 24)
        upper, size = lower + rng.integers(1, 11, 24), rng.integers(1, 31, 24)
        chosen = [int(x) for x in rng.integers(0, 1 << 12, 48)]
        order = Precedence([x & 0x111 for x in chosen[::2]], chosen[1::2])
        for k, known in enumerate((order, None)):
            packing = pack(lower, upper, size, effort="fast", order=known)
            waits[k] += order.waits(*reuse_edges(np.array(lower), np.array(size), packing.offsets))
    assert waits[0] < 0.8 * waits[1]


def test_count_is_saved_and_shown() -> None:
    """JSON stores the number of waits, the summary shows it, and a file without it reads as None."""
    plan = planned("inception_v3", "write").memory
    text = plan.to_json()
    repeated = MemoryPlan.from_json(text)
    assert repeated.num_added_waits == plan.num_added_waits
    assert f"{plan.num_added_waits} of them between nodes that are not ordered anyway" in plan.summary()
    older = MemoryPlan.from_json(text.replace(f' "added_waits": {plan.num_added_waits},\n', ""))
    assert older.num_added_waits is None
    assert "not ordered anyway" not in older.summary()
    assert "order edges from reuse" in replace(plan, num_added_waits=None).summary()


def test_long_orders_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """With over ``MAX_STEPS`` steps a plan counts no waits, because sets of steps would need too much memory."""
    monkeypatch.setattr(buffers_module, "MAX_STEPS", 10)
    graph = planned("lenet", "write")
    validate(graph)
    assert graph.memory.num_added_waits is None


def test_edges_are_listed_for_other_reuse_too() -> None:
    """The plan lists exactly the reuse edges of its offsets."""
    plan = planned("inception_v3", "write").memory
    lower = np.full(plan.num_storages, len(plan.labels.steps))
    upper = np.zeros(plan.num_storages, dtype=np.int64)
    for e, storage in enumerate(plan.entry_storage.tolist()):
        if storage >= 0:
            lower[storage] = min(lower[storage], plan.entry_first[e])
            upper[storage] = max(upper[storage], plan.entry_last[e])
    step = {nid: k for k, nid in enumerate(plan.labels.steps)}
    for nid, storage in enumerate(plan.workspace_storage.tolist()):
        if storage >= 0:
            lower[storage], upper[storage] = step[nid], step[nid] + 1
    pointers, earlier = reuse_edges(np.array(lower), plan.storage_nbytes, plan.storage_offset)
    assert pointers.tolist() == plan.after_ptr.tolist()
    assert earlier.tolist() == plan.after_storages.tolist()


@pytest.mark.parametrize("grad_req", ["null", "write"])
def test_more_colours_give_fewer_waits(grad_req: str) -> None:
    """With more colours the branches of Inception wait less, for less than 1.5 times the peak."""
    counts, peaks = [], []
    for colours in (1, 2, 4, 8):
        options = PlanOptions(strategy="arena", num_temp=colours)
        graph = plan_symbol(
            models.get("inception_v3"), models.input_shapes("inception_v3", 8), grad_req=grad_req, options=options
        )
        validate(graph)
        assert graph.memory.num_added_waits == count_waits(graph)
        counts.append(count_waits(graph))
        peaks.append(graph.memory.peak)
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] <= counts[0] / 2
    assert max(peaks) < 1.5 * peaks[0]


def count_block_waits(graph: PlannedGraph) -> int:
    """Return how many writers of reused blocks would not run after the block's earlier users anyway."""
    plan, index = graph.memory, graph.graph
    needs: dict[int, set[int]] = {}
    users: dict[int, set[int]] = {}
    waits = 0
    for nid, reads in iterate_nodes(graph, needs):
        read = {int(plan.entry_storage[e]) for e in reads} - {-1}
        written = {int(plan.entry_storage[e]) for e in range(index.row[nid], index.row[nid + 1])}
        written = (written | {int(plan.workspace_storage[nid])}) - {-1}
        waits += sum(not users.get(storage, set()) <= needs[nid] for storage in written - read)
        for storage in written | read:
            users.setdefault(storage, set()).add(nid)
    return waits


@pytest.mark.parametrize("grad_req", ["null", "write"])
def test_more_colours_make_whole_blocks_wait_less(grad_req: str) -> None:
    """With more colours, fewer writers in Inception wait for a block's earlier users: under 10 % with eight."""
    counts = []
    for colours in (1, 2, 4, 8):
        options = PlanOptions(strategy="match_range", num_temp=colours, kernels="numpy")
        counts.append(
            count_block_waits(
                plan_symbol(
                    models.get("inception_v3"),
                    models.input_shapes("inception_v3", 8),
                    grad_req=grad_req,
                    options=options,
                )
            )
        )
    assert counts == sorted(counts, reverse=True)
    assert counts[1] < 0.6 * counts[0]
    assert counts[-1] < 0.1 * counts[0]


def test_colours_of_long_orders_lie_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """With over ``MAX_STEPS`` steps, buffers of different colours share no bytes, so the peak is higher."""
    monkeypatch.setattr(buffers_module, "MAX_STEPS", 10)
    options = PlanOptions(strategy="arena", num_temp=2)
    graph = plan_symbol(models.get("inception_v3"), models.input_shapes("inception_v3", 8), options=options)
    validate(graph)
    plan = graph.memory
    assert plan.num_added_waits is None
    whole = plan_symbol(models.get("inception_v3"), models.input_shapes("inception_v3", 8), options=ARENA).memory
    assert plan.peak > whole.peak
