"""The description of a graph pass; :mod:`~weftplan.planner.symbolic.passes.pass_manager` lists all passes."""

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
"""Environment variable that disables all fusions."""
GRADIENTS, PLACED, SIZES = "gradients", "devices", "sizes"
"""Facts of a network: it has its gradients, every node has its device, all shapes and dtypes are known."""
FORWARD, BACKWARD = "forward nodes", "backward nodes"
"""Parts of a network: the nodes of its forward part and of its backward part, with their edges."""


@dataclass(frozen=True, kw_only=True)
class PassSettings:
    """The caller's arguments of :func:`weftplan.planner.symbolic.pipeline.size_symbol`."""

    options: PlanOptions
    context: Context
    shapes: Mapping[str, Shape] = field(default_factory=dict)
    dtypes: Mapping[str, Any] = field(default_factory=dict)
    grad_dtypes: Mapping[str, Any] = field(default_factory=dict)
    group2ctx: Mapping[str, Context] = field(default_factory=dict)
    variable_contexts: Mapping[str, Context] = field(default_factory=dict)
    rematerializes: bool = False
    """Whether the backward part recomputes the results of fused blocks from entries that their gradients keep alive."""

    def fuses(self) -> bool:
        """Return whether the options allow fusion."""
        return self.options.fusion and self.options.compat == "none"

    def fuses_on_gpus(self) -> bool:
        """Return whether fusion is allowed, a node may be on a GPU, and kernels are generated."""
        contexts = (self.context, *self.group2ctx.values(), *self.variable_contexts.values())
        kernels = self.options.kernels != "numpy" and "gpu" in [context.device_type for context in contexts]
        return kernels and self.fuses()

    def spreads(self) -> bool:
        """Return whether nodes may be on several devices."""
        return bool(self.group2ctx or self.variable_contexts)


@dataclass(frozen=True, kw_only=True)
class GraphPass:
    """One graph pass: the function and its declared preconditions and effects."""

    name: str
    """Description of its effect, shown in plans."""
    switch: str
    """Environment variable or argument that disables it."""
    run: Callable[[Network, PassSettings], tuple[Network, str]]
    """Function that returns the new network and a description of the changes; empty if nothing changed."""
    enabled: Callable[[PassSettings], bool] = lambda settings: True
    """Predicate: whether the pass runs under these settings."""
    needs: frozenset[str] = frozenset()
    """Facts that must be established before it runs."""
    gives: frozenset[str] = frozenset()
    """Facts that it establishes."""
    changes: frozenset[str] = frozenset()
    """Parts and facts that it may change in addition to :attr:`gives`; debug mode checks that all others are equal."""
    shown: bool = True
    """Whether plans show it; a pass of every plan is not shown."""
    fused: tuple[Op, ...] = ()
    """Operators of the fused forward nodes that it makes."""
    unfuse: Callable[[Node, Sequence[Entry]], list[Entry]] | None = None
    """Function from a fused node and its input entries to the entries of unfused nodes, one per visible output."""
    members: Callable[[Node], list[str]] = lambda node: []
    """Function that returns the names of a fused node's members whose outputs are not made."""


def changed_by_pass(old_network: Network, new_network: Network) -> set[str]:
    """Return the parts and facts in which two networks differ.

    Devices and sizes are compared for nodes that both networks have. Variables and outputs form a part of their own,
    which no pass may list in its ``changes``.
    """
    old, new = _parts(old_network), _parts(new_network)
    changed = {part for part in old if old[part] != new[part]}
    number_of = {node: nid for nid, node in enumerate(old_network.graph.nodes)}
    common = [(number_of[node], nid) for nid, node in enumerate(new_network.graph.nodes) if node in number_of]
    if any(old_network.devices[was] != new_network.devices[nid] for was, nid in common):
        changed.add(PLACED)
    if old_network.shapes and any(_sizes(old_network, was) != _sizes(new_network, nid) for was, nid in common):
        changed.add(SIZES)
    return changed


def _parts(network: Network) -> dict[str, object]:
    """Return comparable values of the parts and facts of a network."""
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
    """Return the shapes and dtypes of a node's outputs."""
    entries = slice(network.graph.row[nid], network.graph.row[nid + 1])
    return network.shapes[entries], network.dtypes[entries]
