"""Attributes of MXNet's modules, executor groups and iterators that scripts read, and contexts that occur twice."""

from __future__ import annotations

import hashlib
import re
from typing import Any

import numpy as np
import pytest

import weftplan as mx
from weftplan.errors import BindError, DTypeError


def network() -> mx.sym.Symbol:
    """Return a classifier of one layer with batch normalization."""
    hidden = mx.sym.BatchNorm(mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=6, name="fc"), name="bn")
    return mx.sym.SoftmaxOutput(hidden, name="softmax")


def four_batches() -> mx.io.NDArrayIter:
    """Return an iterator over four batches of ten samples."""
    rng = np.random.default_rng(0)
    return mx.io.NDArrayIter(rng.standard_normal((40, 5)).astype("f"), rng.integers(0, 6, 40), 10)


def train_digest(contexts: list[mx.Context], kvstore: str | None, **more: Any) -> tuple[str, mx.mod.Module]:
    """Train a module; return (SHA-256 digest of parameters and predictions, module)."""
    mx.random.seed(0)
    module = mx.mod.Module(network(), context=contexts)
    module.fit(four_batches(), num_epoch=2, kvstore=kvstore, initializer=mx.init.Xavier(),
               optimizer_params={"learning_rate": 0.1, "momentum": 0.9}, **more)  # fmt: skip
    args, aux = module.get_params()
    values = [*(value for _, value in sorted({**args, **aux}.items())), module.predict(four_batches())]
    return hashlib.sha256(b"".join(value.asnumpy().tobytes() for value in values)).hexdigest(), module


@pytest.mark.parametrize("kvstore", ["local", "device", None])
@pytest.mark.parametrize("kind", [mx.cpu, mx.sim])
@pytest.mark.parametrize("count", [2, 3])
def test_a_context_may_occur_twice(kvstore: str | None, kind: Any, count: int):
    """``context=[mx.cpu()] * 2`` gives the same bits as two different contexts."""
    digest, module = train_digest([kind(0)] * count, kvstore)
    assert len(module._exec_group.execs) == count
    assert digest == train_digest([kind(number) for number in range(count)], kvstore)[0]


def test_a_context_twice_within_a_budget():
    """With a memory budget, a context that occurs twice raises."""
    with pytest.raises(BindError, match="with a memory budget a context may occur only once"):
        train_digest([mx.cpu(0)] * 2, "device", memory_budget="1GB")


def test_names_of_a_module():
    """Module's private attributes and its executor group have MXNet's names and values."""
    _, module = train_digest([mx.cpu(0), mx.cpu(1)], "device")
    assert (module._context, module._data_names, module._label_names) == (module.contexts, ["data"], ["softmax_label"])
    assert module._param_names == ["fc_weight", "fc_bias", "bn_gamma", "bn_beta"]
    assert module._aux_names == ["bn_moving_mean", "bn_moving_var"]
    assert module._output_names == ["softmax_output"]
    assert (module._fixed_param_names, module._state_names, module._params_dirty) == ([], [], False)
    module._sync_params_from_devices()
    group = module._exec_group
    assert (group.data_names, group.label_names) == (["data"], ["softmax_label"])
    assert group.arg_names == module.symbol.list_arguments()
    module.forward(next(four_batches()), is_train=False)
    (parts,) = group.data_arrays
    assert [(part.stop - part.start, array.shape) for part, array in parts] == [(5, (5, 5)), (5, (5, 5))]
    np.testing.assert_array_equal(parts[1][1].asnumpy(), next(four_batches()).data[0].asnumpy()[5:])
    assert len(group.label_arrays) == 1
    assert group.get_output_shapes() == [(10, 6)]
    assert group.get_outputs()[0].shape == (10, 6)
    assert [part.shape for part in group.get_outputs(merge_multi_context=False)[0]] == [(5, 6), (5, 6)]
    seen: list[str] = []
    monitor = mx.mon.Monitor(1, stat_func=lambda x: x.sum(), pattern="softmax.*")
    group.install_monitor(monitor)
    monitor.tic()
    module.forward(next(four_batches()), is_train=False)
    seen += [name for _, name, _ in monitor.toc()]
    assert "softmax_output" in seen


def test_names_of_an_iterator():
    """``data`` and ``label`` of NDArrayIter are in the epoch's order; ``cursor`` is the current batch's start."""
    data = mx.io.NDArrayIter({"a": np.arange(10.0)}, np.arange(10), 4, shuffle=True)
    ((name, values),), ((label_name, labels),) = data.data, data.label
    assert (name, label_name, data.num_source, data.layout) == ("a", "softmax_label", 2, "NCHW")
    assert isinstance(values, mx.nd.NDArray)
    np.testing.assert_array_equal(values.asnumpy(), labels.asnumpy())
    assert [array.shape for array in data.data_list] == [(10,), (10,)]
    assert data.cursor == -4
    seen = []
    for number, batch in enumerate(data):
        assert data.cursor == 4 * number
        seen += batch.data[0].asnumpy().tolist()[: 4 - batch.pad]
    assert seen == values.asnumpy().tolist()


@pytest.mark.parametrize(
    ("values", "dtype", "expected"),
    [
        (["1", "22"], "int32", [1, 22]),
        (np.array(["1.5", "-2"]), "float32", [1.5, -2.0]),
        ([b"12", b"3"], "float64", [12.0, 3.0]),
        (np.array([1, 2.5], dtype=object), None, [1.0, 2.5]),
        ([["1", "2"], ["3", "4"]], None, [[1.0, 2.0], [3.0, 4.0]]),
    ],
)
def test_text_and_objects_become_numbers(values: Any, dtype: str | None, expected: list[Any]):
    """Numbers as text, bytes or objects are converted, in ``mx.nd.array`` and in NDArrayIter."""
    result = mx.nd.array(values, dtype=dtype)
    assert result.asnumpy().tolist() == expected
    assert result.dtype == np.dtype(dtype or "float32")
    assert mx.io.NDArrayIter(np.asarray(values), batch_size=2).next().data[0].asnumpy().tolist() == expected


@pytest.mark.parametrize(
    "values", [["one"], [1 + 2j], np.array(["2026-01-01"], dtype="M8[D]"), [[1], [2, 3]], [object()]]
)
def test_what_is_no_number_names_the_cure(values: Any):
    """Values that are no real numbers raise; the error recommends np.asarray."""
    with pytest.raises(DTypeError, match=re.escape("np.asarray(values, dtype=float)")):
        mx.nd.array(values)


def test_more_names_of_groups_and_optimizers():
    """Executor groups, optimizers and schedules have the other attributes of MXNet 1.9.1."""
    _, module = train_digest([mx.cpu(0), mx.cpu(1)], "device", allow_missing=True)
    group = module._exec_group
    assert (group.symbol, group.for_training, group.inputs_need_grad) == (module.symbol, True, False)
    assert (group.output_names, group.num_outputs, group.workload) == (["softmax_output"], 1, [1.0, 1.0])
    assert (group.data_layouts, group.label_layouts, group.output_layouts) == ([0], [0], [0])
    assert group.grad_req["fc_weight"] == "write"
    assert group.grad_req["data"] == "null"
    assert group.fixed_param_names == group.state_names == group.get_states() == []
    assert module._total_exec_bytes == sum(executor.memory_plan.peak for executor in group.execs)
    batch = next(iter(four_batches()))
    module.forward(batch, is_train=False)
    actual, expected = mx.metric.create("acc"), mx.metric.create("acc")
    group.update_metric(actual, batch.label)
    module.update_metric(expected, batch.label)
    assert actual.get() == expected.get()
    sliced = mx.metric.create("acc")
    group.update_metric(sliced, [[label[part] for label in batch.label] for part in group.slices], pre_sliced=True)
    assert sliced.get() == expected.get()
    optimizer = mx.optimizer.Optimizer.create_optimizer("sgd", learning_rate=0.5, sym=network())
    optimizer.set_lr_mult({0: 2.0})
    assert (optimizer._get_lrs([0, 1]), optimizer._get_wds([0, 1])) == ([1.0, 0.5], [0.0, 0.0])
    assert optimizer.sym_info == (optimizer._attrs, list(optimizer._attrs))
    assert mx.lr_scheduler.PolyScheduler(10, warmup_steps=4).max_steps == 6
