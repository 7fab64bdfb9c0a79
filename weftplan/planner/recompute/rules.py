"""MXNet's predicates: which forward nodes its mirroring repeats, by operator name and attributes alone.

The predicates look at nodes only; a tape says which of them can be repeated at all. Nothing is kept; any thread may
call them.
"""

from __future__ import annotations

from collections.abc import Iterable

from weftplan.errors import PlanError
from weftplan.planner.recompute.tape import Tape
from weftplan.symbol.node import Node

FORCE = "__force_mirroring__"
NEVER_V1 = frozenset(("Convolution", "FullyConnected", "Concat", "SoftmaxOutput"))
NEVER_ECHO = NEVER_V1 | {"Embedding"}
TRUE, FALSE = frozenset(("1", "true")), frozenset(("0", "false", ""))


def forced(node: Node) -> bool | None:
    """The value of the attribute ``__force_mirroring__`` (or the older ``force_mirroring``), None without one.

    Raises:
        PlanError: the value is no boolean.
    """
    text = node.attrs.get(FORCE, node.attrs.get("force_mirroring"))
    if text is None:
        return None
    word = str(text).strip().lower()
    if word in TRUE or word in FALSE:
        return word in TRUE
    raise PlanError(f"attribute {FORCE} of {node.name!r} must be one of 0, 1, true, false; got {text!r}")


def mirrors_v1(node: Node, *, everywhere: bool = True) -> bool:
    """MXNet 1.x's rule. ``everywhere`` is MXNET_BACKWARD_DO_MIRROR; without it only forced nodes are repeated."""
    if node.op is None or node.op.name == "Dropout":
        return False
    if forced(node):
        return True
    return everywhere and node.op.name not in NEVER_V1


def mirrors_echo(node: Node) -> bool:
    """The rule of MXNet's echo pass, where the attribute decides either way."""
    if node.op is None or node.op.name == "Dropout":
        return False
    force = forced(node)
    return node.op.name not in NEVER_ECHO if force is None else force


def chosen_v1(tape: Tape, *, everywhere: bool = True) -> frozenset[int]:
    """The nodes that MXNet 1.x's rule repeats."""
    nodes = tape.facts.graph.nodes
    return frozenset(nid for nid in tape.repeatable if mirrors_v1(nodes[nid], everywhere=everywhere))


def has_forced(nodes: Iterable[Node]) -> bool:
    """Whether some operator node asks to be repeated by its attribute."""
    return any(node.op is not None and node.attrs and bool(forced(node)) for node in nodes)
