"""Buckets follow the order of gradients in the plan, which is the order of their completion in backward."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

import weftplan as mx
from weftplan import engine
from weftplan.kvstore.local import KVStoreLocal


def branched_network() -> mx.sym.Symbol:
    """Return a network of a short and a long branch, which share the weight of their first layer, times a scale.

    The scale is the network's first argument, and its gradient is the first to be complete.
    """
    data, shared = mx.sym.Variable("data"), mx.sym.Variable("shared_weight")
    outs = []
    for branch, length in (("a", 1), ("b", 3)):
        out = mx.sym.relu(mx.sym.FullyConnected(data, shared, num_hidden=8, no_bias=True, name=f"{branch}_first"))
        for number in range(length):
            out = mx.sym.FullyConnected(out, num_hidden=8, no_bias=True, name=f"{branch}{number}")
        outs.append(out)
    scale = mx.sym.Variable("scale_weight", shape=(1, 8))
    return mx.sym.LinearRegressionOutput(mx.sym.broadcast_mul(scale, outs[0] + outs[1]), name="out")


def make_module(net: mx.sym.Symbol, store: object) -> mx.mod.Module:
    """Return a Module of ``net`` on two contexts with an optimizer, ready for its first step."""
    module = mx.mod.Module(net, context=[mx.cpu(0), mx.cpu(1)], label_names=["out_label"])
    module.bind([("data", (4, 8))], [("out_label", (4, 8))])
    module.init_params(mx.init.Xavier())
    module.init_optimizer(kvstore=store)
    return module


def written_vars(work: object, *rows: Sequence[object]) -> set[int]:
    """Return the ids of the vars that a pushed operation writes."""
    return {*map(id, rows[1] if rows else work.writes)}


def completion_order(module: mx.mod.Module, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Return, for each gradient, the number of the last operation of backward that writes it."""
    writes: list[set[object]] = []
    own = engine.get()
    push = own.push
    executor = module.group.executors[0]
    executor.forward(is_train=True)
    with monkeypatch.context() as patch:
        patch.setattr(own, "push", lambda *args, **given: (writes.append(written_vars(*args)), push(*args, **given))[1])
        executor.backward()
    own.wait_for_all()
    arrays = {name: array for name, array in executor.grad_dict.items() if array is not None}
    return {n: max(k for k, some in enumerate(writes) if id(a.var) in some) for n, a in arrays.items()}


@pytest.mark.parametrize("bulk", ["0", "1"])
def test_the_order_is_that_of_the_operations_of_backward(bulk: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """``gradient_order`` lists gradients in the order of the operations that complete them, with and without segments.

    This order differs from the order of arguments.
    """
    monkeypatch.setenv("MXNET_EXEC_BULK_EXEC_TRAIN", bulk)
    module = make_module(branched_network(), None)
    order = module.group.executors[0].gradient_order()
    places = completion_order(module, monkeypatch)
    assert sorted(order) == sorted(places)
    assert [places[name] for name in order] == sorted(places.values())
    assert order != module.param_names[::-1]
    assert order[0] == "scale_weight"
    assert {order.index("shared_weight") - order.index(name) > 0 for name in ("a0_weight", "b0_weight")} == {True}


@pytest.mark.parametrize("on_store", ["1", "0"])
@pytest.mark.parametrize("kind", ["local", "device", "dist_sync"])
def test_buckets_follow_the_plan(kind: str, on_store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An update pushes buckets in the planned order, also if the Module and not the store updates the weights."""
    monkeypatch.setenv("FLAGS_fuse_parameter_groups_size", "1")
    monkeypatch.setenv("MXNET_UPDATE_ON_KVSTORE", on_store)
    seen: list[str] = []
    launch = KVStoreLocal._launch
    monkeypatch.setattr(
        KVStoreLocal, "_launch", lambda kv, lot, *args: (seen.extend(lot.keys), launch(kv, lot, *args))[1]
    )
    module = make_module(branched_network(), mx.kv.create(kind))
    batch = mx.io.DataBatch([mx.nd.ones((4, 8))], [mx.nd.ones((4, 8))])
    module.forward_backward(batch)
    seen.clear()
    module.update()
    order = module.group.executors[0].gradient_order()
    assert seen == order
