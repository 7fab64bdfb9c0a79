"""Checks of the graph and the program that a front end hands over; errors name the node or entry and the remedy.

Graphs that a rewrite derived from a checked graph are not checked again. No function keeps state. The arguments have no
types of their own, because ``program.py`` imports this module.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import chain
from math import inf
from numbers import Real
from operator import index
from typing import Any

from weftplan.errors import PlanError, listed

MAX_TOTAL = 1 << 62
"""Exclusive maximum of the bytes of all entries and scratch, so that no sum overflows 64 bits."""


def check_kinds(what: str, kind: type, **fields: object) -> None:
    """Check that fields are instances of ``kind``, so that the other checks can count and read them.

    Raises:
        PlanError: a field is of another type.
    """
    for name, value in fields.items():
        if not isinstance(value, kind):
            remedy = "; convert it with tolist()" if hasattr(value, "tolist") else ""
            raise PlanError(f"{what} {name}: expected {kind.__name__}, got {type(value).__name__} {value!r}{remedy}")


def check_items(what: str, values: Sequence[object], *, kind: type) -> None:
    """Check that all values are instances of ``kind``.

    Raises:
        PlanError: a value is of another type; names the first.
    """
    for found in set(map(type, values)):
        if not issubclass(found, kind):
            at = next(k for k, value in enumerate(values) if not isinstance(value, kind))
            raise PlanError(f"{what} {at}: expected {kind.__name__}, got {values[at]!r}")


def check_graph(graph: Any, *, counts: Sequence[int], heads: Sequence[int]) -> None:
    """Check the lengths of a graph's lists and that all numbers refer to its nodes and entries.

    Raises:
        PlanError: a list has the wrong length, or a number is no node or entry of the graph.
    """
    nodes = len(graph.works)
    for name, values in (
        ("names", graph.names),
        ("inputs", graph.inputs),
        ("controls", graph.controls),
        ("counts", counts),
        ("origin", graph.origin),
    ):
        if len(values) != nodes:
            raise PlanError(f"graph {name}: expected one item per node, that is {nodes}, got {len(values)}")
    _sizes("outputs of node", counts)
    entries = sum(counts)
    _within("head", heads, entries, "entries")
    _within("effect", graph.effects, nodes, "nodes")
    check_items("inputs of node", graph.inputs, kind=Sequence)
    check_items("control dependencies of node", graph.controls, kind=Sequence)
    # One pass over all numbers is enough if they are valid; the nodes are searched only for the message.
    every = list(chain.from_iterable(graph.inputs)), list(chain.from_iterable(graph.controls))
    if not (_are_within(every[0], entries) and _are_within(every[1], nodes)):
        for name, inputs, controls in zip(graph.names, graph.inputs, graph.controls, strict=True):
            _within(f"input of {name!r}", inputs, entries, "entries")
            _within(f"control dependency of {name!r}", controls, nodes, "nodes")
    for name, work, inputs, count in zip(graph.names, graph.works, graph.inputs, counts, strict=True):
        if work.is_sum and (len(inputs), count) != (2, 1):
            raise PlanError(
                f"a sum has two inputs and one output, but {name!r} has {len(inputs)} and {count}: leave is_sum out"
            )
        pairs = (*work.inplace, *work.over)
        if pairs or work.ignored or work.writes:
            slots = [*work.ignored, *work.writes, *[pair.input for pair in pairs]]
            if not _are_within(slots, len(inputs)):
                _within(f"input slot of the work of {name!r}", slots, len(inputs), "inputs")
            slots = [pair.output for pair in pairs]
            if not _are_within(slots, count):
                _within(f"output slot of the work of {name!r}", slots, count, "outputs")


def check_program(program: Any) -> None:
    """Check the sizes, the order and all numbers of a program.

    Raises:
        PlanError: a list has the wrong length, a size is no integer of 0 to 2**62 bytes, or a number is out of range.
    """
    graph = program.graph
    nodes, entries = graph.num_nodes, graph.num_entries
    for name, values, length, unit in (
        ("nbytes", program.nbytes, entries, "entry"),
        ("shapes", program.shapes or program.nbytes, entries, "entry"),
        ("dtypes", program.dtypes or program.nbytes, entries, "entry"),
        ("device", program.device, nodes, "node"),
    ):
        if len(values) != length:
            raise PlanError(f"program {name}: expected one item per {unit}, that is {length}, got {len(values)}")
    if bool(program.shapes) != bool(program.dtypes):
        raise PlanError("program shapes and dtypes: expected both or neither")
    _sizes("bytes of entry", program.nbytes)
    _within("device", program.device, len(program.contexts), "contexts")
    _within("node with a workspace", program.workspaces, nodes, "nodes")
    _sizes("bytes of workspace", list(program.workspaces.values()))
    total = sum(program.nbytes) + sum(program.workspaces.values())
    if total >= MAX_TOTAL:
        raise PlanError(f"the entries and workspaces have {total:,} bytes together; expected less than 2**62")
    _within("gradient", program.gradients, entries, "entries")
    _within("added gradient", program.added, entries, "entries")
    _within("held entry", program.held, entries, "entries")
    _within("node that holds an entry", program.held.values(), nodes, "nodes")
    _within("tangent", program.tangents, nodes, "nodes")
    operators = nodes - sum(graph.is_variable)
    _within("step", program.order, nodes, "nodes")
    if len(set(program.order)) != len(program.order) or any(map(graph.is_variable.__getitem__, program.order)):
        twice = sorted({n for n in program.order if graph.is_variable[n] or program.order.count(n) > 1})
        raise PlanError(
            f"order: expected each of {operators} operator nodes at most once and no variable; "
            f"wrong: {listed([graph.names[n] for n in twice])}"
        )
    if program.num_forward > len(program.order):
        raise PlanError(
            f"num_forward: expected at most the {len(program.order)} steps of the order, got {program.num_forward}"
        )
    position = {nid: step for step, nid in enumerate(program.order)}
    for e, nid in program.held.items():
        maker = graph.entry_node[e]
        if position.get(nid, -1) < (0 if graph.is_variable[maker] else position.get(maker, len(position))):
            raise PlanError(
                f"held entry {graph.entry_name(e)!r}: expected a step that does not run before the maker of the entry, "
                f"got {graph.names[nid]!r}"
            )


def _are_within(numbers: Collection[int], end: int) -> bool:
    """Return whether all numbers are integers from 0 to ``end - 1``."""
    try:
        kinds = set(map(type, numbers))
        are_integers = kinds <= {int} or _are_integers(kinds)
        return not numbers or (are_integers and index(min(numbers)) >= 0 and index(max(numbers)) < end)
    except TypeError:
        return False


def _are_integers(kinds: Iterable[type]) -> bool:
    return all(kind is not bool and (issubclass(kind, int) or hasattr(kind, "__index__")) for kind in kinds)


def _within(what: str, numbers: Collection[int], end: int, unit: str) -> None:
    if not _are_within(numbers, end):
        wrong = next(n for n in numbers if not _are_within([n], end))
        raise PlanError(f"{what}: expected a number below the {end} {unit}, from 0, got {wrong!r}")


def check_seconds(seconds: Sequence[float], *, nodes: int) -> None:
    """Check that each node has a finite, non-negative number of seconds.

    Raises:
        PlanError: there are more or fewer, or one is no such number.
    """
    if len(seconds) != nodes:
        raise PlanError(f"seconds: expected one number per node, that is {nodes}, got {len(seconds)}")
    for nid, value in enumerate(seconds):
        if not isinstance(value, Real) or not 0 <= value < inf:
            raise PlanError(f"seconds of node {nid}: expected a finite number from 0 on, got {value!r}")


def _sizes(what: str, values: Sequence[int]) -> None:
    if not _are_within(values, MAX_TOTAL):
        at = next(k for k, n in enumerate(values) if not _are_within([n], MAX_TOTAL))
        raise PlanError(f"{what} {at}: expected an integer from 0 to 2**62 - 1, got {values[at]!r}")
