"""A planned graph as plain values, and back: numbers, texts, bytes, tuples, lists and dictionaries, as a file can hold.

Nodes of the symbol itself stand in it as their places in its depth-first order, so that whoever reads the values has
the nodes of a symbol of his own in it, and only what planning has added is made again. Operators are named; parameters
that nodes share, they share again; arrays are bytes. What is read is what was planned, to the last number.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import fields
from itertools import chain, islice
from typing import Any

import numpy as np

from weftplan.device.context import Context
from weftplan.ops.core import implementations, registry
from weftplan.ops.core.implementations import Choice, Implementation
from weftplan.ops.core.schema import Op, Req
from weftplan.planner.labels import Labels, Pass
from weftplan.planner.memory_plan import MemoryPlan
from weftplan.planner.options import PlanOptions
from weftplan.planner.symbolic.indexed_graph import IndexedGraph, works_of
from weftplan.planner.symbolic.pipeline import PlannedGraph
from weftplan.symbol.node import Entry, Node
from weftplan.symbol.traversal import Order

_PLAIN = frozenset((bool, int, float, str, type(None)))
_OTHERWISE = frozenset(("options", "contexts", "labels", "passes", "again"))
"""Fields of a memory plan that have no plain value of their own."""
_MEMORY = [field.name for field in fields(MemoryPlan) if field.name not in _OTHERWISE]
_OPTIONS = [field.name for field in fields(PlanOptions)]


class NotPlainError(Exception):
    """Something has no plain form; the text says what."""


def described(order: Order, entries: Sequence[Entry]) -> dict[str, Any]:
    """Everything that planning reads of a symbol whose depth-first order is ``order``: equal where the symbols are.

    Raises:
        NotPlainError: an operator or a parameter has no plain form.
    """
    nodes, number = order
    tables = _Tables()
    edges = [(number[entry[0]], entry[1], entry[2]) for node in nodes for entry in node.inputs]
    listed = [
        *_columns(nodes, tables),
        [len(node.inputs) for node in nodes],
        [len(node.control_deps) for node in nodes],
        [number[dep] for node in nodes for dep in node.control_deps],
    ]
    return {
        **tables.plain(),
        "nodes": listed,
        "edges": edges,
        "entries": [(number[entry[0]], entry[1]) for entry in entries],
    }


def flat(planned: PlannedGraph, *, order: Order, options: PlanOptions) -> dict[str, Any]:
    """The plain values of a graph that was planned with ``options`` for a symbol, whose depth-first order is ``order``.

    Raises:
        NotPlainError: it holds something that has no plain form.
    """
    graph, memory, tables = planned.graph, planned.memory, _Tables()
    nodes, own = order
    made = [node for node in graph.nodes if node not in own]
    number = {node: nid for nid, node in enumerate(graph.nodes)}
    mirrors = [(number[node], node.mirror_of) for node in made if node.mirror_of is not None]
    for nid, repeated in mirrors:
        if repeated not in number:
            raise NotPlainError(f"node {graph.names[nid]!r}")
    lines = {node.created_at: k for k, node in enumerate(nodes)}
    arrays: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for name in _MEMORY:
        value = getattr(memory, name)
        if isinstance(value, np.ndarray):
            arrays[name] = value.dtype.str, value.tobytes()
        else:
            others[name] = _checked(dict(value) if isinstance(value, Mapping) else value)
    changed = {name: getattr(memory.options, name) for name in _OPTIONS}
    found = {
        "own": [own.get(node, -1) for node in graph.nodes],
        "made": _columns(made, tables),
        "inputs": _flattened(graph.inputs),
        "controls": _flattened(graph.controls),
        "lines": [lines.get(node.created_at) for node in made],
        "mirrors": [(nid, number[repeated]) for nid, repeated in mirrors],
        "heads": graph.outputs,
        "order": planned.order,
        "num_forward_nodes": planned.num_forward_nodes,
        "shapes": _numbered(planned.shapes, _checked),
        "dtypes": _numbered(planned.dtypes, _dtype_name),
        "nbytes": list(planned.nbytes),
        "devices": _numbered(planned.devices, _context_name),
        "requests": bytes(planned.requests),
        "skipped": sorted(planned.skipped),
        "outputs": planned.outputs,
        "gradients": planned.gradients,
        "grad_req": {name: int(request) for name, request in planned.grad_req.items()},
        "head_grads": planned.head_grads,
        "arguments": planned.arguments,
        "aux": planned.aux,
        "kernels": _choices(planned, tables),
        "arrays": arrays,
        "memory": others,
        "options": {name: value for name, value in changed.items() if value != getattr(options, name)},
        "contexts": [_context_name(context) for context in memory.contexts],
        "passes": [tuple(one) for one in memory.passes],
    }
    return {**tables.plain(), **found}


def restored(content: Mapping[str, Any], *, nodes: Sequence[Node], options: PlanOptions) -> PlannedGraph:
    """The planned graph whose plain values :func:`flat` made, of a symbol whose depth-first ``nodes`` are these."""
    ops, params = _read_tables(content)
    new = zip(*content["made"], content["lines"], strict=True)
    made: list[Node] = []
    for own in content["own"]:
        if own >= 0:
            made.append(nodes[own])
            continue
        op, name, attrs, place, version, line = next(new)
        node = Node(
            None if op is None else ops[op],
            name,
            attrs=attrs,
            params=params[place],
            created_at=None if line is None else nodes[line].created_at,
        )
        node.version = version
        made.append(node)
    for nid, mirror in content["mirrors"]:
        made[nid].mirror_of = made[mirror]
    works, counts = works_of(made)
    graph = IndexedGraph(
        made,
        works=works,
        inputs=_nested(content["inputs"]),
        controls=_nested(content["controls"]),
        counts=counts,
        heads=content["heads"],
    )
    devices = _listed(content["devices"], lambda name: Context(*name))
    keys, *numbered = content["kernels"]
    choices = _listed(
        numbered,
        lambda one: Choice(_implementation(ops[one[0]], one[1], one[2]), reason=one[3], several=one[4]),
    )
    shapes = _listed(content["shapes"], tuple)
    dtypes = _listed(content["dtypes"], np.dtype)
    arrays: dict[str, Any] = {name: np.frombuffer(data, dtype) for name, (dtype, data) in content["arrays"].items()}
    skipped, order = frozenset(content["skipped"]), content["order"]
    inplace = arrays["entry_inplace"].tolist()
    memory = MemoryPlan(
        **arrays,
        **content["memory"],
        options=options.replace(**content["options"]),
        contexts=tuple(Context(*name) for name in content["contexts"]),
        labels=Labels(graph, order, shapes=shapes, dtypes=dtypes, inplace=inplace, skipped=skipped),
        passes=tuple(Pass(*one) for one in content["passes"]),
    )
    return PlannedGraph(
        graph=graph,
        order=order,
        num_forward_nodes=content["num_forward_nodes"],
        shapes=shapes,
        dtypes=dtypes,
        devices=devices,
        nbytes=content["nbytes"],
        requests=list(map(list(Req).__getitem__, content["requests"])),
        skipped=skipped,
        outputs=content["outputs"],
        gradients=content["gradients"],
        memory=memory,
        grad_req={name: Req(request) for name, request in content["grad_req"].items()},
        head_grads=content["head_grads"],
        arguments=content["arguments"],
        aux=content["aux"],
        kernels=dict(zip(keys, choices, strict=True)),
    )


def _columns(nodes: Sequence[Node], tables: _Tables) -> list[Sequence[Any]]:
    """What there is to say of nodes but for what they are connected to: a list for each fact."""
    return [
        [None if node.op is None else tables.op(node.op) for node in nodes],
        [node.name for node in nodes],
        [node.attrs for node in nodes],
        [tables.params(node.params) for node in nodes],
        [node.version for node in nodes],
    ]


def _flattened(lists: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
    """(the length of each list, all their numbers)."""
    return list(map(len, lists)), list(chain.from_iterable(lists))


def _nested(flat: tuple[Sequence[int], Sequence[int]]) -> list[list[int]]:
    """What :func:`_flattened` was given."""
    lengths, numbers = flat
    rest = iter(numbers)
    return [list(islice(rest, length)) for length in lengths]


def _choices(planned: PlannedGraph, tables: _Tables) -> tuple[list[int], list[Hashable], list[int]]:
    """(nodes, each choice once, the number of that of each node)."""
    nodes, devices = planned.graph.nodes, planned.devices
    known: dict[tuple[int, int, int], int] = {}
    number: dict[Hashable, int] = {}
    numbers: list[int] = []
    for nid, choice in planned.kernels.items():
        op, device = nodes[nid].op, devices[nid]
        key = id(choice), id(op), id(device)
        if key not in known:
            assert op is not None
            where, way = _where(device), choice.implementation
            if _implementation(op, where, way.name).kernel is not way.kernel:
                raise NotPlainError(f"implementation {way.name} of {op.name}")
            one = tables.op(op), where, way.name, choice.reason, choice.several
            known[key] = number.setdefault(one, len(number))
        numbers.append(known[key])
    return list(planned.kernels), list(number), numbers


class _Tables:
    """Operators and parameters, each once, by number."""

    def __init__(self) -> None:
        self._ops: dict[str, tuple[int, Op]] = {}
        self._params: dict[int, int] = {}
        self._written: list[Mapping[str, Any]] = [{}]  # of variables, which have none
        self._held: list[Mapping[str, Any]] = []  # so that no other dictionary gets the identity of one

    def plain(self) -> dict[str, Any]:
        """What :func:`_read_tables` reads."""
        return {"ops": list(self._ops), "params": self._written}

    def op(self, op: Op) -> int:
        """The number of an operator."""
        known = self._ops.get(op.name)
        if known is None:
            known = self._ops[op.name] = len(self._ops), _op(op.name)
        if known[1] is not op:
            raise NotPlainError(f"operator {op.name}")
        return known[0]

    def params(self, params: Mapping[str, Any]) -> int:
        """The number of the parameters of a node."""
        if not params:
            return 0
        number = self._params.get(id(params))
        if number is None:
            plain = {name: self._value(value) for name, value in params.items()}
            number = self._params[id(params)] = len(self._written)
            self._written.append(plain)
            self._held.append(params)
        return number

    def _value(self, value: Any) -> Any:
        """A value; one that is not plain as a list that begins with its kind."""
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind is dict:
            return ["params", self.params(value)]
        if isinstance(value, np.dtype):
            return ["dtype", _dtype_name(value)]
        return _checked(value)


def _read_tables(content: Mapping[str, Any]) -> tuple[list[Op], list[dict[str, Any]]]:
    ops = [_op(name) for name in content["ops"]]
    params: list[dict[str, Any]] = []

    def value(given: Any) -> Any:
        if type(given) is not list:
            return given
        if given[0] == "params":
            return params[given[1]]
        return np.dtype(given[1])

    for values in content["params"]:
        params.append({name: value(given) for name, given in values.items()})
    return ops, params


def _op(name: str) -> Op:
    """The operator of this name.

    Raises:
        NotPlainError: there is none.
    """
    found = registry.find(name)
    if found is None:
        raise NotPlainError(f"operator {name}")
    return found


def _where(context: Context) -> str:
    return "host" if context.is_host else context.device_type


def _implementation(op: Op, where: str, name: str) -> Implementation:
    """The implementation of an operator that is called ``name``; NumPy's where no other is."""
    found = implementations.provided(where).get(op.name)
    while found is not None and found.name != name:
        found = found.otherwise
    return implementations.numpy_of(op) if found is None else found


def _checked(value: Any) -> Any:
    """The value itself.

    Raises:
        NotPlainError: it is neither plain nor a tuple or dictionary of what is.
    """
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is tuple:
        return value if _PLAIN.issuperset(map(type, value)) else tuple(map(_checked, value))
    if kind is dict:
        return dict(zip(_checked(tuple(value)), _checked(tuple(value.values())), strict=True))
    raise NotPlainError(f"{kind.__name__} {value!r:.100}")


def _dtype_name(dtype: np.dtype[Any]) -> str:
    name = dtype.str if dtype.isbuiltin == 1 else dtype.name
    if np.dtype(name) != dtype:
        raise NotPlainError(f"dtype {dtype}")
    return name


def _context_name(context: Context) -> tuple[str, int]:
    return context.device_type, context.device_id


def _numbered(values: Sequence[Hashable], plain: Callable[[Any], Any]) -> tuple[list[Any], Sequence[int]]:
    """(each value once, the number of each)."""
    if values and values.count(values[0]) == len(values):  # without their hashes
        return [plain(values[0])], bytes(len(values))
    number: dict[Hashable, int] = {}
    numbers = [number.setdefault(value, len(number)) for value in values]
    return [plain(value) for value in number], bytes(numbers) if len(number) <= 256 else numbers


def _listed(numbered: Iterable[Any], value: Callable[[Any], Any]) -> list[Any]:
    """What :func:`_numbered` was given."""
    table, numbers = numbered
    made = [value(one) for one in table]
    return [made[number] for number in numbers]
