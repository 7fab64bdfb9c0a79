"""Classification metrics from confusion matrices: F1, MCC, PCC.

They wait for labels and predictions and count on the host. A metric accumulates counts until it is reset. One thread
uses a metric.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from weftplan.errors import ParameterError, ShapeError
from weftplan.training.metrics.base import Arrays, EvalMetric, Host, MetricValue, register

Names = Sequence[str] | None


class _Confusion(EvalMetric):
    """Base of scores computed from a confusion matrix of counts (predicted class, label).

    ``average="macro"``: the score of each batch, averaged over batches; ``"micro"``: of all samples together.
    """

    def __init__(self, name: str, output_names: Names, label_names: Names, average: str) -> None:
        if average not in ("macro", "micro"):
            raise ParameterError(f"metric {name}: average must be 'macro' or 'micro', got {average!r}")
        self.average = average
        super().__init__(name, output_names, label_names, has_global_stats=True)

    def reset(self) -> None:
        super().reset()
        self._local = self._overall = np.zeros((2, 2), np.int64)

    def reset_local(self) -> None:
        super().reset_local()
        self._local = np.zeros((2, 2), np.int64)

    def update(self, labels: Arrays, preds: Arrays) -> None:
        batch = np.zeros((2, 2), np.int64)
        for label, pred in self.pairs(labels, preds):
            batch = _sum(batch, self.count(label, pred))
        self._local, self._overall = _sum(self._local, batch), _sum(self._overall, batch)
        if self.average == "macro":
            score = self.score(batch)
            self.sum_metric += score
            self.num_inst += 1
            self.global_sum_metric += score
            self.global_num_inst += 1
            return
        # Weight by samples: if a caller adds sums and counts of several metrics, small batches must weigh less.
        self.num_inst = int(self._local.sum())
        self.sum_metric = self.score(self._local) * self.num_inst
        self.global_num_inst = int(self._overall.sum())
        self.global_sum_metric = self.score(self._overall) * self.global_num_inst

    def count(self, label: Host, pred: Host) -> Host:
        """Return the matrix of one pair of arrays."""
        classes = label.reshape(-1).astype(np.int64)
        guess = (pred if pred.shape == label.shape else pred.argmax(axis=1)).reshape(-1).astype(np.int64)
        if guess.size != classes.size:
            raise ShapeError(f"metric {self.name}: labels {label.shape} do not fit predictions {pred.shape}")
        if classes.size and min(classes.min(), guess.min()) < 0:
            raise ShapeError(f"metric {self.name}: classes are numbers from 0, got {min(classes.min(), guess.min())}")
        size = max(2, int(max(classes.max(), guess.max())) + 1) if classes.size else 2
        matrix: Host = np.bincount(guess * size + classes, minlength=size * size).reshape(size, size)
        return matrix

    def score(self, matrix: Host) -> float:
        """Compute the score of a confusion matrix."""
        raise NotImplementedError

    def get(self) -> MetricValue:
        if self.average == "macro" or not self.num_inst:
            return super().get()
        return self.name, self.score(self._local)

    def get_global(self) -> MetricValue:
        if self.average == "macro" or not self.global_num_inst:
            return super().get_global()
        return self.name, self.score(self._overall)


def _sum(lhs: Host, right: Host) -> Host:
    """Add two square matrices of counts, padding the smaller with zeros."""
    size = max(len(lhs), len(right))
    total = np.zeros((size, size), np.int64)
    total[: len(lhs), : len(lhs)] += lhs
    total[: len(right), : len(right)] += right
    return total


class _Binary(_Confusion):
    """Base of scores for two classes, of which class 1 is positive; predictions are scores (samples, 2)."""

    called = ""
    """Default name of the metric."""

    def __init__(
        self,
        name: str | None = None,
        output_names: Names = None,
        label_names: Names = None,
        average: str = "macro",
    ) -> None:
        super().__init__(self.called if name is None else name, output_names, label_names, average)

    def count(self, label: Host, pred: Host) -> Host:
        if pred.ndim < 2 or label.size * pred.shape[1] != pred.size:
            raise ShapeError(
                f"metric {self.name}: predictions must be (samples, 2), got {pred.shape} for labels {label.shape}"
            )
        if len(np.unique(label.astype(np.int64))) > 2:
            raise ShapeError(f"metric {self.name} is for two classes, got labels {np.unique(label).tolist()}")
        positive = (label.reshape(-1).astype(np.int64) == 1).astype(np.int64)
        guess = (pred.argmax(axis=1).reshape(-1) == 1).astype(np.int64)
        matrix: Host = np.bincount(guess * 2 + positive, minlength=4).reshape(2, 2)
        return matrix


@register
class F1(_Binary):
    """Harmonic mean of precision and recall; 0 if both are 0."""

    called = "f1"

    def score(self, matrix: Host) -> float:
        right, guessed, positive = matrix[1, 1], matrix[1].sum(), matrix[:, 1].sum()
        return float(2 * right / (guessed + positive)) if right else 0.0


@register
class MCC(_Binary):
    """Matthews' correlation coefficient (1975); marginal sums of 0 are left out of its denominator."""

    called = "mcc"

    def score(self, matrix: Host) -> float:
        sums = [int(n) for n in (*matrix.sum(axis=0), *matrix.sum(axis=1))]
        product = math.prod(n for n in sums if n)
        return float(int(matrix[1, 1]) * int(matrix[0, 0]) - int(matrix[0, 1]) * int(matrix[1, 0])) / math.sqrt(product)


@register
class PCC(_Confusion):
    """The correlation of :class:`MCC` for any number of classes (Gorodkin, 2004), of all samples together.

    nan if only a single class was predicted or occurs. Predictions are scores (samples, classes) or classes.
    """

    def __init__(
        self,
        name: str = "pcc",
        output_names: Names = None,
        label_names: Names = None,
        has_global_stats: bool = True,
    ) -> None:
        super().__init__(name, output_names, label_names, "micro")

    def score(self, matrix: Host) -> float:
        counts = matrix.astype(np.float64)
        total, guessed, label_counts = counts.sum(), counts.sum(axis=1), counts.sum(axis=0)
        spread = (guessed * (total - guessed)).sum() * (label_counts * (total - label_counts)).sum()
        if not spread:
            return math.nan
        return float((np.diagonal(counts) * total - guessed * label_counts).sum() / math.sqrt(spread))
