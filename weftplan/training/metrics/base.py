"""Base of metrics: a sum and a count over the batches since a reset, and the registry of names.

A custom metric overrides :meth:`EvalMetric.measure`. Alternatively it overrides :meth:`EvalMetric.update` and
accumulates into ``sum_metric`` and ``num_inst``, like metrics written for MXNet.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from weftplan.errors import ParameterError, ShapeError
from weftplan.ndarray import NDArray
from weftplan.support.array_types import DType
from weftplan.support.keyword_errors import Constructed

Host = np.ndarray[Any, DType]
K = TypeVar("K", bound="type[EvalMetric]")

V = TypeVar("V")
Array: TypeAlias = NDArray | npt.ArrayLike
"""An array, on any device or as numbers."""
Arrays: TypeAlias = NDArray | Host | Sequence[NDArray | npt.ArrayLike]
"""One array, or a sequence of arrays."""
MetricValue: TypeAlias = tuple[str | list[str], float | list[float]]
"""(name, value), or the names and the values of several metrics."""


def host(value: Array) -> Host:
    """Return ``value`` as a NumPy array; reading an NDArray waits for it."""
    return value.asnumpy() if isinstance(value, NDArray) else np.asarray(value)


def as_list(values: Arrays) -> list[Array]:
    """Return one array, or a sequence of them, as a list."""
    return [values] if isinstance(values, (NDArray, np.ndarray)) else list(values)


def check_label_shapes(labels: Any, preds: Any, wrap: bool = False, shape: bool = False) -> tuple[Any, Any]:
    """Check labels and predictions of a custom metric; returns both, with ``wrap`` as lists.

    Args:
        shape: compare array shapes instead of lengths.

    Raises:
        ShapeError: they differ.
    """
    shapes = tuple(value.shape if shape else len(value) for value in (labels, preds))
    if shapes[0] != shapes[1]:
        raise ShapeError(f"Shape of labels {shapes[0]} does not match shape of predictions {shapes[1]}")
    return (as_list(labels), as_list(preds)) if wrap else (labels, preds)


class EvalMetric(Constructed):
    """Base: a sum and a count; ``get()`` is their quotient (nan before the first update).

    Args:
        name: name of the value.
        output_names: network outputs that :meth:`update_dict` uses, in this order; None: all.
        label_names: labels that it uses; None: all.
        has_global_stats: whether the metric also maintains ``global_sum_metric`` and ``global_num_inst``. Default: only
            if the class overrides :meth:`measure`. Without them, or before they count, :meth:`get_global` equals
            :meth:`get`.
        settings: ignored; accepted from subclasses that forward their settings.
    """

    registry: ClassVar[dict[str, type[EvalMetric]]] = {}

    def __init__(
        self,
        name: str,
        output_names: Sequence[str] | None = None,
        label_names: Sequence[str] | None = None,
        *,
        has_global_stats: bool | None = None,
        **settings: object,
    ) -> None:
        self.name = str(name)
        self.output_names = output_names
        self.label_names = label_names
        measures = type(self).measure is not EvalMetric.measure
        self._has_global_stats = measures if has_global_stats is None else bool(has_global_stats)
        self.reset()

    def reset(self) -> None:
        """Reset all sums and counts."""
        self.sum_metric = 0.0
        self.num_inst = 0
        self.global_sum_metric = 0.0
        self.global_num_inst = 0

    def reset_local(self) -> None:
        """Reset the sums of :meth:`get`; :meth:`get_global` still counts from the last :meth:`reset`."""
        self.sum_metric = 0.0
        self.num_inst = 0

    def update(self, labels: Arrays, preds: Arrays) -> None:
        """Accumulate a batch: lists of label and prediction arrays, of equal length.

        Raises:
            ShapeError: the lists or the arrays do not fit each other.
        """
        for label, pred in self.pairs(labels, preds):
            total, count = self.measure(label, pred)
            self.sum_metric += total
            self.num_inst += count
            self.global_sum_metric += total
            self.global_num_inst += count

    def pairs(self, labels: Arrays, preds: Arrays) -> list[tuple[Host, Host]]:
        """Labels and predictions on the host, one to one.

        Raises:
            ShapeError: they differ in number.
        """
        labels, preds = as_list(labels), as_list(preds)
        if len(labels) != len(preds):
            raise ShapeError(
                f"metric {self.name}: {len(labels)} label arrays but {len(preds)} predictions; label_names and "
                f"output_names of the metric choose which belong together"
            )
        return [(host(label), host(pred)) for label, pred in zip(labels, preds, strict=True)]

    def update_dict(self, label: Mapping[str, Array], pred: Mapping[str, Array]) -> None:
        """:meth:`update` with the labels and outputs that the metric is for.

        Raises:
            ParameterError: one of its names is not there.
        """
        self.update(
            _chosen(label, self.label_names, f"metric {self.name}: label_names"),
            _chosen(pred, self.output_names, f"metric {self.name}: output_names"),
        )

    def measure(self, label: Host, pred: Host) -> tuple[float, int]:
        """Return (sum, count) of one pair of arrays."""
        raise NotImplementedError

    def get(self) -> MetricValue:
        """Return (name, value)."""
        return self.name, self._mean()

    def get_global(self) -> MetricValue:
        """Return (name, value) since the last :meth:`reset`."""
        if not self._has_global_stats or not self.global_num_inst:  # an ``update`` of the user's need not know of them
            return self.get()
        return self.name, self._global_mean()

    def _mean(self) -> float:
        return self.sum_metric / self.num_inst if self.num_inst else math.nan

    def _global_mean(self) -> float:
        return self.global_sum_metric / self.global_num_inst if self.global_num_inst else math.nan

    def get_global_name_value(self) -> list[tuple[str, float]]:
        """[(name, value), …] since the last :meth:`reset`; without global sums those of :meth:`get_name_value`."""
        if not self._has_global_stats:
            return self.get_name_value()
        return as_pairs(*self.get_global())

    def get_name_value(self) -> list[tuple[str, float]]:
        """[(name, value), …]."""
        return as_pairs(*self.get())

    def get_config(self) -> dict[str, object]:
        """Return the arguments of :func:`weftplan.training.metrics.metric.create` that make this metric."""
        parameters = inspect.signature(type(self)).parameters.values()
        names = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD and hasattr(self, p.name)]
        settings = {name: getattr(self, name) for name in dict.fromkeys((*names, "output_names", "label_names"))}
        return {"metric": type(self).__name__, **settings, "name": self.name}

    def __str__(self) -> str:
        return f"EvalMetric: {dict(self.get_name_value())}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({dict(self.get_name_value())})"


def as_pairs(name: str | list[str], value: float | list[float]) -> list[tuple[str, float]]:
    """Return [(name, value), …] from the result of a metric's ``get``."""
    names = name if isinstance(name, list) else [name]
    return list(zip(names, value if isinstance(value, list) else [value], strict=True))


def _chosen(arrays: Mapping[str, V], names: Sequence[str] | None, what: str) -> list[V]:
    if names is None:
        return list(arrays.values())
    missing = [name for name in names if name not in arrays]
    if missing:
        raise ParameterError(f"{what} {missing} are not there; the network has {list(arrays)}")
    return [arrays[name] for name in names]


def register(klass: K) -> K:
    """Class decorator: make ``create(name)`` find the metric by its class name in lower case."""
    EvalMetric.registry[klass.__name__.lower()] = klass
    return klass


def alias(*names: str) -> Callable[[K], K]:
    """Class decorator: make ``create`` find the metric by these names, too."""

    def also(klass: K) -> K:
        EvalMetric.registry.update(dict.fromkeys((name.lower() for name in names), klass))
        return klass

    return also
