"""Regression metrics: errors, losses and correlation.

They wait for labels and predictions and compute on the host. A metric accumulates sums until it is reset. One thread
uses a metric.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from weftplan.errors import ParameterError, ShapeError
from weftplan.training.metrics.base import Arrays, EvalMetric, Host, MetricValue, alias, as_list, host, register

Names = Sequence[str] | None


class _Error(EvalMetric):
    """A mean over the elements of a batch; then averaged over batches, as MXNet does.

    An array of one axis counts as a column; labels and predictions are broadcast against each other.
    """

    def measure(self, label: Host, pred: Host) -> tuple[float, int]:
        sides = [side[:, None] if side.ndim == 1 else side for side in (label, pred)]
        try:
            return self.mean(sides[0].astype(np.float64) - sides[1].astype(np.float64)), 1
        except ValueError:
            raise ShapeError(f"metric {self.name}: labels {label.shape} do not fit predictions {pred.shape}") from None

    def mean(self, error: Host) -> float:
        """Return the value of one batch, from its differences."""
        raise NotImplementedError


@register
class MSE(_Error):
    """Mean squared error."""

    def __init__(self, name: str = "mse", output_names: Names = None, label_names: Names = None) -> None:
        super().__init__(name, output_names, label_names)

    def mean(self, error: Host) -> float:
        return float(np.square(error).mean())


@register
class RMSE(_Error):
    """Root of the mean squared error of a batch."""

    def __init__(self, name: str = "rmse", output_names: Names = None, label_names: Names = None) -> None:
        super().__init__(name, output_names, label_names)

    def mean(self, error: Host) -> float:
        return math.sqrt(np.square(error).mean())


@register
class MAE(_Error):
    """Mean absolute error."""

    def __init__(self, name: str = "mae", output_names: Names = None, label_names: Names = None) -> None:
        super().__init__(name, output_names, label_names)

    def mean(self, error: Host) -> float:
        return float(np.abs(error).mean())


@register
class Loss(EvalMetric):
    """Mean of the predictions themselves, for networks whose outputs are losses; labels do not matter."""

    def __init__(self, name: str = "loss", output_names: Names = None, label_names: Names = None) -> None:
        super().__init__(name, output_names, label_names)

    def pairs(self, labels: Arrays, preds: Arrays) -> list[tuple[Host, Host]]:
        return [(np.empty(0), host(pred)) for pred in as_list(preds)]

    def measure(self, label: Host, pred: Host) -> tuple[float, int]:
        return float(pred.astype(np.float64).sum()), int(pred.size)


@register
class Torch(Loss):
    """:class:`Loss` under another name, for criterions of Torch."""

    def __init__(self, name: str = "torch", output_names: Names = None, label_names: Names = None) -> None:
        super().__init__(name, output_names, label_names)


@register
class Caffe(Loss):
    """:class:`Loss` under another name, for criterions of Caffe."""

    def __init__(self, name: str = "caffe", output_names: Names = None, label_names: Names = None) -> None:
        super().__init__(name, output_names, label_names)


@alias("pearsonr")
@register
class PearsonCorrelation(EvalMetric):
    """Correlation of all elements: mean over batches (``average="macro"``), or over all samples (``"micro"``)."""

    def __init__(
        self,
        name: str = "pearsonr",
        output_names: Names = None,
        label_names: Names = None,
        average: str = "macro",
    ) -> None:
        if average not in ("macro", "micro"):
            raise ParameterError(f"metric {name}: average must be 'macro' or 'micro', got {average!r}")
        self.average = average
        super().__init__(name, output_names, label_names)

    def reset(self) -> None:
        super().reset()
        self._local = self._overall = _Moments()

    def reset_local(self) -> None:
        super().reset_local()
        self._local = _Moments()

    def measure(self, label: Host, pred: Host) -> tuple[float, int]:
        if label.shape != pred.shape:
            raise ShapeError(f"metric {self.name}: labels {label.shape} do not fit predictions {pred.shape}")
        batch = _Moments.of(label.reshape(-1).astype(np.float64), pred.reshape(-1).astype(np.float64))
        self._local, self._overall = self._local.joined(batch), self._overall.joined(batch)
        return batch.correlation(), 1

    def get(self) -> MetricValue:
        return super().get() if self.average == "macro" else (self.name, self._local.correlation())

    def get_global(self) -> MetricValue:
        return super().get_global() if self.average == "macro" else (self.name, self._overall.correlation())


class _Moments:
    """Mergeable moments of pairs of numbers: count, means, centred products (Chan, Golub, LeVeque, 1983)."""

    def __init__(self, count: int = 0, means: Host | None = None, products: Host | None = None) -> None:
        self.count = count
        self.means = np.zeros(2) if means is None else means
        self.products = np.zeros((2, 2)) if products is None else products

    @classmethod
    def of(cls, lhs: Host, right: Host) -> _Moments:
        """Moments of these pairs."""
        if not lhs.size:
            return cls()
        pairs = np.stack([lhs, right])
        means = pairs.mean(axis=1)
        centred = pairs - means[:, None]
        return cls(lhs.size, means, centred @ centred.T)

    def joined(self, other: _Moments) -> _Moments:
        """Merge the moments of two sets of pairs."""
        count = self.count + other.count
        if not count:
            return self
        gap = other.means - self.means
        return _Moments(
            count,
            self.means + gap * (other.count / count),
            self.products + other.products + np.outer(gap, gap) * (self.count * other.count / count),
        )

    def correlation(self) -> float:
        """Return Pearson's correlation; nan if either side does not vary."""
        spread = self.products[0, 0] * self.products[1, 1]
        return float(self.products[0, 1] / math.sqrt(spread)) if spread > 0 else math.nan
