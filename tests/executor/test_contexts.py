"""Graphs that are spread over several contexts: their gradients."""

import numpy as np
import pytest

import weftplan as mx
from weftplan import planner


def test_gradients_that_cross_contexts_are_added():
    """``grad_req="add"`` adds a gradient that is computed on another context than its array.

    x on cpu(1) -> times 3 on cpu(2)
    """
    with mx.AttrScope(ctx_group="one"):
        x = mx.sym.Variable("x")
    with mx.AttrScope(ctx_group="two"):
        net = x * 3.0
    executor = net.simple_bind(mx.cpu(), "add", x=(2,), group2ctx={"one": mx.cpu(1), "two": mx.cpu(2)})
    planner.validate(executor.planned)
    executor.grad_dict["x"][:] = 100
    for times in (1, 2):
        executor.forward(is_train=True)
        executor.backward(mx.nd.ones((2,)))
        assert executor.grad_dict["x"].asnumpy().tolist() == [100 + 3.0 * times] * 2


@pytest.mark.parametrize("options", [{}, {"strategy": "none"}, {"strategy": "match_range", "compat": "mxnet"}])
def test_long_sums_of_terms_from_several_contexts(options):
    """The gradient of a result with ten readers on three contexts, summed in place, has all ten terms."""
    with mx.AttrScope(ctx_group="a"):
        shared = mx.sym.exp(mx.sym.Variable("x"))
    ends = []
    for k in range(10):
        with mx.AttrScope(ctx_group="abc"[k % 3]):
            ends.append(mx.sym.square(shared * float(k + 1)))
    with mx.AttrScope(ctx_group="a"):
        net = mx.sym.add_n(*ends)
    places = {"a": mx.cpu(1), "b": mx.cpu(2), "c": mx.cpu(3)}
    executor = net.simple_bind(mx.cpu(), x=(40,), group2ctx=places, plan_options=planner.PlanOptions(**options))
    planner.validate(executor.planned)
    executor.forward(is_train=True, x=np.zeros(40))
    executor.backward(mx.nd.ones((40,)))
    assert executor.grad_dict["x"].asnumpy().tolist() == [sum(2.0 * (k + 1) ** 2 for k in range(10))] * 40


def test_only_the_shape_crosses():
    """An operator can take the shape of an input from another context; outputs and gradients are right."""
    with mx.AttrScope(ctx_group="one"):
        x = mx.sym.Variable("x")
        like = mx.sym.exp(mx.sym.Variable("y"))
    with mx.AttrScope(ctx_group="two"):
        net = mx.sym.reshape_like(x * 2, like)
    executor = net.simple_bind(mx.cpu(), x=(4,), y=(2, 2), group2ctx={"one": mx.cpu(1), "two": mx.cpu(2)})
    planner.validate(executor.planned)
    executor.forward(is_train=True, x=np.arange(4.0))
    executor.backward(mx.nd.array([[1, 2], [3, 4]]))
    assert executor.outputs[0].asnumpy().tolist() == [[0, 2], [4, 6]]
    assert executor.grad_dict["x"].asnumpy().tolist() == [2, 4, 6, 8]
    assert executor.grad_dict["y"].asnumpy().tolist() == [[0, 0], [0, 0]]
