"""Elementwise nodes that follow one another, as one operator: no array between them is ever written whole.

Only the planner makes nodes of it (``planner/symbolic/passes/fuse_elementwise.py``), so it has no gradient, no name
that a user can call and no place in the table of operators. NumPy's kernels of the links run on one block after the
other, which stays in the cache between them; what a link makes lies in the block of the result, or in scratch where
that would overwrite what is still needed. ``ops/compiled`` offers one loop for chains whose formulas can be recorded.
Either has the bits of the nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from math import prod
from typing import Any, NamedTuple

from weftplan.ops.core.registry import register_planner_op
from weftplan.ops.core.rules import same_dtype, same_shape
from weftplan.ops.core.schema import Arrays, InplacePair, Op, OpContext, Param, Params, TensorSpec, aligned

BLOCK = 1 << 15
"""Elements of a block: a few fit a core's second-level cache."""
MOST_PREPARED = 2048
"""Blocks: for arrays of more, 256 MB of float32, the views would be many. To make them in every run costs half as much
as the work."""
RESULT = -1
"""The place of a value that lies in the block of the result."""


class Link(NamedTuple):
    """One node of a chain: values below :attr:`Chain.inputs` are inputs, the next is what the first link makes."""

    op: Op
    params: Params
    operands: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Chain:
    """Links in the order in which they run; the last one makes the result, each other value has one reader. Chains are
    equal where their texts are: numbers can be equal that are not the same, such as the zeros."""

    inputs: int
    links: tuple[Link, ...]
    places: tuple[int, ...] = field(init=False)
    """Where the value of each link lies: :data:`RESULT`, or the number of a block of scratch."""
    rooms: int = field(init=False)
    """Blocks of scratch."""
    inplace: tuple[InplacePair, ...] = field(init=False)

    def __post_init__(self) -> None:
        places, rooms, pairs = _placed(self)
        object.__setattr__(self, "places", places)
        object.__setattr__(self, "rooms", rooms)
        object.__setattr__(self, "inplace", pairs)

    def __repr__(self) -> str:
        return self._text

    @cached_property
    def _text(self) -> str:
        # The same in every process, since it is part of the name of what is measured and kept.
        links = [(link.op.name, sorted(link.params.items()), link.operands) for link in self.links]
        return f"<Chain {self.inputs} {links}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Chain) and self._text == other._text

    def __hash__(self) -> int:
        return hash(self._text)


def _may_overwrite(link: Link, positions: Sequence[int]) -> bool:
    """Whether the link may write its result over the operands at these positions."""
    pairs = {pair.input for pair in link.op.inplace_pairs(link.params) if pair.output == 0}
    return pairs.issuperset(positions)


def _placed(chain: Chain) -> tuple[tuple[int, ...], int, tuple[InplacePair, ...]]:
    """(places, blocks of scratch, inputs whose memory the result may take)."""
    links, first = chain.links, chain.inputs
    last_read = {value: k for k, link in enumerate(links) for value in link.operands}
    places: list[int] = []

    def positions(value: int, k: int) -> list[int]:
        return [i for i, operand in enumerate(links[k].operands) if operand == value]

    def is_free(place: int, k: int) -> bool:
        live = [v for v, where in enumerate(places, first) if where == place and last_read[v] >= k]
        return all(last_read[v] == k and _may_overwrite(links[k], positions(v, k)) for v in live)

    rooms = 0
    last = len(links) - 1
    for k in range(last):
        candidates = (RESULT, *range(rooms))
        places.append(next((place for place in candidates if is_free(place, k)), rooms))
        rooms = max(rooms, places[-1] + 1)
    for v, where in enumerate(places, first):
        if where == RESULT and last_read[v] == last and not _may_overwrite(links[last], positions(v, last)):
            places[v - first] = rooms  # a block of its own, or the last link could not write its result
            rooms += 1
    places.append(RESULT)
    begins = places.index(RESULT)
    pairs = [
        InplacePair(i, 0)
        for i in range(first)
        if last_read[i] < begins or (last_read[i] == begins and _may_overwrite(links[begins], positions(i, begins)))
    ]
    return tuple(places), rooms, tuple(pairs)


class _Kernel:
    """Runs the links on blocks; it can be prepared."""

    __slots__ = ()

    def __call__(self, ctx: OpContext, params: Params, inputs: Arrays, outputs: Arrays) -> None:
        for call in self._calls(ctx, params["chain"], inputs, outputs[0]):
            call()

    def prepare(self, ctx: OpContext, params: Params, inputs: Arrays, outputs: Arrays) -> Callable[[], object] | None:
        """The calls of all links on the views of every block; None for very many blocks."""
        if -(-outputs[0].size // BLOCK) > MOST_PREPARED:
            return None
        return partial(_run_all, list(self._calls(ctx, params["chain"], inputs, outputs[0])))

    def _calls(self, ctx: OpContext, chain: Chain, inputs: Arrays, out: Any) -> Iterator[Callable[[], object]]:
        size, dtype = out.size, out.dtype
        some = min(size, BLOCK)
        rooms = [ctx.take((some,), dtype) for _ in range(chain.rooms)]
        spare = _spare(chain, some, dtype)
        scratch = ctx.take((spare,), "uint8") if spare else None
        flat = [array.reshape(-1) for array in inputs]
        result = out.reshape(-1)
        for start in range(0, size, BLOCK):
            stop = min(start + BLOCK, size)
            values = [array[start:stop] for array in flat]
            for link, place in zip(chain.links, chain.places, strict=True):
                target = result[start:stop] if place == RESULT else rooms[place][: stop - start]
                operands = [values[i] for i in link.operands]
                yield _link_call(ctx.xp, scratch, link, operands, [target])
                values.append(target)


def _link_call(xp: Any, scratch: Any, link: Link, operands: list[Any], targets: list[Any]) -> Callable[[], object]:
    """One link on one block; links use the same scratch, one after the other."""
    kernel: Any = link.op.forward
    prepare = getattr(kernel, "prepare", None)
    found: Callable[[], object] | None = None
    if prepare is not None:
        found = prepare(OpContext(xp, workspace=scratch), link.params, operands, targets)
    if found is not None:
        return found
    return partial(kernel, OpContext(xp, workspace=scratch), link.params, operands, targets)


def _run_all(calls: Sequence[Callable[[], object]]) -> None:
    for call in calls:
        call()


def _spare(chain: Chain, size: int, dtype: Any) -> int:
    """Bytes of scratch of the most demanding link on a block."""
    block = TensorSpec((size,), dtype)
    return max(link.op.workspace_bytes(link.params, [block] * len(link.operands), [block]) for link in chain.links)


def _workspace(params: Params, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
    chain: Chain = params["chain"]
    shape, dtype = outputs[0]
    some = min(prod(shape), BLOCK)
    return chain.rooms * aligned(some * dtype.itemsize) + aligned(_spare(chain, some, dtype))


def _given(value: Any) -> Chain:
    if not isinstance(value, Chain):
        raise ValueError(f"expected a chain of the planner's, got {type(value).__name__}")
    return value


ELEMENTWISE = register_planner_op(
    Op(
        name="elementwise",
        forward=_Kernel(),
        infer_shape=same_shape,
        infer_dtype=same_dtype,
        params=(Param("chain", _given, doc="the nodes that have become one"),),
        inputs=lambda params: tuple(f"data{k}" for k in range(params["chain"].inputs)),
        inplace=lambda params: params["chain"].inplace,
        workspace=_workspace,
        doc="Elementwise nodes that follow one another, in one pass.",
    )
)


def is_elementwise(op: Op | None) -> bool:
    """Whether an operator works on one element of each array after the other.

    Sums of gradients are left to the planner, which lets whoever makes a term add it in place.
    """
    if op is None or op.name == "_grad_add":
        return False
    return op.name == "add_n" or getattr(op.forward, "elementwise", False)


def may_be_link(op: Op, params: Params, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> bool:
    """Whether a node is elementwise: one output, arrays of one shape and one dtype, a kernel that works on blocks."""
    if not is_elementwise(op) or len(outputs) != 1 or not inputs or op.aux or op.random or op.ignored(params):
        return False
    return all(spec == outputs[0] for spec in inputs)
