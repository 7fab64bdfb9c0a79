"""Scratch memory of nodes: the chosen implementation of each node, and the bytes that it needs as scratch.

:mod:`weftplan.ops.core.implementations` provides the implementations; the executor runs those that this module chooses.
The scratch of sums of gradients is that of :mod:`weftplan.planner.program`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from weftplan import config
from weftplan.device import cublas
from weftplan.device.context import Context
from weftplan.errors import PlanError
from weftplan.ops import autotune
from weftplan.ops.core import cost, implementations, tiling
from weftplan.ops.core.cuda_tuning import planned_for
from weftplan.ops.core.implementations import KernelChoice
from weftplan.ops.core.rule_cache import Settled
from weftplan.ops.core.schema import DType, Shape, TensorSpec, aligned
from weftplan.ops.fusion.relu import layer_of
from weftplan.planner.options import PlanOptions
from weftplan.planner.symbolic.indexed_graph import IndexedGraph
from weftplan.planner.symbolic.network import Network
from weftplan.symbol.node import Node

Facts = tuple[list[Shape], list[DType], list[Shape], list[DType]]
"""Input shapes, input dtypes, output shapes, output dtypes."""
_settled = Settled[tuple[KernelChoice, int]]()


def operator_choices(
    graph: IndexedGraph, *, shapes: list[Shape], dtypes: list[DType], devices: Sequence[Context], options: PlanOptions
) -> tuple[dict[int, KernelChoice], dict[int, int]]:
    """Return the implementation of each node that has several or declares scratch, and the scratch bytes of each node.

    Both are by node id; nodes without scratch are absent from the second.

    Raises:
        PlanError: an operator declares a number of bytes that is negative or no integer.
    """
    choices: dict[int, KernelChoice] = {}
    needs: dict[int, int] = {}
    # The parser gives equal parameters one dictionary, so repeated layers are looked up by identity.
    cached: dict[tuple[object, ...], tuple[KernelChoice, int]] = {}
    row, inputs = graph.row, graph.inputs
    device_kind, offered = "", implementations.provided("")
    last_device: Context | None = None
    for nid, node in enumerate(graph.nodes):
        op = node.op
        if op is None:
            continue
        if devices[nid] is not last_device:
            last_device = devices[nid]
            device_kind = "host" if last_device.is_host else last_device.device_type
            offered = implementations.provided(device_kind)
        if op.workspace is None and op.name not in offered:
            continue
        assert last_device is not None
        start, end, reads = row[nid], row[nid + 1], inputs[nid]
        ins = list(map(shapes.__getitem__, reads)), list(map(dtypes.__getitem__, reads))
        facts = *ins, shapes[start:end], dtypes[start:end]
        gpu = last_device.device_id if device_kind == "gpu" else None
        key = (id(op), id(node.params), last_device.device_type, gpu, *facts[0], *facts[1], *facts[2], *facts[3])
        answer = cached.get(key)
        if answer is None:
            ask = partial(_choice, node, facts, last_device.device_type, device_kind, options)
            if gpu is not None:
                with planned_for(gpu):
                    answer = cached[key] = ask()
            elif (
                device_kind != "host" or options.autotune or node.params.get("cudnn_tune")
            ):  # a later measurement may differ
                answer = cached[key] = ask()
            else:
                more = (options.kernels, offered.get(op.name), *key[2:])
                answer = cached[key] = _settled.answer(op, node.params, more, ask)
        choices[nid] = answer[0]
        if answer[1]:
            needs[nid] = answer[1]
    return choices, needs


def _choice(
    node: Node, facts: Facts, device_type: str, device_kind: str, options: PlanOptions
) -> tuple[KernelChoice, int]:
    """Choose the implementation of a node; return it with its scratch bytes."""
    op, params = node.op, node.params
    assert op is not None
    ins, outs = list(map(TensorSpec, *facts[:2])), list(map(TensorSpec, *facts[2:]))
    choice = implementations.choose(op, params, ins, outs, options.kernels, on=device_kind)
    if options.kernels == "auto" and device_kind == "host" and choice.several:
        choice = autotune.tuned(op, params, ins, outs, tune=options.autotune, heuristic=choice)
    with tiling.using(tiling.of(device_type)):
        nbytes = choice.implementation.workspace(params, ins, outs)
    if isinstance(nbytes, bool) or int(nbytes) != nbytes or nbytes < 0:
        raise PlanError(f"operator {op.name} ({node.name!r}) declares {nbytes!r} bytes of workspace: expected >= 0")
    return choice, aligned(int(nbytes))


CUBLAS = "cublas_workspaces"
"""Key of cuBLAS's workspaces in ``MemoryPlan.external_bytes``."""
_PREFIXES = ("_linalg_", "_contrib_interleaved_matmul", "_contrib_DeformableConvolution", "khatri_rao")


def library_bytes(network: Network, choices: Mapping[int, KernelChoice]) -> dict[str, int]:
    """Return the bytes of cuBLAS's workspaces by purpose: one per worker thread of each GPU that computes products.

    A worker has one cuBLAS handle and uses one stream at a time; the workspaces have a fixed size. Graphs on one GPU
    share them, but each plan counts them.
    """
    devices = {
        network.devices[nid]
        for nid, node in enumerate(network.graph.nodes)
        if node.op is not None
        and network.devices[nid].device_type == "gpu"
        and ((name := layer_of(node.op.backward_of or node.op.name)) in cost.COUNTED or name.startswith(_PREFIXES))
        and not (nid in choices and choices[nid].implementation.name == "cudnn")
    }
    if not devices:
        return {}
    workers = max(1, int(config.get("MXNET_GPU_WORKER_NTHREADS")))
    return {CUBLAS: len(devices) * workers * cublas.workspace_bytes()}
