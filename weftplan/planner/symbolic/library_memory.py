"""Memory that CUDA's libraries allocate for a graph, as far as it is known before the graph runs."""

from __future__ import annotations

from collections.abc import Mapping

from weftplan import config
from weftplan.device import cublas
from weftplan.ops.core import cost
from weftplan.ops.core.implementations import Choice
from weftplan.ops.fusion.relu import layer_of
from weftplan.planner.symbolic.network import Network

CUBLAS = "cublas_workspaces"
"""The purpose of the workspaces among the bytes outside a plan's buffers."""
_PREFIXES = ("_linalg_", "_contrib_interleaved_matmul", "_contrib_DeformableConvolution", "khatri_rao")


def library_bytes(network: Network, choices: Mapping[int, Choice]) -> dict[str, int]:
    """Return the bytes by purpose: of each GPU with products, one workspace of cuBLAS for each of its workers.

    A worker has a handle of cuBLAS, and works on one stream at a time; the workspaces have a fixed size. Graphs on one
    GPU share them, and each of their plans counts them.
    """
    devices = {
        network.devices[nid]
        for nid, node in enumerate(network.graph.nodes)
        if node.op is not None
        and network.devices[nid].device_type == "gpu"
        and _multiplies(layer_of(node.op.backward_of or node.op.name))
        and not (nid in choices and choices[nid].implementation.name == "cudnn")
    }
    if not devices:
        return {}
    workers = max(1, int(config.get("MXNET_GPU_WORKER_NTHREADS")))
    return {CUBLAS: len(devices) * workers * cublas.workspace_bytes()}


def _multiplies(name: str) -> bool:
    return name in cost.COUNTED or name.startswith(_PREFIXES)
