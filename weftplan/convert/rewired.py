"""Nodes that replace others in a rewritten symbol; a dictionary *moved* leads from a replaced node to its successor.

The module is stateless and changes no node.
"""

from __future__ import annotations

from collections.abc import Mapping

from weftplan.symbol.node import Entry, Node


def followed(entry: Entry, moved: Mapping[Node, Node]) -> Entry:
    """Return the same output of the node that replaces the entry's node."""
    node = moved.get(entry.node)
    return entry if node is None else entry._replace(node=node)


def rewired(node: Node, inputs: list[Entry], moved: Mapping[Node, Node]) -> Node:
    """Return ``node`` with these inputs and with replaced control dependencies; itself if it has these already."""
    controls = [moved.get(dep, dep) for dep in node.control_deps]
    if inputs == node.inputs and controls == node.control_deps:
        return node
    origin = node.mirror_of
    return node.like(inputs, controls, mirror_of=None if origin is None else moved.get(origin, origin))
