"""Parts of a buffer: byte ranges with one var each, so that tasks on disjoint slices run concurrently.

A buffer begins with one var. A task that *writes* a slice cuts the ranges at both ends of the slice; a task takes the
vars of all ranges that its bytes overlap. Reads cut nothing, since concurrent reads of one range do not conflict. A
view counts from its first byte to its last, so two slices conflict if these spans overlap: rows of an array are
disjoint, columns are not (``tiles.py`` handles columns).

After a cut the old var keeps the bytes before the cut, but operations already pushed on it also concern the bytes after
it. So if operations may be pending, the cut names a *fence*: an operation that writes the old var and the new vars.
Taking the var of a wider range is always correct, so a cut may be skipped. It is skipped at a var that holds a failure,
because a fence would clear the failure, and in a buffer with too many busy parts.

Objects of this module are immutable and need no lock: the registry (``array_vars.py``) holds its lock and stores the
result.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence

from weftplan.engine.var import Var

MAX_PARTS = 256
"""Maximum parts of a buffer; a task on the whole buffer takes the vars of all of them."""


class Parts:
    """The byte ranges of a buffer.

    Invariant: ``vars[i]`` orders the bytes from ``starts[i]`` up to ``starts[i + 1]``; the last var orders all bytes
    after its start. ``starts`` rises from 0, the lowest address.
    """

    __slots__ = ("starts", "vars")

    def __init__(self, starts: Sequence[int], variables: Sequence[Var]) -> None:
        self.starts = starts
        self.vars = variables

    def touched(self, low: int, high: int) -> Sequence[Var]:
        """Return the vars of the bytes from ``low`` up to ``high``; at least one."""
        start = bisect_right(self.starts, low) - 1
        return self.vars[start : max(bisect_left(self.starts, high), start + 1)]

    def cut(
        self, low: int, high: int, new: Callable[[], Var], idle: Callable[[Var], bool]
    ) -> tuple[Parts, list[list[Var]]]:
        """Return parts with borders at ``low`` and ``high``, and the necessary fences; the same parts if it cannot cut.

        Args:
            low, high: addresses.
            new: makes a var.
            idle: returns whether no operation is pending on a var.
        """
        ends = [end for end in (low, high) if self.starts[bisect_right(self.starts, end) - 1] != end]
        if not ends:
            return self, []
        base = self if len(self.vars) + len(ends) <= MAX_PARTS else self._merged(idle)
        if len(base.vars) + len(ends) > MAX_PARTS:
            return self, []
        starts, variables = list(base.starts), list(base.vars)
        cut: dict[Var, list[Var]] = {}
        for end in ends:
            index = bisect_right(starts, end)
            if starts[index - 1] == end:
                continue
            divided = variables[index - 1]
            if divided.failure is not None:
                return self, []
            behind = new()
            starts.insert(index, end)
            variables.insert(index, behind)
            group = next((group for group in cut.values() if divided in group), None)
            if group is None:
                cut[divided] = [divided, behind]
            else:
                group.append(behind)
        return Parts(starts, variables), [group for var, group in cut.items() if not idle(var)]

    def _merged(self, idle: Callable[[Var], bool]) -> Parts:
        """Return the parts with idle neighbours merged."""
        starts: list[int] = []
        variables: list[Var] = []
        joins = False
        for start, var in zip(self.starts, self.vars, strict=True):
            free = var.failure is None and idle(var)
            if not (free and joins):
                starts.append(start)
                variables.append(var)
            joins = free
        return Parts(starts, variables)
