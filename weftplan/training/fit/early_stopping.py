"""EarlyStopping: the stopping rule of ``fit``, with a record of the best epoch."""

from __future__ import annotations

import math
from collections.abc import Sequence

from weftplan.errors import ParameterError

_SMALLER = ("loss", "entropy", "perplexity", "mse", "mae", "rmse", "log-likelihood", "nll", "error")


class EarlyStopping:
    """Stopping rule: stop ``fit`` when a metric has not improved for ``patience`` epochs.

    The metric is computed on validation data, or on training data if ``fit`` has no ``eval_data``. With checkpoints the
    best epoch is saved as ``<prefix>-best.safetensors``.

    Args:
        metric: name of the metric; None: the first.
        patience: epochs without improvement before training stops; None: never stop, only save the best epoch.
        min_delta: smallest difference that counts as an improvement.
        mode: ``"max"`` or ``"min"``; None: ``"min"`` for errors, losses and entropies, ``"max"`` for the others.

    >>> stop = EarlyStopping("accuracy", patience=2)
    >>> [stop.epoch_end(epoch, [("accuracy", value)]) for epoch, value in enumerate((0.5, 0.7, 0.6, 0.7))]
    [True, True, False, False]
    >>> stop.stops, stop.best, stop.best_epoch
    (True, 0.7, 1)
    """

    def __init__(
        self,
        metric: str | None = None,
        *,
        patience: int | None = 5,
        min_delta: float = 0.0,
        mode: str | None = None,
    ) -> None:
        if patience is not None and (isinstance(patience, bool) or not isinstance(patience, int) or patience < 1):
            raise ParameterError(f"EarlyStopping: patience must be a whole number >= 1 or None, got {patience!r}")
        if mode not in (None, "max", "min"):
            raise ParameterError(f"EarlyStopping: mode must be 'max', 'min' or None, got {mode!r}")
        if not min_delta >= 0:
            raise ParameterError(f"EarlyStopping: min_delta must be >= 0, got {min_delta!r}")
        self.metric = metric
        self.patience = patience
        self.min_delta = min_delta
        self.mode = mode
        self.best: float | None = None
        self.best_epoch: int | None = None
        self.waited = 0
        """Epochs since the best epoch."""

    @property
    def stops(self) -> bool:
        """Whether training should stop."""
        return self.patience is not None and self.waited >= self.patience

    def epoch_end(self, epoch: int, pairs: Sequence[tuple[str, float]]) -> bool:
        """Record the metrics of an epoch; returns True if it is the best so far.

        Raises:
            ParameterError: there is no such metric.
        """
        named = dict(pairs)
        name = self.metric if self.metric is not None else next(iter(named), None)
        if name is None or name not in named:
            raise ParameterError(f"EarlyStopping: no metric {name!r}; fit computes {list(named)}")
        value = float(named[name])
        sign = -1.0 if (self.mode or _usual(name)) == "min" else 1.0
        better = not math.isnan(value) and (self.best is None or sign * value > sign * self.best + self.min_delta)
        if better:
            self.best, self.best_epoch, self.waited = value, epoch, 0
        else:
            self.waited += 1
        return better


def _usual(name: str) -> str:
    return "min" if any(word in name.lower() for word in _SMALLER) else "max"
