"""Which reuse of memory makes nobody wait, because the later user needs the results of the earlier ones anyway."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from weftplan.planner.packing.problem import Int64


@dataclass(frozen=True, slots=True)
class Precedence:
    """Sets of steps per buffer. A set is one integer, bit s for step s; how steps are numbered does not matter.

    The first writer of a buffer comes after all users of another one anyway where ``users | needed == needed``, of the
    other one's users and of what it needs itself.

    Attributes:
        users: the steps that read or write the buffer.
        needed: the steps that the first writer of the buffer waits for anyway, and itself.
    """

    users: Sequence[int]
    needed: Sequence[int]

    def take(self, index: Int64) -> Precedence:
        """The same about the buffers of these numbers."""
        numbers = index.tolist()
        return Precedence([self.users[k] for k in numbers], [self.needed[k] for k in numbers])

    def waits(self, pointers: Int64, earlier: npt.NDArray[np.integer[Any]]) -> int:
        """How many of the rows that `reuse_edges` gives make somebody wait."""
        begin, others, users = pointers.tolist(), earlier.tolist(), self.users
        return sum(
            users[k] | needed != needed
            for later, needed in enumerate(self.needed)
            for k in others[begin[later] : begin[later + 1]]
        )
