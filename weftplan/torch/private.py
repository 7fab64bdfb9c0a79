"""Every private name of PyTorch that this package uses, in one place; a test fails when one changes.

PyTorch promises nothing about these. :data:`TESTED` are the versions that the tests have run with; another version
warns once, when this package is imported.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any
from unittest import mock

import torch
from torch._dynamo import exc as _errors
from torch._dynamo.backends.common import aot_autograd as aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._dynamo.eval_frame import OptimizedModule
from torch._functorch import config as _functorch_config
from torch._functorch import partitioners as _partitioners
from torch._inductor import custom_graph_pass as _passes
from torch._ops import OpOverload as OpOverload
from torch._prims.rng_prims import run_and_save_rng_state as run_and_save_rng_state
from torch._prims.rng_prims import run_with_rng_state as run_with_rng_state
from torch._subclasses import fake_tensor as _fake
from torch.utils import _python_dispatch, _pytree

BackendCompilerFailed, TracingFailed = _errors.BackendCompilerFailed, _errors.TorchDynamoException
CustomKnapsackSolver, CustomPartitionerFn = _passes.CustomKnapsackSolver, _passes.CustomPartitionerFn
FakeCopyMode, FakeTensor, FakeTensorMode = _fake.FakeCopyMode, _fake.FakeTensor, _fake.FakeTensorMode
VALUES = (_fake.DataDependentOutputException, _fake.DynamicOutputShapeException)
"""Errors of operators whose result depends on values of tensors."""
OPERATORS = ("torch._ops", "torch._library")
"""Modules whose objects are operators."""
autograd_config, eager = _functorch_config, boxed_nop
TorchDispatchMode, without_modes = _python_dispatch.TorchDispatchMode, _python_dispatch._disable_current_modes
classify_nodes, default_partition = _partitioners.classify_nodes, _partitioners.default_partition
extract_modules, is_tangent = _partitioners._extract_fwd_bwd_modules, _partitioners._is_tangent
is_view, profiler_enabled = torch.Tensor._is_view, torch.autograd._profiler_enabled
backward_node = torch._C._current_autograd_node
"""The node whose backward function runs in this thread; None outside one, such as when gradients are summed."""
tree_leaves, tree_map = _pytree.tree_leaves, _pytree.tree_map

TESTED = ("2.13",)
"""Versions of PyTorch, as ``major.minor``."""


def check_version(version: str = torch.__version__) -> None:
    """Warn when PyTorch is none of the tested versions."""
    if ".".join(version.split(".")[:2]) not in TESTED:
        tested = ", ".join(TESTED)
        warnings.warn(
            f"weftplan.torch was tested with PyTorch {tested}, this is {version}: it uses private functions of "
            f"PyTorch, which may have changed; compare gradients and peaks before you rely on a plan",
            stacklevel=3,
        )


def storage_key(tensor: torch.Tensor) -> int:
    """Return a number that tensors with one storage share, as long as one of them is alive."""
    return int(tensor.untyped_storage()._cdata)


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """Return the tensors in nested tuples, lists and dictionaries."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def is_compiled(function: Any) -> bool:
    """Return whether ``torch.compile`` made a module or function."""
    return isinstance(function, OptimizedModule) or hasattr(function, "_torchdynamo_orig_callable")


def is_mutation(node: torch.fx.Node) -> bool:
    """Return whether a node of a graph writes to one of its inputs."""
    return isinstance(node.target, OpOverload) and bool(node.target._schema.is_mutable)


def memory_events(prof: Any) -> list[Any]:
    """Return all events of a profile, allocations among them under the name ``[memory]``."""
    return list(prof.profiler.kineto_results.events())


@contextmanager
def fused_peaks(scratch: Callable[[], dict[str, int]]) -> Iterator[list[int]]:
    """Collect the bytes, without parameters, at each node that inductor schedules; ``scratch`` is by operator."""
    memory, peaks = import_module("torch._inductor.memory"), list[int]()
    reorder = memory.reorder_for_peak_memory

    def watched(nodes: Any, buffers: Any, fused: Any, inputs: Any, outputs: Any) -> Any:
        order, inside = reorder(nodes, buffers, fused, inputs, outputs), scratch()
        alive = memory.estimate_peak_memory(order, memory.get_freeable_input_buf(order, inputs), outputs)[1]
        for node, nbytes in zip(order, alive, strict=False):
            origins = [origin for part in node.get_nodes() for origin in getattr(part.node, "origins", ())]
            peaks.append(nbytes + max((inside.get(str(origin.target), 0) for origin in origins), default=0))
        return order

    with mock.patch.object(memory, "reorder_for_peak_memory", watched):
        yield peaks


def inductor() -> Any:
    """Import the module that holds inductor's ``compile_fx``, ``compile_fx_inner`` and ``config``; takes a second."""
    return import_module("torch._inductor.compile_fx")
