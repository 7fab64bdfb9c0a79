"""A second bind uses the plan of the first where nothing has changed, and only there."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import weftplan as mx
from weftplan import planner
from weftplan.executor import plan_cache


def network() -> Any:
    """Return a classifier with moving statistics."""
    x = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=8, name="a")
    x = mx.sym.BatchNorm(x, name="norm")
    return mx.sym.SoftmaxOutput(mx.sym.FullyConnected(x, num_hidden=4, name="b"), name="softmax")


def bind(symbol: Any, **more: Any) -> Any:
    """For training on six rows, unless told otherwise."""
    return symbol.simple_bind(mx.cpu(), **{"data": (6, 5), **more})


def trained(executor: Any) -> list[np.ndarray]:
    """Everything that a step makes from given values."""
    random = np.random.RandomState(3)
    for array in executor.arg_arrays:
        array[:] = random.standard_normal(array.shape)
    for array in executor.aux_arrays:
        array[:] = 1
    executor.forward(is_train=True)
    executor.backward()
    arrays = (*executor.outputs, *executor.grad_arrays, *executor.aux_arrays)
    return [array.asnumpy().copy() for array in arrays if array is not None]


def test_a_second_bind_plans_nothing(planned):
    """The two executors share one plan, have memory of their own, and the bits of a first bind."""
    symbol = network()
    first, second = bind(symbol), bind(symbol)
    assert len(planned) == 1
    assert second.memory_plan is first.memory_plan
    fresh = bind(network())
    assert len(planned) == 2
    for a, b, c in zip(trained(first), trained(second), trained(fresh), strict=True):
        assert np.array_equal(a, b)
        assert np.array_equal(a, c)
    assert second.allocated_bytes == fresh.allocated_bytes == fresh.memory_plan.peak


def test_shapes_to_and_fro(planned):
    """Reshaping between two batches plans each once; beyond the limit the least recently used plan is dropped."""
    symbol = network()
    executor = bind(symbol)
    for rows in (3, 6, 3, 6):
        executor = executor.reshape(data=(rows, 5), softmax_label=(rows,), allow_up_sizing=True)
    assert len(planned) == 3, "bound from one shape and reshaped from all shapes are two questions"
    symbol = network()
    del planned[:]
    for rows in (*range(1, plan_cache.MOST + 2), 2, 1):
        bind(symbol, data=(rows, 5))
    assert len(planned) == plan_cache.MOST + 2


CHANGES: dict[str, dict[str, Any]] = {
    "shape": {"data": (7, 5)},
    "dtype": {"type_dict": {"data": "float64"}},
    "gradients": {"grad_req": "null"},
    "one gradient": {"grad_req": {"a_weight": "add"}},
    "device": {"ctx": mx.sim(0)},
    "options": {"options": planner.PlanOptions(strategy="none")},
    "budget": {"budget": 1 << 20},
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_the_caller_says_counts(planned, change):
    """Any other argument is another plan, and the same one again is not."""
    symbol = network()
    bind(symbol)
    for _ in range(2):
        more = {"data": (6, 5), **CHANGES[change]}
        symbol.simple_bind(more.pop("ctx", mx.cpu()), **more)
    assert len(planned) == 2


@pytest.mark.parametrize(
    ("name", "value"),
    [("MXNET_EXEC_ENABLE_INPLACE", "0"), ("WEFTPLAN_KERNELS", "numpy"), ("FLAGS_cudnn_exhaustive_search", "1")],
)
@pytest.mark.filterwarnings("ignore")
def test_settings_count(planned, monkeypatch, name, value):
    """A variable of the environment that planning might read."""
    symbol = network()
    bind(symbol)
    monkeypatch.setenv(name, value)
    bind(symbol)
    assert len(planned) == 2


def set_attribute(symbol: Any) -> None:
    """Give the layer after ``a_output`` more outputs."""
    symbol.get_internals()["a_output"]._set_attr(num_hidden="9")


def set_hint(symbol: Any) -> None:
    """A variable says its shape."""
    symbol.get_internals()["data"]._set_attr(__shape__="(6, 5)")


@pytest.mark.parametrize("change", [set_attribute, set_hint])
def test_the_graph_counts(planned, change: Callable[[Any], None]):
    """A node that changed without the symbol is detected."""
    symbol = network()
    bind(symbol)
    change(symbol)
    repeated = bind(symbol)
    assert len(planned) == 2
    assert repeated.arg_dict["a_weight"].shape[0] == (9 if change is set_attribute else 8)


def test_operators_of_the_user_are_asked_each_time(planned):
    """Inference of a custom operator may answer differently the next time."""

    @mx.operator.register("of_the_day")
    class Prop(mx.operator.CustomOpProp):
        def infer_shape(self, in_shape):
            return in_shape, [in_shape[0]], []

        def create_operator(self, ctx, shapes, dtypes):
            return mx.operator.CustomOp()

    symbol = mx.sym.Custom(mx.sym.Variable("data"), op_type="of_the_day")
    for _ in range(2):
        symbol.simple_bind(mx.cpu(), grad_req="null", data=(2, 2))
    assert len(planned) == 2


def test_plans_go_with_the_symbol():
    """Neither executor nor plan outlives the symbol and the executor."""
    symbol = network()
    executor = bind(symbol)
    plan, running = weakref.ref(executor.memory_plan), weakref.ref(executor)
    del executor
    gc.collect()
    assert running() is None
    assert plan() is not None
    del symbol
    gc.collect()
    assert plan() is None


def test_a_copy_keeps_nothing(planned):
    """Copies have nodes of their own."""
    symbol = network()
    bind(symbol)
    copied = mx.sym.load_json(symbol.tojson())
    bind(copied)
    assert len(planned) == 2
    assert copied.kept is not symbol.kept
