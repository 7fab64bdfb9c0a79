"""A second bind of a symbol uses the cached plan if nothing has changed, and plans again otherwise."""

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
    """Return a classifier with batch norm."""
    x = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=8, name="a")
    x = mx.sym.BatchNorm(x, name="norm")
    return mx.sym.SoftmaxOutput(mx.sym.FullyConnected(x, num_hidden=4, name="b"), name="softmax")


def bind(symbol: Any, **more: Any) -> Any:
    """Bind for training with six rows; ``more`` are other arguments."""
    return symbol.simple_bind(mx.cpu(), **{"data": (6, 5), **more})


def train_step(executor: Any) -> list[np.ndarray]:
    """Run one step from fixed values, and return outputs, gradients and states."""
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
    """A second bind uses the same plan with separate memory, and computes the same bits."""
    symbol = network()
    first, second = bind(symbol), bind(symbol)
    assert len(planned) == 1
    assert second.memory_plan is first.memory_plan
    fresh = bind(network())
    assert len(planned) == 2
    for a, b, c in zip(train_step(first), train_step(second), train_step(fresh), strict=True):
        assert np.array_equal(a, b)
        assert np.array_equal(a, c)
    assert second.allocated_bytes == fresh.allocated_bytes == fresh.memory_plan.peak


def test_alternating_shapes(planned):
    """Reshaping between two batch sizes plans each once; the cache drops the least recently used plan."""
    symbol = network()
    executor = bind(symbol)
    for rows in (3, 6, 3, 6):
        executor = executor.reshape(data=(rows, 5), softmax_label=(rows,), allow_up_sizing=True)
    assert len(planned) == 3, "a bind from one shape and a reshape from all shapes have two plans"
    symbol = network()
    del planned[:]
    for rows in (*range(1, plan_cache.MAX_PLANS + 2), 2, 1):
        bind(symbol, data=(rows, 5))
    assert len(planned) == plan_cache.MAX_PLANS + 2


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
def test_another_argument_needs_another_plan(planned, change):
    """A bind with another argument plans once, and a repeated one uses that plan."""
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
    """A bind plans again if an environment variable that planning may read has changed."""
    symbol = network()
    bind(symbol)
    monkeypatch.setenv(name, value)
    bind(symbol)
    assert len(planned) == 2


def set_attribute(symbol: Any) -> None:
    """Change the size of the layer of ``a_output``."""
    symbol.get_internals()["a_output"]._set_attr(num_hidden="9")


def set_hint(symbol: Any) -> None:
    """Set the shape attribute of the variable ``data``."""
    symbol.get_internals()["data"]._set_attr(__shape__="(6, 5)")


@pytest.mark.parametrize("change", [set_attribute, set_hint])
def test_the_graph_counts(planned, change: Callable[[Any], None]):
    """A bind plans again if an attribute of a node has changed."""
    symbol = network()
    bind(symbol)
    change(symbol)
    repeated = bind(symbol)
    assert len(planned) == 2
    assert repeated.arg_dict["a_weight"].shape[0] == (9 if change is set_attribute else 8)


def test_operators_of_the_user_are_asked_each_time(planned):
    """A symbol with a custom operator, whose inference may change, is planned at each bind."""

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
    """Executors are freed when they are dropped, and plans when their symbol is dropped."""
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


def test_copy_has_no_cached_plan(planned):
    """A copy of a symbol is planned again, because it has other nodes."""
    symbol = network()
    bind(symbol)
    copied = mx.sym.load_json(symbol.tojson())
    bind(copied)
    assert len(planned) == 2
    assert copied.cached_plans is not symbol.cached_plans
