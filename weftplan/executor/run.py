"""The state of one run of an executor, and the calls of its steps.

The values are fixed on the thread that pushes a run. Workers only read them, which makes a run the same on every
engine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class RunState:
    """The differences between runs, fixed on the pushing thread."""

    is_train: bool
    seed: int = 0
    counter: int = 0


Call = Callable[[], Any]
"""Does the work of one step in one run."""
Bind = Callable[[RunState], Call]
"""Makes the call of a run."""
