"""The gradient pass: sums of terms, head gradients, zeros, and operators without a gradient."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from weftplan import symbol as sym
from weftplan.errors import PlanError
from weftplan.ops.core.schema import Req
from weftplan.planner import Kind, PlanOptions, plan_symbol, validate

SHAPE = (6, 6)


def _plan(symbol: Any, **kwargs: Any) -> Any:
    """Plan a symbol whose arguments all have ``SHAPE``, and validate the plan."""
    shapes = dict.fromkeys(symbol.list_arguments(), SHAPE)
    planned = plan_symbol(symbol, shapes, **{"grad_req": "write", **kwargs})
    validate(planned)
    return planned


def _ops(planned: Any) -> list[str]:
    """Return the names of the operators in execution order."""
    return [planned.graph.nodes[n].op.name for n in planned.order]


def _fan(terms: int) -> Any:
    """Return ``terms`` exponentials of one tanh."""
    x = sym.tanh(sym.Variable("x"))
    return sym.Group([sym.exp(x, name=f"e{k}") for k in range(terms)])


def test_one_term_needs_no_sum() -> None:
    """A gradient with a single term has no sum."""
    assert not {"add_n", "_grad_add"} & set(_ops(_plan(sym.exp(sym.tanh(sym.Variable("x"))))))


@pytest.mark.parametrize("terms", [2, 7])
def test_few_terms_are_summed_in_one_node(terms: int) -> None:
    """Fewer than 8 terms are summed by one ``add_n``."""
    planned = _plan(_fan(terms))
    nid = next(n for n in planned.order if planned.graph.nodes[n].op.name == "add_n")
    assert len(planned.graph.inputs[nid]) == terms
    assert "_grad_add" not in _ops(planned)


def test_sums_of_as_many_terms_share_their_parameters() -> None:
    """Sums with the same number of terms share one object of parameters, which is parsed once."""
    net = sym.Variable("x")
    for _ in range(4):
        net = sym.exp(net) * net
    nodes = [node for node in _plan(net).graph.nodes if node.op is not None and node.op.name == "add_n"]
    assert len(nodes) == 4
    assert len({id(node.params) for node in nodes}) == 1
    assert {node.attrs["num_args"] for node in nodes} == {"2"}


def test_many_terms_are_added_in_place() -> None:
    """Eight terms are summed by a chain of ``_grad_add``, which is skipped because their nodes add in place."""
    planned = _plan(_fan(8), options=PlanOptions(strategy="match_range", compat="mxnet"))
    assert _ops(planned).count("_grad_add") == 7
    assert len(planned.skipped) == 7
    added = [e for e, req in enumerate(planned.requests) if req == Req.ADD]
    assert len(added) == 7
    assert all(planned.memory.entry_kind[e] == Kind.ADDTO for e in added)
    total = planned.memory.entry_storage[added[0]]
    assert all(planned.memory.entry_storage[e] == total for e in added)


def test_the_chain_makes_terms_one_at_a_time() -> None:
    """Each term waits for the sum before it, so that 32 terms need no more memory than 8."""
    few, many = (_plan(_fan(n), options=PlanOptions(workspaces=False)).memory for n in (8, 32))
    outputs = [n * 144 for n in (8, 32)]
    assert many.lower_bound - outputs[1] <= few.lower_bound - outputs[0]


@pytest.mark.parametrize("cap", [0, 1, 2, 3])
def test_the_fewest_terms_that_are_added_one_at_a_time(cap: int) -> None:
    """Two terms are a chain if ``inplace_grad_sum_cap`` is at most 2, and one ``add_n`` if it is larger."""
    x = sym.Variable("x")
    planned = _plan(sym.exp(x) * sym.sin(x), options=PlanOptions(inplace_grad_sum_cap=cap))
    result = [node.op.name for node in planned.graph.nodes if node.op is not None]
    assert result.count("_grad_add") == (cap <= 2)
    assert result.count("add_n") == (cap > 2)


def test_chain_edges_close_no_cycle() -> None:
    """If a term is computed from another term, the second term does not wait for the sum that contains the first.

    Here h is read by p and by the sum. The sum's gradient passes unchanged to h, and p's gradient is computed from it.
    """
    h = sym.tanh(sym.Variable("x"))
    first = h + sym.Variable("y")
    second = sym.exp(h)
    third = h + second
    net = sym.Group([first * third, h + first])
    planned = _plan(net, options=PlanOptions(inplace_grad_sum_cap=2))
    assert len(planned.order) == len(set(planned.order))


def test_the_same_output_twice_sums_both_head_gradients(interpret: Any) -> None:
    """If an output is listed twice, both head gradients count; MXNet 1.9.1 uses only the last."""
    y = sym.exp(sym.Variable("x"))
    inputs = {"x": np.zeros(SHAPE, np.float32)}
    once = interpret.planned(_plan(y), inputs)["gradient of x"]
    twice = interpret.planned(_plan(sym.Group([y, y])), inputs)["gradient of x"]
    assert np.array_equal(twice, 2 * once)


def test_two_arguments_with_one_gradient_get_arrays_of_their_own(interpret: Any, same: Any) -> None:
    """The two arguments of x + y, which have the same gradient, get separate arrays, also with ``grad_req="add"``."""
    net = sym.tanh(sym.Variable("x") + sym.Variable("y"))
    planned = _plan(net, grad_req="add")
    assert len(set(planned.gradients.values())) == 2
    values = interpret.values(net, 3)
    same(interpret.planned(planned, values), interpret.apart(planned, values))


def test_a_loss_needs_no_head_gradient() -> None:
    """``SoftmaxOutput`` has no head gradient, and ``tanh`` has one."""
    x, label = sym.Variable("x"), sym.Variable("label")
    loss = sym.SoftmaxOutput(x, label, name="softmax")
    net = sym.Group([loss, sym.tanh(x)])
    planned = plan_symbol(net, {"x": SHAPE}, grad_req={"x": "write"})
    assert planned.head_grads[0] == -1
    assert planned.graph.nodes[planned.head_grads[1]].name == "_head_grad_1"
    assert list(planned.gradients) == ["x"]


def test_blocked_gradients_are_zero(interpret: Any) -> None:
    """The gradient through ``BlockGrad`` is zero, and no node before it is differentiated."""
    net = sym.BlockGrad(sym.exp(sym.Variable("x")))
    planned = _plan(net)
    assert "_backward_exp" not in _ops(planned)
    actual = interpret.planned(planned, {"x": np.ones(SHAPE, np.float32)})["gradient of x"]
    assert not actual.any()


def test_gradient_of_an_unknown_argument() -> None:
    """A gradient request for a variable that is no argument raises an error."""
    x = sym.Variable("x")
    with pytest.raises(PlanError, match="grad_req names 'y', which is no argument"):
        plan_symbol(sym.tanh(x), {"x": (2, 2)}, grad_req={"y": "write"})


def test_operator_without_gradient() -> None:
    """An operator without a gradient raises an error that names the operator, the node and the remedy."""
    from dataclasses import replace

    net = sym.exp(sym.tanh(sym.Variable("x"), name="squash"))
    node = net.entries[0].node.inputs[0].node
    node.op = replace(node.op, gradient=None)
    with pytest.raises(PlanError, match=r"operator tanh \('squash'\) is not differentiable.*BlockGrad"):
        _plan(net)


def test_wrong_number_of_gradients() -> None:
    """A gradient rule that returns too few gradients raises an error."""
    from dataclasses import replace

    net = sym.Variable("x") * sym.Variable("y")
    node = net.entries[0].node
    node.op = replace(node.op, gradient=lambda builder: [builder.ograd()])
    with pytest.raises(PlanError, match="returned 1 gradients for 2 inputs"):
        _plan(net)


def test_arguments_without_a_wanted_gradient_cost_nothing() -> None:
    """Only nodes between outputs and arguments with a requested gradient are differentiated."""
    net = sym.tanh(sym.exp(sym.Variable("x")) * sym.Variable("w"))
    planned = _plan(net, grad_req={"w": "write"})
    assert "_backward_exp" not in _ops(planned)
    assert list(planned.gradients) == ["w"]


def test_grad_req_is_checked() -> None:
    """An unknown grad_req and a grad_req for an unknown argument raise errors."""
    net = sym.tanh(sym.Variable("x"))
    with pytest.raises(PlanError, match="grad_req of 'x' must be one of null, write, add; got 'wirte'"):
        _plan(net, grad_req="wirte")
    with pytest.raises(PlanError, match="grad_req names 'z', which is no argument"):
        _plan(net, grad_req={"z": "write"})


def test_unread_output_has_a_gradient_of_zeros() -> None:
    """The backward node of a split reads zeros as the gradient of its unread output."""
    parts = sym.SliceChannel(sym.Variable("x"), num_outputs=2, name="parts")
    planned = _plan(sym.exp(parts[0], name="exp"))
    zeros = [planned.graph.nodes[n] for n in planned.order if planned.graph.nodes[n].op.name == "zeros_like"]
    assert [node.name for node in zeros] == ["parts_out1_zero"]
    backward = next(n for n in planned.order if planned.graph.names[n] == "parts_backward")
    makers = [planned.graph.entry_node[e] for e in planned.graph.inputs[backward]]
    assert planned.graph.names[makers[1]] == "parts_out1_zero"
    assert planned.graph.names[makers[0]] == "exp_backward"


def test_a_copy_between_devices_adds_to_no_array() -> None:
    """With ``grad_req="add"`` a copy between devices, which overwrites, is followed by a node that adds."""
    net = sym.exp(sym._CrossDeviceCopy(sym.Variable("x"), name="moved"), name="exp")
    assert _ops(_plan(net, grad_req="write"))[-1] == "_CrossDeviceCopy"
    assert _ops(_plan(net, grad_req="add"))[-2:] == ["_CrossDeviceCopy", "_copy"]


def test_a_gradient_has_the_parameters_that_its_rule_names() -> None:
    """The gradient of a sum is one copy for each term, without the parameters of the sum."""
    planned = _plan(sym.add_n(*map(sym.Variable, "abc"), name="total"))
    copies = [planned.graph.nodes[n] for n in planned.order if planned.graph.nodes[n].op.name == "_copy"]
    assert [node.name for node in copies] == [f"total_in{k}_backward" for k in range(3)]
    assert all(not node.params for node in copies)
