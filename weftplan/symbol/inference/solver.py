"""The inference solver: shapes and dtypes of all entries of a graph, from those of some variables.

Operators' rules work in both directions; the graph is walked alternately forwards and backwards until nothing changes.
:func:`of_one_dtype` handles graphs that need no such walk. A rule is called once per distinct (operator, parameters,
known facts) in the whole process; see ``ops/core/rule_cache.py``.
A backward node (operator with ``backward_of``) needs no rule: its outputs have the shapes of the forward inputs whose
gradients they are; its forward node is ``control_deps[0]``.

The planner uses :func:`infer_shapes` and :func:`infer_dtypes` on graphs of 10^6 nodes; nothing here recurses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain
from typing import Any, Generic, TypeVar

import numpy as np

from weftplan.errors import DTypeError, FormatError, MXNetError, ParameterError, ShapeError, own, shape_text
from weftplan.ops.core.params import p_dtype, p_shape
from weftplan.ops.core.rule_cache import Settled
from weftplan.ops.core.rules import is_known, merge_dtype, merge_shape
from weftplan.ops.core.schema import DType, Op, Shape
from weftplan.symbol.node import Node

F = TypeVar("F")
"""A fact: a shape or a dtype."""
News = list[tuple[int, Any]]
"""(position, new fact) of each input or output about which a rule inferred more."""
Learnt = tuple[News, News, list[int], list[int]]
"""New facts of inputs and of outputs, and the positions of inputs and of outputs that are still partly unknown."""
Sort = tuple[int, int, int]
"""The result of :func:`sort_of`."""


@dataclass(eq=False, slots=True)
class FactKind(Generic[F]):
    """A kind of fact, shapes or dtypes: its names, parser, merge function, rule and error class."""

    word: str
    hint: str
    rule: Callable[[Op], Callable[..., tuple[Sequence[F | None], Sequence[F | None]]]]
    parse: Callable[[object], F | None]
    complete: Callable[[F | None], bool]
    merge: Callable[[F | None, F | None, str], F | None]
    error: type[MXNetError]
    settled: Settled[Learnt] = field(default_factory=Settled)

    def inferred(self, op: Op, node: Node, ins: list[F | None], outs: list[F | None]) -> Learnt:
        """Return the answer of the operator's rule for a node with these facts, from the cache if possible."""
        return self.settled.answer(op, node.params, (len(ins), *ins, *outs), partial(self._rule, node, ins, outs))

    def outputs(self, op: Op, node: Node, ins: list[F | None]) -> list[F]:
        """Return the facts of the outputs of a node, all of whose inputs are known; raise an error if some are open."""
        _, outs, _, unknown = self.inferred(op, node, ins, [None] * op.num_outputs(node.params))
        if unknown:
            raise self.error(f"{self.word} of output {unknown[0]} of {where(node)} cannot be inferred{made_at(node)}")
        return [fact for _, fact in outs]

    def _rule(self, node: Node, ins: list[F | None], outs: list[F | None]) -> Learnt:
        """Call the operator's rule; return the new facts and which facts are incomplete. Errors name the node."""
        op = node.op
        assert op is not None
        names = op.input_names(node.params)
        if len(names) != len(ins):
            raise FormatError(
                f"{where(node)} takes {len(names)} input(s) {list(names)}, but the graph gives it {len(ins)}"
            )
        try:
            rule_ins, rule_outs = self.rule(op)(node.params, list(ins), list(outs))
            new_ins = [
                new if old is None or old is new else self.merge(old, new, f"input {name}")
                for name, old, new in zip(names, ins, rule_ins, strict=True)
            ]
            new_outs = [
                new if old is None else self.merge(old, new, "output") for old, new in zip(outs, rule_outs, strict=True)
            ]
        except ParameterError as error:
            raise ParameterError(f"Error in {where(node)}: {error}{made_at(node)}") from own(error)
        except (MXNetError, ValueError, TypeError, IndexError) as error:
            facts = [f"{n}={_show(v)}" for n, v in zip(names, ins, strict=True)]
            facts += [
                f"{n}={_show(v)}" for n, v in zip(op.output_names(node.params), outs, strict=True) if v is not None
            ]
            raise self.error(f"Error in {where(node)}: {error}; {', '.join(facts)}{made_at(node)}") from own(error)
        unknown = [[k for k, fact in enumerate(facts) if not self.complete(fact)] for facts in (new_ins, new_outs)]
        return _news(ins, new_ins), _news(outs, new_outs), unknown[0], unknown[1]


def _parse_shape(value: object) -> Shape | None:
    shape = p_shape(value)
    if min(shape, default=0) < -1:
        raise ValueError("dimensions must be >= 0, or -1 or 0 where unknown")
    return (tuple(max(dim, 0) for dim in shape) if -1 in shape else shape) or None


SHAPES = FactKind("shape", "__shape__", lambda op: op.infer_shape, _parse_shape, is_known, merge_shape, ShapeError)
DTYPES = FactKind(
    "dtype", "__dtype__", lambda op: op.infer_dtype, p_dtype, lambda dtype: dtype is not None, merge_dtype, DTypeError
)


def sort_of(node: Node) -> Sort:
    """Return a key such that a rule answers alike for nodes with equal keys and equal input facts.

    The parser shares one dictionary between equal parameters, so its identity can be part of the key.
    """
    return id(node.op), id(node.params), len(node.inputs)


def differ(old: object, new: object) -> bool:
    """Return whether two facts differ; unlike ``!=``, it distinguishes ``dtype("float64")`` from None."""
    return old is not new and (old is None or new is None or bool(old != new))


def _news(old: Sequence[object], new: Sequence[object]) -> News:
    return [(i, fact) for i, fact in enumerate(new) if fact is not old[i] and differ(old[i], fact)]


def where(node: Node) -> str:
    """Describe a node in an error message."""
    assert node.op is not None
    return f"operator {node.op.name} (node {node.name!r})"


def made_at(node: Node) -> str:
    """Return the end of an error message: the user's line that made the node."""
    return f"; created at {node.created_at}" if node.created_at else ""


def _show(value: object) -> str:
    return shape_text(value) if value is None or isinstance(value, tuple) else str(value)


Seeds = Mapping[str, Any] | Mapping[Node, Any] | Mapping[str | Node, Any]
"""Facts about variables, by name or by node; None is unknown."""
Edges = tuple[Sequence[int], Sequence[Sequence[int]], Sequence[Sequence[int]]]
"""(:func:`entry_rows`, the entries that each node reads, the positions of the nodes that each node must follow)."""


def entry_rows(nodes: Sequence[Node]) -> list[int]:
    """Return the start of each node's entries in a per-entry list, followed by the list's length."""
    rows = [0]
    total = 0
    for node in nodes:
        total += 1 if node.op is None else node.op.num_outputs(node.params)
        rows.append(total)
    return rows


def infer_shapes(nodes: Sequence[Node], seeds: Seeds, *, edges: Edges | None = None) -> list[Shape | None]:
    """Infer the shape of every entry; None is an unknown shape, 0 an unknown dimension.

    Args:
        nodes: all nodes of the graph, in topological order.
        seeds: shapes of variables, by name or node; None, and ``()`` by name, are unknown. Unknown dimensions are
            filled from the variable's ``__shape__``.
        edges: the edges between ``nodes``, if the caller has them already.

    Raises:
        ShapeError: shapes conflict; names operator, node, the shapes, and the line that made the node.
    """
    return _Solver(nodes, edges, SHAPES).solve(seeds)


def infer_dtypes(
    nodes: Sequence[Node], seeds: Seeds, *, edges: Edges | None = None, default: DType | None = None
) -> list[DType | None]:
    """Infer the dtype of every entry, None if unknown; arguments as for :func:`infer_shapes`.

    ``default`` is the dtype of variables without any known fact.

    Raises:
        DTypeError: dtypes conflict; names operator, node, the dtypes, and the line that made the node.
    """
    return _Solver(nodes, edges, DTYPES).solve(seeds, default)


class _Solver(Generic[F]):
    """One inference. ``values`` holds a fact per entry; it only ever grows, so the walk ends."""

    def __init__(self, nodes: Sequence[Node], edges: Edges | None, kind: FactKind[F]) -> None:
        self.nodes = nodes
        self.kind = kind
        if edges is None:
            rows, number = entry_rows(nodes), {node: i for i, node in enumerate(nodes)}
            inputs = [[rows[number[entry[0]]] + entry[1] for entry in node.inputs] for node in nodes]
            edges = rows, inputs, [[number.get(dep, -1) for dep in node.control_deps] for node in nodes]
        self.rows, self.inputs, self.controls = edges
        self.values: list[Any] = [None] * self.rows[-1]
        self.memo: dict[tuple[Any, ...], Learnt] = {}

    def solve(self, seeds: Seeds, default: DType | None = None) -> list[F | None]:
        everything = range(len(self.nodes))
        self._seed(seeds)
        nodes, rows, values = self.nodes, self.rows, self.values
        if default is not None:
            solved: list[Any] | None = of_one_dtype(
                nodes, default, values=values, rows=rows, inputs=self.inputs, sorts=self._sorts
            )
            if solved is not None:
                return solved
        learns = default is None or self._may_learn()
        if learns:
            self._until_still(everything)
        if default is not None:
            variables = [rows[i] for i in everything if nodes[i].op is None]
            unknown = [e for e in variables if values[e] is None]
            for e in unknown:
                values[e] = default
            if unknown:  # if most are new, a walk over all nodes is faster than a search for their users
                few = learns and 2 * len(unknown) < len(variables)
                self._until_still(everything, set(unknown) if few else None)
        return values

    @cached_property
    def _sorts(self) -> dict[Sort, int]:
        """The last node of each sort."""
        return {sort_of(node): i for i, node in enumerate(self.nodes) if node.op is not None}

    def _may_learn(self) -> bool:
        """Return False if no fact is known and no rule infers one by itself, as in most networks before defaults."""
        if any(fact is not None for fact in self.values):
            return True
        return bool(self._walk(sorted(self._sorts.values()), None)) or any(fact is not None for fact in self.values)

    def _until_still(self, everything: range, stale: set[int] | None = None) -> None:
        """Walk alternately forwards and backwards until no fact changes.

        The first walk visits all nodes, or only users of ``stale`` entries; later walks visit users of changed entries.
        """
        stale = self._walk(everything, stale)
        forwards = False
        while stale:
            stale = self._walk(everything if forwards else reversed(everything), stale)
            forwards = not forwards

    def _seed(self, seeds: Seeds) -> None:
        kind = self.kind
        facts: dict[Any, Any] = dict(seeds)
        parsed: dict[Any, Any] = {}  # attributes are text, and most texts and dtypes are alike
        for i, node in enumerate(self.nodes):
            if node.op is not None:
                continue
            fact = facts.get(node)
            if kind is SHAPES and fact == ():  # given by node (a head gradient): known to have no dimensions
                self.values[self.rows[i]] = ()
                continue
            if fact is None:
                fact = facts.get(node.name)
            by_caller = fact is not None
            if not by_caller:
                fact = node.attrs.get(kind.hint)
            if fact is None or (kind is DTYPES and fact == "-1"):
                continue
            repeats = isinstance(fact, str | np.dtype)
            if repeats and fact in parsed:
                self.values[self.rows[i]] = parsed[fact]
                continue
            try:
                value = kind.parse(fact)
                if repeats:
                    parsed[fact] = value
            except (ValueError, TypeError) as error:
                source = f"the {kind.word} given for" if by_caller else f"attribute {kind.hint} of"
                created = "" if by_caller else made_at(node)
                raise ParameterError(f"{source} variable {node.name!r}{created} is {fact!r}: {error}") from error
            self.values[self.rows[i]] = value if kind.complete(value) else self._filled(node, value)

    def _filled(self, node: Node, fact: F | None) -> F | None:
        """Merge the given fact of a variable with its attribute, unless they conflict."""
        hint = node.attrs.get(self.kind.hint)
        if hint is None:
            return fact
        try:
            return self.kind.merge(fact, self.kind.parse(hint), node.name)
        except (ValueError, TypeError):
            return fact

    def _walk(self, order: Iterable[int], stale: set[int] | None) -> set[int]:
        """Visit all operator nodes, or only users of ``stale`` entries.

        Return the entries that changed after a user of them was visited, so that their users need another visit.
        """
        nodes, rows, inputs, values, memo = self.nodes, self.rows, self.inputs, self.values, self.memo
        controls, answer = self.controls, self.kind.inferred
        # Invariant: seen[e] is 1 if a node already visited in this walk uses entry e and has left it incomplete
        # (complete facts never change); if the walk skips nodes, all entries count as seen.
        seen = bytearray(len(values)) if stale is None else bytearray(b"\1") * len(values)
        changed: set[int] = set()
        for i in order:
            node = nodes[i]
            op = node.op
            if op is None:
                continue
            reads = inputs[i]
            start, end = rows[i], rows[i + 1]
            backward = op.backward_of is not None and bool(controls[i])
            if backward:  # its outputs are like the inputs of its forward node whose gradients they are
                forward = controls[i][0]
                if forward < 0:
                    raise FormatError(f"backward node {node.name!r}: its forward node is not in the graph")
                reads = inputs[forward]
            if stale is not None and stale.isdisjoint(reads) and stale.isdisjoint(range(start, end)):
                continue
            if backward:
                positions = op.grad_inputs
                for k, position in enumerate(positions(node.params) if callable(positions) else positions, start):
                    # A fact of this input that the forward node infers later in the walk requires another visit here.
                    e = reads[position]
                    new, old = values[e], values[k]
                    if new is not None and new is not old and differ(old, new):
                        values[k] = new
                        if seen[k]:
                            changed.add(k)
                    seen[e] = seen[k] = 1
            else:
                ins = [values[e] for e in reads]
                outs = values[start:end]
                key = (id(op), id(node.params), *ins, *outs)
                result = memo.get(key)
                if result is None:
                    result = memo[key] = answer(op, node, ins, outs)
                new_ins, new_outs, open_ins, open_outs = result
                for position, new in new_ins:
                    e = reads[position]
                    # A node may read an entry twice, so the rule may have inferred two different facts.
                    values[e] = self._merged(node, e, new)
                    if seen[e] or differ(values[e], new):
                        changed.add(e)
                for position, new in new_outs:
                    values[start + position] = new
                    if seen[start + position]:
                        changed.add(start + position)
                for position in open_ins:
                    seen[reads[position]] = 1
                for position in open_outs:
                    seen[start + position] = 1
            if changed and stale is not None:
                stale |= changed
        return changed

    def _merged(self, node: Node, entry: int, new: F | None) -> F | None:
        try:
            return self.kind.merge(self.values[entry], new, "an input used twice")
        except MXNetError as error:
            raise self.kind.error(f"{where(node)}: {error}{made_at(node)}") from own(error)


def of_one_dtype(
    nodes: Sequence[Node],
    default: DType,
    *,
    values: Sequence[DType | None],
    rows: Sequence[int],
    inputs: Sequence[Sequence[int]],
    sorts: Mapping[Sort, int],
) -> list[DType] | None:
    """Return the dtypes of all entries if every entry that a node reads has the default dtype, else None.

    This holds if no variable has another known dtype, and if each rule, given the default for all inputs, keeps it for
    them and deviates only for outputs that no node reads.

    ``values`` has for each entry the dtype that is known before any rule is called, or None; ``sorts`` has the index
    of one node of each sort.
    """
    for fact in values:
        if fact is not None and fact is not default and fact != default:
            return None
    deviations: dict[Sort, News] = {}
    for sort, i in sorts.items():
        node, op = nodes[i], nodes[i].op
        if op is None or op.single or op.backward_of is not None:
            return None
        ins: list[DType | None] = [default] * len(inputs[i])
        outs: list[DType | None] = [None] * (rows[i + 1] - rows[i])
        try:
            new_ins, new_outs, _, open_outs = DTYPES.inferred(op, node, ins, outs)
        except MXNetError:
            return None
        if new_ins or open_outs:
            return None
        news = [(k, fact) for k, fact in new_outs if differ(fact, default)]
        if news:
            deviations[sort] = news
    dtypes = [default] * len(values)
    if deviations:
        ops = {op for op, _, _ in deviations}
        deviating = [i for i, node in enumerate(nodes) if id(node.op) in ops]
        odd = {rows[i] + k: fact for i in deviating for k, fact in deviations.get(sort_of(nodes[i]), ())}
        if not odd.keys().isdisjoint(chain.from_iterable(inputs)):
            return None
        for e, fact in odd.items():
            dtypes[e] = fact
    return dtypes
