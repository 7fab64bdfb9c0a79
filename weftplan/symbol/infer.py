"""Shapes and dtypes of every entry of a graph, from those of some variables.

Operators' rules work in both directions; the graph is walked forwards and backwards in turn until nothing changes.
Rules are called once per distinct (operator, parameters, what is known), in the whole process: see ``settled.py``.
A backward node (operator with ``backward_of``) needs no rule: its outputs have the shapes of the forward inputs whose
gradients they are; its forward node is ``control_deps[0]``.

The planner uses :func:`infer_shapes` and :func:`infer_dtypes` on graphs of 10^6 nodes; nothing here recurses.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from itertools import chain
from typing import Any

import numpy as np

from weftplan.errors import DTypeError, FormatError, MXNetError, ParameterError, ShapeError, own, shape_text
from weftplan.ops.params import p_dtype, p_shape
from weftplan.ops.rules import is_known, merge_dtype, merge_shape
from weftplan.ops.schema import DType, Op, Shape
from weftplan.ops.settled import Settled
from weftplan.symbol.node import Node

_News = list[tuple[int, Any]]
"""(position, fact) of each input or output of which a rule learnt something."""
_Learnt = tuple[_News, _News, list[int], list[int]]
"""What a rule learnt of inputs and outputs, and the positions of those that are still open, in part at least."""
Known = Mapping[str, Any] | Mapping[Node, Any] | Mapping[str | Node, Any]
"""Facts about variables, by name or by node; None says nothing."""


def entry_rows(nodes: Sequence[Node]) -> list[int]:
    """Where each node's entries start in a per-entry list, and at the end its length."""
    rows = [0]
    total = 0
    for node in nodes:
        total += 1 if node.op is None else node.op.num_outputs(node.params)
        rows.append(total)
    return rows


def infer_shapes(
    nodes: Sequence[Node],
    known: Known,
    *,
    rows: Sequence[int] | None = None,
    inputs: Sequence[Sequence[int]] | None = None,
    numbers: dict[Node, int] | None = None,
) -> list[Shape | None]:
    """The shape of every entry; None, or 0 for a dimension, where it stays unknown.

    Args:
        nodes: in topological order.
        known: shapes of variables, by name or node; None, and ``()`` by name, are unknown. What they leave open, the
            ``__shape__`` of a variable may say.
        rows: :func:`entry_rows` of ``nodes``, when the caller has them.
        inputs: entry ids that each node reads, when the caller has them.
        numbers: positions of the nodes in ``nodes``, when the caller has them.

    Raises:
        ShapeError: shapes conflict; names operator, node, the shapes, and the line that made the node.
    """
    return _Solver(nodes, rows, inputs, numbers, _SHAPES).solve(known)


def infer_dtypes(
    nodes: Sequence[Node],
    known: Known,
    *,
    rows: Sequence[int] | None = None,
    inputs: Sequence[Sequence[int]] | None = None,
    numbers: dict[Node, int] | None = None,
    default: DType | None = None,
) -> list[DType | None]:
    """The dtype of every entry, None where it stays unknown. Arguments as for :func:`infer_shapes`.

    ``default`` is that of variables of which nothing is known.

    Raises:
        DTypeError: dtypes conflict; names operator, node, the dtypes, and the line that made the node.
    """
    return _Solver(nodes, rows, inputs, numbers, _DTYPES).solve(known, default)


def infer_rest(
    nodes: Sequence[Node],
    known: Mapping[Node, tuple[Shape, DType]],
    *,
    rows: Sequence[int],
    inputs: Sequence[Sequence[int]],
    numbers: dict[Node, int],
    shapes: Sequence[Shape],
    dtypes: Sequence[DType],
) -> tuple[list[Shape], list[DType]] | None:
    """Shapes and dtypes of all entries, from those of the first nodes: a backward part follows from its forward part.

    One walk forwards finds both. None where that is not enough, or where a rule objects: ask the two above.

    Args:
        known: shape and dtype of each variable behind the first nodes.
        rows, inputs, numbers: as above.
        shapes, dtypes: what is known, completely, of the entries of the first nodes.
    """
    found, types = list(shapes), list(dtypes)
    solvers = [_Solver(nodes, rows, inputs, numbers, kind) for kind in (_SHAPES, _DTYPES)]
    memo: dict[tuple[Any, ...], tuple[list[Any], list[Any]]] = {}
    for i in range(bisect_left(rows, len(found)), len(nodes)):
        node, op = nodes[i], nodes[i].op
        if op is None:
            if node not in known:
                return None
            found.append(known[node][0])
            types.append(known[node][1])
        elif op.backward_of is not None and node.control_deps:
            reads, positions = inputs[numbers[node.control_deps[0]]], op.grad_inputs
            for position in positions(node.params) if callable(positions) else positions:
                e = reads[position]
                found.append(found[e])
                types.append(types[e])
        else:
            reads = inputs[i]
            ins: tuple[list[Any], list[Any]] = [found[e] for e in reads], [types[e] for e in reads]
            key = (id(op), id(node.params), *ins[0], *ins[1])
            made = memo.get(key)
            if made is None:
                nothing = [None] * (rows[i + 1] - rows[i])
                try:
                    told = [one._told(op, node, given, nothing) for one, given in zip(solvers, ins, strict=True)]
                except MXNetError:
                    return None
                if any(new_ins or open_outs for new_ins, _, _, open_outs in told):
                    return None
                shaped, typed = ([fact for _, fact in new_outs] for _, new_outs, _, _ in told)
                made = memo[key] = shaped, typed
            found += made[0]
            types += made[1]
        if len(found) != rows[i + 1]:
            return None
    return found, types


class _Kind:
    """What differs between shapes and dtypes."""

    __slots__ = ("complete", "error", "hint", "merge", "parse", "rule", "settled", "word")

    def __init__(
        self,
        word: str,
        rule: Callable[[Any], Callable[..., Any]],
        parse: Callable[[Any], Any],
        complete: Callable[[Any], bool],
        merge: Callable[[Any, Any, str], Any],
        error: type[MXNetError],
    ) -> None:
        self.word = word
        self.rule = rule
        self.parse = parse
        self.hint = f"__{word}__"
        self.complete = complete
        self.merge = merge
        self.error = error
        self.settled = Settled[_Learnt]()


def _parse_shape(value: Any) -> Shape | None:
    shape = p_shape(value)
    if any(dim < -1 for dim in shape):
        raise ValueError("dimensions must be >= 0, or -1 or 0 where unknown")
    return tuple(max(dim, 0) for dim in shape) or None


_SHAPES = _Kind("shape", lambda op: op.infer_shape, _parse_shape, is_known, merge_shape, ShapeError)
_DTYPES = _Kind("dtype", lambda op: op.infer_dtype, p_dtype, lambda dtype: dtype is not None, merge_dtype, DTypeError)


class _Solver:
    """One inference. ``values`` holds a fact per entry; it only ever grows, so the walk ends."""

    def __init__(
        self,
        nodes: Sequence[Node],
        rows: Sequence[int] | None,
        inputs: Sequence[Sequence[int]] | None,
        numbers: dict[Node, int] | None,
        kind: _Kind,
    ) -> None:
        self.nodes = nodes
        self.kind = kind
        self.rows = entry_rows(nodes) if rows is None else rows
        self.nid: dict[Node, int] = numbers or {}
        if not self.nid and (
            inputs is None or any(node.op is not None and node.op.backward_of is not None for node in nodes)
        ):
            self.nid = {node: i for i, node in enumerate(nodes)}
        if inputs is None:
            first = {node: self.rows[i] for node, i in self.nid.items()}
            inputs = [[first[entry[0]] + entry[1] for entry in node.inputs] for node in nodes]
        self.inputs = inputs
        self.values: list[Any] = [None] * self.rows[-1]
        self.memo: dict[tuple[Any, ...], _Learnt] = {}

    def solve(self, known: Known, default: Any = None) -> list[Any]:
        everything = range(len(self.nodes))
        self._seed(known)
        nodes, rows, values = self.nodes, self.rows, self.values
        found = None if default is None else self._of_one(default)
        if found is not None:
            return found
        learns = default is None or self._may_learn()
        if learns:
            self._until_still(everything)
        if default is not None:
            variables = [rows[i] for i in everything if nodes[i].op is None]
            unknown = [e for e in variables if values[e] is None]
            for e in unknown:
                values[e] = default
            if unknown:  # where most are new, to walk everywhere takes less time than to ask where they are used
                few = learns and 2 * len(unknown) < len(variables)
                self._until_still(everything, set(unknown) if few else None)
        return values

    def _of_one(self, default: Any) -> list[Any] | None:
        """All facts, where whatever is read is the default: nothing else is known of variables, and each rule, told so
        of all inputs, says nothing else of them, and of outputs only where nobody reads these. Most networks are of
        one dtype, but for masks. None for others."""
        if any(fact is not None and _differ(fact, default) for fact in self.values):
            return None
        nodes, rows = self.nodes, self.rows
        others: dict[tuple[int, int, int], _News] = {}
        for kind, i in self._alike.items():
            node, op = nodes[i], nodes[i].op
            if op is None or op.single or op.backward_of is not None:
                return None
            ins, outs = [default] * len(node.inputs), [None] * (rows[i + 1] - rows[i])
            try:
                new_ins, new_outs, _, open_outs = self._told(op, node, ins, outs)
            except MXNetError:
                return None
            if new_ins or open_outs:
                return None
            news = [(k, fact) for k, fact in new_outs if _differ(fact, default)]
            if news:
                others[kind] = news
        found = [default] * len(self.values)
        if others:
            ops = {op for op, _, _ in others}
            some = [i for i, node in enumerate(nodes) if id(node.op) in ops]
            odd = {rows[i] + k: fact for i in some for k, fact in others.get(_kind(nodes[i]), ())}
            if not odd.keys().isdisjoint(chain.from_iterable(self.inputs)):
                return None
            for e, fact in odd.items():
                found[e] = fact
        return found

    @cached_property
    def _alike(self) -> dict[tuple[int, int, int], int]:
        """The last node of each kind."""
        return {_kind(node): i for i, node in enumerate(self.nodes) if node.op is not None}

    def _may_learn(self) -> bool:
        """False where nothing is known and no rule says anything of itself: most networks are so before defaults."""
        if any(fact is not None for fact in self.values):
            return True
        return bool(self._walk(sorted(self._alike.values()), None)) or any(fact is not None for fact in self.values)

    def _until_still(self, everything: range, stale: set[int] | None = None) -> None:
        """Walk forwards and backwards in turn: first everywhere, or where these entries are used, and then only where
        something has changed."""
        stale = self._walk(everything, stale)
        forwards = False
        while stale:
            stale = self._walk(everything if forwards else reversed(everything), stale)
            forwards = not forwards

    def _seed(self, known: Known) -> None:
        kind = self.kind
        facts: dict[Any, Any] = dict(known)
        parsed: dict[Any, Any] = {}  # attributes are text, and most texts and dtypes are alike
        for i, node in enumerate(self.nodes):
            if node.op is not None:
                continue
            fact = facts.get(node)
            if kind is _SHAPES and fact == ():  # of a node (a head gradient): known to have no dimensions
                self.values[self.rows[i]] = ()
                continue
            if fact is None:
                fact = facts.get(node.name)
            given = fact is not None
            if not given:
                fact = node.attrs.get(kind.hint)
            if fact is None or (kind is _DTYPES and fact == "-1"):
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
                source = f"the {kind.word} given for" if given else f"attribute {kind.hint} of"
                made = "" if given else _made_at(node)
                raise ParameterError(f"{source} variable {node.name!r}{made} is {fact!r}: {error}") from error
            self.values[self.rows[i]] = value if kind.complete(value) else self._filled(node, value)

    def _filled(self, node: Node, given: Any) -> Any:
        """What is given of a variable, and what its attribute adds where it does not clash."""
        hint = node.attrs.get(self.kind.hint)
        if hint is None:
            return given
        try:
            return self.kind.merge(given, self.kind.parse(hint), node.name)
        except (ValueError, TypeError):
            return given

    def _walk(self, order: Iterable[int], stale: set[int] | None) -> set[int]:
        """Visit operator nodes, where ``stale`` is given only those that use one of these entries.

        Returns the entries whose users must be visited again, since they have changed behind the back of one of them.
        """
        nodes, rows, inputs, values, memo = self.nodes, self.rows, self.inputs, self.values, self.memo
        numbers = self.nid
        # Invariant: seen[e] is 1 when a node already visited in this walk uses entry e and has left it open (what is
        # complete never changes); when nodes are passed over, all are taken for seen.
        seen = bytearray(len(values)) if stale is None else bytearray(b"\1") * len(values)
        found: set[int] = set()
        for i in order:
            node = nodes[i]
            op = node.op
            if op is None:
                continue
            reads = inputs[i]
            start, end = rows[i], rows[i + 1]
            backward = op.backward_of is not None and bool(node.control_deps)
            if backward:  # its outputs are like the inputs of its forward node whose gradients they are
                forward = numbers.get(node.control_deps[0])
                if forward is None:
                    raise FormatError(f"backward node {node.name!r}: its forward node is not in the graph")
                reads = inputs[forward]
            if stale is not None and stale.isdisjoint(reads) and stale.isdisjoint(range(start, end)):
                continue
            if backward:
                positions = op.grad_inputs
                for k, position in enumerate(positions(node.params) if callable(positions) else positions, start):
                    # What the forward node learns of this input later in the walk makes another visit here necessary.
                    e = reads[position]
                    new, old = values[e], values[k]
                    if new is not None and new is not old and _differ(old, new):
                        values[k] = new
                        if seen[k]:
                            found.add(k)
                    seen[e] = seen[k] = 1
            else:
                ins = [values[e] for e in reads]
                outs = values[start:end]
                key = (id(op), id(node.params), *ins, *outs)
                result = memo.get(key)
                if result is None:
                    result = memo[key] = self._told(op, node, ins, outs)
                new_ins, new_outs, open_ins, open_outs = result
                for position, new in new_ins:
                    e = reads[position]
                    # One entry may be read twice by a node, so the rule may have learnt two different things.
                    values[e] = self._merged(node, e, new)
                    if seen[e] or _differ(values[e], new):
                        found.add(e)
                for position, new in new_outs:
                    values[start + position] = new
                    if seen[start + position]:
                        found.add(start + position)
                for position in open_ins:
                    seen[reads[position]] = 1
                for position in open_outs:
                    seen[start + position] = 1
            if found and stale is not None:
                stale |= found
        return found

    def _merged(self, node: Node, entry: int, new: Any) -> Any:
        try:
            return self.kind.merge(self.values[entry], new, "an input used twice")
        except MXNetError as error:
            raise self.kind.error(f"{_where(node)}: {error}{_made_at(node)}") from own(error)

    def _told(self, op: Op, node: Node, ins: list[Any], outs: list[Any]) -> _Learnt:
        """What the operator's rule says, now or before."""
        return self.kind.settled.answer(op, node.params, (len(ins), *ins, *outs), partial(self._rule, node, ins, outs))

    def _rule(self, node: Node, ins: list[Any], outs: list[Any]) -> _Learnt:
        """Call the operator's rule."""
        op, kind = node.op, self.kind
        assert op is not None
        names = op.input_names(node.params)
        if len(names) != len(ins):
            raise FormatError(
                f"{_where(node)} takes {len(names)} input(s) {list(names)}, but the graph gives it {len(ins)}"
            )
        try:
            made_ins, made_outs = kind.rule(op)(node.params, list(ins), list(outs))
            new_ins = [
                new if old is None or old is new else kind.merge(old, new, f"input {name}")
                for name, old, new in zip(names, ins, made_ins, strict=True)
            ]
            new_outs = [
                new if old is None else kind.merge(old, new, "output") for old, new in zip(outs, made_outs, strict=True)
            ]
        except ParameterError as error:
            raise ParameterError(f"Error in {_where(node)}: {error}{_made_at(node)}") from own(error)
        except (MXNetError, ValueError, TypeError, IndexError) as error:
            facts = [f"{n}={_show(v)}" for n, v in zip(names, ins, strict=True)]
            facts += [
                f"{n}={_show(v)}" for n, v in zip(op.output_names(node.params), outs, strict=True) if v is not None
            ]
            raise kind.error(f"Error in {_where(node)}: {error}; {', '.join(facts)}{_made_at(node)}") from own(error)
        unknown = [[k for k, fact in enumerate(facts) if not kind.complete(fact)] for facts in (new_ins, new_outs)]
        return _news(ins, new_ins), _news(outs, new_outs), unknown[0], unknown[1]


def _kind(node: Node) -> tuple[int, int, int]:
    """Of equal nodes with equal inputs a rule says the same; the parser gives equal parameters one dictionary."""
    return id(node.op), id(node.params), len(node.inputs)


def _differ(old: Any, new: Any) -> bool:
    """True when two facts are not the same; NumPy holds ``dtype("float64")`` and None to be equal."""
    return old is not new and (old is None or new is None or bool(old != new))


def _news(old: list[Any], new: list[Any]) -> _News:
    return [(i, fact) for i, fact in enumerate(new) if _differ(old[i], fact)]


def _where(node: Node) -> str:
    assert node.op is not None
    return f"operator {node.op.name} (node {node.name!r})"


def _made_at(node: Node) -> str:
    return f"; created at {node.created_at}" if node.created_at else ""


def _show(value: Any) -> str:
    return shape_text(value) if value is None or isinstance(value, tuple) else str(value)
