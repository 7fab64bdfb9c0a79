"""Custom metrics, output and label names, composites, and unusual shapes and labels."""

import json
import logging
import math

import numpy as np
import pytest

import weftplan as mx
from weftplan.errors import ParameterError, ShapeError


class Share(mx.metric.EvalMetric):
    """A custom metric in MXNet's style: its ``update`` does not maintain the global counts."""

    def __init__(self):
        super().__init__("share", scale=2)

    def update(self, labels, preds):
        self.sum_metric += 3.0 * len(preds)
        self.num_inst += 4


def test_a_metric_with_an_update_of_its_own(caplog):
    """``fit`` logs the value of a metric without global counts, not nan."""
    metric = Share()
    metric.update([1], [1])
    assert metric.get_global_name_value() == metric.get_name_value() == [("share", 0.75)]
    net = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=3), name="softmax")
    data = mx.io.NDArrayIter(np.ones((8, 5)), np.zeros(8), batch_size=4)
    with caplog.at_level(logging.INFO, logger="weftplan"):
        mx.mod.Module(net).fit(data, eval_metric=["acc", Share()], num_epoch=1)
    assert "Train-share=0.750000" in caplog.text


def test_a_perplexity_with_an_update_of_its_own():
    """Without global counts get_global returns the value of get: the exponential is applied once."""

    class Own(mx.metric.Perplexity):
        def update(self, labels, preds):
            self.sum_metric += 2.0
            self.num_inst += 1

    metric = Own(None)
    metric.update([], [])
    assert metric.get() == metric.get_global() == ("perplexity", math.exp(2.0))


def test_a_metric_that_counts_globally_itself():
    """With has_global_stats=True get_global divides the metric's own global counts."""

    class Both(mx.metric.EvalMetric):
        def update(self, labels, preds):
            self.sum_metric, self.num_inst = 1.0, 2
            self.global_sum_metric, self.global_num_inst = 9.0, 3

    metric = Both("both", has_global_stats=True)
    metric.update([], [])
    assert (metric.get(), metric.get_global()) == (("both", 0.5), ("both", 3.0))


def test_outputs_and_labels_by_name():
    """output_names and label_names select arrays in ``score``; an unknown name raises."""
    data, label = mx.sym.Variable("data"), mx.sym.Variable("softmax_label")
    layer = mx.sym.FullyConnected(data, num_hidden=3, name="fc")
    both = mx.sym.Group([mx.sym.SoftmaxOutput(layer, label, name="softmax"), mx.sym.BlockGrad(layer, name="seen")])
    module = mx.mod.Module(both)
    batches = mx.io.NDArrayIter(np.eye(3, 5), np.array([0, 1, 1]), batch_size=3)
    module.bind(batches.provide_data, batches.provide_label)
    module.init_params("one")
    module.set_params({"fc_weight": np.eye(3, 5), "fc_bias": np.zeros(3)}, {})
    accuracy = mx.metric.Accuracy(output_names=["softmax_output"], label_names=["softmax_label"])
    assert module.score(batches, accuracy) == [("accuracy", pytest.approx(2 / 3))]
    assert module.score(batches, [accuracy, mx.metric.Loss(output_names=["seen_output"])])[1][1] == pytest.approx(1 / 3)
    with pytest.raises(ShapeError, match=r"1 label arrays but 2 predictions; label_names and output_names"):
        module.score(batches, "acc")
    with pytest.raises(ParameterError, match=r"output_names \['soft'\] are not there; the network has \['softmax_out"):
        module.score(batches, mx.metric.Accuracy(output_names=["soft"]))


def test_loss_needs_no_labels():
    """Loss averages the predictions and ignores the labels, whatever their number."""
    metric = mx.metric.create("loss")
    metric.update([], [mx.nd.array([1.0, 3.0])])
    metric.update([mx.nd.ones((2,))] * 3, [mx.nd.array([5.0])])
    assert metric.get() == ("loss", 3.0)


def test_composites():
    """Metrics are added by name or nested; get_metric takes an index; resets reach every metric."""
    metric = mx.metric.create("composite")
    metric.add("acc")
    metric.add(mx.metric.CompositeEvalMetric(["mse"]))
    metric.update([mx.nd.array([1, 0])], [mx.nd.array([1, 1])])
    assert metric.get() == (["accuracy", "mse"], [0.5, 0.5])
    assert metric.get_metric(0).name == "accuracy"
    with pytest.raises(ParameterError, match="no metric 2, it has 2"):
        metric.get_metric(2)
    metric.reset_local()
    assert np.isnan(metric.get()[1]).all()
    assert metric.get_global()[1] == [0.5, 0.5]
    metric.reset()
    assert np.isnan(metric.get_global()[1]).all()


def test_functions_as_metrics():
    """A function becomes a metric with its own name; it may return (sum, count) or ignore extra outputs."""

    def largest(label, pred):
        return pred.max()

    assert mx.metric.np(largest).name == "largest"
    assert mx.metric.create(lambda label, pred: 1).name == "custom(<lambda>)"
    metric = mx.metric.create(largest, name="top", allow_extra_outputs=True)
    metric.update([mx.nd.zeros((2,))], [mx.nd.array([1, 2]), mx.nd.array([9, 9])])
    assert metric.get() == ("top", 2.0)
    with pytest.raises(ShapeError, match="1 label arrays but 2"):
        mx.metric.create(largest).update([mx.nd.zeros((2,))], [mx.nd.zeros((2,))] * 2)
    pair = mx.metric.CustomMetric(lambda label, pred: (pred.sum(), pred.size))
    pair.update([np.zeros(4)], [np.arange(4.0)])
    assert pair.get()[1] == 1.5
    with pytest.raises(ParameterError, match="needs a function"):
        mx.metric.CustomMetric("largest")


def test_create_takes_settings_for_whatever_it_makes():
    """``create`` passes settings to the class, or to each metric of a list; an instance takes none."""
    assert mx.metric.create("top_k_accuracy", 3).name == "top_k_accuracy_3"
    assert mx.metric.create(mx.metric.MAE, name="error").name == "error"
    assert mx.metric.create(["acc", "mse"], name="x").get()[0] == ["x", "x"]
    with pytest.raises(ParameterError, match="it takes no settings any more"):
        mx.metric.create(mx.metric.MAE(), name="error")
    with pytest.raises(ParameterError, match="'ignore_label'"):
        mx.metric.create("perplexity")


def test_an_alias():
    """``alias`` registers further names, whatever their case."""

    @mx.metric.register
    @mx.metric.alias("half-and-half", "Hah")
    class Half(mx.metric.EvalMetric):
        def measure(self, label, pred):
            return 1.0, 2

    try:
        for name in ("half", "half-and-half", "hah"):
            assert isinstance(mx.metric.create(name, "n"), Half)
    finally:
        for name in ("half", "half-and-half", "hah"):
            mx.metric.EvalMetric.registry.pop(name, None)


def test_perplexity_of_sentences():
    """Labels may have any shape with one element per row; ``axis`` selects the classes; padding is ignored."""
    rng = np.random.default_rng(3)
    pred = rng.dirichlet(np.ones(5), (4, 3)).astype("float32")
    label = rng.integers(0, 5, (4, 3))
    label[:, 2] = -1
    kept = pred[np.arange(4)[:, None], np.arange(2), label[:, :2]].astype("float64")
    for shown in (pred, pred.reshape(12, 5)):
        metric = mx.metric.Perplexity(ignore_label=-1)
        metric.update([mx.nd.array(label)], [mx.nd.array(shown)])
        assert metric.get()[1] == pytest.approx(math.exp(-np.log(kept).mean()), rel=1e-6)
    turned = mx.metric.Perplexity(ignore_label=-1, axis=1)
    turned.update([label], [pred.transpose(0, 2, 1)])
    assert turned.get() == metric.get()
    assert math.isnan(mx.metric.Perplexity(None).get()[1])
    with pytest.raises(ShapeError, match=r"labels \(3,\) do not fit predictions \(4, 3, 5\)"):
        turned.update([label[0]], [pred])


@pytest.mark.parametrize("name", ["ce", "nll_loss"])
def test_a_label_that_is_no_class(name):
    """A label without a class raises; the error has the label and the number of classes."""
    with pytest.raises(ShapeError, match="label 7 for predictions of 3 classes"):
        mx.metric.create(name).update([np.array([0, 7])], [np.full((2, 3), 1 / 3)])


def test_pcc_new_classes():
    """PCC accepts new classes in a later batch and equals the correlation of one-hot rows.

    If all predictions are equal, PCC is nan.
    """
    metric = mx.metric.PCC()
    metric.update([np.array([0, 1, 1])], [np.array([0, 1, 0])])
    metric.update([np.array([3, 2, 3, 0])], [np.eye(4)[[3, 3, 3, 0]]])
    wanted, guess = np.array([0, 1, 1, 3, 2, 3, 0]), np.array([0, 1, 0, 3, 3, 3, 0])
    x, y = np.eye(4)[guess], np.eye(4)[wanted]
    x, y = x - x.mean(0), y - y.mean(0)
    assert metric.get()[1] == pytest.approx((x * y).sum() / math.sqrt((x * x).sum() * (y * y).sum()))
    metric.reset_local()
    metric.update([np.array([0, 1])], [np.array([1, 1])])
    assert math.isnan(metric.get()[1])
    assert not math.isnan(metric.get_global()[1])


def test_two_classes_only():
    """F1 and MCC refuse a third class; a column of labels counts as a row, unlike in MXNet."""
    pred = np.array([[0.2, 0.8], [0.9, 0.1], [0.4, 0.6]])
    for name in ("f1", "mcc"):
        row, column = mx.metric.create(name), mx.metric.create(name)
        row.update([np.array([1, 0, 0])], [pred])
        column.update([np.array([[1], [0], [0]])], [pred])
        assert row.get() == column.get()
        with pytest.raises(ShapeError, match="two classes"):
            row.update([np.array([0, 1, 2])], [pred])
        with pytest.raises(ParameterError, match="'macro' or 'micro'"):
            mx.metric.create(name, average="mean")


def test_correlation_over_batches():
    """With average="micro" the correlation is that of all samples, however they are split into batches."""
    rng = np.random.default_rng(8)
    left = rng.normal(1e3, 1, (50, 2))
    right = left + rng.normal(size=(50, 2))
    metric = mx.metric.PearsonCorrelation(average="micro")
    for part in (slice(0, 1), slice(1, 20), slice(20, 50)):
        metric.update([left[part]], [right[part]])
    whole = np.corrcoef(left.ravel(), right.ravel())[0, 1]
    assert metric.get()[1] == pytest.approx(whole, rel=1e-9)
    metric.reset_local()
    assert math.isnan(metric.get()[1])
    assert metric.get_global()[1] == pytest.approx(whole, rel=1e-9)


@pytest.mark.parametrize("name", ["f1", "mcc"])
def test_micro_averages_count_samples(name):
    """With average="micro" the count is the number of samples; with "macro" the number of batches."""
    rng = np.random.default_rng(4)
    metric, whole = (mx.metric.create(name, average="micro") for _ in range(2))
    labels, preds = rng.integers(0, 2, 17), rng.random((17, 2))
    for rows in (slice(0, 5), slice(5, 17)):
        metric.update([labels[rows]], [preds[rows]])
    whole.update([labels], [preds])
    assert metric.num_inst == metric.global_num_inst == 17
    assert metric.sum_metric == metric.global_sum_metric == pytest.approx(17 * whole.get()[1])
    assert metric.get() == whole.get()
    metric.reset_local()
    assert (metric.num_inst, metric.global_num_inst) == (0, 17)
    macro = mx.metric.create(name)
    macro.update([labels], [preds])
    assert macro.num_inst == 1


def test_perplexity_of_a_label_that_is_no_class():
    """A label outside the classes counts as the nearest class, as in MXNet 1.9.1, unless it is ignored."""
    pred = np.array([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8], [0.7, 0.2, 0.1]])
    metric = mx.metric.Perplexity(None)
    metric.update([np.array([0, 3, -2])], [pred])
    assert metric.get()[1] == pytest.approx(math.exp(-np.log([0.5, 0.8, 0.7]).mean()))
    metric = mx.metric.Perplexity(3)
    metric.update([np.array([0, 3, 1])], [pred])
    assert metric.get()[1] == pytest.approx(math.exp(-np.log([0.5, 0.2]).mean()))


@pytest.mark.parametrize(
    "metric",
    [
        mx.metric.create("acc", axis=0),
        mx.metric.create("top_k_accuracy", top_k=3),
        mx.metric.create("f1", average="micro"),
        mx.metric.create("pcc"),
        mx.metric.create("perplexity", -1),
        mx.metric.create(["acc", mx.metric.create("ce", eps=0.5)]),
    ],
    ids=lambda metric: metric.name,
)
def test_a_metric_from_its_settings(metric):
    """``get_config`` returns JSON from which ``create`` makes an equal metric."""
    text = json.dumps(metric.get_config())
    repeated = mx.metric.create(text)
    assert type(repeated) is type(metric)
    assert repeated.get_config() == metric.get_config()
    assert repeated.name == metric.name


def test_check_label_shapes():
    """``check_label_shapes`` compares the number of arrays, or with ``shape=True`` their shapes."""
    label, pred = mx.nd.ones((3,)), mx.nd.ones((3, 2))
    assert mx.metric.check_label_shapes([label], [pred]) == ([label], [pred])
    assert mx.metric.check_label_shapes(label, pred, wrap=True) == ([label], [pred])
    with pytest.raises(ShapeError, match="Shape of labels 1 does not match shape of predictions 2"):
        mx.metric.check_label_shapes([label], [pred, pred])
    with pytest.raises(ShapeError, match=r"Shape of labels \(3,\) does not match shape of predictions \(3, 2\)"):
        mx.metric.check_label_shapes(label, pred, shape=True)
