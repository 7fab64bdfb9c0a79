"""The plan cache: a second bind for the same shapes and settings plans nothing, in this process or in a later one.

A plan depends on the graph, on the caller's arguments, on the settings, and on the implementations of operators. All of
this is compared by value, so a cached plan equals what planning would give. Symbols with operators of the user's own
(``Custom``), whose inference may answer differently each time, are planned at every bind.

In a process plans hang on their symbol and go with it. Planned graphs never change, so several executors may share one;
threads that bind one symbol concurrently may plan it twice.

In files, the name is the hash of everything that a plan depends on, versions and the state of this package's own files
included, so no file is ever out of date. A file holds numbers and names
(:mod:`weftplan.planner.symbolic.stored_plans`), nothing that is run; :mod:`weftplan.support.user_cache` says why its
content can be trusted. Graphs with operators that are not the library's own, and plans for a GPU, which depend on
libraries and a device that nothing here looks at, have no file. Any thread and process may read and keep at any time.
"""

from __future__ import annotations

import hashlib
import marshal
import os
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from weftplan import config
from weftplan.ops.compiled.target import host
from weftplan.ops.core import implementations
from weftplan.ops.core.implementations import Implementation
from weftplan.planner import PlannedGraph, PlanOptions, stopping
from weftplan.planner.symbolic import stored_plans
from weftplan.support import user_cache
from weftplan.symbol import Symbol
from weftplan.symbol.node import Entry, Node, Order, depth_first_order

MOST = 4
"""Plans kept for one symbol: the shapes among which a training with validation, or a few buckets, go to and fro."""


@dataclass(slots=True)
class _Kept:
    """A graph as it was when it was planned, and its plans."""

    graph: list[Any]
    plans: list[tuple[Hashable, PlannedGraph]] = field(default_factory=list)
    """Plans with everything else that they depend on; the plan used last is at the end. The list is never changed,
    but replaced. To compare its few items takes less time than to make a hash of such a key."""


def _description(nodes: list[Node], entries: Sequence[Entry]) -> list[object]:
    """Everything that a plan reads of nodes; equal descriptions are of the same nodes in the same state.

    Parsed parameters are never changed in place, so their identity stands for them (the dictionary is held, too). One
    list, not one for each node: Python's collector looks at every object that stays.
    """
    facts: list[Any] = []
    for node in nodes:
        inputs, deps = node.inputs, node.control_deps
        facts += (
            node, node.op, node.name, id(node.params), dict(node.attrs), len(inputs), *inputs, len(deps), *deps,
            node.version, node.params,
        )  # fmt: skip
    facts += entries
    return facts


def _flat(table: Mapping[str, Hashable]) -> tuple[Hashable, ...]:
    """Return a table as keys and values, without an object for each item."""
    return tuple(table), tuple(table.values())


def planned_once(
    symbol: Symbol,
    options: PlanOptions,
    facts: Mapping[str, Mapping[str, Hashable]],
    more: Hashable,
    plan: Callable[[Order], PlannedGraph],
    *,
    order: Order | None = None,
) -> PlannedGraph:
    """Return ``plan`` of the depth-first order, or what it gave before for the same graph, facts and environment: in
    this process, or in an earlier one.

    Args:
        options: how to plan.
        facts: facts of variables from the caller (shapes, dtypes, …), by kind and name.
        more: everything else that the plan depends on.
        order: the depth-first order of the symbol, when the caller has it.
    """
    if order is None:
        order = depth_first_order(entry[0] for entry in symbol.entries)
    nodes = order[0]
    for node in nodes:
        if node.op is not None and node.op.single:
            return plan(order)
    kept, described = symbol.kept, _description(nodes, symbol.entries)
    if kept is None or kept.graph != described:
        kept = symbol.kept = _Kept(described)
    question = (more, *[(kind, *_flat(by_name)) for kind, by_name in facts.items()], config.in_force())
    provided = tuple([_flat(implementations.provided(where)) for where in ("host", "gpu")])
    key = options, question, provided
    plans: list[tuple[Hashable, PlannedGraph]] = kept.plans
    result = next((planned for asked, planned in plans if asked == key), None)
    if result is None:
        file = PlanFile(symbol, order, options, question, provided)
        result = file.load()
        if result is None:
            result = plan(order)
            file.keep(result)
    others = [pair for pair in kept.plans if pair[1] is not result]  # other threads may have added some
    kept.plans = [*others[-MOST + 1 :], (key, result)]
    return result


_FORMAT = 2
"""Version of ``marshal``: the last version in which equal values have equal bytes, whatever objects they share."""


class PlanFile:
    """The file of one plan, which may not exist yet."""

    def __init__(
        self, symbol: Symbol, order: Order, options: PlanOptions, question: Hashable, provided: Hashable
    ) -> None:
        """
        Args:
            question: everything that a plan of the symbol depends on, but options; equal questions have equal texts.
            provided: equal as long as the same implementations of operators are provided.
        """
        self._order, self._options = order, options
        self._place = user_cache.folder("plans") if _CODE and config.get("WEFTPLAN_PLAN_CACHE") else None
        self._name = ""
        if self._place is not None:
            try:
                graph = stored_plans.described(order, symbol.entries)
            except stored_plans.NotPlainError:
                self._place = None
            else:
                digest = hashlib.sha256(marshal.dumps(graph, _FORMAT))
                digest.update(repr((_CODE, options, question)).encode())
                digest.update(_surroundings(provided))
                self._name = digest.hexdigest()

    def load(self) -> PlannedGraph | None:
        """The plan that is kept, if there is one."""
        data = None if self._place is None else user_cache.load(self._place, self._name)
        if data is None:
            return None
        compiler, content = marshal.loads(data)
        if compiler and compiler != repr(host()):
            return None  # the choice of kernels is that of another compiler, or of none
        return stored_plans.loaded(content, self._order[0])

    def keep(self, planned: PlannedGraph) -> None:
        """Keep a plan for later processes, if that is possible."""
        # A search that was ended early may have missed a better plan.
        if self._place is None or stopping.asked():
            return
        if not all(context.is_host for context in {id(one): one for one in planned.devices}.values()):
            return
        try:
            content = stored_plans.dumped(planned, self._order)
        except stored_plans.NotPlainError:
            return
        asked = self._options.kernels != "numpy" and any(choice.several for choice in planned.kernels.values())
        kept = marshal.dumps((repr(host()) if asked else "", content), _FORMAT)
        user_cache.keep(self._place, self._name, kept)


@lru_cache(maxsize=1)
def _surroundings(_provided: Hashable) -> bytes:
    """Return everything that planning reads of this process apart from settings."""
    offered = []
    for where in ("host", "sim"):
        for op, way in implementations.provided(where).items():
            one: Implementation | None = way
            while one is not None:
                offered.append((where, op, one.name))
                one = one.otherwise
    return repr((offered, np.__version__, sys.version)).encode()


def _state_of_code() -> str:
    """Return a key of the state of the code that plans; empty if there are no files to look at."""
    package = Path(__file__).parents[1]
    files = [
        os.path.join(at, name)
        for part in ("planner", "symbol", "ops", "device", "executor")
        for at, _, names in os.walk(package / part)
        for name in names
    ]
    files += map(str, package.iterdir())
    states = [(path, os.stat(path)) for path in sorted(files) if path.endswith(".py")]
    return user_cache.key(*(f"{path} {state.st_mtime_ns} {state.st_size}" for path, state in states)) if states else ""


_CODE = _state_of_code()  # as it is when it is loaded
