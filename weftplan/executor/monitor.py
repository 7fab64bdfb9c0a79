"""Node-by-node runs for a monitor: every array is shown as its producer is pushed.

A monitor relies on the steps that its executor has prepared, and keeps the callback alone. It is used on the thread
that runs the executor, and so is the callback.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from weftplan.executor.run import RunState
from weftplan.executor.schedule import Step
from weftplan.executor.segments import Segment
from weftplan.ndarray import NDArray


class Monitored:
    """Pushes steps one by one and calls back with names and arrays.

    The callback runs on the pushing thread, right after the push; reading the array waits for it.
    """

    def __init__(self, callback: Callable[[str, NDArray], None], monitor_all: bool) -> None:
        self._callback = callback
        self._all = monitor_all

    def push(self, steps: Sequence[Step], run: RunState) -> None:
        """Push ``steps`` for one run."""
        for step in steps:
            node = step.node
            assert node.op is not None
            if self._all:
                names = node.op.input_names(node.params)
                for i, (entry, array) in enumerate(zip(node.inputs, step.inputs, strict=False)):
                    if array is None:
                        continue
                    if entry.node.is_variable:
                        self._callback(entry.node.name, array)
                    label = names[i] if i < len(names) else f"input{i}"
                    self._callback(f"{node.name}_{label}", array)
            Segment([step]).push(run)
            for label, output in zip(node.op.output_names(node.params), step.outputs, strict=True):
                if output is not None:
                    self._callback(f"{node.name}_{label}", output)
