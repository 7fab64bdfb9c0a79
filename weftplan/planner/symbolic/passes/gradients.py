"""Reverse-mode differentiation: add the nodes that compute gradients of outputs with respect to variables.

Shapes are not needed, because operators that make zeros take their shape from another entry.

A zero gradient has no node: a gradient rule returns None for it, and an entry without a gradient has no terms. Zeros
are only made if a rule reads the gradient of such an entry, or if an argument that wants a gradient has none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from weftplan.errors import PlanError
from weftplan.ops.core import registry
from weftplan.ops.core.schema import EntryRef, Op, Params, Req
from weftplan.planner.options import LONG_SUM
from weftplan.planner.program import Work
from weftplan.planner.symbolic.indexed_graph import work_of
from weftplan.planner.symbolic.network import Edit, Network
from weftplan.planner.symbolic.passes.graph_pass import BACKWARD, GRADIENTS, GraphPass, PassSettings
from weftplan.support.array_types import DType
from weftplan.support.post_order import deepest_first
from weftplan.symbol.attribute import INHERITED
from weftplan.symbol.node import Node, NodeParams

ZERO_OPS = frozenset(("zeros_like", "_zeros", "_zeros_without_dtype"))
_INHERITED = frozenset(INHERITED)


def add_gradients(network: Network, settings: PassSettings) -> tuple[Network, str]:
    """Add the gradients of all arguments whose grad_req is not null.

    Raises:
        PlanError: an operator on a path to such an argument is not differentiable, or a gradient rule returns the wrong
            number of gradients.
    """
    requests = network.requests
    requested = tuple(name for name in network.arguments if requests[name] != Req.NULL)
    if not requested:
        return network, ""
    options = settings.options
    edit = Edit(network)
    few = options.max_inplace_grad_add
    rule = _Pass(edit, options.inplace_grad_sum_cap, few, like_mxnet=options.compat == "mxnet")
    gradients = rule.run(
        [network.arguments[name] for name in requested],
        {network.arguments[name] for name in requested if requests[name] == Req.ADD},
    )
    for k, name in enumerate(requested):
        if name in settings.grad_dtypes:
            gradients[k] = rule.cast(gradients[k], name, np.dtype(settings.grad_dtypes[name]))
    edit.heads += gradients
    return edit.finish(wanted=requested, head_grads=tuple(rule.head_grads)), ""


class _Pass:
    """The state of one run of the pass.

    Args:
        edit: the rewrite.
        sum_cap, few: a gradient sum with at least ``sum_cap`` terms, or with fewer than ``few``, becomes a chain of
            additions, which can run in place.
        like_mxnet: whether head gradients pass through ``_identity_with_attr_like_rhs``, as in MXNet 1.9.1.
    """

    def __init__(self, edit: Edit, sum_cap: int, few: int, *, like_mxnet: bool) -> None:
        self.edit = edit
        self.graph = edit.network.graph
        self.outputs = edit.network.outputs
        self.sum_cap, self.few = max(2, sum_cap), few
        self.like_mxnet = like_mxnet
        self.terms: dict[int, list[int]] = {}
        """Entry -> terms of its gradient."""
        self.head_grads: list[int] = []
        self.when: dict[int, int] = {}
        """Added node -> number of the visit that added it (0: before the first); see :meth:`_chain`."""
        self.visit = 0
        """Number of the visit that :attr:`when` records for added nodes; :meth:`_chain` lowers it for partial sums."""
        self._kinds: dict[tuple[Any, ...], tuple[Op, dict[str, Any], tuple[Work, int]]] = {}
        """Cache of (operator, parsed parameters, memory effects and number of outputs) for nodes with equal ones."""

    def run(self, variables: Sequence[int], accumulated: Collection[int]) -> list[int]:
        """Add gradients and return the gradient entry of each variable.

        The entries are distinct, and none is a forward entry.

        Args:
            variables: variables to differentiate with respect to.
            accumulated: those of them with grad_req ``add``; their entries have no other reader.
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
        """Return the forward nodes in the reverse of the order in which they are visited.

        If the graph has long gradient sums, nodes are visited close to their readers (deepest first). Such sums are
        accumulated in the order of visits (:meth:`_chain`), so the inputs of a term from a late visit stay alive long.
        The order of visits is the order of the terms of every sum. So it depends on the graph alone: an option that
        makes shorter sums accumulate, or none, changes no bit of a gradient.
        """
        graph = self.graph
        makers = graph.entry_node
        everything = range(graph.num_nodes)
        if self.like_mxnet:
            return everything
        readers = Counter([makers[e] for inputs in graph.inputs for e in inputs])
        if not readers or max(readers.values()) < LONG_SUM:
            return everything
        predecessors = [
            [makers[e] for e in inputs] + deps for inputs, deps in zip(graph.inputs, graph.controls, strict=True)
        ]
        return deepest_first(everything, predecessors)

    def _needed(self, order: Sequence[int], requested: Sequence[int]) -> bytearray:
        """Return 1 for each node that depends on a variable of ``requested``, else 0; only these need gradients."""
        graph = self.graph
        makers, inputs = graph.entry_node, graph.inputs
        needed = bytearray(graph.num_nodes)
        for variable in requested:
            needed[variable] = 1
        for nid in order:
            for e in inputs[nid]:
                if needed[makers[e]]:
                    needed[nid] = 1
                    break
        return needed

    def _head_gradients(self) -> None:
        """Add a variable ``_head_grad_<i>`` for each output and make it the first term of the output's gradient."""
        edit = self.edit
        for i, output in enumerate(self.outputs):
            entry = edit.add(None, f"_head_grad_{i}", like=[output])
            self.head_grads.append(edit.makers[entry])
            if self.like_mxnet:
                entry = self.make("_identity_with_attr_like_rhs", f"_head_grad_{i}_id", [entry, output], {})[0]
            self.terms.setdefault(output, []).append(entry)

    def _visit(self, nid: int, op: Op, needed: bytearray) -> None:
        """Apply the gradient rule of a node and add its results to the terms of the inputs.

        Raises:
            PlanError: the operator is not differentiable, or the rule returns the wrong number of gradients.
        """
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
            entry: int = answer  # type: ignore[assignment]  # an entry that `make` returned to the rule
            maker = nodes[makers[entry]].op
            if maker is not None and maker.name in ZERO_OPS:
                continue
            partial = terms.get(source)
            if partial is None:
                terms[source] = [entry]
            else:
                partial.append(entry)

    def aggregate(self, nid: int, index: int) -> int | None:
        """Return the sum of the terms of an entry, which is made on first use; None if there are no terms."""
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
        """Return a chain of additions terms[0] + terms[1] + …; each term runs after the sum of the terms before it."""
        when, visit, makers = self.when, self.visit, self.edit.makers
        total = terms[0]
        latest = when.get(makers[total], -1)
        for i in range(1, len(terms)):
            term = makers[terms[i]]
            moment = when.get(term, -1)
            # Without this edge all terms could run first and be alive at the same time. It closes no cycle: sort nodes
            # by the visit that added them, a partial sum by the visit of its last term. All other edges lead to nodes
            # of the same or an earlier visit, and this edge leads to a strictly earlier visit.
            if moment > latest:
                self.edit.controls[term].append(makers[total])
            latest = max(latest, moment)
            self.visit = latest
            total = self.make("_grad_add", f"{name}_{i}", [total, terms[i]], {})[0]
        final = self.make("_copy", f"{name}_final", [total], {})[0]
        self.visit = visit
        return final

    def _separate(self, entries: list[int], requested: Sequence[int], accumulated: Collection[int]) -> None:
        """Insert copies so that the gradients are distinct backward entries, because each has its own array.

        A gradient that is added to its array must also have no other reader, which would read the previous content too.
        """
        edit, forward_nodes = self.edit, self.graph.num_nodes
        used: set[int] = set()
        read: set[int] = set()
        if accumulated:
            read = {e for nid in self.when for e in edit.inputs[nid]}
            # If two variables share one gradient, the copy for the second one reads it.
            read.update(e for e, n in Counter(entries).items() if n > 1)
        for i, (entry, variable) in enumerate(zip(entries, requested, strict=True)):
            nid = edit.makers[entry]
            maker = edit.nodes[nid].op
            foreign = maker is None or nid < forward_nodes
            if variable in accumulated and maker is not None and maker.name == "_CrossDeviceCopy":
                foreign = True  # a copy between devices cannot add
            if foreign or entry in used or (variable in accumulated and entry in read):
                entries[i] = self.make("_copy", f"{edit.nodes[nid].name}_{i}_copy", [entry], {})[0]
            else:
                used.add(entry)

    def cast(self, gradient: int, name: str, dtype: DType) -> int:
        """Add a cast of the gradient of argument ``name`` to ``dtype``; return its entry."""
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
        params: Params,
        *,
        forward: int | None = None,
        parsed: NodeParams | None = None,
    ) -> Sequence[int]:
        """Add a node; return its output entries.

        Args:
            op_name: the operator or its name.
            name: the node's name.
            inputs: its input entries.
            params: parameters as given; their text becomes the attributes.
            forward: forward node whose device attributes it inherits and which it must follow.
            parsed: parsed parameters, if the caller has them.
        """
        kind: tuple[Any, ...] = (op_name if op_name.__class__ is str else id(op_name), id(parsed))
        attrs = {}
        if params:
            attrs = {key: str(value) for key, value in params.items()}
            kind += tuple(attrs.items())
        existing = self._kinds.get(kind)
        if existing is None:
            op = registry.get(op_name) if isinstance(op_name, str) else op_name
            values = registry.parse_params(op, params, node=name) if parsed is None else parsed
            existing = self._kinds[kind] = op, values, work_of(Node(op, name, params=values))
        op, values, effects = existing
        edit, main = self.edit, -1
        controls: tuple[int, ...] = ()
        if forward is not None:
            inherited = self.graph.nodes[forward].attrs
            if inherited and not _INHERITED.isdisjoint(inherited):
                attrs.update({key: inherited[key] for key in INHERITED if key in inherited})
            main, controls = forward, (forward,)
        self.when[len(edit.nodes)] = self.visit
        first_node = edit.add(
            op, name, inputs=inputs, main=main, params=values, attrs=attrs, controls=controls, kind=effects
        )
        return range(first_node, first_node + effects[1])


class _Builder:
    """The view of one forward node that a gradient rule gets (:class:`weftplan.ops.core.schema.GradientBuilder`)."""

    __slots__ = ("_forward", "_pass", "params")

    def __init__(self, owner: _Pass, forward: int, params: Params | None = None) -> None:
        self._pass = owner
        self._forward = forward
        self.params: Params = owner.graph.nodes[forward].params if params is None else params
        """Parameters of the forward node, or parameters that :meth:`showing` put in their place."""

    @property
    def num_inputs(self) -> int:
        """Number of forward inputs."""
        return len(self._pass.graph.inputs[self._forward])

    def input(self, index: int) -> EntryRef:
        """Return the entry of forward input ``index``."""
        return self._pass.graph.inputs[self._forward][index]

    def output(self, index: int) -> EntryRef:
        """Return the entry of forward output ``index``."""
        return self._pass.graph.row[self._forward] + index

    def ograd(self, index: int = 0) -> EntryRef:
        """Return the summed gradient of output ``index``; zeros if it has none."""
        owner, forward = self._pass, self._forward
        entry = owner.aggregate(forward, index)
        if entry is None:
            output = owner.graph.row[forward] + index
            name = f"{owner.graph.names[forward]}_out{index}_zero"
            entry = owner.make("zeros_like", name, [output], {}, forward=forward)[0]
            # Cached, so that a second call returns the same node.
            owner.terms[output] = [entry]
        return entry

    def node(
        self,
        op: str | Op,
        inputs: Sequence[EntryRef],
        params: Params | None = None,
        *,
        suffix: str = "backward",
    ) -> Sequence[EntryRef]:
        """Add a node ``<forward name>_<suffix>`` that follows the forward node; return its output entries."""
        forward, parsed = self._pass.graph.nodes[self._forward], None
        if params is None and self.params is forward.params:
            params, parsed = {}, forward.params
        elif params is None:
            declared = (registry.get(op) if isinstance(op, str) else op).params
            params = {param.name: self.params[param.name] for param in declared}
        return self._pass.make(
            op,
            f"{forward.name}_{suffix}",
            inputs,  # type: ignore[arg-type]  # entries that `make` returned to the rule
            params,
            forward=self._forward,
            parsed=parsed,
        )

    def showing(self, params: Params) -> _Builder:
        """Return a builder for the same node with other parameters."""
        return _Builder(self._pass, self._forward, params)


PASS: GraphPass = GraphPass(
    name="gradients added",
    switch="grad_req",
    run=add_gradients,
    changes=frozenset((BACKWARD,)),
    gives=frozenset((GRADIENTS,)),
    shown=False,
)
