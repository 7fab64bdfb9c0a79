"""Training steps within a number of bytes: a callable, a backend and a partition function."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import torch

from weftplan.device.amounts import bytes_of
from weftplan.errors import BudgetError, PlanError
from weftplan.torch.choice import Choices, Plan, Resident
from weftplan.torch.compilers import INNER
from weftplan.torch.joint_graph import Joint
from weftplan.torch.optimizers import check_update, state_bytes
from weftplan.torch.private import BackendCompilerFailed, TracingFailed, classify_nodes, default_partition, is_compiled
from weftplan.torch.probe import Probes
from weftplan.torch.split import kept_results, split

WORDS = {"seconds": ("model", "measure"), "workspaces": ("measure", "cached"), "breaks": ("refuse", "sum")}
"""Values of options that are words."""


@dataclass(eq=False)
class Partition:
    """A ``partition_fn`` for AOTAutograd that saves the results that a budget allows. Its fields are options."""

    budget: int | str | None
    """Bytes, as a number or as text such as ``"16GB"`` or ``"80%"`` (of the device); None plans without a budget."""
    _: KW_ONLY
    optimizer: torch.optim.Optimizer | None = None
    """Its states count, those of its first step included, and so do the bytes that its step allocates."""
    keep_gradients: bool = False
    """Gradients exist before the step (accumulation, ``set_to_none=False``)."""
    other: int | str = 0
    """Bytes of other tensors on the device."""
    seconds: str = "model"
    """``"model"`` uses a calibration of this machine, ``"measure"`` times every operator once."""
    workspaces: str = "measure"
    """``"measure"`` runs every operator once per machine to see its scratch; ``"cached"`` lists the rest as unseen."""
    breaks: str = "refuse"
    """``"refuse"`` a step of several graphs, or plan each below the bytes that earlier graphs leave (``"sum"``)."""
    inner: str = "eager"
    """The kernels: PyTorch's own, node by node (``"eager"``), or fused kernels (``"inductor"``)."""
    only_plan: bool = False
    """Raise :class:`Planned` instead of compiling."""
    plans: list[Plan] = field(default_factory=list, init=False)
    """One plan per graph, in the order of compilation."""
    choices: list[Choices] = field(default_factory=list, init=False)
    """The curves that the plans were taken from."""
    _lowered: int | None = field(default=None, init=False)
    """Bytes that the next plan may use, after fused kernels needed more than their plan."""

    def __post_init__(self) -> None:
        for name, words in {**WORDS, "inner": tuple(INNER)}.items():
            if getattr(self, name) not in words:
                raise PlanError(f"{name} must be {' or '.join(map(repr, words))}, got {getattr(self, name)!r}")
        for size in (self.other or None, self.budget):
            if size is not None:
                bytes_of(size)  # refuses text that is no size

    def scratch(self) -> dict[str, int]:
        """Return the most scratch of each operator of the last plan."""
        steps = sorted(self.choices[-1].joint.steps, key=lambda step: step.scratch)
        return {step.label: step.scratch for step in steps}

    def fits(self, fused: int) -> bool:
        """Correct the last plan to the peak of fused kernels. If that exceeds the budget, let the next plan be smaller.

        Raises:
            BudgetError: the smallest plan exceeds the budget, too.
        """
        plan, planned = self.plans[-1], self.plans[-1].peak
        plan.peak, self._lowered = plan.resident.total + fused, None
        if plan.budget is None or plan.peak <= plan.budget:
            return True
        del self.plans[-1], self.choices[-1]
        if planned == plan.smallest:
            raise BudgetError(
                f"{plan.name} needs {plan.peak:,} bytes with the most repetition and fused kernels, above the budget "
                f"of {plan.budget:,}; the smallest budget that works is {plan.peak}: raise it or use a smaller batch",
                smallest=plan.peak,
            )
        self._lowered = planned - (plan.peak - plan.budget)
        return False

    def limit(self, device: torch.device) -> int | None:
        """Return the budget in bytes; a share is of the device's memory."""
        if device.type == "cuda" and isinstance(self.budget, str) and "%" in self.budget:
            total = torch.cuda.get_device_properties(device).total_memory
            return int(total * float(self.budget.strip().rstrip("%")) / 100)
        return None if self.budget is None else bytes_of(self.budget)

    def __call__(
        self,
        module: torch.fx.GraphModule,
        joint_inputs: Any,
        *,
        num_fwd_outputs: int,
        static_lifetime_input_indices: list[int] | None = None,
        **more: Any,
    ) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
        """Return the forward and the backward module of a joint graph.

        Raises:
            BudgetError: no choice fits.
        """
        module.graph.eliminate_dead_code()
        static = static_lifetime_input_indices or []
        info = classify_nodes(module, static, num_fwd_outputs)
        if not info.required_bw_nodes:
            self.check_inference(module)
            graphs: tuple[torch.fx.GraphModule, torch.fx.GraphModule] = default_partition(
                module, joint_inputs, num_fwd_outputs=num_fwd_outputs, static_lifetime_input_indices=static
            )
            return graphs
        joint = Joint(
            module.graph,
            info.is_required_fw,
            num_outputs=num_fwd_outputs,
            probes=Probes(run=self.workspaces == "measure"),
            measured=self.seconds == "measure",
            repeats_random=self.inner == "eager",
        )
        choices = Choices(joint)
        point, plan = self._choose(choices, _title(module.graph))
        repeated, order = choices.steps(point), choices.backward_order(point)
        self._record(choices, plan)
        return split(module, joint, again=repeated, order=order, info=info, outputs=num_fwd_outputs)

    def _record(self, choices: Choices, plan: Plan) -> None:
        self.plans.append(plan)
        self.choices.append(choices)
        if self.only_plan:
            raise Planned

    def check_inference(self, module: torch.fx.GraphModule) -> None:
        """Raise BudgetError when a graph without a backward part needs more than the budget."""
        graph = module.graph
        count = len(next(node for node in graph.nodes if node.op == "output").args[0])
        joint = Joint(graph, lambda _: True, num_outputs=count, probes=Probes(run=self.workspaces == "measure"))
        choices = Choices(joint)
        _, plan = self._choose(choices, _title(graph))
        plan.notes.append("without a backward part: nothing can be repeated")
        self._record(choices, plan)

    def _choose(self, choices: Choices, name: str) -> tuple[Any, Plan]:
        joint, budget = choices.joint, self.limit(choices.joint.device)
        # A graph that begins at the same line is the same one, compiled for other shapes.
        begins = {plan.name.partition(" to ")[0]: plan for plan in self.plans}
        begins.pop(name.partition(" to ")[0], None)
        earlier = list(begins.values())
        if earlier and self.breaks == "refuse":
            raise BudgetError(
                f"the step is traced as several graphs, {earlier[0].name} and {name}: a budget holds for one graph; "
                f"remove the break between them, or pass breaks='sum' to plan each below the bytes that saved results "
                f"of earlier graphs leave"
            )
        fresh = sum(joint.results.nbytes[r] for r in joint.outputs[1])
        resident = Resident(
            inputs=choices.inputs,
            optimizer=state_bytes(self.optimizer),
            gradients=fresh if self.keep_gradients else 0,
            other=(bytes_of(self.other) if self.other else 0) + sum(plan.saved for plan in earlier),
        )
        check_update(self.optimizer, budget=budget, resident=resident, gradients=fresh)
        most = budget if self._lowered is None else self._lowered
        point = choices.within(most, resident, name=name, smallest_else=self.inner == "inductor")
        repeated = choices.steps(point)
        inputs = {r for node in joint.inputs for r in joint.results.of(node)}
        saved = sum(joint.results.nbytes[r] for r in kept_results(joint, repeated) if r not in inputs)
        marked = sum("recompute" in node.meta for node in (step.node for step in joint.steps))
        notes = [f"{marked} nodes are marked by torch.utils.checkpoint; the budget decides instead"] if marked else []
        notes += [f"graph {len(earlier) + 1} of the step"] if earlier else []
        step = choices.tape.step_seconds
        return point, Plan(
            name=name,
            budget=budget,
            plain=choices.points[0].peak + resident.total,
            peak=point.peak + resident.total,
            smallest=choices.points[-1].peak + resident.total,
            resident=resident,
            repeated=[joint.steps[k].node.name for k in repeated],
            more_time=point.seconds / step if step else 0.0,
            saved=saved,
            at_peak=choices.at_peak(point)[1],
            unseen=joint.unseen,
            seconds=choices.seconds,
            notes=notes,
        )


class Planned(Exception):
    """Planning is done, and nothing is to be compiled."""


def _title(graph: torch.fx.Graph) -> str:
    """Return a graph by the lines of the traced function that it comes from."""
    frames = [(node.meta.get("stack_trace") or "").strip().partition(", in ")[0] for node in graph.nodes]
    places = [re.fullmatch(r'File "(.*)", line (\d+)', frame) for frame in frames]
    first = next((place[1] for place in places if place), None)
    if first is None:
        return "the graph"
    lines = sorted(int(place[2]) for place in places if place and place[1] == first)
    return f"the graph of {first}, line {lines[0]}" + (f" to {lines[-1]}" if lines[-1] > lines[0] else "")


def partition(budget: int | str | None, **options: Any) -> Partition:
    """Return a partition function for another backend, as ``aot_autograd(partition_fn=partition("16GB"), ...)``.

    Pass ``keep_inference_input_mutations=True`` there, too, when the module changes buffers. Bytes are those that
    PyTorch's kernels allocate; a backend that fuses operators allocates others. Options are those of :func:`budget`.
    """
    return Partition(budget, **options)


def backend(budget: int | str | None, *, partition: Partition | None = None, **options: Any) -> Any:
    """Return a backend for ``torch.compile`` that runs steps within ``budget`` bytes.

    ``partition`` is the partition function to use, for its plans; otherwise options are those of :func:`budget`.
    """
    chosen = Partition(budget, **options) if partition is None else partition
    return INNER[chosen.inner](chosen)


class Budgeted:
    """A function or module whose calls and their backward passes stay within a budget."""

    def __init__(self, function: Callable[..., Any], partition: Partition, *, fullgraph: bool) -> None:
        self._partition = partition
        self.function = function
        self._compiled = torch.compile(
            function, backend=backend(None, partition=partition), dynamic=False, fullgraph=fullgraph
        )
        functools.update_wrapper(self, function if not isinstance(function, torch.nn.Module) else function.forward)

    @property
    def plans(self) -> list[Plan]:
        """One plan per traced graph; empty before the first call."""
        return self._partition.plans

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function within the budget."""
        with plain_errors():
            return self._compiled(*args, **kwargs)


@contextmanager
def plain_errors() -> Iterator[None]:
    """Raise errors of planning as they are, and name the line when a graph cannot be traced whole."""
    try:
        yield
    except BackendCompilerFailed as error:
        inner = error.inner_exception
        if isinstance(inner, (PlanError, Planned)):
            raise inner from None
        raise
    except TracingFailed as error:
        raise PlanError(
            f"the step cannot be traced as one graph: {error}\nFollow the hint above. If control flow depends on data, "
            f"move it out of the step, or pass breaks='sum' to plan every graph by itself"
        ) from error


def budget(function: Callable[..., Any], budget: int | str, **options: Any) -> Budgeted:
    """Return a module or function whose training step stays within ``budget`` bytes, such as ``"16GB"`` or ``"80%"``.

    The step is planned at the first call, for the shapes that it gets, and again for other shapes. All bytes on the
    device count: parameters, inputs, gradients, states of the optimizer, saved and repeated results, and scratch of
    kernels. The plan does not see the caller's work between forward and backward pass.

    Args:
        function: a module or a function of tensors, best one that returns the loss; its result is differentiated.
        budget: all bytes that the step may use on the device.
        options: fields of :class:`Partition`: ``optimizer``, ``keep_gradients``, ``other``, ``seconds``,
            ``workspaces``, ``breaks``, ``inner``.

    Raises:
        PlanError: an argument is wrong, the function is compiled already, or (when called) cannot be traced.
        BudgetError: (when called) no plan fits; names the smallest budget that works.
    """
    if isinstance(function, Budgeted) or is_compiled(function):
        raise PlanError(f"{function!r} is compiled already: pass the module or function itself")
    if not callable(function):
        raise PlanError(f"expected a module or a function, got {type(function).__name__}")
    part = Partition(budget, **options)
    return Budgeted(function, part, fullgraph=part.breaks == "refuse")
