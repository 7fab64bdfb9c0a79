"""Training steps within a budget: a callable, a backend and a partition function."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field, fields
from typing import Any

import torch

from weftplan.device.amounts import bytes_of
from weftplan.errors import BudgetError, PlanError
from weftplan.support.keyword_errors import known_keywords
from weftplan.torch.choice import Choices, Plan, Resident
from weftplan.torch.compilers import INNER
from weftplan.torch.optimizers import check_update, update_of
from weftplan.torch.prediction import check_optimizer
from weftplan.torch.private import is_compiled, kept_storages, storage_key
from weftplan.torch.private_compile import (
    BackendCompilerFailed,
    RecompileLimit,
    TracingFailed,
    break_reasons,
    classify_nodes,
    default_partition,
    free_attributes,
    skipped_frames,
    tracing_options,
)
from weftplan.torch.probe import Probes, measuring
from weftplan.torch.reach import reached_tensors
from weftplan.torch.split import reordered, saved_results, split
from weftplan.torch.step_program import Joint

SHAPES = 32
"""Sets of shapes that a budgeted function plans by default."""
WORDS = {"seconds": ("model", "measure"), "workspaces": ("measure", "cached"), "breaks": ("refuse", "sum")}
"""Valid values of the options that are words."""


@dataclass(eq=False)
class Partition:
    """A ``partition_fn`` for AOTAutograd that recomputes as much as a budget requires. Its fields are the options."""

    budget: int | str | None
    """Bytes, as a number or as text such as ``"16GB"`` or ``"80%"`` (of the device's memory); None: no limit."""
    _: KW_ONLY
    optimizer: torch.optim.Optimizer | None = None
    """The optimizer. The budget covers its states (also those that its first step makes) and scratch; None: none."""
    keep_gradients: bool = False
    """Whether gradients exist before the step (accumulation, ``set_to_none=False``)."""
    other: int | str = 0
    """Bytes of other tensors on the device."""
    seconds: str = "model"
    """``"model"`` predicts the time of operators by a calibration of this machine; ``"measure"`` times each once."""
    workspaces: str = "measure"
    """``"measure"`` runs each unknown operator once to see its scratch; ``"cached"`` reports it as unseen."""
    breaks: str = "refuse"
    """Graphs of a step: ``"refuse"`` allows only one; ``"sum"`` adds the saved bytes of earlier graphs to each peak."""
    shapes: int = SHAPES
    """The number of sets of shapes that are planned; a call with a further set is refused."""
    inner: str = "eager"
    """``"eager"`` runs PyTorch's own kernels node by node; ``"inductor"`` compiles fused kernels."""
    only_plan: bool = False
    """Whether to raise :class:`Planned` instead of compiling."""
    plans: list[Plan] = field(default_factory=list, init=False)
    """One plan per graph, in the order of compilation."""
    choices: list[Choices] = field(default_factory=list, init=False)
    """The choices of the graph of each plan."""
    runs: int = field(default=0, init=False)
    """Number of planned graphs that have run, forward parts only."""
    reached: Callable[[], list[int]] | None = field(default=None, init=False, repr=False)
    """Returns the bytes of each storage that the function and its arguments reach; None: unknown."""
    _update: dict[tuple[int, ...], tuple[int, int]] = field(default_factory=dict, init=False)
    """Bytes of the optimizer's states and scratch, by the sizes of its groups."""
    _lowered: int | None = field(default=None, init=False)
    """The budget of the next plan, if the fused kernels of the last plan exceeded the real budget; otherwise None."""

    def __post_init__(self) -> None:
        for name, words in {**WORDS, "inner": tuple(INNER)}.items():
            if getattr(self, name) not in words:
                raise PlanError(f"{name} must be {' or '.join(map(repr, words))}, got {getattr(self, name)!r}")
        for size in (self.other or None, self.budget):
            if size is not None:
                bytes_of(size)  # refuses text that is no size
        if self.shapes < 1:
            raise PlanError(f"shapes must be at least 1, got {self.shapes}")
        check_optimizer(self.optimizer)
        self.update()

    def update(self) -> tuple[int, int]:
        """Return the bytes of the optimizer's states and of its scratch, measured outside any compilation."""
        if self.optimizer is None:
            return 0, 0
        sizes = tuple(len(group["params"]) for group in self.optimizer.param_groups)
        if sizes not in self._update:
            self._update[sizes] = update_of(self.optimizer)
        return self._update[sizes]

    def scratch(self) -> dict[str, int]:
        """Return the largest scratch in bytes of each operator of the last plan."""
        steps = sorted(self.choices[-1].joint.steps, key=lambda step: step.scratch)
        return {step.label: step.scratch for step in steps}

    def budget_left(self) -> int:
        """Return the bytes of the budget that the last plan leaves."""
        plan = self.plans[-1]
        return max(0, plan.budget - plan.peak) if plan.budget is not None else 1 << 60

    def fits(self, fused: int) -> bool:
        """Set the last plan's peak to resident bytes plus ``fused``, its fused kernels' peak; return whether it fits.

        If it does not fit, drop the plan and lower the budget of the next plan.

        Raises:
            BudgetError: the dropped plan had the smallest peak of all choices.
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
        """Return the budget in bytes; None: no limit. A percentage is taken of the device's memory."""
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
        free_attributes(module)
        static = static_lifetime_input_indices or []
        info = classify_nodes(module, static, num_fwd_outputs)
        if not info.required_bw_nodes:
            graphs: tuple[torch.fx.GraphModule, torch.fx.GraphModule] = default_partition(
                self.inference(module), joint_inputs, num_fwd_outputs=num_fwd_outputs,
                static_lifetime_input_indices=static,
            )  # fmt: skip
            return graphs
        with measuring() as progress:
            joint = Joint(
                module.graph,
                info.is_required_fw,
                num_outputs=num_fwd_outputs,
                probes=Probes(run=self.workspaces == "measure", progress=progress),
                measured=self.seconds == "measure",
                repeats_random=self.inner == "eager",
            )
            choices = Choices(joint)
        point, plan = self._choose(choices, _title(module.graph))
        self._record(choices, plan)
        return split(
            module, joint, twice=choices.steps(point), orders=choices.order(point), info=info, outputs=num_fwd_outputs
        )

    def _record(self, choices: Choices, plan: Plan) -> None:
        self.plans.append(plan)
        self.choices.append(choices)
        if self.only_plan:
            raise Planned

    def inference(self, module: torch.fx.GraphModule) -> torch.fx.GraphModule:
        """Return a graph without a backward part in planned order; raise BudgetError if it exceeds the budget."""
        graph = module.graph
        count = len(next(node for node in graph.nodes if node.op == "output").args[0])
        with measuring() as progress:
            probes = Probes(run=self.workspaces == "measure", progress=progress)
            choices = Choices(Joint(graph, lambda _: True, num_outputs=count, probes=probes))
        point, plan = self._choose(choices, _title(graph))
        plan.notes.append("without a backward part: nothing can be repeated")
        self._record(choices, plan)
        return reordered(module, choices.order(point)[0])

    def _choose(self, choices: Choices, name: str) -> tuple[Any, Plan]:
        joint, budget = choices.joint, self.limit(choices.joint.device)
        # A graph that begins at the same line is the same graph, compiled for other shapes.
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
            inputs=self._resident(joint),
            optimizer=self.update()[0],
            gradients=fresh if self.keep_gradients else 0,
            other=(bytes_of(self.other) if self.other else 0) + sum(plan.saved for plan in earlier),
        )
        smallest = choices.points[-1].peak + resident.total
        check_update(
            self.optimizer, self.update()[1], budget=budget, resident=resident, gradients=fresh, smallest=smallest
        )
        most = budget if self._lowered is None else self._lowered
        point = choices.within(most, resident, name=name, smallest_else=self.inner == "inductor")
        repeated = choices.steps(point)
        inputs = {r for node in joint.inputs for r in joint.results.of(node)}
        saved = sum(joint.results.nbytes[r] for r in saved_results(joint, repeated) if r not in inputs)
        marked = sum("recompute" in node.meta for node in (step.node for step in joint.steps))
        notes = [f"{marked} nodes are marked by torch.utils.checkpoint; the budget decides instead"] if marked else []
        notes += [f"graph {len(earlier) + 1} of the step"] if earlier else []
        notes += choices.notes(point)
        step = choices.step_seconds
        return point, Plan(
            name=name,
            budget=budget,
            plain=choices.points[0].peak + resident.total,
            peak=point.peak + resident.total,
            smallest=smallest,
            resident=resident,
            repeated=[joint.steps[k].node.name for k in repeated],
            more_time=point.seconds / step if step else 0.0,
            saved=saved,
            at_peak=choices.at_peak(point)[1],
            unseen=joint.unseen,
            seconds=choices.seconds,
            notes=notes,
        )

    def _resident(self, joint: Joint) -> int:
        """Return the bytes of the graph's inputs, and of all other storages that the function reaches."""
        read = {r for node in joint.inputs for r in joint.results.of(node)}
        sizes = Counter(joint.results.nbytes[r] for r in read)
        # A storage of the graph that has the bytes of a reached storage is taken for it.
        unread = Counter(self.reached() if self.reached else ()) - sizes
        return sum(size * count for sizes in (sizes, unread) for size, count in sizes.items())


Partition.__init__ = known_keywords()(Partition.__init__)  # type: ignore[method-assign]  # written by dataclass


class Planned(Exception):
    """Raised with the option ``only_plan`` after planning, to stop the compilation."""


def _title(graph: torch.fx.Graph) -> str:
    """Return a title for a graph: the file and the lines of the traced code."""
    frames = [(node.meta.get("stack_trace") or "").strip().partition(", in ")[0] for node in graph.nodes]
    places = [re.fullmatch(r'File "(.*)", line (\d+)', frame) for frame in frames]
    first = next((place[1] for place in places if place), None)
    if first is None:
        return "the graph"
    lines = sorted(int(place[2]) for place in places if place and place[1] == first)
    return f"the graph of {first}, line {lines[0]}" + (f" to {lines[-1]}" if lines[-1] > lines[0] else "")


def partition(budget: int | str | None, **options: Any) -> Partition:
    """Return a partition function for another backend, as in ``aot_autograd(partition_fn=partition("16GB"), ...)``.

    If the module changes buffers, pass ``keep_inference_input_mutations=True``, too. The plan counts the bytes of
    PyTorch's own kernels, not of fused kernels. Options are those of :func:`budget`.
    """
    return Partition(budget, **options)


def backend(budget: int | str | None, *, partition: Partition | None = None, **options: Any) -> Any:
    """Return a backend for ``torch.compile`` that runs steps within ``budget``. Options are those of :func:`budget`.

    A given ``partition`` is used in place of a new one, and stores the plans; ``budget`` and options are then ignored.
    """
    chosen = Partition(budget, **options) if partition is None else partition
    return INNER[chosen.inner](chosen)


class Budgeted(torch.nn.Module):  # type: ignore[misc]
    """A callable that runs a function or module so that forward and backward pass stay within a budget.

    For a module, it has the module's parameters, buffers, submodules and modes under their own names.
    """

    def __init__(self, function: Callable[..., Any], partition: Partition, *, fullgraph: bool) -> None:
        super().__init__()
        facts = {"function": function, "_partition": partition, "_fullgraph": fullgraph, "_uncovered": ""}
        facts["_compiled"] = torch.compile(
            function, backend=backend(None, partition=partition), dynamic=False, fullgraph=fullgraph
        )
        fields: dict[str, Any] = self.__dict__
        fields.update(facts)
        if isinstance(function, torch.nn.Module):
            shared = ("_parameters", "_buffers", "_non_persistent_buffers_set", "_modules")
            fields.update({name: vars(function)[name] for name in shared}, training=function.training)
        functools.update_wrapper(self, function.forward if isinstance(function, torch.nn.Module) else function)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "function":
                raise
            return getattr(self.function, name)

    def __reduce__(self) -> Any:
        options = {f.name: getattr(self._partition, f.name) for f in fields(Partition) if f.init}
        return _budgeted, (self.function, options)

    def train(self, mode: bool = True) -> Budgeted:
        """Set the training mode of the module."""
        if isinstance(self.function, torch.nn.Module):
            self.function.train(mode)
        self.training = mode
        return self

    @property
    def plans(self) -> list[Plan]:
        """The plan of each traced graph; empty before the first call."""
        plans: list[Plan] = self._partition.plans
        return plans

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function within the budget; a call with new shapes is planned and compiled first.

        Raises:
            PlanError: the function cannot be traced, a part of it runs outside every plan, the first call keeps more
                for its backward pass than its plans, or the call has more sets of shapes than the option ``shapes``.
            BudgetError: no plan fits.
        """
        part = self._partition
        if self._uncovered:
            raise PlanError(self._uncovered)
        part.update()
        runs, skipped, planned = part.runs, skipped_frames(), len(part.plans)
        part.reached = lambda: _storages(reached_tensors(self.function, (args, kwargs)))
        try:
            with plain_errors(part.shapes), tracing_options(part.shapes):
                out = self._compiled(*args, **kwargs)
        finally:
            part.reached = None  # it refers to the arguments
        if part.runs == runs or skipped_frames() > skipped:
            reasons = "; ".join(dict.fromkeys(break_reasons()[-3:])) or "compilation is off in this context"
            raise PlanError(
                f"a part of the step ran outside every plan, so no budget held: PyTorch skips a function with a "
                f"break inside a loop or a branch ({reasons}). Move reads of values and other breaks out of the loop"
            )
        if len(part.plans) - planned == part.runs - runs:  # the first call of these plans
            kept = sum(kept_storages(out, reached_tensors(self.function, (args, kwargs))).values())
            saved = sum(plan.saved for plan in part.plans[planned:])
            if kept > saved + part.budget_left():
                self.__dict__["_uncovered"] = (
                    f"the step keeps {kept:,} bytes for its backward pass, its plans {saved:,}: a part of it runs "
                    f"outside every plan, so no budget holds. Move functions with torch.compiler.disable, and hooks "
                    f"that keep tensors, out of the step"
                )
                raise PlanError(self._uncovered)
        return out


def _storages(tensors: list[torch.Tensor]) -> list[int]:
    """Return the bytes of each storage of tensors with memory."""
    reached = {storage_key(t): t for t in tensors if not t.is_meta and t.layout is torch.strided}
    return [t.untyped_storage().nbytes() for t in reached.values()]


def _budgeted(function: Any, options: dict[str, Any]) -> Budgeted:
    part = Partition(**options)
    return Budgeted(function, part, fullgraph=part.breaks == "refuse")


@contextmanager
def plain_errors(shapes: int = SHAPES) -> Iterator[None]:
    """Raise errors of planning without PyTorch's wrapper, and PlanError if a step cannot be traced as one graph."""
    try:
        yield
    except BackendCompilerFailed as error:
        inner = error.inner_exception
        if isinstance(inner, (PlanError, Planned)):
            raise inner from None
        raise PlanError(
            f"the step cannot be planned: {type(inner).__name__}: {inner}. Sparse gradients and subclasses of tensors "
            f"have no plan: use dense ones, or leave that part out of the function"
        ) from error
    except RecompileLimit as error:
        raise PlanError(
            f"the step was called with more than {shapes} sets of shapes, and each has a plan: pad the inputs "
            f"to a few lengths, or pass shapes= with a larger number"
        ) from error
    except TracingFailed as error:
        if "Tensor.backward()" in str(error):
            raise PlanError(
                "the function calls backward(), which belongs after the call: return the loss, and write "
                "step(...).backward(); a whole step is for estimate and fits"
            ) from error
        raise PlanError(
            f"the step cannot be traced as one graph: {error}\nFollow the hint above. If control flow depends on data, "
            f"move it out of the step, or pass breaks='sum' to plan every graph by itself"
        ) from error


def budget(function: Callable[..., Any], budget: int | str, **options: Any) -> Budgeted:
    """Return a callable for ``function`` whose training step, forward and backward, stays within ``budget``.

    The step is planned at the first call, and again for each new set of shapes. All bytes on the device count:
    parameters, inputs, gradients, states of the optimizer, saved and recomputed results, and scratch of kernels.
    Tensors that the caller makes between the forward and the backward pass do not count.

    Args:
        function: a module or a function of tensors; its result, preferably the loss, is differentiated.
        budget: maximum bytes on the device, as a number or as text such as ``"16GB"`` or ``"80%"``.
        options: fields of :class:`Partition`: ``optimizer``, ``keep_gradients``, ``other``, ``seconds``,
            ``workspaces``, ``breaks``, ``shapes``, ``inner``.

    Raises:
        PlanError: an argument is wrong, the function is compiled already, or (when called) it cannot be traced.
        BudgetError: (when called) no plan fits; the message gives the smallest budget that works.
    """
    if isinstance(function, Budgeted) or is_compiled(function):
        raise PlanError(f"{function!r} is compiled already: pass the module or function itself")
    if not callable(function):
        raise PlanError(f"expected a module or a function, got {type(function).__name__}")
    return _budgeted(function, {"budget": budget, **options})
