"""Predict the peak of a training step by running the caller's own step function on fake tensors.

Fake tensors have no memory. The function runs on copies of all modules, optimizers and tensors that it reaches through
arguments, closure, defaults and globals. So the prediction includes mixed precision, accumulation, clipping and
checkpointing, and the caller's objects do not change.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from weftplan.device.amounts import amount
from weftplan.errors import PlanError
from weftplan.torch.private import OPERATORS, VALUES, FakeCopyMode, FakeTensorMode, is_compiled, tree_leaves
from weftplan.torch.probe import Probes
from weftplan.torch.trace import Recorder, Trace

RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")
"""Functions that run other kernels on a CPU than on the fake tensors of a trace."""
LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
PARTS = ("parameters", "buffers", "gradients", "optimizer", "inputs", "activations")


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
    trace: Trace = field(repr=False)

    def __str__(self) -> str:
        """Return the estimate as a few lines of text."""
        lines = [f"peak {amount(self.peak)} ({self.peak:,} bytes) in {self.at}"]
        lines += [f"  {name:12} {amount(nbytes):>12}" for name, nbytes in self.parts.items() if nbytes]
        lines += [f"  alive: {amount(nbytes):>12} by {name}" for name, nbytes in self.alive]
        lines += [f"  not counted: {name}: {why}" for name, why in self.unseen.items()]
        return "\n".join(lines)


class _Names(TorchFunctionMode):  # type: ignore[misc]
    """Records the names of recurrent functions that are called; a dispatch mode sees only their parts."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in RECURRENT:
            self.seen.add(name)
        return func(*args, **(kwargs or {}))


class _FakeCopies(FakeCopyMode):  # type: ignore[misc]
    """Copies tensors as fake tensors. Host scalars keep their value, because optimizers read their step counts."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        fake = super().__torch_function__(func, types, args, kwargs)
        if func is torch.Tensor.__deepcopy__ and args[0].dim() == 0 and args[0].is_cpu and not args[0].requires_grad:
            fake.constant = args[0].clone()
        return fake


def estimate(step: Callable[..., Any], *args: Any, workspaces: str = "measure", warm: int = 1) -> Estimate:
    """Predict the peak bytes of ``step(*args)`` without running it on the caller's tensors.

    Args:
        step: a training step: any of forward pass, backward pass, update, accumulation and clipping.
        args: its arguments; neither they nor other objects that the function reaches change.
        workspaces: ``"measure"`` runs every unknown operator once on made-up tensors, to see its scratch;
            ``"cached"`` uses existing measurements and lists the other operators as unseen.
        warm: the number of steps before the predicted step, so that an optimizer has its states.

    Raises:
        PlanError: the step fails on fake tensors, reads values of tensors, is compiled, or reaches an object that
            cannot be copied; or ``workspaces`` has another value.
    """
    if workspaces not in ("measure", "cached"):
        raise PlanError(f"workspaces must be 'measure' or 'cached', got {workspaces!r}")
    probes, names = Probes(run=workspaces == "measure"), _Names()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with _FakeCopies(mode):
        run, inputs, memo = _copy_step(step, args)
    recorder = Recorder(probes)
    try:
        with mode, names:
            for _ in range(warm):
                with Recorder():
                    run(*inputs)
            # Parameters come first, because each is also among the copied tensors, which count as inputs.
            for tensor, name in _purposes(list(memo.values())):
                recorder.storage(tensor, -1, name)
            with recorder:
                run(*inputs)
    except VALUES as error:
        raise PlanError(
            f"the step looks at the value of a tensor ({error.func}), which a prediction does not have{_line(error)}: "
            f"leave that out of the step, such as loss.item(), or put it after the step"
        ) from error
    except RuntimeError as error:
        raise PlanError(f"the step fails on fake tensors{_line(error)}: {error}") from error
    return _report(recorder.trace, probes, names.seen)


def _line(error: BaseException) -> str:
    """Return the innermost line outside PyTorch and this package in an error's traceback, in brackets."""
    last, traceback = "", error.__traceback__
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if not code.co_filename.startswith(LIBRARIES):
            last = f" ({code.co_filename}:{traceback.tb_lineno}, in {code.co_name})"
        traceback = traceback.tb_next
    return last


def _copy_step(step: Callable[..., Any], args: Any) -> tuple[Callable[..., Any], Any, dict[int, Any]]:
    """Return copies of the step and of its arguments, and the memo of all copies."""
    memo: dict[int, Any] = {}
    try:
        _copy_patched(args, memo)
        inputs = copy.deepcopy(args, memo)
        return _copy_function(step, memo), inputs, memo
    except (TypeError, RuntimeError, AttributeError) as error:
        raise PlanError(
            f"the step reaches something that cannot be copied ({error}): pass the module, the optimizer and tensors "
            f"as arguments, and keep loaders, locks and files out of the step"
        ) from error


def _copy_patched(reached: Any, memo: dict[int, Any]) -> None:
    """Copy the functions among the attributes of modules into ``memo``; a deep copy would share them."""
    for value in tree_leaves(reached):
        for module in value.modules() if isinstance(value, torch.nn.Module) else ():
            for own in vars(module).values():
                if isinstance(own, types.FunctionType) and _is_state(own):
                    _copy_function(own, memo)


def _copy_function(function: Any, memo: dict[int, Any]) -> Any:
    """Return a copy of a function, with copies of the closure, defaults and globals that it uses."""
    if is_compiled(function):
        raise PlanError("the step is compiled: pass the function or module itself, compiled kernels allocate otherwise")
    if not isinstance(function, types.FunctionType):
        return copy.deepcopy(function, memo)
    if id(function) in memo:
        return memo[id(function)]
    reached = {
        name: value for name in _global_names(function.__code__) if _is_state(value := function.__globals__.get(name))
    }
    cells = tuple(types.CellType() for _ in function.__closure__ or ())
    own = dict(function.__globals__)
    copied = types.FunctionType(function.__code__, own, function.__name__, None, cells or None)
    memo[id(function)] = copied
    copied.__kwdefaults__ = copy.deepcopy(function.__kwdefaults__, memo)
    copied.__defaults__ = copy.deepcopy(function.__defaults__, memo)
    _copy_patched([*reached.values(), *(c.cell_contents for c in function.__closure__ or () if _bound(c))], memo)
    for name, value in reached.items():
        own[name] = _copy(value, memo)
    for cell, original in zip(cells, function.__closure__ or (), strict=True):
        if _bound(original):
            cell.cell_contents = _copy(original.cell_contents, memo)
    return copied


def _copy(value: Any, memo: dict[int, Any]) -> Any:
    """Return a copy of an object that a function reaches; Python modules and PyTorch operators are not copied."""
    if isinstance(value, types.ModuleType) or type(value).__module__.startswith(OPERATORS):
        return value
    own_function = isinstance(value, types.FunctionType) and _is_state(value)
    return _copy_function(value, memo) if own_function else copy.deepcopy(value, memo)


def _bound(cell: types.CellType) -> bool:
    """Return whether a closure's variable has a value."""
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _global_names(code: types.CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _global_names(constant)
    return names


def _is_state(value: Any) -> bool:
    """Return whether a global must be copied: an object that may contain tensors, or a function outside libraries."""
    if isinstance(value, types.FunctionType):
        file = value.__code__.co_filename
        return "site-packages" not in file and "/lib/python" not in file
    plain = (types.ModuleType, type, str, int, float, bytes, bool, types.BuiltinFunctionType, type(None))
    return (
        not isinstance(value, plain)
        and (
            isinstance(value, (torch.nn.Module, torch.optim.Optimizer, torch.Tensor, list, dict, tuple, set))
            or hasattr(value, "__dict__")
        )
        and not callable(getattr(value, "__torch_dispatch__", None))
    )


def _purposes(copies: list[Any]) -> Iterator[tuple[torch.Tensor, str]]:
    """Yield each tensor among ``copies``, or in their modules and optimizers, with its purpose."""
    modules = [m for m in copies if isinstance(m, torch.nn.Module)]
    for module in modules:
        for p in module.parameters():
            yield p, "parameters"
            if p.grad is not None:
                yield p.grad, "gradients"
        for b in module.buffers():
            yield b, "buffers"
    for optimizer in [o for o in copies if isinstance(o, torch.optim.Optimizer)]:
        for values in optimizer.state.values():
            for t in values.values():
                if isinstance(t, torch.Tensor):
                    yield t, "optimizer"
    for t in copies:
        if isinstance(t, torch.Tensor):
            yield t, "inputs"


def _report(trace: Trace, probes: Probes, recurrent: set[str]) -> Estimate:
    live = trace.live()
    at = max(range(len(live)), key=live.__getitem__) if live else 0
    parts = dict.fromkeys(PARTS, 0)
    alive: dict[str, int] = {}
    for r, (first, last) in enumerate(trace.spans()):
        if first <= at < last:
            name = trace.names[r]
            part = name if name in parts else "inputs" if trace.born[r] < 0 else "activations"
            parts[part] += trace.nbytes[r]
            if trace.born[r] >= 0:
                alive[name] = alive.get(name, 0) + trace.nbytes[r]
    if trace.calls and (inside := trace.calls[at].scratch):
        parts["inside the kernel"] = inside
    unseen = dict.fromkeys(probes.unseen, "never measured on this machine")
    unseen |= {f"torch.{name}": "its kernel on a CPU is not the traced kernel" for name in recurrent}
    return Estimate(
        peak=max(live, default=trace.before),
        before=trace.before,
        parts=parts,
        at=trace.calls[at].name if trace.calls else "nothing",
        alive=sorted(alive.items(), key=lambda item: -item[1])[:10],
        unseen=unseen,
        trace=trace,
    )
