"""``Node`` and ``Entry``, the elements of a symbol's graph; its canonical order, copies, and the line that made a node.

A node is an operator applied to entries, or a variable (``op`` None). Symbols share nodes. A node with users never
changes, except in the documented composing step; the planner may change nodes that it has made and not shared. Identity
is object identity.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

from weftplan.errors import FormatError, MXNetError
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


class Node:
    """An operator instance, or a variable if ``op`` is None."""

    __slots__ = (
        "attrs", "control_deps", "created_at", "ignoring_shown", "inputs", "mirror_of", "name", "op", "params",
        "version",
    )  # fmt: skip

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
        self.ignoring_shown = False
        """Whether a warning about ignored attributes has named this node."""
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
        """Return a node of the same operator, name, attributes and line with other edges.

        Args:
            inputs: entries that the new node reads.
            control_deps: nodes that it runs after.
            changes: attributes of the new node that differ, by name.
        """
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


def warn_of_ignored(nodes: Iterable[Node]) -> None:
    """Warn once of all attributes that the operators of a network ignore; later binds of these nodes do not warn."""
    ignored = {}
    for node in nodes:
        if node.attrs and node.op is not None and not node.ignoring_shown:
            keys = node.op.ignored_keys(node.attrs)
            if keys:
                node.ignoring_shown = True
                ignored[f"{node.op.name} {node.name!r}"] = keys
    if ignored:
        shown = "; ".join(f"{name}: {', '.join(keys)}" for name, keys in ignored.items())
        warn(f"attributes without an effect, which MXNet ignores, too: {shown}")


Order = tuple[list[Node], dict[Node, int]]
"""Nodes in topological order, and the position of each."""


def topological_order(entries: Iterable[Entry]) -> list[Node]:
    """Return the order of :func:`depth_first_order`, without the positions.

    Raises:
        FormatError: the graph has a cycle.

    >>> a = Node(None, "a")
    >>> [node.name for node in topological_order([Entry(Node(None, "b")), Entry(a), Entry(a)])]
    ['b', 'a']
    """
    return depth_first_order(entry[0] for entry in entries)[0]


def depth_first_order(heads: Iterable[Node], error: type[MXNetError] = FormatError) -> Order:
    """Return all nodes reachable from ``heads`` with their positions, in MXNet's depth-first post-order.

    Heads are visited in their order; a node's inputs in order, then its control dependencies.

    Raises:
        FormatError: the nodes form a cycle; the message names the nodes on it. ``error`` is raised in its place.
    """
    order: list[Node] = []
    state: dict[Node, int] = {}  # -1 while a node is on the path from a head, else its position in `order`
    stack: list[Node] = []
    seen = state.get
    for head in heads:
        if head in state:
            continue
        stack.append(head)
        while stack:
            node = stack[-1]
            visited = seen(node)
            if visited is None:
                if not node.inputs and not node.control_deps:
                    stack.pop()
                    state[node] = len(order)
                    order.append(node)
                    continue
                state[node] = -1
                # Reversed, so that the first input is on top of the stack and numbered first.
                for dep in reversed(node.control_deps):
                    mark = seen(dep)
                    if mark is None:
                        stack.append(dep)
                    elif mark < 0:
                        raise error(_cycle(stack, state, dep))
                for entry in reversed(node.inputs):
                    dep = entry[0]
                    mark = seen(dep)
                    if mark is None:
                        stack.append(dep)
                    elif mark < 0:
                        raise error(_cycle(stack, state, dep))
            else:
                stack.pop()
                if visited < 0:
                    state[node] = len(order)
                    order.append(node)
    return order, state


def split_variables(order: Iterable[Node]) -> tuple[list[Node], list[Node]]:
    """Return (arguments, auxiliary states) in ``order``: a state is a variable that some operator writes to."""
    written: set[Node] = set()
    variables: list[Node] = []
    for node in order:
        if node.op is None:
            variables.append(node)
        elif node.op.aux:
            written.update(node.inputs[i].node for i in node.op.mutated(node.params))
    return [node for node in variables if node not in written], [node for node in variables if node in written]


def copy_graph(entries: Iterable[Entry], replace: dict[Node, Entry] | None = None) -> list[Entry]:
    """Copy all nodes reachable from ``entries``; return the entries of the copy.

    ``replace`` maps variables to entries of other graphs, which replace them and are not copied.
    """
    heads = list(entries)
    substitute = {} if replace is None else replace
    twins: dict[Node, Node] = {}

    def moved(entry: Entry) -> Entry:
        replacement = substitute.get(entry.node)
        return Entry(twins[entry.node], entry.index, entry.version) if replacement is None else replacement

    for node in topological_order(heads):
        if node in substitute:
            continue
        controls = [twins[dep] for dep in node.control_deps if dep in twins]
        origin = None if node.mirror_of is None else twins.get(node.mirror_of)
        twins[node] = node.like(list(map(moved, node.inputs)), controls, attrs=dict(node.attrs), mirror_of=origin)
    return [moved(entry) for entry in heads]


def _cycle(stack: Sequence[Node], state: dict[Node, int], start: Node) -> str:
    """Format the message for an edge back to ``start``, which is still on the path."""
    path = [node for node in stack if state.get(node) == -1]
    names: list[str] = []
    for node in path[path.index(start) :]:
        if not names or names[-1] != node.name:
            names.append(node.name)
    shown = " <- ".join(map(repr, names[:8])) + (" <- ..." if len(names) > 8 else "")
    return f"the graph has a cycle: {shown} <- {start.name!r}; a node cannot need its own result"
