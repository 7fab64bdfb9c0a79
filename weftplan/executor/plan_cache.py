"""The plan cache: a bind for the same shapes and settings reuses the plan of an earlier bind, also across processes.

A plan depends on the graph, on the caller's arguments, on the settings, and on the implementations of operators. The
cache reuses a plan only if all of them are unchanged. Symbols with user-defined operators (``Custom``) are planned at
every bind, because their inference may give other results each time.

Within a process, plans are stored in an attribute of their symbol. Planned graphs never change, so several executors
may share one. Threads that bind one symbol concurrently may plan it twice.

For later processes, a plan is stored in a file. The file's name is the hash of everything that the plan depends on,
including versions and the package's own source files, so a file is never stale. It contains numbers and
names (:mod:`weftplan.planner.symbolic.stored_plans`), no code; :mod:`weftplan.support.user_cache` checks that its
content can be trusted. There are no files for graphs with operators from outside the package. There are none for plans
for a GPU either, because these depend on libraries and a device that the hash does not cover. Any thread and process
may read and write files at any time.
"""

from __future__ import annotations

import hashlib
import marshal
import os
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from weftplan import config
from weftplan.ops.core import implementations
from weftplan.ops.core.implementations import Implementation, compiler
from weftplan.planner import PlannedGraph, PlanOptions, stop_request
from weftplan.planner.symbolic import stored_plans
from weftplan.support import user_cache
from weftplan.symbol import Symbol
from weftplan.symbol.node import Entry, Node, Order, depth_first_order

Replaced = tuple[tuple[str, str, Implementation], ...]
"""The result of :func:`weftplan.ops.core.implementations.replaced`."""
MAX_PLANS = 4
"""Maximum number of plans in memory for one symbol: enough for training with validation, or for a few buckets."""


@dataclass(slots=True)
class _CachedPlans:
    """The cached plans of a symbol. They are valid while the symbol's graph equals :attr:`graph`."""

    graph: list[Any]
    """The description of the symbol's graph."""
    plans: list[tuple[Hashable, PlannedGraph]] = field(default_factory=list)
    """Keys and plans, the plan used last at the end. A list, because comparing a few keys is faster than hashing one.
    Threads replace the list and never change it in place, so a reader needs no lock."""


def _description(nodes: list[Node], entries: Sequence[Entry]) -> list[object]:
    """Return a list of all facts of nodes that a plan depends on. Equal lists describe the same nodes in one state."""
    # Parsed parameters are never changed in place, so their identity is compared. The list also contains the dictionary
    # itself, so that no other object gets its identity. One flat list is fast for Python's garbage collector.
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
    """Return the keys and the values of a table as two tuples, which is faster than a tuple for each item."""
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
    """Return the cached plan for this symbol, these arguments and the settings, or call ``plan`` and cache its result.

    Plans of symbols with user-defined operators are not cached.

    Args:
        symbol: the graph.
        options: plan options.
        facts: facts of variables from the caller (shapes, dtypes, …), by kind and name.
        more: everything else that the plan depends on.
        plan: plans the graph, given its depth-first order.
        order: the depth-first order of the symbol; None: it is computed.
    """
    if order is None:
        order = depth_first_order(entry[0] for entry in symbol.entries)
    nodes = order[0]
    for node in nodes:
        if node.op is not None and node.op.single:
            return plan(order)
    cached, described = symbol.cached_plans, _description(nodes, symbol.entries)
    if cached is None or cached.graph != described:
        cached = symbol.cached_plans = _CachedPlans(described)
    question = (more, *[(kind, *_flat(by_name)) for kind, by_name in facts.items()], config.in_force())
    replaced = implementations.replaced()
    key = options, question, replaced
    plans: list[tuple[Hashable, PlannedGraph]] = cached.plans
    result = next((planned for cached_key, planned in plans if cached_key == key), None)
    if result is None:
        file = PlanFile(symbol, order, options, question, replaced)
        result = file.load()
        if result is None:
            result = plan(order)
            file.keep(result)
    other_plans = [
        pair for pair in cached.plans if pair[1] is not result
    ]  # read again: other threads may have added plans
    cached.plans = [*other_plans[-MAX_PLANS + 1 :], (key, result)]
    return result


_FORMAT = 2
"""Format version of ``marshal``: the last in which equal values have equal bytes, even if they share objects."""


class PlanFile:
    """The file in the cache folder for one plan; it may not exist yet."""

    def __init__(
        self, symbol: Symbol, order: Order, options: PlanOptions, question: Hashable, replaced: Replaced
    ) -> None:
        """
        Args:
            symbol: the graph.
            order: its depth-first order.
            options: plan options.
            question: everything else from the caller that the plan depends on; equal values have the same ``repr``.
            replaced: the implementations of operators that are not the package's own.
        """
        self._order, self._options = order, options
        self._folder = user_cache.folder("plans") if _CODE and config.get("WEFTPLAN_PLAN_CACHE") else None
        self._name = ""
        if self._folder is not None:
            try:
                graph = stored_plans.described(order, symbol.entries)
            except stored_plans.NotPlainError:
                self._folder = None
            else:
                digest = hashlib.sha256(marshal.dumps(graph, _FORMAT))
                digest.update(repr((_CODE, options, question, np.__version__, sys.version)).encode())
                digest.update(
                    repr([(node, op, *_names(implementation)) for node, op, implementation in replaced]).encode()
                )
                self._name = digest.hexdigest()

    def load(self) -> PlannedGraph | None:
        """Return the stored plan, or None if there is none that is valid for this machine's compiler."""
        data = None if self._folder is None else user_cache.load(self._folder, self._name)
        if data is None:
            return None
        written_for, content = marshal.loads(data)
        if written_for and written_for != repr(compiler()):
            return None  # kernels were chosen with another compiler, or without one
        return stored_plans.loaded(content, self._order[0])

    def keep(self, planned: PlannedGraph) -> None:
        """Store a plan for later processes.

        Do nothing if files are switched off, if a node runs on a GPU, if an operator is from outside the package, or if
        the search for the plan was stopped early.
        """
        # A search that was stopped early may have missed a better plan.
        if self._folder is None or stop_request.asked():
            return
        if not all(context.is_host for context in {id(context): context for context in planned.devices}.values()):
            return
        try:
            content = stored_plans.dumped(planned, self._order)
        except stored_plans.NotPlainError:
            return
        compiled = self._options.kernels != "numpy" and any(choice.several for choice in planned.kernels.values())
        data = marshal.dumps((repr(compiler()) if compiled else "", content), _FORMAT)
        user_cache.keep(self._folder, self._name, data)


def _names(implementation: Implementation | None) -> Iterator[str]:
    """Yield the names of an implementation and of those that are tried after it."""
    while implementation is not None:
        yield implementation.name
        implementation = implementation.otherwise


def _state_of_code() -> str:
    """Return a hash of paths, sizes and times of the source files that planning uses; empty if there are no files."""
    package = Path(__file__).parents[1]
    files = [
        os.path.join(at, name)
        for part in ("planner", "symbol", "ops", "kernels", "device", "executor")
        for at, _, names in os.walk(package / part)
        for name in names
    ]
    files += map(str, package.iterdir())
    states = [(path, os.stat(path)) for path in sorted(files) if path.endswith(".py")]
    return user_cache.key(*(f"{path} {state.st_mtime_ns} {state.st_size}" for path, state in states)) if states else ""


_CODE = _state_of_code()  # at import, when the files are those that run
