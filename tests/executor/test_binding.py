"""Binding infers shapes once and makes each plan once."""

import numpy as np

import weftplan as mx
from weftplan.planner import drafts
from weftplan.planner.symbolic.passes import sizes


def test_everything_is_inferred_once_and_planned_once(monkeypatch):
    """Each bind infers shapes once and makes the plan without a budget once; a reshape infers shapes once."""
    solved, planned = [], []
    solve, plan = sizes.infer_shapes, drafts.plan_graph

    def solving(nodes, known, **how):
        solved.append(len(nodes))
        return solve(nodes, known, **how)

    def planning(facts, options):
        planned.append(options)
        return plan(facts, options)

    monkeypatch.setattr(sizes, "infer_shapes", solving)
    monkeypatch.setattr(drafts, "plan_graph", planning)
    net = mx.sym.Variable("data")
    for k in range(12):
        net = mx.sym.FullyConnected(mx.sym.Activation(net, act_type="tanh"), num_hidden=64, name=f"fc{k}")
    plain = net.simple_bind(mx.cpu(), data=(256, 64))
    assert len(solved) == 1
    assert len(planned) == 1
    held = plain.memory_plan.total
    solved.clear()
    planned.clear()
    tight = net.simple_bind(mx.cpu(), data=(256, 64), memory_budget=held - plain.memory_plan.peak // 4)
    assert tight.memory_plan.total < held
    assert len(solved) == 1
    options = [each for each in planned if each.budget is None]
    assert len(options) == 1, "the plan without recomputation must be made once"
    solved.clear()
    repeated = tight.reshape(data=(128, 64))
    assert len(solved) == 1
    assert repeated.memory_plan.options == tight.memory_plan.options


def test_a_bind_calls_nothing_that_imports_masked_arrays(monkeypatch):
    """A bind calls ``np.unique`` only with an index or a count; otherwise its first call imports ``numpy.ma``.

    That import would take most of the time of a first bind.
    """
    unique = np.unique

    def asked(values, *args, **more):
        assert any(more.values()), "np.unique without an index or a count"
        return unique(values, *args, **more)

    monkeypatch.setattr(np, "unique", asked)
    net = mx.sym.Variable("data")
    for k in range(4):
        net = mx.sym.FullyConnected(mx.sym.Activation(net, act_type="tanh"), num_hidden=64, name=f"fc{k}")
    net.simple_bind(mx.cpu(), data=(256, 64))
