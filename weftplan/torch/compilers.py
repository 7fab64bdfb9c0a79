"""Backends for ``torch.compile`` that run a partitioned step with PyTorch's own kernels or with inductor's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from weftplan.torch.private import CustomPartitionerFn, aot_autograd, autograd_config, eager, fused_peaks, inductor


def eager_backend(partition: Any) -> Any:
    """Return a backend that runs forward and backward part node by node with PyTorch's own kernels."""

    def inference(module: torch.fx.GraphModule, inputs: Any) -> Any:
        partition.check_inference(module)
        return eager(module, inputs)

    return aot_autograd(
        fw_compiler=eager,
        bw_compiler=eager,
        inference_compiler=inference,
        partition_fn=partition,
        keep_inference_input_mutations=True,
    )


@dataclass(eq=False)
class _Partitioner(CustomPartitionerFn):  # type: ignore[misc]
    """A partition function in the form of inductor's configuration; a copy or pickle of it is its ``uuid``."""

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
    """Return a backend that compiles both parts by inductor; until its fused kernels fit, the plans become smaller."""

    def compile_part(module: torch.fx.GraphModule, inputs: Any, **options: Any) -> Any:
        if options.get("is_inference"):
            partition.check_inference(module)
        return inductor().compile_fx_inner(module, inputs, **options)

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
"""Options of inductor. Without them peaks would exceed plans by buffers that wait for reuse or by inputs in a second
layout, and caches would return a step of another budget, or one whose peak is unknown."""
INNER = {"eager": eager_backend, "inductor": inductor_backend}
"""Functions that return a backend for a partition function, by the option ``inner``."""
