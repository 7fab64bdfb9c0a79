"""``mx.mon.Monitor``: a statistic of every array in a network, computed every ``interval`` batches.

Executors pass every array to the monitor as they push it. Statistics are arrays; printing waits for them. The training
thread uses the monitor.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

from weftplan import ndarray as nd
from weftplan.errors import ParameterError
from weftplan.executor import Executor
from weftplan.ndarray import NDArray
from weftplan.support.keyword_errors import Constructed
from weftplan.support.package_log import log


def _size(array: NDArray) -> NDArray:
    """Return the norm of an array, divided by the square root of its size."""
    return nd.norm(array) / math.sqrt(array.size)


class Monitor(Constructed):
    """Collector of a statistic of outputs, arguments and auxiliary states; with ``monitor_all`` of inputs, too.

    Call :meth:`tic` before a batch and :meth:`toc` after it, or pass the monitor to ``Module.fit``. While a monitor is
    installed, every node is pushed separately, so runs are slower.

    Args:
        interval: batches between two monitored batches.
        stat_func: function from an array to its statistic, an NDArray or a list of them. Default: norm / sqrt(size).
        pattern: regular expression matched at the start of array names; other arrays are ignored.
        sort: sort statistics by name instead of by execution order.
        monitor_all: whether to include the inputs of every node.
    """

    def __init__(
        self,
        interval: int,
        stat_func: Callable[[NDArray], object] | None = None,
        pattern: str = ".*",
        sort: bool = False,
        monitor_all: bool = False,
    ) -> None:
        if not isinstance(interval, int) or interval < 1:
            raise ParameterError(f"Monitor: interval must be a number of batches >= 1, got {interval!r}")
        self.interval = interval
        self.stat_func = _size if stat_func is None else stat_func
        self.re_prog = re.compile(pattern)
        self.sort = sort
        self.monitor_all = monitor_all
        self.activated = False
        self.step = 0
        self.exes: list[Executor] = []
        self.queue: list[tuple[int, str, Any]] = []

    def install(self, exe: Executor) -> None:
        """Watch an executor; several may be watched."""
        exe.set_monitor_callback(self._see, self.monitor_all)
        if not any(exe is executor for executor in self.exes):
            self.exes.append(exe)

    def uninstall(self, exe: Executor) -> None:
        """Stop watching an executor."""
        exe.set_monitor_callback(None)
        self.exes = [executor for executor in self.exes if executor is not exe]

    def tic(self) -> None:
        """Start a batch: collect statistics if the batch is to be monitored."""
        if self.step % self.interval == 0:
            self._wait()
            self.queue = []
            self.activated = True
        self.step += 1

    def toc(self) -> list[tuple[int, str, str]]:
        """Finish a batch; returns (step, name, statistic as text) of every array, empty if it was not monitored."""
        if not self.activated:
            return []
        self._wait()
        for exe in self.exes:
            for name, array in (*exe.arg_dict.items(), *exe.aux_dict.items()):
                self._see(name, array)
        self.activated = False
        entries = sorted(self.queue, key=lambda entry: entry[1]) if self.sort else self.queue
        self.queue = []
        return [(step, name, _as_text(statistic)) for step, name, statistic in entries]

    def toc_print(self) -> None:
        """Call :meth:`toc` and log its results."""
        for step, name, text in self.toc():
            log.info("Batch: %7d %-30s %s", step, name, text)

    def _see(self, name: str, array: NDArray) -> None:
        if self.activated and self.re_prog.match(name):
            self.queue.append((self.step, name, self.stat_func(array)))

    def _wait(self) -> None:
        for exe in self.exes:
            for array in (*exe.arg_arrays, *exe.aux_arrays):
                array.wait_to_read()


def _as_text(statistic: object) -> str:
    """Format the arrays of a statistic, each followed by a tab."""
    text = ""
    for value in statistic if isinstance(statistic, (list, tuple)) else [statistic]:
        if not isinstance(value, NDArray):
            raise ParameterError(f"Monitor: stat_func must return an NDArray or a list of them, got {value!r}")
        # Not an f-string: that formats a float32 as the nearest float64, with twice the digits.
        text += str(value.asscalar() if value.shape == (1,) else value.asnumpy()) + "\t"
    return text
