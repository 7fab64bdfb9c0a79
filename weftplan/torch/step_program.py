"""Convert a traced graph of PyTorch to a program of the planner, whose results are storages.

A node that makes a storage, or changes one in place, is a step. Other nodes (views, getitem, sizes) cost nothing. The
bytes of a storage are those that PyTorch requests of its allocator.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from weftplan.device.context import Context
from weftplan.errors import PlanError
from weftplan.planner.program import VARIABLE, Graph, Program, Work
from weftplan.torch.private import OpOverload, is_mutation, is_seeded, storage_key, tensors_in
from weftplan.torch.private_compile import is_tangent
from weftplan.torch.probe import Probes
from weftplan.torch.seconds import modelled

STATE = "random state"
"""Label of a step that saves the generator's state before a random operator."""


def tensors(node: torch.fx.Node) -> list[torch.Tensor]:
    """Return the value of a traced node as a list of fake tensors."""
    return tensors_in(node.meta.get("val"))


def is_random(node: torch.fx.Node) -> bool:
    """Return whether a node draws random numbers from a generator."""
    return is_seeded(node.target)


def values(node: torch.fx.Node) -> tuple[Any, Any]:
    """Return the positional and the keyword arguments of a node, with their values in place of nodes."""

    def value(arg: torch.fx.Node) -> Any:
        return arg.meta.get("val")

    return torch.fx.node.map_arg(node.args, value), torch.fx.node.map_arg(node.kwargs, value)


def state_bytes(device: torch.device) -> int:
    """Return the bytes of the state of a device's random number generator."""
    state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
    return int(state.untyped_storage().nbytes())


@dataclass
class Step:
    """A computation whose reads and results are storages, given by number."""

    node: torch.fx.Node
    label: str
    reads: list[int]
    makes: list[int]
    repeats: bool = True
    effect: bool = False
    seconds: float = 0.0
    scratch: int = 0


@dataclass
class Results:
    """The numbered storages of a graph: bytes and first maker of each storage, and the number of each storage key."""

    nbytes: list[int] = field(default_factory=list)
    maker: list[torch.fx.Node] = field(default_factory=list)
    number: dict[int, int] = field(default_factory=dict)

    def of(self, node: torch.fx.Node) -> list[int]:
        """Return the numbers of the storages of a node's tensors."""
        return [self.number[storage_key(t)] for t in tensors(node)]

    def add(self, nbytes: int, maker: torch.fx.Node) -> int:
        """Add a storage and return its number."""
        self.nbytes.append(nbytes)
        self.maker.append(maker)
        return len(self.nbytes) - 1

    def add_new(self, node: torch.fx.Node) -> list[int]:
        """Add the storages of a node's tensors that are new, and return their numbers."""
        fresh = []
        for t in tensors(node):
            if isinstance(t.untyped_storage().nbytes(), torch.SymInt):
                raise PlanError(
                    f"the size of {node.name!r} is not known before the step runs ({t.shape}): compile with "
                    f"dynamic=False{line_of(node)}"
                )
            key = storage_key(t)
            if key not in self.number:
                self.number[key] = self.add(t.untyped_storage().nbytes(), node)
                fresh.append(self.number[key])
        return fresh


def line_of(node: torch.fx.Node) -> str:
    """Return file, line and text of the user's code that a node comes from, in brackets; empty if unknown."""
    lines = [line.strip() for line in (node.meta.get("stack_trace") or "").strip().splitlines()]
    files = [k for k, line in enumerate(lines) if line.startswith("File ")]
    if not files:
        return ""
    text = lines[files[-1] + 1] if files[-1] + 1 < len(lines) else ""
    return f" ({lines[files[-1]]}: {text})"


class Joint:
    """The joint forward and backward graph as the planner's input.

    Args:
        graph: as AOTAutograd traces it, without dead code.
        in_forward: returns whether a node belongs to the forward part.
        num_outputs: the number of the graph's outputs that are outputs of the forward part; these come first.
        probes: measurements of calls.
        measured: whether measured seconds, if there are any, replace modelled seconds.
        repeats_random: whether random operators may run twice, with the generator's state of the first run.
    """

    def __init__(
        self,
        graph: torch.fx.Graph,
        in_forward: Callable[[torch.fx.Node], bool],
        *,
        num_outputs: int,
        probes: Probes,
        measured: bool = False,
        repeats_random: bool = True,
    ) -> None:
        self.results = Results()
        self.inputs: list[torch.fx.Node] = []
        self.steps: list[Step] = []
        self._probes, self._measured, self._repeats_random = probes, measured, repeats_random
        self.unseen = probes.unseen
        self.random: dict[torch.fx.Node, int] = {}
        """By random node, the number of the result that has the generator's state before the node."""
        forward: list[Step] = []
        backward: list[Step] = []
        outputs: list[Any] = []
        for node in graph.nodes:
            if node.op == "output":
                outputs = list(node.args[0])
                continue
            fresh = self.results.add_new(node)
            if node.op == "placeholder":
                self.inputs.append(node)
            elif fresh or is_mutation(node):
                (forward if in_forward(node) else backward).extend(self._steps_of(node, fresh))
        devices = {str(t.device) for node in self.inputs for t in tensors(node) if t.dim()}
        if len(devices) > 1 or "meta" in devices:
            raise PlanError(
                f"a budget counts the bytes of one device, but tensors are on {' and '.join(sorted(devices))}: move "
                f"modules and inputs to the device that trains"
            )
        self.device = torch.device(*devices or ("cpu",))
        # A second run would read a buffer that the first has changed. In a batch norm only new averages depend on it.
        changed = {r for step in forward if step.effect for r in self.results.of(step.node.all_input_nodes[0])}
        for step in forward:
            if "batch_norm" not in step.label and not changed.isdisjoint(step.reads):
                step.repeats = False
        self.num_forward = len(forward)
        self.steps = forward + backward
        self.outputs = [self._results_of(outputs[:num_outputs]), self._results_of(outputs[num_outputs:])]
        """The result numbers of the forward part's outputs, then those of the backward part's outputs."""

    def _results_of(self, outputs: list[Any]) -> list[int]:
        return list(dict.fromkeys(r for n in outputs if isinstance(n, torch.fx.Node) for r in self.results.of(n)))

    def _steps_of(self, node: torch.fx.Node, fresh: list[int]) -> list[Step]:
        reads = list(dict.fromkeys(r for source in node.all_input_nodes for r in self.results.of(source)))
        args, kwargs = values(node)
        scratch, seconds = 0, 0.0
        if isinstance(node.target, OpOverload):
            kernel = self._probes.kernel(node.target, args, kwargs)
            scratch = kernel.scratch
            for t, nbytes in zip(tensors(node), kernel.results, strict=False):
                if (r := self.results.number[storage_key(t)]) in fresh:
                    self.results.nbytes[r] = max(self.results.nbytes[r], nbytes)
            timed = self._probes.seconds(node.target, args, kwargs) if self._measured else None
            seconds = modelled(node.target, args, kwargs, node.meta.get("val")) if timed is None else timed
        step = Step(node, str(node.target), reads, fresh, seconds=seconds, scratch=scratch, effect=is_mutation(node))
        step.repeats = not step.effect
        if not is_random(node):
            return [step]
        if not self._repeats_random:
            step.repeats = False
            return [step]
        device = tensors(node)[0].device
        size = state_bytes(device)
        state = self.random[node] = self.results.add(size, node)
        step.reads.append(state)
        step.scratch += size
        return [Step(node, STATE, [], [state], repeats=False), step]

    def program(self) -> Program:
        """Return the planner's program. Node ``given + k`` is step ``k``; ``entry`` maps results to entries."""
        computed = {r for step in self.steps for r in step.makes}
        inputs = [r for r in range(len(self.results.nbytes)) if r not in computed]
        order = inputs + [r for step in self.steps for r in step.makes]
        entry = self.entry = {r: e for e, r in enumerate(order)}
        self.given = len(inputs)
        count = len(inputs) + len(self.steps)
        tangents = {r for node in self.inputs if is_tangent(node) for r in self.results.of(node)}
        graph = Graph(
            names=[f"given{r}" for r in inputs] + [step.node.name for step in self.steps],
            works=[VARIABLE] * len(inputs) + [Work(label=s.label, may_repeat=s.repeats) for s in self.steps],
            inputs=[[] for _ in inputs] + [[entry[r] for r in step.reads] for step in self.steps],
            controls=[[] for _ in inputs] + self._fixed_order(),
            counts=[1] * len(inputs) + [len(step.makes) for step in self.steps],
            heads=[entry[r] for r in dict.fromkeys((*self.outputs[0], *self.outputs[1]))],
            effects=range(len(inputs), count),
        )
        sizes = self.results.nbytes
        return Program(
            graph=graph,
            order=list(range(len(inputs), count)),
            num_forward=self.num_forward,
            nbytes=[sizes[r] for r in order],
            contexts=(Context("cpu", 0),),
            device=[0] * count,
            gradients=frozenset(),
            added=frozenset(),
            workspaces={len(inputs) + k: step.scratch for k, step in enumerate(self.steps) if step.scratch},
            external_bytes={"arguments": sum(sizes[r] for r in inputs)},
            tangents=frozenset(entry[r] for r in tangents if r not in computed),
        )

    def _fixed_order(self) -> list[list[int]]:
        """Return the nodes of :meth:`program` that each step must follow, apart from the makers of its inputs.

        Random steps keep their order, and so do a mutation and all steps that read one of its arguments.
        """
        follows: list[list[int]] = [[] for _ in self.steps]
        draw: int | None = None
        guarded = {r for step in self.steps if step.effect for r in step.reads}
        readers: dict[int, list[int]] = {r: [] for r in guarded}
        for k, step in enumerate(self.steps):
            if is_random(step.node):
                follows[k] += [] if draw is None else [draw]
                draw = k
            for earlier in [readers[r] for r in step.reads if r in guarded]:
                if step.effect:
                    follows[k] += earlier
                    earlier.clear()
                elif earlier and self.steps[earlier[0]].effect:
                    follows[k].append(earlier[0])
                earlier.append(k)
        return [[self.given + j for j in dict.fromkeys(steps)] for steps in follows]

    def seconds(self) -> list[float]:
        """Return the seconds of each node of :meth:`program`; 0 for inputs."""
        return [0.0] * self.given + [step.seconds for step in self.steps]


def is_getitem(node: torch.fx.Node) -> bool:
    """Return whether a node selects an item of another node's tuple."""
    return node.op == "call_function" and node.target is operator.getitem
