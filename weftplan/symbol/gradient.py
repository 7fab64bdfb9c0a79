"""Reverse mode on graphs: adds the nodes that compute gradients of outputs with respect to variables.

Needs the heads of a forward graph; gives one entry per wanted variable. Shapes are not needed: zeros are made by
operators that take their shape from another entry.

A gradient that is zero is represented by absence: a rule returns None for it, an entry that nobody differentiates has
no terms. Zeros are only made where a rule asks for an outgoing gradient that has none, or for a wanted variable.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weftplan.errors import MXNetError, PlanError
from weftplan.ops.core import registry
from weftplan.ops.core.schema import EntryRef, Op, Params, Req
from weftplan.support.post_order import deepest_first
from weftplan.symbol.node import Entry, Node, entry_of
from weftplan.symbol.traversal import Order, depth_first_order

ZERO_OPS = frozenset(("zeros_like", "_zeros", "_zeros_without_dtype"))
INHERITED = ("__ctx_group__", "ctx_group")
"""Attributes that gradient nodes take over from their forward node."""
_INHERITED = frozenset(INHERITED)
GRAD_REQS = {"null": Req.NULL, "write": Req.WRITE, "add": Req.ADD}
"""What a caller may want of an argument's gradient."""


@dataclass(frozen=True, slots=True)
class Gradients:
    """What the gradient pass gives."""

    entries: list[Entry]
    """The gradient of each wanted variable, in the order wanted; no two are the same entry, none is a forward entry."""
    heads: list[Node]
    """Variable ``_head_grad_<i>`` of each output; not part of the graph when no gradient reads it."""
    given: Container[Node]
    """The nodes of the forward part: all others are new, and nobody else has them."""


def read_grad_req(
    grad_req: str | Mapping[str, str], arguments: Collection[str], error: type[MXNetError]
) -> dict[str, str]:
    """What a caller wants of each argument's gradient, from one word for all or a dictionary (missing: null).

    Raises:
        MXNetError: of the class ``error``, where a word is none of :data:`GRAD_REQS`.
    """
    given = dict.fromkeys(arguments, grad_req) if isinstance(grad_req, str) else grad_req
    wanted = {name: given.get(name, "null") for name in arguments}
    for name, req in wanted.items():
        if not isinstance(req, str) or req not in GRAD_REQS:
            raise error(f"grad_req of {name!r} must be one of {', '.join(GRAD_REQS)}; got {req!r}")
    return wanted


def add_gradients(
    outputs: Sequence[Entry],
    wanted: Sequence[Node],
    *,
    sum_cap: int = 8,
    accumulated: Collection[Node] = (),
    like_mxnet: bool = False,
    order: Order | None = None,
) -> Gradients:
    """Gradient entries of ``outputs`` with respect to the variables ``wanted``.

    Args:
        outputs: heads of the forward graph. An entry listed twice receives the sum of both head gradients.
        wanted: variables.
        sum_cap: sums of this many terms or more become a chain of ``_grad_add``, which can run in place.
        accumulated: variables whose gradient is added to (grad_req add): their gradient entry has no other reader.
        like_mxnet: pass head gradients through ``_identity_with_attr_like_rhs``, as MXNet 1.9.1 does.
        order: the depth-first order of ``outputs``, when the caller has it.

    Raises:
        PlanError: a wanted variable is not reachable, an operator on the way is not differentiable, or a gradient rule
            returns the wrong number of gradients.
    """
    return _Pass(outputs, sum_cap, like_mxnet, order).run(wanted, accumulated)


class _Pass:
    """State of one run of the pass."""

    def __init__(self, outputs: Sequence[Entry], sum_cap: int, like_mxnet: bool, order: Order | None) -> None:
        self.outputs = outputs
        self.sum_cap = max(2, sum_cap)
        self.order, self.nid = depth_first_order((entry[0] for entry in outputs), PlanError) if order is None else order
        if not like_mxnet:
            self._visit_step_by_step()
        self.like_mxnet = like_mxnet
        self.terms: dict[tuple[Node, int], list[Entry]] = {}
        self.when: dict[Node, int] = {}
        """Made nodes, and during which visit (0: before the first); see :meth:`_chain`."""
        self.visit = 0
        self._kinds: dict[tuple[Any, ...], tuple[Op, dict[str, Any], int]] = {}
        """Operator, parsed parameters and number of outputs, which nodes made of equal ones share."""

    def run(self, wanted: Sequence[Node], accumulated: Collection[Node]) -> Gradients:
        for variable in wanted:
            if variable not in self.nid:
                raise PlanError(
                    f"argument {variable.name!r} is unreachable from the outputs: it has no gradient; "
                    f"give it grad_req 'null'"
                )
        needed = self._needed(wanted)
        heads = self._head_gradients()
        for position in range(len(self.order) - 1, -1, -1):
            node = self.order[position]
            if node.op is not None and needed[position]:
                self.visit += 1
                self._visit(node, node.op, needed)
        entries = [self._gradient_of(variable) for variable in wanted]
        self._separate(entries, wanted, accumulated)
        return Gradients(entries, heads, self.nid)

    def _visit_step_by_step(self) -> None:
        """Where long sums are to come, sort the nodes so that each is visited next to what it feeds.

        The order of visits is the order in which such sums are accumulated (see :meth:`_chain`): terms of nodes that
        are visited late have to wait, and with them all that they are made of.
        """
        readers = Counter([entry[0] for node in self.order for entry in node.inputs])
        if not readers or max(readers.values()) < self.sum_cap:
            return
        nid = self.nid
        before = [[nid[e[0]] for e in node.inputs] + [nid[dep] for dep in node.control_deps] for node in self.order]
        self.order = [self.order[n] for n in deepest_first(range(len(before)), before)]
        self.nid = {node: position for position, node in enumerate(self.order)}

    def _needed(self, wanted: Sequence[Node]) -> bytearray:
        """1 for every node that some wanted variable feeds: gradients elsewhere would be thrown away."""
        nid = self.nid
        needed = bytearray(len(self.order))
        for variable in wanted:
            needed[nid[variable]] = 1
        for position, node in enumerate(self.order):
            for entry in node.inputs:
                if needed[nid[entry[0]]]:
                    needed[position] = 1
                    break
        return needed

    def _head_gradients(self) -> list[Node]:
        heads = []
        for i, output in enumerate(self.outputs):
            variable = Node(None, f"_head_grad_{i}")
            heads.append(variable)
            entry = Entry(variable)
            if self.like_mxnet:
                entry = self.make(
                    "_identity_with_attr_like_rhs", f"_head_grad_{i}_id", [entry, Entry(output.node, output.index)], {}
                )[0]
            self.terms.setdefault((output.node, output.index), []).append(entry)
        return heads

    def _visit(self, node: Node, op: Op, needed: bytearray) -> None:
        """Ask the gradient rule of ``node`` and hand its answers to the producers of the inputs."""
        terms = self.terms
        if not op.loss and (node, 0) not in terms and not any((node, k) in terms for k in range(1, node.num_outputs)):
            return
        if op.gradient is None:
            raise PlanError(
                f"operator {op.name} ({node.name!r}) is not differentiable, but gradients flow into it; put BlockGrad "
                f"behind it, or set grad_req 'null' for the arguments before it"
                + (f" (created at {node.created_at})" if node.created_at else "")
            )
        answers = op.gradient(_Builder(self, node))
        if len(answers) != len(node.inputs):
            raise PlanError(
                f"gradient rule of operator {op.name} ({node.name!r}) returned {len(answers)} gradients "
                f"for {len(node.inputs)} inputs"
            )
        nid = self.nid
        for (source, index, _), answer in zip(node.inputs, answers, strict=True):
            if answer is None or not needed[nid[source]]:
                continue
            entry: Entry = answer  # type: ignore[assignment]  # what `make` gave to the rule
            maker = entry[0].op
            if maker is not None and maker.name in ZERO_OPS:
                continue
            key = source, index
            known = terms.get(key)
            if known is None:
                terms[key] = [entry]
            else:
                known.append(entry)

    def aggregate(self, node: Node, index: int) -> Entry | None:
        """The sum of the terms of one entry, made once; None when there are none."""
        terms = self.terms.get((node, index))
        if not terms:
            return None
        if len(terms) > 1:
            name = f"{node.name}_sum_grad" if index == 0 else f"{node.name}_{index}_sum_grad"
            if len(terms) < self.sum_cap:
                total = self.make("add_n", name, terms, {"num_args": len(terms)})[0]
            else:
                total = self._chain(name, terms)
            self.terms[node, index] = terms = [total]
        return terms[0]

    def _chain(self, name: str, terms: list[Entry]) -> Entry:
        """terms[0] + terms[1] + …, one at a time; each term is computed after the sum of those before it."""
        when, now = self.when, self.visit
        total = terms[0]
        latest = when.get(total.node, -1)
        for i in range(1, len(terms)):
            term = terms[i].node
            moment = when.get(term, -1)
            # Without this edge all terms could be computed first, and all be alive at once. It closes no cycle: sort
            # nodes by the visit that made them, a partial sum counting as made with its last term. All other edges
            # lead to nodes of the same visit or an earlier one, and this one to a strictly earlier one.
            if moment > latest:
                term.control_deps.append(total.node)
            latest = max(latest, moment)
            self.visit = latest
            total = self.make("_grad_add", f"{name}_{i}", [total, terms[i]], {})[0]
        final = self.make("_copy", f"{name}_final", [total], {})[0]
        self.visit = now
        return final

    def _gradient_of(self, variable: Node) -> Entry:
        entry = self.aggregate(variable, 0)
        if entry is None:
            entry = self.make("zeros_like", f"{variable.name}_backward", [Entry(variable)], {})[0]
        return entry

    def _separate(self, entries: list[Entry], wanted: Sequence[Node], accumulated: Collection[Node]) -> None:
        """Give every gradient an entry of its own, because each is written to an array of its own.

        A gradient that is added to its array must not be read by other nodes either: they would see old terms.
        """
        used: set[tuple[Node, int]] = set()
        read: set[tuple[Node, int]] = set()
        if accumulated:
            read = {(entry[0], entry[1]) for node in self.when for entry in node.inputs}
            # Two variables with one gradient: the copy for the second would read it.
            read.update(key for key, n in Counter((e[0], e[1]) for e in entries).items() if n > 1)
        for i, (entry, variable) in enumerate(zip(entries, wanted, strict=True)):
            key = (entry[0], entry[1])
            maker = entry.node.op
            foreign = maker is None or entry.node in self.nid
            if variable in accumulated and maker is not None and maker.name == "_CrossDeviceCopy":
                foreign = True  # it overwrites
            if foreign or key in used or (variable in accumulated and key in read):
                entries[i] = self.make("_copy", f"{entry.node.name}_{i}_copy", [entry], {})[0]
            else:
                used.add(key)

    def make(
        self,
        op_name: str | Op,
        name: str,
        inputs: Sequence[Entry],
        params: Mapping[str, Any],
        *,
        forward: Node | None = None,
        parsed: dict[str, Any] | None = None,
    ) -> list[Entry]:
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
            known = self._kinds[kind] = op, values, op.num_outputs(values)
        op, values, count = known
        node = Node(op, name, attrs=attrs, params=values, inputs=list(inputs))
        if forward is not None:
            if forward.attrs and not _INHERITED.isdisjoint(forward.attrs):
                attrs.update({key: forward.attrs[key] for key in INHERITED if key in forward.attrs})
            node.control_deps.append(forward)
            node.created_at = forward.created_at
        self.when[node] = self.visit
        return [entry_of((node, 0, 0))] if count == 1 else [entry_of((node, k, 0)) for k in range(count)]


class _Builder:
    """What a gradient rule sees of one forward node (:class:`weftplan.ops.core.schema.GradientBuilder`)."""

    __slots__ = ("_forward", "_pass", "params")

    def __init__(self, owner: _Pass, forward: Node, params: Params | None = None) -> None:
        self._pass = owner
        self._forward = forward
        self.params: Params = forward.params if params is None else params
        """Those of the forward node, or what they mean to the operator whose rule it has."""

    @property
    def num_inputs(self) -> int:
        """Number of forward inputs."""
        return len(self._forward.inputs)

    def input(self, index: int) -> EntryRef:
        """Forward input."""
        return self._forward.inputs[index]

    def output(self, index: int) -> EntryRef:
        """Forward output."""
        return entry_of((self._forward, index, 0))

    def ograd(self, index: int = 0) -> EntryRef:
        """Aggregated gradient of output ``index``; zeros when there is none."""
        entry = self._pass.aggregate(self._forward, index)
        if entry is None:
            name = f"{self._forward.name}_out{index}_zero"
            entry = self._pass.make("zeros_like", name, [Entry(self._forward, index)], {}, forward=self._forward)[0]
            # Remembered, so that a second request gets the same node.
            self._pass.terms[self._forward, index] = [entry]
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
        forward, parsed = self._forward, None
        if params is None and self.params is forward.params:
            params, parsed = {}, forward.params
        elif params is None:
            declared = (registry.get(op) if isinstance(op, str) else op).params
            params = {param.name: self.params[param.name] for param in declared}
        made = self._pass.make(
            op,
            f"{forward.name}_{suffix}",
            inputs,  # type: ignore[arg-type]  # what `make` gave to the rule
            params,
            forward=forward,
            parsed=parsed,
        )
        return made

    def showing(self, params: Params) -> _Builder:
        """The same with other parameters."""
        return _Builder(self._pass, self._forward, params)
