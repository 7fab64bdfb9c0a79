"""The record of a pass over the graph; the list in :mod:`weftplan.planner.symbolic.passes` holds all records."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from weftplan.device.context import Context
from weftplan.ops.core.schema import Op, Shape
from weftplan.planner.options import PlanOptions
from weftplan.planner.symbolic.network import Network
from weftplan.symbol.node import Entry, Node

FUSION = "MXNET_USE_FUSION"
"""The variable that switches all fusions off."""
GRADIENTS, PLACED, SIZES = "gradients", "devices", "sizes"
"""Facts of a network: it has its gradients, every node is on its device, all shapes and dtypes are known."""
FORWARD, BACKWARD = "forward nodes", "backward nodes"
"""Parts of a network: the nodes of its forward part with their edges, and the other nodes."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The requests of the caller, as :func:`weftplan.planner.symbolic.pipeline.size_symbol` takes it."""

    options: PlanOptions
    context: Context
    shapes: Mapping[str, Shape] = field(default_factory=dict)
    dtypes: Mapping[str, Any] = field(default_factory=dict)
    grad_dtypes: Mapping[str, Any] = field(default_factory=dict)
    group2ctx: Mapping[str, Context] = field(default_factory=dict)
    variable_contexts: Mapping[str, Context] = field(default_factory=dict)
    rematerializes: bool = False
    """Whether the backward part makes results of fused blocks again from entries that their gradients keep."""

    def fuses(self) -> bool:
        """Whether nodes may be fused at all."""
        return self.options.fusion and self.options.compat == "none"

    def fuses_on_gpus(self) -> bool:
        """Whether they may, a node may be on a GPU, and kernels are generated."""
        contexts = (self.context, *self.group2ctx.values(), *self.variable_contexts.values())
        kernels = self.options.kernels != "numpy" and "gpu" in [one.device_type for one in contexts]
        return kernels and self.fuses()

    def spreads(self) -> bool:
        """Whether nodes may be on several devices."""
        return bool(self.group2ctx or self.variable_contexts)


@dataclass(frozen=True, kw_only=True)
class GraphPass:
    """One pass: a function of a network, with all that the list of passes needs to know of it."""

    name: str
    """Its effect, as plans show it."""
    switch: str
    """The variable or argument that turns it off."""
    run: Callable[[Network, Settings], tuple[Network, str]]
    """Return the network after it, and its changes in words; empty if it found nothing to change."""
    enabled: Callable[[Settings], bool] = lambda settings: True
    """Whether the caller wants it."""
    needs: frozenset[str] = frozenset()
    """Facts that must be known before it runs."""
    gives: frozenset[str] = frozenset()
    """Facts that are known after it."""
    changes: frozenset[str] = frozenset()
    """Parts and facts that it may change besides what it gives; debug mode checks that all others stay."""
    shown: bool = True
    """Whether plans show it; a step that every plan has is not shown."""
    fused: tuple[Op, ...] = ()
    """Operators of the nodes that it makes of several forward nodes."""
    unfuse: Callable[[Node, Sequence[Entry]], list[Entry]] | None = None
    """Of such a node and the entries that it reads: the entries of the nodes that it stands for, one for each of its
    outputs that a user sees."""
    members: Callable[[Node], list[str]] = lambda node: []
    """Return the names of the nodes that such a node stands for and whose outputs are never made."""


def changed_by_pass(before: Network, after: Network) -> set[str]:
    """Return the parts and facts in which a network after a pass differs from the network before it.

    Devices and sizes are compared for nodes that both have. The caller's variables and outputs are a part that no
    record lists.
    """
    old, new = _parts(before), _parts(after)
    changed = {part for part in old if old[part] != new[part]}
    place = {node: nid for nid, node in enumerate(before.graph.nodes)}
    common = [(place[node], nid) for nid, node in enumerate(after.graph.nodes) if node in place]
    if any(before.devices[was] != after.devices[nid] for was, nid in common):
        changed.add(PLACED)
    if before.shapes and any(_sizes(before, was) != _sizes(after, nid) for was, nid in common):
        changed.add(SIZES)
    return changed


def _parts(network: Network) -> dict[str, object]:
    graph, cut = network.graph, network.num_forward
    variables = {name: nid >= 0 and graph.nodes[nid] for name, nid in (network.arguments | network.states).items()}
    return {
        FORWARD: (graph.nodes[:cut], graph.inputs[:cut], graph.controls[:cut]),
        BACKWARD: (graph.nodes[cut:], graph.inputs[cut:], graph.controls[cut:]),
        GRADIENTS: (network.wanted, len(network.gradients)),
        SIZES: bool(network.shapes),
        "variables": (variables, network.requests, network.num_outputs),
    }


def _sizes(network: Network, nid: int) -> tuple[Sequence[object], Sequence[object]]:
    entries = slice(network.graph.row[nid], network.graph.row[nid + 1])
    return network.shapes[entries], network.dtypes[entries]
