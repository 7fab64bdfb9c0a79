"""Reverse mode on graphs: adds the nodes that compute gradients of outputs with respect to variables.

Shapes are not needed: zeros are made by operators that take their shape from another entry.

A gradient that is zero is represented by absence: a rule returns None for it, an entry without a gradient has
no terms. Zeros are only made if a rule asks for an outgoing gradient that has none, or for a wanted variable.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from weftplan.errors import PlanError
from weftplan.ops.core import registry
from weftplan.ops.core.schema import EntryRef, Op, Params, Req
from weftplan.planner.program import Work
from weftplan.planner.symbolic.indexed_graph import work_of
from weftplan.planner.symbolic.network import Edit, Network
from weftplan.planner.symbolic.passes.graph_pass import BACKWARD, GRADIENTS, GraphPass, Settings
from weftplan.support.post_order import deepest_first
from weftplan.symbol.attribute import INHERITED
from weftplan.symbol.node import Node

ZERO_OPS = frozenset(("zeros_like", "_zeros", "_zeros_without_dtype"))
_INHERITED = frozenset(INHERITED)


def add_gradients(network: Network, settings: Settings) -> tuple[Network, str]:
    """Add the gradients that the caller wants.

    Raises:
        PlanError: an operator on the way is not differentiable, or a gradient rule returns the wrong number of
            gradients.
    """
    requests = network.requests
    wanted = tuple(name for name in network.arguments if requests[name] != Req.NULL)
    if not wanted:
        return network, ""
    options = settings.options
    edit = Edit(network)
    few = options.max_inplace_grad_add
    rule = _Pass(edit, options.inplace_grad_sum_cap, few, like_mxnet=options.compat == "mxnet")
    gradients = rule.run(
        [network.arguments[name] for name in wanted],
        {network.arguments[name] for name in wanted if requests[name] == Req.ADD},
    )
    for k, name in enumerate(wanted):
        if name in settings.grad_dtypes:
            gradients[k] = rule.cast(gradients[k], name, np.dtype(settings.grad_dtypes[name]))
    edit.heads += gradients
    return edit.done(wanted=wanted, head_grads=tuple(rule.head_grads)), ""


class _Pass:
    """State of one run of the pass; sums of ``sum_cap`` terms or more, or of fewer than ``few``, become a chain, which
    can run in place.

    With ``like_mxnet`` head gradients pass through ``_identity_with_attr_like_rhs``, as in MXNet 1.9.1.
    """

    def __init__(self, edit: Edit, sum_cap: int, few: int, *, like_mxnet: bool) -> None:
        self.edit = edit
        self.graph = edit.network.graph
        self.outputs = edit.network.outputs
        self.sum_cap, self.few = max(2, sum_cap), few
        self.like_mxnet = like_mxnet
        self.terms: dict[int, list[int]] = {}
        """Entry -> entries whose sum is its gradient."""
        self.head_grads: list[int] = []
        self.when: dict[int, int] = {}
        """Made nodes, and during which visit (0: before the first); see :meth:`_chain`."""
        self.visit = 0
        self._kinds: dict[tuple[Any, ...], tuple[Op, dict[str, Any], tuple[Work, int]]] = {}
        """Operator, parsed parameters and the facts that follow from them, shared by nodes with equal parameters."""

    def run(self, variables: Sequence[int], accumulated: Collection[int]) -> list[int]:
        """Return the gradient entry of each wanted variable; no two are the same, none is a forward entry.

        ``accumulated``: variables whose gradient is added to (grad_req add): their entry has no other reader.
        """
        graph = self.graph
        order = self._order()
        needed = self._needed(order, variables)
        self._head_gradients()
        for nid in reversed(order):
            op = graph.nodes[nid].op
            if op is not None and needed[nid]:
                self.visit += 1
                self._visit(nid, op, needed)
        entries = []
        for variable in variables:
            entry, name = self.aggregate(variable, 0), f"{graph.names[variable]}_backward"
            entries.append(self.make("zeros_like", name, [graph.row[variable]], {})[0] if entry is None else entry)
        self._separate(entries, variables, accumulated)
        return entries

    def _order(self) -> Sequence[int]:
        """Return the reverse of the order of visits.

        Before long sums each node is visited next to its readers. Such sums are accumulated in the order of visits
        (:meth:`_chain`): terms of nodes that are visited late have to wait, and
        with them all that they are made of.
        """
        graph = self.graph
        makers = graph.entry_node
        everything = range(graph.num_nodes)
        if self.like_mxnet:
            return everything
        readers = Counter([makers[e] for inputs in graph.inputs for e in inputs])
        if not readers or (max(readers.values()) < self.sum_cap and self.few <= 2):
            return everything
        before = [[makers[e] for e in inputs] + deps for inputs, deps in zip(graph.inputs, graph.controls, strict=True)]
        return deepest_first(everything, before)

    def _needed(self, order: Sequence[int], wanted: Sequence[int]) -> bytearray:
        """1 for every node that some wanted variable feeds: gradients elsewhere would be thrown away."""
        graph = self.graph
        makers, inputs = graph.entry_node, graph.inputs
        needed = bytearray(graph.num_nodes)
        for variable in wanted:
            needed[variable] = 1
        for nid in order:
            for e in inputs[nid]:
                if needed[makers[e]]:
                    needed[nid] = 1
                    break
        return needed

    def _head_gradients(self) -> None:
        edit = self.edit
        for i, output in enumerate(self.outputs):
            entry = edit.add(None, f"_head_grad_{i}", like=[output])
            self.head_grads.append(edit.makers[entry])
            if self.like_mxnet:
                entry = self.make("_identity_with_attr_like_rhs", f"_head_grad_{i}_id", [entry, output], {})[0]
            self.terms.setdefault(output, []).append(entry)

    def _visit(self, nid: int, op: Op, needed: bytearray) -> None:
        """Ask the gradient rule of a node and hand its answers to the producers of the inputs."""
        terms, graph = self.terms, self.graph
        node, inputs = graph.nodes[nid], graph.inputs[nid]
        if not op.loss and terms.keys().isdisjoint(range(graph.row[nid], graph.row[nid + 1])):
            return
        if op.gradient is None:
            raise PlanError(
                f"operator {op.name} ({node.name!r}) is not differentiable, but gradients flow into it; put BlockGrad "
                f"behind it, or set grad_req 'null' for the arguments before it"
                + (f" (created at {node.created_at})" if node.created_at else "")
            )
        answers = op.gradient(_Builder(self, nid))
        if len(answers) != len(inputs):
            raise PlanError(
                f"gradient rule of operator {op.name} ({node.name!r}) returned {len(answers)} gradients "
                f"for {len(inputs)} inputs"
            )
        makers, nodes = self.edit.makers, self.edit.nodes
        for source, answer in zip(inputs, answers, strict=True):
            if answer is None or not needed[makers[source]]:
                continue
            entry: int = answer  # type: ignore[assignment]  # what `make` gave to the rule
            maker = nodes[makers[entry]].op
            if maker is not None and maker.name in ZERO_OPS:
                continue
            known = terms.get(source)
            if known is None:
                terms[source] = [entry]
            else:
                known.append(entry)

    def aggregate(self, nid: int, index: int) -> int | None:
        """The sum of the terms of one entry, made once; None when there are none."""
        entry = self.graph.row[nid] + index
        terms = self.terms.get(entry)
        if not terms:
            return None
        if len(terms) > 1:
            name = self.graph.names[nid] + ("_sum_grad" if index == 0 else f"_{index}_sum_grad")
            if self.few <= len(terms) < self.sum_cap:
                total = self.make("add_n", name, terms, {"num_args": len(terms)})[0]
            else:
                total = self._chain(name, terms)
            self.terms[entry] = terms = [total]
        return terms[0]

    def _chain(self, name: str, terms: list[int]) -> int:
        """terms[0] + terms[1] + …, one at a time; each term is computed after the sum of those before it."""
        when, now, makers = self.when, self.visit, self.edit.makers
        total = terms[0]
        latest = when.get(makers[total], -1)
        for i in range(1, len(terms)):
            term = makers[terms[i]]
            moment = when.get(term, -1)
            # Without this edge all terms could be computed first, and all be alive at once. It closes no cycle: sort
            # nodes by the visit that made them, a partial sum counting as made with its last term. All other edges
            # lead to nodes of the same visit or an earlier visit, and this edge to a strictly earlier visit.
            if moment > latest:
                self.edit.controls[term].append(makers[total])
            latest = max(latest, moment)
            self.visit = latest
            total = self.make("_grad_add", f"{name}_{i}", [total, terms[i]], {})[0]
        final = self.make("_copy", f"{name}_final", [total], {})[0]
        self.visit = now
        return final

    def _separate(self, entries: list[int], wanted: Sequence[int], accumulated: Collection[int]) -> None:
        """Give every gradient an entry of its own, because each is written to an array of its own.

        A gradient that is added to its array must not be read by other nodes either: they would see old terms.
        """
        edit, forward_nodes = self.edit, self.graph.num_nodes
        used: set[int] = set()
        read: set[int] = set()
        if accumulated:
            read = {e for nid in self.when for e in edit.inputs[nid]}
            # Two variables with one gradient: the copy for the second would read it.
            read.update(e for e, n in Counter(entries).items() if n > 1)
        for i, (entry, variable) in enumerate(zip(entries, wanted, strict=True)):
            nid = edit.makers[entry]
            maker = edit.nodes[nid].op
            foreign = maker is None or nid < forward_nodes
            if variable in accumulated and maker is not None and maker.name == "_CrossDeviceCopy":
                foreign = True  # it overwrites
            if foreign or entry in used or (variable in accumulated and entry in read):
                entries[i] = self.make("_copy", f"{edit.nodes[nid].name}_{i}_copy", [entry], {})[0]
            else:
                used.add(entry)

    def cast(self, gradient: int, name: str, dtype: np.dtype[Any]) -> int:
        """The gradient of argument ``name`` in another dtype."""
        gradient_attrs = self.edit.nodes[self.edit.makers[gradient]].attrs
        entry = self.make("Cast", f"{name}_grad_{dtype.name}", [gradient], {"dtype": dtype.name})[0]
        node = self.edit.nodes[self.edit.makers[entry]]
        node.attrs.update({key: gradient_attrs[key] for key in INHERITED if key in gradient_attrs})
        return entry

    def make(
        self,
        op_name: str | Op,
        name: str,
        inputs: Sequence[int],
        params: Mapping[str, Any],
        *,
        forward: int | None = None,
        parsed: dict[str, Any] | None = None,
    ) -> Sequence[int]:
        """A new node; all its outputs."""
        kind: tuple[Any, ...] = (op_name if op_name.__class__ is str else id(op_name), id(parsed))
        attrs = {}
        if params:
            attrs = {key: str(value) for key, value in params.items()}
            kind += tuple(attrs.items())
        known = self._kinds.get(kind)
        if known is None:
            op = registry.get(op_name) if isinstance(op_name, str) else op_name
            values = registry.parse_params(op, params, node=name) if parsed is None else parsed
            known = self._kinds[kind] = op, values, work_of(Node(op, name, params=values))
        op, values, effects = known
        edit, main = self.edit, -1
        controls: tuple[int, ...] = ()
        if forward is not None:
            inherited = self.graph.nodes[forward].attrs
            if inherited and not _INHERITED.isdisjoint(inherited):
                attrs.update({key: inherited[key] for key in INHERITED if key in inherited})
            main, controls = forward, (forward,)
        self.when[len(edit.nodes)] = self.visit
        first = edit.add(
            op, name, inputs=inputs, main=main, params=values, attrs=attrs, controls=controls, kind=effects
        )
        return range(first, first + effects[1])


class _Builder:
    """The view that a gradient rule has of one forward node (:class:`weftplan.ops.core.schema.GradientBuilder`)."""

    __slots__ = ("_forward", "_pass", "params")

    def __init__(self, owner: _Pass, forward: int, params: Params | None = None) -> None:
        self._pass = owner
        self._forward = forward
        self.params: Params = owner.graph.nodes[forward].params if params is None else params
        """Those of the forward node, or what they mean to the operator whose rule it has."""

    @property
    def num_inputs(self) -> int:
        """Number of forward inputs."""
        return len(self._pass.graph.inputs[self._forward])

    def input(self, index: int) -> EntryRef:
        """Forward input."""
        return self._pass.graph.inputs[self._forward][index]

    def output(self, index: int) -> EntryRef:
        """Forward output."""
        return self._pass.graph.row[self._forward] + index

    def ograd(self, index: int = 0) -> EntryRef:
        """Aggregated gradient of output ``index``; zeros when there is none."""
        owner, forward = self._pass, self._forward
        entry = owner.aggregate(forward, index)
        if entry is None:
            output = owner.graph.row[forward] + index
            name = f"{owner.graph.names[forward]}_out{index}_zero"
            entry = owner.make("zeros_like", name, [output], {}, forward=forward)[0]
            # Remembered, so that a second request gets the same node.
            owner.terms[output] = [entry]
        return entry

    def node(
        self,
        op: str | Op,
        inputs: Sequence[EntryRef],
        params: Mapping[str, Any] | None = None,
        *,
        suffix: str = "backward",
    ) -> Sequence[EntryRef]:
        """A new node ``<forward name>_<suffix>``, which comes after its forward node."""
        forward, parsed = self._pass.graph.nodes[self._forward], None
        if params is None and self.params is forward.params:
            params, parsed = {}, forward.params
        elif params is None:
            declared = (registry.get(op) if isinstance(op, str) else op).params
            params = {param.name: self.params[param.name] for param in declared}
        return self._pass.make(
            op,
            f"{forward.name}_{suffix}",
            inputs,  # type: ignore[arg-type]  # what `make` gave to the rule
            params,
            forward=self._forward,
            parsed=parsed,
        )

    def showing(self, params: Params) -> _Builder:
        """The same with other parameters."""
        return _Builder(self._pass, self._forward, params)


PASS = GraphPass(
    name="gradients added",
    switch="grad_req",
    run=add_gradients,
    changes=frozenset((BACKWARD,)),
    gives=frozenset((GRADIENTS,)),
    shown=False,
)
