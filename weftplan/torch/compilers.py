"""Backends for ``torch.compile`` that run a partitioned step with PyTorch's own kernels or with inductor's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from weftplan.errors import BudgetError, PlanError
from weftplan.torch.private import (
    DispatchMode,
    gradient_hooks,
    is_mutable,
    is_seeded,
    profiler_enabled,
    tensors_in,
    without_modes,
)
from weftplan.torch.private_compile import (
    CustomPartitionerFn,
    aot_autograd,
    autograd_config,
    eager,
    fused_peaks,
    inductor,
)
from weftplan.torch.probe import kernel_once


def eager_backend(partition: Any) -> Any:
    """Return a backend that runs forward and backward part node by node with PyTorch's own kernels."""

    def forward(module: torch.fx.GraphModule, inputs: Any) -> Any:
        return watched(eager(module, inputs), partition, is_forward=True)

    def backward(module: torch.fx.GraphModule, inputs: Any) -> Any:
        return watched(eager(module, inputs), partition, is_forward=False)

    def inference(module: torch.fx.GraphModule, inputs: Any) -> Any:
        return watched(eager(partition.inference(module), inputs), partition, is_forward=True)

    return aot_autograd(
        fw_compiler=forward,
        bw_compiler=backward,
        inference_compiler=inference,
        partition_fn=partition,
        keep_inference_input_mutations=True,
    )


def watched(run: Callable[[list[Any]], Any], partition: Any, *, is_forward: bool) -> Callable[[list[Any]], Any]:
    """Return ``run`` with checks that its plan covers its calls: of hooks at each call, of kernels at the first."""
    planned = partition.scratch() if partition.choices else {}
    is_first = True

    def checked(args: list[Any]) -> Any:
        nonlocal is_first
        if is_forward:
            partition.runs += 1
            refuse_hooks(args)
        if not is_first or partition.budget is None or profiler_enabled():
            return run(args)
        is_first = False
        with ValueCheck(planned, partition.budget_left()):
            return run(args)

    vars(checked)["_boxed_call"] = True
    return checked


def refuse_hooks(tensors: list[Any]) -> None:
    """Raise PlanError if a hook on a parameter or input runs in the backward pass, outside the plan."""
    for t in tensors:
        if isinstance(t, torch.Tensor) and t.requires_grad and t.is_leaf and any(gradient_hooks(t)):
            raise PlanError(
                f"a tensor of shape {tuple(t.shape)} has a hook on its gradient, which runs outside the plan while all "
                f"gradients are alive, so no budget can hold: remove it and do its work after backward()"
            )


class ValueCheck(DispatchMode):
    """Measures calls with integer arguments on their real values, because their scratch may depend on these.

    Args:
        planned: the planned scratch of each operator.
        left: bytes of the budget that the plan leaves.
    """

    supports_higher_order_operators = True

    def __init__(self, planned: dict[str, int], left: int) -> None:
        super().__init__()
        self.planned, self.left = planned, left

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator; raise BudgetError if it needs more scratch than its plan."""
        kwargs = kwargs or {}
        integers = [t for t in tensors_in((args, kwargs)) if not t.dtype.is_floating_point and t.numel() > 1]
        if integers and str(func) in self.planned and not is_mutable(func) and not is_seeded(func):
            with without_modes():
                scratch = kernel_once(func, args, kwargs).scratch
            if scratch > self.planned[str(func)] + self.left:
                raise BudgetError(
                    f"{func} needs {scratch:,} bytes of scratch with these values, {self.planned[str(func)]:,} were "
                    f"planned: pass other={scratch - self.planned[str(func)]} more"
                )
        return func(*args, **kwargs)


@dataclass(eq=False)
class _Partitioner(CustomPartitionerFn):  # type: ignore[misc]
    """A partition function as inductor's configuration expects it. Copying or pickling it gives only its ``uuid``."""

    partition: Callable[..., Any]

    def __call__(self, module: torch.fx.GraphModule, joint_inputs: Any, **options: Any) -> Any:
        """Return the forward and the backward module."""
        return self.partition(module, joint_inputs, **options)

    def uuid(self) -> str:
        """Return a name for the keys of PyTorch's caches."""
        return "weftplan.torch"

    def __reduce__(self) -> Any:
        return str, (self.uuid(),)


def inductor_backend(partition: Any) -> Any:
    """Return a backend that compiles both parts by inductor, and plans for smaller peaks until fused kernels fit."""

    def compile_part(module: torch.fx.GraphModule, inputs: Any, **options: Any) -> Any:
        if options.get("is_inference"):
            module = partition.inference(module)
        compiled = inductor().compile_fx_inner(module, inputs, **options)
        return watched(compiled, partition, is_forward=not options.get("is_backward"))

    def compile_step(module: torch.fx.GraphModule, inputs: Any) -> Any:
        while True:
            with (
                inductor().config.patch(custom_partitioner_fn=_Partitioner(partition), **EXACT),
                autograd_config.patch(enable_autograd_cache=False, force_non_lazy_backward_lowering=True),
                fused_peaks(partition.scratch) as peaks,
            ):
                compiled = inductor().compile_fx(copy.deepcopy(module), inputs, inner_compile=compile_part)
            if partition.fits(max(peaks, default=0)):
                return compiled

    return compile_step


EXACT = {"allow_buffer_reuse": False, "fx_graph_cache": False, "layout_optimization": False}
"""Options of inductor. Without them, buffers that wait for reuse and inputs in a second layout would raise peaks above
plans, and caches would return steps that were compiled for another budget or whose peak is unknown."""
INNER = {"eager": eager_backend, "inductor": inductor_backend}
"""Functions that return a backend for a partition function, by the option ``inner``."""
