"""Plans in files: a process does not plan what an earlier one of this user has planned on this machine.

The name of a file is the hash of everything that a plan depends on: the graph by value, what the caller says of it, the
settings, who may compute which operator, versions, and the state of this package's own files. So whatever changes any
of it plans anew, and no file is ever out of date. A file holds numbers and names
(:mod:`weftplan.planner.symbolic.stored_plans`), nothing that is run; :mod:`weftplan.support.user_cache` says why its
content can be trusted. Where there is no such folder, everything is planned anew. So are graphs with operators that
are not the library's own, and plans for a GPU, which depend on libraries and a device that nothing here looks at.

Any thread and process may read and keep at any time.
"""

from __future__ import annotations

import hashlib
import marshal
import os
import sys
from collections.abc import Hashable, Iterator
from functools import lru_cache
from pathlib import Path

import numpy as np

from weftplan import config
from weftplan.ops.compiled.target import host
from weftplan.ops.core import implementations
from weftplan.ops.core.implementations import Implementation
from weftplan.planner import PlannedGraph, PlanOptions, stopping
from weftplan.planner.symbolic import stored_plans
from weftplan.support import user_cache
from weftplan.symbol import Symbol
from weftplan.symbol.traversal import Order

_FORMAT = 2
"""Of ``marshal``: the last one in which equal values have equal bytes, whatever objects they share."""


class PlanFile:
    """The file of one plan, which may not exist yet."""

    def __init__(
        self, symbol: Symbol, order: Order, options: PlanOptions, question: Hashable, provided: Hashable
    ) -> None:
        """
        Args:
            question: what a plan of the symbol depends on, but options; equal questions have equal texts.
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
        data = user_cache.load(self._place, self._name)
        if data is None:
            return None
        compiler, content = marshal.loads(data)
        if compiler and compiler != repr(host()):
            return None  # who can compute what was decided by another compiler, or without one
        return stored_plans.loaded(content, self._order[0])

    def keep(self, planned: PlannedGraph) -> None:
        """Keep a plan for later processes, where that is possible."""
        # A search that was ended early has not found what the next one may.
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
    """What planning reads of this process apart from settings."""
    offered = [
        (where, op, way.name)
        for where in ("host", "sim")
        for op, first in implementations.provided(where).items()
        for way in _ways(first)
    ]
    return repr((offered, np.__version__, sys.version)).encode()


def _ways(first: Implementation | None) -> Iterator[Implementation]:
    """Implementations in the order in which they are asked."""
    while first is not None:
        yield first
        first = first.otherwise


def _state_of_code() -> str:
    """What tells one state of the code that plans from another; empty where there are no files to look at."""
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
