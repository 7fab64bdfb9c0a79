"""Split a joint graph into a forward and a backward module, with the recomputed nodes of a choice in planned order.

A module deletes each value after its last use, so the order of its nodes determines all lifetimes.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from typing import Any

import torch

from weftplan.torch.private import is_mutation
from weftplan.torch.private_compile import extract_modules, is_tangent, run_and_save_rng_state, run_with_rng_state
from weftplan.torch.step_program import Joint, is_getitem, is_random


def saved_results(joint: Joint, twice: Collection[int]) -> list[int]:
    """Return the results that forward must save for backward if backward recomputes the given steps."""
    repeated = {r for k in twice for r in joint.steps[k].makes}
    computed = {r for step in joint.steps[joint.num_forward :] for r in step.makes}
    reading = [*range(joint.num_forward, len(joint.steps)), *twice]
    wanted = dict.fromkeys(r for k in reading for r in joint.steps[k].reads)
    wanted.update(dict.fromkeys(joint.outputs[1]))
    return [r for r in wanted if r not in repeated and r not in computed and not is_tangent(joint.results.maker[r])]


def split(
    module: torch.fx.GraphModule,
    joint: Joint,
    *,
    twice: Collection[int],
    orders: tuple[Sequence[str], Sequence[str]],
    info: Any,
    outputs: int,
) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    """Return the forward module, whose outputs include the saved results, and the backward module.

    Args:
        twice: numbers of the steps of ``joint`` that the backward module recomputes.
        orders: names of the steps of the forward and of the backward module in planned order.
        info: the result of :func:`classify_nodes`.
        outputs: the number of the graph's outputs that are outputs of the forward part.
    """
    states = {joint.random[node]: node for node in joint.random}
    inputs: dict[int, list[torch.fx.Node]] = {}  # several inputs may be views of one storage
    for node in joint.inputs:
        for r in joint.results.of(node):
            inputs.setdefault(r, []).append(node)
    saved, drawn = list[torch.fx.Node](), []
    for r in saved_results(joint, twice):
        if r in states:
            drawn.append(states[r].name)
        else:
            saved += inputs.get(r) or [_node_of(joint, r)]
    forward, backward = extract_modules(
        module,
        saved,
        saved_sym_nodes=[],
        num_fwd_outputs=outputs,
        static_lifetime_input_nodes=info.static_lifetime_input_nodes,
    )
    for name in drawn:
        _share_state(forward, backward, name)
    return reordered(forward, orders[0]), reordered(backward, orders[1])


def _node_of(joint: Joint, r: int) -> torch.fx.Node:
    """Return the node whose value is the tensor of result ``r``: its maker, or a getitem of the maker's tuple."""
    node = joint.results.maker[r]
    if isinstance(node.meta["val"], (tuple, list)):
        return next(user for user in node.users if is_getitem(user) and joint.results.of(user) == [r])
    return node


def _share_state(forward: torch.fx.GraphModule, backward: torch.fx.GraphModule, name: str) -> None:
    """Save the generator's state before random node ``name`` in forward, so that backward draws the same numbers."""
    first = next(node for node in forward.graph.nodes if node.name == name)
    second = next((node for node in backward.graph.nodes if node.name == name and is_random(node)), None)
    if second is None:
        return
    graph = forward.graph
    with graph.inserting_before(first):
        both = graph.call_function(run_and_save_rng_state, (first.target, *first.args), dict(first.kwargs))
        state = graph.call_function(operator.getitem, (both, 0))
        drawn = graph.call_function(operator.getitem, (both, 1))
    drawn.meta = dict(first.meta)
    value = _state_like(first)
    state.meta["val"], both.meta["val"] = value, (value, first.meta["val"])
    both.meta["planned_as"] = name
    first.replace_all_uses_with(drawn)
    graph.erase_node(first)
    out = next(node for node in graph.nodes if node.op == "output")
    out.args = ((*out.args[0], state),)
    graph = backward.graph
    tangent = next(node for node in graph.nodes if node.op == "placeholder" and is_tangent(node))
    with graph.inserting_before(tangent):
        placeholder = graph.placeholder(f"rng_state_{name}")
        placeholder.meta["val"] = value
    with graph.inserting_before(second):
        repeated = graph.call_function(
            run_with_rng_state, (placeholder, second.target, *second.args), dict(second.kwargs)
        )
    repeated.meta = dict(second.meta)
    second.replace_all_uses_with(repeated)
    graph.erase_node(second)
    repeated.meta["planned_as"] = name


def _state_like(node: torch.fx.Node) -> torch.Tensor:
    """Return a fake tensor of the size of the state of the generator that a random node uses."""
    val = node.meta["val"]
    fake = val[0] if isinstance(val, (tuple, list)) else val
    state = torch.cuda.get_rng_state(fake.device) if fake.device.type == "cuda" else torch.get_rng_state()
    fake_state: torch.Tensor = fake.fake_mode.from_tensor(state)
    return fake_state


def reordered(module: torch.fx.GraphModule, order: Sequence[str]) -> torch.fx.GraphModule:
    """Return a module in which the nodes that ``order`` names run in that order.

    Other nodes run just before their first reader, and getitems right after the node that makes the tuple. Mutations
    that ``order`` does not name run at the end, in their former order.
    """
    graph, new = module.graph, torch.fx.Graph()
    placed: dict[torch.fx.Node, torch.fx.Node] = {}
    rank = {node: k for k, node in enumerate(graph.nodes)}

    def place(node: torch.fx.Node) -> None:
        placed[node] = new.node_copy(node, placed.__getitem__)
        for user in sorted(filter(is_getitem, node.users), key=rank.__getitem__):
            if user not in placed:
                place(user)

    def place_with_sources(node: torch.fx.Node) -> None:
        ahead: set[torch.fx.Node] = set()
        stack = [node]
        while stack:
            current = stack.pop()
            if current not in placed and current not in ahead:
                ahead.add(current)
                stack += current.all_input_nodes
        for current in sorted(ahead, key=rank.__getitem__):
            if current not in placed:
                place(current)

    by_name = {node.meta.get("planned_as", node.name): node for node in graph.nodes if node.op == "call_function"}
    for node in graph.nodes:
        if node.op == "placeholder":
            placed[node] = new.node_copy(node, placed.__getitem__)
    for name in order:
        if name in by_name and by_name[name] not in placed:
            place_with_sources(by_name[name])
    for node in graph.nodes:
        if is_mutation(node) and node not in placed:
            place_with_sources(node)
    for node in graph.nodes:
        if node.op == "output":
            for source in node.all_input_nodes:
                place_with_sources(source)
            out = new.node_copy(node, placed.__getitem__)
            out.meta = dict(node.meta)
    new.lint()
    return torch.fx.GraphModule(module, new)
