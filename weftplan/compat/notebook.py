"""``mx.notebook.callback``: callbacks of ``fit`` that record a run in data frames or draw it in a notebook.

Charts are SVG and need nothing but a notebook; MXNet's need Bokeh. :class:`PandasLogger` needs pandas. A callback
belongs to the training thread.
"""

from __future__ import annotations

import datetime
import html
import importlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from weftplan.errors import MXNetError
from weftplan.training.fit.callbacks import BatchEndParam

__all__ = ["LiveLearningCurve", "LiveTimeSeries", "PandasLogger", "args_wrapper"]

Points = list[tuple[float, float]]
_COLOURS = ("#0072b2", "#2a9d55", "#e69f00", "#cc79a7")
_WIDTH, _HEIGHT, _MARGIN, _BOTTOM = 640, 320, 60, 40


class PandasLogger:
    """Recorder of a run in three data frames: training, evaluation, epochs.

    Args:
        batch_size: samples of a batch.
        frequent: batches between two rows of :attr:`train_df`.

    Raises:
        MXNetError: pandas is not installed.
    """

    def __init__(self, batch_size: int, frequent: int = 50) -> None:
        try:
            pandas = importlib.import_module("pandas")
        except ImportError as error:
            raise MXNetError("PandasLogger needs pandas: pip install pandas") from error
        self.batch_size, self.frequent = batch_size, frequent
        self._dataframes: dict[str, Any] = {name: pandas.DataFrame() for name in ("train", "eval", "epoch")}
        self.start_time = self.last_epoch_time = datetime.datetime.now()
        self.last_time = time.perf_counter()

    @property
    def train_df(self) -> Any:
        """A row for every ``frequent`` batches: metrics, speed, elapsed time, batch and epoch."""
        return self._dataframes["train"]

    @property
    def eval_df(self) -> Any:
        """A row for each evaluation."""
        return self._dataframes["eval"]

    @property
    def epoch_df(self) -> Any:
        """A row for each epoch: its time and the elapsed time."""
        return self._dataframes["epoch"]

    @property
    def all_dataframes(self) -> dict[str, Any]:
        """All three by name: ``train``, ``eval``, ``epoch``."""
        return self._dataframes

    def elapsed(self) -> datetime.timedelta:
        """Return the time since the logger was made."""
        return datetime.datetime.now() - self.start_time

    def append_metrics(self, metrics: Mapping[str, object], df_name: str) -> None:
        """Append a row to a data frame; new names become columns."""
        frame = self._dataframes[df_name]
        for column in metrics:
            if column not in frame.columns:
                frame[column] = None
        frame.loc[len(frame)] = metrics

    def train_cb(self, param: BatchEndParam) -> None:
        """Record a batch; for ``batch_end_callback``."""
        if param.nbatch % self.frequent == 0:
            self._process_batch(param, "train")

    def eval_cb(self, param: BatchEndParam) -> None:
        """Record an evaluation; for ``eval_end_callback``."""
        self._process_batch(param, "eval")

    def epoch_cb(self, *_: object) -> None:
        """Record an epoch; for ``epoch_end_callback``."""
        now_s = datetime.datetime.now()
        self.append_metrics({"elapsed": self.elapsed(), "epoch_time": now_s - self.last_epoch_time}, "epoch")
        self.last_epoch_time = now_s

    def callback_args(self) -> dict[str, Callable[..., None]]:
        """Return the callbacks as keyword arguments: ``module.fit(…, **logger.callback_args())``."""
        return {
            "batch_end_callback": self.train_cb,
            "eval_end_callback": self.eval_cb,
            "epoch_end_callback": self.epoch_cb,
        }

    def _process_batch(self, param: BatchEndParam, dataframe: str) -> None:
        now_s = time.perf_counter()
        metrics: dict[str, Any] = _values(param)
        speed = self.frequent / max(now_s - self.last_time, 1e-9)
        metrics |= {"batches_per_sec": speed, "records_per_sec": speed * self.batch_size, "elapsed": self.elapsed()}
        metrics |= {"minibatch_count": param.nbatch, "epoch": param.epoch}
        self.append_metrics(metrics, dataframe)
        self.last_time = now_s


class _LiveChart:
    """A line chart over elapsed time that a notebook shows and updates in place."""

    def __init__(self, title: str, display_freq: float) -> None:
        self.title, self.display_freq = title, display_freq
        self.series: dict[str, Points] = {}
        self._start = self._drawn = time.perf_counter()
        self._handle: Any = None

    def add(self, name: str, value: float) -> None:
        """Add a value to a line at the present time."""
        self.series.setdefault(name, []).append((time.perf_counter() - self._start, float(value)))

    def draw(self, *, force: bool = False) -> None:
        """Draw again if ``display_freq`` seconds have passed; without a notebook, do nothing."""
        if not force and time.perf_counter() - self._drawn < self.display_freq:
            return
        self._drawn = time.perf_counter()
        ipython = sys.modules.get("IPython")
        if ipython is None or ipython.get_ipython() is None:
            return
        if self._handle is None:
            self._handle = importlib.import_module("IPython.display").display(self, display_id=True)
        else:
            self._handle.update(self)

    def _repr_svg_(self) -> str:
        return line_chart(self.series, self.title)


class LiveTimeSeries(_LiveChart):
    """A chart of one value over the elapsed time."""

    def __init__(self, title: str = "", display_freq: float = 0.0) -> None:
        super().__init__(title, display_freq)

    def elapsed(self) -> datetime.timedelta:
        """Return the time since the chart was made."""
        return datetime.timedelta(seconds=time.perf_counter() - self._start)

    def update_chart_data(self, value: float) -> None:
        """Add a value and draw."""
        self.add("value", value)
        self.draw()


class LiveLearningCurve(_LiveChart):
    """A chart of a metric in training and evaluation, which a notebook updates while ``fit`` runs.

    Args:
        metric_name: the metric, by the name that it reports.
        display_freq: seconds between two drawings.
        frequent: batches between two values of training.
    """

    def __init__(self, metric_name: str, display_freq: float = 10, frequent: int = 50) -> None:
        super().__init__(metric_name, display_freq)
        self.metric_name, self.frequent = metric_name, frequent

    def batch_cb(self, param: BatchEndParam) -> None:
        """Add a value of training; for ``batch_end_callback``."""
        if param.nbatch % self.frequent == 0:
            self._process_batch(param, "train")
        self.draw()

    def eval_cb(self, param: BatchEndParam) -> None:
        """Add a value of evaluation, and draw; for ``eval_end_callback``."""
        self._process_batch(param, "validation")
        self.draw(force=True)

    def callback_args(self) -> dict[str, Callable[..., None]]:
        """Return the callbacks as keyword arguments: ``module.fit(…, **curve.callback_args())``."""
        return {"batch_end_callback": self.batch_cb, "eval_end_callback": self.eval_cb}

    def _process_batch(self, param: BatchEndParam, name: str) -> None:
        values = _values(param)
        if self.metric_name not in values:
            names = ", ".join(values) or "none"
            raise MXNetError(f"LiveLearningCurve: the metrics of this run are {names}, not {self.metric_name!r}")
        self.add(name, values[self.metric_name])


class HasCallbacks(Protocol):
    """A logger of training."""

    def callback_args(self) -> dict[str, Callable[..., None]]:
        """Return its callbacks as keyword arguments of ``fit``."""
        ...


def args_wrapper(*args: HasCallbacks) -> dict[str, list[Callable[..., None]]]:
    """Return the callbacks of several loggers as keyword arguments of ``fit``."""
    callbacks: dict[str, list[Callable[..., None]]] = {}
    for value in args:
        for name, callback in value.callback_args().items():
            callbacks.setdefault(name, []).append(callback)
    return callbacks


def _values(param: BatchEndParam) -> dict[str, float]:
    """Return the metrics since the last call by name, and reset them, as MXNet's loggers do."""
    if param.eval_metric is None:
        return {}
    values = dict(param.eval_metric.get_name_value())
    param.eval_metric.reset()
    return values


def line_chart(series: Mapping[str, Sequence[tuple[float, float]]], title: str) -> str:
    """Return lines over seconds as SVG.

    >>> "polyline" in line_chart({"train": [(0.0, 0.5), (1.0, 0.75)]}, "accuracy")
    True
    """
    points = [point for line in series.values() for point in line] or [(0.0, 0.0)]
    low, high = min(y for _, y in points), max(y for _, y in points)
    greatest, span = max(x for x, _ in points) or 1.0, high - low or 1.0
    wide, tall = _WIDTH - _MARGIN - 20, _HEIGHT - _BOTTOM - 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" '
        f'style="background:#fff" font-family="system-ui,sans-serif" font-size="12" fill="#1c2430">',
        f'<text x="{_MARGIN}" y="18" font-weight="600">{html.escape(title)}</text>',
        f'<path d="M{_MARGIN} 30V{30 + tall}h{wide}" fill="none" stroke="#7a8694"/>',
    ]
    for share in (0.0, 0.5, 1.0):
        y, x = 30 + tall * (1 - share), _MARGIN + wide * share
        parts.append(f'<text x="{_MARGIN - 6}" y="{y + 4:.1f}" text-anchor="end">{low + span * share:.4g}</text>')
        parts.append(f'<text x="{x:.1f}" y="{30 + tall + 18}" text-anchor="middle">{greatest * share:.3g} s</text>')
    for k, (name, line) in enumerate(series.items()):
        colour = _COLOURS[k % len(_COLOURS)]
        path = " ".join(f"{_MARGIN + x / greatest * wide:.1f},{30 + (high - y) / span * tall:.1f}" for x, y in line)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{_MARGIN + 130 + 110 * k}" y="18" fill="{colour}">{html.escape(name)}</text>')
    return "\n".join([*parts, "</svg>"])
