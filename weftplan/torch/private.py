"""Every private name of PyTorch that this package uses, in one place; a test fails when one changes.

PyTorch promises nothing about these. :data:`TESTED` are the versions that the tests have run with; another version
warns once, when this package is imported.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd as aot_autograd
from torch._dynamo.eval_frame import OptimizedModule as OptimizedModule
from torch._dynamo.exc import BackendCompilerFailed as BackendCompilerFailed
from torch._dynamo.exc import TorchDynamoException as TorchDynamoException
from torch._functorch import partitioners as _partitioners
from torch._functorch.partitioners import classify_nodes as classify_nodes
from torch._functorch.partitioners import default_partition as default_partition
from torch._inductor.custom_graph_pass import CustomKnapsackSolver as CustomKnapsackSolver
from torch._prims.rng_prims import run_and_save_rng_state as run_and_save_rng_state
from torch._prims.rng_prims import run_with_rng_state as run_with_rng_state
from torch._subclasses.fake_tensor import FakeCopyMode as FakeCopyMode
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.utils import _python_dispatch

extract_modules = _partitioners._extract_fwd_bwd_modules
is_tangent = _partitioners._is_tangent
without_modes = _python_dispatch._disable_current_modes

TESTED = ("2.13",)
"""Versions of PyTorch, as ``major.minor``."""
SIGNATURES = {
    "extract_modules": (
        "joint_module saved_values saved_sym_nodes saved_opaque_nodes num_fwd_outputs static_lifetime_input_nodes "
        "ignore_must_be_in_fw_bw omit_aot_autograd_runtime"
    ),
    "classify_nodes": "joint_module static_lifetime_input_indices num_fwd_outputs",
    "default_partition": (
        "joint_module _joint_inputs num_fwd_outputs static_lifetime_input_indices static_lifetime_input_nodes"
    ),
    "is_tangent": "node",
}
"""The parameters of private functions, in order."""


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
    """A number that tensors with one storage share, as long as one of them is alive."""
    key: int = tensor.untyped_storage()._cdata
    return key


def current_autograd_node() -> Any:
    """The node whose backward function runs in this thread; None outside one, such as when gradients are summed."""
    return torch._C._current_autograd_node()
