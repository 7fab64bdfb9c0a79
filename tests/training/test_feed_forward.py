"""FeedForward, MXNet's deprecated estimator: it takes arrays or iterators and writes files that Module can read."""

from __future__ import annotations

import logging
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weftplan as mx
from weftplan.errors import MXNetError, ParameterError, ShapeError

pytestmark = pytest.mark.filterwarnings("ignore:FeedForward is deprecated")
RNG = np.random.RandomState(0)
DATA = RNG.rand(40, 6).astype(np.float32)
LABEL = (DATA.sum(axis=1) > 3).astype(np.float32)


def net() -> Any:
    """Return a classifier of one layer."""
    return mx.sym.SoftmaxOutput(mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=2, name="fc"), name="softmax")


def test_it_says_that_it_is_old() -> None:
    """The constructor warns that FeedForward is deprecated and names Module."""
    with pytest.warns(DeprecationWarning, match="Module"):
        mx.model.FeedForward(net())


def test_it_learns_from_arrays_and_predicts(tmp_path: Path) -> None:
    """A trained model predicts over 90 % right; the saved, pickled and Module versions predict the same."""
    mx.random.seed(1)
    model = mx.model.FeedForward.create(
        net(), DATA, LABEL[:, None], ctx=mx.cpu(), num_epoch=60, learning_rate=2.0, numpy_batch_size=10,
        initializer=mx.init.Xavier(), eval_data=(DATA.tolist(), LABEL.tolist()),
    )  # fmt: skip
    batches = mx.io.NDArrayIter(DATA, LABEL, batch_size=16)
    assert model.score(batches) > 0.9
    outputs, data, labels = model.predict(batches, return_data=True)
    np.testing.assert_array_equal(data, DATA)
    np.testing.assert_array_equal(labels, LABEL)
    assert (outputs.argmax(axis=1) == LABEL).mean() > 0.9
    np.testing.assert_allclose(model.predict(DATA), outputs, rtol=1e-5)
    assert model.predict(batches, num_batch=1).shape == (16, 2)
    prefix = tmp_path / "model"
    model.save(prefix)
    reloaded = mx.model.FeedForward.load(prefix, 60)
    np.testing.assert_array_equal(reloaded.predict(DATA), model.predict(DATA))
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(reloaded)).predict(DATA), model.predict(DATA))
    symbol, args, _ = mx.model.load_checkpoint(prefix, 60)
    module = mx.mod.Module(symbol)
    module.bind([("data", (40, 6))], for_training=False)
    module.set_params(args, {})
    np.testing.assert_allclose(module.predict(DATA).asnumpy(), model.predict(DATA), rtol=1e-5)


def test_training_goes_on_with_the_epoch_of_a_checkpoint(tmp_path: Path) -> None:
    """A loaded model continues at its epoch; an epoch has ``epoch_size`` batches; unknown parameters are dropped."""
    model = mx.model.FeedForward.create(net(), DATA, LABEL, num_epoch=1, learning_rate=0.1)
    model.arg_params["other"] = mx.nd.ones((2,))
    model.save(tmp_path / "m", 1)
    seen: list[int] = []
    further = mx.model.FeedForward.load(
        tmp_path / "m", 1, num_epoch=3, epoch_size=2, numpy_batch_size=8, allow_extra_params=True, learning_rate=0.1
    )
    further.fit(DATA, LABEL, batch_end_callback=lambda param: seen.append(param.epoch))
    assert seen == [1, 1, 2, 2]
    assert "other" not in further.arg_params


def test_a_function_of_buckets() -> None:
    """A function that returns a symbol for a bucket key trains on batches of several lengths."""
    sentences = [[1, 2, 3], [2, 3], [1, 3], [3, 1, 2]] * 6
    batches = mx.rnn.BucketSentenceIter(sentences, 4, buckets=[2, 3], invalid_label=0)

    def make(key: Any) -> Any:
        embed = mx.sym.Embedding(mx.sym.Variable("data"), input_dim=4, output_dim=3, name="embed")
        scores = mx.sym.FullyConnected(mx.sym.reshape(embed, shape=(-1, 3)), num_hidden=4, name="fc")
        return mx.sym.SoftmaxOutput(
            scores, mx.sym.reshape(mx.sym.Variable("softmax_label"), shape=(-1,)), name="softmax"
        )

    model = mx.model.FeedForward(make, num_epoch=2, learning_rate=0.1)
    model.fit(batches, eval_metric=mx.metric.Perplexity(0))
    assert set(model.arg_params) == {"embed_weight", "fc_weight", "fc_bias"}


def test_mistakes_are_named() -> None:
    """Missing labels, a wrong number of labels, a wrong symbol or data type, and no parameters raise."""
    model = mx.model.FeedForward(net(), num_epoch=1)
    with pytest.raises(ParameterError, match="labels are missing"):
        model.fit(DATA)
    with pytest.raises(ShapeError, match="40 samples"):
        model.fit(DATA, LABEL[:3])
    with pytest.raises(ParameterError, match="Symbol"):
        mx.model.FeedForward("net")
    with pytest.raises(MXNetError, match="no parameters yet"):
        model.predict(DATA)
    with pytest.raises(MXNetError, match="no parameters yet"):
        model.save("nowhere")
    with pytest.raises(ParameterError, match="DataIter"):
        model.fit("data")


def test_an_epoch_is_logged_as_by_a_module(caplog: pytest.LogCaptureFixture) -> None:
    """The metric of the training data, the time, the metric of the validation; the caller's logger takes the first."""
    own = logging.getLogger("own")
    with caplog.at_level(logging.INFO):
        mx.model.FeedForward(net(), num_epoch=1).fit(DATA, LABEL, (DATA, LABEL), logger=own)
    lines = [(record.name, record.getMessage().rpartition("=")[0]) for record in caplog.records]
    assert lines == [
        ("own", "Epoch[0] Train-accuracy"),
        ("own", "Epoch[0] Time cost"),
        ("weftplan", "Epoch[0] Validation-accuracy"),
    ]
