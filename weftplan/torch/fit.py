"""Training steps within a number of bytes: a callable, a backend and a partition function."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from weftplan.device.amounts import bytes_of
from weftplan.errors import BudgetError, PlanError
from weftplan.torch.choice import Choices, Plan, Resident
from weftplan.torch.joint import Joint
from weftplan.torch.optimizers import check_update, state_bytes
from weftplan.torch.private import (
    BackendCompilerFailed,
    OptimizedModule,
    TorchDynamoException,
    aot_autograd,
    classify_nodes,
    default_partition,
)
from weftplan.torch.probe import Probes
from weftplan.torch.split import kept_results, split

BREAKS = ("refuse", "sum")


class Partition:
    """A ``partition_fn`` for AOTAutograd that keeps what a budget allows.

    Attributes:
        plans: one :class:`~weftplan.torch.choice.Plan` per graph, in the order in which they were compiled.
        choices: the curves that they were taken from.
    """

    def __init__(
        self,
        budget: int | str | None,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        keep_gradients: bool = False,
        other: int | str = 0,
        seconds: str = "model",
        workspaces: str = "measure",
        breaks: str = "refuse",
    ) -> None:
        if seconds not in ("model", "measure"):
            raise PlanError(f"seconds must be 'model' or 'measure', got {seconds!r}")
        if workspaces not in ("measure", "cached"):
            raise PlanError(f"workspaces must be 'measure' or 'cached', got {workspaces!r}")
        if breaks not in BREAKS:
            raise PlanError(f"breaks must be one of {', '.join(BREAKS)}, got {breaks!r}")
        self.budget = None if budget is None else bytes_of(budget)
        self.plans: list[Plan] = []
        self.choices: list[Choices] = []
        self.only_plan = False
        """Raise :class:`Planned` instead of compiling."""
        self._optimizer, self._keep_gradients, self._breaks = optimizer, keep_gradients, breaks
        self._other = bytes_of(other) if other else 0
        self._seconds, self._workspaces = seconds, workspaces

    def __call__(
        self,
        module: torch.fx.GraphModule,
        joint_inputs: Any,
        *,
        num_fwd_outputs: int,
        static_lifetime_input_indices: list[int] | None = None,
        **more: Any,
    ) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
        """The forward and the backward module of a joint graph.

        Raises:
            BudgetError: no choice fits.
        """
        module.graph.eliminate_dead_code()
        module.recompile()
        static = static_lifetime_input_indices or []
        info = classify_nodes(module, static, num_fwd_outputs)
        if not info.required_bw_nodes:
            made: tuple[torch.fx.GraphModule, torch.fx.GraphModule] = default_partition(
                module, joint_inputs, num_fwd_outputs=num_fwd_outputs, static_lifetime_input_indices=static
            )
            return made
        probes = Probes(run=self._workspaces == "measure")
        joint = Joint(
            module.graph,
            info.is_required_fw,
            num_outputs=num_fwd_outputs,
            probes=probes,
            measured=self._seconds == "measure",
        )
        choices = Choices(joint)
        point, plan = self._choose(choices, _title(module.graph))
        again = choices.steps(point)
        order = choices.backward_order(point)
        self.plans.append(plan)
        self.choices.append(choices)
        if self.only_plan:
            raise Planned
        return split(module, joint, again=again, order=order, info=info, outputs=num_fwd_outputs)

    def _choose(self, choices: Choices, name: str) -> tuple[Any, Plan]:
        joint = choices.joint
        # A graph that begins at the same line is the same one, compiled for other shapes.
        begins = {plan.name.partition(" to ")[0]: plan for plan in self.plans}
        begins.pop(name.partition(" to ")[0], None)
        earlier = list(begins.values())
        if earlier and self._breaks == "refuse":
            raise BudgetError(
                f"the step is traced as several graphs, {earlier[0].name} and {name}: a budget holds for one graph; "
                f"remove what breaks the graph between them, or pass breaks='sum' to plan each below what the saved "
                f"results of the earlier ones leave"
            )
        fresh = sum(joint.results.nbytes[r] for r in joint.outputs[1])
        resident = Resident(
            inputs=choices.inputs,
            optimizer=state_bytes(self._optimizer),
            gradients=fresh if self._keep_gradients else 0,
            other=self._other + sum(plan.saved for plan in earlier),
        )
        check_update(self._optimizer, budget=self.budget, resident=resident, gradients=fresh)
        point = choices.within(self.budget, resident, name=name)
        again = choices.steps(point)
        inputs = {r for node in joint.inputs for r in joint.results.of(node)}
        saved = sum(joint.results.nbytes[r] for r in kept_results(joint, again) if r not in inputs)
        marked = sum("recompute" in node.meta for node in (step.node for step in joint.steps))
        notes = [f"{marked} nodes are marked by torch.utils.checkpoint; the budget decides instead"] if marked else []
        notes += [f"graph {len(earlier) + 1} of the step"] if earlier else []
        step = choices.tape.step_seconds
        return point, Plan(
            name=name,
            budget=self.budget,
            plain=choices.points[0].peak + resident.total,
            peak=point.peak + resident.total,
            smallest=choices.points[-1].peak + resident.total,
            resident=resident,
            repeated=[joint.steps[k].node.name for k in again],
            more_time=point.seconds / step if step else 0.0,
            saved=saved,
            at_peak=choices.alive_at_peak(point),
            unseen=joint.unseen,
            seconds=choices.seconds,
            notes=notes,
        )


class Planned(Exception):
    """Planning is done, and nothing is to be compiled."""


def _title(graph: torch.fx.Graph) -> str:
    """A graph by the lines of the traced function that it comes from."""
    frames = [(node.meta.get("stack_trace") or "").strip().partition(", in ")[0] for node in graph.nodes]
    places = [re.fullmatch(r'File "(.*)", line (\d+)', frame) for frame in frames]
    first = next((place[1] for place in places if place), None)
    if first is None:
        return "the graph"
    lines = sorted(int(place[2]) for place in places if place and place[1] == first)
    return f"the graph of {first}, line {lines[0]}" + (f" to {lines[-1]}" if lines[-1] > lines[0] else "")


def eager(module: torch.fx.GraphModule, _inputs: Any) -> Callable[[list[Any]], Any]:
    """A compiler that runs a graph by PyTorch's own kernels, node by node.

    The arguments come as a list that the graph empties, or every saved result would live on to the end.
    """
    module.graph.set_codegen(torch.fx.graph._BoxedCodeGen())
    module.recompile()

    def run(args: list[Any]) -> Any:
        return module.forward(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def partition(budget: int | str | None, **options: Any) -> Partition:
    """A partition function for a backend of your own, as ``aot_autograd(partition_fn=partition("16GB"), ...)``.

    Bytes are counted as kernels of PyTorch allocate them; a backend that fuses operators needs other bytes, most often
    fewer. Options are those of :func:`budget`.
    """
    return Partition(budget, **options)


def backend(budget: int | str | None, *, partition: Partition | None = None, **options: Any) -> Any:
    """A backend for ``torch.compile`` that runs PyTorch's kernels within ``budget`` bytes.

    ``partition``: the partition function to use, for its plans; otherwise options are those of :func:`budget`.
    """
    chosen = Partition(budget, **options) if partition is None else partition

    def inference(module: torch.fx.GraphModule, inputs: Any) -> Callable[[list[Any]], Any]:
        _check_inference(module, chosen)
        return eager(module, inputs)

    return aot_autograd(
        fw_compiler=eager,
        bw_compiler=eager,
        inference_compiler=inference,
        partition_fn=chosen,
        keep_inference_input_mutations=True,
    )


def _check_inference(module: torch.fx.GraphModule, chosen: Partition) -> None:
    """Raise BudgetError when a graph without a backward part needs more than the budget."""
    graph = module.graph
    count = len(next(node for node in graph.nodes if node.op == "output").args[0])
    joint = Joint(graph, lambda node: True, num_outputs=count, probes=Probes(run=chosen._workspaces == "measure"))
    choices = Choices(joint)
    _, plan = chosen._choose(choices, _title(graph))
    plan.notes.append("without a backward part: nothing can be repeated")
    chosen.plans.append(plan)


class Budgeted:
    """A function or module whose calls and their backward passes stay within a budget.

    Attributes:
        plans: what was chosen, one plan per traced graph; empty before the first call.
    """

    def __init__(self, function: Callable[..., Any], partition: Partition, *, fullgraph: bool) -> None:
        self._partition = partition
        self.function = function
        self._compiled = torch.compile(
            function, backend=backend(None, partition=partition), dynamic=False, fullgraph=fullgraph
        )
        functools.update_wrapper(self, function if not isinstance(function, torch.nn.Module) else function.forward)

    @property
    def plans(self) -> list[Plan]:
        """What was chosen, per graph."""
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
    except TorchDynamoException as error:
        raise PlanError(
            f"the step cannot be traced as one graph: {error}\nremove what breaks the graph, or pass breaks='sum' to "
            f"plan every graph by itself"
        ) from error


def budget(
    function: Callable[..., Any],
    budget: int | str,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    keep_gradients: bool = False,
    other: int | str = 0,
    seconds: str = "model",
    workspaces: str = "measure",
    breaks: str = "refuse",
) -> Budgeted:
    """A module or function (best: one that returns the loss) whose training step stays within ``budget`` bytes.

    The step is planned at the first call, for the shapes that it gets, and again for other shapes. All bytes on the
    device count: parameters, inputs, gradients, states of ``optimizer``, what is saved, repeated and allocated inside
    kernels. What the caller does between forward and backward pass is not seen.

    Args:
        function: a module, or a function of tensors; what it returns is differentiated.
        budget: bytes, as a number or as text such as ``"16GB"`` or ``"80%"``.
        optimizer: its states count, also those that it makes at its first step, and what its step allocates.
        keep_gradients: gradients exist before the step (accumulation, ``set_to_none=False``).
        other: bytes of other tensors on the device.
        seconds: ``"model"`` (a calibration of this machine) or ``"measure"`` (every operator is timed once).
        workspaces: ``"measure"`` runs every operator once per machine to see what it allocates inside; ``"cached"``
            uses what is known and lists the others as unseen.
        breaks: ``"refuse"`` a step of several graphs, or plan each below what the earlier ones leave (``"sum"``).

    Raises:
        PlanError: an argument is wrong, the function is compiled already, or (when called) cannot be traced.
        BudgetError: (when called) nothing fits; names the smallest budget that works.
    """
    _check_function(function)
    part = Partition(
        budget,
        optimizer=optimizer,
        keep_gradients=keep_gradients,
        other=other,
        seconds=seconds,
        workspaces=workspaces,
        breaks=breaks,
    )
    return Budgeted(function, part, fullgraph=breaks == "refuse")


def _check_function(function: Any) -> None:
    if isinstance(function, (OptimizedModule, Budgeted)) or hasattr(function, "_torchdynamo_orig_callable"):
        raise PlanError(f"{function!r} is compiled already: pass the module or function itself")
    if not callable(function):
        raise PlanError(f"expected a module or a function, got {type(function).__name__}")
