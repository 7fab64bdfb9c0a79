"""All private names of PyTorch that this package uses; tests fail if they change.

PyTorch may change these names in any version. The first use of this package warns if the version is not in
:data:`TESTED`.
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
"""Errors that fake tensors raise in operators that need values of tensors."""
OPERATORS = ("torch._ops", "torch._library")
"""Modules of the classes of operators."""
autograd_config, eager = _functorch_config, boxed_nop
TorchDispatchMode, without_modes = _python_dispatch.TorchDispatchMode, _python_dispatch._disable_current_modes
classify_nodes, default_partition = _partitioners.classify_nodes, _partitioners.default_partition
extract_modules, is_tangent = _partitioners._extract_fwd_bwd_modules, _partitioners._is_tangent
is_view, profiler_enabled = torch.Tensor._is_view, torch.autograd._profiler_enabled
backward_node = torch._C._current_autograd_node
"""Returns the node whose backward function runs in this thread; None outside such a function."""
tree_leaves, tree_map = _pytree.tree_leaves, _pytree.tree_map

TESTED = ("2.13",)
"""Tested versions of PyTorch, as ``major.minor``."""


def check_version(version: str = torch.__version__) -> None:
    """Warn if ``version`` is not a tested version of PyTorch."""
    if ".".join(version.split(".")[:2]) not in TESTED:
        tested = ", ".join(TESTED)
        warnings.warn(
            f"weftplan.torch was tested with PyTorch {tested}, this is {version}: it uses private functions of "
            f"PyTorch, which may have changed; compare gradients and peaks before you rely on a plan",
            stacklevel=3,
        )


def storage_key(tensor: torch.Tensor) -> int:
    """Return a number that identifies a tensor's storage while the storage exists."""
    return int(tensor.untyped_storage()._cdata)


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """Return the tensors in nested tuples, lists and dictionaries."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def is_compiled(function: Any) -> bool:
    """Return whether a module or function is a result of ``torch.compile``."""
    return isinstance(function, OptimizedModule) or hasattr(function, "_torchdynamo_orig_callable")


def is_mutation(node: torch.fx.Node) -> bool:
    """Return whether a node of a graph writes to one of its inputs."""
    return isinstance(node.target, OpOverload) and bool(node.target._schema.is_mutable)


def memory_events(prof: Any) -> list[Any]:
    """Return all events of a profile; allocations have the name ``[memory]``."""
    return list(prof.profiler.kineto_results.events())


@contextmanager
def fused_peaks(scratch: Callable[[], dict[str, int]]) -> Iterator[list[int]]:
    """Yield a list that gets the bytes alive at each node that inductor schedules, with scratch, without parameters."""
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
    """Import and return the module with inductor's ``compile_fx``, ``compile_fx_inner`` and ``config``; slow."""
    return import_module("torch._inductor.compile_fx")
