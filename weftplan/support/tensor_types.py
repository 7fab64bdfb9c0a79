"""Shared tensor types: shape, dtype, OpReq, in-place pair, alignment."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from weftplan.support.array_types import DType as DType

Shape = tuple[int, ...]
"""Dimensions; 0 is an unknown dimension during inference."""


class Req(IntEnum):
    """How an operator writes an output: MXNet's OpReq codes."""

    NULL = 0
    WRITE = 1
    INPLACE = 2
    ADD = 3


class InplacePair(NamedTuple):
    """A pair of an output and the input whose memory it may take; ``identity``: even if other nodes still read it."""

    input: int
    output: int
    identity: bool = False


def aligned(nbytes: int, alignment: int = 64) -> int:
    """Round ``nbytes`` up to ``alignment``, for example the size of an array in a workspace.

    >>> aligned(1), aligned(64), aligned(65)
    (64, 64, 128)
    """
    return -(-nbytes // alignment) * alignment
