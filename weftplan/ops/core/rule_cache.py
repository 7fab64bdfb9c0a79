"""The rule cache: results of operators' inference rules, computed once per process.

Shapes, dtypes, scratch bytes and the implementation of a call depend only on the operator, its parameters and a few
facts, such as input shapes. Results are often used again: the networks of a process have many equal layers, and a
symbol is analysed several times, for its shapes, for training and for inference.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Generic, TypeVar

from weftplan.ops.core.schema import Op, Params

R = TypeVar("R")

MAX_ENTRIES = 4096
"""Maximum cached results of a rule; the oldest are dropped."""


class Settled(Generic[R]):
    """A cache of one rule's results, for any thread. Callers must not modify a result."""

    __slots__ = ("_results",)

    def __init__(self) -> None:
        self._results: dict[tuple[Hashable, ...], tuple[Op, R]] = {}

    def answer(self, op: Op, params: Params, facts: Iterable[Hashable], ask: Callable[[], R]) -> R:
        """Return ``ask()``, cached by operator, parameters and facts.

        Results of user-defined operators are not cached, since their rules may change, nor are results for parameters
        that cannot be hashed, or errors.
        """
        key = (op.name, *params.items(), *facts)  # names are in the key, because users pass parameters in any order
        try:
            cached = None if op.single else self._results.get(key)
        except TypeError:
            return ask()
        if cached is not None and cached[0] is op:
            return cached[1]
        result = ask()
        if not op.single:
            while len(self._results) >= MAX_ENTRIES:
                self._results.pop(next(iter(self._results), key), None)
            self._results[key] = op, result
        return result
