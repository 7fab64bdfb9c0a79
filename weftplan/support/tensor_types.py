"""Words for data that operators, the planner and executors share: shape, dtype, request, in-place pair, alignment."""

from __future__ import annotations

from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np

Shape = tuple[int, ...]
"""Dimensions; 0 is an unknown dimension while inferring."""
DType = np.dtype[Any]


class Req(IntEnum):
    """What is to happen to an output: MXNet's OpReq codes."""

    NULL = 0
    WRITE = 1
    INPLACE = 2
    ADD = 3


class InplacePair(NamedTuple):
    """Output ``output`` may take the memory of input ``input``; ``identity``: even while others still read it."""

    input: int
    output: int
    identity: bool = False


def aligned(nbytes: int, alignment: int = 64) -> int:
    """``nbytes`` rounded up to ``alignment``, such as the bytes that one array in a workspace takes.

    >>> aligned(1), aligned(64), aligned(65)
    (64, 64, 128)
    """
    return -(-nbytes // alignment) * alignment
