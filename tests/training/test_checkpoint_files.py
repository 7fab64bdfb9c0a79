"""Checkpoint files: retention, damaged files, and writing in the background."""

import errno
import json
import os
import threading
import time

import numpy as np
import pytest

import weftplan as mx
from tests.training.killed_runs import EPOCHS, assert_same_run, data, network, run
from weftplan.convert import load_safetensors, save_safetensors
from weftplan.errors import FormatError, ParameterError
from weftplan.ndarray.formats import safetensors as file_format
from weftplan.training.fit import checkpoint_writer
from weftplan.training.fit.checkpoint_writer import Checkpoints, read_snapshot


def test_how_many_stay(tmp_path):
    """The newest ``keep`` checkpoints remain; ``keep=None`` removes none."""
    run(tmp_path / "few", every=2, keep=2)
    assert [path.name for path in Checkpoints(tmp_path / "few").files()] == [
        "few-step00000014.safetensors",
        "few-step00000015.safetensors",
    ]
    run(tmp_path / "all", every=5, keep=None)
    assert len(Checkpoints(tmp_path / "all").files()) == EPOCHS


def test_parameters_alone_are_read_from_a_checkpoint(tmp_path):
    """load_safetensors, Module.load_params and the safetensors library read the parameters of a checkpoint."""
    expected = run(tmp_path / "run")[0]
    path = Checkpoints(tmp_path / "run").files()[-1]
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
    """If a checkpoint cannot be written, training continues with a warning; only complete files remain."""
    real, full = os.fsync, []

    def fsync(handle):
        if full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(handle)

    monkeypatch.setattr("weftplan.support.atomic_files.os.fsync", fsync)

    def fill(param):
        np.random.random()  # noqa: NPY002 - `run` draws the same numbers, which decide the order of samples
        if param.epoch == 1 and param.nbatch == 0:
            # The writer's queue has room for the checkpoints up to this one.
            while not (tmp_path / "run-step00000004.safetensors").exists():
                time.sleep(0.001)
            full.append(True)

    ended = run(tmp_path / "run", epoch_end_callback=lambda *_: None, every=2, stop=None)
    for path in tmp_path.iterdir():
        path.unlink()
    mx.random.seed(3)
    np.random.seed(3)  # noqa: NPY002 - as `run` does
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
    actual = Checkpoints(tmp_path / "run").files()
    assert sorted(path.name for path in tmp_path.iterdir()) == [path.name for path in actual]
    assert read_snapshot(actual[-1]).facts["step"] == 4
    text = caplog.text
    assert "run-step00000006.safetensors was not written: No space left on device; training goes on" in text
    assert f"the last good one is {actual[-1]}" in text


def test_killed_while_it_writes(tmp_path, monkeypatch):
    """Resuming uses the previous checkpoint, and removes partial files of this prefix but not of other prefixes."""
    assert run(tmp_path / "run", stop=7, every=2) is None
    (tmp_path / ".run-step00000008.safetensors.0a1b2c3d").write_bytes(b"half of it")
    (tmp_path / ".other-step00000008.safetensors.0a1b2c3d").write_bytes(b"of another run")
    assert_same_run(run(tmp_path / "run", resume=True, every=2), run())
    assert [path.name for path in tmp_path.glob(".*")] == [".other-step00000008.safetensors.0a1b2c3d"]


def test_a_damaged_checkpoint_is_passed_over(tmp_path, caplog):
    """If the newest file fails its checksum, resuming uses the previous file; without a valid file it raises."""
    assert run(tmp_path / "run", stop=7, every=2) is None
    newest = Checkpoints(tmp_path / "run").files()[-1]
    content = bytearray(newest.read_bytes())
    content[-1] ^= 1
    newest.write_bytes(content)
    assert_same_run(run(tmp_path / "run", resume=True, every=2), run())
    assert "do not fit their checksum; the one before it is tried" in caplog.text
    for path in Checkpoints(tmp_path / "run").files():
        path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(FormatError, match=r"no checkpoint under .* can be read"):
        run(tmp_path / "run", resume=True)


def test_another_version(tmp_path):
    """A newest checkpoint of another format version raises; resuming does not fall back on older files."""
    run(tmp_path / "run", every=5)
    path = Checkpoints(tmp_path / "run").files()[-1]
    arrays, metadata = file_format.read(path)
    metadata["weftplan.run"] = json.dumps({**json.loads(metadata["weftplan.run"]), "version": 7})
    file_format.write(path, arrays, metadata)
    with pytest.raises(FormatError, match="is a checkpoint of version 7; this weftplan reads version 1: go on with"):
        run(tmp_path / "run", resume=True)


def test_parameters_are_no_run(tmp_path):
    """A parameter file with a checkpoint's name is refused: it has no run state."""
    save_safetensors(tmp_path / "run-step00000001.safetensors", {"w": mx.nd.ones((2,))}, {})
    with pytest.raises(FormatError, match="holds parameters alone, not a run to go on with"):
        run(tmp_path / "run", resume=True)


def test_checkpoints_of_an_earlier_run_are_not_mixed_with_new_ones(tmp_path):
    """If checkpoints with the prefix exist, fit without ``resume`` raises, and the error lists the remedies."""
    run(tmp_path / "run", num_epoch=1)
    with pytest.raises(
        ParameterError, match="pass resume=True to go on from it, remove them, or choose another prefix"
    ):
        run(tmp_path / "run", num_epoch=1)


def test_training_does_not_wait_for_the_disk(tmp_path, monkeypatch):
    """Batches run while a checkpoint is written; when fit returns, every checkpoint is complete."""
    writing, go_on, steps = threading.Event(), threading.Event(), []
    real = checkpoint_writer.write_snapshot

    def slow(path, snapshot):
        writing.set()
        assert go_on.wait(60)
        return real(path, snapshot)

    monkeypatch.setattr(checkpoint_writer, "write_snapshot", slow)

    def after(param):
        steps.append(param.nbatch)
        if len(steps) == 4:  # the checkpoint after the second batch is still being written
            assert writing.wait(60)
            assert not list(tmp_path.iterdir())
            go_on.set()

    mx.random.seed(3)
    module = mx.mod.Module(network())
    module.fit(data(), num_epoch=1, batch_end_callback=after, checkpoint=tmp_path / "run", every=2)
    assert [read_snapshot(path).facts["step"] for path in Checkpoints(tmp_path / "run").files()] == [2, 4, 5]
    assert not [thread for thread in threading.enumerate() if thread.name == "weftplan checkpoint"]


def test_a_checkpoint_is_of_its_moment(tmp_path):
    """A checkpoint has the weights of its step: a run that continues and a run killed there save equal weights."""
    run(tmp_path / "run", every=1, keep=None, num_epoch=1)
    run(tmp_path / "short", every=3, keep=None, stop=3)
    early = {path.name[-13:]: read_snapshot(path) for path in Checkpoints(tmp_path / "run").files()}["3.safetensors"]
    (late,) = (read_snapshot(path) for path in Checkpoints(tmp_path / "short").files())
    for name, value in early.args.items():
        np.testing.assert_array_equal(value.asnumpy(), late.args[name].asnumpy())
