"""What goes wrong silently in training, told once: outputs that are no numbers, labels that no class has."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np


class Watch:
    """Looks at what ``fit`` computes, and warns once of each kind of trouble.

    Called by the thread that trains, behind the metric, which has waited for the outputs already.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self._logger = module.logger
        self._told: set[str] = set()

    def batch(self, epoch: int, nbatch: int, labels: Sequence[Any], pairs: Sequence[tuple[str, float]]) -> None:
        """After a batch: its labels, and the metrics so far."""
        where = f"epoch {epoch}, batch {nbatch}"
        for name, value in pairs:
            if not math.isfinite(value):
                self._tell("loss", f"{where}: {name} is {value}, so the weights are of no use from here on. {_ADVICE}")
        if epoch == 0 or nbatch == 0:
            self._labels(where, labels)
            self._outputs(where)

    def _tell(self, kind: str, text: str) -> None:
        if kind not in self._told:
            self._told.add(kind)
            self._logger.warning(text)

    def _outputs(self, where: str) -> None:
        if "loss" in self._told:
            return
        for name, output in zip(getattr(self._module, "output_names", ()), self._module.get_outputs(), strict=False):
            host = output.asnumpy()
            if host.dtype.kind == "f" and not np.isfinite(host).all():
                self._tell("loss", f"{where}: output {name} holds NaN or infinity. {_ADVICE}")

    def _labels(self, where: str, labels: Sequence[Any]) -> None:
        """Labels of softmax outputs must be numbers of classes."""
        symbol = self._module.symbol
        if "labels" in self._told or symbol is None or len(labels) != 1:
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
                f"{where}: a label is {wrong:g}, but the network has {classes} classes, which are numbered from 0 to "
                f"{classes - 1}. Mend the labels, or give the last layer more outputs",
            )


_ADVICE = "Lower the learning rate, look at the data for NaN, or clip gradients (optimizer_params={'clip_gradient': 1})"
