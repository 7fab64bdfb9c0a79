"""Serialization of planned graphs, and a plain description of a symbol that serves as the key of a stored plan.

A node of the symbol is stored as its position in the depth-first order. So a loaded graph refers to the nodes of the
reader's symbol, and only nodes that planning added are created. Operators, implementations, devices and dtypes are
stored by name. The format is a pickle, but the reader calls only the functions of this module. A loaded graph equals
the planned graph exactly.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import replace
from io import BytesIO
from typing import Any

import numpy as np

from weftplan.device.context import Context
from weftplan.ops.core import implementations, registry
from weftplan.ops.core.implementations import Implementation, KernelChoice
from weftplan.ops.core.schema import Op, Req
from weftplan.planner.memory_plan import Labels, MemoryPlan, PassReport
from weftplan.planner.options import PlanOptions
from weftplan.planner.symbolic.indexed_graph import IndexedGraph, works_of
from weftplan.planner.symbolic.pipeline import PlannedGraph
from weftplan.support.array_types import DType, RawArray
from weftplan.symbol.node import Entry, Node, NodeParams, Order

_PLAIN = frozenset((bool, int, float, str, type(None)))
_AS_THEY_ARE: frozenset[type[Any]] = frozenset((PlannedGraph, MemoryPlan, PlanOptions, PassReport, Req))
"""Classes whose objects are pickled by their fields."""


class NotPlainError(Exception):
    """Raised if an object cannot be stored; the message names it."""


def described(order: Order, entries: Sequence[Entry]) -> list[object]:
    """Return a plain description of all facts of a symbol that planning uses; equal symbols have equal descriptions.

    Args:
        order: the depth-first order of the symbol.
        entries: its outputs.

    Raises:
        NotPlainError: an operator or a parameter has no plain form.
    """
    nodes, number = order
    for op in {id(node.op): node.op for node in nodes}.values():
        if op is not None:
            _name_of(op)
    params = {id(node.params): node.params for node in nodes if node.params}
    slot = {key: k for k, key in enumerate(params)}
    return [
        [None if node.op is None else node.op.name for node in nodes],
        [node.name for node in nodes],
        [node.attrs for node in nodes],
        [slot.get(id(node.params)) for node in nodes],
        [node.version for node in nodes],
        [len(node.inputs) for node in nodes],
        [len(node.control_deps) for node in nodes],
        [number[dep] for node in nodes for dep in node.control_deps],
        [(number[entry[0]], entry[1], entry[2]) for node in nodes for entry in node.inputs],
        [(number[entry[0]], entry[1]) for entry in entries],
        list(map(_plain, params.values())),
    ]


def _plain(value: object) -> object:
    """Return a plain form of a parameter; two forms are equal if and only if the values are.

    Raises:
        NotPlainError: the value has no plain form.
    """
    kind = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, tuple) and kind is tuple:
        return value if _PLAIN.issuperset(map(type, value)) else tuple(map(_plain, value))
    if isinstance(value, dict) and kind is dict:
        return ["params", *value, *map(_plain, value.values())]
    if isinstance(value, np.dtype):
        return ["dtype", _dtype_name(value)]
    raise NotPlainError(f"{kind.__name__} {value!r:.100}")


def dumped(planned: PlannedGraph, order: Order) -> bytes:
    """Serialize a graph that was planned for a symbol with this depth-first order.

    Raises:
        NotPlainError: the graph contains an object that cannot be stored.
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
    derived: dict[str, Any] = {"labels": None}  # the reader derives them from the other fields
    file = BytesIO()
    _Writer(file, order).dump((replace(planned, kernels={}, memory=replace(planned.memory, **derived)), kernels))
    return file.getvalue()


def loaded(data: bytes, nodes: Sequence[Node]) -> PlannedGraph:
    """Deserialize a graph of :func:`dumped` for a symbol with these nodes in depth-first order."""
    planned: PlannedGraph
    planned, stored = _Reader(data, nodes).load()
    choices: dict[tuple[Any, ...], KernelChoice] = {}
    kernels: dict[int, KernelChoice] = {}
    for nid, kind in stored.items():
        op, device = planned.graph.nodes[nid].op, planned.devices[nid]
        assert op is not None
        key = (op.name, device, *kind)
        if key not in choices:
            name, reason, several = kind
            choices[key] = KernelChoice(_way(op, device, name), reason=reason, several=several)
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
    """A pickler that stores operators, nodes and the like by reference and rejects objects of unknown classes."""

    def __init__(self, file: BytesIO, order: Order) -> None:
        super().__init__(file, protocol=4)
        nodes, self._own = order
        self._lines = {node.created_at: k for k, node in enumerate(nodes)}

    def reducer_override(self, value: object) -> tuple[Callable[..., object], tuple[object, ...]]:
        """Return the function and arguments that recreate an object. Pickle handles plain values and containers itself.

        Raises:
            NotPlainError: the class of the object is unknown.
        """
        kind = type(value)
        if isinstance(value, Node):
            if value in self._own:
                return _own, (self._own[value],)
            line = self._lines.get(value.created_at)
            return _node, (value.op, value.name, value.attrs, value.params, value.version, line, value.mirror_of)
        if isinstance(value, Op):
            return _op, (_name_of(value),)
        if isinstance(value, np.ndarray):
            return _array, (value.dtype.str, value.tobytes())
        if isinstance(value, np.dtype):
            return _dtype, (_dtype_name(value),)
        if isinstance(value, Context):
            return _context, (value.device_type, value.device_id)
        if isinstance(value, IndexedGraph):
            return _graph, (value.nodes, value.inputs, value.controls, value.outputs)
        if kind in _AS_THEY_ARE or any(value is function for function in _NAMED.values()):
            return NotImplemented  # type: ignore[no-any-return]
        raise NotPlainError(f"{kind.__name__} {value!r:.100}")


class _Reader(pickle.Unpickler):
    """An unpickler that calls only the functions below."""

    def __init__(self, data: bytes, nodes: Sequence[Node]) -> None:
        super().__init__(BytesIO(data))
        self._nodes = nodes

    def find_class(self, module: str, name: str) -> object:
        """Return the class or the function with this name.

        Raises:
            NotPlainError: the name is unknown.
        """
        if name == "_own":
            return self._nodes.__getitem__
        if name == "_node":
            return self._made
        if name not in _NAMED:
            raise NotPlainError(f"{module}.{name}")
        return _NAMED[name]

    def _made(
        self,
        op: Op,
        name: str,
        attrs: dict[str, str],
        params: NodeParams,
        version: int,
        line: int | None,
        of: Node | None,
    ) -> Node:
        at = None if line is None else self._nodes[line].created_at
        node = Node(op, name, attrs=attrs, params=params, created_at=at, mirror_of=of)
        node.version = version
        return node


def _own(number: int) -> Node:
    """Stand for a node of the symbol in stored bytes; the reader substitutes a function of its own."""
    raise NotImplementedError(f"node {number} of the reader's symbol")


def _node(*fields: object) -> Node:
    raise NotImplementedError(f"node {fields}, which planning has added")


def _op(name: str) -> Op:
    """Return a registered operator.

    Raises:
        NotPlainError: there is none of this name.
    """
    op = registry.find(name)
    if op is None:
        raise NotPlainError(f"operator {name}")
    return op


def _array(dtype: str, data: bytes) -> RawArray:
    return np.frombuffer(data, dtype)


def _dtype(name: str) -> DType:
    return np.dtype(name)


def _context(device_type: str, device_id: int) -> Context:
    """Return a device from its stored type and number."""
    return Context(device_type, device_id)


def _graph(nodes: list[Node], inputs: list[list[int]], controls: list[list[int]], heads: list[int]) -> IndexedGraph:
    """Return a graph from its stored parts; the memory effects are not stored, so the operators declare them."""
    works, counts = works_of(nodes)
    return IndexedGraph(nodes=nodes, works=works, inputs=inputs, controls=controls, counts=counts, heads=heads)


_KNOWN: list[Any] = [*_AS_THEY_ARE, _own, _node, _op, _array, _dtype, _context, _graph]
_NAMED: dict[str, Any] = {function.__name__: function for function in _KNOWN}
"""Classes and functions that stored bytes may refer to, by name."""


def _name_of(op: Op) -> str:
    """Return the name of an operator.

    Raises:
        NotPlainError: the operator is not registered under its name.
    """
    if registry.find(op.name) is not op:
        raise NotPlainError(f"operator {op.name}")
    return op.name


def _dtype_name(dtype: DType) -> str:
    name = dtype.str if dtype.isbuiltin == 1 else dtype.name
    if np.dtype(name) != dtype:
        raise NotPlainError(f"dtype {dtype}")
    return name


def _way(op: Op, device: Context, name: str) -> Implementation:
    """Return the implementation ``name`` of an operator on a device; NumPy's if there is none of this name."""
    implementation = implementations.provided("host" if device.is_host else device.device_type).get(op.name)
    while implementation is not None and implementation.name != name:
        implementation = implementation.otherwise
    return implementations.numpy_of(op) if implementation is None else implementation
