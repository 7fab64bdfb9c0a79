"""``Node`` and ``Entry``: the elements of a symbol's graph.

A node is an operator applied to entries, or a variable (``op`` None). Symbols share nodes. A node with users never
changes, except in the documented composing step; the planner may change nodes that it has made and not shared. Identity
is object identity.
"""

from __future__ import annotations

import os
import sys
import warnings
from typing import Any, NamedTuple

from weftplan.ops.core.schema import Op

FOLDED = "__folded__"
"""Attribute of a node that replaces other nodes, by folding or fusion: the names of those nodes."""


class Entry(NamedTuple):
    """Output ``index`` of ``node``; ``version`` counts mutations of a variable (third number in MXNet's JSON)."""

    node: Node
    index: int = 0  # type: ignore[assignment]  # shadows tuple.index on purpose
    version: int = 0


class Node:
    """An operator instance, or a variable if ``op`` is None."""

    __slots__ = ("attrs", "control_deps", "created_at", "inputs", "mirror_of", "name", "op", "params", "version")

    def __init__(
        self,
        op: Op | None,
        name: str,
        *,
        attrs: dict[str, str] | None = None,
        params: dict[str, Any] | None = None,
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

    def like(self, inputs: list[Entry], control_deps: list[Node], **changes: Any) -> Node:
        """Return a node of the same operator, name, attributes and line with other edges and these ``changes``."""
        same = {key: getattr(self, key) for key in ("attrs", "params", "created_at", "mirror_of")}
        node = Node(self.op, self.name, inputs=inputs, control_deps=control_deps, **{**same, **changes})
        node.version = self.version
        return node

    def __repr__(self) -> str:
        kind = "variable" if self.op is None else self.op.name
        return f"<Node {self.name!r}: {kind}>"


_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


def caller() -> str | None:
    """Return ``file:line`` of the innermost frame outside weftplan; None if there is none.

    This takes a fraction of a microsecond: it follows frames and reads no source.
    """
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith(_PACKAGE):
            return f"{code.co_filename}:{frame.f_lineno}"
        if frame.f_back is None:
            break
        frame = frame.f_back
    return None


def warn(message: str) -> None:
    """Issue a UserWarning at the line of the innermost caller outside this package."""
    frame, level = sys._getframe(1), 2  # warnings counts this function as 1
    while frame.f_code.co_filename.startswith(_PACKAGE) and frame.f_back is not None:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
