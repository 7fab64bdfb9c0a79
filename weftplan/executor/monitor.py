"""Inspection of an executor: runs node by node with a monitor callback, and ``debug_str``.

A monitored run pushes the prepared steps of its executor one by one. Both the pushes and the callback run on the thread
that runs the executor.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from weftplan import config
from weftplan.errors import ConfigWarning, MXNetError, listed
from weftplan.executor.memory import RunState
from weftplan.executor.prepared_calls import PreparedStep
from weftplan.executor.segments import StepSegment
from weftplan.ndarray import NDArray
from weftplan.ops.core import registry
from weftplan.ops.core.floats import is_float
from weftplan.ops.core.schema import Op, Params
from weftplan.planner import PlannedGraph
from weftplan.planner.program import Graph
from weftplan.planner.symbolic.passes.pass_manager import hidden_members
from weftplan.symbol.json_io import debug_lines
from weftplan.symbol.node import Node

_NAMED = frozenset({
    "Dropout", "GridGenerator", "L2Normalization", "LRN", "LeakyReLU", "MakeLoss", "Pad", "Pooling", "SequenceLast",
    "SequenceMask", "SequenceReverse", "SliceChannel", "SwapAxis", "_contrib_BilinearResize2D",
    "_contrib_MultiBoxPrior", "_contrib_index_array", "_contrib_quadratic", "_contrib_quantize_v2", "_histogram",
    "_image_normalize", "_image_to_tensor", "_ravel_multi_index", "_split_v2", "_unravel_index", "col2im",
    "depth_to_space", "diag", "im2col", "log_softmax", "moments", "repeat", "reverse", "softmax", "space_to_depth",
    "squeeze", "tile",
})  # fmt: skip
"""Operators whose only input a monitor of MXNet 1.9.1 names ``data``; that of other operators it names ``input0``."""


def _input_names(op: Op, params: Params) -> tuple[str, ...]:
    """Return the names that MXNet's monitor gives to inputs; patterns of scripts match these names."""
    names = op.input_names(params)
    if op.backward_of is not None:
        return tuple(f"input{k}" for k in range(len(names)))
    return ("input0",) if names == ("data",) and op.name not in _NAMED else names


def _output_names(op: Op, params: Params) -> tuple[str, ...]:
    """Return the names that MXNet's monitor gives to outputs.

    A backward node of an operator with several inputs has the names ``output<k>``, where ``k`` numbers all forward
    inputs, also those without a gradient.
    """
    if op.backward_of is None or not registry.contains(op.backward_of):
        return op.output_names(params)
    try:
        several = len(registry.get(op.backward_of).input_names(params)) > 1
    except KeyError:  # its parameters are not those of the forward node
        several = False
    return tuple(f"output{k}" for k in op.gradient_inputs(params)) if several else op.output_names(params)


def warn_of_joined(nodes: Iterable[Node]) -> None:
    """Warn about fused nodes, whose outputs a monitor cannot show."""
    names = hidden_members(nodes)
    if names:
        warnings.warn(
            f"a monitor sees no outputs of {listed(names)}, each of which is computed in one pass with the node behind "
            f"it: set MXNET_USE_FUSION=0 before binding to see them",
            ConfigWarning,
            stacklevel=4,
        )


class Monitored:
    """A monitor, which pushes steps one by one and calls a function with the names and arrays of their outputs.

    The callback runs on the pushing thread, right after the push; reading the array waits for its value.
    """

    def __init__(self, callback: Callable[[str, NDArray], None], monitor_all: bool, graph: Graph) -> None:
        self._callback = callback
        self._graph = graph
        self._all = monitor_all

    def push(self, steps: Sequence[PreparedStep], run: RunState) -> None:
        """Push ``steps`` for one run, each between the callbacks for its inputs and its outputs."""
        graph = self._graph
        for step in steps:
            node = step.node
            assert node.op is not None
            if self._all:
                names = _input_names(node.op, node.params)
                for i, (eid, array) in enumerate(zip(graph.inputs[step.nid], step.inputs, strict=True)):
                    if array is None:
                        continue
                    maker = graph.entry_node[eid]
                    if graph.is_variable[maker]:
                        self._callback(graph.names[maker], array)
                    label = names[i] if i < len(names) else f"input{i}"
                    self._callback(f"{node.name}_{label}", array)
            StepSegment([step]).push(run)
            members = hidden_members([node])
            for k, (label, output) in enumerate(zip(_output_names(node.op, node.params), step.outputs, strict=True)):
                if output is not None:  # further outputs of a fused node are those of its first member
                    self._callback(f"{members[0] if k and members else node.name}_{label}", output)


def check_finite(name: str, array: NDArray) -> None:
    """Wait for an array and check that all elements are finite; the callback for ``FLAGS_check_nan_inf``.

    Raises:
        MXNetError: an element of a floating-point array is NaN or infinite; the message gives name, shape and count.
    """
    values = array.asnumpy()
    if not is_float(values.dtype):
        return
    wrong = int(values.size - np.isfinite(values).sum())
    if wrong:
        what = "NaN" if np.isnan(values).any() else "infinite"
        raise MXNetError(
            f"{name}: {wrong} of {values.size} elements are not finite ({what}) in the result of shape {values.shape}; "
            f"FLAGS_check_nan_inf is set"
        )


def checked(callback: Callable[[str, NDArray], None] | None) -> Callable[[str, NDArray], None] | None:
    """Return ``callback``, or, if ``FLAGS_check_nan_inf`` is set, a function that calls :func:`check_finite` first."""
    if not config.get("FLAGS_check_nan_inf"):
        return callback
    if callback is None:
        return check_finite

    def check_all(name: str, array: NDArray) -> None:
        check_finite(name, array)
        callback(name, array)

    return check_all


def debug_str(planned: PlannedGraph) -> str:
    """Return the outputs, nodes and passes of a graph, one on a line, and the total memory in MXNet's format.

    Each pass that ran is listed with its changes and its switch. ``Total <n> MB allocated`` is the peak of the plan in
    MiB, rounded down; the last line is a constant of MXNet.
    """
    graph = planned.graph

    def named(eid: int) -> str:
        maker = graph.entry_node[eid]
        return f"{graph.names[maker]}({eid - graph.row[maker]})"

    def read(nid: int) -> list[str]:
        """Return the inputs of a node as text: their names, and versions of variables."""
        versions = [
            f" version={graph.version(nid, slot)}" if graph.is_variable[graph.entry_node[eid]] else ""
            for slot, eid in enumerate(graph.inputs[nid])
        ]
        return [named(eid) + version for eid, version in zip(graph.inputs[nid], versions, strict=True)]

    heads = dict.fromkeys([*planned.outputs, *planned.gradients.values()])
    lines = ["Symbol Outputs:", *(f"\toutput[{i}]={named(eid)}" for i, eid in enumerate(heads))]
    for nid, node in enumerate(graph.nodes):
        lines += debug_lines(node, read(nid), [graph.names[dep] for dep in graph.controls[nid]])
        chosen = planned.kernels.get(nid)
        if chosen is not None and chosen.several:
            lines.append(f"Kernel: {chosen.text}")
    lines += [f"Pass: {note.text}" for note in planned.memory.passes]
    lines.append(f"Total {planned.memory.peak >> 20} MB allocated")
    lines.append("Total 11 TempSpace resource requested")
    return "\n".join(lines) + "\n"
