"""``Node`` and ``Entry``: the elements of a symbol's graph.

A node is an operator applied to entries, or a variable (``op`` None). Symbols share nodes. A node with users never
changes, except in the documented composing step; the planner may change nodes that it has made and not shared. Identity
is object identity.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from weftplan.ops.core.schema import Op

FOLDED = "__folded__"
"""Attribute of a node that replaces other nodes, by folding or fusion: the names of those nodes."""


NodeParams: TypeAlias = dict[str, Any]
"""Parsed parameters of an operator, by name; each has the type that the operator declares."""


class Entry(NamedTuple):
    """Output ``index`` of ``node``; ``version`` counts mutations of a variable (third number in MXNet's JSON)."""

    node: Node
    index: int = 0  # type: ignore[assignment]  # shadows tuple.index on purpose
    version: int = 0


entry_of: Callable[[tuple[Node, int, int]], Entry] = partial(tuple.__new__, Entry)
"""Make an entry from a tuple of its three fields, in half the time of the constructor; passes make one per edge."""


class Node:
    """An operator instance, or a variable if ``op`` is None."""

    __slots__ = ("attrs", "control_deps", "created_at", "inputs", "mirror_of", "name", "op", "params", "version")

    def __init__(
        self,
        op: Op | None,
        name: str,
        *,
        attrs: dict[str, str] | None = None,
        params: NodeParams | None = None,
        inputs: list[Entry] | None = None,
        control_deps: list[Node] | None = None,
        created_at: str | None = None,
        mirror_of: Node | None = None,
    ) -> None:
        self.op = op
        self.name = name
        self.attrs = {} if attrs is None else attrs
        """User-visible attributes, all strings: parameters as given, ``__key__`` attributes, and so on."""
        self.params = {} if params is None else params
        """Parsed parameters (``ops.registry.parse_params``), all declared names present; empty for a variable."""
        self.inputs = [] if inputs is None else inputs
        self.control_deps = [] if control_deps is None else control_deps
        """Nodes that must run before this node; for a gradient node, item 0 is its forward node."""
        self.created_at = created_at
        """``file:line`` of the user's code that made the node, for error messages."""
        self.mirror_of = mirror_of
        """For a recomputed node: the forward node that it repeats."""
        self.version = 0
        """For a variable: how many operator nodes write to it so far (see :attr:`Entry.version`)."""

    @property
    def is_variable(self) -> bool:
        """True for a variable."""
        return self.op is None

    @property
    def num_outputs(self) -> int:
        """Number of outputs, including hidden outputs; 1 for a variable."""
        return 1 if self.op is None else self.op.num_outputs(self.params)

    @property
    def num_visible_outputs(self) -> int:
        """Number of outputs that a user sees."""
        return 1 if self.op is None else self.op.num_visible_outputs(self.params)

    def __repr__(self) -> str:
        kind = "variable" if self.op is None else self.op.name
        return f"<Node {self.name!r}: {kind}>"
