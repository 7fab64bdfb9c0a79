"""Depth-first post-order of a graph, deepest input first.

Depth-first order by input number may place a branch far before its only reader. In an unrolled recurrent network,
written as "project the input, then add the projected state", it runs all projections before the first step. If a node's
deepest input is computed first, every other input follows just before it is needed. Such an order visits an unrolled
network step by step. Recomputation in segments depends on this, and so do the sums of the gradients of shared weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def deepest_first(nodes: Sequence[int], inputs: Mapping[int, Sequence[int]] | Sequence[Sequence[int]]) -> list[int]:
    """Return ``nodes`` in depth-first post-order, deepest input first; ties keep the order of the inputs.

    Args:
        nodes: node numbers in topological order.
        inputs: inputs of each node, by node number; inputs that are not in ``nodes`` are ignored.
    """
    depth: dict[int, int] = {}
    needs: dict[int, list[int]] = {}
    needed: set[int] = set()
    for node in nodes:
        inside = [other for other in inputs[node] if other in depth]
        if len(inside) == 2:
            deepest, second = inside
            if depth[second] > depth[deepest]:
                inside = [second, deepest]
            elif deepest == second:
                inside = [deepest]
        elif len(inside) > 2:
            inside = sorted(dict.fromkeys(inside), key=depth.__getitem__, reverse=True)
        # Deep chains are the common case: only branches ask for the depth of their inputs.
        depth[node] = 1 + depth[inside[0]] if inside else 1
        needs[node] = inside
        needed.update(inside)
    return post_order([node for node in nodes if node not in needed], needs)


def post_order(roots: Sequence[int], needs: Mapping[int, Sequence[int]] | Sequence[Sequence[int]]) -> list[int]:
    """Return ``roots`` and their transitive inputs, each node after its inputs, which keep the order in ``needs``."""
    order: list[int] = []
    placed: set[int] = set()
    opened: set[int] = set()
    for root in roots:
        stack = [root]
        while stack:
            node = stack[-1]
            if node in opened:
                stack.pop()
                if node not in placed:
                    placed.add(node)
                    order.append(node)
            else:
                opened.add(node)
                stack += [other for other in reversed(needs[node]) if other not in opened]
    return order
