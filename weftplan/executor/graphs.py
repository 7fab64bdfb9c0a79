"""CUDA graphs: the launches of a segment, captured once and replayed with one launch (``MXNET_ENABLE_CUDA_GRAPHS``).

A segment's first run enqueues call by call, which compiles kernels and loads libraries; the second is captured; from
the third on, one launch does it all. The arguments of the calls are those of the capture, so a segment whose calls
differ from run to run is not captured, nor is one that makes the host wait or takes memory. When memory moves, the
executor makes its segments again, and with them their graphs.

A segment is run by one thread at a time, as its vars say; nothing here locks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Replay:
    """The work of one segment, in training or not."""

    def __init__(self, work: Callable[[], None], place: Any) -> None:
        self._work = work
        self._place = place
        self._warm = False
        self._graph: Any = None
        self.reason = ""
        """Why there is no graph; empty while there may be one."""

    @property
    def state(self) -> str:
        """The next run's action, and its reason, in words."""
        if self._graph is not None:
            return "captured"
        return self.reason or ("to be captured" if self._warm else "not run yet")

    def __call__(self) -> None:
        if self._graph is not None:
            self._graph.launch()
            return
        if self.reason or not self._warm:
            self._work()
            self._warm = True
            return
        graph = self._place.capture(self._work)
        if isinstance(graph, str):
            self.reason = graph
            self._work()
        else:
            self._graph = graph
            graph.launch()
