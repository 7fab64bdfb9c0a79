"""Evaluation metrics: running averages over (labels, predictions), as ``mx.metric``.

``update`` takes lists with one array per output (or per device); reading an array waits for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np

from weftplan.errors import ParameterError, ShapeError, did_you_mean
from weftplan.ndarray import NDArray
from weftplan.training.settings import construct

Host = np.ndarray[Any, np.dtype[Any]]


def _host(value: Any) -> Host:
    return value.asnumpy() if isinstance(value, NDArray) else np.asarray(value)


class EvalMetric:
    """Base: a sum and a count; ``get()`` is their quotient (nan before the first update)."""

    registry: ClassVar[dict[str, type[EvalMetric]]] = {}

    def __init__(self, name: str) -> None:
        self.name = name
        self.reset()

    def reset(self) -> None:
        """Forget everything seen."""
        self.sum_metric = 0.0
        self.num_inst = 0
        self.global_sum_metric = 0.0
        self.global_num_inst = 0

    def reset_local(self) -> None:
        """Forget what :meth:`get` tells of; :meth:`get_global` still counts from the last :meth:`reset`."""
        self.sum_metric = 0.0
        self.num_inst = 0

    def update(self, labels: Sequence[Any], preds: Sequence[Any]) -> None:
        """Take in one batch: lists of label and prediction arrays, of equal length.

        Raises:
            ShapeError: the lists or the arrays do not fit each other.
        """
        if isinstance(labels, NDArray):
            labels = [labels]
        if isinstance(preds, NDArray):
            preds = [preds]
        if len(labels) != len(preds):
            raise ShapeError(f"metric {self.name}: {len(labels)} label arrays but {len(preds)} predictions")
        for label, pred in zip(labels, preds, strict=True):
            total, count = self.measure(_host(label), _host(pred))
            self.sum_metric += total
            self.num_inst += count
            self.global_sum_metric += total
            self.global_num_inst += count

    def measure(self, label: Host, pred: Host) -> tuple[float, int]:
        """(sum, count) of one pair of arrays."""
        raise NotImplementedError

    def get(self) -> tuple[Any, Any]:
        """(name, value)."""
        return self.name, (self.sum_metric / self.num_inst if self.num_inst else math.nan)

    def get_global(self) -> tuple[Any, Any]:
        """(name, value) since the last :meth:`reset`."""
        return self.name, (self.global_sum_metric / self.global_num_inst if self.global_num_inst else math.nan)

    def get_global_name_value(self) -> list[tuple[str, float]]:
        """[(name, value), …] since the last :meth:`reset`."""
        name, value = self.get_global()
        return list(zip(name, value, strict=True)) if isinstance(name, list) else [(name, value)]

    def get_name_value(self) -> list[tuple[str, float]]:
        """[(name, value), …]."""
        name, value = self.get()
        return list(zip(name, value, strict=True)) if isinstance(name, list) else [(name, value)]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({dict(self.get_name_value())})"


def register(klass: type[EvalMetric]) -> type[EvalMetric]:
    """Class decorator: make ``create(name)`` find the metric by its class name in lower case."""
    EvalMetric.registry[klass.__name__.lower()] = klass
    return klass


def _rows(label: Host, pred: Host, name: str) -> None:
    if label.size != pred.shape[0]:
        raise ShapeError(f"metric {name}: {label.size} labels (shape {label.shape}) for predictions {pred.shape}")


@register
class Accuracy(EvalMetric):
    """Share of samples whose largest score along ``axis`` is the label's."""

    def __init__(self, axis: int = 1, name: str = "accuracy") -> None:
        super().__init__(name)
        self.axis = axis

    def measure(self, label: Host, pred: Host) -> tuple[float, int]:
        guess = pred.argmax(axis=self.axis) if pred.ndim > 1 and pred.shape != label.shape else pred
        if guess.size != label.size:
            raise ShapeError(f"metric {self.name}: labels {label.shape} do not fit predictions {pred.shape}")
        right = guess.reshape(-1).astype(np.int64) == label.reshape(-1).astype(np.int64)
        return float(right.sum()), int(right.size)


@register
class TopKAccuracy(EvalMetric):
    """Share of samples whose label is among the ``top_k`` largest scores (ties: the lower class index wins)."""

    def __init__(self, top_k: int = 1, name: str = "top_k_accuracy") -> None:
        if top_k < 1:
            raise ParameterError(f"top_k must be >= 1, got {top_k}")
        super().__init__(f"{name}_{top_k}")
        self.top_k = top_k

    def measure(self, label: Host, pred: Host) -> tuple[float, int]:
        if pred.ndim != 2:
            raise ShapeError(f"metric {self.name}: predictions must be (samples, classes), got {pred.shape}")
        _rows(label, pred, self.name)
        best = np.argsort(-pred, axis=1, kind="stable")[:, : self.top_k]
        right = (best == label.reshape(-1, 1).astype(np.int64)).any(axis=1)
        return float(right.sum()), int(right.size)


@register
class CrossEntropy(EvalMetric):
    """Mean of ``-log p[label]`` over samples; predictions are probabilities (samples, classes)."""

    def __init__(self, eps: float = 1e-12, name: str = "cross-entropy") -> None:
        super().__init__(name)
        self.eps = eps

    def measure(self, label: Host, pred: Host) -> tuple[float, int]:
        _rows(label, pred, self.name)
        chosen = pred[np.arange(pred.shape[0]), label.reshape(-1).astype(np.int64)].astype(np.float64)
        return float(-np.log(chosen + self.eps).sum()), int(label.size)


@register
class MSE(EvalMetric):
    """Mean squared error; averaged over elements in a batch, then over batches, as MXNet does."""

    def __init__(self, name: str = "mse") -> None:
        super().__init__(name)

    def measure(self, label: Host, pred: Host) -> tuple[float, int]:
        if label.size != pred.size:
            raise ShapeError(f"metric {self.name}: labels {label.shape} do not fit predictions {pred.shape}")
        error = label.reshape(-1).astype(np.float64) - pred.reshape(-1).astype(np.float64)
        return float(np.square(error).mean()), 1


@register
class Loss(EvalMetric):
    """Mean of the predictions themselves, for networks whose output is a loss."""

    def __init__(self, name: str = "loss") -> None:
        super().__init__(name)

    def measure(self, label: Host, pred: Host) -> tuple[float, int]:
        return float(pred.astype(np.float64).sum()), int(pred.size)


class CustomMetric(EvalMetric):
    """``feval(label, pred)`` on NumPy arrays, returning a number or (sum, count)."""

    def __init__(self, feval: Callable[[Host, Host], Any], name: str | None = None) -> None:
        super().__init__(str(name or getattr(feval, "__name__", "custom")))
        self._feval = feval

    def measure(self, label: Host, pred: Host) -> tuple[float, int]:
        value = self._feval(label, pred)
        return value if isinstance(value, tuple) else (float(value), 1)


class CompositeEvalMetric(EvalMetric):
    """Several metrics as one."""

    def __init__(self, metrics: Sequence[Any] = (), name: str = "composite") -> None:
        super().__init__(name)
        self.metrics = [create(metric) for metric in metrics]

    def reset(self) -> None:
        for metric in getattr(self, "metrics", ()):
            metric.reset()

    def reset_local(self) -> None:
        for metric in self.metrics:
            metric.reset_local()

    def update(self, labels: Sequence[Any], preds: Sequence[Any]) -> None:
        for metric in self.metrics:
            metric.update(labels, preds)

    def get(self) -> tuple[Any, Any]:
        pairs = [pair for metric in self.metrics for pair in metric.get_name_value()]
        return [name for name, _ in pairs], [value for _, value in pairs]

    def get_global(self) -> tuple[Any, Any]:
        pairs = [pair for metric in self.metrics for pair in metric.get_global_name_value()]
        return [name for name, _ in pairs], [value for _, value in pairs]


_SHORT = {"acc": "accuracy", "ce": "crossentropy", "top_k_accuracy": "topkaccuracy", "top_k_acc": "topkaccuracy"}


def create(metric: Any, **kwargs: Any) -> EvalMetric:
    """A metric from a name, a function of (label, pred), a metric, or a list of these.

    Raises:
        ParameterError: unknown name; the message lists the known ones.

    >>> create("acc").name
    'accuracy'
    """
    if isinstance(metric, EvalMetric):
        return metric
    if isinstance(metric, (list, tuple)):
        return CompositeEvalMetric(metric)
    if callable(metric):
        return CustomMetric(metric)
    key = _SHORT.get(str(metric).lower(), str(metric).lower().replace("-", ""))
    klass = EvalMetric.registry.get(key)
    if klass is None:
        hint = did_you_mean(key, EvalMetric.registry)
        raise ParameterError(f"unknown metric {metric!r}: {hint}known: {', '.join(EvalMetric.registry)}")
    return construct(klass, kwargs, "metric")
