"""The graph that the planner's core plans: nodes and entries as numbers, and the memory effects of nodes.

Nodes are numbered so that every one comes after what it needs. Entry ``k`` of node ``n`` has the id ``row[n] + k``;
a variable, which holds what the caller gives, has one entry. The graph knows neither symbols nor operators: a front end
such as :mod:`weftplan.planner.symbolic` says in one :class:`Work` per node what it may do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import InitVar, dataclass, field
from itertools import accumulate, chain, repeat

import numpy as np
from numpy.typing import NDArray

from weftplan.support.tensor_types import InplacePair

IntArray = NDArray[np.int64]


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Work:
    """The memory effects of a node. Nodes of one kind may share one object.

    Attributes:
        label: its name in reports, and in lists of names in the options.
        ignored: inputs whose shape alone matters.
        inplace: outputs that may be computed over inputs, in the order of trials.
        writes: inputs that it changes, which must be variables.
        over: outputs that must lie in the memory of an input, whatever the options say; they may be smaller. With
            ``identity`` a view; else a write to a result, which earlier readers of that result precede.
        is_sum: it adds its second input to its first, so that the maker of the second may do that in its place.
        only_overwrites: it cannot add to a destination (a copy between devices).
        may_repeat: it gives the same result when it runs a second time, and a graph may then do without the first.
        asked_twice: the caller wants it to be repeated, whatever the options say.
        rules: values of ``PlanOptions.recompute`` whose fixed rule repeats it.
    """

    label: str
    ignored: tuple[int, ...] = ()
    inplace: tuple[InplacePair, ...] = ()
    writes: tuple[int, ...] = ()
    over: tuple[InplacePair, ...] = ()
    is_sum: bool = False
    only_overwrites: bool = False
    may_repeat: bool = True
    asked_twice: bool = False
    rules: frozenset[str] = frozenset(("mxnet", "echo"))


VARIABLE = Work(label="variable", may_repeat=False, rules=frozenset())
"""The work of a node that holds what the caller gives."""


@dataclass(eq=False, repr=False, kw_only=True)
class Graph:
    """Nodes in numbers."""

    names: Sequence[str]
    works: Sequence[Work]
    inputs: list[list[int]]
    """Entries that each node reads."""
    controls: list[list[int]] = field(default_factory=list)
    """Nodes that each node must follow although it reads nothing of them; none by default."""
    counts: InitVar[Sequence[int]] = ()
    """How many outputs each node has; 1 for a variable, and for all by default."""
    heads: InitVar[Iterable[int]]
    """Entries that the caller gets."""
    effects: Sequence[int] = ()
    """Nodes that run for their effect: rewrites keep them, although no output depends on them."""
    origin: Sequence[int] = ()
    """For a rewritten graph the node of the front end's graph that each node is, or runs again; -1 for a node that the
    rewrite added."""
    again: frozenset[int] = frozenset()
    """Nodes that run a second time what their origin is."""
    base: Graph | None = None
    """For a rewritten graph the front end's; None for the front end's itself, which would live on in a cycle."""
    num_nodes: int = field(init=False)
    """Number of nodes, variables included."""
    num_entries: int = field(init=False)
    """Number of entries: one per variable, one per output (also hidden) of every other node."""
    row: list[int] = field(init=False)
    """First entry of each node, and after them the number of entries."""
    entry_node: list[int] = field(init=False)
    """Node id that makes each entry."""
    is_variable: list[bool] = field(init=False)
    outputs: list[int] = field(init=False)
    """Entry ids of the heads, in the order given (duplicates kept)."""

    def __post_init__(self, counts: Sequence[int], heads: Iterable[int]) -> None:
        """Number the entries."""
        self.controls = self.controls or [[] for _ in self.works]
        counts = counts or [1] * len(self.works)
        self.num_nodes = len(self.works)
        self.row = [0, *accumulate(counts)]
        self.num_entries = self.row[-1]
        self.entry_node = list(chain.from_iterable(map(repeat, range(len(counts)), counts)))
        self.is_variable = [work is VARIABLE for work in self.works]
        self.outputs = list(heads)
        self.origin = self.origin or range(len(self.works))

    def entry_name(self, eid: int) -> str:
        """A variable's name, or ``<node>_<output>``."""
        nid = self.entry_node[eid]
        name = self.names[nid]
        return name if self.works[nid] is VARIABLE else f"{name}_{self.output_name(nid, eid - self.row[nid])}"

    def output_name(self, nid: int, index: int) -> str:
        """Return the name of output ``index`` of a node."""
        if self.base is not None and self.origin[nid] >= 0:
            return self.base.output_name(self.origin[nid], index)
        return "output" if self.row[nid + 1] - self.row[nid] == 1 else f"output{index}"

    def variables(self) -> list[int]:
        """Node ids of the variables, in order."""
        return [nid for nid, is_variable in enumerate(self.is_variable) if is_variable]

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__}: {self.num_nodes} nodes, {self.num_entries} entries, {len(self.outputs)} outputs>"
        )
