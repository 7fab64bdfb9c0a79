"""Checkpoints of fit: a run that was killed and resumed ends with the bits of one that was not."""

import errno
import json
import os
import random as python_random
import threading
import time

import numpy as np
import pytest

import weftplan as mx
from weftplan.convert import load_safetensors, save_safetensors
from weftplan.errors import FormatError, MXNetError, ParameterError
from weftplan.ndarray import safetensors as file_format
from weftplan.training import checkpointing
from weftplan.training.checkpointing import Checkpoints, read_snapshot

EPOCHS = 3
BATCHES = 5


class Killed(BaseException):
    """Stands for the end of the process: nothing of the package catches it."""


def network():
    """Batch normalization has states, dropout draws random numbers."""
    net = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=6, name="fc1")
    net = mx.sym.BatchNorm(net, fix_gamma=False, name="bn")
    net = mx.sym.Dropout(mx.sym.Activation(net, act_type="relu", name="act"), p=0.3, name="drop")
    return mx.sym.SoftmaxOutput(mx.sym.FullyConnected(net, num_hidden=3, name="fc2"), name="softmax")


def data():
    """Five batches of eight, in a new order each epoch."""
    rng = np.random.default_rng(2)
    return mx.io.NDArrayIter(rng.random((40, 4)), rng.integers(0, 3, 40), batch_size=8, shuffle=True)


class Plain(mx.io.DataIter):
    """The same, from an iterator that cannot tell its place."""

    def __init__(self):
        super().__init__(8)
        self._source = data()
        self.provide_data, self.provide_label = self._source.provide_data, self._source.provide_label

    def reset(self):
        self._source.reset()

    def next(self):
        return self._source.next()


SETTINGS = {
    "sgd": {"optimizer": "sgd", "optimizer_params": {"learning_rate": 0.1, "momentum": 0.9}},
    "nadam": {"optimizer": "nadam", "optimizer_params": {"learning_rate": 0.01}},
    "schedule": {
        "optimizer": "adam",
        "optimizer_params": lambda: {"lr_scheduler": mx.lr_scheduler.FactorScheduler(3, 0.5, base_lr=0.05)},
    },
    "lbsgd": {
        "optimizer": "lbsgd",
        "optimizer_params": {"learning_rate": 0.01, "momentum": 0.9, "batch_scale": 3, "updates_per_epoch": 5},
    },
}


def run(prefix=None, *, stop=None, seed=3, make=data, devices=1, optimizer="sgd", metric=("acc", "ce"), **settings):
    """(weights, metrics of the last batch, numbers drawn afterwards) of a run, or None if it was stopped after a
    batch: its number from the beginning."""
    mx.random.seed(seed)
    python_random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - what a program may do
    module = mx.mod.Module(
        network(),
        context=[mx.cpu(i) for i in range(devices)],
        compression_params=settings.pop("compression_params", None),
    )
    seen = []

    def after(param):
        seen.append((param.epoch, param.nbatch, *param.eval_metric.get_name_value(), python_random.random()))
        np.random.random()  # noqa: NPY002
        if stop is not None and param.epoch * BATCHES + param.nbatch == stop:
            raise Killed

    chosen = dict(SETTINGS[optimizer])
    if callable(chosen["optimizer_params"]):
        chosen["optimizer_params"] = chosen["optimizer_params"]()
    chosen = {"kvstore": "device", **chosen, **settings}
    try:
        module.fit(
            make(),
            num_epoch=chosen.pop("num_epoch", EPOCHS),
            eval_metric=list(metric),
            initializer=mx.init.Xavier(),
            batch_end_callback=after,
            checkpoint=prefix,
            **chosen,
        )
    except Killed:
        return None
    args, aux = module.get_params()
    found = {name: value.asnumpy() for name, value in {**args, **aux}.items()}
    return found, seen[-1] if seen else None, (mx.nd.random.uniform().asscalar(), np.random.random())  # noqa: NPY002


def same(left, right):
    """The same bits, metrics and random numbers."""
    assert left[0].keys() == right[0].keys()
    for name, value in left[0].items():
        np.testing.assert_array_equal(value, right[0][name], err_msg=name)
    assert left[1:] == right[1:]


@pytest.mark.parametrize("stop", [0, 3, 4, 5, 9, 13])
@pytest.mark.parametrize("every", [1, 2, None])
def test_resumed_is_not_stopped(tmp_path, stop, every):
    """Stopped in the middle, at the end or the beginning of an epoch, a resumed run has the bits of a whole one."""
    assert run(tmp_path / "run", stop=stop, every=every) is None
    seed = 99 if Checkpoints(tmp_path / "run").found() else 3  # a run without a checkpoint begins as the first one did
    same(run(tmp_path / "run", resume=True, every=every, seed=seed), run())


@pytest.mark.parametrize("optimizer", ["nadam", "schedule", "lbsgd"])
def test_optimizers_that_remember_more_than_arrays(tmp_path, optimizer):
    """A momentum schedule, a schedule of rates and gradients that are summed over steps are part of a checkpoint."""
    assert run(tmp_path / "run", stop=7, every=2, optimizer=optimizer) is None
    same(run(tmp_path / "run", resume=True, every=2, optimizer=optimizer), run(optimizer=optimizer))


@pytest.mark.parametrize(
    "settings",
    [{}, {"kvstore": "local"}, {"compression_params": {"type": "2bit", "threshold": 0.01}}, {"micro_batches": 2}],
    ids=["device", "local", "compression", "micro"],
)
def test_two_devices(tmp_path, settings):
    """Each device has statistics of its own, and a store that compresses remembers what it has not sent."""
    assert run(tmp_path / "run", stop=6, every=2, devices=2, **settings) is None
    same(run(tmp_path / "run", resume=True, every=2, devices=2, **settings), run(devices=2, **settings))


def test_an_iterator_that_cannot_tell_its_place(tmp_path):
    """What it had given is read once more, in the order of then."""
    assert run(tmp_path / "run", stop=8, every=2, make=Plain) is None
    same(run(tmp_path / "run", resume=True, every=2, make=Plain), run(make=Plain))


@pytest.mark.parametrize(
    "metric",
    ["pcc", "mse", mx.metric.TopKAccuracy, mx.metric.np(lambda label, pred: float(pred[:, 0] @ label), name="product")],
    ids=["pcc", "mse", "top", "function"],
)
def test_metrics_go_on(tmp_path, metric):
    """A metric of the epoch counts what came before the checkpoint, in numbers or in tables."""

    def make():
        return [mx.metric.TopKAccuracy(top_k=2) if metric is mx.metric.TopKAccuracy else metric, "acc"]

    if metric == "mse":
        metric = mx.metric.np(
            lambda label, pred: (float(((pred - label[:, None]) ** 2).sum()), len(label)), name="square"
        )
    assert run(tmp_path / "run", stop=2, every=1, num_epoch=1, metric=make()) is None
    same(run(tmp_path / "run", resume=True, every=1, num_epoch=1, metric=make()), run(num_epoch=1, metric=make()))


def test_a_finished_run_is_not_run_again(tmp_path):
    """Resumed, it has its weights at once; with more epochs it goes on as one that had them from the beginning."""
    done = run(tmp_path / "run")
    again = run(tmp_path / "run", resume=True)
    assert again[1] is None
    for name, value in done[0].items():
        np.testing.assert_array_equal(value, again[0][name])
    same(run(tmp_path / "run", resume=True, num_epoch=EPOCHS + 1), run(num_epoch=EPOCHS + 1))


def test_how_many_stay(tmp_path):
    """The newest `keep` stay; None keeps all."""
    run(tmp_path / "few", every=2, keep=2)
    assert [path.name for path in Checkpoints(tmp_path / "few").found()] == [
        "few-step00000014.safetensors",
        "few-step00000015.safetensors",
    ]
    run(tmp_path / "all", every=5, keep=None)
    assert len(Checkpoints(tmp_path / "all").found()) == EPOCHS


def test_parameters_alone_are_read_from_a_checkpoint(tmp_path):
    """Module.load_params, load_safetensors and the reference library open the file."""
    expected = run(tmp_path / "run")[0]
    path = Checkpoints(tmp_path / "run").found()[-1]
    args, aux = load_safetensors(path)
    assert {*args, *aux} == set(expected)
    assert set(aux) == {"bn_moving_mean", "bn_moving_var"}
    module = mx.mod.Module(network())
    batches = data()
    module.bind(batches.provide_data, batches.provide_label)
    module.load_params(path)
    for name, value in module.get_params()[0].items():
        np.testing.assert_array_equal(value.asnumpy(), expected[name])
    reference = pytest.importorskip("safetensors.numpy")
    np.testing.assert_array_equal(reference.load_file(path)["fc1_weight"], expected["fc1_weight"])


def test_a_full_disk(tmp_path, monkeypatch, caplog):
    """Training goes on and says so, the last good checkpoint stays, and nothing half written is left."""
    real, full = os.fsync, []

    def fsync(handle):
        if full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(handle)

    monkeypatch.setattr("weftplan.files.os.fsync", fsync)

    def fill(param):
        if param.epoch == 1 and param.nbatch == 0:
            while not (tmp_path / "run-step00000004.safetensors").exists():  # the last one that there is room for
                time.sleep(0.001)
            full.append(True)

    ended = run(tmp_path / "run", epoch_end_callback=lambda *_: None, every=2, stop=None)
    for path in tmp_path.iterdir():
        path.unlink()
    mx.random.seed(3)
    module = mx.mod.Module(network())
    module.fit(
        data(),
        num_epoch=EPOCHS,
        optimizer_params={"learning_rate": 0.1, "momentum": 0.9},
        initializer=mx.init.Xavier(),
        batch_end_callback=fill,
        checkpoint=tmp_path / "run",
        every=2,
    )
    for name, value in module.get_params()[0].items():
        np.testing.assert_array_equal(value.asnumpy(), ended[0][name])
    found = Checkpoints(tmp_path / "run").found()
    assert sorted(path.name for path in tmp_path.iterdir()) == [path.name for path in found]
    assert read_snapshot(found[-1]).facts["step"] == 4
    text = caplog.text
    assert "run-step00000006.safetensors was not written: No space left on device; training goes on" in text
    assert f"the last good one is {found[-1]}" in text


def test_killed_while_it_writes(tmp_path, monkeypatch):
    """A file that was being written has no name; resuming goes on from the one before, and clears the rest away."""
    assert run(tmp_path / "run", stop=7, every=2) is None
    (tmp_path / ".run-step00000008.safetensors.0a1b2c3d").write_bytes(b"half of it")
    (tmp_path / ".other-step00000008.safetensors.0a1b2c3d").write_bytes(b"somebody else's")
    same(run(tmp_path / "run", resume=True, every=2), run())
    assert [path.name for path in tmp_path.glob(".*")] == [".other-step00000008.safetensors.0a1b2c3d"]


def test_a_damaged_checkpoint_is_passed_over(tmp_path, caplog):
    """Changed bytes and a file that was cut off are noticed; the one before is taken."""
    assert run(tmp_path / "run", stop=7, every=2) is None
    newest = Checkpoints(tmp_path / "run").found()[-1]
    content = bytearray(newest.read_bytes())
    content[-1] ^= 1
    newest.write_bytes(content)
    same(run(tmp_path / "run", resume=True, every=2), run())
    assert "do not fit their checksum; the one before it is tried" in caplog.text
    for path in Checkpoints(tmp_path / "run").found():
        path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(FormatError, match=r"no checkpoint under .* can be read"):
        run(tmp_path / "run", resume=True)


def test_another_version(tmp_path):
    """It is refused with what to do, and older files do not stand in for it."""
    run(tmp_path / "run", every=5)
    path = Checkpoints(tmp_path / "run").found()[-1]
    arrays, metadata = file_format.read(path)
    metadata["weftplan.run"] = json.dumps({**json.loads(metadata["weftplan.run"]), "version": 7})
    file_format.write(path, arrays, metadata)
    with pytest.raises(FormatError, match="is a checkpoint of version 7; this weftplan reads version 1: go on with"):
        run(tmp_path / "run", resume=True)


def test_parameters_are_no_run(tmp_path):
    """A file of parameters under the name of a checkpoint says what it is."""
    save_safetensors(tmp_path / "run-step00000001.safetensors", {"w": mx.nd.ones((2,))}, {})
    with pytest.raises(FormatError, match="holds parameters alone, not a run to go on with"):
        run(tmp_path / "run", resume=True)


def test_another_network(tmp_path):
    """Each parameter that does not fit is listed, and nothing is changed."""
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
    """The differences are listed; with "changed" they are logged, and the settings of now hold."""
    run(tmp_path / "run", num_epoch=1)
    other = {"optimizer_params": {"learning_rate": 0.02, "momentum": 0.9, "wd": 0.5}}
    with pytest.raises(ParameterError, match="was written with other settings") as error:
        run(tmp_path / "run", resume=True, **other)
    assert "optimizer.learning_rate was 0.1, is now 0.02" in str(error.value)
    assert "optimizer.wd was 0.0, is now 0.5" in str(error.value)
    assert "momentum" not in str(error.value)
    changed = run(tmp_path / "run", resume="changed", **other)
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
    """They are named before training."""
    with pytest.raises(ParameterError, match=words):
        run(tmp_path / "run", **settings)
    assert not list(tmp_path.iterdir())


def test_resume_needs_a_prefix():
    """Without one there is nothing to go on from."""
    with pytest.raises(ParameterError, match="resume needs checkpoint=prefix"):
        run(resume=True)


def test_checkpoints_of_an_earlier_run_are_not_mixed_with_new_ones(tmp_path):
    """Without resume they are in the way, and fit says what to do."""
    run(tmp_path / "run", num_epoch=1)
    with pytest.raises(
        ParameterError, match="pass resume=True to go on from it, remove them, or choose another prefix"
    ):
        run(tmp_path / "run", num_epoch=1)


def test_several_processes_are_refused(tmp_path, monkeypatch):
    """They would write one file; the message says what to do instead."""
    monkeypatch.setattr("weftplan.kvstore.KVStoreLocal.num_workers", 2)
    with pytest.raises(MXNetError, match="checkpoint and mixed_precision are for one process"):
        run(tmp_path / "run", devices=2)


def test_training_does_not_wait_for_the_disk(tmp_path, monkeypatch):
    """The next batches run while a checkpoint is being written; the next checkpoint waits for it."""
    writing, go_on, steps = threading.Event(), threading.Event(), []
    real = checkpointing.write_snapshot

    def slow(path, snapshot):
        writing.set()
        assert go_on.wait(60)
        return real(path, snapshot)

    monkeypatch.setattr(checkpointing, "write_snapshot", slow)

    def after(param):
        steps.append(param.nbatch)
        if len(steps) == 4:  # the checkpoint after the second batch is still being written
            assert writing.wait(60)
            assert not list(tmp_path.iterdir())
            go_on.set()

    mx.random.seed(3)
    module = mx.mod.Module(network())
    module.fit(data(), num_epoch=1, batch_end_callback=after, checkpoint=tmp_path / "run", every=2)
    assert [read_snapshot(path).facts["step"] for path in Checkpoints(tmp_path / "run").found()] == [2, 4, 5]
    assert not [thread for thread in threading.enumerate() if thread.name == "weftplan checkpoint"]


def test_a_checkpoint_is_of_its_moment(tmp_path):
    """What later steps do to weights and momentum is not in it, however late it is written."""
    run(tmp_path / "run", every=1, keep=None, num_epoch=1)
    run(tmp_path / "short", every=3, keep=None, stop=3)
    early = {path.name[-13:]: read_snapshot(path) for path in Checkpoints(tmp_path / "run").found()}["3.safetensors"]
    (late,) = (read_snapshot(path) for path in Checkpoints(tmp_path / "short").found())
    for name, value in early.args.items():
        np.testing.assert_array_equal(value.asnumpy(), late.args[name].asnumpy())


def test_ctrl_c_between_batches_leaves_a_checkpoint_of_that_moment(tmp_path):
    """KeyboardInterrupt from a batch-end callback: the run goes on from exactly there."""

    def interrupt(param):
        if param.epoch == 1 and param.nbatch == 2:
            raise KeyboardInterrupt

    mx.random.seed(3)
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
    assert read_snapshot(Checkpoints(tmp_path / "run").found()[-1]).facts["step"] == 8
    resumed = run(tmp_path / "run", resume=True)
    for name, value in run()[0].items():
        np.testing.assert_array_equal(value, resumed[0][name])


def test_early_stopping_and_the_best_so_far(tmp_path):
    """Training ends after `patience` epochs without a better value; the best epoch's parameters are kept."""
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
    again, none = trained(resume=True)
    assert none == []
    assert (again.best, again.best_epoch, again.waited) == (stopping.best, stopping.best_epoch, 2)


def test_early_stopping_of_a_metric_that_there_is_not():
    """The metrics that there are, are named."""
    module = mx.mod.Module(network())
    with pytest.raises(ParameterError, match=r"no metric 'auc'; fit computes \['accuracy'\]"):
        module.fit(data(), num_epoch=1, early_stopping=mx.callback.EarlyStopping("auc"))
