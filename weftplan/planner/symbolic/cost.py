"""The costs of nodes: their implementations, the scratch that these declare, and seconds, modelled or measured.

Implementations are those of :mod:`weftplan.ops.core.implementations`; the executor obeys what is chosen here.

The model is a roofline: a node takes as long as its arithmetic or its memory traffic, whichever is longer, plus a fixed
cost of being called. Only ratios matter to the search (which results are cheap to repeat, and how long that takes in a
step), so two rough machines are enough: a few host cores under NumPy, and a current accelerator.

What an operator computes is counted in :mod:`weftplan.ops.core.cost`; pooling also sweeps its output once for every
element of its window.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

from weftplan import config
from weftplan.device import cublas
from weftplan.device.context import Context
from weftplan.errors import PlanError
from weftplan.ops import autotune
from weftplan.ops.core import cost, implementations, tiling
from weftplan.ops.core.cuda_tuning import planned_for
from weftplan.ops.core.implementations import Choice
from weftplan.ops.core.rule_cache import Settled
from weftplan.ops.core.schema import DType, Req, Shape, TensorSpec, aligned
from weftplan.ops.fusion.relu import layer_of
from weftplan.planner.drafts import PlannedSteps
from weftplan.planner.options import PlanOptions
from weftplan.planner.program import Program
from weftplan.planner.symbolic.indexed_graph import IndexedGraph
from weftplan.planner.symbolic.network import Network
from weftplan.symbol.node import Node

Facts = tuple[list[Shape], list[DType], list[Shape], list[DType]]
"""Shapes and dtypes of inputs, then of outputs."""
_settled = Settled[tuple[Choice, int]]()


def operator_choices(
    graph: IndexedGraph, *, shapes: list[Shape], dtypes: list[DType], devices: Sequence[Context], options: PlanOptions
) -> tuple[dict[int, Choice], dict[int, int]]:
    """Which implementation computes each node that has several or declares scratch, and the bytes of scratch of those
    that need some, both by node id.

    Raises:
        PlanError: an operator declares a negative number of bytes or none at all.
    """
    choices: dict[int, Choice] = {}
    needs: dict[int, int] = {}
    # Repeated layers ask once: the parser gives equal parameters one dictionary.
    known: dict[tuple[object, ...], tuple[Choice, int]] = {}
    row, inputs = graph.row, graph.inputs
    where, offered = "", implementations.provided("")
    last: Context | None = None
    for nid, node in enumerate(graph.nodes):
        op = node.op
        if op is None:
            continue
        if devices[nid] is not last:
            last = devices[nid]
            where = "host" if last.is_host else last.device_type
            offered = implementations.provided(where)
        if op.workspace is None and op.name not in offered:
            continue
        assert last is not None
        start, end, reads = row[nid], row[nid + 1], inputs[nid]
        ins = list(map(shapes.__getitem__, reads)), list(map(dtypes.__getitem__, reads))
        facts = *ins, shapes[start:end], dtypes[start:end]
        gpu = last.device_id if where == "gpu" else None
        key = (id(op), id(node.params), last.device_type, gpu, *facts[0], *facts[1], *facts[2], *facts[3])
        answer = known.get(key)
        if answer is None:
            ask = partial(_choice, node, facts, last.device_type, where, options)
            if gpu is not None:
                with planned_for(gpu):
                    answer = known[key] = ask()
            elif where != "host" or options.autotune or node.params.get("cudnn_tune"):  # may be measured again
                answer = known[key] = ask()
            else:
                more = (options.kernels, offered.get(op.name), *key[2:])
                answer = known[key] = _settled.answer(op, node.params, more, ask)
        choices[nid] = answer[0]
        if answer[1]:
            needs[nid] = answer[1]
    return choices, needs


def _choice(node: Node, facts: Facts, device_type: str, where: str, options: PlanOptions) -> tuple[Choice, int]:
    """Which implementation computes a call, and its bytes of scratch."""
    op, params = node.op, node.params
    assert op is not None
    ins, outs = list(map(TensorSpec, *facts[:2])), list(map(TensorSpec, *facts[2:]))
    choice = implementations.choose(op, params, ins, outs, options.kernels, on=where)
    if options.kernels == "auto" and where == "host" and choice.several:
        choice = autotune.tuned(op, params, ins, outs, tune=options.autotune, given=choice)
    with tiling.using(tiling.of(device_type)):
        nbytes = choice.implementation.workspace(params, ins, outs)
    if isinstance(nbytes, bool) or int(nbytes) != nbytes or nbytes < 0:
        raise PlanError(f"operator {op.name} ({node.name!r}) declares {nbytes!r} bytes of workspace: expected >= 0")
    return choice, aligned(int(nbytes))


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
        and ((name := layer_of(node.op.backward_of or node.op.name)) in cost.COUNTED or name.startswith(_PREFIXES))
        and not (nid in choices and choices[nid].implementation.name == "cudnn")
    }
    if not devices:
        return {}
    workers = max(1, int(config.get("MXNET_GPU_WORKER_NTHREADS")))
    return {CUBLAS: len(devices) * workers * cublas.workspace_bytes()}


@dataclass(frozen=True, slots=True)
class Machine:
    """Constants of the roofline."""

    flops: float
    """Arithmetic operations per second of a matrix product of float32."""
    bandwidth: float
    """Bytes moved per second."""
    call: float
    """Seconds that every node takes whatever its size."""


HOST = Machine(flops=3.0e10, bandwidth=1.0e10, call=2.0e-6)
"""Two cores under NumPy. Kernels measured there, next to other work: convolutions 1e10 to 2e10 operations per second,
batch norm 0.9e10 to 1.2e10 bytes per second, activations 2e10; a quiet machine is faster at the products."""
ACCELERATOR = Machine(flops=3.0e13, bandwidth=2.0e12, call=5.0e-6)
"""A data-centre card without reduced precision: taken from data sheets, at about half of their figures."""


def _machine(context: Context) -> Machine:
    """That of a device; a simulated one stands for an accelerator."""
    return ACCELERATOR if context.has_streams else HOST


def node_seconds(program: Program, measured: Mapping[str, float] | None = None) -> list[float]:
    """Seconds of every node of a graph (0 for variables): ``measured`` by node name, or else modelled.

    A twin costs what its original costs.

    Raises:
        PlanError: a measured time is negative or not a number.
    """
    measured = measured or {}
    for name, value in measured.items():
        if not value >= 0.0:
            raise PlanError(f"measured time of {name!r} must be a number of seconds >= 0, got {value!r}")
    graph, row = program.graph, program.graph.row
    machines = [_machine(context) for context in program.contexts]
    result: list[float] = []
    base = graph.base or graph
    assert isinstance(base, IndexedGraph)
    for nid, origin in enumerate(graph.origin):
        # A node that a rewrite has added copies a result: it has a name of its own, and costs its traffic.
        node = base.nodes[origin] if origin >= 0 else None
        if graph.is_variable[nid]:
            result.append(0.0)
            continue
        known = measured.get(graph.names[nid] if node is None else (node.mirror_of or node).name)
        if known is not None:
            result.append(float(known))
            continue
        outs = range(row[nid], row[nid + 1])
        wanted = [program.refs[e] > 0 for e in outs]
        result.append(
            _modelled(
                machines[program.device[nid]], node, program.shapes, program.nbytes, inputs=graph.inputs[nid],
                reads=program.reads[nid], outs=outs, wanted=wanted,
            )
        )  # fmt: skip
    return result


def seconds_of(planned: PlannedSteps, nid: int) -> float:
    """Modelled seconds of one node of a planned graph, without what its device takes to be called."""
    graph = planned.graph
    assert isinstance(graph, IndexedGraph)
    node = graph.nodes[nid]
    assert node.op is not None
    outs = range(graph.row[nid], graph.row[nid + 1])
    ignored = set(node.op.ignored(node.params))
    reads = [e for k, e in enumerate(graph.inputs[nid]) if k not in ignored]
    nbytes = {e: prod(planned.shapes[e]) * planned.dtypes[e].itemsize for e in (*graph.inputs[nid], *outs)}
    machine = _machine(planned.devices[nid])
    wanted = [planned.requests[e] != Req.NULL for e in outs]
    return (
        _modelled(
            machine, node, planned.shapes, nbytes, inputs=graph.inputs[nid], reads=reads, outs=outs, wanted=wanted
        )
        - machine.call
    )


def _modelled(
    machine: Machine,
    node: Node | None,
    shapes: Sequence[Shape],
    nbytes: Sequence[int] | Mapping[int, int],
    *,
    inputs: Sequence[int],
    reads: Sequence[int],
    outs: Sequence[int],
    wanted: Sequence[bool],
) -> float:
    """Seconds of a node on a machine; of its entries ``inputs``, those that it ``reads``, and its outputs ``outs``."""
    traffic: float = sum(nbytes[e] for e in reads) + sum(
        nbytes[e] for e, kept in zip(outs, wanted, strict=True) if kept
    )
    arithmetic = 0.0
    if node is not None and node.op is not None:
        name = layer_of(node.op.backward_of or node.op.name)
        traffic *= cost.SWEEPS.get(name, 1.0)
        if name == "Pooling":
            # Of both sides the smaller has one element per window.
            pooled = min(nbytes[e] for e in (*inputs, *outs))
            traffic += 2.0 * cost.window(node.params) * pooled
        if name in cost.COUNTED:
            arithmetic = cost.operations(
                name,
                [shapes[e] for e in inputs],
                [shapes[e] for e in outs],
                is_backward=node.op.backward_of is not None,
                wanted=wanted,
            )
    return machine.call + max(arithmetic / machine.flops, traffic / machine.bandwidth)
