"""Backends for ``torch.compile`` that run a partitioned step by kernels of PyTorch, or by those that inductor fuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from weftplan.torch.private import CustomPartitionerFn, aot_autograd, autograd_config, eager, inductor


def eager_backend(partition: Callable[..., Any], check: Callable[[torch.fx.GraphModule], None]) -> Any:
    """Return a backend that runs PyTorch's own kernels; ``check`` sees graphs without a backward part."""

    def inference(module: torch.fx.GraphModule, inputs: Any) -> Callable[[list[Any]], Any]:
        check(module)
        return eager(module, inputs)

    return aot_autograd(
        fw_compiler=eager,
        bw_compiler=eager,
        inference_compiler=inference,
        partition_fn=partition,
        keep_inference_input_mutations=True,
    )


class _Partitioner(CustomPartitionerFn):  # type: ignore[misc]
    """A partition function in the form that inductor's configuration takes."""

    def __init__(self, partition: Callable[..., Any]) -> None:
        self._partition = partition

    def __call__(self, module: torch.fx.GraphModule, joint_inputs: Any, **options: Any) -> Any:
        """Return the forward and the backward module."""
        return self._partition(module, joint_inputs, **options)

    def uuid(self) -> str:
        """Return a constant: inductor caches graphs that are partitioned already."""
        return "weftplan.torch"

    def __reduce__(self) -> Any:
        return str, (self.uuid(),)  # keys of caches copy and pickle the configuration


def inductor_backend(partition: Callable[..., Any], check: Callable[[torch.fx.GraphModule], None]) -> Any:
    """Return a backend that compiles both parts by inductor.

    PyTorch's cache of whole steps is off, or a step that was compiled for another budget would come back from it.
    """

    def compile_part(module: torch.fx.GraphModule, inputs: Any, **options: Any) -> Any:
        if options.get("is_inference"):
            check(module)
        return inductor().compile_fx_inner(module, inputs, **options)

    def compile_step(module: torch.fx.GraphModule, inputs: Any) -> Any:
        with (
            inductor().config.patch(custom_partitioner_fn=_Partitioner(partition)),
            autograd_config.patch(enable_autograd_cache=False),
        ):
            return inductor().compile_fx(module, inputs, inner_compile=compile_part)

    return compile_step


INNER = {"eager": eager_backend, "inductor": inductor_backend}
"""Backends by the name of what runs the two parts."""
