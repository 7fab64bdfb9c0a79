"""Classification metrics: accuracy, and the probability of the right class."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from weftplan.errors import ParameterError, ShapeError
from weftplan.training.metrics.base import EvalMetric, Host, MetricValue, alias, register

Names = Sequence[str] | None


def _classes(label: Host) -> Host:
    """Return the labels as a one-dimensional array of class indices."""
    indices: Host = label.reshape(-1).astype(np.int64)
    return indices


def _probabilities(rows: Host, classes: Host, name: str) -> Host:
    """Return the probability that each row of ``rows`` gives to its class in ``classes``, as float64."""
    if classes.size and classes.max() >= rows.shape[1]:
        raise ShapeError(f"metric {name}: label {classes.max()} for predictions of {rows.shape[1]} classes")
    chosen: Host = rows[np.arange(len(rows)), classes].astype(np.float64)
    return chosen


def _rows(label: Host, pred: Host, name: str) -> None:
    if label.size != pred.shape[0]:
        raise ShapeError(f"metric {name}: {label.size} labels (shape {label.shape}) for predictions {pred.shape}")


@alias("acc")
@register
class Accuracy(EvalMetric):
    """Share of samples whose largest score along ``axis`` is the label's."""

    def __init__(
        self, axis: int = 1, name: str = "accuracy", output_names: Names = None, label_names: Names = None
    ) -> None:
        super().__init__(name, output_names, label_names)
        self.axis = axis

    def measure(self, label: Host, pred: Host) -> tuple[float, int]:
        guess = pred.argmax(axis=self.axis) if pred.ndim > 1 and pred.shape != label.shape else pred
        if guess.size != label.size:
            raise ShapeError(f"metric {self.name}: labels {label.shape} do not fit predictions {pred.shape}")
        right = _classes(guess) == _classes(label)
        return float(right.sum()), int(right.size)


@alias("top_k_accuracy", "top_k_acc")
@register
class TopKAccuracy(EvalMetric):
    """Share of samples whose label is among the ``top_k`` largest scores (ties: the lower class index wins)."""

    def __init__(
        self, top_k: int = 1, name: str = "top_k_accuracy", output_names: Names = None, label_names: Names = None
    ) -> None:
        if top_k < 1:
            raise ParameterError(f"top_k must be >= 1, got {top_k}")
        super().__init__(f"{name}_{top_k}", output_names, label_names)
        self.top_k = top_k

    def get_config(self) -> dict[str, object]:
        return {**super().get_config(), "name": self.name.removesuffix(f"_{self.top_k}")}

    def measure(self, label: Host, pred: Host) -> tuple[float, int]:
        if pred.ndim != 2:
            raise ShapeError(f"metric {self.name}: predictions must be (samples, classes), got {pred.shape}")
        _rows(label, pred, self.name)
        best = np.argsort(-pred, axis=1, kind="stable")[:, : self.top_k]
        right = (best == label.reshape(-1, 1).astype(np.int64)).any(axis=1)
        return float(right.sum()), int(right.size)


@alias("ce")
@register
class CrossEntropy(EvalMetric):
    """Mean of ``-log p[label]`` over samples; predictions are probabilities (samples, classes).

    Of predictions (samples, classes, …) the logarithms are summed over the further axes, as in MXNet.
    """

    def __init__(
        self, eps: float = 1e-12, name: str = "cross-entropy", output_names: Names = None, label_names: Names = None
    ) -> None:
        super().__init__(name, output_names, label_names)
        self.eps = eps

    def measure(self, label: Host, pred: Host) -> tuple[float, int]:
        _rows(label, pred, self.name)
        if pred.ndim < 2:
            raise ShapeError(f"metric {self.name}: predictions must be (samples, classes), got {pred.shape}")
        chosen = _probabilities(pred, _classes(label), self.name)
        return float(-np.log(chosen + self.eps).sum()), int(label.size)


@alias("nll_loss", "nll-loss")
@register
class NegativeLogLikelihood(CrossEntropy):
    """:class:`CrossEntropy` by another name."""

    def __init__(
        self, eps: float = 1e-12, name: str = "nll-loss", output_names: Names = None, label_names: Names = None
    ) -> None:
        super().__init__(eps, name, output_names, label_names)


@register
class Perplexity(EvalMetric):
    """``exp`` of the mean of ``-log p[label]``, labels equal to ``ignore_label`` left out.

    Predictions are probabilities, classes along ``axis``; labels have their shape without that axis, or any other of
    as many elements. Probabilities below 1e-10 count as that. A label that is no class counts as the nearest one, as
    in MXNet, whose own examples pad sentences with such.
    """

    def __init__(
        self,
        ignore_label: int | None,
        axis: int = -1,
        name: str = "perplexity",
        output_names: Names = None,
        label_names: Names = None,
    ) -> None:
        super().__init__(name, output_names, label_names)
        self.ignore_label = ignore_label
        self.axis = axis

    def measure(self, label: Host, pred: Host) -> tuple[float, int]:
        if pred.ndim == 1 and pred.shape == (label.size,):
            pred = pred[:, None]  # one class
        if pred.ndim == 0 or label.size * pred.shape[self.axis] != pred.size:
            raise ShapeError(f"metric {self.name}: labels {label.shape} do not fit predictions {pred.shape}")
        rows = np.moveaxis(pred, self.axis, -1).reshape(label.size, -1)
        wanted = _classes(label)
        counted = np.ones(label.size, bool) if self.ignore_label is None else wanted != self.ignore_label
        classes = np.clip(wanted[counted], 0, rows.shape[1] - 1)
        chosen = _probabilities(rows[counted], classes, self.name)
        return float(-np.log(np.maximum(chosen, 1e-10)).sum()), int(counted.sum())

    def get(self) -> MetricValue:
        return self.name, math.exp(self._mean())

    def get_global(self) -> MetricValue:
        counted = self._has_global_stats and self.global_num_inst
        return (self.name, math.exp(self._global_mean())) if counted else self.get()
