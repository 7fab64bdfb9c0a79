"""Predict the peak of a training step by running the caller's own step function on fake tensors.

Fake tensors have no memory. The function runs on copies of all objects that it reaches. So the prediction includes
mixed precision, accumulation, clipping, hooks and checkpointing, and the caller's objects do not change.
"""

from __future__ import annotations

import itertools
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.autograd.function import BackwardCFunction, FunctionCtx

from weftplan.device.amounts import amount
from weftplan.errors import PlanError
from weftplan.support.keyword_errors import known_keywords
from weftplan.torch.private import READ, VALUES, FakeTensorMode
from weftplan.torch.probe import Probes, measuring
from weftplan.torch.reach import Copies
from weftplan.torch.trace import Kernels, Recorder, StepTrace

EXTREMES = ("max", "min", "median", "nanmedian")
LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
PARTS = ("parameters", "buffers", "gradients", "optimizer", "communication", "inputs", "activations")
LONGEST, LATE = 8, 1000
"""Most calls until an optimizer is expected to step, and the number of steps that its counts are advanced."""


@dataclass(frozen=True)
class Estimate:
    """The predicted memory of a step, in bytes of the device's allocator. ``str()`` gives a table."""

    peak: int
    before: int
    """Bytes that exist before the step."""
    parts: dict[str, int]
    """Bytes alive at the peak, by purpose: the names of :data:`PARTS`, and the scratch inside the kernel."""
    at: str
    """The operator that runs at the peak."""
    alive: list[tuple[str, int]]
    """(operator, bytes) of results of the step that are alive at the peak: the ten largest, the largest first."""
    unseen: dict[str, str]
    """Operators whose scratch is not counted, each with the reason."""
    trace: StepTrace = field(repr=False)

    def __str__(self) -> str:
        """Return the estimate as a few lines of text."""
        lines = [f"peak {amount(self.peak)} ({self.peak:,} bytes) in {self.at}"]
        lines += [f"  {name:12} {amount(nbytes):>12}" for name, nbytes in self.parts.items() if nbytes]
        lines += [f"  alive: {amount(nbytes):>12} by {name}" for name, nbytes in self.alive]
        lines += [f"  not counted: {name}: {why}" for name, why in self.unseen.items()]
        return "\n".join(lines)


class _Extreme(torch.autograd.Function):  # type: ignore[misc]
    """An extreme value of all elements, whose gradient the CPU distributes as ``evenly_distribute_backward`` does."""

    @staticmethod
    def forward(ctx: FunctionCtx, function: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        """Return the value."""
        value: torch.Tensor = function(x)
        ctx.save_for_backward(x, value)
        return value

    @staticmethod
    def backward(ctx: BackwardCFunction, grad: torch.Tensor) -> tuple[None, torch.Tensor]:
        """Return the gradient of ``x``."""
        x, value = ctx.saved_tensors
        mask = x == value
        return None, grad.new_zeros(x.shape).masked_fill_(mask, grad / mask.sum())


@contextmanager
def host_functions() -> Iterator[None]:
    """Run the CPU's gradient formulas of functions in this thread that have others for fake tensors.

    A mode for functions would do, but holds the arguments of Python's functions longer than a real call does.
    """
    thread = threading.get_ident()

    def replaced(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def call(*args: torch.Tensor, **options: object) -> torch.Tensor:
            whole = len(args) == 1 and not options and threading.get_ident() == thread
            if whole and torch.is_grad_enabled() and args[0].requires_grad:
                value: torch.Tensor = _Extreme.apply(function, args[0])
                return value
            return function(*args, **options)

        return call

    with ExitStack() as stack:
        for owner, name in itertools.product((torch, torch.Tensor), EXTREMES):
            stack.enter_context(mock.patch.object(owner, name, replaced(getattr(owner, name))))
        yield


@known_keywords()
def estimate(step: Callable[..., Any], *args: Any, workspaces: str = "measure", warm: int = 1) -> Estimate:
    """Predict the peak bytes of ``step(*args)`` without running it on the caller's tensors.

    Args:
        step: a training step: any of forward pass, backward pass, update, accumulation and clipping. If an optimizer
            steps only in every n-th call, the peak is that of n calls.
        args: its arguments; neither they nor other objects that the function reaches change.
        workspaces: ``"measure"`` runs every unknown operator once on made-up tensors, to see its scratch;
            ``"cached"`` uses existing measurements and lists the other operators as unseen.
        warm: the number of steps before the predicted step, so that an optimizer has its states. Its step counts are
            then advanced, since some optimizers change their formula after a few steps.

    Raises:
        PlanError: the step fails on fake tensors, reads values of tensors, is compiled, or reaches an object that
            cannot be copied; or ``workspaces`` has another value.
    """
    if workspaces not in ("measure", "cached"):
        raise PlanError(f"workspaces must be 'measure' or 'cached', got {workspaces!r}")
    with measuring() as progress:
        probes = Probes(run=workspaces == "measure", progress=progress)
        return report(record(step, args, kernels=probes, functions=host_functions(), warm=warm), probes)


def check_step(step: object) -> None:
    """Raise PlanError if ``step`` cannot be called."""
    if not callable(step):
        raise PlanError(f"expected a function or a module as the step, got {type(step).__name__}")


def check_optimizer(optimizer: object) -> None:
    """Raise PlanError if ``optimizer`` is neither None nor an optimizer, such as its class."""
    if optimizer is not None and not isinstance(getattr(optimizer, "param_groups", None), list):
        name = f"the class {optimizer.__name__}" if isinstance(optimizer, type) else type(optimizer).__name__
        raise PlanError(f"optimizer= takes an optimizer such as torch.optim.AdamW(model.parameters()), got {name}")


def record(
    step: Callable[..., Any],
    args: Any,
    *,
    kernels: Kernels | None,
    functions: Any,
    warm: int = 1,
    repeats: int = 1,
    prepare: Callable[[list[torch.optim.Optimizer]], None] | None = None,
) -> StepTrace:
    """Return the trace of some steps on fake tensors; the last steps are steady.

    Args:
        step, args: as for :func:`estimate`.
        kernels: the bytes of kernels.
        functions: a mode that is active while the step runs.
        warm: the number of steps before :attr:`StepTrace.start`; more run until every optimizer has stepped.
        repeats: how often the optimizers step after that.
        prepare: is called with the copied optimizers before the first step.
    """
    check_step(step)
    for value in args if isinstance(args, tuple) else ():
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer):
            check_optimizer(value)
    copies = Copies(FakeTensorMode(allow_non_fake_inputs=True))
    with _plain_errors("cannot be copied"):
        run, inputs = copies.copy(step), copies.copy(args)
    copies.check_devices()
    if prepare is not None:
        prepare(copies.optimizers)
    recorder = Recorder()
    trace, stepped = recorder.trace, dict[int, bool]()
    for optimizer in copies.optimizers:
        with suppress(AttributeError):  # a wrapper of another optimizer, which is copied, too
            optimizer.register_step_post_hook(lambda own, *_: stepped.update({id(own): True}))
            stepped[id(optimizer)] = False
    for parameter in _register(recorder, copies):
        parameter.register_post_accumulate_grad_hook(lambda p: _name_gradient(recorder, p))
    copies.forget()

    def call() -> None:
        trace.starts.append(len(trace.calls))
        with recorder:
            run(*inputs)

    with (
        _plain_errors("fails on fake tensors"),
        _preserved_random_states(),
        recorder.random_states(),
        _unpacked_sequences(),
        copies.mode,
        functions,
    ):
        calls, period, listed = 0, 1, -1
        while calls < warm or (warm and calls < LONGEST and not (all(stepped.values()) and listed == _listed(copies))):
            listed, before = _listed(copies), all(stepped.values())
            call()
            calls += 1
            period = calls if not before and all(stepped.values()) else period
        _register(recorder, copies)
        _advance(copies.optimizers)
        trace.start, recorder.kernels = len(trace.calls), kernels
        for _ in range(period * repeats):
            call()
    return trace


def _register(recorder: Recorder, copies: Copies) -> list[torch.Tensor]:
    """Record the purposes of all copied tensors that are alive; return the parameters that get gradients."""
    for tensor, purpose in _purposes(copies):
        recorder.storage(tensor, -1, purpose=purpose)
    trained = {id(p): p for m in copies.modules for p in m.parameters(recurse=False) if p.requires_grad and p.is_leaf}
    return list(trained.values())


def _name_gradient(recorder: Recorder, parameter: torch.Tensor) -> None:
    if parameter.grad is not None and parameter.grad.layout is torch.strided:
        recorder.storage(parameter.grad, -1, purpose="gradients")


def _listed(copies: Copies) -> int:
    """Return the number of tensors in lists of optimizer states, which grow for several steps, as in LBFGS."""
    states = [s for o in copies.optimizers for s in o.state.values() if isinstance(s, dict)]
    return sum(len(v) for s in states for v in s.values() if isinstance(v, list))


def _advance(optimizers: list[torch.optim.Optimizer]) -> None:
    """Advance the step counts of optimizers that have states, because some change their formula after a few steps."""
    for values in (state for optimizer in optimizers for state in optimizer.state.values() if isinstance(state, dict)):
        count: Any = values.get("step")
        if isinstance(count, int):
            values["step"] = count + LATE
        elif getattr(count, "constant", None) is not None:
            count.constant.add_(LATE)


@contextmanager
def _preserved_random_states() -> Iterator[None]:
    """Restore the states of Python's, NumPy's and PyTorch's global random generators at the end."""
    numpy = sys.modules.get("numpy")
    state, other = random.getstate(), numpy.random.get_state() if numpy is not None else None
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(state)
        if numpy is not None:
            numpy.random.set_state(other)


def _no_indices(position_ids: torch.Tensor) -> None:
    """Say that no sequences are packed."""


@contextmanager
def _unpacked_sequences() -> Iterator[None]:
    """Let models of transformers take their own positions as those of single sequences, as these are in a real step.

    On fake tensors they would make a mask for packed sequences, because they cannot look at the positions.
    """
    masks = sys.modules.get("transformers.masking_utils")
    if masks is None or not hasattr(masks, "find_packed_sequence_indices"):
        yield
        return
    with mock.patch.object(masks, "find_packed_sequence_indices", _no_indices):
        yield


@contextmanager
def _plain_errors(what: str) -> Iterator[None]:
    """Raise errors of a step as PlanError, with the line of the step; ``what`` names the work."""
    try:
        yield
    except PlanError:
        raise
    except VALUES as error:
        advice = (
            "leave that out of the step, such as loss.item(), or put it after the step"
            if error.func is READ
            else "its memory depends on the lengths: forecast the step with scores.mean() in its place"
            if "ctc_loss" in str(error.func)
            else "its result depends on values, as lengths, masks or the routing of experts: let the step call an "
            "operator whose result has the shape of the largest case"
        )
        raise PlanError(
            f"the step looks at the value of a tensor ({error.func}), which a prediction does not have{_line(error)}: "
            f"{advice}"
        ) from error
    except Exception as error:
        if any(text in str(error) for text in (".numpy() is not supported", "FakeTensor.__format__")):
            raise PlanError(
                f"the step takes the value of a tensor to NumPy or to text, which a prediction does not have"
                f"{_line(error)}: put it after the step"
            ) from error
        raise PlanError(f"the step {what}{_line(error)}: {type(error).__name__}: {error}") from error


def _line(error: BaseException) -> str:
    """Return the innermost line outside PyTorch and this package in an error's traceback, in brackets."""
    last, traceback = "", error.__traceback__
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if not code.co_filename.startswith(LIBRARIES):
            last = f" ({code.co_filename}:{traceback.tb_lineno}, in {code.co_name})"
        traceback = traceback.tb_next
    return last


def _purposes(copies: Copies) -> Iterator[tuple[torch.Tensor, str]]:
    """Yield each copied tensor that is alive, and each tensor of copied modules and optimizers, with its purpose."""
    for module in copies.modules:
        for p in module.parameters(recurse=False):
            yield p, "parameters"
            if p.grad is not None:
                yield p.grad, "gradients"
        for b in module.buffers(recurse=False):
            yield b, "buffers"
        if "communication" in vars(module):
            yield vars(module)["communication"], "communication"
    for optimizer in copies.optimizers:
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            yield p, "parameters"
            if p.grad is not None:
                yield p.grad, "gradients"
        for t in (t for s in optimizer.state.values() if isinstance(s, dict) for t in s.values()):
            if isinstance(t, torch.Tensor):
                yield t, "optimizer"
    for reference in copies.tensors:
        if (tensor := reference()) is not None:
            yield tensor, "inputs"


def report(trace: StepTrace, kernels: Kernels) -> Estimate:
    """Return the estimate of a trace, from its attribute ``start`` on."""
    live = trace.live()
    at = trace.start + (max(range(len(live)), key=live.__getitem__) if live else 0)
    parts = dict.fromkeys(PARTS, 0)
    alive: dict[str, int] = {}
    for r, (first, last) in enumerate(trace.spans()):
        if first <= at < last:
            before = trace.born[r] < trace.start
            parts[trace.purposes[r] or ("inputs" if before else "activations")] += trace.nbytes[r]
            if not before:
                alive[trace.names[r]] = alive.get(trace.names[r], 0) + trace.nbytes[r]
    if live and (inside := trace.calls[at].scratch):
        parts["inside the kernel"] = inside
    return Estimate(
        peak=max(live, default=trace.before),
        before=trace.before,
        parts=parts,
        at=trace.calls[at].name if live else "nothing",
        alive=sorted(alive.items(), key=lambda item: -item[1])[:10],
        unseen=dict.fromkeys(kernels.unseen, "never measured on this machine"),
        trace=trace,
    )
