"""One-time warnings of ``fit``: NaN outputs, invalid labels, bad gradients, starved devices."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from weftplan.ndarray import NDArray
from weftplan.training.fit.fit_module import FitModule
from weftplan.training.fit.overrides import overrides

STARVED = 0.25
"""Idle fraction above which a warning is logged, over at least ``LEAST_STEPS`` and ``LEAST_SECONDS``."""
LEAST_STEPS, LEAST_SECONDS = 30, 2.0
EXPLODED = 1000.0
"""Ratio of the gradient norm to the median of recent norms above which a warning is logged."""


def position_of(epoch: int, batch: int) -> str:
    """Describe a position in training, counted from 1 like the progress display."""
    return f"epoch {epoch + 1}, batch {batch + 1}"


class Watch:
    """Monitor of ``fit`` that warns once about each kind of problem.

    The training thread calls it after the metric, which has already waited for the outputs.

    Args:
        on_warning: called with the text of each warning before it is logged.
    """

    def __init__(self, module: FitModule, on_warning: Callable[[str], None] | None = None) -> None:
        self._module = module
        self._logger = module.logger
        self._on_warning = on_warning
        self._reported: set[str] = set()
        self._seconds: dict[str, float] = {}
        self._steps = 0
        self._norms: deque[float] = deque(maxlen=50)

    def time(self, seconds: Mapping[str, float], steps: int) -> None:
        """Record the training thread's seconds by phase over some steps; warn if devices were idle."""
        self._steps += steps
        for phase, value in seconds.items():
            self._seconds[phase] = self._seconds.get(phase, 0.0) + value
        total = sum(self._seconds.values())
        if self._steps < LEAST_STEPS or total < LEAST_SECONDS:
            return
        for phase, advice in _WAITS.items():
            share = self._seconds.get(phase, 0.0) / total
            if share > STARVED:
                self._tell(phase, f"{100 * share:.0f} % of the last {self._steps} steps went by {advice}")
        self._seconds, self._steps = {}, 0

    def overflow(self, position: str) -> None:
        """Warn about gradients in mixed precision that are not finite even with a loss scale of 1."""
        self._tell("norm", f"{position}: gradients are not finite even with a loss scale of 1. {_ADVICE}")

    def gradients(self, position: str, norm: float | None) -> None:
        """Check the gradient norm of an update."""
        if norm is None:
            return
        if not math.isfinite(norm):
            self._tell("norm", f"{position}: the norm of the gradients is {norm}. {_ADVICE}")
            return
        if norm == 0:
            self._tell(
                "zero",
                f"{position}: all gradients are zero, so nothing is learnt: look for a layer whose outputs are all "
                f"negative before a relu, for BlockGrad, and for labels that are all ignored",
            )
        usual = statistics.median(self._norms) if len(self._norms) >= 10 else math.inf
        if norm > EXPLODED * usual > 0:
            self._tell(
                "jump",
                f"{position}: the norm of the gradients is {norm:.3g}, {norm / usual:,.0f} times what it was before. "
                f"{_ADVICE}",
            )
        self._norms.append(norm)

    def batch(self, epoch: int, nbatch: int, labels: Sequence[NDArray], pairs: Sequence[tuple[str, float]]) -> None:
        """Check a batch: the metrics so far, its labels and its outputs."""
        position = position_of(epoch, nbatch)
        for name, value in pairs:
            if not math.isfinite(value):
                self._tell(
                    "loss", f"{position}: {name} is {value}, so the weights are of no use from here on. {_ADVICE}"
                )
        if (epoch == 0 or nbatch == 0) and not overrides(self._module, "get_outputs"):
            self._labels(position, labels)
            self._outputs(position)

    def _tell(self, kind: str, text: str) -> None:
        if kind not in self._reported:
            self._reported.add(kind)
            if self._on_warning is not None:
                self._on_warning(text)
            self._logger.warning(text)

    def _outputs(self, position: str) -> None:
        if "loss" in self._reported:
            return
        for name, output in zip(getattr(self._module, "output_names", ()), self._module.get_outputs(), strict=False):
            host = output.asnumpy()
            if host.dtype.kind == "f" and not np.isfinite(host).all():
                self._tell("loss", f"{position}: output {name} holds NaN or infinity. {_ADVICE}")

    def _labels(self, position: str, labels: Sequence[NDArray]) -> None:
        """Warn if a label of a softmax output is not a class index."""
        symbol = self._module.symbol
        if "labels" in self._reported or symbol is None or len(labels) != 1:
            return
        node = symbol.entries[0].node
        if len(symbol.entries) != 1 or node.op is None or node.op.name != "SoftmaxOutput":
            return
        if node.params.get("use_ignore") or node.params.get("multi_output") or node.params.get("preserve_shape"):
            return
        output = self._module.get_outputs()[0]
        label = labels[0]
        if len(output.shape) != 2 or tuple(label.shape) != output.shape[:1]:
            return
        host, classes = label.asnumpy() if hasattr(label, "asnumpy") else np.asarray(label), output.shape[1]
        low, high = float(host.min()), float(host.max())
        if low < 0 or high >= classes:
            wrong = low if low < 0 else high
            self._tell(
                "labels",
                f"{position}: a label is {wrong:g}, but the network has {classes} classes, which are numbered from 0 "
                f"to {classes - 1}. Correct the labels, or give the last layer more outputs",
            )


_ADVICE = "Lower the learning rate, look at the data for NaN, or clip gradients (optimizer_params={'clip_gradient': 1})"
_WAITS = {
    "data": "waiting for data, while the devices had nothing to do: read ahead with mx.io.PrefetchingIter, let worker "
    "processes prepare samples, or prepare the data once and store it",
    "other": "in callbacks, checkpoints and other work of the thread that trains, while the devices had nothing to do: "
    "call back less often, and look at fit(report=…) for where the time went",
}
