"""Private names of PyTorch that a forecast uses: fake tensors, dispatch modes and trees; tests fail if they change.

:mod:`weftplan.torch.private_compile` has those that only compiled steps use. PyTorch may change these names in any
version. The first use of this package warns if the version is not in :data:`TESTED`.
"""

from __future__ import annotations

import functools
import types
import warnings
from typing import Any

import torch
from torch._ops import OpOverload as OpOverload
from torch._subclasses import fake_tensor as _fake
from torch.utils import _python_dispatch, _pytree

FakeTensor, FakeTensorMode = _fake.FakeTensor, _fake.FakeTensorMode
VALUES = (_fake.DataDependentOutputException, _fake.DynamicOutputShapeException)
"""Errors that fake tensors raise in operators that need values of tensors."""
READ = torch.ops.aten._local_scalar_dense.default
"""The operator that reads the value of a tensor."""
EQUAL = torch.ops.aten.equal.default
"""The operator that compares two tensors; the result is a value."""
GROUPED = torch.ops.aten._grouped_mm.default
"""The operator that multiplies groups of rows, columns or matrices."""
LIFT = torch.ops.aten.lift_fresh.default
"""The operator that wraps the result of ``torch.tensor``, whose allocation no mode sees, in a fake tensor."""
OPERATORS = ("torch._ops", "torch._library", "torch._C")
"""Prefixes of the modules that define PyTorch's classes of operators."""
TorchDispatchMode, without_modes = _python_dispatch.TorchDispatchMode, _python_dispatch._disable_current_modes
is_view, profiler_enabled = torch.Tensor._is_view, torch.autograd._profiler_enabled
backward_node = torch._C._current_autograd_node
"""Returns the node whose backward function runs in this thread; None outside such a function."""
tree_leaves, tree_map = _pytree.tree_leaves, _pytree.tree_map


class DispatchMode(TorchDispatchMode):  # type: ignore[misc, valid-type]
    """A dispatch mode that does not import dynamo, which takes seconds; nothing is compiled inside a mode."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


TESTED = ("2.13", "2.14")
"""Tested versions of PyTorch, as ``major.minor``."""


@functools.lru_cache(maxsize=1)
def check_version(version: str = torch.__version__) -> None:
    """Warn, once in a process, if ``version`` is not a tested version of PyTorch."""
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


def kept_storages(results: object, reached: list[torch.Tensor]) -> dict[int, int]:
    """Return the bytes of each storage that the graph behind ``results`` keeps, by key, without those of ``reached``.

    The graph ends at the tensors ``reached``, whose own graphs are not the function's.
    """
    seen = {t.grad_fn for t in reached}
    waiting = [t.grad_fn for t in tensors_in(results)]
    kept: dict[int, int] = {}
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [source for source, _ in node.next_functions]
        for name in dir(node):
            if name.startswith("_saved_") or name == "saved_tensors":
                kept |= {storage_key(t): t.untyped_storage().nbytes() for t in tensors_in(getattr(node, name))}
    for t in (*reached, *tensors_in(results)):
        if t.layout is torch.strided:
            kept.pop(storage_key(t), None)
    return kept


def is_compiled(function: Any) -> bool:
    """Return whether a module or function is a result of ``torch.compile``, or a module after ``compile()``."""
    if isinstance(function, torch.nn.Module):
        return type(function).__name__ == "OptimizedModule" or function._compiled_call_impl is not None
    return (
        isinstance(function, types.FunctionType)
        and hasattr(function, "_torchdynamo_orig_callable")
        and not getattr(function, "_torchdynamo_disable", False)
    )


def gradient_hooks(tensor: torch.Tensor) -> tuple[list[Any], list[Any]]:
    """Return a tensor's hooks of its gradient, and those that run after the gradient is accumulated."""
    return (
        list((tensor._backward_hooks or {}).values()),
        list((getattr(tensor, "_post_accumulate_grad_hooks", None) or {}).values()),
    )


def is_mutable(func: Any) -> bool:
    """Return whether an operator writes to one of its inputs."""
    return isinstance(func, OpOverload) and bool(func._schema.is_mutable)


def is_seeded(func: Any) -> bool:
    """Return whether an operator draws random numbers from a generator."""
    return isinstance(func, OpOverload) and torch.Tag.nondeterministic_seeded in func.tags


def is_mutation(node: torch.fx.Node) -> bool:
    """Return whether a node of a graph writes to one of its inputs."""
    return is_mutable(node.target)


def memory_events(prof: Any) -> list[Any]:
    """Return all events of a profile; allocations have the name ``[memory]``."""
    return list(prof.profiler.kineto_results.events())
