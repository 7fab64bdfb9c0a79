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

    Attributes:
        users: the steps that read or write the buffer.
        needed: the steps that the first writer of the buffer waits for anyway, and itself.

    >>> order = Precedence(users=[0b0011, 0b1000], needed=[0b0001, 0b1011])
    >>> order.holds(0, 1), order.holds(1, 0)
    (True, False)
    """

    users: Sequence[int]
    needed: Sequence[int]

    def holds(self, earlier: int, later: int) -> bool:
        """Whether the first writer of buffer ``later`` comes after all users of buffer ``earlier`` anyway."""
        needed = self.needed[later]
        return self.users[earlier] | needed == needed

    def take(self, index: Int64) -> Precedence:
        """The same about the buffers of these numbers."""
        numbers = index.tolist()
        return Precedence([self.users[k] for k in numbers], [self.needed[k] for k in numbers])

    def waits(self, pointers: Int64, earlier: npt.NDArray[np.integer[Any]]) -> int:
        """How many of the rows that `reuse_edges` gives do not hold."""
        begin = pointers.tolist()
        others = earlier.tolist()
        users = self.users
        count = 0
        for later, needed in enumerate(self.needed):
            for k in others[begin[later] : begin[later + 1]]:
                if users[k] | needed != needed:
                    count += 1
        return count
