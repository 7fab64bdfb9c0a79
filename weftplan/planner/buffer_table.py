"""Rows that reports make of a plan: one buffer with everything that a picture or a table says about it.

``weftplan.report`` fills them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from weftplan.ops.schema import DType, Shape

CALLER = "(caller)"
"""Last reader of an output of the graph."""
USES = ("activations", "gradients", "scratch", "recomputed", "spilled")
"""What planned memory is for: results of the forward part, of the backward part, scratch of one operator, forward
results computed again, results that wait on the host or came back from it."""
NOBODY = "(nobody)"
"""Last reader of an entry that is made but never read."""


@dataclass(frozen=True, slots=True)
class Bar:
    """One buffer: an entry with planned memory, or a node's scratch. A rectangle of time and address."""

    name: str
    kind: str
    """Name of its :class:`~weftplan.planner.inplace.Kind` in small letters, or ``workspace``."""
    device: str
    first: int
    """Alive during steps [first, last)."""
    last: int
    address: int
    """Bytes from the start of the device's planned memory, its slabs one after the other."""
    nbytes: int
    shape: Shape
    dtype: str
    op: str
    """Operator that makes it."""
    maker: str
    """Name of the node that makes it."""
    last_reader: str
    """Name of the node that reads it last, :data:`CALLER` or :data:`NOBODY`."""
    storage: int
    use: str
    """What it is for: one of :data:`USES`."""

    def as_dict(self) -> dict[str, Any]:
        """The fields by name, for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Alive:
    """One buffer that is alive at some step."""

    name: str
    nbytes: int
    shape: Shape
    dtype: DType | None
    """None for scratch."""
    op: str
    """Operator that makes it."""
    first: int
    last: int
    last_reader: str
    """Name of the node that reads it last; ``(caller)`` for an output."""
    use: str = "scratch"
    """What it is for, as in :class:`Bar`."""
