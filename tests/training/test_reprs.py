"""The reprs of modules, optimizers, schedules and stores, and the split of a batch over contexts."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

import weftplan as mx


def network() -> mx.sym.Symbol:
    """Return a classifier of one layer with softmax."""
    return mx.sym.SoftmaxOutput(mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=3), name="softmax")


def test_optimizers_show_what_was_set() -> None:
    """An optimizer's repr has the learning rate or its schedule, and every setting that is not the default."""
    assert repr(mx.optimizer.SGD()) == "SGD(learning_rate=0.01)"
    assert repr(mx.optimizer.SGD(learning_rate=0.1, momentum=0.9)) == "SGD(learning_rate=0.1, momentum=0.9)"
    schedule = mx.lr_scheduler.FactorScheduler(step=7, factor=0.5)
    assert repr(schedule) == "FactorScheduler(step=7, factor=0.5)"
    adam = mx.optimizer.create("adam", lr_scheduler=schedule, beta1=0.8)
    assert repr(adam) == "Adam(beta1=0.8, lr_scheduler=FactorScheduler(step=7, factor=0.5))"
    adam = mx.optimizer.Adam()
    adam.set_learning_rate(0.25)
    assert repr(adam) == "Adam(learning_rate=0.25)"


@pytest.mark.parametrize("name", sorted(mx.optimizer.Optimizer.opt_registry))
def test_every_optimizer_is_shown(name: str) -> None:
    """Evaluating the repr of any optimizer makes an optimizer with the same repr."""
    result = mx.optimizer.create(name, wd=0.125)
    repeated = eval(repr(result), {type(result).__name__: type(result)})
    assert repr(repeated) == repr(result)
    assert "wd=0.125" in repr(result)


def test_modules_show_their_state() -> None:
    """A module's repr says whether it is bound, has values and has an optimizer; a store's repr has its optimizer."""
    module = mx.mod.Module(network(), context=[mx.cpu(0), mx.cpu(1)])
    assert repr(module) == "<Module softmax_output on cpu(0), cpu(1): not bound>"
    module.bind([("data", (4, 5))], [("softmax_label", (4,))])
    assert "bound to data (4, 5), softmax_label (4,); parameters without values>" in repr(module)
    module.init_params()
    module.init_optimizer(kvstore="local", optimizer_params={"learning_rate": 0.5})
    assert repr(module).endswith("softmax_label (4,); SGD(learning_rate=0.5, rescale_grad=0.25), kvstore local>")
    assert repr(module._kvstore) == ("<KVStoreLocal 'local': 2 keys, SGD(learning_rate=0.5, rescale_grad=0.25)>")
    assert repr(mx.kv.create("local")) == "<KVStoreLocal 'local': 0 keys>"


def test_bucketing_modules_show_their_buckets() -> None:
    """A BucketingModule's repr has its bucket keys and the default bucket's module."""
    module = mx.mod.BucketingModule(lambda key: (network(), ("data",), ("softmax_label",)), 5)
    assert repr(module).startswith("<BucketingModule with the buckets 5; the default one: <Module softmax_output on ")


def test_shares_of_a_batch() -> None:
    """``work_load_list`` splits a batch in proportion, rounded as in MXNet 1.9.1; training gives equal weights.

    A split that leaves a context without samples, or that is combined with a memory budget, raises.
    """
    from weftplan.data.device_placement import split_batch

    # Results of mxnet.executor_manager._split_input_slice:
    for batch, loads, edges in (
        (8, [1, 3], [0, 2, 8]),
        (10, [1, 2, 4], [0, 1, 4, 10]),
        (7, [3, 1, 1], [0, 4, 5, 7]),
        (9, [0.5, 1.5], [0, 2, 9]),
    ):
        actual = split_batch(batch, len(loads), loads)
        assert [(part.start, part.stop) for part in actual] == list(pairwise(edges))
        assert mx.executor_manager._split_input_slice(batch, loads) == actual
    assert mx.executor_manager._split_input_slice(8, [1, 1, 1]) == [slice(0, 3), slice(3, 6), slice(6, 8)]
    with pytest.raises(mx.MXNetError, match=r"in the proportions \[100, 1\] leaves a context without samples"):
        split_batch(8, 2, [100, 1])
    random = np.random.RandomState(0)
    data, label = random.randn(16, 5).astype("f"), random.randint(0, 3, 16).astype("f")
    weights = {}
    for shares in (None, [1, 3]):
        module = mx.mod.Module(
            network(), context=mx.cpu() if shares is None else [mx.cpu(0), mx.cpu(1)], work_load_list=shares
        )
        start = {"fullyconnected0_weight": mx.nd.array(random.randn(3, 5) * 0), "fullyconnected0_bias": mx.nd.zeros(3)}
        names = module.param_names
        module.fit(
            mx.io.NDArrayIter(data, label, 8), num_epoch=3, arg_params=dict(zip(names, start.values(), strict=True))
        )
        weights[shares is None] = module.get_params()[0][names[0]].asnumpy()
        if shares:
            assert [executor.arg_dict["data"].shape[0] for executor in module.group.executors] == [2, 6]
    np.testing.assert_allclose(weights[True], weights[False], rtol=1e-5, atol=1e-6)
    with pytest.raises(mx.MXNetError, match=r"contexts share a memory budget equally.* got \[1, 3\]"):
        mx.mod.Module(
            network(), context=[mx.cpu(0), mx.cpu(1)], work_load_list=[1, 3], memory_budget="1GB"
        ).bind([("data", (8, 5))], [("softmax_label", (8,))])  # fmt: skip
