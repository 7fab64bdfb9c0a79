"""Planned graphs as bytes that a file can hold, and back; and the dependencies of a plan, as plain values.

Nodes of the symbol itself stand in the bytes as their places in its depth-first order. So the reader gets the nodes of
its own symbol, and only nodes that planning has added are made again. Operators, implementations, devices and dtypes
are named. The bytes are a pickle, but the reader calls no function except those of this file. A graph that was read
equals the graph that was planned, to the last number.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import replace
from io import BytesIO
from typing import Any

import numpy as np

from weftplan.device.context import Context
from weftplan.ops.core import implementations, registry
from weftplan.ops.core.implementations import Choice, Implementation
from weftplan.ops.core.schema import Op, Req
from weftplan.planner.memory_plan import Labels, MemoryPlan, Pass
from weftplan.planner.options import PlanOptions
from weftplan.planner.symbolic.indexed_graph import IndexedGraph, works_of
from weftplan.planner.symbolic.pipeline import PlannedGraph
from weftplan.symbol.node import Entry, Node, Order

_PLAIN = frozenset((bool, int, float, str, type(None)))
_AS_THEY_ARE: frozenset[type[Any]] = frozenset((PlannedGraph, MemoryPlan, PlanOptions, Pass, Req))
"""Classes whose objects are stored by their fields."""


class NotPlainError(Exception):
    """An object cannot be stored; the text names it."""


def described(order: Order, entries: Sequence[Entry]) -> list[Any]:
    """Return everything that planning reads of a symbol in this depth-first order; equal symbols give equal values.

    Raises:
        NotPlainError: an operator or a parameter has no plain form.
    """
    nodes, number = order
    for op in {id(node.op): node.op for node in nodes}.values():
        if op is not None:
            _name_of(op)
    params = {id(node.params): node.params for node in nodes if node.params}
    place = {key: k for k, key in enumerate(params)}
    return [
        [None if node.op is None else node.op.name for node in nodes],
        [node.name for node in nodes],
        [node.attrs for node in nodes],
        [place.get(id(node.params)) for node in nodes],
        [node.version for node in nodes],
        [len(node.inputs) for node in nodes],
        [len(node.control_deps) for node in nodes],
        [number[dep] for node in nodes for dep in node.control_deps],
        [(number[entry[0]], entry[1], entry[2]) for node in nodes for entry in node.inputs],
        [(number[entry[0]], entry[1]) for entry in entries],
        list(map(_plain, params.values())),
    ]


def _plain(value: Any) -> Any:
    """Return a plain form of a parameter, which is equal for equal values alone."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is tuple:
        return value if _PLAIN.issuperset(map(type, value)) else tuple(map(_plain, value))
    if kind is dict:
        return ["params", *value, *map(_plain, value.values())]
    if isinstance(value, np.dtype):
        return ["dtype", _dtype_name(value)]
    raise NotPlainError(f"{kind.__name__} {value!r:.100}")


def dumped(planned: PlannedGraph, order: Order) -> bytes:
    """Return the bytes of a graph that was planned for a symbol in this depth-first order.

    Raises:
        NotPlainError: it holds something that cannot be stored.
    """
    kinds: dict[int, tuple[str, str, bool]] = {}
    for nid, choice in planned.kernels.items():
        if id(choice) not in kinds:
            op, name = planned.graph.nodes[nid].op, choice.implementation.name
            assert op is not None
            if _way(op, planned.devices[nid], name).kernel is not choice.implementation.kernel:
                raise NotPlainError(f"implementation {name} of {op.name}")
            kinds[id(choice)] = name, choice.reason, choice.several
    kernels = {nid: kinds[id(choice)] for nid, choice in planned.kernels.items()}
    left_out: dict[str, Any] = {"labels": None}  # they follow from the rest
    file = BytesIO()
    _Writer(file, order).dump((replace(planned, kernels={}, memory=replace(planned.memory, **left_out)), kernels))
    return file.getvalue()


def loaded(data: bytes, nodes: Sequence[Node]) -> PlannedGraph:
    """Return the graph that :func:`dumped` has written, for a symbol with these nodes in depth-first order."""
    planned: PlannedGraph
    planned, stored = _Reader(data, nodes).load()
    choices: dict[tuple[Any, ...], Choice] = {}
    kernels: dict[int, Choice] = {}
    for nid, kind in stored.items():
        op, device = planned.graph.nodes[nid].op, planned.devices[nid]
        assert op is not None
        key = (op.name, device, *kind)
        if key not in choices:
            name, reason, several = kind
            choices[key] = Choice(_way(op, device, name), reason=reason, several=several)
        kernels[nid] = choices[key]
    labels = Labels(
        planned.graph,
        planned.order,
        shapes=planned.shapes,
        dtypes=planned.dtypes,
        inplace=planned.memory.entry_inplace.tolist(),
        skipped=planned.skipped,
    )
    return replace(planned, kernels=kernels, memory=replace(planned.memory, labels=labels))


class _Writer(pickle.Pickler):
    """A pickler that names what a reader has already, and refuses all that it does not know."""

    def __init__(self, file: BytesIO, order: Order) -> None:
        super().__init__(file, protocol=4)
        nodes, self._own = order
        self._lines = {node.created_at: k for k, node in enumerate(nodes)}

    def reducer_override(self, thing: Any) -> Any:
        """Return how a thing is made again. Plain values and containers do not come here."""
        kind = type(thing)
        if kind is Node:
            if thing in self._own:
                return _own, (self._own[thing],)
            line = self._lines.get(thing.created_at)
            return _node, (thing.op, thing.name, thing.attrs, thing.params, thing.version, line, thing.mirror_of)
        if kind is Op:
            return _op, (_name_of(thing),)
        if isinstance(thing, np.ndarray):
            return _array, (thing.dtype.str, thing.tobytes())
        if isinstance(thing, np.dtype):
            return _dtype, (_dtype_name(thing),)
        if kind is Context:
            return _context, (thing.device_type, thing.device_id)
        if kind is IndexedGraph:
            return _graph, (thing.nodes, thing.inputs, thing.controls, thing.outputs)
        if kind in _AS_THEY_ARE or any(thing is known for known in _NAMED.values()):
            return NotImplemented
        raise NotPlainError(f"{kind.__name__} {thing!r:.100}")


class _Reader(pickle.Unpickler):
    """An unpickler that calls nothing but the functions below."""

    def __init__(self, data: bytes, nodes: Sequence[Node]) -> None:
        super().__init__(BytesIO(data))
        self._nodes = nodes

    def find_class(self, module: str, name: str) -> Any:
        """Return the class or the function of this name."""
        if name == "_own":
            return self._nodes.__getitem__
        if name == "_node":
            return self._made
        if name not in _NAMED:
            raise NotPlainError(f"{module}.{name}")
        return _NAMED[name]

    def _made(self, op: Op, name: str, attrs: Any, params: Any, version: int, line: int | None, of: Any) -> Node:
        at = None if line is None else self._nodes[line].created_at
        node = Node(op, name, attrs=attrs, params=params, created_at=at, mirror_of=of)
        node.version = version
        return node


def _own(place: int) -> Node:
    raise NotImplementedError(f"node {place} of the reader's symbol")


def _node(*fields: Any) -> Node:
    raise NotImplementedError(f"node {fields}, which planning has added")


def _op(name: str) -> Op:
    op = registry.find(name)
    if op is None:
        raise NotPlainError(f"operator {name}")
    return op


def _array(dtype: str, data: bytes) -> Any:
    return np.frombuffer(data, dtype)


def _dtype(name: str) -> Any:
    return np.dtype(name)


def _context(device_type: str, device_id: int) -> Context:
    return Context(device_type, device_id)


def _graph(nodes: list[Node], inputs: list[list[int]], controls: list[list[int]], heads: list[int]) -> IndexedGraph:
    works, counts = works_of(nodes)
    return IndexedGraph(nodes=nodes, works=works, inputs=inputs, controls=controls, counts=counts, heads=heads)


_KNOWN: list[Any] = [*_AS_THEY_ARE, _own, _node, _op, _array, _dtype, _context, _graph]
_NAMED: dict[str, Any] = {known.__name__: known for known in _KNOWN}
"""All that the bytes may refer to."""


def _name_of(op: Op) -> str:
    """Return the name of an operator; NotPlainError unless it is registered under that name."""
    if registry.find(op.name) is not op:
        raise NotPlainError(f"operator {op.name}")
    return op.name


def _dtype_name(dtype: np.dtype[Any]) -> str:
    name = dtype.str if dtype.isbuiltin == 1 else dtype.name
    if np.dtype(name) != dtype:
        raise NotPlainError(f"dtype {dtype}")
    return name


def _way(op: Op, device: Context, name: str) -> Implementation:
    """Return the implementation of an operator that is called ``name``; NumPy's where no other is."""
    way = implementations.provided("host" if device.is_host else device.device_type).get(op.name)
    while way is not None and way.name != name:
        way = way.otherwise
    return implementations.numpy_of(op) if way is None else way
