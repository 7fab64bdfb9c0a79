"""The planner's search as a solver for PyTorch's own ``activation_memory_budget``.

PyTorch's partitioner asks a solver which candidates to save within a number of bytes. The default solver looks only at
their sizes and times. This solver uses the planner's choices, which depend on the peak of the whole step.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch

from weftplan.torch.choice import Choices
from weftplan.torch.private_compile import CustomKnapsackSolver
from weftplan.torch.probe import Probes
from weftplan.torch.step_program import Joint


class Solver(CustomKnapsackSolver):  # type: ignore[misc]
    """A solver that saves those candidates of the partitioner that a choice of the planner does not recompute."""

    def __call__(
        self,
        memory: list[float],
        joint_graph: torch.fx.Graph,
        max_memory: float,
        node_info: Any,
        all_recomputable_banned_nodes: list[torch.fx.Node],
    ) -> tuple[list[int], list[int]]:
        """Return the indices of the candidates to save (at most ``max_memory`` in total) and of those to recompute."""
        candidates = all_recomputable_banned_nodes
        outputs = next(node for node in joint_graph.nodes if node.op == "output").args[0]
        count = sum(isinstance(node, torch.fx.Node) and node_info.is_required_fw(node) for node in outputs)
        joint = Joint(joint_graph, node_info.is_required_fw, num_outputs=count, probes=Probes(run=False))
        choices = Choices(joint)
        names = [node.name for node in candidates]
        for point in choices.points:
            repeated = {joint.steps[k].node.name for k in choices.steps(point)}
            saved = [k for k, name in enumerate(names) if name not in repeated]
            if sum(memory[k] for k in saved) <= max_memory:
                return saved, [k for k, name in enumerate(names) if name in repeated]
        # Every choice saves more than that: save the smallest candidates that fit.
        order = sorted(range(len(memory)), key=memory.__getitem__)
        count = sum(total <= max_memory for total in accumulate(memory[k] for k in order))
        return sorted(order[:count]), sorted(order[count:])

    def uuid(self) -> Any:
        """Return a name for PyTorch's caches of compiled graphs."""
        return "weftplan.torch.knapsack 1"


def knapsack_solver() -> Solver:
    """Return a solver for ``torch._functorch.config.activation_memory_budget_solver``.

    Set ``activation_memory_budget`` to a fraction as usual; the planner then chooses which results to save. For a
    budget in bytes use :func:`weftplan.torch.budget`.
    """
    return Solver()
