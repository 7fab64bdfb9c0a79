"""The training metric of ``fit``: when it is read, and which method is asked."""

import logging

import numpy as np

import weftplan as mx


class Wrong(mx.metric.EvalMetric):
    """The share of wrong predictions, with a name of its own for each epoch's line."""

    def __init__(self):
        super().__init__("wrong")

    def update(self, labels, preds):
        self.sum_metric += float((preds[0].asnumpy().argmax(1) != labels[0].asnumpy()).sum())
        self.num_inst += len(labels[0])

    def get_name_value(self):
        return [("renamed", self.get()[1])]


def lines(metric, callback, caplog):
    """Return the lines on training of two epochs."""
    net = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=2, name="fc")
    module = mx.mod.Module(mx.sym.SoftmaxOutput(net, name="softmax"), context=mx.cpu())
    with caplog.at_level(logging.INFO):
        module.fit(
            mx.io.NDArrayIter(np.ones((8, 3)), np.zeros(8), 2),
            eval_metric=metric,
            num_epoch=2,
            batch_end_callback=callback,
            initializer=mx.init.One(),
        )
    return [record.getMessage() for record in caplog.records if "Train-" in record.getMessage()]


def test_a_callback_that_resets_the_metric(caplog):
    """The epoch's value is read before the callbacks of its last batch, which may reset the metric."""
    assert lines(Wrong(), lambda param: param.eval_metric.reset(), caplog) == [
        f"Epoch[{epoch}] Train-renamed=0.000000" for epoch in range(2)
    ]


def test_a_metric_that_renames_its_values(caplog):
    """Without global sums the epoch's line shows the pairs of ``get_name_value``."""
    assert [line.split("=")[0] for line in lines(Wrong(), None, caplog)] == [
        f"Epoch[{epoch}] Train-renamed" for epoch in range(2)
    ]


def test_a_batch_is_not_read_after_the_next():
    """``fit`` reads a batch's arrays before it asks for the next batch, which may reuse their memory."""

    class Reused(mx.io.NDArrayIter):
        def next(self):
            batch, number = super().next(), self.cursor

            class Guarded:
                def __getattribute__(lent, name):
                    assert name not in ("data", "label") or self.cursor == number, f"{name} is read too late"
                    return getattr(batch, name)

            return Guarded()

        __next__ = next

    net = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=2), name="softmax")
    mx.mod.Module(net).fit(Reused(np.ones((8, 3)), np.zeros(8), 2), num_epoch=2)


def test_members_of_a_composite_are_asked_as_in_mxnet():
    """A composite resets no member when it is made, and asks members for ``get`` and ``get_global`` alone."""
    calls = []

    class Watched(mx.metric.Accuracy):
        def reset(self):
            calls.append("reset")
            super().reset()

        def get(self):
            calls.append("get")
            return super().get()

        def get_global(self):
            calls.append("get_global")
            return super().get_global()

        def get_name_value(self):
            raise AssertionError("MXNet does not call it")

        get_global_name_value = get_name_value

    members = [Watched(), Watched()]
    calls.clear()
    composite = mx.metric.CompositeEvalMetric(members)
    assert calls == []
    composite.update([mx.nd.array([1])], [mx.nd.array([[0.2, 0.8]])])
    assert composite.get_global_name_value() == composite.get_name_value() == [("accuracy", 1.0)] * 2
    assert calls == ["get_global"] * 2 + ["get"] * 2


def test_an_overridden_update_of_a_metric():
    """The global value counts what an overridden ``update`` passes on; the sums it keeps alone are the value."""

    class Passed(mx.metric.Accuracy):
        def update(self, labels, preds):
            super().update(labels, preds)

    class Alone(mx.metric.Accuracy):
        def update(self, labels, preds):
            self.sum_metric += 3.0
            self.num_inst += 4

    for metric, value in ((Passed(), 1.0), (Alone(), 0.75)):
        metric.update([mx.nd.array([1])], [mx.nd.array([[0.2, 0.8]])])
        assert metric.get_global() == ("accuracy", value)
    passed = Passed()
    passed.update([mx.nd.array([1])], [mx.nd.array([[0.2, 0.8]])])
    passed.reset_local()
    assert passed.get_global() == ("accuracy", 1.0)
