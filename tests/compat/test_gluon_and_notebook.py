"""``mx.gluon.utils`` without Gluon, and ``mx.notebook.callback`` without a notebook."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from typing import Any

import numpy as np
import pytest
from weftplan.gluon.utils import clip_global_norm, split_and_load, split_data
from weftplan.notebook.callback import LiveLearningCurve, LiveTimeSeries, PandasLogger, args_wrapper

import weftplan as mx
from weftplan.errors import MXNetError, ParameterError


def test_arrays_are_clipped_by_their_common_norm() -> None:
    """clip_global_norm scales arrays to MXNet 1.9.1's values and leaves arrays within the limit unchanged.

    It returns a number, or an array if the check for finite values is off.
    """
    arrays = [mx.nd.array([3.0, 4.0]), mx.nd.array([[12.0]])]
    assert clip_global_norm(arrays, 2) == 13.0
    np.testing.assert_allclose(arrays[0].asnumpy(), [0.4615385, 0.61538464], rtol=1e-6)
    np.testing.assert_allclose(arrays[1].asnumpy(), [[1.846154]], rtol=1e-6)
    small = mx.nd.array([3.0, 4.0])
    norm = clip_global_norm([small], 20, check_isfinite=False)
    assert isinstance(norm, mx.nd.NDArray)
    assert norm.asnumpy().tolist() == [5.0]
    assert small.asnumpy().tolist() == [3.0, 4.0]
    half = [mx.nd.array([3e4, 4e4], dtype="float16")]  # the squares overflow float16
    assert clip_global_norm(half, 1.0) == pytest.approx(5e4, rel=1e-3)
    with pytest.warns(UserWarning, match="the norm is not finite"):
        clip_global_norm([mx.nd.array([np.nan])], 1.0)
    with pytest.raises(ParameterError, match="there are no arrays"):
        clip_global_norm([], 1.0)


def test_batches_are_split_over_contexts() -> None:
    """split_data and split_and_load return slices along an axis, on their contexts.

    Unequal slices are those of MXNet 1.9.1, the longer first.
    """
    data = mx.nd.array(np.arange(14).reshape(7, 2))
    parts = split_data(data, 3, even_split=False)
    assert [part.shape for part in parts] == [(3, 2), (2, 2), (2, 2)]
    assert np.concatenate([part.asnumpy() for part in parts]).tolist() == data.asnumpy().tolist()
    assert [part.shape for part in split_data(data, 2, batch_axis=1)] == [(7, 1), (7, 1)]
    loaded = split_and_load(np.ones((4, 2)), [mx.cpu(0), mx.cpu(1)])
    assert [(part.context, part.shape) for part in loaded] == [(mx.cpu(0), (2, 2)), (mx.cpu(1), (2, 2))]
    with pytest.raises(ParameterError, match="7 samples along axis 0 do not make 3 equal slices"):
        split_data(data, 3)
    with pytest.raises(ParameterError, match="7 samples along axis 0 cannot make 8 slices"):
        split_data(data, 8)


def test_the_rest_of_gluon_says_what_to_use() -> None:
    """Other names of Gluon raise an error that names the alternative."""
    for name in ("nn", "Trainer", "data"):
        with pytest.raises(
            AttributeError, match=f"weftplan has no gluon.{name} on purpose: write the network with mx.sym"
        ):
            getattr(mx.gluon, name)


def fit(**callbacks: Any) -> None:
    """Train for three epochs of eight batches, with validation."""
    net = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=3), name="softmax")
    random = np.random.RandomState(0)
    batches = mx.io.NDArrayIter(random.rand(64, 5), np.arange(64) % 3, 8)
    mx.mod.Module(net).fit(batches, eval_data=batches, num_epoch=3, **callbacks)


def test_learning_curves_are_drawn() -> None:
    """A curve has a point for every second training batch and every validation.

    Its picture is well-formed SVG with both lines. A metric that the run lacks is an error.
    """
    curve = LiveLearningCurve("accuracy", frequent=2)
    fit(**args_wrapper(curve))
    assert {name: len(line) for name, line in curve.series.items()} == {"train": 12, "validation": 3}
    root = ElementTree.fromstring(curve._repr_svg_())
    lines = root.findall("{http://www.w3.org/2000/svg}polyline")
    assert [len(line.attrib["points"].split()) for line in lines] == [12, 3]
    series = LiveTimeSeries()
    series.update_chart_data(2.5)
    assert series.series["value"][0][1] == 2.5
    ElementTree.fromstring(LiveLearningCurve("loss")._repr_svg_())  # before the first value
    with pytest.raises(MXNetError, match="the metrics of this run are accuracy, not 'loss'"):
        fit(**LiveLearningCurve("loss").callback_args())


def test_notebooks_are_updated_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first drawing creates a display, later drawings update it; without a kernel nothing is shown."""
    shown: list[str] = []

    class Handle:
        def update(self, chart: object) -> None:
            shown.append("update")

    class Module:
        @staticmethod
        def get_ipython() -> object:
            return object()

        @staticmethod
        def display(chart: object, display_id: bool) -> Handle:
            shown.append("display")
            return Handle()

    monkeypatch.setitem(sys.modules, "IPython", Module)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "IPython.display", Module)  # type: ignore[arg-type]
    series = LiveTimeSeries()
    for value in (1.0, 2.0, 3.0):
        series.update_chart_data(value)
    assert shown == ["display", "update", "update"]
    monkeypatch.setattr(Module, "get_ipython", staticmethod(lambda: None))
    series.update_chart_data(4.0)
    assert len(shown) == 3


def test_pandas_is_named_where_it_is_missing() -> None:
    """Without pandas, the error of PandasLogger names the package to install."""
    code = "import sys; sys.modules['pandas'] = None\nimport weftplan as mx\nmx.notebook.callback.PandasLogger(8)\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert "PandasLogger needs pandas: pip install pandas" in done.stderr.splitlines()[-1]


def test_runs_are_recorded_in_data_frames() -> None:
    """PandasLogger has a row for every second batch, each validation and each epoch, with MXNet's columns."""
    pytest.importorskip("pandas")
    logger = PandasLogger(8, frequent=2)
    fit(**logger.callback_args())
    assert [len(frame) for frame in logger.all_dataframes.values()] == [12, 3, 3]
    assert set(logger.train_df.columns) == {
        "accuracy", "batches_per_sec", "records_per_sec", "elapsed", "minibatch_count", "epoch",
    }  # fmt: skip
    assert logger.train_df["epoch"].tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert (logger.train_df["records_per_sec"] == 8 * logger.train_df["batches_per_sec"]).all()
    assert set(logger.epoch_df.columns) == {"elapsed", "epoch_time"}
    assert logger.eval_df["accuracy"].between(0, 1).all()
