"""Paddle's rules for in-place computation and for reuse across operators, one test for each rule.

The older rules are ``compat="paddle"``; the newer rules, of release 2.6 and later, are ``compat="paddle_pir"``. An
output "shares" if it is in the storage of an input, with kind INPLACE.
"""

from __future__ import annotations

import numpy as np
import pytest

import weftplan as mx
from weftplan import models
from weftplan.errors import PlanError
from weftplan.planner import Kind, MemoryPlan, PlannedGraph, PlanOptions, plan_symbol, size_symbol, validate
from weftplan.planner.paddle import order_edges
from weftplan.planner.strategies import plan_graph
from weftplan.symbol import Symbol

sym = mx.sym


def plan(symbol: Symbol, compat: str = "paddle", strategy: str = "none", **named: object) -> PlannedGraph:
    """Plan a symbol of 4 x 4 arrays without merging equal nodes, and validate the plan."""
    grad_req = str(named.pop("grad_req", "null"))
    shapes = named.pop("shapes", None) or dict.fromkeys(symbol.list_arguments(), (4, 4))
    options = PlanOptions(compat=compat, strategy=strategy, eliminate_common_expr=False, **named)  # type: ignore[arg-type]
    graph = plan_symbol(symbol, shapes, grad_req=grad_req, options=options)  # type: ignore[arg-type]
    validate(graph)
    return graph


def entry(graph: PlannedGraph, name: str) -> int:
    """Return the number of the first output of the node ``name``."""
    return next(graph.graph.row[n] for n, node in enumerate(graph.graph.nodes) if node.name == name)


def storage(graph: PlannedGraph, name: str) -> int:
    """Return the storage of the first output of the node ``name``."""
    return int(graph.memory.entry_storage[entry(graph, name)])


def kind(graph: PlannedGraph, name: str) -> Kind:
    """Return the kind of the first output of the node ``name``."""
    return Kind(int(graph.memory.entry_kind[entry(graph, name)]))


def steps(graph: PlannedGraph) -> list[str]:
    """Return the names of nodes in execution order."""
    return [graph.graph.nodes[n].name for n in graph.order]


def relu(x: Symbol, name: str) -> Symbol:
    """Return a relu, which may run in place."""
    return sym.Activation(x, act_type="relu", name=name)


@pytest.mark.parametrize("compat", ["paddle", "paddle_pir"])
def test_an_input_that_dies_is_taken(compat: str) -> None:
    """In x -> a -> b -> c, b shares with a; c, which is an output, shares only by the older rules."""
    graph = plan(relu(relu(relu(sym.Variable("x"), "a"), "b"), "c"), compat)
    assert kind(graph, "a") == Kind.OWN
    assert kind(graph, "b") == Kind.INPLACE
    assert storage(graph, "b") == storage(graph, "a")
    assert kind(graph, "c") == (Kind.INPLACE if compat == "paddle" else Kind.OWN)


def test_arguments_are_persistable() -> None:
    """No result shares with an argument, and no gradient that the caller receives shares with another result."""
    x = sym.Variable("x")
    graph = plan(relu(x, "a"), grad_req="write")
    assert kind(graph, "a") == Kind.OWN
    assert kind(graph, "a_backward") == Kind.EXTERNAL


def test_two_unordered_readers_are_two_last_operators() -> None:
    """Neither of two unordered readers of ``a`` shares with it by Paddle's older rules.

    MXNet and Paddle's newer rules let the reader that runs later share.

    ::

        x -> a -+-> b -+-> d
                +-> c -+
    """
    a = relu(sym.Variable("x"), "a")
    net = sym.elemwise_add(relu(a, "b"), relu(a, "c"), name="d")
    assert kind(plan(net, "none"), "c") == Kind.INPLACE
    graph = plan(net)
    assert kind(graph, "b") == kind(graph, "c") == Kind.OWN
    assert kind(plan(net, "paddle_pir"), "c") == Kind.INPLACE  # because c is the last reader in program order


def test_a_reader_that_comes_before_by_data_does_not_count() -> None:
    """If b reads a, and c reads both, c is the last reader of a and shares with it."""
    a = relu(sym.Variable("x"), "a")
    graph = plan(relu(sym.elemwise_add(a, sym.tanh(a, name="b"), name="c"), "d"))
    assert kind(graph, "c") == Kind.INPLACE
    assert storage(graph, "c") == storage(graph, "a")
    assert storage(graph, "b") != storage(graph, "a")


@pytest.mark.parametrize("compat", ["paddle", "paddle_pir"])
def test_an_input_used_twice_is_not_taken(compat: str) -> None:
    """The sum b = a + a does not share with a."""
    a = relu(sym.Variable("x"), "a")
    graph = plan(relu(sym.elemwise_add(a, a, name="b"), "c"), compat)
    assert storage(graph, "b") != storage(graph, "a")


@pytest.mark.parametrize("compat", ["paddle", "paddle_pir"])
def test_copies_have_no_privilege(compat: str) -> None:
    """A reshape of an array with later readers shares with it in MXNet, but not in Paddle."""
    a = relu(sym.Variable("x"), "a")
    flat = sym.Reshape(a, shape=(16,), name="flat")
    net = sym.Group([sym.sum(flat, name="s"), sym.sum(sym.tanh(a, name="t"), name="u")])
    assert storage(plan(net, "none"), "flat") == storage(plan(net, "none"), "a")
    graph = plan(net, compat)
    assert storage(graph, "flat") != storage(graph, "a")


@pytest.mark.parametrize("compat", ["paddle", "paddle_pir"])
def test_outputs_are_not_overwritten(compat: str) -> None:
    """The reader b of a, which is an output of the graph, does not share with a."""
    a = relu(sym.Variable("x"), "a")
    graph = plan(sym.Group([a, relu(relu(a, "b"), "c")]), compat)
    assert storage(graph, "b") != storage(graph, "a")
    assert (kind(graph, "c") == Kind.INPLACE) == (compat == "paddle")


def test_pinned_memory_is_left_alone() -> None:
    """In page-locked host memory no result shares."""
    net = relu(relu(relu(sym.Variable("x"), "a"), "b"), "c")
    options = PlanOptions(compat="paddle", strategy="none")
    graph = plan_symbol(net, {"x": (4, 4)}, context=mx.cpu_pinned(), options=options)
    assert kind(graph, "b") == kind(graph, "c") == Kind.OWN


def test_larger_output_does_not_share() -> None:
    """A broadcast sum shares with its first input only if both have the same size."""
    a = relu(sym.Variable("x"), "a")
    net = relu(sym.broadcast_add(a, sym.Variable("y"), name="b"), "c")
    graph = plan(net, shapes={"x": (4, 1), "y": (4, 4)})
    assert kind(graph, "b") == Kind.OWN
    assert kind(plan(net, shapes={"x": (4, 4), "y": (4, 1)}), "b") == Kind.INPLACE


def test_the_switch() -> None:
    """``enable_inplace=False`` disables sharing in place, but not reuse across operators."""
    net = relu(relu(relu(relu(sym.Variable("x"), "a"), "b"), "c"), "d")
    graph = plan(net, strategy="match_range", enable_inplace=False)
    assert [kind(graph, name) for name in "abcd"] == [Kind.OWN, Kind.OWN, Kind.SHARED, Kind.SHARED]


# ------------------------------------------------------------------------------------------------ across operators


def chain(*shapes: int) -> Symbol:
    """Return x -> t0 -> t1 -> ..., whose results have these lengths and cannot be computed in place."""
    net = sym.Variable("x")
    for k, length in enumerate(shapes):
        net = sym.FullyConnected(net, num_hidden=length, no_bias=True, name=f"t{k}")
    return net


def test_only_exactly_the_size_is_used_again() -> None:
    """Paddle reuses a block only for a result of exactly its size; MXNet's range also allows other sizes."""
    net = chain(8, 7, 6, 8, 7)
    shapes = {"x": (2, 4)}
    theirs = plan(net, "none", "match_range", shapes=shapes)
    assert kind(theirs, "t2") == Kind.SHARED
    graph = plan(net, "paddle", "match_range", shapes=shapes)
    assert kind(graph, "t2") == Kind.OWN
    assert storage(graph, "t3") == storage(graph, "t0")
    assert storage(graph, "t4") == storage(graph, "t1")
    assert plan(net, "paddle", "match_range", shapes=shapes, match_range=0).memory.num_storages == 5


def test_the_last_to_die_is_used_first() -> None:
    """Of two dead blocks of one size, the block that died last is reused first.

    ::

        x -> t0 -> t1 -> t2 (other size) -> t3 -> t4 (t3 alive: t5 reads it) -> t5
    """
    x = sym.Variable("x")
    t0 = sym.FullyConnected(x, num_hidden=8, no_bias=True, name="t0")
    t1 = sym.FullyConnected(t0, num_hidden=8, no_bias=True, name="t1")
    t2 = sym.FullyConnected(t1, num_hidden=5, no_bias=True, name="t2")
    t3 = sym.FullyConnected(t2, num_hidden=8, no_bias=True, name="t3")
    t4 = sym.FullyConnected(t3, num_hidden=8, no_bias=True, name="t4")
    graph = plan(sym.dot(t3, t4, transpose_b=True, name="t5"), strategy="match_range", shapes={"x": (2, 4)})
    assert storage(graph, "t3") == storage(graph, "t1")
    assert storage(graph, "t4") == storage(graph, "t0")


def test_operators_are_walked_breadth_first() -> None:
    """Paddle's older rules run two branches in turns; the newer rules and MXNet run one after the other."""
    x = sym.Variable("x")
    left, right = x, x
    for k in range(3):
        left, right = sym.tanh(left, name=f"l{k}"), sym.tanh(right, name=f"r{k}")
    net = sym.elemwise_add(left, right, name="end")
    assert steps(plan(net, "none")) == ["l0", "l1", "l2", "r0", "r1", "r2", "end"]
    assert steps(plan(net)) == ["l0", "r0", "l1", "r1", "l2", "r2", "end"]
    assert steps(plan(net, "paddle_pir")) == ["l0", "l1", "l2", "r0", "r1", "r2", "end"]


def test_forward_stays_in_front() -> None:
    """In training no gradient runs before the end of the forward part."""
    graph = plan_symbol(
        models.get("inception_v3"),
        models.input_shapes("inception_v3", 2),
        grad_req="write",
        options=PlanOptions(compat="paddle"),
    )
    validate(graph)
    names = steps(graph)
    assert not any("_backward" in name for name in names[: graph.num_forward_nodes])
    ours = plan_symbol(
        models.get("inception_v3"),
        models.input_shapes("inception_v3", 2),
        grad_req="write",
        options=PlanOptions(fusion=False),
    )
    assert sorted(names) == sorted(steps(ours))


def test_unordered_reuse_adds_an_edge() -> None:
    """A branch that reuses a block of an unordered branch adds one order edge, which the summary states.

    ::

        x -+-> a0 -> a1 (3) -------------+-> end
           +-> b0 -> b1 -> b2 -> b3 (3) -+
    """
    x = sym.Variable("x")
    a1 = sym.FullyConnected(
        sym.FullyConnected(x, num_hidden=8, no_bias=True, name="a0"), num_hidden=3, no_bias=True, name="a1"
    )
    b = x
    for k, length in enumerate((7, 6, 8, 3)):
        b = sym.FullyConnected(b, num_hidden=length, no_bias=True, name=f"b{k}")
    graph = plan(sym.elemwise_add(a1, b, name="end"), strategy="match_range", shapes={"x": (2, 4)})
    assert steps(graph).index("a1") < steps(graph).index("b2")
    assert storage(graph, "b2") == storage(graph, "a0")
    assert graph.memory.num_added_waits == 1
    assert "1 more between users of one block" in graph.memory.summary()


def test_reuse_along_a_chain_adds_none() -> None:
    """Reuse along a chain adds no order edges, because its nodes are ordered by their data."""
    graph = plan(chain(8, 7, 8, 7, 8, 7), strategy="match_range", shapes={"x": (2, 4)})
    assert graph.memory.num_storages == 2
    assert graph.memory.num_added_waits == 0


def test_range_zero_disables_reuse() -> None:
    """A match range of 0 disables reuse; the newer rules never reuse."""
    for compat, match_range, count in (("paddle", 1, 2), ("paddle", 0, 6), ("paddle_pir", 1, 6), ("paddle_pir", 0, 6)):
        graph = plan(chain(8, 7, 8, 7, 8, 7), compat, "match_range", match_range=match_range, shapes={"x": (2, 4)})
        assert graph.memory.num_storages == count
        assert (Kind.SHARED in graph.memory.entry_kind.tolist()) == (count == 2)


def test_edges_are_those_of_the_graph() -> None:
    """With the order edges, all users of a block in Inception's training come before the next writer of the block."""
    options = PlanOptions(compat="paddle", strategy="match_range")
    shapes = models.input_shapes("inception_v3", 2)
    program = size_symbol(models.get("inception_v3"), shapes, grad_req="write", options=options).program
    draft = plan_graph(program, options)
    actual, memory = draft.assignment, draft.memory
    edges = order_edges(program, actual)
    assert memory.num_added_waits == len(edges) > 0
    position = {nid: step for step, nid in enumerate(program.order)}
    assert all(position[a] < position[b] for a, b in edges)
    before: dict[int, set[int]] = {}
    extra: dict[int, set[int]] = {}
    for a, b in edges:
        extra.setdefault(b, set()).add(a)
    users: dict[int, list[set[int]]] = {}
    last: dict[int, int] = {}
    entry_node = program.graph.entry_node
    for nid in program.order:
        mine = {nid}
        for source in [entry_node[e] for e in program.reads[nid]] + list(extra.get(nid, ())):
            mine |= before.get(source, set())
        before[nid] = mine
        outs = range(program.graph.row[nid], program.graph.row[nid + 1])
        for e in outs:
            block = actual.storage[e]
            if block >= 0 and last.get(block) != actual.group[e]:
                if block in users:
                    assert users[block][-1] <= mine
                users.setdefault(block, []).append(set())
                last[block] = actual.group[e]
        for e in (*program.reads[nid], *outs):
            if actual.storage[e] >= 0:
                users[actual.storage[e]][-1].add(nid)


# ------------------------------------------------------------------------------------------------ release 2.6 and later


def test_pir_wants_equal_dtypes() -> None:
    """A cast to another dtype of the same width shares by the older rules, but not by the newer rules."""
    net = relu(sym.Cast(relu(sym.Variable("x"), "a"), dtype="int32", name="b"), "c")
    assert kind(plan(net, "paddle"), "b") == Kind.INPLACE
    assert kind(plan(net, "paddle_pir"), "b") == Kind.OWN


def test_pir_reuses_nothing_across_operators() -> None:
    """The newer rules reuse no memory across operators."""
    assert plan(chain(8, 7, 8, 7, 8), "paddle_pir", "match_range", shapes={"x": (2, 4)}).memory.num_storages == 5


def test_pir_blacklist() -> None:
    """Operators in ``inplace_blacklist`` do not compute in place; the option must be a tuple."""
    net = relu(sym.tanh(relu(relu(sym.Variable("x"), "a"), "b"), name="t"), "c")
    graph = plan(net, "paddle_pir", inplace_blacklist=("Activation",))
    assert [kind(graph, name) for name in "abtc"] == [Kind.OWN, Kind.OWN, Kind.INPLACE, Kind.OWN]
    repeated = MemoryPlan.from_json(graph.memory.to_json())
    assert repeated.options == graph.memory.options
    with pytest.raises(PlanError, match="inplace_blacklist must be a tuple of names"):
        PlanOptions(inplace_blacklist="Activation")  # type: ignore[arg-type]


def test_pir_leaves_gradients_of_sums_alone_on_a_cpu() -> None:
    """On a CPU the gradient of a broadcast difference shares by the older rules, but not by the newer rules."""
    x, y = sym.Variable("x"), sym.Variable("y")
    net = sym.sum(relu(sym.broadcast_sub(relu(x, "a"), relu(y, "b"), name="m"), "r"), name="s")
    shapes = {"x": (4, 4), "y": (4, 4)}
    older = plan(net, "paddle", grad_req="write", shapes=shapes)
    newer = plan(net, "paddle_pir", grad_req="write", shapes=shapes)
    name = next(n.name for n in older.graph.nodes if n.op is not None and n.op.name == "_backward_broadcast_sub")
    assert kind(older, name) == Kind.INPLACE
    assert kind(newer, name) == Kind.OWN


# ------------------------------------------------------------------------------------------------ same values


@pytest.mark.parametrize("name", ["lenet", "resnet", "mlp"])
def test_fetched_bytes_are_those_of_the_run_with_all_off(name: str) -> None:
    """All forward results have the bits of a run without sharing, for every combination of rules."""
    symbol = models.get(name).get_internals()
    shapes = models.input_shapes(name, 2)
    want = None
    for options in (
        PlanOptions(strategy="none", enable_inplace=False),
        *(
            PlanOptions(compat=compat, strategy=strategy, enable_inplace=inplace)
            for compat in ("paddle", "paddle_pir")
            for strategy in ("none", "match_range", "arena")
            for inplace in (False, True)
        ),
    ):
        mx.random.seed(3)
        executor = symbol.simple_bind(mx.cpu(), plan_options=options, **shapes)
        rng = np.random.default_rng(0)
        for array in executor.arg_dict.values():
            array[:] = rng.standard_normal(array.shape).astype(np.float32)
        got = [output.asnumpy().tobytes() for output in executor.forward(is_train=True)]
        want = want or got
        assert got == want


def test_training_gives_the_same_gradients() -> None:
    """The gradients of a residual network have the bits of a run without sharing."""
    want = None
    for options in (
        PlanOptions(strategy="none", enable_inplace=False),
        *(PlanOptions(compat=c, strategy=s) for c in ("paddle", "paddle_pir") for s in ("match_range", "arena")),
    ):
        executor = models.get("resnet").simple_bind(mx.cpu(), plan_options=options, **models.input_shapes("resnet", 4))
        rng = np.random.default_rng(0)
        for array in executor.arg_dict.values():
            array[:] = rng.standard_normal(array.shape).astype(np.float32)
        executor.forward(is_train=True)
        executor.backward()
        got = {name: array.asnumpy().tobytes() for name, array in executor.grad_dict.items() if array is not None}
        want = want or got
        assert got == want


def test_breadth_first_keeps_the_order_of_states() -> None:
    """Two batch norms with the same auxiliary states run in their given order."""
    x = sym.Variable("x")
    mean, var = sym.Variable("mean"), sym.Variable("var")
    deep = relu(relu(x, "a"), "b")
    first = sym.BatchNorm(deep, sym.Variable("g"), sym.Variable("h"), mean, var, name="first")
    second = sym.BatchNorm(x, sym.Variable("i"), sym.Variable("j"), mean, var, name="second")
    graph = plan(sym.Group([first, second]), shapes={"x": (4, 4)})
    assert steps(graph).index("first") < steps(graph).index("second")
