"""Evaluation metrics of ``mx.metric``: running averages over (labels, predictions).

``update`` takes lists with an array per output (or per device). Reading an array waits for it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from weftplan.errors import ParameterError, did_you_mean
from weftplan.training.keyword_checks import construct
from weftplan.training.metrics.base import (
    Array,
    Arrays,
    EvalMetric,
    Host,
    MetricValue,
    alias,
    as_list,
    as_pairs,
    check_label_shapes,
    host,
    register,
)
from weftplan.training.metrics.classification import (
    Accuracy,
    CrossEntropy,
    NegativeLogLikelihood,
    Perplexity,
    TopKAccuracy,
)
from weftplan.training.metrics.confusion import F1, MCC, PCC
from weftplan.training.metrics.regression import MAE, MSE, RMSE, Caffe, Loss, PearsonCorrelation, Torch

__all__ = [
    "F1",
    "MAE",
    "MCC",
    "MSE",
    "PCC",
    "RMSE",
    "Accuracy",
    "Caffe",
    "CompositeEvalMetric",
    "CrossEntropy",
    "CustomMetric",
    "EvalMetric",
    "Loss",
    "NegativeLogLikelihood",
    "PearsonCorrelation",
    "Perplexity",
    "TopKAccuracy",
    "Torch",
    "alias",
    "check_label_shapes",
    "create",
    "np",
    "register",
]

MetricLike: TypeAlias = EvalMetric | type[EvalMetric] | str | Callable[..., object] | Sequence["MetricLike"]
"""A metric, its name, a function of (label, prediction), or several of these."""
Names = Sequence[str] | None


@register
class CustomMetric(EvalMetric):
    """``feval(label, pred)`` on NumPy arrays, returning a number or (sum, count).

    Args:
        feval: the function.
        name: name of the metric; default: the name of the function, ``custom(<lambda>)`` for a lambda.
        allow_extra_outputs: leave out the outputs that have no label, instead of raising.
    """

    def __init__(
        self,
        feval: Callable[[Host, Host], float | tuple[float, int]],
        name: str | None = None,
        allow_extra_outputs: bool = False,
        output_names: Names = None,
        label_names: Names = None,
    ) -> None:
        if not callable(feval):
            raise ParameterError(f"CustomMetric needs a function of (label, prediction), got {feval!r}")
        called = getattr(feval, "__name__", type(feval).__name__)
        super().__init__(name or (f"custom({called})" if "<" in called else called), output_names, label_names)
        self._feval = feval
        self._allow_extra_outputs = allow_extra_outputs

    def pairs(self, labels: Arrays, preds: Arrays) -> list[tuple[Host, Host]]:
        if self._allow_extra_outputs:
            return [(host(label), host(pred)) for label, pred in zip(as_list(labels), as_list(preds), strict=False)]
        return super().pairs(labels, preds)

    def measure(self, label: Host, pred: Host) -> tuple[float, int]:
        value = self._feval(label, pred)
        return value if isinstance(value, tuple) else (float(value), 1)


@alias("composite")
@register
class CompositeEvalMetric(EvalMetric):
    """Composite of several metrics."""

    def __init__(
        self,
        metrics: Sequence[MetricLike | Mapping[str, Any]] | None = None,
        name: str = "composite",
        output_names: Names = None,
        label_names: Names = None,
    ) -> None:
        self.metrics: list[EvalMetric] = []  # first: the base resets, and members reset themselves
        super().__init__(name, output_names, label_names, has_global_stats=True)
        self.metrics += [create(**one) if isinstance(one, Mapping) else create(one) for one in metrics or ()]

    def add(self, metric: MetricLike) -> None:
        """Append a metric, in any form that :func:`create` accepts."""
        self.metrics.append(create(metric))

    def get_config(self) -> dict[str, object]:
        return {**super().get_config(), "metrics": [metric.get_config() for metric in self.metrics]}

    def get_metric(self, index: int) -> EvalMetric:
        """Return the metric that was added as number ``index``.

        Raises:
            ParameterError: there is none.
        """
        try:
            return self.metrics[index]
        except IndexError:
            raise ParameterError(f"metric {self.name}: no metric {index}, it has {len(self.metrics)}") from None

    def reset(self) -> None:
        for metric in self.metrics:
            metric.reset()

    def reset_local(self) -> None:
        for metric in self.metrics:
            metric.reset_local()

    def update(self, labels: Arrays, preds: Arrays) -> None:
        for metric in self.metrics:
            metric.update(labels, preds)

    def update_dict(self, labels: Mapping[str, Array], preds: Mapping[str, Array]) -> None:
        if self.label_names is not None:
            labels = {name: value for name, value in labels.items() if name in self.label_names}
        if self.output_names is not None:
            preds = {name: value for name, value in preds.items() if name in self.output_names}
        for metric in self.metrics:
            metric.update_dict(labels, preds)

    def get(self) -> MetricValue:
        pairs = [pair for metric in self.metrics for pair in as_pairs(*metric.get())]
        return [name for name, _ in pairs], [value for _, value in pairs]

    def get_global(self) -> MetricValue:
        pairs = [pair for metric in self.metrics for pair in as_pairs(*metric.get_global())]
        return [name for name, _ in pairs], [value for _, value in pairs]


def create(metric: MetricLike, *args: object, **kwargs: object) -> EvalMetric:
    """Return a metric from a name, a function of (label, pred), a metric, or a list of these.

    Args:
        args, kwargs: settings of the metric; for a list, of each in it.

    Raises:
        ParameterError: unknown name or setting; the message lists the known ones.

    >>> create("acc").name
    'accuracy'
    """
    if isinstance(metric, str) and metric.lstrip().startswith("{"):
        return create(**json.loads(metric))
    if isinstance(metric, EvalMetric):
        if args or kwargs:
            raise ParameterError(f"metric {metric.name} is made already: it takes no settings any more, got {kwargs}")
        return metric
    if isinstance(metric, (list, tuple)):
        return CompositeEvalMetric([create(item, *args, **kwargs) for item in metric])
    if isinstance(metric, type) and issubclass(metric, EvalMetric):
        return construct(metric, args, kwargs, "metric")
    if callable(metric):
        return construct(CustomMetric, (metric, *args), kwargs, "metric")
    names = EvalMetric.registry
    key = str(metric).lower()
    klass = names.get(key) or names.get(key.replace("-", ""))
    if klass is None:
        hint = did_you_mean(key, names)
        raise ParameterError(f"unknown metric {metric!r}: {hint}known: {', '.join(names)}")
    return construct(klass, args, kwargs, "metric")


def np(
    numpy_feval: Callable[[Host, Host], float | tuple[float, int]],
    name: str | None = None,
    allow_extra_outputs: bool = False,
) -> EvalMetric:
    """:class:`CustomMetric` by MXNet's short name.

    Args:
        numpy_feval: function of (label, prediction) as NumPy arrays.
        name: name of the metric; None: the name of the function.
        allow_extra_outputs: whether the network may have more outputs than labels.
    """
    return CustomMetric(numpy_feval, name, allow_extra_outputs)
