"""The planner's search as a solver for PyTorch's own ``activation_memory_budget``.

PyTorch's partitioner asks which of its candidates to save within a number of bytes. Its default maximises the saved
time under the sum of their sizes. This solver prices each choice by the peak of the whole step instead.
"""

from __future__ import annotations

from typing import Any

import torch

from weftplan.torch.choice import Choices
from weftplan.torch.joint import Joint
from weftplan.torch.private import CustomKnapsackSolver
from weftplan.torch.probe import Probes


class Solver(CustomKnapsackSolver):  # type: ignore[misc]
    """Chooses among the partitioner's candidates by the planner's curve."""

    def __call__(
        self,
        memory: list[float],
        joint_graph: torch.fx.Graph,
        max_memory: float,
        node_info: Any,
        all_recomputable_banned_nodes: list[torch.fx.Node],
    ) -> tuple[list[int], list[int]]:
        """Indices of the candidates to save and of those to repeat; the saved ones weigh at most ``max_memory``."""
        candidates = all_recomputable_banned_nodes
        count = sum(node_info.is_required_fw(node) for node in _outputs(joint_graph))
        joint = Joint(joint_graph, node_info.is_required_fw, num_outputs=count, probes=Probes(run=False))
        choices = Choices(joint)
        names = [node.name for node in candidates]
        for point in choices.points:
            again = {joint.steps[k].node.name for k in choices.steps(point)}
            saved = [k for k, name in enumerate(names) if name not in again]
            if sum(memory[k] for k in saved) <= max_memory:
                return saved, [k for k, name in enumerate(names) if name in again]
        return _greedy(memory, max_memory)

    def uuid(self) -> Any:
        """A name for PyTorch's caches of compiled graphs."""
        return "weftplan.torch.knapsack 1"


def _outputs(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    out = next(node for node in graph.nodes if node.op == "output")
    return [node for node in out.args[0] if isinstance(node, torch.fx.Node)]


def _greedy(memory: list[float], most: float) -> tuple[list[int], list[int]]:
    """The smallest candidates that fit, when no choice of the curve saves that little."""
    saved: list[int] = []
    for k in sorted(range(len(memory)), key=memory.__getitem__):
        if sum(memory[j] for j in saved) + memory[k] <= most:
            saved.append(k)
    return sorted(saved), sorted(set(range(len(memory))) - set(saved))


def knapsack_solver() -> Solver:
    """A solver for ``torch._functorch.config.activation_memory_budget_solver``.

    Set ``activation_memory_budget`` to a share as before; which results the share saves is then the planner's choice.
    For a budget in bytes use :func:`weftplan.torch.budget`.
    """
    return Solver()
