"""Calls of operators' inference rules for single nodes, with cached answers.

A rule is called once per distinct (operator, parameters, known facts) in the whole process; see
``ops/core/rule_cache.py``. A :class:`Kind` holds the differences between shapes and dtypes; there are two of them. Any
thread may call this module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

from weftplan.errors import DTypeError, FormatError, MXNetError, ParameterError, ShapeError, own, shape_text
from weftplan.ops.core.params import p_dtype, p_shape
from weftplan.ops.core.rule_cache import Settled
from weftplan.ops.core.rules import is_known, merge_dtype, merge_shape
from weftplan.ops.core.schema import Op, Shape
from weftplan.symbol.node import Node

F = TypeVar("F")
"""A fact: a shape or a dtype."""
News = list[tuple[int, Any]]
"""(position, new fact) of each input or output about which a rule inferred more."""
Learnt = tuple[News, News, list[int], list[int]]
"""New facts of inputs and of outputs, and the positions of inputs and of outputs that are still partly unknown."""
Sort = tuple[int, int, int]
"""The result of :func:`sort_of`."""


class Kind(Generic[F]):
    """A kind of fact, shapes or dtypes: its names, parser, merge function, rule and error class."""

    __slots__ = ("complete", "error", "hint", "merge", "parse", "rule", "settled", "word")

    def __init__(
        self,
        word: str,
        rule: Callable[[Op], Callable[..., tuple[Sequence[F | None], Sequence[F | None]]]],
        parse: Callable[[object], F | None],
        complete: Callable[[F | None], bool],
        merge: Callable[[F | None, F | None, str], F | None],
        error: type[MXNetError],
    ) -> None:
        self.word = word
        self.rule = rule
        self.parse = parse
        self.hint = f"__{word}__"
        self.complete = complete
        self.merge = merge
        self.error = error
        self.settled = Settled[Learnt]()

    def told(self, op: Op, node: Node, ins: list[F | None], outs: list[F | None]) -> Learnt:
        """Return the answer of the operator's rule for a node with these facts, from the cache if possible."""
        return self.settled.answer(op, node.params, (len(ins), *ins, *outs), partial(self._rule, node, ins, outs))

    def outputs(self, op: Op, node: Node, ins: list[F | None]) -> list[F]:
        """Return the facts of the outputs of a node, all of whose inputs are known; raise an error if some are open."""
        _, outs, _, unknown = self.told(op, node, ins, [None] * op.num_outputs(node.params))
        if unknown:
            raise self.error(f"{self.word} of output {unknown[0]} of {where(node)} cannot be inferred{made_at(node)}")
        return [fact for _, fact in outs]

    def _rule(self, node: Node, ins: list[F | None], outs: list[F | None]) -> Learnt:
        """Call the operator's rule."""
        op = node.op
        assert op is not None
        names = op.input_names(node.params)
        if len(names) != len(ins):
            raise FormatError(
                f"{where(node)} takes {len(names)} input(s) {list(names)}, but the graph gives it {len(ins)}"
            )
        try:
            made_ins, made_outs = self.rule(op)(node.params, list(ins), list(outs))
            new_ins = [
                new if old is None or old is new else self.merge(old, new, f"input {name}")
                for name, old, new in zip(names, ins, made_ins, strict=True)
            ]
            new_outs = [
                new if old is None else self.merge(old, new, "output") for old, new in zip(outs, made_outs, strict=True)
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


SHAPES = Kind("shape", lambda op: op.infer_shape, _parse_shape, is_known, merge_shape, ShapeError)
DTYPES = Kind("dtype", lambda op: op.infer_dtype, p_dtype, lambda dtype: dtype is not None, merge_dtype, DTypeError)


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
