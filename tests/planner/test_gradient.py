"""The gradient pass: sums of terms, head gradients, zeros, mirrors, and operators without a gradient."""

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
    shapes = dict.fromkeys(symbol.list_arguments(), SHAPE)
    planned = plan_symbol(symbol, shapes, **{"grad_req": "write", **kwargs})
    validate(planned)
    return planned


def _ops(planned: Any) -> list[str]:
    return [planned.graph.nodes[n].op.name for n in planned.order]


def _fan(terms: int) -> Any:
    x = sym.tanh(sym.Variable("x"))
    return sym.Group([sym.exp(x, name=f"e{k}") for k in range(terms)])


def test_one_term_needs_no_sum() -> None:
    """x -> tanh -> exp: no sum anywhere."""
    assert not {"add_n", "_grad_add"} & set(_ops(_plan(sym.exp(sym.tanh(sym.Variable("x"))))))


@pytest.mark.parametrize("terms", [2, 7])
def test_few_terms_are_summed_at_once(terms: int) -> None:
    """Below the cap of 8 one add_n takes all terms."""
    planned = _plan(_fan(terms))
    nid = next(n for n in planned.order if planned.graph.nodes[n].op.name == "add_n")
    assert len(planned.graph.inputs[nid]) == terms
    assert "_grad_add" not in _ops(planned)


def test_sums_of_as_many_terms_share_their_parameters() -> None:
    """Parameters are read once: inference, the planner and kernels ask once for nodes that share them."""
    net = sym.Variable("x")
    for _ in range(4):
        net = sym.exp(net) * net
    nodes = [node for node in _plan(net).graph.nodes if node.op is not None and node.op.name == "add_n"]
    assert len(nodes) == 4
    assert len({id(node.params) for node in nodes}) == 1
    assert {node.attrs["num_args"] for node in nodes} == {"2"}


def test_many_terms_are_added_in_place() -> None:
    """From the cap on: a chain of _grad_add, skipped because the terms' makers add, then a copy."""
    planned = _plan(_fan(8), options=PlanOptions(strategy="match_range", compat="mxnet"))
    assert _ops(planned).count("_grad_add") == 7
    assert len(planned.skipped) == 7
    added = [e for e, req in enumerate(planned.requests) if req == Req.ADD]
    assert len(added) == 7
    assert all(planned.memory.entry_kind[e] == Kind.ADDTO for e in added)
    total = planned.memory.entry_storage[added[0]]
    assert all(planned.memory.entry_storage[e] == total for e in added)


def test_the_chain_makes_terms_one_at_a_time() -> None:
    """Each term waits for the sum before it, so two blocks are enough however many terms there are."""
    few, many = (_plan(_fan(n), options=PlanOptions(workspaces=False)).memory for n in (8, 32))
    outputs = [n * 144 for n in (8, 32)]
    assert many.lower_bound - outputs[1] <= few.lower_bound - outputs[0]


@pytest.mark.parametrize("cap", [0, 1, 2, 3])
def test_the_fewest_terms_that_are_added_one_at_a_time(cap: int) -> None:
    """Two terms are a chain with a cap of 2, and with any below it; with 3 they are one sum."""
    x = sym.Variable("x")
    planned = _plan(sym.exp(x) * sym.sin(x), options=PlanOptions(inplace_grad_sum_cap=cap))
    result = [node.op.name for node in planned.graph.nodes if node.op is not None]
    assert result.count("_grad_add") == (cap <= 2)
    assert result.count("add_n") == (cap > 2)


def test_chain_edges_close_no_cycle() -> None:
    """A term that another term is computed from must not wait for the sum of that other term.

    h feeds p and the sum; the gradient of the sum passes unchanged to h, and p's gradient is made from it.
    """
    h = sym.tanh(sym.Variable("x"))
    first = h + sym.Variable("y")
    second = sym.exp(h)
    third = h + second
    net = sym.Group([first * third, h + first])
    planned = _plan(net, options=PlanOptions(inplace_grad_sum_cap=2))
    assert len(planned.order) == len(set(planned.order))


def test_the_same_output_twice_sums_both_head_gradients(interpret: Any) -> None:
    """Group([y, y]): MXNet 1.9.1 keeps only the last head gradient; here both count."""
    y = sym.exp(sym.Variable("x"))
    inputs = {"x": np.zeros(SHAPE, np.float32)}
    once = interpret.planned(_plan(y), inputs)["gradient of x"]
    twice = interpret.planned(_plan(sym.Group([y, y])), inputs)["gradient of x"]
    assert np.array_equal(twice, 2 * once)


def test_two_arguments_with_one_gradient_get_arrays_of_their_own(interpret: Any, same: Any) -> None:
    """x + y hands the same entry to both; with grad_req add neither may see what the other array held."""
    net = sym.tanh(sym.Variable("x") + sym.Variable("y"))
    planned = _plan(net, grad_req="add")
    assert len(set(planned.gradients.values())) == 2
    values = interpret.values(net, 3)
    same(interpret.planned(planned, values), interpret.apart(planned, values))


def test_a_loss_needs_no_head_gradient() -> None:
    """SoftmaxOutput ignores it, tanh does not."""
    x, label = sym.Variable("x"), sym.Variable("label")
    loss = sym.SoftmaxOutput(x, label, name="softmax")
    net = sym.Group([loss, sym.tanh(x)])
    planned = plan_symbol(net, {"x": SHAPE}, grad_req={"x": "write"})
    assert planned.head_grads[0] == -1
    assert planned.graph.nodes[planned.head_grads[1]].name == "_head_grad_1"
    assert list(planned.gradients) == ["x"]


def test_blocked_gradients_are_zero(interpret: Any) -> None:
    """BlockGrad(x): the gradient of x is made as zeros, and nothing in between is differentiated."""
    net = sym.BlockGrad(sym.exp(sym.Variable("x")))
    planned = _plan(net)
    assert "_backward_exp" not in _ops(planned)
    actual = interpret.planned(planned, {"x": np.ones(SHAPE, np.float32)})["gradient of x"]
    assert not actual.any()


def test_unreachable_argument() -> None:
    """A variable that the outputs do not need has no gradient."""
    x = sym.Variable("x")
    with pytest.raises(PlanError, match="grad_req names 'y', which is no argument"):
        plan_symbol(sym.tanh(x), {"x": (2, 2)}, grad_req={"y": "write"})


def test_operator_without_gradient() -> None:
    """The message names operator, node and remedy."""
    from dataclasses import replace

    net = sym.exp(sym.tanh(sym.Variable("x"), name="squash"))
    node = net.entries[0].node.inputs[0].node
    node.op = replace(node.op, gradient=None)
    with pytest.raises(PlanError, match=r"operator tanh \('squash'\) is not differentiable.*BlockGrad"):
        _plan(net)


def test_wrong_number_of_gradients() -> None:
    """A rule that forgets an input is caught at the node."""
    from dataclasses import replace

    net = sym.Variable("x") * sym.Variable("y")
    node = net.entries[0].node
    node.op = replace(node.op, gradient=lambda builder: [builder.ograd()])
    with pytest.raises(PlanError, match="returned 1 gradients for 2 inputs"):
        _plan(net)


def test_arguments_without_a_wanted_gradient_cost_nothing() -> None:
    """Only what lies between wanted arguments and outputs is differentiated."""
    net = sym.tanh(sym.exp(sym.Variable("x")) * sym.Variable("w"))
    planned = _plan(net, grad_req={"w": "write"})
    assert "_backward_exp" not in _ops(planned)
    assert list(planned.gradients) == ["w"]


def test_grad_req_is_checked() -> None:
    """Unknown words and unknown names are named."""
    net = sym.tanh(sym.Variable("x"))
    with pytest.raises(PlanError, match="grad_req of 'x' must be one of null, write, add; got 'wirte'"):
        _plan(net, grad_req="wirte")
    with pytest.raises(PlanError, match="grad_req names 'z', which is no argument"):
        _plan(net, grad_req={"z": "write"})


def test_what_nobody_differentiates_has_a_gradient_of_zeros() -> None:
    """x -> split -> (exp, unused): the backward node of the split reads zeros for the output without a gradient."""
    parts = sym.SliceChannel(sym.Variable("x"), num_outputs=2, name="parts")
    planned = _plan(sym.exp(parts[0], name="exp"))
    zeros = [planned.graph.nodes[n] for n in planned.order if planned.graph.nodes[n].op.name == "zeros_like"]
    assert [node.name for node in zeros] == ["parts_out1_zero"]
    backward = next(n for n in planned.order if planned.graph.names[n] == "parts_backward")
    makers = [planned.graph.entry_node[e] for e in planned.graph.inputs[backward]]
    assert planned.graph.names[makers[1]] == "parts_out1_zero"
    assert planned.graph.names[makers[0]] == "exp_backward"


def test_a_copy_between_devices_adds_to_no_array() -> None:
    """x -> copy -> exp, added: a copy between devices can only overwrite, so another node adds what it brings."""
    net = sym.exp(sym._CrossDeviceCopy(sym.Variable("x"), name="moved"), name="exp")
    assert _ops(_plan(net, grad_req="write"))[-1] == "_CrossDeviceCopy"
    assert _ops(_plan(net, grad_req="add"))[-2:] == ["_CrossDeviceCopy", "_copy"]


def test_a_gradient_has_the_parameters_that_its_rule_names() -> None:
    """The gradient of a sum of three is a copy for each, which knows nothing of how many there were."""
    planned = _plan(sym.add_n(*map(sym.Variable, "abc"), name="total"))
    copies = [planned.graph.nodes[n] for n in planned.order if planned.graph.nodes[n].op.name == "_copy"]
    assert [node.name for node in copies] == [f"total_in{k}_backward" for k in range(3)]
    assert all(not node.params for node in copies)
