"""Checkpoints of ``fit``: a resumed run ends with the same bits as an uninterrupted run."""

import random as python_random

import numpy as np
import pytest

import weftplan as mx
from tests.training.killed_runs import EPOCHS, Plain, assert_same_run, data, network, run
from weftplan.errors import MXNetError, ParameterError
from weftplan.training.fit.checkpoint_writer import Checkpoints, read_snapshot


@pytest.mark.parametrize("stop", [0, 3, 4, 5, 9, 13])
@pytest.mark.parametrize("every", [1, 2, None])
def test_resumed_is_not_stopped(tmp_path, stop, every):
    """A run stopped at any point of an epoch and resumed ends with the bits of an uninterrupted run."""
    assert run(tmp_path / "run", stop=stop, every=every) is None
    seed = 99 if Checkpoints(tmp_path / "run").files() else 3  # a run without a checkpoint begins as the first run did
    assert_same_run(run(tmp_path / "run", resume=True, every=every, seed=seed), run())


@pytest.mark.parametrize("optimizer", ["nadam", "schedule", "lbsgd"])
def test_optimizers_that_remember_more_than_arrays(tmp_path, optimizer):
    """A checkpoint includes Nadam's momentum schedule, the learning rate schedule and LBSGD's accumulated gradients."""
    assert run(tmp_path / "run", stop=7, every=2, optimizer=optimizer) is None
    assert_same_run(run(tmp_path / "run", resume=True, every=2, optimizer=optimizer), run(optimizer=optimizer))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"kvstore": "local"},
        {"kvstore": None},
        {"compression_params": {"type": "2bit", "threshold": 0.01}},
        {"micro_batches": 2},
    ],
    ids=["device", "local", "apart", "compression", "micro"],
)
def test_two_devices(tmp_path, settings):
    """A checkpoint has each device's statistics, its parameters without a store, and compression residuals."""
    assert run(tmp_path / "run", stop=6, every=2, devices=2, **settings) is None
    assert_same_run(run(tmp_path / "run", resume=True, every=2, devices=2, **settings), run(devices=2, **settings))


@pytest.mark.parametrize("stop", [3, 8])
def test_an_iterator_that_cannot_tell_its_place(tmp_path, stop):
    """If the iterator cannot save its position, the resumed run reads and skips the batches before the checkpoint.

    The samples come in the same order, in the first epoch and later.
    """
    assert run(tmp_path / "run", stop=stop, every=2, make=Plain) is None
    assert_same_run(run(tmp_path / "run", resume=True, every=2, make=Plain), run(make=Plain))


class OwnOrder(mx.io.DataIter):
    """An iterator typical of user scripts: each reset shuffles its batches with a global generator.

    Args:
        shuffle: ``numpy.random.shuffle`` or ``random.shuffle``.
    """

    def __init__(self, shuffle):
        super().__init__(8)
        self._source, self._shuffle = (
            mx.io.NDArrayIter(np.arange(160.0).reshape(40, 4) / 80 - 1, np.arange(40) % 3, 8),
            shuffle,
        )
        self.provide_data, self.provide_label = self._source.provide_data, self._source.provide_label
        self.reset()

    def reset(self):
        self._source.reset()
        self._batches = list(self._source)
        self._shuffle(self._batches)

    def next(self):
        if not self._batches:
            raise StopIteration
        return self._batches.pop()


@pytest.mark.parametrize("shuffle", [np.random.shuffle, python_random.shuffle], ids=["numpy", "python"])
@pytest.mark.parametrize("stop", [3, 8])
def test_an_iterator_with_an_order_of_its_own(tmp_path, shuffle, stop):
    """An order that NumPy's or Python's global generator made is repeated, so the run continues with the next batch."""
    assert run(tmp_path / "run", stop=stop, every=2, make=lambda: OwnOrder(shuffle)) is None
    assert_same_run(
        run(tmp_path / "run", resume=True, every=2, make=lambda: OwnOrder(shuffle)), run(make=lambda: OwnOrder(shuffle))
    )


@pytest.mark.parametrize(
    "metric",
    ["pcc", "mse", mx.metric.TopKAccuracy, mx.metric.np(lambda label, pred: float(pred[:, 0] @ label), name="product")],
    ids=["pcc", "mse", "top", "function"],
)
def test_metrics_go_on(tmp_path, metric):
    """A resumed metric still counts the batches before the checkpoint, whether its state is numbers or arrays."""

    def make():
        return [mx.metric.TopKAccuracy(top_k=2) if metric is mx.metric.TopKAccuracy else metric, "acc"]

    if metric == "mse":
        metric = mx.metric.np(
            lambda label, pred: (float(((pred - label[:, None]) ** 2).sum()), len(label)), name="square"
        )
    assert run(tmp_path / "run", stop=2, every=1, num_epoch=1, metric=make()) is None
    assert_same_run(
        run(tmp_path / "run", resume=True, every=1, num_epoch=1, metric=make()), run(num_epoch=1, metric=make())
    )


def test_a_finished_run_is_not_run_again(tmp_path):
    """Resuming a finished run trains no batch and sets its weights; with more epochs it equals a run of that length."""
    done = run(tmp_path / "run")
    repeated = run(tmp_path / "run", resume=True)
    assert repeated[1] is None
    for name, value in done[0].items():
        np.testing.assert_array_equal(value, repeated[0][name])
    assert_same_run(run(tmp_path / "run", resume=True, num_epoch=EPOCHS + 1), run(num_epoch=EPOCHS + 1))


def test_another_network(tmp_path):
    """Resuming with another network raises; the error lists every missing parameter and differing shape."""
    run(tmp_path / "run", num_epoch=1)
    net = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=5, name="fc1")
    module = mx.mod.Module(mx.sym.SoftmaxOutput(mx.sym.FullyConnected(net, num_hidden=3, name="out"), name="softmax"))
    with pytest.raises(ParameterError, match="is a checkpoint of another network") as error:
        module.fit(data(), num_epoch=1, checkpoint=tmp_path / "run", resume=True)
    text = str(error.value)
    assert "the checkpoint has no out_weight (3, 5)" in text
    assert "the network has no bn_gamma (6,)" in text
    assert "fc1_weight has shape (6, 4) in the checkpoint, (5, 4) in the network" in text


def test_other_settings(tmp_path, caplog):
    """Resuming with other settings raises and lists the differences; ``resume="changed"`` logs and accepts them."""
    run(tmp_path / "run", num_epoch=1)
    second = {"optimizer_params": {"learning_rate": 0.02, "momentum": 0.9, "wd": 0.5}}
    with pytest.raises(ParameterError, match="was written with other settings") as error:
        run(tmp_path / "run", resume=True, **second)
    assert "optimizer.learning_rate was 0.1, is now 0.02" in str(error.value)
    assert "optimizer.wd was 0.0, is now 0.5" in str(error.value)
    assert "momentum" not in str(error.value)
    with pytest.raises(ParameterError, match=r"optimizer\.clip_gradient was None, is now 0\.5"):
        run(
            tmp_path / "run",
            resume=True,
            optimizer_params={"learning_rate": 0.1, "momentum": 0.9, "clip_gradient": 0.5},
        )
    changed = run(tmp_path / "run", resume="changed", **second)
    assert "optimizer.wd was 0.0, is now 0.5" in caplog.text
    assert any((value != run()[0][name]).any() for name, value in changed[0].items())
    with pytest.raises(ParameterError, match="micro_batches was 1, is now 2"):
        run(tmp_path / "run", resume=True, micro_batches=2)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"every": 0}, "every must be a whole number >= 1 or None, got 0"),
        ({"keep": 0}, "keep must be a whole number >= 1 or None, got 0"),
        ({"resume": "yes"}, "resume must be True, False or 'changed', got 'yes'"),
    ],
)
def test_bad_settings(tmp_path, settings, words):
    """Invalid ``every``, ``keep`` and ``resume`` raise ParameterError before training; no file is written."""
    with pytest.raises(ParameterError, match=words):
        run(tmp_path / "run", **settings)
    assert not list(tmp_path.iterdir())


def test_resume_needs_a_prefix():
    """``resume`` without ``checkpoint`` raises ParameterError."""
    with pytest.raises(ParameterError, match="resume needs checkpoint=prefix"):
        run(resume=True)


def test_processes_that_differ_are_refused(tmp_path, monkeypatch):
    """``checkpoint`` with a ``dist_async`` store raises: its processes have different weights."""
    monkeypatch.setattr("weftplan.kvstore.KVStoreLocal.num_workers", 2)
    monkeypatch.setattr("weftplan.kvstore.KVStoreLocal.type", "dist_async")
    with pytest.raises(MXNetError, match="checkpoint needs processes with equal weights"):
        run(tmp_path / "run", devices=2)


def test_ctrl_c_between_batches_leaves_a_checkpoint_of_that_moment(tmp_path):
    """KeyboardInterrupt in a callback saves a checkpoint of that step; resuming gives the bits of a whole run."""

    def interrupt(param):
        np.random.random()  # noqa: NPY002 - `run` draws the same numbers, which decide the order
        if param.epoch == 1 and param.nbatch == 2:
            raise KeyboardInterrupt

    mx.random.seed(3)
    np.random.seed(3)  # noqa: NPY002 - as `run` does
    module = mx.mod.Module(network())
    with pytest.raises(KeyboardInterrupt):
        module.fit(
            data(),
            num_epoch=EPOCHS,
            optimizer_params={"learning_rate": 0.1, "momentum": 0.9},
            initializer=mx.init.Xavier(),
            eval_metric=["acc", "ce"],
            batch_end_callback=interrupt,
            kvstore="device",
            checkpoint=tmp_path / "run",
        )
    assert read_snapshot(Checkpoints(tmp_path / "run").files()[-1]).facts["step"] == 8
    resumed = run(tmp_path / "run", resume=True)
    for name, value in run()[0].items():
        np.testing.assert_array_equal(value, resumed[0][name])


def test_early_stopping_and_the_best_so_far(tmp_path):
    """Training stops after ``patience`` epochs without improvement; the best epoch's parameters are saved.

    Resuming the stopped run restores the EarlyStopping state and trains no epoch.
    """
    best = {}

    def trained(**settings):
        mx.random.seed(3)
        module = mx.mod.Module(network())
        stopping = mx.callback.EarlyStopping("accuracy", patience=2)
        accuracies = []

        def note(epoch, symbol, args, aux):
            best[epoch] = {name: value.asnumpy() for name, value in args.items()}

        module.fit(
            data(),
            eval_data=data(),
            num_epoch=50,
            optimizer_params={"learning_rate": 0.5},
            epoch_end_callback=note,
            eval_end_callback=lambda param: accuracies.append(param.eval_metric.get()[1]),
            early_stopping=stopping,
            checkpoint=tmp_path / "run",
            **settings,
        )
        return stopping, accuracies

    stopping, accuracies = trained()
    assert len(accuracies) == stopping.best_epoch + 3 < 50
    assert max(accuracies) == stopping.best == accuracies[stopping.best_epoch]
    kept = read_snapshot(tmp_path / "run-best.safetensors")
    for name, value in best[stopping.best_epoch].items():
        np.testing.assert_array_equal(kept.args[name].asnumpy(), value)
    repeated, none = trained(resume=True)
    assert none == []
    assert (repeated.best, repeated.best_epoch, repeated.waited) == (stopping.best, stopping.best_epoch, 2)


def test_early_stopping_of_a_metric_that_there_is_not():
    """EarlyStopping with a metric that fit does not compute raises; the error lists the computed metrics."""
    module = mx.mod.Module(network())
    with pytest.raises(ParameterError, match=r"no metric 'auc'; fit computes \['accuracy'\]"):
        module.fit(data(), num_epoch=1, early_stopping=mx.callback.EarlyStopping("auc"))
