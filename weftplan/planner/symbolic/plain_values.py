"""A planned graph as plain values, and back: numbers, texts, bytes, tuples, lists and dictionaries, as a file can hold.

Nodes of the symbol itself stand in it as their places in its depth-first order, so that whoever reads the values has
the nodes of a symbol of his own in it, and only what planning has added is made again. Operators are named; parameters
that nodes share, they share again; arrays are bytes. What is read is what was planned, to the last number.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from weftplan.device.context import Context
from weftplan.ops import implementations, registry
from weftplan.ops.chains import Chain, Link
from weftplan.ops.implementations import Choice, Implementation
from weftplan.ops.schema import Op, Req
from weftplan.planner.labels import Labels, Pass
from weftplan.planner.memory_plan import MemoryPlan
from weftplan.planner.options import PlanOptions
from weftplan.planner.symbolic.indexed_graph import IndexedGraph
from weftplan.planner.symbolic.pipeline import PlannedGraph
from weftplan.symbol.node import Entry, Node

_PLAIN = frozenset((bool, int, float, str, type(None)))
_OTHERWISE = frozenset(("options", "contexts", "labels", "passes", "again"))
"""Fields of a memory plan that have no plain value of their own."""


class NotPlainError(Exception):
    """Something has no plain form; the text says what."""


def described(nodes: Sequence[Node], entries: Sequence[Entry]) -> dict[str, Any]:
    """Everything that planning reads of a symbol whose depth-first order is ``nodes``: equal where the symbols are.

    Raises:
        NotPlainError: an operator or a parameter has no plain form.
    """
    tables = _Tables()
    number = {node: k for k, node in enumerate(nodes)}
    listed = [
        (
            None if node.op is None else tables.op(node.op),
            node.name,
            tables.params(node.params),
            list(node.attrs.items()),
            [(number[entry[0]], entry[1], entry[2]) for entry in node.inputs],
            [number[dep] for dep in node.control_deps],
            node.version,
        )
        for node in nodes
    ]
    return {**tables.plain(), "nodes": listed, "entries": [(number[entry[0]], entry[1]) for entry in entries]}


def flat(planned: PlannedGraph, *, nodes: Sequence[Node], options: PlanOptions) -> dict[str, Any]:
    """The plain values of a graph that was planned with ``options`` for a symbol, whose depth-first order is ``nodes``.

    Raises:
        NotPlainError: it holds something that has no plain form.
    """
    graph, memory, tables = planned.graph, planned.memory, _Tables()
    own = {node: k for k, node in enumerate(nodes)}
    lines = {node.created_at: k for k, node in enumerate(nodes)}
    nid = graph.nid

    def one(node: Node) -> Any:
        if node in own:
            return own[node]
        if node.mirror_of is not None and node.mirror_of not in nid:
            raise NotPlainError(f"node {node.name!r}")
        return (
            None if node.op is None else tables.op(node.op),
            node.name,
            list(node.attrs.items()),
            tables.params(node.params),
            [(nid[entry[0]], entry[1], entry[2]) for entry in node.inputs],
            [nid[dep] for dep in node.control_deps],
            lines.get(node.created_at),
            node.version,
        )

    chosen = {(id(choice), id(graph.nodes[k].op)): k for k, choice in planned.kernels.items()}

    def choice(at: int) -> Any:
        op, made, where = graph.nodes[at].op, planned.kernels[at], _where(planned.devices[at])
        assert op is not None
        if _implementation(op, where, made.implementation.name).kernel is not made.implementation.kernel:
            raise NotPlainError(f"implementation {made.implementation.name} of {op.name}")
        return tables.op(op), where, made.implementation.name, made.reason, made.several

    written = [one(node) for node in graph.nodes]
    arrays: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for field in fields(memory):
        value = getattr(memory, field.name)
        if isinstance(value, np.ndarray):
            arrays[field.name] = value.dtype.str, value.tobytes()
        elif field.name not in _OTHERWISE:
            others[field.name] = _checked(dict(value) if isinstance(value, Mapping) else value)
    changed = {field.name: getattr(memory.options, field.name) for field in fields(options)}
    found = {
        "nodes": written,
        "mirrors": [(k, nid[node.mirror_of]) for node, k in nid.items() if node.mirror_of is not None],
        "heads": [(graph.entry_node[e], e - graph.row[graph.entry_node[e]]) for e in graph.outputs],
        "order": planned.order,
        "num_forward_nodes": planned.num_forward_nodes,
        "shapes": _numbered(planned.shapes, _checked),
        "dtypes": _numbered(planned.dtypes, _dtype_name),
        "devices": _numbered(planned.devices, _context_name),
        "requests": bytes(planned.requests),
        "skipped": sorted(planned.skipped),
        "outputs": planned.outputs,
        "gradients": planned.gradients,
        "grad_req": {name: int(request) for name, request in planned.grad_req.items()},
        "head_grads": planned.head_grads,
        "arguments": planned.arguments,
        "aux": planned.aux,
        "kernels": (
            list(planned.kernels),
            _numbered([chosen[id(made), id(graph.nodes[k].op)] for k, made in planned.kernels.items()], choice),
        ),
        "arrays": arrays,
        "memory": others,
        "options": {name: value for name, value in changed.items() if value != getattr(options, name)},
        "contexts": [_context_name(context) for context in memory.contexts],
        "passes": [tuple(one) for one in memory.passes],
    }
    return {**tables.plain(), **found}


def restored(content: Mapping[str, Any], *, nodes: Sequence[Node], options: PlanOptions) -> PlannedGraph:
    """The planned graph whose plain values :func:`flat` made, of a symbol whose depth-first order is ``nodes``."""
    ops, params = _read_tables(content)
    made: list[Node] = []
    for given in content["nodes"]:
        if type(given) is int:
            made.append(nodes[given])
            continue
        op, name, attrs, place, inputs, controls, line, version = given
        node = Node(
            None if op is None else ops[op],
            name,
            attrs=dict(attrs),
            params=params[place],
            inputs=[Entry(made[maker], index, count) for maker, index, count in inputs],
            control_deps=[made[dep] for dep in controls],
            created_at=None if line is None else nodes[line].created_at,
        )
        node.version = version
        made.append(node)
    for nid, mirror in content["mirrors"]:
        made[nid].mirror_of = made[mirror]
    graph = IndexedGraph(
        [Entry(made[maker], index) for maker, index in content["heads"]],
        (made, {node: nid for nid, node in enumerate(made)}),
    )
    devices = _listed(content["devices"], lambda name: Context(*name))
    keys, numbers = content["kernels"]
    choices = _listed(
        numbers,
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


class _Tables:
    """Operators and parameters, each once, by number."""

    def __init__(self) -> None:
        self._ops: dict[str, int] = {}
        self._params: dict[int, int] = {}
        self._written: list[list[Any]] = []
        self._held: list[Mapping[str, Any]] = []  # so that no other dictionary gets the identity of one

    def plain(self) -> dict[str, Any]:
        """What :func:`_read_tables` reads."""
        return {"ops": list(self._ops), "params": self._written}

    def op(self, op: Op) -> int:
        """The number of an operator."""
        if op.name not in self._ops:
            if _op(op.name) is not op:
                raise NotPlainError(f"operator {op.name}")
            self._ops[op.name] = len(self._ops)
        return self._ops[op.name]

    def params(self, params: Mapping[str, Any]) -> int:
        """The number of the parameters of a node."""
        number = self._params.get(id(params))
        if number is None:
            values = [(name, self._value(value)) for name, value in params.items()]
            number = self._params[id(params)] = len(self._written)
            self._written.append(values)
            self._held.append(params)
        return number

    def _value(self, value: Any) -> Any:
        """A value; one that is not plain as a list that begins with its kind."""
        if type(value) is dict:
            return ["params", self.params(value)]
        if isinstance(value, np.dtype):
            return ["dtype", _dtype_name(value)]
        if type(value) is Chain:
            links = [(self.op(link.op), self.params(link.params), link.operands) for link in value.links]
            return ["chain", value.inputs, links]
        return _checked(value)


def _read_tables(content: Mapping[str, Any]) -> tuple[list[Op], list[dict[str, Any]]]:
    ops = [_op(name) for name in content["ops"]]
    params: list[dict[str, Any]] = []

    def value(given: Any) -> Any:
        if type(given) is not list:
            return given
        if given[0] == "params":
            return params[given[1]]
        if given[0] == "dtype":
            return np.dtype(given[1])
        return Chain(given[1], tuple(Link(ops[op], params[of], operands) for op, of, operands in given[2]))

    for values in content["params"]:
        params.append({name: value(given) for name, given in values})
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
        return tuple(map(_checked, value))
    if kind is dict:
        return {_checked(key): _checked(one) for key, one in value.items()}
    raise NotPlainError(f"{kind.__name__} {value!r:.100}")


def _dtype_name(dtype: np.dtype[Any]) -> str:
    name = dtype.str if dtype.isbuiltin == 1 else dtype.name
    if np.dtype(name) != dtype:
        raise NotPlainError(f"dtype {dtype}")
    return name


def _context_name(context: Context) -> tuple[str, int]:
    return context.device_type, context.device_id


def _numbered(values: Sequence[Hashable], plain: Callable[[Any], Any]) -> tuple[list[Any], list[int]]:
    """(each value once, the number of each)."""
    number = {value: k for k, value in enumerate(dict.fromkeys(values))}
    return [plain(value) for value in number], [number[value] for value in values]


def _listed(numbered: tuple[list[Any], list[int]], value: Callable[[Any], Any]) -> list[Any]:
    """What :func:`_numbered` was given."""
    table, numbers = [value(one) for one in numbered[0]], numbered[1]
    return [table[number] for number in numbers]
